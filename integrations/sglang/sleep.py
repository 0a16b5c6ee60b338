"""`SleepController`: puts an SGLang engine to sleep and wakes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..engine.sleep import EngineController
from ..engine.status import Status
from .engines import connect

__all__ = ["SleepController", "Status"]


class SleepController(EngineController):
    """Puts an SGLang engine to sleep and wakes it by tag ("kv_cache", "weights", "cuda_graph").

    Every call skips tags that are already in the requested state. Calls that would crash the engine
    are rejected before the engine receives them. Such calls release memory that requests use, or
    start a generation while that memory is released.

        engine = SleepController(sglang.Engine(enable_memory_saver=True, ...))
        engine.sleep(wait_idle=True)          # all tags; the trainer may use the memory
        with engine.staged_wake():            # the weights are mapped: update them, and free the
            update_weights()                  # trainer's copy
        engine.generate(...)                  # the KV cache and the graphs are mapped, too

    With memsaver's plugin in the engine, a call that fails, for example for lack of memory, leaves
    the engine running and unchanged on all ranks, and can be repeated. The engine itself reports
    its state, even after errors and after other clients release or resume tags. Without the plugin,
    a failure crashes the engine, and the controller knows only its own calls and `released`.

    `generate` accepts the arguments of `sglang.Engine.generate`. For a server at a URL, arguments
    and results are JSON, streams are not supported, and `timeout` limits the whole call, in seconds
    (by default an hour). For an engine in this process, `timeout` limits only the wait for other
    threads' calls. In an `on_pause` or `on_resume` callback, pass a short timeout, because
    another thread's call may be waiting for the callback's tag.

    Threads: any. Calls to `sleep` and `wake_up` are serialized; generations run concurrently. Do
    not call these methods in an event loop: use `await asyncio.to_thread(controller.sleep)`.
    `sleep` first checks for requests that bypassed the controller. Without the plugin, a request
    that arrives just after this check crashes the engine. Any request while the engine sleeps also
    crashes the engine, including the requests that SGLang's `/health` sends. With the plugin, such
    requests are refused, wait, or wake the engine; see `memsaver.integrations.sglang.settings`.

    Args:
        engine: an `sglang.Engine` in this process, a server's URL, or a result of
            `engines.connect`.
        api_key: the server's API key, or its admin key if it has one.
        released: the tags that are already released; required only without the plugin.
        timeout: the limit on queries of the engine's state, in seconds.

    Raises:
        ConfigError: `engine` has an unsupported type, a tag is unknown, or the timeout, the address
            or the key is invalid. No message contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
        EngineError: the engine cannot be reached.
    """

    def __init__(
        self,
        engine: Any,
        *,
        api_key: str | None = None,
        released: str | Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        super().__init__(connect(engine, api_key), released=released, timeout=timeout)
