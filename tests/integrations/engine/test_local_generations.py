"""Tests time limits of waits for other threads' generations on an engine in this process."""

import asyncio
import threading
import types

import pytest

import memsaver
from memsaver.errors import ConfigError
from memsaver.integrations.engine.errors import EngineTimeoutError
from memsaver.integrations.sglang import engines as sglang
from memsaver.integrations.vllm import engines as vllm

pytestmark = pytest.mark.each_python

SECONDS = 20.0


def sglang_engine(generate):
    """Return the controller's engine for a fake `sglang.Engine`."""
    loop = asyncio.new_event_loop()

    async def answer():
        return generate()

    return sglang.LocalEngine(
        types.SimpleNamespace(
            loop=loop,
            tokenizer_manager=types.SimpleNamespace(),
            generate=lambda: loop.run_until_complete(answer()),
        )
    )


def vllm_engine(generate):
    """Return the controller's engine for a fake `vllm.LLM`."""
    core = types.SimpleNamespace(engine_core=types.SimpleNamespace())
    return vllm.LocalEngine(types.SimpleNamespace(llm_engine=core, generate=generate))


@pytest.mark.parametrize("made", [sglang_engine, vllm_engine])
def test_a_callback_does_not_wait_without_end_for_a_generation_that_waits_for_its_tag(
    sim, tag, make_blocks, in_thread, made
):
    """During the generation, a finalizer on the generating thread waits for the callback's tag."""
    name, generating, called = tag(), threading.Event(), threading.Event()
    (block,) = make_blocks(name, [4096], "host")

    def generation():
        generating.set()
        if called.wait(SECONDS):
            memsaver.pause(name)  # as in a finalizer
        return "text"

    def callback(_):
        if not called.is_set():  # the other thread's pause calls it again
            called.set()
            engine.generate(timeout=0.2)

    engine = made(generation)
    other = in_thread(engine.generate)
    assert generating.wait(SECONDS)
    registration = memsaver.on_pause(callback, name)
    try:
        with pytest.raises(EngineTimeoutError, match="make this call after the transition"):
            memsaver.pause(name)
    finally:
        registration.remove()
    assert other.result() == "text"
    memsaver.resume(name)
    assert block.is_intact()
    with pytest.raises(ConfigError):
        engine.generate(timeout=0)
    assert engine.generate() == "text"
