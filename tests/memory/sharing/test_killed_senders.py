"""Tests the memory of senders that are killed before, during or after an import."""

from __future__ import annotations

import gc
import pickle
import re
import weakref

import pytest

import memsaver
from memsaver._memory.sharing import peers, wire

torch = pytest.importorskip("torch")


def test_the_tensor_outlives_its_killed_sender(sender):
    process, message = sender
    mine = pickle.loads(message)
    process.kill()
    process.wait()
    assert int(mine.sum()) == 6 << 20
    del mine


def test_a_killed_sender_is_an_error(sender):
    process, message = sender
    process.kill()
    process.wait()
    for _ in range(2):
        with pytest.raises(memsaver.SharingError, match="has ended"):
            pickle.loads(message)


def test_a_sender_killed_in_the_middle_of_an_answer(sender, monkeypatch):
    process, message = sender

    def killed_first(connection, request, *arguments, **options):
        process.kill()
        process.wait()
        raise BrokenPipeError

    monkeypatch.setattr(wire, "send", killed_first)
    with pytest.raises(memsaver.SharingError, match="has ended"):
        pickle.loads(message)


@pytest.mark.parametrize("call", ["cuMemUnmap", "cuMemRelease", "cuCtxPushCurrent"])
def test_memory_of_a_killed_sender_is_released_after_a_refusal(sim, sender, wait_until, call):
    """A killed sender cannot request the release again."""
    before = sim.counts()
    process, message = sender
    mine = pickle.loads(message)
    process.kill()
    process.wait()
    endpoint = exporter_of(message)
    wait_until(lambda: not peers._peers[endpoint]._is_connected)
    with sim.fault(call, times=0):
        calls = sim.calls(call)
        del mine
        wait_until(lambda: sim.calls(call) > calls)
    wait_until(lambda: endpoint not in peers._peers)
    memsaver.trim()
    wait_until(lambda: sim.counts().handles == before.handles)
    assert sim.counts().mappings == before.mappings


def test_a_sender_killed_while_the_connection_is_recorded(sender, monkeypatch, wait_until):
    """If the dead connection stayed recorded, it would delay later messages and leak a
    descriptor.
    """
    process, message = sender
    connect = peers.Peer

    def connecting(*arguments):
        made = connect(*arguments)
        process.kill()
        process.wait()
        wait_until(lambda: made._has_ended)
        return made

    with monkeypatch.context() as patch, pytest.raises(memsaver.SharingError, match="has ended"):
        patch.setattr(peers, "Peer", connecting)
        pickle.loads(message)
    assert exporter_of(message) not in peers._peers


@pytest.fixture
def uncollected():
    """Disable the garbage collector during the test."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_failed_import_leaves_nothing_to_the_garbage_collector(
    sim, sender, uncollected, wait_until
):
    """Otherwise, descriptors and reserved addresses would be kept until the next collection."""
    process, message = sender
    with sim.fault("cuMemMap"), pytest.raises(memsaver.DriverError):
        pickle.loads(message)
    connection = weakref.ref(peers._peers[exporter_of(message)])
    process.kill()
    process.wait()
    wait_until(lambda: connection() is None)


def exporter_of(message: bytes) -> str:
    """Return the endpoint of the process that sent a message."""
    (found,) = re.findall(rb"memsaver-share-[0-9a-f-]+", message)
    return found.decode()
