"""Checks of NCCL settings that affect memory whose physical pages change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from memsaver.cli.bare_driver import BareDriver
from memsaver.cli.checks.findings import Finding, absent, good, warned
from memsaver.errors import ConfigError, MemsaverError

if TYPE_CHECKING:  # mypy knows the folder integrations/ as the package `integrations`
    from integrations.sglang import settings
else:
    from memsaver.integrations.sglang import settings

__all__ = ["check_nccl"]

GRAPH_REGISTER = "NCCL_GRAPH_REGISTER"
LOCAL_REGISTER = "NCCL_LOCAL_REGISTER"
REGISTER_HOOK = "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK"


def check_nccl() -> list[Finding]:
    """Check the environment and NCCL's configuration files. The environment has priority."""
    values = _configured()
    found = [_graph_register(values)]
    if _is_on(os.environ.get(REGISTER_HOOK)):
        found.append(
            warned(
                REGISTER_HOOK,
                "on: NCCL registers torch's memory, including that of regions, and continues to "
                "use the pages that a pause releases",
                "unset it, or deregister the memory in memsaver.on_pause",
                value=os.environ.get(REGISTER_HOOK),
            )
        )
    for name, meaning in _OTHERS.items():
        if name in values:
            value, source = values[name]
            text = f"{value}, from {source}: {meaning}"
            found.append(good(name, text, value=value, source=source))
    return found


_OTHERS = {
    LOCAL_REGISTER: "whether buffers that a program registers itself are used directly; "
    "deregister those of regions in memsaver.on_pause",
    "NCCL_CUMEM_ENABLE": "whether NCCL's own buffers are virtual memory; no pause affects them. "
    "All ranks on a host need the same value, including the ranks of an engine that receives "
    "weights through NCCL",
    "NCCL_NVLS_ENABLE": "whether NVLink SHARP is used, whose buffers no pause releases",
    "NCCL_WIN_ENABLE": "whether memory may be registered as windows; deregister those of regions "
    "in memsaver.on_pause",
}


def _graph_register(values: dict[str, tuple[str, str]]) -> Finding:
    """Check NCCL_GRAPH_REGISTER, because its registrations outlive the pages of paused memory."""
    value, source = values.get(GRAPH_REGISTER, (None, None))
    data = {"value": value, "source": source}
    means = "collectives in a captured graph continue to use pages that a pause releases"
    advice = "set it to 0 if graphs with collectives, or the memory that they use, can be paused"
    if value is None:
        if _plugin_sets_it():
            text = "not set: memsaver sets it to 0 in SGLang's processes, for pausable graphs"
            return good(GRAPH_REGISTER, text, **data)
        text = "not set, and current NCCL's default is 1"
        if _device_count() < 2:
            return absent(GRAPH_REGISTER, f"{text}: irrelevant for a single GPU", **data)
        return warned(GRAPH_REGISTER, f"{text}: {means}", advice, **data)
    if _is_on(value):
        return warned(GRAPH_REGISTER, f"{value}, from {source}: {means}", advice, **data)
    text = f"{value}, from {source}: graphs with collectives can be paused"
    return good(GRAPH_REGISTER, text, **data)


def _plugin_sets_it() -> bool:
    try:
        return bool(settings.is_on() and settings.graphs_are_pausable())
    except ConfigError:  # SGLang does not load the plugin
        return False


def _device_count() -> int:
    try:
        return BareDriver().device_count()
    except MemsaverError:  # a driver error; `check_driver` gives the advice
        return 0


def _is_on(value: str | None) -> bool:
    return value is not None and value.strip().lower() not in ("", "0", "false", "off")


def _configured() -> dict[str, tuple[str, str]]:
    """Return each variable's value and its source, which is the environment or a file."""
    own = os.environ.get("NCCL_CONF_FILE") or os.path.expanduser("~/.nccl.conf")
    values: dict[str, tuple[str, str]] = {}
    for file in ("/etc/nccl.conf", own):
        try:
            lines = Path(file).read_text(errors="replace").splitlines()
        except OSError:
            continue
        for line in lines:
            name, equals, value = line.partition("#")[0].partition("=")
            if equals:
                values[name.strip()] = value.strip(), file
    for name, value in os.environ.items():
        if name.startswith("NCCL_"):
            values[name] = value, "the environment"
    return values
