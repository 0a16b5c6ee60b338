"""Tests tensors and optimizers inside optimizers, and memory that a step needs in addition to
states.
"""

import array
import ctypes
import dataclasses
import mmap
import sys
import threading
import types
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from trainers import Trainer, bytes_of, lies_in, states_of

import memsaver
from memsaver.integrations.trainer import offload

pytestmark = pytest.mark.each_python


class Container(torch.optim.Optimizer):
    """A container of optimizers that step together, as in trainers with several model parts."""

    def __init__(self, optimizers, parts):
        self.parts = parts
        super().__init__([p for part in parts for p in part.parameters()], {})
        self.optimizers = optimizers

    def step(self, closure=None):
        for optimizer in self.inner():
            optimizer.step()

    def inner(self):
        values = self.optimizers
        for optimizer in values.values() if isinstance(values, dict) else values:
            yield from optimizer if isinstance(optimizer, list) else [optimizer]


@pytest.mark.parametrize(
    "shape",
    [
        lambda found: found,
        tuple,
        deque,
        lambda found: dict(enumerate(found)),
        lambda found: {"all": [found]}["all"],
    ],
    ids=["list", "tuple", "deque", "dict", "nested"],
)
def test_optimizers_in_containers_are_offloaded_and_guarded(sim, tag, shape):
    trainer = Trainer()
    inner = [torch.optim.AdamW([p], lr=1e-2) for p in trainer.model.parameters()]
    trainer.optimizer = Container(shape(inner), [trainer.model])
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    assert offloaded.bytes == 2 * sum(p.nbytes for p in trainer.model.parameters())
    with offloaded.paused():
        for optimizer in (trainer.optimizer, *inner):
            with pytest.raises(memsaver.InvalidStateError):
                optimizer.step()
    trainer.step()


@dataclasses.dataclass
class Pair:
    first: torch.Tensor
    second: object = None


# Functions that store a parameter's tensor in some place of an optimizer, by name.
PLACES = {
    "deque": lambda o, p, t: o.state[p].update(history=deque([t], maxlen=3)),
    "dataclass": lambda o, p, t: o.state[p].update(pair=Pair(t)),
    "nested": lambda o, p, t: o.state[p].update(deep={"a": [(Pair(t[:1], {"b": deque([t])}),)]}),
    "namespace": lambda o, p, t: o.state[p].update(space=types.SimpleNamespace(t=t)),
    "param_groups": lambda o, p, t: o.param_groups[0].update(momenta=[t]),
    "attribute": lambda o, p, t: setattr(o, "buffer", t),
    "attribute dict": lambda o, p, t: setattr(o, "buffers", {p: {"t": t}}),
    "cycle": lambda o, p, t: o.state[p].update(cycle=(lambda c: c.append(c) or c)([t])),
}


@pytest.mark.parametrize("place", PLACES)
def test_states_are_found_in_every_container(sim, tag, place):
    trainer = Trainer()
    tensor = torch.arange(64.0)
    PLACES[place](trainer.optimizer, trainer.model[0].weight, tensor)
    offloaded = offload(trainer.optimizer, tag=tag())
    assert offloaded.bytes == tensor.nbytes
    with offloaded.paused():
        assert lies_in(tensor, offloaded.tag)
        assert not sim.accessible(tensor.data_ptr())
    assert tensor.tolist() == list(range(64))


def test_learning_rates_and_the_models_in_attributes_stay(sim, tag):
    trainer = Trainer()
    rate = torch.tensor(0.1)
    trainer.optimizer.param_groups[0]["lr"] = rate
    trainer.optimizer.model = trainer.model
    trainer.optimizer.weights = [p.detach() for p in trainer.model.parameters()]
    offloaded = offload(trainer.optimizer, tag=tag())
    with offloaded.paused():
        assert float(rate) == pytest.approx(0.1)
        trainer.model(torch.ones(1, 32))
    assert offloaded.bytes == 0


@pytest.mark.parametrize("model_first", [False, True])
def test_states_that_alias_a_parameter_stay_with_it(sim, tag, model_first):
    trainer = Trainer()
    for parameter in trainer.model.parameters():
        trainer.optimizer.state[parameter]["master"] = parameter.detach().float()
    x = torch.ones(1, 32)
    expected = trainer.model(x).detach()
    name = tag("model")
    weights = [offload(trainer.model, tag=name)] if model_first else []
    states = offload(trainer.optimizer, tag=tag("optimizer"))
    with states.paused():
        assert torch.equal(trainer.model(x), expected)
    weights = weights or [offload(trainer.model, tag=name)]
    for state in states_of(trainer.optimizer):
        assert lies_in(state, name)
    with weights[0].paused(), states.paused():
        assert sim.tag_bytes() == 0
    assert torch.equal(trainer.model(x), expected)


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("model_first", [False, True])
def test_states_that_alias_a_parameter_of_another_object_stay_with_it(
    sim, tag, model_first, together
):
    trainer = Trainer()
    frozen = trainer.model[3].requires_grad_(False)
    trainer.optimizer = torch.optim.SGD(trainer.model[0].parameters(), lr=0.1)
    state = trainer.optimizer.state[trainer.model[0].weight]
    state["reference"] = frozen.weight.detach()
    state["own"] = torch.ones(64)
    x = torch.ones(1, 32)
    expected = trainer.model(x).detach()
    states, weights = tag("optimizer"), tag("model")
    if together:
        targets = [trainer.optimizer, trainer.model]
        offloaded = offload(targets[::-1] if model_first else targets, tag=states)
        assert lies_in(frozen.weight, states) and lies_in(state["reference"], states)
    else:
        for target in [trainer.model, trainer.optimizer][:: 1 if model_first else -1]:
            if target is trainer.optimizer:
                offloaded = offload(target, tag=states)
            else:
                offload(target, tag=weights)
        with offloaded.paused():
            assert torch.equal(trainer.model(x), expected)
        assert offloaded.bytes == state["own"].nbytes and offloaded.bytes_elsewhere == 0
        assert lies_in(frozen.weight, weights) and lies_in(state["reference"], weights)
    assert lies_in(state["own"], states)
    with memsaver.paused():
        assert sim.tag_bytes() == 0
    assert torch.equal(trainer.model(x), expected)


@pytest.mark.parametrize("clear", ["all", "one", "inner"])
def test_states_made_anew_go_into_the_tag_with_the_step_that_makes_them(sim, tag, clear):
    trainer = Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    trainer.step()
    first = trainer.model[0].weight
    if clear == "all":
        trainer.optimizer.state.clear()
    elif clear == "one":
        del trainer.optimizer.state[first]
    else:
        trainer.optimizer.state[first].clear()
    trainer.step()
    assert lies_in(trainer.optimizer.state[first]["exp_avg"], offloaded.tag)


@pytest.mark.parametrize("handles", [1, 2])
def test_a_model_that_was_compiled_in_place_is_refused_too(sim, tag, handles):
    trainer = Trainer()
    trainer.model.compile(backend="eager")
    trainer.model[0].compile(backend="eager")
    x = torch.ones(2, 32)
    expected = trainer.model(x)
    del expected
    compiled = trainer.model._compiled_call_impl
    name = tag()
    offloaded, *_others = [offload(trainer.model, tag=name) for _ in range(handles)]
    for _ in range(2):
        with offloaded.paused():
            for work in (trainer.model, trainer.model[0]):
                with pytest.raises(memsaver.InvalidStateError):
                    work(x)
        trainer.model(x)
        assert trainer.model._compiled_call_impl is compiled


@dataclasses.dataclass(eq=False)
class Described(torch.nn.Module):
    width: int
    inner: torch.nn.Module

    def __new__(cls, *arguments):
        made = super().__new__(cls)
        torch.nn.Module.__init__(made)
        return made

    def __post_init__(self):
        self.own = torch.nn.Parameter(torch.ones(self.width))

    def forward(self, x):
        return self.inner(x) * self.own[0]


def test_a_module_that_is_a_dataclass_is_a_module(sim, tag):
    model = Described(1000, torch.nn.Linear(4, 4))
    offloaded = offload(model, tag=tag())
    assert (offloaded.bytes, offloaded.bytes_elsewhere) == (4 * (1000 + 16 + 4), 0)
    with offloaded.paused(), pytest.raises(memsaver.InvalidStateError):
        model(torch.ones(1, 4))


def test_offloaded_tensors_can_be_swapped(sim, tag):
    tensor, other = torch.nn.Parameter(torch.ones(8)), torch.nn.Parameter(torch.zeros(8))
    offloaded = offload(tensor, tag=tag())
    torch.utils.swap_tensors(tensor, other)
    with offloaded.paused():
        assert lies_in(tensor, offloaded.tag)
    assert tensor.tolist() == [0] * 8


def test_a_module_without_a_hash_is_refused(sim, tag):
    class Odd(torch.nn.Linear):
        __hash__ = None

        def __eq__(self, other):
            return self is other

    for model in (Odd(4, 4), torch.nn.Sequential(Odd(4, 4))):
        with pytest.raises(memsaver.ConfigError, match="hash"):
            offload(model, tag=tag())


def test_a_tag_without_a_backup_gets_one(sim, tag):
    new, plain = tag("new"), tag("plain")
    with memsaver.region(plain):
        pass
    for name in (new, plain):
        offload(torch.ones(4), tag=name)
        assert memsaver.stats()[name][0].backup == "host"


# --- aliases on the simulated driver --------------------------------------------------------------

ALIASES = {
    "numpy": lambda t: t.detach().numpy(),
    "numpy view": lambda t: t.detach().numpy()[3:],
    "dlpack": lambda t: torch.from_dlpack(t.detach()),
    "numpy dlpack": lambda t: __import__("numpy").from_dlpack(t.detach()),
    "capsule": lambda t: torch.utils.dlpack.to_dlpack(t.detach()),
    "storage": lambda t: t.untyped_storage(),
    "typed storage": lambda t: torch.storage.TypedStorage(
        wrap_storage=t.untyped_storage(), dtype=t.dtype, _internal=True
    ),
    "shared": lambda t: t.share_memory_(),
}
if sys.version_info >= (
    3,
    11,
):  # before, one array in a container that is not tracked is overlooked
    ALIASES["numpy in a dict"] = lambda t: {"view": t.detach().numpy()}


@pytest.mark.parametrize("kind", ALIASES)
def test_an_alias_that_cannot_be_redirected_is_rejected_until_it_is_deleted(sim, tag, kind):
    tensor = torch.arange(64.0)
    alias = ALIASES[kind](tensor)
    address = tensor.data_ptr()
    name = tag()
    with pytest.raises(memsaver.InvalidStateError, match="Nothing was moved"):
        offload(tensor, tag=name)
    assert tensor.data_ptr() == address
    del alias
    if kind == "shared":
        tensor.data = tensor.detach().clone()
    with offload(tensor, tag=name).paused():
        assert not sim.accessible(tensor.data_ptr())
    assert tensor.tolist() == list(range(64))


BUFFERS = {
    "bytearray": bytearray,
    "slice of a memoryview": lambda data: memoryview(bytearray(data) + bytearray(8))[: len(data)],
    "array": lambda data: array.array("f", data),
    "mmap": lambda data: mmap.mmap(-1, len(data)),
    "ctypes": lambda data: (ctypes.c_char * len(data)).from_buffer_copy(data),
}


@pytest.mark.parametrize("kind", BUFFERS)
def test_memory_of_a_buffer_is_rejected_until_the_buffer_is_deleted(sim, tag, kind):
    buffer = BUFFERS[kind](bytes(64 * 64 * 4))
    tensor = torch.frombuffer(buffer, dtype=torch.float32, count=64 * 64).view(64, 64)
    model = torch.nn.Linear(64, 64, bias=False)
    model.weight.data = tensor
    del tensor
    name, unrelated = tag(), bytearray(64)
    with pytest.raises(memsaver.InvalidStateError, match="shares its memory with a ") as caught:
        offload(model, tag=name)
    assert "numpy" not in str(caught.value)
    model.weight.data.fill_(1)
    assert bytes(memoryview(buffer).cast("B")[:4]) == b"\0\0\x80\x3f"
    del buffer
    with offload(model, tag=name).paused():
        assert not sim.accessible(model.weight.data_ptr())
    assert bool((model.weight == 1).all()) and unrelated == bytearray(64)


@pytest.mark.filterwarnings("ignore")
def test_quantised_and_conjugated_tensors_keep_their_kind(sim, tag):
    quantised = torch.quantize_per_tensor(torch.arange(8.0), 0.5, 3, torch.quint8)
    conjugated = torch.tensor([1 + 2j, 3 - 4j]).conj()
    expected = quantised.dequantize().tolist(), conjugated.tolist()
    with offload(quantised, conjugated, tag=tag()).paused():
        pass
    assert quantised.q_scale() == 0.5 and quantised.q_zero_point() == 3
    assert (quantised.dequantize().tolist(), conjugated.tolist()) == expected


def test_a_move_that_fails_half_way_leaves_all_aliases_together(sim, tag, monkeypatch):
    from memsaver.integrations.trainer import simulated_storages as module

    tensor = torch.arange(64.0)
    views = [tensor.view(8, 8), tensor[1:]]
    calls = []
    point = module._point

    def failing(user, storage):
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("no")
        point(user, storage)

    monkeypatch.setattr(module, "_point", failing)
    with pytest.raises(memsaver.InvalidStateError, match="were not moved"):
        offload(tensor, tag=tag())
    storages = {one.untyped_storage().data_ptr() for one in (tensor, *views)}
    assert storages == {tensor.data_ptr()}
    assert not lies_in(tensor, tag.names[0])
    monkeypatch.undo()
    offload(tensor, tag=tag.names[0])
    assert bytes_of(views[0]) == bytes_of(tensor)


def test_a_default_device_changes_nothing(sim, tag):
    tensor = torch.arange(64.0)
    with torch.device("meta"), offload(tensor, tag=tag()).paused():
        assert lies_in(tensor, tag.names[0])
    assert tensor.tolist() == list(range(64))


def test_functions_under_a_debugger_keep_their_variables(sim, tag):
    stopped, go = threading.Event(), threading.Event()

    def work(value):
        return value

    def debug(frame, event, _):
        if frame.f_code is work.__code__:
            stopped.set()
            assert go.wait(60)
        return debug

    def run():
        sys.settrace(debug)
        return work(5)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run)
        assert stopped.wait(60)
        try:
            offload(torch.nn.Linear(4, 4), tag=tag("t")).close()
        finally:
            go.set()
        assert running.result() == 5
