"""Requests to a fake vLLM's `AsyncLLM` and its server, for tests in separate processes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from types import SimpleNamespace

import vllm
from refusals import raising
from vllm.config import ModelConfig, ParallelConfig, VllmConfig
from vllm.plugins import load_general_plugins
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams

PROMPT = [1, 2, 3]
BOTH = ("kv_cache", "weights")


def config(model="", **parallel):
    load_general_plugins()  # as EngineArgs does
    return VllmConfig(ModelConfig(model, enable_sleep_mode=True), ParallelConfig(**parallel))


@contextlib.asynccontextmanager
async def engine_of(client_count=1, **parallel):
    """Start an `AsyncLLM` for the duration of the block."""
    vllm_config = config(**parallel)
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = AsyncLLM(vllm_config, client_count)
    try:
        yield engine
    finally:
        engine.shutdown()


def run(work, seconds=90):
    """Run an engine's test with a timeout."""
    asyncio.run(asyncio.wait_for(work, seconds))


async def generate(engine, name="a", max_tokens=1, prompt=PROMPT):
    """Return the tokens and the finish reason of a generation."""
    tokens, reason = [], None
    async for output in engine.generate(prompt, SamplingParams(max_tokens), name):
        tokens += output.outputs[0].token_ids
        reason = output.outputs[0].finish_reason
    return tokens, reason


def blocked(worker, seconds):
    """Block a worker, and thereby the engine core's loop."""
    time.sleep(seconds)


async def embed(engine, name="e"):
    return [output async for output in engine.encode(PROMPT, PoolingParams(), name)]


async def refusal(work):
    """Return the error that rejects a request."""
    from memsaver.integrations.engine.errors import EngineAsleepError

    with raising(EngineAsleepError) as caught:
        await work
    return caught.error


async def until(condition, seconds=30):
    """Wait until an awaitable condition is true."""
    end = time.monotonic() + seconds
    while not await condition():
        assert time.monotonic() < end, "the condition did not become true"
        await asyncio.sleep(0.05)


class Renderer:
    """A front end's renderer, whose prompts contain each image only once.

    Attributes:
        sent: the images that the engine core is assumed to have.
    """

    mm_processor_cache = None

    def __init__(self):
        self.sent = set()
        if vllm.__version__ != "0.26.0":
            self.queue_mm_cache_invalidations = self.sent.difference_update

    def render(self, image):
        data = None if image in self.sent else "pixels"
        self.sent.add(image)
        images = {"mm_hashes": {"image": [image]}, "mm_kwargs": {"image": [data]}}
        return {"type": "multimodal", "prompt_token_ids": PROMPT, **images}

    def clear_mm_cache(self):
        self.sent.clear()

    async def clear_mm_cache_async(self):
        self.clear_mm_cache()


class Server:
    """A client that calls the fake server's application as a server would."""

    def __init__(self, engine):
        from vllm.entrypoints.openai import api_server

        self.app = api_server.build_app(SimpleNamespace())
        self.app.state.engine_client = engine

    async def call(self, path, body=None, leave=None):
        """Return the response's status and body; the client disconnects if `leave` is set."""
        messages = []
        receive = asyncio.Queue()
        receive.put_nowait({"type": "http.request", "body": json.dumps(body or {}).encode()})

        async def disconnect():
            await leave.wait()
            receive.put_nowait({"type": "http.disconnect"})

        async def send(message):
            messages.append(message)

        leaving = asyncio.ensure_future(disconnect()) if leave is not None else None
        path, _, query = path.partition("?")
        scope = {"type": "http", "path": path, "query_string": query.encode()}
        await self.app(scope, receive.get, send)
        if leaving is not None:
            leaving.cancel()
        starts = [one for one in messages if one["type"] == "http.response.start"]
        if not starts:
            return None, b""
        assert len(starts) == 1 and messages[0] is starts[0]
        return starts[0]["status"], b"".join(one.get("body", b"") for one in messages[1:])
