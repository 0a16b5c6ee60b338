"""Exemptions from the rules, with their reasons. The same list is in csrc/DESIGN.md."""

from __future__ import annotations

from dataclasses import dataclass

from faults.injections import Injection


@dataclass(frozen=True)
class Exempt:
    """Faults under which some counters of `Machine.totals` can exceed their earlier values."""

    reason: str
    calls: frozenset[str]
    figures: frozenset[str]
    forever_only: bool

    def covers(self, injection: Injection, figure: str) -> bool:
        return (
            injection.call in self.calls
            and figure in self.figures
            and (injection.forever or not self.forever_only)
        )


EXEMPT = [
    Exempt(
        "a driver that refuses twice to destroy a stream or an event is not asked again",
        frozenset({"cuStreamDestroy", "cuEventDestroy"}),
        frozenset({"streams", "events"}),
        forever_only=True,
    ),
    Exempt(
        "a context that cannot be entered is taken for gone, and what was in it with it",
        frozenset({"cuCtxPushCurrent"}),
        frozenset({"streams", "events"}),
        forever_only=True,
    ),
    Exempt(
        "addresses of the host that the kernel does not take back are not asked about again",
        frozenset({"munmap"}),
        frozenset({"mapped_bytes"}),
        forever_only=False,
    ),
]

# If these driver calls fail, device memory that belongs to no tag exists until the next transition
# or allocation releases it. Until that time, the driver counts more memory than the tags.
DEFERRED = frozenset({"cuMemRelease", "cuMemUnmap"})


def allowed(injection: Injection, figure: str) -> bool:
    return any(exempt.covers(injection, figure) for exempt in EXEMPT)
