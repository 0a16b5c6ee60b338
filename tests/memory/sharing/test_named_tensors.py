"""Tests named tensors in shareable regions that are sent together, in one list."""

from __future__ import annotations

import math
import os

import pytest
from importing_process import ImportFailed, allocations, dumped

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import importing, sending, sent_storages, wire

torch = pytest.importorskip("torch")


MIB = 1 << 20


class Named:
    """A list of named tensors for the pickler."""

    def __init__(self, *named) -> None:
        self._named = named

    def __reduce__(self):
        return sending.reduce_named(self._named, [])


def test_views_tied_tensors_and_several_tags_arrive(importer, make, tag):
    mine = make(8, 6)
    with memsaver.region(tag("second"), shareable=True):
        other = simulator.empty(5, torch.int32).fill_(7)
    named = [("a", mine), ("b", other), ("rows", mine[2:4]), ("a", mine)]
    for _ in range(2):  # the second time, the memory is still mapped
        importer.load("x", Named(*named))
        assert importer.ask("[(n, t.tolist()) for n, t in x]") == [
            [name, tensor.tolist()] for name, tensor in named
        ]
        importer.do("x[1][1][0] += 1; del x; gc.collect()")
    assert other[0] == 9


def test_more_tensors_than_one_message_can_request_arrive(importer, make):
    mine = [make(50).add_(number) for number in range(7)]
    importer.do("peers.wire.MOST_TOKENS = 3")
    importer.load("x", Named(*((str(number), one) for number, one in enumerate(mine))))
    importer.do("peers.wire.MOST_TOKENS = 2000")
    assert importer.ask("[int(t[0]) for _, t in x]") == list(range(7))


def test_more_extents_than_one_message_can_carry_arrive(importer, make, options, monkeypatch):
    monkeypatch.setattr(wire, "MOST_FILES", 4)
    options(slab_bytes=2 * MIB, share_bytes=2 * MIB)
    mine = [make(MIB // 2).add_(number) for number in range(10)]
    importer.load("x", Named(*((str(number), one) for number, one in enumerate(mine))))
    assert importer.ask("[int(t[0]) for _, t in x]") == list(range(10))


def test_all_tensors_arrive_or_none(importer, make, name, wait_until):
    kept, freed = make(50), make(50)
    data = dumped(Named(("kept", kept), ("freed", freed)))
    sent_storages.forget_expired(math.inf)
    del freed
    wait_until(lambda: allocations(name) == 1)
    with pytest.raises(ImportFailed, match="was freed"):
        importer.load_pickle("x", data)
    del kept
    wait_until(lambda: allocations(name) == 0)
    memsaver.pause(name)
    memsaver.resume(name)


def test_only_tensors_of_mapped_shareable_tags_can_be_sent(sim, make, name, tag):
    mine, later = make(50), tag("later")
    with memsaver.region(tag("unshared")):
        unshared = simulator.empty(4)
    with memsaver.region(later):
        earlier = simulator.empty(4)
    with memsaver.region(later, shareable=True):
        pass  # memory of `earlier` becomes exportable with the next resume
    none = torch.empty(0)
    assert [sending.can_send(t) for t in (mine, mine[5:], unshared, earlier, none)] == [
        *[True] * 2,
        *[False] * 3,
    ]
    for refused in (unshared, none):
        with pytest.raises(memsaver.SharingError):
            sending.reduce_named([("x", refused)], [])
    memsaver.pause(name)
    assert not sending.can_send(mine)
    with pytest.raises(memsaver.SharingError):
        sending.reduce_named([("x", mine)], [])
    memsaver.resume(name)
    memsaver.pause(later)
    memsaver.resume(later)
    assert sending.can_send(mine) and sending.can_send(earlier)


def test_processes_of_one_user_and_network_are_in_one_domain(importer, make, monkeypatch):
    own = wire.domain()
    assert own == importer.ask("peers.wire.domain()") != ""
    with monkeypatch.context() as patch:
        patch.setattr(wire.os, "geteuid", lambda: 12345)
        assert wire.domain() not in ("", own)
    with monkeypatch.context() as patch:
        patch.setattr(wire.os, "stat", lambda _: os.stat_result([0] * 10))
        assert wire.domain() not in ("", own)

    def no_proc(*_):
        raise FileNotFoundError

    monkeypatch.setattr(wire.os, "stat", no_proc)
    assert wire.domain() == ""


def test_memory_of_an_invisible_gpu_is_refused(make, name):
    rebuild, (rows,) = sending.reduce_named([("x", make(50))], [])
    assert rebuild is importing.rebuild_named
    place = list(rows[0][1][-1])
    place[-1] = "GPU-of-another-process"
    with pytest.raises(memsaver.SharingError, match="CUDA_VISIBLE_DEVICES"):
        rebuild([("x", (*rows[0][1][:-1], tuple(place)))])
    assert rebuild([]) == []
