"""A mkdocs hook that uncomments the HTML comments that begin with `site`.

These comments contain directives and included files. Only the site can expand the directives, so
the comments hide the directives from readers of the repository.
"""

from __future__ import annotations

import re

_COMMENT = re.compile(r"^<!-- site\n(.*?)^-->\n", re.M | re.S)


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of the page without the delimiters of these comments."""
    return _COMMENT.sub(r"\1", markdown)
