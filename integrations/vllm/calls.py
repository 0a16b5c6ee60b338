"""The requests to vLLM's engine core that need memory, and the tags that each needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from memsaver.errors import ConfigError

from ..engine.tags import KV_CACHE, WEIGHTS

__all__ = ["MODEL", "Need", "check_level", "need_of"]

MODEL = frozenset({KV_CACHE, WEIGHTS})
_WEIGHTS = frozenset({WEIGHTS})
_LEVELS = (0, 1, 2)


class Need(NamedTuple):
    """The memory that a request needs.

    Attributes:
        tags: the tags.
        what: the request's operation, for the error message.
        reads: whether it reads the contents; False if it only replaces them.
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
# programs call methods of their own, which only these programs know.
_NEEDS = {
    "add_lora": _LOAD,
    "compute_weight_checksums": _READ,
    "execute_dummy_batch": _BATCH,
    "finish_weight_update": _UPDATE,
    "pin_lora": _LOAD,
    "reload_weights": _UPDATE,
    "save_sharded_state": _SAVE,
    "save_tensorized_model": _SAVE,
    "start_draft_weight_update": _UPDATE,
    "start_weight_update": _UPDATE,
    "update_weights": _UPDATE,
}


def need_of(method: object, args: Sequence[Any] = ()) -> Need | None:
    """Return the memory that a call of the engine core needs; None if it is not known to need any.

    Args:
        method: the name of the method, of the engine core or of its workers.
        args: the arguments; the first one of `collective_rpc` is the workers' method.
    """
    if method == "collective_rpc":
        method = args[0] if args else None
    return _NEEDS.get(method) if isinstance(method, str) else None


def check_level(level: object) -> None:
    """Raise `ConfigError` if vLLM has no such level of sleep."""
    if level not in _LEVELS:
        raise ConfigError(
            f"level {level!r} of sleep does not exist: it must be 0 (scheduling stops), 1 (the "
            "weights are saved) or 2 (all contents are discarded)"
        )
