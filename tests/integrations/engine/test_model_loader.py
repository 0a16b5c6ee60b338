"""Test loads through a replaced `load_weights` method of a model."""

from process_code import code

LOAD = """
import ctypes
from types import SimpleNamespace

from memsaver.integrations.engine.weights.model_loader import replaced_loader

driver = sim.opened


class Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("id", ctypes.c_int)]


def access(block, device):
    flags = ctypes.c_ulonglong()
    place = Location(1, device)
    address = ctypes.c_ulonglong(block.address)
    assert driver.cuMemGetAccess(ctypes.byref(flags), ctypes.byref(place), address) == 0
    return flags.value


with memsaver.region("weights", backup="host"):
    block = Block(sim, 3 << 20, 1)
context = ctypes.c_void_p()


def sent():
    assert driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 1) == 0
    yield "a", 1


def load(tensors):
    assert [access(block, device) for device in (0, 1)] == [3, 3]
    return tensors


model = SimpleNamespace(load_weights=load)
assert access(block, 1) == 0
with replaced_loader(model, lambda given, load: load(given)):
    assert model.load_weights(sent()) == [("a", 1)]
assert model.load_weights is load and block.is_intact()
"""


def test_a_device_used_first_by_the_tensors_of_a_load_may_write_the_model(run_python):
    run_python(code(LOAD), MEMSAVER_SIM_DEVICES=2)
