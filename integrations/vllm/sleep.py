"""`SleepController`, which puts a vLLM engine to sleep and wakes it."""

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

    Every call skips tags that are already in the requested state. While requests are in flight, a
    sleep raises an error instead of aborting them.

        engine = SleepController(vllm.LLM(model, enable_sleep_mode=True))
        engine.sleep(wait_idle=True)          # all tags; the trainer may use the memory
        with engine.staged_wake():            # the weights are mapped: update them, and free the
            update_weights()                  # trainer's copy
        engine.generate(...)                  # the KV cache and the graphs are mapped, too

    If the engine has memsaver's plugin, tags sleep independently of each other. A failed call (for
    example because too little memory is free) leaves the engine alive and unchanged on all ranks,
    and can be repeated. The controller reads the state from the engine, so it is correct even after
    errors and after calls by other clients. Without the plugin, the weights and the KV cache sleep
    together, and the controller knows only its own calls and the argument `released`. The tag
    "cuda_graph" is released together with all other tags, and is mapped by any wake-up. Graphs that
    can be released are never released alone; an attempt raises `ConfigError`.

    `generate` accepts the arguments of `vllm.LLM.generate`, or those of `AsyncLLM.generate`, whose
    last output it returns. For a server at a URL, `generate` sends its arguments as the fields of a
    request to /v1/completions, without streaming. For an AsyncLLM or a server, `timeout` is the
    time limit for the whole call in seconds (one hour by default). For a `vllm.LLM`, `timeout`
    limits the wait for other threads' calls. In an `on_pause` or `on_resume` callback, pass a short
    timeout, because another thread's call might be waiting for the callback's tag.

    Threads: any thread may make calls, except the thread that runs an AsyncLLM's event loop. Calls
    to `sleep` and `wake_up` are serialized. Generations of a `vllm.LLM` are also serialized, but
    generations of an AsyncLLM or a server run concurrently.

    Args:
        engine: a `vllm.LLM` or an `AsyncLLM` in this process, the URL of a server with
            VLLM_SERVER_DEV_MODE=1, or a result of `engines.connect`.
        api_key: the server's API key.
        level: vLLM's sleep level. Level 1 saves the weights in host memory. Level 2 discards the
            weights, which must therefore be loaded after the wake-up.
        released: the tags that are already released; needed only without the plugin.
        timeout: the time limit in seconds for queries of the engine's state.

    Raises:
        ConfigError: `engine` is of another type, a tag is unknown, or the level, the timeout, the
            address or the key is invalid. Error messages never contain the key.
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
