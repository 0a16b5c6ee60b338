"""Tests the execution of coroutines for callers that have no event loop."""

import asyncio
import os
import signal
import threading

import pytest

from memsaver.integrations.engine import blocking


async def thread() -> threading.Thread:
    await asyncio.sleep(0)
    return threading.current_thread()


def test_the_calling_thread_runs_the_coroutine_and_keeps_its_loop():
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        assert blocking.run(thread) is threading.current_thread()
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_another_thread_runs_it_inside_a_running_loop():
    async def test():
        return blocking.run(thread)

    assert asyncio.run(test()) is not threading.current_thread()


def test_an_interrupt_inside_a_running_loop_cancels_the_coroutine():
    cancelled = []

    async def work():
        os.kill(os.getpid(), signal.SIGINT)
        try:
            await asyncio.sleep(5)
        except asyncio.CancelledError:
            cancelled.append(True)
            raise

    async def test():
        with pytest.raises(KeyboardInterrupt):
            blocking.run(work)

    loop = asyncio.new_event_loop()
    try:
        loop.run_until_complete(test())  # `asyncio.run` handles interrupts itself
    finally:
        loop.close()
    assert cancelled == [True]


def test_tasks_that_are_left_end_with_the_call():
    ended = []

    async def forever():
        try:
            await asyncio.sleep(1000)
        finally:
            ended.append(True)

    async def work():
        task = asyncio.ensure_future(forever())
        await asyncio.sleep(0)
        assert not task.done()
        raise KeyError("from the coroutine")

    with pytest.raises(KeyError, match="from the coroutine"):
        blocking.run(work)
    assert ended == [True]
