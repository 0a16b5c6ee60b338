"""Checks of the libraries that the dynamic linker preloads, and of their order."""

from __future__ import annotations

import os
import re
from pathlib import Path

from memsaver._memory.preload import CORE, LIBRARY, is_preloaded
from memsaver._runtime.native import LIBRARY_DIR, backup_code
from memsaver.cli.checks.findings import Finding, absent, bad, good, warned
from memsaver.cli.checks.system import installed_version, read_system_file
from memsaver.errors import ConfigError

__all__ = ["check_preloading"]

OURS = "memsaver"
ANOTHER = "another memsaver's"
DROP_IN = "torch_memory_saver, provided by memsaver"
ORIGINAL = "torch_memory_saver's own"
OTHER = "other"

_SEPARATORS = re.compile(r"[:\s]+")


def check_preloading() -> list[Finding]:
    """Check LD_PRELOAD and /etc/ld.so.preload, in the linker's order, and MEMSAVER_TAG."""
    system = read_system_file("/etc/ld.so.preload") or ""
    named = [entry for entry in _SEPARATORS.split(os.environ.get("LD_PRELOAD", "")) if entry]
    named += [entry for entry in _SEPARATORS.split(system) if entry]
    kinds = [(entry, _kind(entry)) for entry in named]
    if not kinds:
        text = "nothing"
        advice = "torch mode needs nothing; `memsaver run -- command` preloads a command"
        found = [absent("preloaded", text, advice, libraries=[])]
    else:
        found = [_order(kinds)]
        found += [finding for entry, kind in kinds for finding in _entry(entry, kind)]
    return [*found, *_tag([kind for _, kind in kinds])]


def _kind(entry: str) -> str:
    name = os.path.basename(entry)
    if name in (LIBRARY, CORE):
        here = os.path.realpath(LIBRARY_DIR / name)
        return OURS if os.path.realpath(entry) == here or entry == name else ANOTHER
    if name.startswith("torch_memory_saver_hook_mode"):
        version = installed_version("torch-memory-saver") or ""
        return DROP_IN if "+memsaver" in version else ORIGINAL
    return OTHER


def _order(kinds: list[tuple[str, str]]) -> Finding:
    """Check the order of the libraries, because the first definition of a function takes effect."""
    shown = [entry if kind == OTHER else f"{entry} ({kind})" for entry, kind in kinds]
    text = ", then ".join(shown)
    libraries = [{"path": entry, "kind": kind} for entry, kind in kinds]
    hooks = [kind for _, kind in kinds if kind != OTHER]
    if ORIGINAL in hooks and len(set(hooks)) > 1:
        return bad(
            "preloaded",
            f"{text}: both memsaver and torch_memory_saver intercept cudaMalloc; "
            "only the first takes effect",
            "preload only one of them: remove the other from LD_PRELOAD",
            libraries=libraries,
        )
    return good("preloaded", text, libraries=libraries)


def _entry(entry: str, kind: str) -> list[Finding]:
    name = f"preloaded {os.path.basename(entry)}"
    has_folder = "/" in entry
    if has_folder and not os.path.exists(entry):
        text = f"{entry} does not exist: the linker continues without it"
        return [warned(name, text, "correct LD_PRELOAD")]
    if kind == ANOTHER:
        return [
            bad(
                name,
                f"another installation's; Python imports memsaver from {LIBRARY_DIR}",
                "start the process with this installation's `memsaver run`",
            )
        ]
    if kind == OURS and has_folder and not (Path(entry).parent / CORE).is_file():
        text = f"{CORE} is missing beside it: every process that preloads it ends at once"
        return [bad(name, text, "unset LD_PRELOAD and reinstall memsaver")]
    if kind == ORIGINAL:
        advice = "`memsaver run -- command` preloads memsaver instead"
        return [warned(name, "torch_memory_saver serves this process's allocations", advice)]
    return []


def _tag(kinds: list[str]) -> list[Finding]:
    """Check the process-wide tag, which needs the hooks."""
    tag, backup = os.environ.get("MEMSAVER_TAG"), os.environ.get("MEMSAVER_BACKUP")
    if backup:
        try:
            backup_code(backup)
        except ConfigError as error:
            return [bad("process tag", f"MEMSAVER_BACKUP: {error}", "correct it or unset it")]
    if not tag:
        if backup:
            text = f"MEMSAVER_BACKUP={backup} has no effect without MEMSAVER_TAG"
            return [warned("process tag", text, "set both, as `memsaver run --tag` does")]
        return []
    data = {"tag": tag, "backup": backup or "none"}
    if not is_preloaded():
        text = f"MEMSAVER_TAG={tag} has no effect: memsaver is not preloaded"
        if OURS in kinds or DROP_IN in kinds:
            text += ", although LD_PRELOAD names it: the dynamic linker did not find the library"
            advice = "start the process with `memsaver run --tag`, which passes the full path"
            return [bad("process tag", text, advice, **data)]
        advice = "start the process with `memsaver run --tag`, or unset it"
        return [warned("process tag", text, advice, **data)]
    text = f"all memory outside regions belongs to the tag {tag!r}"
    return [good("process tag", f"{text}, backup {data['backup']}", **data)]
