"""`SleepController`: puts a vLLM engine to sleep and wakes it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memsaver.errors import ConfigError

from ..engine.sleep import EngineController
from ..engine.status import Status
from .engines import connect

__all__ = ["SleepController", "Status"]


class SleepController(EngineController):
    """Puts a vLLM engine to sleep and wakes it, by tag: "kv_cache", "weights", "cuda_graph".

    Every call skips tags that are already in the requested state, and a sleep with requests in
    flight raises instead of aborting them.

        engine = SleepController(vllm.LLM(model, enable_sleep_mode=True))
        engine.sleep(wait_idle=True)          # all tags; the trainer may use the memory
        with engine.staged_wake():            # the weights are mapped: update them, and free the
            update_weights()                  # trainer's copy
        engine.generate(...)                  # the KV cache and the graphs are mapped, too

    With memsaver's plugin in the engine, tags sleep independently, and a call that fails (for
    example without enough memory) leaves the engine alive and unchanged on all ranks, and can be
    repeated. The engine itself reports its state, even after errors and if other clients put it to
    sleep or wake it. Without the plugin, weights and KV cache sleep together, and the controller
    knows only its own calls and `released`. "cuda_graph" is released with all other tags, and
    mapped by any wake-up. Graphs that can be released are not released alone: such a sleep raises
    `ConfigError`.

    `generate` has the arguments of `vllm.LLM.generate` or `AsyncLLM.generate`, whose last output it
    returns. For a server at a URL, it sends the fields to /v1/completions, without streams. With an
    AsyncLLM and a server, `timeout` is in seconds for the whole call, by default an hour; with a
    `vllm.LLM`, for the wait for other threads' calls. In a callback of `on_pause` or `on_resume`,
    pass a short timeout: the other thread may be waiting for the callback's tag.

    Threads: any, except the thread of an AsyncLLM's event loop, which another thread must run.
    Calls of `sleep` and `wake_up` are serialised, and so are generations of a `vllm.LLM`;
    generations of an AsyncLLM or a server run concurrently.

    Args:
        engine: a `vllm.LLM` or an `AsyncLLM` in this process, the URL of a server with
            VLLM_SERVER_DEV_MODE=1, or a result of `engines.connect`.
        api_key: the server's API key.
        level: vLLM's sleep level: 1 saves the weights in host memory; 2 discards them, so they must
            be loaded after the wake-up.
        released: the tags that are already released; needed only without the plugin.
        timeout: seconds for queries of the engine's state.

    Raises:
        ConfigError: `engine` is none of these, a tag is unknown, or the level, the timeout, the
            address or the key is invalid. No message contains the key.
        NotLoadedError: `engine` is a URL, and httpx is not installed.
        EngineError: the engine cannot be reached.
    """

    def __init__(
        self,
        engine: Any,
        *,
        api_key: str | None = None,
        level: int = 1,
        released: str | Sequence[str] = (),
        timeout: float = 60.0,
    ) -> None:
        if level not in (1, 2):
            raise ConfigError(f"level must be 1 or 2, not {level!r}")
        link = connect(engine, api_key)
        link.level = level
        super().__init__(link, released=released, timeout=timeout)
