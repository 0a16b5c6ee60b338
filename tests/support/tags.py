"""A test's own tags: unique names, and a check for leftovers when the test ends."""

from __future__ import annotations


class Tags:
    """Creates names that no other test uses."""

    _made = 0

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: list[str] = []

    def __call__(self, name: str = "tag") -> str:
        Tags._made += 1
        self.names.append(f"{name}-{Tags._made}-{self.prefix}"[:50])  # errors shorten 61 bytes
        return self.names[-1]


def leftovers(names: list[str]) -> list[str]:
    """Resume the tags, release their host memory, and describe any memory that is not released."""
    import memsaver
    from memsaver._runtime.native import _C, STATES

    for name in names:
        # Not state(): for each name that no region used, it would search for similar tags.
        if any(STATES[row["state"]] != "mapped" for row in _C.stats(name)):
            memsaver.resume(name)
    memsaver.trim(wait=True)
    kinds = ("allocations", "resident_bytes", "host_bytes")
    return [
        f"{row['tag']}: " + ", ".join(f"{row[kind]} {kind}" for kind in kinds)
        for name in names
        for row in _C.stats(name)  # stats() includes all tests' tags: thousands
        if any(row[kind] for kind in kinds)
    ]
