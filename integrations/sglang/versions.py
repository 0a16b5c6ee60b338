"""Which versions of SGLang the plugin was made for."""

from __future__ import annotations

import re

__all__ = ["doubt", "is_too_old"]

TRIED = ("0.5.16",)  # its engine was run
READ = ("0.5.12", "0.5.23")  # its source was followed
PLUGINS_SINCE = "0.5.11"


def doubt(version: str) -> str | None:
    """What a user of this SGLang should be told, if anything.

    A post release or a local version counts as the release that it belongs to.
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
        f"memsaver was not tried with SGLang {version} (tried: {', '.join(TRIED)}; source read: "
        f"{', '.join(READ)}). If memory is not given back or the engine misbehaves, set "
        "MEMSAVER_SGLANG=0 to use SGLang without memsaver, and report it"
    )


def is_too_old(version: str) -> bool:
    """Whether it has no plugins, nor what came with them. A development version is not too old."""
    release = _release(version)
    return bool(release) and release < _release(PLUGINS_SINCE)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a release; empty for a development version, which is like no other."""
    found = re.fullmatch(r"v?(\d+(?:\.\d+)*)(?:\.post\d+)?(?:\+.*)?", version.strip())
    return tuple(map(int, found[1].split("."))) if found else ()
