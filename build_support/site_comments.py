"""A hook of mkdocs: show on the site what the pages contain in comments that begin with `site`.

Directives and included files, which only the site expands, are not shown in the repository.
"""

from __future__ import annotations

import re

_COMMENT = re.compile(r"^<!-- site\n(.*?)^-->\n", re.M | re.S)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the page's text without the marks of these comments."""
    return _COMMENT.sub(r"\1", markdown)
