"""The versions of SGLang that the plugin supports."""

from __future__ import annotations

import re

__all__ = ["doubt", "is_too_old", "selects_models"]

TRIED = ("0.5.16",)  # tested with a running engine
# Tested on the simulated driver with SGLang's own handlers and messages: `make recipes`.
SIMULATED = tuple(f"0.5.{number}" for number in range(11, 24))
PLUGINS_SINCE = "0.5.11"
SELECTORS_SINCE = "0.5.21"


def doubt(version: str) -> str | None:
    """Return a warning for users of this version of SGLang, or None.

    A post release or a local version counts as the release on which it is based.
    """
    release = _release(version)
    if release in [_release(known) for known in (*TRIED, *SIMULATED)]:
        return None
    if is_too_old(version):
        return (
            f"SGLang {version} has no plugin system (it came with {PLUGINS_SINCE}): install "
            "memsaver's drop-in package for the import name torch_memory_saver instead, from "
            "integrations/torch_memory_saver in memsaver's source tree"
        )
    return (
        f"memsaver was not tested with SGLang {version} (tested with a running engine: "
        f"{', '.join(TRIED)}; its handlers alone: {SIMULATED[0]} to {SIMULATED[-1]}). If memory is "
        "not released or the engine misbehaves, set MEMSAVER_SGLANG=0 to use SGLang without "
        "memsaver, and report it"
    )


def is_too_old(version: str) -> bool:
    """Return whether a version is too old to load plugins; False for development versions."""
    return _is_before(version, PLUGINS_SINCE)


def selects_models(version: str | None) -> bool:
    """Return whether update requests select the models that receive the weights.

    The models are the engine's main model and its draft model. Returns False for an unknown
    version.
    """
    return version is not None and not _is_before(version, SELECTORS_SINCE)


def _is_before(version: str, other: str) -> bool:
    release = _release(version)
    return bool(release) and release < _release(other)


def _release(version: str) -> tuple[int, ...]:
    """Return a release's version numbers; an empty tuple for a development version."""
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?", version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()
