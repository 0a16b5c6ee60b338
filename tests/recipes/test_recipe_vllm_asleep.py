"""Tests requests to a sleeping engine in vLLM's own engine core and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import importlib
import json
import sys
from types import SimpleNamespace
from urllib.parse import urlencode

import fake_packages
import pytest
from vllm_server_arguments import server_arguments

from memsaver.errors import ConfigError, OutOfDeviceMemoryError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.vllm import hooks, http_answers
from memsaver.integrations.vllm.admissions import admission_of
from memsaver.integrations.vllm.guard import guard_of

pytestmark = pytest.mark.recipes

BOTH = ("kv_cache", "weights")
MIB = 1 << 20


@pytest.fixture
def core(request):
    """Return an engine core; `run` starts its loop in a thread."""
    pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")
    engine = request.getfixturevalue("vllm_engine")
    for name in hooks.modules():
        importlib.import_module(name)
    return engine.core


@pytest.fixture
def policy(monkeypatch):
    def choose(when, wait=20, after=0):
        monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP", when)
        monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP_WAIT", str(wait))
        monkeypatch.setenv("MEMSAVER_VLLM_SLEEP_AFTER", str(after))

    return choose


def run(core, test):
    """Run a test of an `AsyncLLM` that uses the engine core."""
    from vllm_recipe_requests import async_llm, served

    async def bounded():
        engine = async_llm(core)
        try:
            await asyncio.wait_for(test(engine), 60)
        finally:
            if engine.output_handler is not None:
                engine.output_handler.cancel()

    with served(core):
        asyncio.run(bounded())


async def refusal(work) -> EngineAsleepError:
    with pytest.raises(EngineAsleepError) as caught:
        await work
    return caught.value


async def generate(*args, **named):
    from vllm_recipe_requests import TOKEN
    from vllm_recipe_requests import generate as tokens_of

    assert await tokens_of(*args, **named) == [TOKEN]


@pytest.mark.parametrize("purpose", ["requests asleep"])
def test_the_hooks_attach(core, purpose):
    for target in hooks.targets():
        module, owner, name = target.rsplit(".", 2)
        method = getattr(getattr(sys.modules[module], owner), name)
        assert hasattr(method, "__wrapped__"), target
    assert callable(core.memsaver_memory)


def test_requests_are_refused_while_memory_is_released(core):
    async def test(engine):
        await generate(engine)
        for level in (1, 2):
            await engine.sleep(level=level)
            error = await refusal(generate(engine))
            assert error.tags == BOTH and error.status_code == 503
            admission_of(engine).learn(())
            assert (await refusal(generate(engine))).tags == BOTH  # by the engine core
            admission_of(engine).learn(())
            await refusal(engine.add_lora(SimpleNamespace()))
            await engine.wake_up(tags=["weights"])
            assert (await refusal(generate(engine))).tags == ("kv_cache",)
            await engine.wake_up(tags=["kv_cache"])
            await generate(engine)
        with pytest.raises(ConfigError):
            await engine.sleep(level=3)
        assert not await engine.is_sleeping()

    run(core, test)


def test_requests_that_have_not_begun_are_refused_after_a_sleep(core):
    from vllm.sampling_params import SamplingParams
    from vllm.v1.request import Request, RequestStatus

    guard = guard_of(core)
    for status in RequestStatus:
        request = Request(status.name, [1], SamplingParams(), None)
        request.status = status
        core.scheduler.requests[request.request_id] = request
    ended = []
    core.scheduler.finish_requests = lambda ids, status: ended.append((sorted(ids), status))
    guard.hold_queued()
    not_begun = ["WAITING", "WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR"]
    assert ended == [(not_begun, RequestStatus.FINISHED_ABORTED)]
    refused = []
    core.output_queue = SimpleNamespace(put_nowait=lambda item: refused.append(item[1].outputs[0]))
    guard._admit_held()
    assert sorted(output.request_id for output in refused) == not_begun
    assert all("its sleep failed" in output.stop_reason for output in refused)


def test_an_image_of_a_refused_request_is_sent_with_the_next(core):
    """The caches of images, in the front end and in the engine core, are vLLM's."""
    from vllm.multimodal import cache
    from vllm.multimodal.inputs import MultiModalFeatureSpec, MultiModalKwargsItem, PlaceholderRange
    from vllm_recipe_requests import request

    try:  # 0.26
        kinds = cache.MultiModalProcessorSenderCache, cache.MultiModalReceiverCache
    except AttributeError:
        lru = importlib.import_module("vllm.multimodal.cache.lru")
        kinds = lru.LruKeyReplicatedSenderCache, lru.LruKeyReplicatedReceiverCache
    limit = SimpleNamespace(mm_processor_cache_gb=1)
    sender, receiver = (
        kind(SimpleNamespace(get_multimodal_config=lambda: limit)) for kind in kinds
    )

    async def send(engine, image, name):
        made = request(name)
        item, _ = sender.get_and_update_item((MultiModalKwargsItem.dummy(), []), image)
        place = PlaceholderRange(offset=0, length=1)
        named = {"identifier": image, "mm_hash": image, "mm_position": place}
        made.mm_features = [MultiModalFeatureSpec(data=item, modality="image", **named)]
        async for _ in engine.generate(made, made.sampling_params, name):
            pass

    async def clear():
        sender.clear_cache()

    async def test(engine):
        core.mm_receiver_cache = receiver
        core._reset_caches = lambda *_, **__: receiver.clear_cache()
        engine.renderer.clear_mm_cache_async = clear
        await send(engine, "A", "first")
        await engine.sleep()
        await refusal(send(engine, "B", "second"))
        await engine.wake_up()
        for image in "AB":
            await send(engine, image, image)
            await send(engine, image, f"{image} again")

    run(core, test)


def test_all_samples_of_a_refused_request_are_forgotten(core):
    async def test(engine):
        await generate(engine)
        await engine.engine_core.sleep_async(1, "abort")
        with pytest.raises(EngineAsleepError):
            await generate(engine, "many", n=3)
        assert not engine.output_processor.has_unfinished_requests()
        assert not engine.output_processor.parent_requests
        await engine.wake_up()
        await generate(engine)

    run(core, test)


def test_requests_wait_until_another_caller_wakes_the_engine(core, policy):
    policy("wait")

    async def test(engine):
        await engine.sleep()
        waiting = [asyncio.ensure_future(generate(engine, str(number))) for number in range(3)]
        await asyncio.sleep(0.3)
        assert not any(one.done() for one in waiting)
        await engine.abort("1")
        await engine.resume_generation()  # the memory is released, so it takes effect later
        await engine.wake_up()
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        assert ended[0] is ended[2] is None and "aborted" in str(ended[1])

    run(core, test)


def test_requests_wake_the_engine(core, policy):
    policy("wake")

    async def test(engine):
        for _ in range(2):
            await engine.sleep()
            await asyncio.gather(*(generate(engine, str(number)) for number in range(3)))
            assert not await engine.is_sleeping()
            await engine.engine_core.sleep_async(1, "abort")  # not known to the AsyncLLM
            await generate(engine)
        await engine.sleep(level=2)
        assert "no backup" in str(await refusal(generate(engine)))
        await engine.wake_up()

    run(core, test)


def test_a_wake_up_without_memory_refuses_requests_and_the_engine_sleeps_on(sim, core, policy):
    import memsaver

    policy("wake", wait=1)

    async def test(engine):
        await engine.sleep()
        sim.occupy(memsaver.device_memory(0)[0] - MIB)
        error = await refusal(generate(engine))
        assert isinstance(error.__cause__, OutOfDeviceMemoryError)
        with pytest.raises(OutOfDeviceMemoryError):
            await engine.wake_up()
        assert await engine.is_sleeping()
        sim.occupy(0)
        await generate(engine)

    run(core, test)


def test_an_idle_engine_sleeps_and_the_next_request_wakes_it(core, policy):
    policy("wake", after=0.5)

    async def test(engine):
        for _ in range(2):
            await generate(engine)
            for _ in range(100):
                if await engine.is_sleeping():
                    break
                await asyncio.sleep(0.1)
            assert await engine.is_sleeping()

    run(core, test)


@pytest.fixture
def application(core, monkeypatch):
    """Return the application of vLLM's own server."""
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    found = [fake_packages.imported(name, monkeypatch) for name in http_answers.MODULES]
    module = next(one for one in found if one is not None and hasattr(one, "build_app"))
    http_answers.install(module)
    return fake_packages.fake_missing(
        lambda: module.build_app(server_arguments(), ("generate",), None), monkeypatch
    )


async def ask(app, path, method="POST", **query):
    """Return a response's status and body."""
    messages = []

    async def receive():
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message):
        messages.append(message)

    scope = {
        "type": "http",
        "method": method,
        "path": path,
        "raw_path": path.encode(),
        "query_string": urlencode(query).encode(),
        "headers": [(b"host", b"engine")],
        "app": app,
        "root_path": "",
    }
    await app(scope, receive, send)
    return messages[0]["status"], b"".join(one.get("body", b"") for one in messages[1:])


def test_the_server_reports_its_sleep_and_refuses_requests(core, application):
    @application.post("/generate")
    async def answer():
        await generate(application.state.engine_client)

    async def test(engine):
        application.state.engine_client = engine
        assert (await ask(application, "/generate"))[0] == 200
        assert (await ask(application, "/health", "GET"))[0] == 200
        assert (await ask(application, "/sleep", level=1))[0] == 200
        status, body = await ask(application, "/health", "GET")
        assert status == 503 and json.loads(body) == {"status": "asleep", "tags": list(BOTH)}
        status, body = await ask(application, "/generate")
        assert status == 503 and json.loads(body)["error"]["tags"] == list(BOTH)
        assert (await ask(application, "/ping", "GET"))[0] == 200
        assert (await ask(application, "/sleep", level=7))[0] >= 400
        assert (await ask(application, "/wake_up"))[0] == 200
        assert (await ask(application, "/generate"))[0] == 200

    run(core, test)


def test_a_call_ends_with_an_engine_core_that_ends_before_it_answers(core):
    import vllm_dead_core
    from vllm.v1.engine import core_client

    assert isinstance(vllm_dead_core.error_of_a_call(core_client), core_client.EngineDeadError)
