"""Exchange of bytes between the ranks of a group, through a CPU backend such as gloo."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import weakref
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from memsaver._runtime.latches import Gate
from memsaver.distributed.arrivals import GONE, arrivals, missing_ranks
from memsaver.distributed.errors import GroupError, ranks_text
from memsaver.distributed.groups import modules, refusal_of
from memsaver.errors import InvalidStateError, MemsaverError, NotLoadedError

__all__ = ["Channel"]

_TEXT = "text"  # the key of `Channel.publish`
_GRACE_SECONDS = 5.0  # for a backend that ignores an operation's own timeout


class Channel:
    """A connection between the ranks of a `torch.distributed` group, for use by one thread.

    All channels of a group that have no lane share connections, which exist as long as the group.
    Therefore, such a channel can be used for one call or for many. With a lane, the connections and
    threads end with the channel, so use one channel for all calls.

    Args:
        group: the group; None means the world.
        lane: a name for calls that run concurrently with other calls, for example in another
            thread. On each rank, the channels of a lane are numbered in the order in which they
            connect. Channel k connects only to the channels numbered k on the other ranks. Groups
            with the same ranks share a lane. If a rank stops waiting for channel k, channels
            created later skip the number k.

    Attributes:
        lane: the lane's name.
        ranks: the group's ranks in the world, in the group's order.
        rank: this process's rank in the world.

    Raises:
        NotLoadedError: torch is not installed, or torch lacks gloo and the group has no CPU
            backend.
        InvalidStateError: torch.distributed is not initialized, this rank is not in the group, or
            the group was destroyed.
        ConfigError: `group` is not a process group.
    """

    def __init__(self, group: Any = None, lane: str = "") -> None:
        self._torch, self._dist = modules()
        refused = refusal_of(group)
        if refused is not None:
            raise refused
        self._group = self._dist.group.WORLD if group is None else group
        self._place = int(self._dist.get_rank(self._group))
        self.ranks: list[int] = self._dist.get_process_group_ranks(self._group)
        self.rank = self.ranks[self._place]
        config: str = self._dist.get_backend_config(self._group)
        carries = any(part.split(":")[0] == "cpu" for part in config.split(","))
        self._needs_gloo = bool(lane) or not carries
        if self._needs_gloo and not self._dist.is_gloo_available():
            raise NotLoadedError(
                f"the group's backend is {config}, which carries no CPU tensors, and this torch "
                "lacks gloo to add one that does: pass a group with a CPU backend"
                if not lane
                else "this torch lacks gloo, which the ranks need to communicate"
            )
        self.lane = lane
        if lane:
            self._link = _Link()
            # torch sorts a group's ranks, so equal sets of ranks have the same key.
            ranks = ",".join(map(str, self.ranks)).encode()
            self._key = (hashlib.blake2s(ranks, digest_size=8).hexdigest(), lane)
            self._number = _connected.get(self._dist.group.WORLD, Counter())[self._key]
            with contextlib.suppress(RuntimeError):  # the store does not answer
                while self._is_abandoned():
                    self._number += 1
        else:
            self._link = _links.setdefault(self._group, _Link())
            self._group_name = self._group.group_name

    def connect(self, timeout: float | None, what: str) -> None:
        """Create the lane's connections now rather than at the first call. A collective.

        Call this method before two lanes are used concurrently, because connecting waits in torch's
        store and blocks other threads of the process that use the store.

        Args:
            timeout: seconds to wait. See `all_gather`, which raises the same errors.
            what: a description of the call (see `all_gather`).
        """
        try:
            self._arrive()
            if self.lane:
                counts = _connected.setdefault(self._dist.group.WORLD, Counter())
                counts[self._key] = self._number + 1
                if self._is_abandoned():  # gloo would try to reach these ranks for five timeouts
                    raise _AbandonedError("another rank has already stopped waiting")
            self._prepare(None if timeout is None else timedelta(seconds=timeout))
        except MemsaverError:
            raise
        except Exception as error:
            raise self._lost(error, what) from error

    def close(self) -> None:
        """Close the connections, and delete references to the group and torch's store. Idempotent.

        The method does not wait. If another thread's call is in progress, that call keeps the
        connections until it ends. The references must be deleted because, while an object of an old
        group refers to torch's store, a later `init_process_group` in this process can reuse that
        store, with the old group's keys, and hang.
        """
        self._link.close()
        self._group = None

    def all_gather(self, payload: bytes, timeout: float | None, what: str) -> list[bytes]:
        """Return the bytes of all ranks, in the group's order. All ranks must pass the same number
        of bytes.

        Args:
            payload: this rank's bytes.
            timeout: seconds to wait for the other ranks; None means the group's own timeout.
            what: a description of the call, for the error message.

        Raises:
            GroupError: a rank has died or did not make the call in time, or the group is unusable.
        """

        def start(carrier: Any, wait: timedelta | None) -> tuple[Any, Any]:
            # Sums rows that are zero except this rank's, because a sum works in place and in every
            # backend.
            rows = self._zeros(len(self.ranks), len(payload))
            if payload:
                rows[self._place] = self._torch.frombuffer(
                    bytearray(payload), dtype=self._torch.uint8
                )
            options = self._dist.distributed_c10d.AllreduceOptions()
            if wait is not None:
                options.timeout = wait
            return rows, carrier.allreduce([rows], options)

        return [_bytes_of(row) for row in self._exchange(start, timeout, what)]

    def broadcast(
        self, payload: bytes, nbytes: int, timeout: float | None, what: str, root: int
    ) -> bytes:
        """Send the bytes of one rank to all ranks, and return them.

        Args:
            payload: the bytes, on the root. The value on other ranks is ignored.
            nbytes: the number of bytes, the same on all ranks.
            timeout: seconds to wait (see `all_gather`).
            what: a description of the call (see `all_gather`).
            root: the sender's index in the group.
        """

        def start(carrier: Any, wait: timedelta | None) -> tuple[Any, Any]:
            if self._place == root and payload:
                row = self._torch.frombuffer(bytearray(payload), dtype=self._torch.uint8)
            else:
                row = self._zeros(nbytes)
            options = self._dist.distributed_c10d.BroadcastOptions()
            options.rootRank, options.rootTensor = root, 0
            if wait is not None:
                options.timeout = wait
            return row, carrier.broadcast([row], options)

        return _bytes_of(self._exchange(start, timeout, what))

    def _zeros(self, *shape: int) -> Any:
        return self._torch.zeros(shape, dtype=self._torch.uint8, device="cpu")

    def _exchange(
        self,
        start: Callable[[Any, timedelta | None], tuple[Any, Any]],
        timeout: float | None,
        what: str,
    ) -> Any:
        """Return the result of the collective that `start` begins. Raises GroupError on failure."""
        wait = None if timeout is None else timedelta(seconds=timeout)
        try:
            self._arrive()
            carrier = self._prepare(wait)
            limit = wait
            if self._needs_gloo and wait is None:  # gloo uses the timeout of the first call
                limit = self._dist.distributed_c10d.default_pg_timeout
            result, work = start(carrier, limit)
            if wait is None:
                work.wait()
            else:
                work.wait(wait + timedelta(seconds=_GRACE_SECONDS))
        except MemsaverError:
            raise
        except Exception as error:
            raise self._lost(error, what) from error
        return result

    def announce(self) -> None:
        """Record in torch's store that this rank has arrived at the next collective.

        Raises:
            RuntimeError: the store does not respond. `withdraw` and `waiting` raise the same error.
        """
        self._record(self._link.collectives + 1)

    def withdraw(self) -> None:
        """Undo `announce`."""
        self._record(self._link.collectives)

    def waiting(self) -> list[int]:
        """Return the other ranks that wait for this rank in a collective."""
        others = [rank for rank in self.ranks if rank != self.rank]
        counts = arrivals(self._stored(), others)
        return [rank for rank in others if counts.get(rank, 0) > self._link.collectives]

    def publish(self, text: str) -> None:
        """Store a text that other ranks can read before this channel is connected.

        All ranks must store the same text.

        Raises:
            RuntimeError: the store does not respond. `published` and `unpublish` raise the same
                error.
        """
        if not self._stored().check([_TEXT]):  # most ranks of a large group need not send it
            self._stored().set(_TEXT, text)

    def published(self) -> str | None:
        """Return the text that a rank of the channel stored, or None."""
        store = self._stored()
        return str(store.get(_TEXT).decode()) if store.check([_TEXT]) else None

    def unpublish(self) -> None:
        """Remove the text."""
        self._stored().delete_key(_TEXT)

    @property
    def _name(self) -> str:
        """The prefix of the channel's keys in torch's store."""
        if self.lane:
            return "/".join(("memsaver", *self._key, str(self._number)))
        return f"memsaver/{self._group_name}"

    def _is_abandoned(self) -> bool:
        """Return whether a rank has stopped waiting on the lane's channel with this number."""
        return bool(self._prefixed("").check([GONE]))

    def _arrive(self) -> None:
        link = self._link
        if self._group is None or link.closed:
            raise InvalidStateError("the connections to the other ranks are closed")
        link.collectives += 1
        with contextlib.suppress(Exception):  # without a store, the missing ranks are unknown
            self._stored()
        if link.store is not None:
            self._record(link.collectives)

    def _record(self, collectives: int) -> None:
        self._stored().set(str(self.rank), str(collectives))

    def _stored(self) -> Any:
        """Return the store with the number of collectives that each rank has reached."""
        store = self._link.store
        if store is None:
            self._link.store = store = self._prefixed("")
        return store

    def _prefixed(self, end: str) -> Any:
        store = self._dist.distributed_c10d._get_default_store()
        return self._dist.PrefixStore(self._name + end, store)

    def _prepare(self, wait: timedelta | None) -> Any:
        """Return the process group that transfers the bytes, creating its connections if necessary.

        Raises:
            InvalidStateError: the channel is closed, or another call is creating the connections.
                Either a finalizer or a signal handler interrupted the other call on this thread, or
                the other call did not end within the timeout.
        """
        link, group = self._link, self._group
        if group is None or link.closed:
            raise InvalidStateError("the connections to the other ranks are closed")
        carrier = group
        if self._needs_gloo:
            limit = wait or self._dist.distributed_c10d.default_pg_timeout
            if not link.gloo:
                with link.making.passed(limit.total_seconds(), _being_made):
                    if not link.gloo:
                        link.gloo.append(
                            self._dist.ProcessGroupGloo(
                                self._prefixed("/gloo"), self._place, len(self.ranks), limit
                            )
                        )
            (carrier,) = link.gloo
        if link.closed:  # another thread has closed the link in the meantime
            link.close()
        return carrier

    def _lost(self, error: Exception, what: str) -> GroupError:
        store, count = self._link.store, self._link.collectives
        missing = missing_ranks(store, self.rank, self.ranks, count) if store is not None else ()
        who = f"{ranks_text(missing)} had not arrived by then; " if missing else ""
        source = "" if isinstance(error, _AbandonedError) else "torch reports: "
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        lost = GroupError(f"the ranks could not agree on {what}: {who}{source}{reason}")
        lost.missing = missing
        return lost


class _AbandonedError(RuntimeError):
    """Raised if another rank has stopped waiting on this channel."""


class _Link:
    """The state that this process keeps for a group between calls. It does not keep the group
    alive.
    """

    def __init__(self) -> None:
        self.making = Gate()  # entered by the thread that creates `gloo`
        self.closed = False
        self.collectives = 0  # collectives that this rank reached
        self.store: Any = None  # contains the number of collectives that each rank reached
        # memsaver's own process group, if the group carries no CPU tensors. It is closed while the
        # interpreter still runs, because its threads do not survive the interpreter's exit.
        self.gloo: list[Any] = []
        weakref.finalize(self, self.gloo.clear)

    def close(self) -> None:
        """Close the connections. Idempotent; does not wait."""
        self.closed = True
        self.store = None
        self.gloo.clear()


def _being_made() -> InvalidStateError:
    return InvalidStateError(
        "another call in this process is creating the connections to the other ranks (in another "
        "thread, or in this one, interrupted by a finalizer or a signal handler): repeat this call "
        "after that call has ended"
    )


_links: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()  # by group
# By world, the number of the next channel of each lane between the same ranks.
_connected: weakref.WeakKeyDictionary[Any, Counter[tuple[str, str]]] = weakref.WeakKeyDictionary()


def _bytes_of(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
