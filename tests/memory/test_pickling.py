"""Tests tensors in regions that are pickled, saved, copied or sent to another process."""

from __future__ import annotations

import copy
import copyreg
import io
import pickle
import re
import signal
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
from looks import held, released_soon

import memsaver
from memsaver import simulator
from memsaver._memory import pickling
from memsaver._memory.memory_ranges import ranges_of
from memsaver._memory.sharing import sending

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.each_python


def saved(value: object) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


@pytest.fixture
def name(tag):
    return tag("weights")


@pytest.fixture
def make(sim, name):
    """Create a tensor with known contents in the tag; only the test refers to the tensor."""

    def made() -> torch.Tensor:
        with memsaver.region(name, backup="host"):
            tensor = simulator.empty((16, 4), dtype=torch.float32)
        return tensor.copy_(torch.arange(64, dtype=torch.float32).reshape(16, 4))

    return made


WAYS = {
    "tensor": lambda tensor: tensor,
    "view": lambda tensor: tensor[3:, 1],
    "parameter": lambda tensor: torch.nn.Parameter(tensor),
    "module": lambda tensor: torch.nn.ParameterDict({"w": torch.nn.Parameter(tensor)}),
    "state": lambda tensor: {"step": 3, "w": [tensor.view(torch.int32)]},
}
ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


@ways
def test_mapped_tensors_are_pickled_and_saved(make, way):
    tensor = make()
    made = way(tensor)
    plain = way(tensor.clone())
    again = [
        pickle.loads(pickle.dumps(made)),
        pickle.loads(pickle.dumps(made, protocol=2)),
        torch.load(saved(made), weights_only=False),
        copy.deepcopy(made),
    ]
    del made
    for other in again:
        assert type(other) is type(plain)
        assert repr(other) == repr(plain)


@ways
def test_paused_tensors_are_rejected(make, name, way):
    tensor = make()
    made = way(tensor)
    memsaver.pause(name)
    for save in (pickle.dumps, saved):
        with pytest.raises(memsaver.InvalidStateError, match="resume") as caught:
            save(made)
        assert caught.value.tag == name
    assert memsaver.backup_view(tensor).tolist()[1] == [4, 5, 6, 7]
    file = saved(memsaver.backup_view(tensor))  # the error's advice
    memsaver.resume(name)
    assert torch.equal(torch.load(file), tensor)
    pickle.dumps(made)


def test_a_shallow_copy_of_a_paused_one_shares_its_memory(make, name):
    tensor = make()
    with memsaver.paused(name):
        shared = copy.copy(tensor)
        assert shared.data_ptr() == tensor.data_ptr()
    assert torch.equal(shared, tensor)


@pytest.mark.parametrize("save", [pickle.dumps, saved])
def test_pickling_waits_for_a_transition_in_progress(sim, make, name, save):
    tensor = make()
    with held(sim):
        going = memsaver.pause(name, wait=False)
        with released_soon(sim), pytest.raises(memsaver.InvalidStateError, match="is paused"):
            save(tensor)
    going.wait()
    with held(sim):
        coming = memsaver.resume(name, wait=False)
        with released_soon(sim):
            made = save(tensor)
    coming.wait()
    again = torch.load(made) if isinstance(made, io.BytesIO) else pickle.loads(made)
    assert torch.equal(again, tensor)


def test_a_callback_and_its_threads_can_pickle_tensors_of_its_tag(make, name):
    tensor, made = make(), []

    def pickled(_):
        made.append(pickle.dumps(tensor))
        thread = threading.Thread(target=lambda: made.append(pickle.dumps(tensor)))
        thread.start()
        thread.join(20)

    registration = memsaver.on_resume(pickled, tag=name)
    memsaver.pause(name)
    memsaver.resume(name, wait=False).wait()
    registration.remove()
    assert len(made) == 2 and torch.equal(pickle.loads(made[1]), tensor)


@ways
@pytest.mark.parametrize("paused", [False, True], ids=["mapped", "paused"])
def test_no_tensor_is_sent_to_another_process(make, name, way, paused):
    tensor = make()
    made = way(tensor)
    address = tensor.data_ptr()
    if paused:
        memsaver.pause(name)
    with pytest.raises(memsaver.ConfigError, match=r"send a copy: tensor\.clone\(\)") as caught:
        ForkingPickler.dumps(made)
    assert caught.value.tag == name
    assert ("memsaver.resume" in str(caught.value)) is paused
    assert tensor.data_ptr() == address  # it was not moved either
    if paused:
        memsaver.resume(name)


def test_the_advice_in_the_error_works(make):
    tensor = make()
    with pytest.raises(memsaver.ConfigError, match="send a copy: ") as caught:
        ForkingPickler.dumps(tensor)
    advice = re.search(r"send a copy: (tensor\.\w+\(\))", str(caught.value))[1]
    copied = pickle.loads(ForkingPickler.dumps(eval(advice, {"tensor": tensor})))
    assert torch.equal(copied, tensor)


def test_other_tensors_are_as_before(make):
    make()
    plain = torch.arange(5.0)
    for other in (
        pickle.loads(pickle.dumps(plain)),
        pickle.loads(ForkingPickler.dumps(plain)),
        torch.load(saved(plain)),
        copy.copy(plain),
    ):
        assert torch.equal(other, plain)
    parameter = torch.nn.Parameter(torch.ones(2), requires_grad=False)
    again = pickle.loads(pickle.dumps(parameter))
    assert type(again) is torch.nn.Parameter and not again.requires_grad
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(pickle.loads(pickle.dumps(sparse)).to_dense(), torch.eye(3))
    meta = torch.empty(3, device="meta")
    assert pickle.loads(pickle.dumps(meta)).is_meta
    tagged = torch.ones(2)
    tagged.note = "kept"  # a Python attribute
    assert pickle.loads(pickle.dumps(tagged)).note == "kept"


def test_explain_states_forbidden_operations(make, name):
    tensor = make()
    assert "CUDA IPC cannot share it" in str(memsaver.explain(tensor))
    with memsaver.paused(name):
        assert "nothing that saves or sends it" in str(memsaver.explain(tensor))


def test_what_is_registered_and_when(run_python):
    """Reducers are registered when a region's first tensor is created.

    These reducers call other libraries' reducers.
    """
    program = """
import copyreg, pickle, torch, memsaver
from memsaver import simulator

copyreg.pickle(torch.Tensor, lambda tensor: (list, ((1, 2, 3),)))
before = dict(copyreg.dispatch_table)
with memsaver.region("weights"):
    pass
assert copyreg.dispatch_table == before
with memsaver.region("weights"):
    tensor = simulator.empty(4)
changed = [kind for kind, way in copyreg.dispatch_table.items() if before.get(kind) is not way]
assert set(changed) == {torch.Tensor, torch.nn.Parameter}, changed
assert pickle.loads(pickle.dumps(tensor)) == [1, 2, 3]
memsaver.pause("weights")
try:
    pickle.dumps(tensor)
except memsaver.InvalidStateError:
    memsaver.resume("weights")
else:
    raise AssertionError
"""
    run_python(program, with_torch=True)


def test_the_registered_functions_are_not_stacked(make):
    tensor = make()
    before = copyreg.dispatch_table[torch.Tensor]
    pickling.register(torch)
    assert copyreg.dispatch_table[torch.Tensor] is before
    assert pickle.loads(pickle.dumps(tensor)).shape == tensor.shape


@pytest.mark.parametrize("look", [sending.located, ranges_of])
def test_an_exception_of_a_signal_handler_is_not_taken_for_one_of_torch(look, monkeypatch):
    def expire(*_):
        raise TimeoutError("the alarm")

    class Tensor:
        shape = (1,)

        def data_ptr(self):
            signal.raise_signal(signal.SIGUSR1)
            return 0

        def untyped_storage(self):
            return self

        def stride(self):
            return (1,)

        def element_size(self):
            return 4

    before = signal.signal(signal.SIGUSR1, expire)
    try:
        with pytest.raises(TimeoutError, match="the alarm"):
            look(Tensor())
    finally:
        signal.signal(signal.SIGUSR1, before)
