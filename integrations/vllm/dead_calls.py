"""Ends the calls that wait for an engine core that has ended.

vLLM's blocking client waits indefinitely for the answer to a call, even after the engine core
has ended.
"""

from __future__ import annotations

import importlib
from concurrent.futures import Future
from typing import Any

__all__ = ["shut_down"]


def shut_down(result: Any, client: Any, *_: Any) -> Any:
    """End the waiting calls; called after `MPClient.shutdown`, which also follows a core's end."""
    dead = importlib.import_module("vllm.v1.engine.exceptions").EngineDeadError
    for future in list(client.utility_results.values()):
        if isinstance(future, Future) and not future.done():
            future.set_exception(dead())
    return result
