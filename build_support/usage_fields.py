"""Generate the attributes of TagStats from MS_USAGE_FIELDS: `python build_support/usage_fields.py`.

Run this program after each change to this list in csrc/memsaver_inspection.h. The program generates
the attributes of TagStats in memsaver/_inspection/statistics.py, with their types and
documentation. A test compares the list with the attributes.
"""

from __future__ import annotations

import re
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = ROOT / "csrc" / "memsaver_inspection.h"
MODULE = ROOT / "memsaver" / "_inspection" / "statistics.py"

PYTHON_TYPES = {"uint64_t": "int", "double": "float"}
FIELD = re.compile(r'X\((\w+), (\w+),((?:\s*"[^"]*")+)\)')
# The last hand-written lines of TagStats: the generated attributes and fields follow them.
LAST_ATTRIBUTE = "        backup: the tag's policy.\n"
LAST_FIELD = "    backup: Backup\n"


def fields(header: str) -> list[tuple[str, str, str]]:
    """Return the C type, the name and the meaning of each field, in the order of the list."""
    start = header.index("#define MS_USAGE_FIELDS(X)")
    text = header[start : header.index("\n\n", start)].replace("\\\n", "\n")
    found = FIELD.findall(text)
    return [(kind, name, "".join(re.findall(r'"([^"]*)"', said))) for kind, name, said in found]


def written(module: str, header: str) -> str:
    """Return the module's text with the attributes and fields from the header's list."""
    attributes, members = "", ""
    for kind, name, meaning in fields(header):
        attributes += textwrap.fill(
            f"{name}: {meaning}.",
            width=100,
            initial_indent=" " * 8,
            subsequent_indent=" " * 12,
        )
        attributes += "\n"
        members += f"    {name}: {PYTHON_TYPES[kind]}\n"
    module = _replaced(module, LAST_ATTRIBUTE, attributes)
    return _replaced(module, LAST_FIELD, members)


def _replaced(text: str, before: str, made: str) -> str:
    """Return the text with `made` inserted between the line `before` and the next empty line."""
    start = text.index(before) + len(before)
    return text[:start] + made + text[text.index("\n\n", start) + 1 :]


def main() -> int:
    """Write the module."""
    MODULE.write_text(written(MODULE.read_text(), HEADER.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
