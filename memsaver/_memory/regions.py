"""Regions: select the tag of new tensors."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from memsaver._memory.choices import earlier_choice, note_choice
from memsaver._memory.devices import Devices, indices_of
from memsaver._memory.sharing import sending
from memsaver._memory.torch_mode import Route, torch_pools
from memsaver._runtime.blocks import check_decorated
from memsaver._runtime.native import _C, Backup, backup_code, check_new_tag, emit_warnings
from memsaver.errors import InvalidStateError

__all__ = ["disabled", "lean_region", "named_devices", "region"]

Function = TypeVar("Function", bound=Callable[..., Any])
Section = TypeVar("Section", bound="_Section")


class _Section(contextlib.ContextDecorator):
    """A section that affects one thread's allocations; sections are left in the reverse order."""

    _what: str  # its name in errors

    def __call__(self, function: Function) -> Function:
        """Return the function with this section around each of its calls.

        Raises:
            ConfigError: `function` is a class, or a coroutine or generator function, whose body
            runs after the call and possibly on another thread.
        """
        check_decorated(function, self._what)
        return super().__call__(function)

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        """Enter the section in the native library and in torch or, after an error, in neither.

        Returns:
            The route, and the devices to which the section is limited.
        """
        raise NotImplementedError

    # Native, so that no signal handler runs halfway: the section is entered, or left, both in the
    # native library and in torch, or in neither. Leaving it raises InvalidStateError if it is not
    # the thread's innermost section.
    __enter__ = _C.enter
    __exit__ = _C.exit

    def _enter(self: Section) -> Section:
        route, devices = self._begin()
        _entered.stack.append((self, route, _C.region_depth(), devices))
        return self

    def _leave(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._end(error)
        emit_warnings()

    def _end(self, error: BaseException | None) -> None:
        innermost, route, depth, _ = _entered.stack[-1] if _entered.stack else (None, None, 0, ())
        if innermost is not self or depth != _C.region_depth():
            raise InvalidStateError(
                f"{self._what} is not the innermost section of this thread: leave regions and "
                "disabled sections in the reverse order, on the thread that entered them, and do "
                "not keep one open across an `await` or a `yield`"
            )
        _entered.stack.pop()
        try:
            if route is not None:
                route.close()
                route.explain_shortage(error)
        finally:
            _C.region_exit()


class region(_Section):
    """Assign tensors created in the block to `tag`, so that they are paused and resumed with it.

    A context manager and a decorator. May be nested (the innermost region applies), entered on any
    thread (it affects only that thread's allocations), left by an exception, and used repeatedly.

    Args:
        tag: the name for pauses and resumes.
        backup: "none" (a pause discards the contents; memory reads as zero after the resume, or as
            NaN with the option `poison`), or the place of the backup: "host" (pinned host memory,
            the fastest), "pageable" (ordinary host memory), "disk" (a private file in the directory
            of the option `disk_dir`), "peer" (the memory of another GPU, chosen by the option
            `peer`, and pinned host memory if it has no room). None keeps the policy of earlier
            regions of the tag; a new tag gets "none", but a pause that would discard 256 MiB or
            more fails until a call has chosen a backup. The policy applies to the whole tag; the
            last region that sets a policy takes effect.
        device: the CUDA device, or several, whose allocations the region affects: an index,
            "cuda:1", a `torch.device`, or a sequence of those. None means the current device, or
            any device if torch has no pools (on the simulated driver, or in preload mode without
            torch).
        shareable: True makes the tag's new memory exportable, so that its tensors can be sent like
            any CUDA tensor, without a copy, to other processes of the same user. Applies to the
            whole tag from now on, and cannot be undone. While another process uses such a tensor,
            the tag cannot be paused (see `TagSharedError`).

    Memory comes from a torch memory pool backed by memsaver's allocator. The pool is closed with
    the region, so `torch.cuda.empty_cache()` releases the memory of deleted tensors. In preload
    mode the region also serves other libraries' `cudaMalloc`. For the simulated driver see
    `memsaver.simulator`.

    Raises:
        ConfigError: the tag is empty or not a string, or the backup or the device is unknown.
        InvalidStateError: the tag is paused, so a new tensor would have no memory behind it.
        NotLoadedError: there is no CUDA driver, or neither torch with CUDA nor preload mode.
    """

    _warms_up = True  # see TorchPools.prepare

    def __init__(
        self,
        tag: str,
        backup: Backup | None = None,
        device: Devices = None,
        *,
        shareable: bool = False,
    ) -> None:
        self.tag = check_new_tag(tag)
        self.backup = backup
        self.device = device
        self.shareable = shareable
        self._backup_code = backup_code(backup)
        self._what = f"a region of tag {self.tag!r}"

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        pools = torch_pools()
        if pools:
            devices = pools.prepare(self.device, warm_up=self._warms_up)
        else:
            devices = indices_of(self.device)
        earlier = earlier_choice(self.tag, self.backup)
        _C.region_enter(self.tag, self._backup_code)
        try:
            note_choice(self.tag, self.backup, earlier)
            if self.shareable:
                sending.make_shareable(self.tag)
            if devices:
                _C.region_limit(sum(1 << device for device in devices))
            return (pools.route(self.tag, devices) if pools else None), devices
        except BaseException:
            _C.region_exit()
            raise


class lean_region(region):
    """A region that does not start cuBLAS, which allocates about 100 MiB of an H100.

    For programs that run no matrix product while the tag is paused: if a thread's first one runs in
    this region, cuBLAS's workspace is allocated in the tag, and paused with it.
    """

    _warms_up = False


class disabled(_Section):
    """Assign tensors created in the block to no tag, even in a region or with a process-wide tag.

    Their memory is torch's own, or plain `cudaMalloc` memory; no pause affects it. Like a region,
    it is also a decorator, affects only its own thread, and is left on that thread, innermost
    first.
    """

    _what = "a disabled section"

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        pools = torch_pools(required=False)
        _C.disable_enter()
        try:
            return (pools.unrouted() if pools else None), ()
        except BaseException:
            _C.region_exit()
            raise


def named_devices() -> Sequence[int]:
    """Return the devices to which this thread's innermost region is limited; () without a limit."""
    *_, depth, devices = _entered.stack[-1] if _entered.stack else (0, ())
    return devices if depth == _C.region_depth() else ()


class _Entered(threading.local):
    """The open regions and disabled sections of this thread, innermost last.

    Each entry has the objects to close, its native depth, and the devices to which it is limited.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[_Section, Route | None, int, Sequence[int]]] = []


_entered = _Entered()
