"""The versions of SGLang that the plugin supports."""

from __future__ import annotations

import re

__all__ = ["doubt", "is_too_old"]

TRIED = ("0.5.16",)  # tested with a running engine
READ = ("0.5.12", "0.5.23")  # source code reviewed
PLUGINS_SINCE = "0.5.11"


def doubt(version: str) -> str | None:
    """Return a warning for users of this version of SGLang, or None.

    A post release or a local version counts as its release.
    """
    release = _release(version)
    if release in [_release(known) for known in (*TRIED, *READ)]:
        return None
    if is_too_old(version):
        return (
            f"SGLang {version} has no plugin system (it came with {PLUGINS_SINCE}): install "
            "memsaver's drop-in package for the import name torch_memory_saver instead, from "
            "integrations/torch_memory_saver in memsaver's source tree"
        )
    return (
        f"memsaver was not tested with SGLang {version} (tested: {', '.join(TRIED)}; source "
        f"reviewed: {', '.join(READ)}). If memory is not released or the engine misbehaves, set "
        "MEMSAVER_SGLANG=0 to use SGLang without memsaver, and report it"
    )


def is_too_old(version: str) -> bool:
    """Return whether a version lacks plugins. A development version is never too old."""
    release = _release(version)
    return bool(release) and release < _release(PLUGINS_SINCE)


def _release(version: str) -> tuple[int, ...]:
    """Return a release's version numbers; an empty tuple for a development version."""
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?", version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()
