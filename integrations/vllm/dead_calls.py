"""Fail the calls that wait for an engine core that has exited.

vLLM's blocking client waits indefinitely for the answer to a call, even after the engine core has
exited. A core can exit in two ways. If its workers have exited, the core sends a message about this
failure and exits. If the core's process exits without a message, vLLM shuts the client down.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from typing import Any

__all__ = ["call_utility", "shut_down", "validate_alive"]

_CALLS = "memsaver_calls"  # an attribute of a client's resources: the client's waiting calls


def call_utility(original: Callable[..., Any], client: Any, *args: Any) -> Any:
    """Call an engine core; `validate_alive` makes the call fail if the core exits meanwhile."""
    setattr(client.resources, _CALLS, client.utility_results)
    return original(client, *args)


def validate_alive(original: Callable[..., Any], resources: Any, *args: Any) -> None:
    """Check a core's message; if it reports an exit, fail the waiting calls and raise an error."""
    try:
        original(resources, *args)
    except Exception:
        _end(getattr(resources, _CALLS, {}))
        raise


def shut_down(result: Any, client: Any, *_: Any) -> Any:
    """Fail the waiting calls after `MPClient.shutdown`, which vLLM also calls when a core exits."""
    _end(client.utility_results)
    return result


def _end(calls: dict[int, Any]) -> None:
    dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
    for future in list(calls.values()):
        # An `AsyncLLM`'s calls have asyncio futures, which `cores.alive` cancels.
        if isinstance(future, Future):
            with contextlib.suppress(InvalidStateError):  # another thread has completed it
                future.set_exception(dead())
