"""SGLang's own weight updater with its release and resume handlers, in any version of SGLang."""

from __future__ import annotations

import contextlib
import inspect
from types import SimpleNamespace

try:
    from sglang.srt import runtime_context
except ImportError:  # older versions
    runtime_context = None

try:
    from sglang.srt.managers.scheduler_components import weight_updater

    Mixin = object
except ImportError:  # older versions, whose handlers are a mixin
    from sglang.srt.managers.scheduler_update_weights_mixin import (
        SchedulerUpdateWeightsMixin as Mixin,
    )

    weight_updater = None

__all__ = ["Mixin", "published", "updater_of", "weight_updater"]


@contextlib.contextmanager
def published(**arguments):
    """Publish SGLang's arguments and a one-rank group in the block, as newer versions require."""
    context = runtime_context and runtime_context.get_context()
    if not hasattr(context, "override_server_args"):
        assert not arguments
        yield
        return
    parallel = runtime_context.get_parallel()
    ranks = {"tp_group": SimpleNamespace(cpu_group=None), "num_dp_ranks": 1, "tp_rank": 0}
    known = getattr(runtime_context, "_parallel_fields", frozenset)()
    with context.override_server_args(**arguments):
        with parallel.override(**{name: ranks[name] for name in known & ranks.keys()}):
            yield


def updater_of(**parts):
    """Return SGLang's weight updater for a one-rank group. Newer versions require `published`."""
    kind = weight_updater.SchedulerWeightUpdaterManager
    known = inspect.signature(kind).parameters.keys()
    parts["tp_cpu_group"] = None
    return kind(**{name: part for name, part in parts.items() if name in known})
