"""Give GPU memory back without losing its addresses: pause and resume tensors, tag by tag.

    with memsaver.region("weights", backup="host"):
        model = build_model()
    memsaver.pause("weights")      # the device memory is free for somebody else
    memsaver.resume("weights")     # same addresses, same bytes

Importing this starts no CUDA context and imports neither torch nor numpy.
"""

from memsaver import metrics as metrics  # memsaver.metrics.register()
from memsaver.backups import Trim, backup_view, trim
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
    UnknownTagError,
)
from memsaver.explanations import Explanation, explain
from memsaver.fingerprints import fingerprint
from memsaver.graphs import graph
from memsaver.mempools import torch_pool
from memsaver.native import _C, Backup, State
from memsaver.observers import on_pause, on_resume
from memsaver.preload import is_preloaded, preload, preload_env
from memsaver.regions import disabled, region
from memsaver.shortages import DeviceProcess, Holder
from memsaver.statistics import (
    Range,
    Stats,
    TagStats,
    configure,
    device_memory,
    ranges,
    stats,
)
from memsaver.timelines import Timeline, timeline
from memsaver.transitions import Change, Report, Transition, pause, paused, resume, state, swap

__version__ = _C.version()

__all__ = [
    "Backup",
    "BackupError",
    "Change",
    "ConfigError",
    "DeviceProcess",
    "DriverError",
    "Explanation",
    "Holder",
    "InvalidStateError",
    "MemsaverError",
    "MemsaverWarning",
    "NotLoadedError",
    "OutOfDeviceMemoryError",
    "OutOfHostMemoryError",
    "PerformanceWarning",
    "Range",
    "Report",
    "State",
    "Stats",
    "TagStats",
    "Timeline",
    "Transition",
    "Trim",
    "UnknownTagError",
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
