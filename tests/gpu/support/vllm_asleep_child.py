"""Sends requests to a sleeping vLLM engine; exits with status 0 on success.

usage: vllm_asleep_child.py SCENARIO FOLDER [RANKS]

The engine is an `AsyncLLM` behind the application of vLLM's own server, which is called without a
network. vLLM's processes import this file again, so the file imports only modules that every
process needs.
"""

from __future__ import annotations

import asyncio
import faulthandler
import json
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

STUCK_SECONDS = 250
GIB = 1 << 30
TOKENS = 24
LONG = 400  # tokens of a request that is in progress when the engine sleeps
PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)))
BOTH = ("kv_cache", "weights")
MODEL = "model"


class Setting:
    """An engine, the application of its server, and its expected output."""

    def __init__(self, engine: Any, app: Any) -> None:
        self.engine = engine
        self.app = app
        self.expected: list[list[int]] = []

    async def tokens(self, number: int, name: str = "") -> list[int]:
        import vllm_engines

        found: list[int] = []
        prompt = {"prompt_token_ids": PROMPTS[number]}
        name = name or f"{number}-{time.monotonic_ns()}"
        async for output in self.engine.generate(prompt, vllm_engines.greedy(TOKENS), name):
            found = list(output.outputs[0].token_ids)
        return found

    async def outputs(self) -> list[list[int]]:
        """Return greedy tokens for one prompt at a time, because batches change the arithmetic."""
        return [await self.tokens(number) for number in range(len(PROMPTS))]

    async def check(self) -> None:
        assert await self.outputs() == self.expected

    async def learn(self) -> None:
        readings = [await self.outputs() for _ in range(3)]  # the first compiles kernels
        assert readings[1] == readings[2], "the engine is not deterministic"
        self.expected = readings[2]
        assert len({tuple(tokens) for tokens in self.expected}) == len(PROMPTS), readings

    async def ask(
        self, path: str, method: str = "POST", body: Any = None, **query: Any
    ) -> tuple[int, Any]:
        """Return a response's status and its body, parsed if the body is JSON."""
        messages: list[dict[str, Any]] = []
        sent = [{"type": "http.request", "body": json.dumps(body).encode() if body else b""}]

        async def receive() -> dict[str, Any]:
            if sent:
                return sent.pop()
            await asyncio.sleep(STUCK_SECONDS)
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            messages.append(message)

        scope = {
            "type": "http",
            "http_version": "1.1",
            "method": method,
            "path": path,
            "raw_path": path.encode(),
            "query_string": urlencode(query).encode(),
            "headers": [(b"host", b"engine"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
            "scheme": "http",
            "root_path": "",
            "app": self.app,
            "state": {},
        }
        await self.app(scope, receive, send)
        text = b"".join(one.get("body", b"") for one in messages[1:])
        try:
            return messages[0]["status"], json.loads(text)
        except ValueError:
            return messages[0]["status"], text.decode()


async def refusal(work: Awaitable[Any]) -> Any:
    from memsaver.integrations.engine.errors import EngineAsleepError

    try:
        await work
    except EngineAsleepError as error:
        return error
    raise AssertionError("the request was not refused")


def free(gpu: int = 0) -> int:
    import torch

    torch.cuda.synchronize(gpu)
    return int(torch.cuda.mem_get_info(gpu)[0])


async def refuse(one: Setting) -> None:
    """Both the engine in this process and the engine core refuse requests."""
    from memsaver.errors import ConfigError
    from memsaver.integrations.vllm.admissions import admission_of

    awake = free()
    for level in (1, 1):
        await one.engine.sleep(level=level)
        assert free() - awake > GIB
        assert (await refusal(one.tokens(0))).tags == BOTH
        admission = admission_of(one.engine)
        assert admission is not None
        admission.learn(())  # as in another process of the server
        assert (await refusal(one.tokens(0))).tags == BOTH
        await refusal(one.engine.collective_rpc("reload_weights"))
        await one.engine.resume_generation()  # takes effect after the wake-up
        await one.engine.wake_up(tags=["weights"])
        assert (await refusal(one.tokens(0))).tags == ("kv_cache",)
        await one.engine.wake_up(tags=["kv_cache"])
        await one.check()
    try:
        await one.engine.sleep(level=5)
    except ConfigError:
        pass
    else:
        raise AssertionError("level 5 was accepted")
    assert (await one.ask("/sleep", level=1))[0] == 200
    assert await one.ask("/health", "GET") == (503, {"status": "asleep", "tags": list(BOTH)})
    status, body = await one.ask("/tokens")
    assert status == 503 and body["error"]["tags"] == list(BOTH), body
    assert (await one.ask("/ping", "GET"))[0] == 200
    assert await one.ask("/is_sleeping", "GET") == (200, {"is_sleeping": True})
    assert (await one.ask("/wake_up"))[0] == 200
    assert await one.ask("/tokens") == (200, one.expected[0])
    await one.check()
    await abort(one)


async def abort(one: Setting) -> None:
    """A sleep aborts a request in progress, as in vLLM's default mode."""
    import vllm_engines

    prompt = {"prompt_token_ids": PROMPTS[1]}
    running = aiter(one.engine.generate(prompt, vllm_engines.greedy(LONG), "running"))
    output = await anext(running)
    assert not output.finished
    await one.engine.sleep(level=1)
    async for output in running:  # noqa: B007
        pass
    found = output.outputs[0]
    assert found.finish_reason == "abort" and len(found.token_ids) < LONG, found
    await one.engine.wake_up()
    await one.check()


async def wait(one: Setting) -> None:
    """Requests are held until the engine is awake; held requests end on an abort or a timeout."""
    await one.engine.sleep(level=1)
    assert (await one.ask("/health", "GET"))[0] == 200
    waiting = [asyncio.ensure_future(one.tokens(0, str(number))) for number in range(3)]
    asked = asyncio.ensure_future(one.ask("/tokens"))
    await asyncio.sleep(1)
    assert not any(work.done() for work in [*waiting, asked])
    await one.engine.abort("1")
    waiting[2].cancel()
    await one.engine.wake_up()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert results[0] == one.expected[0] and "aborted" in str(results[1]), results
    assert isinstance(results[2], asyncio.CancelledError)
    assert (await asked)[0] == 200
    await one.check()
    await one.engine.sleep(level=1)
    assert "no caller woke it up" in str(await refusal(one.tokens(0)))
    await one.engine.wake_up()
    await one.check()


async def wake(one: Setting) -> None:
    """Requests wake the engine if memory is available, and an idle engine falls asleep."""
    import torch

    from memsaver.errors import OutOfDeviceMemoryError

    for _ in range(3):
        await one.engine.sleep(level=1)
        await one.check()
        assert not await one.engine.is_sleeping()
    await one.engine.sleep(level=1)
    assert await one.ask("/tokens") == (200, one.expected[0])
    await one.engine.sleep(level=1)
    last = one.engine.vllm_config.parallel_config.tensor_parallel_size - 1
    taken = torch.empty(free(last) - GIB, dtype=torch.uint8, device=f"cuda:{last}")
    error = await refusal(one.tokens(0))
    assert isinstance(error.__cause__, OutOfDeviceMemoryError), error.__cause__
    assert (await one.ask("/tokens"))[0] == 503 and await one.engine.is_sleeping()
    del taken
    torch.cuda.empty_cache()
    await one.check()
    for _ in range(2):
        end = time.monotonic() + 40
        while not await one.engine.is_sleeping():
            assert time.monotonic() < end, "the idle engine keeps its memory"
            await asyncio.sleep(0.25)
        await one.check()


async def openai(one: Setting) -> None:
    """vLLM's own completions endpoint works, with and without streaming."""
    before = {}
    for stream in (False, True):
        body = {
            "model": MODEL,
            "prompt": PROMPTS[0],
            "max_tokens": 4,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
            "stream": stream,
        }
        before[stream] = await one.ask("/v1/completions", body=body)
        assert before[stream][0] == 200, before
        assert (await one.ask("/sleep", level=1))[0] == 200
        status, answer = await one.ask("/v1/completions", body=body)
        assert status == 503 and answer["error"]["tags"] == list(BOTH), (status, answer)
        assert answer["error"]["type"] == "engine_asleep"
        assert (await one.ask("/wake_up"))[0] == 200
        assert (await one.ask("/v1/completions", body=body))[0] == 200


async def level_2(one: Setting) -> None:
    """After level 2, requests are refused; a reload of the weights restores the output."""
    for tags in (BOTH, BOTH[::-1]):
        awake = free()
        await one.engine.sleep(level=2)
        assert free() - awake > GIB
        for tag in tags:
            assert await one.engine.is_sleeping()
            await refusal(one.tokens(0))
            await one.engine.wake_up(tags=[tag])
            if tag == "weights":
                await one.engine.collective_rpc("reload_weights")
        assert not await one.engine.is_sleeping()
        await one.check()
        await one.engine.sleep(level=1)
        await one.engine.wake_up()
        await one.check()


SCENES: dict[str, Callable[[Setting], Awaitable[None]]] = {
    "refuse": refuse,
    "wait": wait,
    "wake": wake,
    "openai": openai,
    "level_2": level_2,
}


async def application(scene: str, engine: Any, path: str) -> Any:
    """Return the application of vLLM's server, without packages that the tests do not need."""
    import fake_packages
    import pytest
    from vllm_server_arguments import server_arguments

    patch = pytest.MonkeyPatch()
    module = fake_packages.imported("vllm.entrypoints.openai.api_server", patch)
    assert module is not None and hasattr(module.build_app, "__wrapped__"), "no middleware"
    arguments = server_arguments()
    if scene == "openai":
        from vllm.entrypoints.openai.cli_args import make_arg_parser
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        given = ["--model", path, "--served-model-name", MODEL, "--skip-tokenizer-init"]
        arguments = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    app = fake_packages.fake_missing(
        lambda: module.build_app(arguments, ("generate",), engine.model_config), patch
    )
    while scene == "openai":
        try:
            await module.init_app_state(engine, app.state, arguments, ("generate",))
        except ModuleNotFoundError as error:
            fake_packages.fake(error, patch)
        else:
            break
    app.state.engine_client = engine
    return app


async def main(scene: str, folder: Path, ranks: int) -> None:
    import qwen_model
    import vllm_engines
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    qwen_model.save(folder / "model", qwen_model.weights(seed=1))
    given = {k: v for k, v in vllm_engines.COMMON.items() if k != "worker_extension_cls"}
    begin = time.monotonic()
    given |= {"model": str(folder / "model"), "tensor_parallel_size": ranks}
    engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
    print(f"--- the engine is up after {time.monotonic() - begin:.1f} s", flush=True)
    try:
        one = Setting(engine, await application(scene, engine, str(folder / "model")))

        async def tokens() -> list[int]:
            return await one.tokens(0)

        one.app.add_api_route("/tokens", tokens, methods=["POST"])
        await one.learn()
        begin = time.monotonic()
        await SCENES[scene](one)
        print(f"--- {scene}: {time.monotonic() - begin:.1f} s", flush=True)
    finally:
        engine.shutdown()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(STUCK_SECONDS, exit=True)
    ranks = int(sys.argv[3]) if len(sys.argv) > 3 else 1
    asyncio.run(main(sys.argv[1], Path(sys.argv[2]), ranks))
    print("held", flush=True)
