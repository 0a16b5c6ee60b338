"""Tests memsaver's context managers as decorators and under torch's modes."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import inspect
import threading

import pytest

import memsaver
import memsaver.distributed
from memsaver import simulator
from memsaver._runtime.native import _C

MIB = 1 << 20


@pytest.fixture
def name(tag):
    return tag("weights")


def managers(name):
    return {
        "region": memsaver.region(name),
        "disabled": memsaver.disabled(),
        "preload": memsaver.preload(),
        "graph": memsaver.graph(None, name),
        "fault": simulator.fault("cuMemCreate", 2),
        "paused": memsaver.paused(name),
        "distributed.paused": memsaver.distributed.paused(name),
    }


KINDS = list(managers("any"))
every = pytest.mark.parametrize("kind", KINDS)


async def coroutine(): ...


async def asynchronous():
    yield


def generator():
    yield


class Callable:
    async def __call__(self): ...


@every
@pytest.mark.parametrize(
    "function",
    [
        generator,
        asynchronous,
        functools.partial(generator),
        Callable(),
        Callable,
        3,
        coroutine,
        functools.partial(coroutine),
    ],
    ids=[
        "generator",
        "async generator",
        "partial",
        "async object",
        "class",
        "number",
        "async",
        "p",
    ],
)
def test_functions_whose_body_runs_later_are_rejected(sim, name, kind, function):
    if "paused" in kind and inspect.iscoroutinefunction(function):
        return  # see the tests below
    with pytest.raises(memsaver.ConfigError) as caught:
        managers(name)[kind](function)
    assert "with" in str(caught.value) or "is not a function" in str(caught.value)


@every
def test_a_function_keeps_its_name_and_docs(sim, name, kind):
    def documented(number: int) -> int:
        """Says what it does."""
        return number

    wrapped = managers(name)[kind](documented)
    assert (wrapped.__name__, wrapped.__doc__) == ("documented", "Says what it does.")
    assert inspect.signature(wrapped) == inspect.signature(documented)


def test_each_call_is_paused_anew(sim, name, make_blocks):
    (block,) = make_blocks(name, [2 * MIB], backup="host")

    @memsaver.paused(name)
    def state(*more):
        return [memsaver.state(name), *more]

    for _ in range(2):
        assert state(1) == ["paused", 1]
        assert memsaver.state(name) == "mapped"

    @memsaver.paused(name)
    def failing():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        failing()
    assert memsaver.state(name) == "mapped"
    assert block.is_intact()


def test_a_coroutine_is_paused_while_its_body_runs(sim, name, make_blocks):
    (block,) = make_blocks(name, [2 * MIB], backup="host")

    @memsaver.paused(name)
    async def state():
        await asyncio.sleep(0)
        return memsaver.state(name)

    made = state()
    assert memsaver.state(name) == "mapped"  # nothing runs before the await
    assert asyncio.run(made) == "paused"
    assert memsaver.state(name) == "mapped" and block.is_intact()

    @memsaver.paused(name)
    async def cancelled():
        await asyncio.sleep(100)

    async def cancel():
        task = asyncio.ensure_future(cancelled())
        await asyncio.sleep(0)
        assert memsaver.state(name) == "paused"
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert memsaver.state(name) == "mapped" and block.is_intact()


def test_disabled_decorates_functions_on_several_threads(sim, name):
    both = threading.Barrier(2)

    @memsaver.disabled()
    def inside():
        both.wait(10)
        return _C.region_tag()

    found = []

    def work():
        with memsaver.region(name):
            found.append(inside())
            found.append(_C.region_tag())

    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(map(str, found)) == sorted(["None", "None", name, name])


def test_a_block_may_be_entered_again(sim, name, make_blocks):
    blocks = make_blocks(name, [2 * MIB], backup="host")
    asleep = memsaver.paused(name)
    for _ in range(2):
        with asleep as report:
            assert report.changed == (name,)
    assert blocks[0].is_intact()


# --- torch's modes, on the CPU --------------------------------------------------------------------


@pytest.fixture
def torch():
    return pytest.importorskip("torch")


def test_regions_and_views_work_in_inference_mode(sim, name, torch):
    with torch.inference_mode():
        with memsaver.region(name, backup="host"):
            tensor = simulator.empty((8, 8))
        tensor.copy_(torch.arange(64.0).reshape(8, 8))
        with memsaver.paused(name):
            view = memsaver.backup_view(tensor)
            assert torch.equal(view.clone(), torch.arange(64.0).reshape(8, 8))
            with pytest.raises(memsaver.InvalidStateError):
                view.add_(1)
            memsaver.backup_view(tensor, writable=True)[0, 0] = 99
        assert tensor[0].tolist() == [99, 1, 2, 3, 4, 5, 6, 7]

    @torch.inference_mode()
    @memsaver.region(name)
    def make():
        return simulator.empty(16), _C.region_tag()

    other, around = make()
    assert around == name and memsaver.explain(other).tag == name
    with memsaver.paused(name):
        assert memsaver.backup_view(tensor)[0].tolist()[0] == 99  # written in inference mode


@pytest.mark.parametrize("fullgraph", [False, True])
def test_a_region_around_a_compiled_function(sim, name, torch, fullgraph):
    compiled = torch.compile(lambda x: x * 2 + 1, backend="eager", fullgraph=fullgraph)
    with memsaver.region(name):
        tensor = simulator.empty(16).fill_(3)
        assert compiled(tensor).tolist() == [7] * 16
    with memsaver.paused(name):
        pass
    assert compiled(torch.ones(4)).tolist() == [3] * 4


@pytest.mark.filterwarnings("ignore:Dynamo does not know how to trace")
def test_a_region_inside_a_compiled_function(sim, name, torch):
    """While torch compiles a function, its regions run uncompiled and are closed properly."""
    seen = []

    def function(x):
        y = x + 1
        with memsaver.region(name):
            seen.append(_C.region_tag())
            z = y * 2
        return z - 1

    compiled = torch.compile(function, backend="eager")
    for _ in range(3):
        assert compiled(torch.ones(4)).tolist() == [3] * 4
        assert _C.region_depth() == 0
    assert seen == [name] * 3
    memsaver.pause(name)
    memsaver.resume(name)
