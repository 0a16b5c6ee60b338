"""memsaver as SGLang's memory saver.

If memsaver is installed, an unmodified SGLang (0.5.11 or newer) uses it as its memory saver in
every process of an engine with `enable_memory_saver=True`. No import or configuration is needed,
nor is torch_memory_saver. `memsaver.integrations.sglang.plugin` describes the mechanism.
`memsaver.integrations.sglang.settings` describes the environment variables that configure memsaver
or turn it off.

A program that controls an engine imports `SleepController` from this package. The package also
exports the controller's status, its reports, and the errors that it raises in addition to
memsaver's own errors. The other modules implement `memsaver.integrations.engine` for SGLang.

Importing this package imports neither SGLang nor torch. The name `sglang` still refers to SGLang's
own package.
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
    from ..engine.launcher import Connector, NodeLauncher
    from ..engine.reports import SleepReport, Step
    from ..engine.status import Status
    from . import backend, launch
    from .sleep import SleepController

    _launcher: NodeLauncher = launch
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

# Imported on first use: SGLang's processes import only the plugin from this package.
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
