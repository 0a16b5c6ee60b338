"""memsaver as vLLM's sleep mode allocator.

If memsaver is installed, every worker of an unmodified vLLM with `enable_sleep_mode=True` uses
memsaver to allocate weights and the KV cache, to sleep and to wake up. No import or configuration
is needed. `memsaver.integrations.vllm.plugin` describes the mechanism.
`memsaver.integrations.vllm.settings` describes the environment variables that configure it.

A program that controls an engine imports the following from this package: `SleepController`, its
status and reports, and the errors that it raises in addition to memsaver's own errors. The other
modules implement `memsaver.integrations.engine` for vLLM.

Importing this package imports neither vLLM nor torch. The name `vllm` still refers to vLLM's own
package.
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

# Imported on first use: vLLM's processes import only the plugin from this package.
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
