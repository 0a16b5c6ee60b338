"""Determine the tags whose memory each request to vLLM's engine core needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memsaver.errors import ConfigError

from ..engine.tags import KV_CACHE, WEIGHTS
from .protocol import (
    BEGIN,
    END,
    INFO,
    LOAD,
    RANK_STATE,
    RELEASE,
    RESUME,
    STATE,
    VERSION,
    WORKER_CALLS,
)

__all__ = [
    "CHANGES",
    "DIRECT",
    "FINISH",
    "MODEL",
    "RELOAD",
    "START",
    "START_DRAFT",
    "UPDATE_CALLS",
    "Need",
    "check_level",
    "is_known",
    "is_query",
    "need_of",
]

MODEL = frozenset({KV_CACHE, WEIGHTS})
_WEIGHTS = frozenset({WEIGHTS})
# Calls through collective_rpc that release or resume memory: methods of vLLM's workers, and
# memsaver's own calls.
DIRECT = ("sleep", "wake_up", "discard")
CHANGES = (*DIRECT, RELEASE, RESUME)
# vLLM's own calls that begin or end a weight update.
START, START_DRAFT = "start_weight_update", "start_draft_weight_update"
FINISH, RELOAD = "finish_weight_update", "reload_weights"
UPDATE_CALLS = (START, START_DRAFT, FINISH, RELOAD)
_LEVELS = (0, 1, 2)
_RPC = "collective_rpc"
# Calls that monitoring makes continually.
_QUERIES = (
    "get_supported_tasks",
    "get_weight_version",
    "is_scheduler_paused",
    "is_sleeping",
    "list_loras",
    "memsaver_memory",
    INFO,
    RANK_STATE,
    STATE,
)


class Need(NamedTuple):
    """The memory that a request needs.

    Attributes:
        tags: the tags that the request needs.
        what: the name of the request's operation, for error messages.
        reads: whether the request reads the contents; False if it only replaces the contents.
    """

    tags: frozenset[str]
    what: str
    reads: bool = True


_BATCH = Need(MODEL, "run a batch")
_LOAD = Need(_WEIGHTS, "load a LoRA adapter")
_READ = Need(_WEIGHTS, "read its weights")
_SAVE = Need(_WEIGHTS, "save its weights")
_UPDATE = Need(_WEIGHTS, "update its weights", reads=False)

# By method of the engine core or of its workers. Other methods may run while memory is released:
# programs call their own methods, and only they know which memory those methods use.
_NEEDS = {
    "add_lora": _LOAD,
    "compute_weight_checksums": _READ,
    "execute_dummy_batch": _BATCH,
    FINISH: _UPDATE,
    BEGIN: _UPDATE,
    END: _UPDATE,
    LOAD: _UPDATE,
    "pin_lora": _LOAD,
    RELOAD: _UPDATE,
    "reset_weights": _UPDATE,
    "save_sharded_state": _SAVE,
    "save_tensorized_model": _SAVE,
    START_DRAFT: _UPDATE,
    START: _UPDATE,
    "update_weights": _UPDATE,
}

# Other worker methods of vLLM and memsaver, which use no memory that a sleep releases.
_HARMLESS = frozenset(
    {
        *CHANGES,
        *WORKER_CALLS,
        "annotate_profile",
        "check_health",
        "get_cache_block_size_bytes",
        "get_encoder_timing_stats",
        "get_kv_cache_spec",
        "get_model_inspection",
        "init_weight_transfer_engine",
        "profile",
        "remove_lora",
        "reset_encoder_cache",
        "reset_mm_cache",
        "shutdown_weight_transfer_engine",
        "supports_draft_weight_updates",
        "synchronize_device",
        "update_config",
        "update_max_model_len",
        VERSION,
        "vocab_size",
    }
)


def need_of(method: object, args: Sequence[Any] = ()) -> Need | None:
    """Return the memory that a call to the engine core needs; None if it needs none or is unknown.

    Args:
        method: the name of a method of the engine core or of its workers.
        args: the arguments; the first argument of `collective_rpc` is the workers' method.
    """
    method = _method_of(method, args)
    return _NEEDS.get(method) if isinstance(method, str) else None


def is_query(method: object, args: Sequence[Any]) -> bool:
    """Return whether a call only queries the engine; the arguments are those of `need_of`."""
    return _method_of(method, args) in _QUERIES


def is_known(method: object) -> bool:
    """Return whether the memory that a worker's method needs is known."""
    return isinstance(method, str) and (
        method in _NEEDS or method in _QUERIES or method in _HARMLESS
    )


def _method_of(method: object, args: Sequence[Any]) -> object:
    return (args[0] if args else None) if method == _RPC else method


def check_level(level: object) -> None:
    """Raise `ConfigError` if vLLM does not support this sleep level."""
    if level not in _LEVELS:
        raise ConfigError(
            f"level {level!r} of sleep does not exist: it must be 0 (scheduling stops), 1 (the "
            "weights are saved) or 2 (all contents are discarded)"
        )
