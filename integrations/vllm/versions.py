"""The versions of vLLM that the plugin supports."""

from __future__ import annotations

import re

__all__ = ["SIMULATED", "TRIED", "refusal"]

TRIED = ("0.26.0",)  # tested with a running engine
# Tested on the simulated driver with vLLM's own worker and allocator: `make recipes`.
SIMULATED = (
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
)


def refusal(version: str) -> str | None:
    """Return the reason why this version of vLLM must keep its own allocator; None if supported.

    A version counts as tested if a release with the same first two numbers was tested.
    """
    series = _series(version)
    known = [_series(one) for one in (*TRIED, *SIMULATED)]
    if series is not None and series in known:
        return None
    return (
        f"memsaver was not tested with vLLM {version} (tested: "
        f"{', '.join(sorted({*TRIED, *SIMULATED}, key=_numbers))}), so vLLM keeps its own sleep "
        "mode allocator"
    )


def _series(version: str) -> tuple[int, ...] | None:
    """Return a release's first two numbers; None for a development version."""
    found = re.fullmatch(r"v?(\d+)\.(\d+)(?:\.\d+)*(?:\.post\d+)?(?:\+.*)?", version.strip())
    return (int(found[1]), int(found[2])) if found else None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))
