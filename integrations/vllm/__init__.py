"""memsaver as vLLM's sleep mode allocator.

With memsaver installed, an unmodified vLLM with `enable_sleep_mode=True` allocates its weights and
its KV cache through memsaver, and sleeps and wakes up through it, in every worker; nothing has to
be imported or configured. `memsaver.integrations.vllm.plugin` describes the mechanism, and
`memsaver.integrations.vllm.settings` the variables that configure it.

A program that drives an engine imports from this package: `SleepController`, its status and
reports, and the errors that it raises in addition to memsaver's own. The other modules implement
`memsaver.integrations.engine` for vLLM.

Importing this package imports neither vLLM nor torch. It does not replace the name `vllm`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..lazy import exports

if TYPE_CHECKING:
    from ..engine.errors import (
        EngineAsleepError,
        EngineBusyError,
        EngineDiedError,
        EngineError,
        EngineTimeoutError,
    )
    from ..engine.launcher import Connector, Launcher
    from ..engine.reports import SleepReport, Step
    from ..engine.status import Status
    from . import backend, launch
    from .sleep import SleepController

    _launcher: Launcher = launch
    _connector: Connector = backend

__all__ = [
    "EngineAsleepError",
    "EngineBusyError",
    "EngineDiedError",
    "EngineError",
    "EngineTimeoutError",
    "SleepController",
    "SleepReport",
    "Status",
    "Step",
]

# Imported at their first use: vLLM's processes import only the plugin from this package.
__getattr__, __dir__ = exports(
    __name__,
    {
        "EngineAsleepError": "..engine.errors",
        "EngineBusyError": "..engine.errors",
        "EngineDiedError": "..engine.errors",
        "EngineError": "..engine.errors",
        "EngineTimeoutError": "..engine.errors",
        "SleepController": ".sleep",
        "SleepReport": "..engine.reports",
        "Status": "..engine.status",
        "Step": "..engine.reports",
    },
)
