"""Tests tensors of a shareable region that SGLang receives through a fake of its serializer."""

from __future__ import annotations

import base64
import io
import pickle
import types
from multiprocessing.reduction import ForkingPickler

import pytest

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import peers, sending
from memsaver.integrations.rollout.weights.payloads import mapped
from memsaver.integrations.sglang import shared_tensors

torch = pytest.importorskip("torch")


class SafeUnpickler(pickle.Unpickler):
    """An unpickler like SGLang's, which allows modules by prefix."""

    def find_class(self, module, name):
        if not f"{module}.".startswith(("torch.", "builtins.", "collections.")):
            raise RuntimeError(f"Blocked unsafe class loading ({module}.{name})")
        return super().find_class(module, name)


@pytest.fixture
def unpickler():
    """Return SGLang's unpickler, with the plugin's extension installed twice."""
    fresh = type("SafeUnpickler", (SafeUnpickler,), {"find_class": SafeUnpickler.find_class})
    module = types.SimpleNamespace(SafeUnpickler=fresh)
    for _ in range(2):
        shared_tensors.install(module)
    return fresh


def load(unpickler, data):
    return unpickler(io.BytesIO(data)).load()


def test_a_shareable_regions_tensors_are_received(sim, tag, unpickler, wait_until):
    with memsaver.region(tag("trained"), shareable=True):
        weights = simulator.empty((4, 4))
    weights.fill_(3)
    data = bytes(ForkingPickler.dumps([("layer.weight", weights.T)]))
    with pytest.raises(RuntimeError, match="Blocked"):
        load(SafeUnpickler, data)
    ((name, received),) = load(unpickler, data)
    received[0, 0] = 7
    assert name == "layer.weight" and weights[0, 0] == 7
    del received
    data = base64.b64decode(mapped([("layer.weight", weights)], []))
    with pytest.raises(RuntimeError, match="Blocked"):
        load(SafeUnpickler, data)
    ((name, received),) = load(unpickler, data)
    received[0, 1] = 8
    assert name == "layer.weight" and weights[0, 1] == 8
    del received
    wait_until(lambda: sending.kept() == 0)
    del weights
    wait_until(lambda: not any(peer.extents for peer in peers._peers.values()))


@pytest.mark.parametrize("name", ["Place", "ctypes.CDLL", "rebuild.__globals__"])
def test_no_other_function_of_memsaver_is_received(unpickler, name):
    data = f"\x80\x04c{shared_tensors.rebuild.__module__}\n{name}\n.".encode("latin1")
    with pytest.raises(RuntimeError, match="Blocked"):
        load(unpickler, data)


def test_a_version_without_such_an_unpickler():
    shared_tensors.install(types.SimpleNamespace())
    shared_tensors.install(types.SimpleNamespace(SafeUnpickler=object()))
