"""How the ranks of a group tell each other something: bytes, over the CPU."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from memsaver.distributed.errors import GroupError, ranks_text
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError, NotLoadedError
from memsaver.latches import Gate, Latch

__all__ = ["Channel", "usable_group"]

_DIAGNOSIS_SECONDS = 5.0  # at most, to find out who is missing
_STRAGGLER_SECONDS = 0.5  # without another rank coming, until those that have not are missing
_GRACE_SECONDS = 5.0  # for a backend that does not keep an operation's own timeout


class Channel:
    """The ranks of a `torch.distributed` group. Used by one thread.

    One for each call will do: what its group's calls have in common is kept as long as the group.
    With a lane, one for all of its calls: its connections, and their threads, end with it.

    Args:
        group: the group; None is the world.
        lane: calls that go on beside others, say in another thread, have a lane of another name,
            with connections of its own, which the group's other users do not see. A name is used
            once.

    Attributes:
        ranks: the group's ranks in the world, in the group's order.
        rank: this process's own, in the world.

    Raises:
        NotLoadedError: torch, or what it needs for a group without a CPU backend, is not there.
        InvalidStateError: torch.distributed is not initialised, this rank is not in the group, or
            the group was destroyed.
        ConfigError: it is no group.
    """

    def __init__(self, group: Any = None, lane: str = "") -> None:
        self._torch, self._dist = _modules()
        if not self._dist.is_initialized():
            raise InvalidStateError(
                "torch.distributed is not initialised, so there are no other ranks: call "
                "torch.distributed.init_process_group first, or memsaver.pause, resume or swap for "
                "this process alone"
            )
        self._group = self._dist.group.WORLD if group is None else group
        self._place = self._place_in_group()
        self.ranks: list[int] = self._dist.get_process_group_ranks(self._group)
        self.rank = self.ranks[self._place]
        config: str = self._dist.get_backend_config(self._group)
        carries = any(part.split(":")[0] == "cpu" for part in config.split(","))
        self._needs_gloo = bool(lane) or not carries
        if self._needs_gloo and not self._dist.is_gloo_available():
            raise NotLoadedError(
                f"the group's backend is {config}, which carries no CPU tensors, and this torch "
                "has no gloo to make one that does: give a group with a CPU backend"
                if not lane
                else "this torch has no gloo, over which the ranks would talk"
            )
        self._lane = lane
        self._link = _Link() if lane else _links.setdefault(self._group, _Link())

    def _place_in_group(self) -> int:
        if self._group is self._dist.GroupMember.NON_GROUP_MEMBER:
            raise InvalidStateError("this rank is not in the group: only its own ranks call")
        _, odd = usable_group(self._group)
        if odd is not None:
            raise odd
        try:
            return int(self._dist.get_rank(self._group))
        except (RuntimeError, ValueError) as error:
            raise InvalidStateError(
                f"the group cannot be used; was it destroyed? {error}"
            ) from None

    def connect(self, timeout: float | None, what: str) -> None:
        """Make the lane's connections now, instead of in its first call.

        A collective. Needed before two lanes are used at once: making connections waits in torch's
        store, and keeps other threads of the process from it meanwhile.

        Args:
            timeout: seconds, as of `all_gather`; likewise the rest.
            what: see there.
        """
        try:
            self._prepare(None if timeout is None else timedelta(seconds=timeout))
        except MemsaverError:
            raise
        except Exception as error:
            raise self._lost(error, what) from error

    def close(self) -> None:
        """End the lane's connections, and let go of the group and of torch's store. Idempotent.

        Waits for nothing. A call in progress in another thread keeps the connections until the call
        ends. While anything of a group refers to torch's store, a later `init_process_group` in
        this process may find this store again, with what the old group has left in it, and hang.
        """
        self._link.close()
        self._group = None

    def all_gather(self, payload: bytes, timeout: float | None, what: str) -> list[bytes]:
        """What every rank gave, in the group's order. All give the same number of bytes.

        Args:
            payload: this rank's bytes.
            timeout: seconds to wait for the others; None is the group's own timeout.
            what: the call in words, for the error.

        Raises:
            GroupError: a rank is dead, did not come in time, or the group is broken.
        """

        def start(carrier: Any, wait: timedelta | None) -> tuple[Any, Any]:
            # A sum of rows that are zero but for one's own: in place, and every backend has it.
            rows = self._zeros(len(self.ranks), len(payload))
            if payload:
                rows[self._place] = self._torch.frombuffer(
                    bytearray(payload), dtype=self._torch.uint8
                )
            options = self._dist.distributed_c10d.AllreduceOptions()
            if wait is not None:
                options.timeout = wait
            return rows, carrier.allreduce([rows], options)

        return [_bytes_of(row) for row in self._meet(start, timeout, what)]

    def broadcast(
        self, payload: bytes, nbytes: int, timeout: float | None, what: str, root: int
    ) -> bytes:
        """Return the bytes of one rank.

        Args:
            payload: the bytes, on the root; ignored on the others.
            nbytes: their number, the same on all ranks.
            timeout: seconds to wait. See `all_gather`.
            what: the call in words. See `all_gather`.
            root: the sender's place in the group.
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

        return _bytes_of(self._meet(start, timeout, what))

    def _zeros(self, *shape: int) -> Any:
        return self._torch.zeros(shape, dtype=self._torch.uint8, device="cpu")

    def _meet(
        self,
        start: Callable[[Any, timedelta | None], tuple[Any, Any]],
        timeout: float | None,
        what: str,
    ) -> Any:
        """The result of a collective that `start` begins; GroupError where it does not end well."""
        link = self._link
        link.meetings += 1
        wait = None if timeout is None else timedelta(seconds=timeout)
        try:
            carrier = self._prepare(wait)
            if link.store is not None:
                link.store.set(str(self.rank), str(link.meetings))
            limit = wait
            if self._needs_gloo and wait is None:  # it was made with the timeout of the first call
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

    def _prepare(self, wait: timedelta | None) -> Any:
        """The process group that carries the bytes, with its connections made.

        Raises:
            InvalidStateError: the channel is closed; or another call makes the connections, in this
                thread (a finalizer or a signal handler came meanwhile) or for the whole timeout.
        """
        link, group = self._link, self._group
        if group is None or link.closed:
            raise InvalidStateError("the connections to the other ranks are closed")
        c10d = self._dist.distributed_c10d
        name = f"memsaver/{group.group_name}"
        name += f"/{self._lane}" if self._lane else ""
        if link.store is None:
            with contextlib.suppress(Exception):  # then nobody can say who is missing
                link.store = self._dist.PrefixStore(name, c10d._get_default_store())
        if not self._needs_gloo:
            return group
        limit = wait or c10d.default_pg_timeout
        if not link.gloo:
            with link.making.passed(limit.total_seconds(), _being_made):
                if not link.gloo:
                    store = self._dist.PrefixStore(f"{name}/gloo", c10d._get_default_store())
                    link.gloo.append(
                        self._dist.ProcessGroupGloo(store, self._place, len(self.ranks), limit)
                    )
        (carrier,) = link.gloo
        if link.closed:
            link.close()
        return carrier

    def _lost(self, error: Exception, what: str) -> GroupError:
        missing = self._missing()
        who = f"{ranks_text(missing)} had not come by then; " if missing else ""
        lost = GroupError(
            f"{what} could not be settled with the other ranks: {who}torch says: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        lost.missing = missing
        return lost

    def _missing(self) -> tuple[int, ...]:
        """Who does not come as far as this rank. The store may be dead or hang: () then."""
        store, meetings = self._link.store, self._link.meetings
        late = tuple(self.ranks)

        def look() -> None:
            nonlocal late
            end = time.monotonic() + _STRAGGLER_SECONDS
            while late and time.monotonic() < end:
                still = _behind(store, self.ranks, meetings)
                if len(still) < len(late):
                    end = time.monotonic() + _STRAGGLER_SECONDS
                late = still
                time.sleep(_STRAGGLER_SECONDS / 10)

        return late if store is not None and _done_in_time(look) else ()


def usable_group(group: Any) -> tuple[Any, ConfigError | None]:
    """Return the group; if it is no process group at all, the world and the error.

    So a rank whose argument is wrong can tell the others, who most likely use the world.

    Raises:
        ConfigError: it is no process group, and torch.distributed is not initialised.
    """
    _, dist = _modules()
    none = dist.GroupMember.NON_GROUP_MEMBER
    # By its type: an odd object answers an `isinstance` or a comparison in its own way.
    if group is None or group is none or issubclass(type(group), dist.ProcessGroup):
        return group, None
    odd = ConfigError(
        f"group is a process group of torch.distributed or None, not {type(group).__name__}"
    )
    if not dist.is_initialized():
        raise odd
    return dist.group.WORLD, odd


class _Link:
    """What this process keeps of a group from call to call; it does not keep the group."""

    def __init__(self) -> None:
        self.making = Gate()  # passed by the thread that makes `gloo`
        self.closed = False
        self.meetings = 0  # that this rank came to
        self.store: Any = None  # says how many meetings each rank came to
        # A process group of our own, if the group carries no CPU tensors. It ends while the
        # interpreter still runs: its threads do not survive the interpreter's end.
        self.gloo: list[Any] = []
        weakref.finalize(self, self.gloo.clear)

    def close(self) -> None:
        """End the connections. Idempotent, and waits for nothing."""
        self.closed = True
        self.store = None
        self.gloo.clear()


def _being_made() -> InvalidStateError:
    return InvalidStateError(
        "the connections to the other ranks are being made by another call of this process, in "
        "another thread, or in this thread, which a finalizer or a signal handler has interrupted: "
        "make this call after that one"
    )


def _behind(store: Any, ranks: list[int], meetings: int) -> tuple[int, ...]:
    """The ranks that came to fewer meetings."""
    keys = [str(rank) for rank in ranks]
    # Two requests for all ranks, where each came at least once.
    known = keys if store.check(keys) else [key for key in keys if store.check([key])]
    many = store.has_extended_api()
    values = store.multi_get(known) if many else [store.get(key) for key in known]
    came = {key: int(value) for key, value in zip(known, values, strict=True)}
    return tuple(rank for rank in ranks if came.get(str(rank), 0) < meetings)


def _done_in_time(look: Callable[[], None]) -> bool:
    """Whether it could be done within the time for a diagnosis."""
    done = Latch()

    def run() -> None:
        with contextlib.suppress(Exception):
            look()
            done.open()

    with contextlib.suppress(RuntimeError):  # no thread to be had: no diagnosis
        threading.Thread(target=run, name="memsaver-missing-ranks", daemon=True).start()
        done.wait(_DIAGNOSIS_SECONDS)
    return done.is_open()


def _modules() -> tuple[Any, Any]:
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        raise NotLoadedError(
            "memsaver.distributed works on groups of torch.distributed, and torch is not installed"
        ) from None
    if not dist.is_available():
        raise NotLoadedError("this torch was built without torch.distributed")
    return torch, dist


_links: weakref.WeakKeyDictionary[Any, _Link] = weakref.WeakKeyDictionary()  # by group


def _bytes_of(tensor: Any) -> bytes:
    return ctypes.string_at(tensor.data_ptr(), tensor.numel()) if tensor.numel() else b""
