"""vLLM engines to which a rollout engine connects: an `AsyncLLM`, and a server at a URL."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

START_SECONDS = 200
END_SECONDS = 20


@contextmanager
def running_loop() -> Iterator[asyncio.AbstractEventLoop]:
    """Run an event loop in a thread for the duration of the block."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(END_SECONDS)


@contextmanager
def async_llm(
    arguments: Mapping[str, Any], loop: asyncio.AbstractEventLoop | None = None
) -> Iterator[Any]:
    """Yield an `AsyncLLM` in a thread's event loop; shut the `AsyncLLM` down afterwards.

    Args:
        arguments: the arguments of `AsyncEngineArgs`.
        loop: an event loop that another thread runs; by default, a new loop in a new thread.
    """
    if loop is None:
        with running_loop() as own, async_llm(arguments, own) as engine:
            yield engine
        return
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    async def start() -> Any:
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))

    begin = time.monotonic()
    engine = asyncio.run_coroutine_threadsafe(start(), loop).result(START_SECONDS)
    print(f"--- the engine is up after {time.monotonic() - begin:.1f} s", flush=True)
    try:
        yield engine
    finally:
        loop.call_soon_threadsafe(engine.shutdown)


@contextmanager
def server(arguments: Mapping[str, Any]) -> Iterator[str]:
    """Yield the URL of vLLM's own server for an `AsyncLLM`; shut both down afterwards.

    Requires uvicorn and VLLM_SERVER_DEV_MODE=1.
    """
    import uvicorn
    from program_runs import free_port
    from vllm_asleep_child import application

    port = free_port()
    with running_loop() as loop, async_llm(arguments, loop) as engine:
        building = application("openai", engine, arguments["model"])
        app = asyncio.run_coroutine_threadsafe(building, loop).result(START_SECONDS)
        config = uvicorn.Config(app, "127.0.0.1", port, lifespan="off", log_level="warning")
        serving = uvicorn.Server(config)
        done = asyncio.run_coroutine_threadsafe(serving.serve(), loop)
        deadline = time.monotonic() + START_SECONDS
        while not serving.started:
            assert not done.done() and time.monotonic() < deadline, "the server did not start"
            time.sleep(0.05)
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            serving.should_exit = True
            done.result(END_SECONDS)
