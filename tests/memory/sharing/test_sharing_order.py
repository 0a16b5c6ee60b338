"""Tests that memory is kept for every receiver until the receiver's work is done."""

from __future__ import annotations

import math
import pickle
import time

import pytest
from importing_process import FILL_LATER, RUN_STREAMS, ImportFailed, allocations, dumped

from memsaver._memory.sharing import exporter, importing, peers, sending, sent_storages
from memsaver._runtime.native import _C

torch = pytest.importorskip("torch")


def test_memory_is_kept_for_work_that_uses_a_deleted_tensor(own_importer, make, name, wait_until):
    """The next bucket must not use memory that pending work in the other process reads or
    writes.
    """
    own_importer.load_pickle("x", dumped(make(50)))
    own_importer.do(FILL_LATER + "del x; gc.collect()")
    time.sleep(0.3)
    assert allocations(name) == 1
    own_importer.do(RUN_STREAMS)
    wait_until(lambda: allocations(name) == 0)


@pytest.mark.parametrize("ends_first", [False, True])
def test_two_receivers_of_one_storage(importer, own_importer, make, name, wait_until, ends_first):
    mine = make(50)
    messages = [dumped(mine), dumped(mine[10:])]
    del mine
    importer.load_pickle("x", messages[0])
    if not ends_first:
        own_importer.load_pickle("x", messages[1])
    importer.do("del x; gc.collect()")
    wait_until(lambda: exporter.held() == (not ends_first))
    if ends_first:
        own_importer.load_pickle("x", messages[1])
    assert allocations(name) == 1
    assert own_importer.ask("x.tolist()") == list(range(10, 50))
    own_importer.do("del x; gc.collect()")
    wait_until(lambda: allocations(name) == 0)


def test_a_late_message_never_maps_newer_memory(importer, make, name, wait_until):
    """The receiver still maps the extent, but the sender has reused its memory for another
    tensor.
    """
    kept, mine = make(50), make(50)
    importer.load("x", [kept, mine])
    late, address = dumped(mine), mine.data_ptr()
    sent_storages.forget_expired(math.inf)
    importer.do("x.pop(); gc.collect()")
    del mine
    wait_until(lambda: allocations(name) == 1)
    newer = make(50)
    assert newer.data_ptr() == address
    with pytest.raises(ImportFailed, match="was freed"):
        importer.load_pickle("y", late)
    importer.load("y", newer)


def test_a_late_message_is_valid_while_the_sender_has_the_tensor(importer, make, name, wait_until):
    mine = make(50)
    late = dumped(mine[5:])
    sent_storages.forget_expired(math.inf)
    for _ in range(2):
        importer.load_pickle("x", late)
        assert importer.ask("int(x[0])") == 5
    del mine
    time.sleep(0.05)
    assert allocations(name) == 1
    importer.forget()
    wait_until(lambda: allocations(name) == 0)


def test_a_receiver_takes_no_message_that_is_sent_during_its_answer(
    importer, make, name, monkeypatch, wait_until
):
    """The later message can reach a receiver before the exporter has recorded the receiver's
    answer.
    """
    mine, later = [make(50)], []
    message = dumped(mine[0])
    importer.load_pickle("x", message)
    importer.forget()
    send = exporter.wire.send

    def sending_again(connection, answer, *arguments, **options):
        if "extents" in answer:
            later.append(dumped(mine[0]))
        send(connection, answer, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exporter.wire, "send", sending_again)
        importer.load_pickle("x", message)
    mine.clear()
    importer.forget()
    wait_until(lambda: exporter.held() == 0)
    importer.load_pickle("x", later.pop())
    assert importer.ask("x.tolist()") == list(range(50))


def test_tokens_of_freed_tensors_are_forgotten(make, monkeypatch):
    monkeypatch.setattr(sent_storages, "_most_sent", 1)
    for _ in range(300):
        dumped(make(4))
        sent_storages.forget_expired(math.inf)
    assert len(sent_storages._sent) == len(sent_storages._sent_of) < 260


def test_each_use_of_a_storage_ends_alone(make, name, wait_until):
    """Two threads that receive the same storage at the same time can each begin a use."""
    mine = make(50)
    message = dumped(mine)
    first = pickle.loads(message)
    importing._memories.clear()  # as the second thread sees it
    second = pickle.loads(message)
    del mine
    wait_until(lambda: sending.kept() == 1)
    del first
    time.sleep(0.1)
    assert sending.kept() == allocations(name) == 1
    assert second.tolist() == list(range(50))
    del second
    wait_until(lambda: allocations(name) == 0)


def test_an_interrupted_use_ends(make, name, monkeypatch, wait_until):
    def interrupted(seconds):
        raise KeyboardInterrupt

    class Interrupting(peers.ImportRequest):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            self.is_decided.wait = interrupted

    message = dumped(make(50))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(peers, "ImportRequest", Interrupting)
        pickle.loads(message)
    wait_until(lambda: allocations(name) == 0)


def test_a_release_during_an_import_spares_what_it_needs(make, name, monkeypatch, wait_until):
    """A pause can request the release of mapped memory that the import has just found."""
    mine = make(50)
    again = pickle.loads(dumped(mine))
    address = again.data_ptr()
    del again
    wait_until(lambda: exporter.held() == 0)
    send = exporter.wire.send

    def requesting(connection, message, *arguments, **options):
        if "extents" in message:
            send(connection, {"release": True})
        send(connection, message, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(exporter.wire, "send", requesting)
        again = pickle.loads(dumped(mine))
    assert again.data_ptr() == address and again.tolist() == list(range(50))
    del again
    wait_until(lambda: not _C.importers())


def test_a_storage_is_not_reused_while_its_last_reference_is_deleted(make, monkeypatch, wait_until):
    """Another thread can receive the same storage while the last reference to it is being
    deleted.
    """
    mine = make(50)
    message = dumped(mine)
    end, found = peers.Peer.end, []

    def end_early(peer, use):
        end(peer, use)
        wait_until(lambda: not use.extents)
        found.append(pickle.loads(message))

    first = pickle.loads(message)
    with monkeypatch.context() as patch:
        patch.setattr(peers.Peer, "end", end_early)
        del first
    assert exporter.held() == 1
    assert found.pop().tolist() == list(range(50))
