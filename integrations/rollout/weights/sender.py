"""`Sender`: the trainer's side of a process group with an engine's ranks.

The group is not registered in torch's table of groups (`engine.weights.groups`), so no other code
in the trainer can find it, and `close` destroys it.
"""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import os
import socket
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

from memsaver._runtime.background import start_daemon
from memsaver._runtime.latches import Latch
from memsaver.errors import ConfigError

from ...engine.weights.groups import create_group

__all__ = ["END_SECONDS", "Aside", "FailureNotice", "Sender"]

_FAILED = "memsaver/failed"  # a key in the store
END_SECONDS = 10.0  # the longest wait for an answered or abandoned call to end on this side


class Sender:
    """Rank 0 of a process group whose other ranks belong to an engine.

    The sender owns the group and the store through which the group's ranks find each other. `close`
    shuts down the group and the store, including their sockets, descriptors and threads.

    Threads: only one thread at a time may use a sender, except that `close` may be called while
    another thread is in `connect`.

    Args:
        name: the group's name, which must differ from the names of all earlier groups of the
            engine.
        backend: "nccl" or "gloo".
        size: the number of ranks in the group, including this one.
        timeout: seconds to wait for the other ranks.
    """

    def __init__(self, name: str, backend: str, size: int, timeout: float) -> None:
        self._name, self._backend, self._size = name, backend, size
        self._wait = timedelta(seconds=timeout)
        self._closed = False
        self._store: Any = None
        self._client: Any = None
        self._group: Any = None
        self._address = ""

    def listen(self, address: str, port: int) -> int:
        """Create the store, which listens only on this address.

        Args:
            address: a host name or an IP address of this machine.
            port: a free port; 0 selects any free port.

        Returns:
            The port.

        Raises:
            ConfigError: the address does not belong to this machine, or the port is in use.
        """
        from torch.distributed import TCPStore

        try:
            with _listening(address, port) as listener:
                self._address, port = listener.getsockname()[:2]
                self._store = TCPStore(
                    self._address,
                    port,
                    self._size,
                    True,
                    self._wait,
                    wait_for_workers=False,
                    master_listen_fd=os.dup(listener.fileno()),
                )
            # A separate connection, whose operations fail at once when the store is closed.
            self._client = TCPStore(
                self._address, port, self._size, False, self._wait, wait_for_workers=False
            )
        except (OSError, RuntimeError, OverflowError, ValueError) as error:
            self.close()
            raise ConfigError(
                f"cannot create a group at address {address!r}, port {port}: {error}; address must "
                "be this machine's own and reachable from the engine's ranks, and port must be free"
            ) from error
        return port

    def connect(self) -> None:
        """Create the group. With gloo, wait until all ranks have joined."""
        device = _gloo_device(self._address) if self._backend == "gloo" else None
        self._group = create_group(
            self._client, self._name, self._backend, 0, self._size, self._wait, device
        )
        if self._closed:  # the join was abandoned
            self._shut_down()

    def send(self, tensors: Sequence[Any], timeout: float) -> None:
        """Broadcast tensors, and wait until all of them are sent.

        Args:
            tensors: contiguous tensors on the backend's device. All writes to the tensors must be
                complete.
            timeout: the time limit for each tensor in seconds, with gloo. With NCCL, only `abort`
                ends a broadcast.
        """
        from torch.distributed import BroadcastOptions

        options = BroadcastOptions()
        options.rootRank = 0
        if self._backend == "gloo":
            options.timeout = timedelta(seconds=timeout)
        with _current_device(tensors):
            if self._backend == "gloo":
                # One by one: queued broadcasts would keep the group open after a failure.
                for tensor in tensors:
                    self._group.broadcast([tensor], options).wait()
                return
            works = [self._group.broadcast([tensor], options) for tensor in tensors]
            for work in works:
                work.wait()
            if tensors and tensors[0].is_cuda:
                import torch

                torch.cuda.synchronize(tensors[0].device)

    def is_notified(self) -> bool:
        """Return whether a `FailureNotice` was sent; False after `close`. Thread-safe."""
        client = self._client
        try:
            return client is not None and client.check([_FAILED])
        except RuntimeError:  # `close` closed the connection
            return False

    def abort(self) -> None:
        """Make broadcasts in progress fail; wait at most `END_SECONDS`.

        A broadcast that the backend cannot abort ends at its timeout. If an abort hangs in NCCL,
        this method returns after `END_SECONDS`.
        """
        Aside(lambda: self._group.abort()).wait(END_SECONDS)

    def close(self) -> None:
        """Close the group and the store. Idempotent; waits at most `END_SECONDS`.

        A `connect` in progress fails. If a broadcast hangs, the group is closed when the broadcast
        ends.
        """
        self._closed = True
        if self._group is not None:
            Aside(self._shut_down).wait(END_SECONDS)
        self._store = self._client = None

    def _shut_down(self) -> None:
        """Shut the group down and drop its last reference; both steps can block. Runs once.

        No lock is acquired, because a finalizer or a signal handler might close the sender while
        its `close` is running.
        """
        group, self._group = self._group, None
        if group is not None:
            group.shutdown()


class FailureNotice:
    """A notice that an engine cannot receive tensors, sent through the store of the sender's group.

    Args:
        name: the group's name.
        address: the address of the store.
        port: the port of the store.
    """

    def __init__(self, name: str, address: str, port: int) -> None:
        self._name, self._address, self._port = name, address, port

    def send(self) -> None:
        """Notify the sender. Waits at most `END_SECONDS`; never raises."""
        Aside(self._send).wait(END_SECONDS)

    def _send(self) -> None:
        from torch.distributed import TCPStore

        limit = timedelta(seconds=END_SECONDS)
        TCPStore(self._address, self._port, None, False, limit, wait_for_workers=False).set(
            _FAILED, self._name
        )


@contextlib.contextmanager
def _listening(address: str, port: int) -> Iterator[socket.socket]:
    """Open a socket that listens on an address of this machine during the block."""
    family, kind, protocol, _, place = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        # Allows a port to be reused while closed connections of an earlier group still occupy it.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen()
        yield listener


def _gloo_device(address: str) -> Any:
    """Return a gloo device that listens on an address of this machine.

    Gloo can only connect addresses of the same family (IPv4 or IPv6), and the engine's ranks use
    the family of their host name's address. If `address` belongs to the other family, the device
    listens on a different address of the ranks' family: on its loopback address if `address` is a
    loopback address, otherwise on the address that torch chooses.
    """
    from torch.distributed import ProcessGroupGloo

    interface = os.environ.get("GLOO_SOCKET_IFNAME", "")
    if interface:
        return ProcessGroupGloo.create_device(interface=interface.split(",")[0])
    wanted = ipaddress.ip_address(address.partition("%")[0])
    version = _version_of_this_host()
    if wanted.is_loopback:
        same = address if wanted.version == version else {4: "127.0.0.1", 6: "::1"}[version]
        return ProcessGroupGloo.create_device(hostname=same)
    if wanted.is_unspecified or wanted.version != version:
        return ProcessGroupGloo.create_default_device()
    return ProcessGroupGloo.create_device(hostname=address)


def _version_of_this_host() -> int:
    """Return the IP version, 4 or 6, of the first bindable address of this host's name."""
    with contextlib.suppress(OSError):
        found = socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)
        for family, kind, protocol, _, place in found:
            with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as one:
                one.bind(place)
                return 6 if family == socket.AF_INET6 else 4
    return 4


class Aside:
    """Work that runs on its own thread.

    Attributes:
        error: the exception that the work raised, or None. The exception's traceback is removed,
            because its frames own sockets.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self.error: Exception | None = None
        self._done = Latch()
        start_daemon("weights", functools.partial(self._run, [work]))

    def _run(self, work: list[Callable[[], None]]) -> None:
        try:
            work.pop()()
        except Exception as error:
            self.error = error.with_traceback(None)
        finally:
            self._done.open()

    def wait(self, seconds: float) -> bool:
        """Wait at most `seconds` for the work; return whether it ended."""
        return self._done.wait(seconds)


@contextlib.contextmanager
def _current_device(tensors: Sequence[Any]) -> Iterator[None]:
    """Set this thread's current device to the tensors' device during the block."""
    if not tensors or not tensors[0].is_cuda:
        yield
        return
    import torch

    with torch.cuda.device(tensors[0].device):
        yield
