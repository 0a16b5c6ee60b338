"""Tags of a test's own: names that no other has, and what they hold at its end."""

from __future__ import annotations


class Tags:
    """Makes names that no other test uses."""

    _made = 0

    def __init__(self, prefix: str) -> None:
        self.prefix = prefix
        self.names: list[str] = []

    def __call__(self, name: str = "tag") -> str:
        Tags._made += 1
        self.names.append(f"{name}-{self.prefix}-{Tags._made}"[:100])
        return self.names[-1]


def leftovers(names: list[str]) -> list[str]:
    """Resumes the tags, gives back their host memory, and says what they still hold."""
    import memsaver

    mine = set(names)
    for row in memsaver.stats().tags:
        if row.tag in mine and row.state != memsaver.State.MAPPED:
            memsaver.resume(row.tag)
    memsaver.trim(wait=True)
    return [
        f"{row.tag}: {row.allocations} allocations, {row.resident_bytes} resident, "
        f"{row.host_bytes} pinned"
        for row in memsaver.stats().tags
        if row.tag in mine and (row.allocations or row.resident_bytes or row.host_bytes)
    ]
