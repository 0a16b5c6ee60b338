"""Tests connections between processes: descriptors, stalled processes, exited processes and
threads."""

from __future__ import annotations

import contextlib
import errno
import functools
import gc
import os
import pickle
import resource
import signal
import socket
import time
import types
from pathlib import Path

import pytest
from importing_process import ImportFailed, allocations, dumped

import memsaver
from memsaver._memory.sharing import exporter, peers, wire
from memsaver._runtime.native import _C

torch = pytest.importorskip("torch")

MIB = 1 << 20

MANY_FILES = """
import resource
resource.setrlimit(resource.RLIMIT_NOFILE, (3000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
files = [open(os.devnull) for _ in range(1100)]
"""
FEW_FILES = """
import resource
limits = resource.getrlimit(resource.RLIMIT_NOFILE)
count = max(map(int, os.listdir("/proc/self/fd"))) + 3
resource.setrlimit(resource.RLIMIT_NOFILE, (count, limits[1]))
"""


def imported_bytes(name) -> int:
    return sum(nbytes for tag, _, nbytes in _C.importers() if tag == name)


def test_a_receiver_with_many_descriptors(own_importer, make, name, wait_until):
    own_importer.do(MANY_FILES)
    own_importer.load_pickle("x", dumped(make(50)))
    assert own_importer.ask("min(peer._wake for peer in peers._peers.values())") > 1024
    own_importer.do("del x; gc.collect()")
    wait_until(lambda: allocations(name) == 0)
    memsaver.pause(name)


def test_a_sender_with_many_descriptors(own_importer, make, name, options):
    """The sender detects the exit of a process, but not before the process exits."""
    mine = make(50)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 3000), limits[1]))
        for _ in range(1100):
            stack.enter_context(open(os.devnull))
        own_importer.load("x", mine)
        own_importer.do("[peer._socket.shutdown(2) for peer in peers._peers.values()]")
        options(importer_seconds=0.2)
        with pytest.raises(memsaver.TagSharedError):
            memsaver.pause(name)
        own_importer.kill()
        options(importer_seconds=30)
        memsaver.pause(name)


@pytest.mark.parametrize("most", [4, 250])
def test_a_receiver_without_descriptors(
    own_importer, make, name, options, monkeypatch, wait_until, most
):
    """The receiver maps no memory of the message, raises an error, and can receive again."""
    monkeypatch.setattr(wire, "MOST_FILES", most)
    options(slab_bytes=2 * MIB, share_bytes=2 * MIB)
    mine = [make(MIB // 2) for _ in range(10)]
    own_importer.load("y", make(50))  # connects
    own_importer.do("del y; gc.collect()")
    wait_until(lambda: not _C.importers())  # it has closed the driver's descriptor
    own_importer.do(FEW_FILES)
    with pytest.raises(ImportFailed, match="raise the limit of open files") as caught:
        own_importer.load("x", mine)
    assert caught.value.kind == "SharingError"
    memsaver.pause(name)  # nothing is recorded as imported for ever
    memsaver.resume(name)
    own_importer.do("resource.setrlimit(resource.RLIMIT_NOFILE, limits)")
    own_importer.load("x", mine)
    assert own_importer.ask("[int(t[-1]) for t in x]") == [MIB // 2 - 1] * 10


def test_descriptors_that_cannot_be_sent(importer, make, name, monkeypatch):
    send = wire.send

    def refusing(connection, message, files=(), **options):
        if files:
            raise OSError(errno.ETOOMANYREFS, "too many references")
        send(connection, message, files, **options)

    mine = make(50)
    with monkeypatch.context() as patch:
        patch.setattr(wire, "send", refusing)
        with pytest.raises(ImportFailed, match=r"could not be sent: .*too many"):
            importer.load("x", mine)
    assert not imported_bytes(name) and not exporter.held()
    importer.load("x", mine)


def _are_stopped(pid):
    """Return whether all threads of a process are stopped, because each thread reacts separately
    to the signal.
    """
    stats = (task / "stat" for task in Path(f"/proc/{pid}/task").iterdir())
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def test_an_importer_that_does_not_read_delays_no_other(
    own_importer, importer, make, name, in_thread, wait_until
):
    mine = make(50)
    own_importer.load("x", mine)
    own_importer.do("del x; gc.collect()")
    server = exporter._servers[os.getpid()]
    os.kill(own_importer.pid, signal.SIGSTOP)
    try:
        wait_until(lambda: _are_stopped(own_importer.pid))
        going = in_thread(lambda: [server._request_release() for _ in range(3000)])
        going.result()
        assert server.owes_requests
        os.eventfd_write(server.wake, 1)
        importer.load("x", mine)
        importer.do("del x; gc.collect()")
        os.eventfd_write(server.requests, 1)
        wait_until(lambda: {pid for _, pid, _ in _C.importers()} == {own_importer.pid})
    finally:
        os.kill(own_importer.pid, signal.SIGCONT)
    wait_until(lambda: not server.owes_requests)
    memsaver.pause(name)


def test_a_second_connection_leaves_the_first(make, wait_until):
    """If two threads connect at the same time, one of the threads closes its connection again."""
    mine = make(50)
    again = pickle.loads(dumped(mine))
    endpoint = exporter.endpoint()
    wake = closed_connection(endpoint, wait_until)
    wait_until(lambda: gc.collect() >= 0 and not is_eventfd(wake))
    assert peers.is_foreign(again.data_ptr())


def closed_connection(endpoint, wait_until) -> int:
    second = peers.Peer(endpoint, "")
    wire.send(second._socket, {"bye": True})
    wait_until(lambda: second._has_ended)
    assert peers._peers[endpoint] is not second
    second.end(peers.Use(None))
    assert is_eventfd(second._wake)  # another thread may still write to it
    return second._wake


def is_eventfd(file) -> bool:
    with contextlib.suppress(OSError):
        return "eventfd" in os.readlink(f"/proc/self/fd/{file}")
    return False


@pytest.fixture
def kept_by_child(monkeypatch):
    """Fork a child before each new thread and while a server records an importer.

    Return a list that states whether each child has the socket.
    """
    start, kept = exporter.start_daemon, []

    def is_open_in_child(opened):
        child = os.fork()
        if child == 0:
            os._exit(opened.fileno() >= 0)
        return bool(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

    class Importer(exporter._Importer):
        def __init__(self, connection, pid):
            kept.append(is_open_in_child(connection))
            super().__init__(connection, pid)

    def forking(name, work):
        owner = work.args[0] if isinstance(work, functools.partial) else work.__self__
        (opened,) = (each for each in vars(owner).values() if isinstance(each, socket.socket))
        kept.append(is_open_in_child(opened))
        start(name, work)

    for module in (exporter, peers):
        monkeypatch.setattr(module, "start_daemon", forking)
    monkeypatch.setattr(exporter, "_Importer", Importer)
    return kept


def test_a_child_forked_while_a_connection_opens_does_not_keep_it(make, wait_until, kept_by_child):
    """Otherwise, neither process would detect the exit of the other until the child had exited."""
    again = pickle.loads(dumped(make(50)))
    kept_by_child.clear()
    closed_connection(exporter.endpoint(), wait_until)
    assert kept_by_child == [False, False, False] and peers.is_foreign(again.data_ptr())


def test_a_child_forked_while_a_server_starts_does_not_listen(make, kept_by_child):
    """Otherwise, importers would wait for the child after the parent had exited."""
    exporter._Server().close()
    assert kept_by_child == [False]


def test_a_server_without_descriptors_waits_before_the_next_attempt(make, monkeypatch):
    endpoint = exporter.endpoint()
    attempts = []

    def refused(self):
        attempts.append(time.monotonic())
        raise OSError(errno.EMFILE, "too many open files")

    with (
        monkeypatch.context() as patch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        patch.setattr(exporter._Server, "_accept", refused)
        connection.connect(f"\0{endpoint}")
        time.sleep(0.35)
    assert 1 <= len(attempts) < 8
    assert pickle.loads(dumped(make(3))).tolist() == [0, 1, 2]


def test_a_connection_without_a_thread_leaves_no_descriptor(make, monkeypatch, wait_until):
    endpoint = exporter.endpoint()
    mine = make(3)
    before = os.listdir("/proc/self/fd")

    def refused(*arguments):
        raise RuntimeError("can't start new thread")

    with (
        monkeypatch.context() as patch,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as connection,
    ):
        patch.setattr(exporter, "start_daemon", refused)
        connection.connect(f"\0{endpoint}")
        assert "can't start new thread" in wire.receive(connection)[0]["error"]
        assert wire.receive(connection) == ({}, [])
    wait_until(lambda: os.listdir("/proc/self/fd") == before)
    assert pickle.loads(dumped(mine)).tolist() == [0, 1, 2]


def test_the_reason_for_a_refused_connection_is_reported(
    own_importer, make, name, monkeypatch, wait_until
):
    """The reason can arrive before or during the import, or when the connection ends."""
    mine = make(50)
    exporter.endpoint()

    def refused(*arguments):
        raise RuntimeError("can't start new thread")

    for _ in range(10):
        with monkeypatch.context() as patch:
            patch.setattr(exporter, "start_daemon", refused)
            with pytest.raises(ImportFailed, match=r"cannot be sent.*: can't start new thread"):
                own_importer.load("x", mine)
        wait_until(lambda: own_importer.ask("len(peers._peers)") == 0)
    own_importer.load("x", mine)


def test_a_descriptor_is_not_reused_while_a_request_is_sent(
    own_importer, make, monkeypatch, wait_until
):
    """A request to a process that is exiting must not reach the next owner of the descriptor."""
    mine = make(50)
    own_importer.load("x", mine)
    server = exporter._servers[os.getpid()]
    count, sent, send = len(server.importers), [], wire.send

    def ending_first(connection, message, *arguments, **options):
        if "release" in message and wire.peer_of(connection) == own_importer.pid:
            own_importer.kill()
            wait_until(lambda: len(server.importers) < count)
            sent.append(connection.fileno())
        send(connection, message, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(wire, "send", ending_first)
        os.eventfd_write(server.requests, 1)
        wait_until(lambda: sent)
    assert sent[0] >= 0


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_connections_thread_that_fails_ends_the_connection(make, monkeypatch, wait_until):
    mine = make(50)

    def failing(self):
        raise RuntimeError("injected")

    with monkeypatch.context() as patch:
        patch.setattr(peers.Peer, "_work", failing)
        with pytest.raises(memsaver.SharingError, match="has ended"):
            pickle.loads(dumped(mine))
    wait_until(lambda: exporter.endpoint() not in peers._peers)
    assert pickle.loads(dumped(mine)).tolist() == mine.tolist()


@pytest.mark.parametrize(
    ("offset", "nbytes", "is_replaced"), [(0, 4, True), (0, 2, False), (4, 4, True), (6, 4, False)]
)
def test_freed_extents_that_overlap_new_ones_are_unmapped(make, offset, nbytes, is_replaced):
    make(1)
    unmapped = []
    peer = peers.Peer(exporter.endpoint(), "")
    span = peers.Span(0, 16 * MIB)
    span.native = types.SimpleNamespace(unmap=unmapped.extend)
    old = peers.Extent(span, offset * MIB, nbytes * MIB, 1 << 60)
    span.at[old.offset] = peer.extents[old.id] = old
    peer._make_room(span, [(2 * MIB, 4 * MIB, -1)])
    assert bool(unmapped) == is_replaced == (not span.at)
    peer.extents.clear()
    wire.send(peer._socket, {"bye": True})
