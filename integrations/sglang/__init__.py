"""memsaver under SGLang.

With memsaver installed, an unmodified SGLang (0.5.11 or newer) uses it as its memory saver in every
process of an engine that has `enable_memory_saver=True`; nothing has to be imported or configured,
and torch_memory_saver is not needed. `memsaver.integrations.sglang.plugin` says how, and
`memsaver.integrations.sglang.settings` how to turn it off.

What is imported from here is for whoever drives an engine: `SleepController`, what it says, and
what it raises beside memsaver's own errors.

Importing this imports neither SGLang nor torch. It is no replacement of the name `sglang`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsaver.integrations.sglang.errors import (
        EngineBusyError,
        EngineError,
        EngineTimeoutError,
    )
    from memsaver.integrations.sglang.reports import SleepReport, Step
    from memsaver.integrations.sglang.sleep import SleepController
    from memsaver.integrations.sglang.status import Status

__all__ = [
    "EngineBusyError",
    "EngineError",
    "EngineTimeoutError",
    "SleepController",
    "SleepReport",
    "Status",
    "Step",
]

# Imported when asked for: SGLang's processes load the plugin beside them, and none of them.
_HOMES = {
    "EngineBusyError": "errors",
    "EngineError": "errors",
    "EngineTimeoutError": "errors",
    "SleepController": "sleep",
    "SleepReport": "reports",
    "Status": "status",
    "Step": "reports",
}


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value  # found without this from now on
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
