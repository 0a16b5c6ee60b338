"""Tests failures of sharing: paused tags, freed memory, exited senders and rejected calls."""

from __future__ import annotations

import math
import os
import pickle
import socket
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
from importing_process import ImportFailed, dumped

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import exporter, importing, peers, sent_storages, wire
from memsaver._runtime.native import _C

torch = pytest.importorskip("torch")

MIB = 1 << 20


def test_a_tensor_of_a_paused_tag_is_not_sent(make, name):
    mine = make(4)
    memsaver.pause(name)
    with pytest.raises(memsaver.SharingError, match="resume it first") as caught:
        dumped(mine)
    assert caught.value.tag == name and caught.value.status == "SHARING_FAILED"


def test_a_tensor_is_not_received_from_a_paused_tag(importer, make, name):
    mine = make(4)
    data = dumped(mine)
    memsaver.pause(name)
    with pytest.raises(ImportFailed, match="resume it first") as caught:
        importer.load_pickle("x", data)
    assert caught.value.kind == "SharingError"
    memsaver.resume(name)
    with pytest.raises(ImportFailed, match="freed or replaced"):
        importer.load_pickle("x", data)
    importer.load("x", mine)
    assert importer.ask("x.tolist()") == [0, 1, 2, 3]


@pytest.mark.parametrize("is_resumed", [False, True], ids=["paused", "resumed"])
def test_pages_that_a_swap_gave_to_another_tag_are_not_received(
    importer, make, name, tag, is_resumed
):
    mine = make(MIB)
    data = dumped(mine)
    other = tag("other")
    with memsaver.region(other, shareable=True):
        theirs = simulator.empty(MIB, dtype=torch.int32)
    memsaver.pause(other)
    memsaver.swap(out=name, into=other)
    importer.load("y", theirs.fill_(3))  # its pages are those of `mine` before the swap
    if is_resumed:
        memsaver.resume(name)
    with pytest.raises(ImportFailed, match="freed or replaced" if is_resumed else "resume it"):
        importer.load_pickle("x", data)
    assert importer.ask("int(y.sum())") == 3 * MIB


def test_freed_memory_is_not_received(importer, make, name):
    data = dumped(make(4))
    sent_storages.forget_expired(math.inf)
    with pytest.raises(ImportFailed, match="was freed"):
        importer.load_pickle("x", data)
    assert name not in [row[0] for row in _C.importers()]


def test_a_tensor_with_history_is_not_sent(sim, make):
    trained = torch.nn.Parameter(make(4).view(torch.float32))
    with pytest.raises(memsaver.SharingError, match="detach"):
        dumped(trained.view(2, 2))


OTHER_USER = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def test_an_import_that_is_interrupted_at_its_beginning_can_be_repeated(make, monkeypatch):
    """A signal handler can raise anywhere, even before the use whose end must be recorded has
    begun."""
    message = dumped(make(4))
    unraisable = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)

    class Interrupted:
        def __init__(self, place):
            pass

        @property
        def place(self):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(importing, "Use", Interrupted)
        pickle.loads(message)
    assert not unraisable
    assert pickle.loads(message).tolist() == [0, 1, 2, 3]


IMPORT_CALLS = (
    "cuMemAddressReserve",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemSetAccess",
)


@pytest.mark.parametrize("call", IMPORT_CALLS)
def test_a_refused_call_of_an_import_leaves_nothing(sim, sender, call):
    before = sim.counts()
    _, message = sender
    with sim.fault(call, times=0):
        with pytest.raises(memsaver.DriverError) as caught:
            pickle.loads(message)
    assert caught.value.call == call
    after = sim.counts()
    assert (after.handles, after.mappings) == (before.handles, before.mappings)
    again = pickle.loads(message)
    assert int(again[0]) == 6
    del again


def test_a_refused_export_is_reported_to_the_importer(sim, importer, make, name):
    mine = make(4)
    with sim.fault("cuMemExportToShareableHandle", times=0):
        with pytest.raises(ImportFailed, match="cuMemExportToShareableHandle"):
            importer.load("x", mine)
    assert name not in [row[0] for row in _C.importers()]
    importer.load("x", mine)


def delete_under_fault(importer, name, options, nth):
    """Delete an importer's `x`; from the `nth` call on, unmapping the memory fails.

    As a result, the tag cannot be paused. When the context ends, the driver permits the calls
    again.
    """
    call = f"simulator.fault('cuMemUnmap', 1, nth={nth}, times=0)"
    importer.do(f"from memsaver import simulator; fault = {call}")
    importer.do("fault.__enter__(); del x; gc.collect()")
    options(importer_seconds=0.2)
    with pytest.raises(memsaver.TagSharedError):
        memsaver.pause(name)
    options(importer_seconds=10)
    importer.do("fault.__exit__(None, None, None)")


def test_a_refused_unmapping_is_repeated(sim, importer, make, name, options):
    mine = make(4)
    importer.load("x", mine)
    delete_under_fault(importer, name, options, nth=1)
    memsaver.pause(name)


def test_partly_unmapped_memory_can_be_received_again(sim, own_importer, make, name, options):
    """The driver refuses to unmap one of two extents; both extents can be used again."""
    options(slab_bytes=2 * MIB, share_bytes=2 * MIB)
    mine = [make(MIB) for _ in range(2)]
    own_importer.load("x", mine)
    delete_under_fault(own_importer, name, options, nth=2)
    own_importer.load("x", mine)
    assert own_importer.ask("[t.tolist()[-1] for t in x]") == 2 * [MIB - 1]


@pytest.fixture
def stranger(monkeypatch):
    """Make the process at the other end of every socket appear to belong to another user."""
    monkeypatch.setattr(os, "geteuid", lambda: 54321)


def test_another_user_is_refused_by_the_sender(make, stranger, wait_until):
    endpoint = exporter.endpoint()
    make(4)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
        connection.connect(f"\0{endpoint}")
        message, files = wire.receive(connection)
        assert "run both processes as the same user" in message["error"] and not files
        assert wire.receive(connection) == ({}, [])  # closed


def test_another_user_is_refused_by_the_receiver(sender, stranger):
    with pytest.raises(memsaver.SharingError, match="same user"):
        pickle.loads(sender[1])


# Asks a server for a sent tensor without a check of the server's user. Returns the answer and the
# number of descriptors that came with it.
ASK = """
import contextlib, socket
from memsaver._memory.sharing import wire
def asked(endpoint, token):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection, \\
            contextlib.suppress(BrokenPipeError, ConnectionResetError):
        connection.connect("\\0" + endpoint)
        with contextlib.suppress(BrokenPipeError):  # refused before the request
            wire.send(connection, {"import": [token], "missing": True})
        try:
            answer, files = wire.receive(connection)
        except ConnectionResetError:  # the server closed without reading the request
            answer, files = wire.receive(connection)
        for file in files:
            os.close(file)
        wire.send(connection, {"bye": True})
    return [answer, len(files)]
"""


@needs_root
def test_a_process_of_another_user_receives_no_descriptors(own_importer, make, name, wait_until):
    mine = make(4)
    message = dumped(mine)
    token = max(sent_storages._sent)  # the newest
    request = f"asked({exporter.endpoint()!r}, {token})"
    own_importer.do(ASK)
    answer, files = own_importer.ask(request)
    assert "extents" in answer and files == 1  # the request is valid
    wait_until(lambda: not _C.importers() and not exporter.held())
    own_importer.do(f"os.setuid({OTHER_USER})")
    answer, files = own_importer.ask(request)
    assert answer.keys() == {"error", "tag"} and files == 0
    assert f"process {own_importer.pid} of user {OTHER_USER} cannot share" in answer["error"]
    with pytest.raises(ImportFailed, match=f"of user 0 .* of user {OTHER_USER}: run") as caught:
        own_importer.load_pickle("x", message)
    assert caught.value.kind == "SharingError"
    assert not _C.importers() and not exporter.held()
    memsaver.pause(name)


@needs_root
@pytest.mark.parametrize("sender", [OTHER_USER], indirect=True)
def test_a_sender_that_is_another_user_is_refused(sender):
    process, message = sender
    with pytest.raises(memsaver.SharingError, match=f"{process.pid} of user {OTHER_USER} cannot"):
        pickle.loads(message)


def test_a_malformed_message_ends_only_its_connection(importer, make, options):
    mine = make(4)
    endpoint = exporter.endpoint()
    imports = [b'{"import": %s, "missing": true}' % tokens for tokens in (b"5", b"[]", b"[[]]")]
    for data in (b"[]", b"{", *imports, b'{"import": []}', b"\xff", b'{"drop": 1}'):
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection:
            connection.connect(f"\0{endpoint}")
            connection.send(data)
    importer.load("x", mine)
    assert importer.ask("x.tolist()") == [0, 1, 2, 3]


def test_an_unknown_gpu_is_reported(make):
    function, arguments = ForkingPickler._extra_reducers[torch.Tensor](make(3))
    place = list(arguments[-1])
    place[-1] = "GPU-of-another-process"
    with pytest.raises(memsaver.SharingError, match="CUDA_VISIBLE_DEVICES"):
        function(*arguments[:-1], tuple(place))


def test_a_forked_child_leaves_its_parents_importers_alone(own_importer, make, name):
    mine = make(2 * MIB)
    own_importer.load("x", mine)
    child = os.fork()
    if child == 0:
        os._exit(0 if not exporter._servers and not peers._peers else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    own_importer.do("del x; gc.collect()")
    memsaver.pause(name)


def test_arguments_of_the_native_calls(sim, make, name, tag):
    mine = make(4)
    with pytest.raises(memsaver.ConfigError):
        _C.exportable(12345, 16)
    with pytest.raises(memsaver.UnknownTagError):
        _C.tag_make_shareable("no-such-tag")
    with pytest.raises(memsaver.SharingError):
        _C.exportable(mine.data_ptr(), 1 << 40)
    record = _C.Importer(os.getpid())
    with memsaver.region(tag("second"), shareable=True):
        other = simulator.empty(4)
    with pytest.raises(memsaver.ConfigError):
        record.export_extents([])
    with pytest.raises(memsaver.ConfigError, match="several tags"):
        record.export_extents([(mine.data_ptr(), 16), (other.data_ptr(), 16)])
    rows = record.export_extents([(mine.data_ptr(), 16)])
    assert record.export_extents([(mine.data_ptr(), 16)]) == []  # it has them
    _, nbytes, _, _, number, _, file = rows[0]
    foreign = _C.ForeignSpan(0, 8 * MIB)
    for offset, size in ((1, 2 * MIB), (0, 5), (8 * MIB, 2 * MIB), (0, 0), (1 << 63, 2 * MIB)):
        with pytest.raises(memsaver.ConfigError):
            foreign.map([(offset, size, file)])
    foreign.map([(2 * MIB, nbytes, file)])
    with pytest.raises(memsaver.ConfigError, match="overlaps"):
        foreign.map([(2 * MIB, nbytes, file)])
    foreign.unmap([0, 2 * MIB])
    with open(os.devnull) as other_file, pytest.raises(memsaver.DriverError):
        foreign.map([(0, 2 * MIB, other_file.fileno())])
    os.close(file)
    record.released([number, 999])
    record.close()


def test_a_receiver_that_has_not_used_memsaver_cannot_forward_a_tensor(sender, run_python):
    _, message = sender
    run_python(
        f"""
        import pickle
        from multiprocessing.reduction import ForkingPickler
        from refusals import raises
        tensor = pickle.loads(bytes.fromhex("{message.hex()}"))
        from memsaver.errors import SharingError
        assert "cannot be forwarded" in raises(SharingError, ForkingPickler.dumps, tensor)
        del tensor
        """
    )
