"""Test requests to a sleeping engine in vLLM's own engine core and `AsyncLLM`."""

from __future__ import annotations

import asyncio
import importlib
import sys
import threading
import types
from types import SimpleNamespace

import pytest

from memsaver.errors import ConfigError, OutOfDeviceMemoryError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.vllm import hooks, http_answers
from memsaver.integrations.vllm.admissions import admission_of

pytestmark = pytest.mark.recipes

BOTH = ("kv_cache", "weights")
MIB = 1 << 20


@pytest.fixture
def core(sim, tag, monkeypatch):
    """Yield an engine core whose loop runs in a thread."""
    pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")
    from vllm_recipe import Engine
    from vllm_recipe_requests import serve

    tag.names.extend(("weights", "kv_cache", "runtime"))
    engine = Engine(monkeypatch)
    for name in hooks.modules():
        importlib.import_module(name)
    ended = threading.Event()
    serve(engine.core, ended)
    yield engine.core
    from vllm.v1.engine import EngineCoreRequestType
    from vllm.v1.engine.core import EngineShutdownState

    engine.core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
    engine.core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
    assert ended.wait(30)
    engine.core.output_queue.put(None)
    engine.close()


@pytest.fixture
def policy(monkeypatch):
    def choose(when, wait=20, after=0):
        monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP", when)
        monkeypatch.setenv("MEMSAVER_VLLM_ASLEEP_WAIT", str(wait))
        monkeypatch.setenv("MEMSAVER_VLLM_SLEEP_AFTER", str(after))

    return choose


def run(core, test):
    """Run a test of an `AsyncLLM` over the engine core."""
    from vllm_recipe_requests import async_llm

    async def bounded():
        engine = async_llm(core)
        try:
            await asyncio.wait_for(test(engine), 60)
        finally:
            if engine.output_handler is not None:
                engine.output_handler.cancel()

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


def test_the_server_builds_its_application_with_the_middleware(monkeypatch):
    pytest.importorskip("vllm.v1.engine.core", reason="vLLM is not installed")
    watch = types.ModuleType("watchfiles")
    watch.Change = watch.awatch = None
    monkeypatch.setitem(sys.modules, "watchfiles", watch)
    builders = []
    for name in http_answers.MODULES:
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as error:
            assert name.startswith(str(error.name)), error
            continue
        if hasattr(module, "build_app"):
            http_answers.install(module)
            builders.append(module.build_app)
    (build,) = builders
    assert hasattr(build, "__wrapped__")
