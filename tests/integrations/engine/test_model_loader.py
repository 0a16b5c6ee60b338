"""Tests that a GPU can write to the model's memory even if a load's tensors first use that GPU."""

import pytest
from process_code import code

ACCESS = """
import ctypes
from types import SimpleNamespace

driver = sim.opened
with memsaver.region("weights", backup="host"):
    block = Block(sim, 3 << 20, 1)
context = ctypes.c_void_p()


def use_device_1():
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0


def rights():
    found = []
    for device in (0, 1):
        flags, place = ctypes.c_ulonglong(), (ctypes.c_int * 2)(1, device)  # a CUmemLocation
        address = ctypes.c_ulonglong(block.address)
        assert driver.cuMemGetAccess(ctypes.byref(flags), place, address) == 0
        found.append(flags.value)
    return found


assert rights() == [3, 0]
"""

LOADER = """
from memsaver.integrations.engine.weights.plain_check import PlainCheck


def sent():
    use_device_1()
    yield "a", SimpleNamespace(shape=[1])


def load(tensors):
    names = [name for name, _ in tensors]
    assert rights() == [3, 3]
    return names


model = SimpleNamespace(load_weights=load)
with PlainCheck({("a", (1,))}, watches=WATCHES).around_loader(model):
    assert model.load_weights(sent()) == ["a"]
assert model.load_weights is load
"""

PAYLOAD = """
import base64, pickle
from torch.multiprocessing import reductions
from memsaver.integrations.engine.weights.payloads import named_tensors


class Tensor:
    is_cuda = True

    def __reduce__(self):
        return reductions.rebuild_cuda_tensor, ()


def rebuild_cuda_tensor():
    use_device_1()
    return Tensor()


rebuild_cuda_tensor.__module__ = reductions.__name__
reductions.rebuild_cuda_tensor = rebuild_cuda_tensor
named_tensors(base64.b64encode(pickle.dumps([("a", Tensor())])).decode())
assert rights() == [3, 3]
"""


@pytest.mark.parametrize(
    "load",
    [
        pytest.param(LOADER.replace("WATCHES", "True"), id="a watched load"),
        pytest.param(LOADER.replace("WATCHES", "False"), id="a stage's load"),
        pytest.param(PAYLOAD, id="a payload"),
    ],
)
def test_a_device_used_first_by_the_tensors_of_a_load_may_write_the_model(run_python, load):
    if load is PAYLOAD:
        pytest.importorskip("torch")
    run_python(code(ACCESS + load + "assert block.is_intact()"), MEMSAVER_SIM_DEVICES=2)
