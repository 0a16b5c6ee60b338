"""Short looks at what the library says of a test's tags and blocks."""

from __future__ import annotations

import memsaver


def row_of(name, device=0):
    """A tag's row of the statistics, on one device."""
    return next(row for row in memsaver.stats()[name] if row.device == device)


def addresses(blocks):
    return [block.address for block in blocks]
