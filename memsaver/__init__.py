"""Release GPU memory and keep its addresses: pause and resume tensors by tag.

    with memsaver.region("weights", backup="host"):
        model = build_model()
    memsaver.pause("weights")      # releases the device memory for other users
    memsaver.resume("weights")     # same addresses, same bytes

Importing memsaver creates no CUDA context and imports neither torch nor numpy.
"""

import typing as _typing

from memsaver import metrics as metrics  # memsaver.metrics.register()
from memsaver._inspection.explanations import Explanation, explain
from memsaver._inspection.fingerprints import fingerprint
from memsaver._inspection.statistics import (
    Deferred,
    Range,
    Stats,
    TagStats,
    device_memory,
    ranges,
    stats,
)
from memsaver._inspection.timelines import Timeline, timeline
from memsaver._memory.backups import Trim, backup_view, trim
from memsaver._memory.device_processes import DeviceProcess
from memsaver._memory.graphs import graph
from memsaver._memory.mempools import torch_pool
from memsaver._memory.preload import is_preloaded, preload, preload_env
from memsaver._memory.regions import disabled, region
from memsaver._memory.shortages import Holder
from memsaver._runtime.native import _C, Backup, State
from memsaver._runtime.settings import Options, configure, options
from memsaver._runtime.variables import warn_of_misspelt_variables as _warn_of_misspelt_variables
from memsaver._transitions.observers import on_pause, on_resume
from memsaver._transitions.transitions import (
    Change,
    Report,
    Transition,
    pause,
    paused,
    resume,
    state,
    swap,
)
from memsaver.errors import (
    BackupError,
    ConfigError,
    DriverError,
    InvalidStateError,
    MemsaverError,
    MemsaverWarning,
    NotLoadedError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
    PerformanceWarning,
    SharingError,
    TagSharedError,
    UnknownTagError,
    UsageWarning,
)

__version__ = _C.version()

__all__ = [
    "Backup",
    "BackupError",
    "Change",
    "ConfigError",
    "Deferred",
    "DeviceProcess",
    "DriverError",
    "Explanation",
    "Holder",
    "InvalidStateError",
    "MemsaverError",
    "MemsaverWarning",
    "NotLoadedError",
    "Options",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "PerformanceWarning",
    "Range",
    "Report",
    "SharingError",
    "State",
    "Stats",
    "TagSharedError",
    "TagStats",
    "Timeline",
    "Transition",
    "Trim",
    "UnknownTagError",
    "UsageWarning",
    "backup_view",
    "configure",
    "device_memory",
    "disabled",
    "explain",
    "fingerprint",
    "graph",
    "is_preloaded",
    "on_pause",
    "on_resume",
    "options",
    "pause",
    "paused",
    "preload",
    "preload_env",
    "ranges",
    "region",
    "resume",
    "state",
    "stats",
    "swap",
    "timeline",
    "torch_pool",
    "trim",
]

# Pickles and help() contain this name, which stays the same if an internal module moves.
for _name in __all__:
    if globals()[_name].__module__.startswith("memsaver._"):
        globals()[_name].__module__ = "memsaver"
del _name

_warn_of_misspelt_variables()

if not _typing.TYPE_CHECKING:  # type checkers would take any name for an attribute

    def __getattr__(name: str) -> object:
        from memsaver._runtime.guesses import missing

        raise missing(name, __all__)
