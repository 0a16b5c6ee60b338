"""Regions, which select the tag of new tensors."""

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
from memsaver.errors import ConfigError, InvalidStateError

__all__ = ["disabled", "lean_region", "named_devices", "region"]

Function = TypeVar("Function", bound=Callable[..., Any])
Section = TypeVar("Section", bound="_Section")


class _Section(contextlib.ContextDecorator):
    """A block that affects one thread's allocations. Nested sections must end innermost first."""

    _what: str  # its name in errors

    def __call__(self, function: Function) -> Function:
        """Return a function that enters this section for each call of `function`.

        Raises:
            ConfigError: `function` is a class, or it is a coroutine or generator function, whose
                body runs after the call and possibly on another thread.
        """
        check_decorated(function, self._what)
        return super().__call__(function)

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        """Enter the section in both the native library and torch or, after an error, in neither.

        Returns:
            The route, and the devices to which the section is limited.
        """
        raise NotImplementedError

    # Native, so that no signal handler runs halfway through: a section is entered or left in both
    # the native library and torch, or in neither. Leaving it raises InvalidStateError if it is not
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
        # A raised warning must not replace the block's error.
        with contextlib.suppress(*(() if error is None else (Warning,))):
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
    """Assign the tensors created in a block to `tag`, which can be paused and resumed.

    A region is a context manager and a decorator, and can be used repeatedly. It affects only the
    allocations of the thread that enters it. Regions can be nested, and the innermost region
    applies.

    Args:
        tag: the name for pauses and resumes.
        backup: the tag's backup policy. With "none", a pause discards the contents, and the memory
            reads as zero after the resume, or as NaN with the option `poison`. The other values
            select where the backup is kept: "host" (pinned host memory, the fastest), "pageable"
            (ordinary host memory), "disk" (a private file in the directory of the option
            `disk_dir`), or "peer" (the memory of another GPU, which the option `peer` selects;
            contents that do not fit are saved in pinned host memory). The default, None, keeps the
            policy of earlier regions of the tag. A new tag then gets "none", but a pause that would
            discard 256 MiB or more fails until a call chooses a backup. The policy applies to the
            whole tag, and the last region that sets a policy takes effect.
        device: the CUDA device, or devices, whose allocations the region affects: an index,
            "cuda:1", a `torch.device`, or a sequence of these. The default is the current device,
            or every device if torch has no pools (on the simulated driver, or in preload mode
            without torch).
        shareable: whether the tag's new memory is exportable. Tensors in exportable memory can be
            sent like any other CUDA tensor, without a copy, to other processes of the same user.
            True applies to the whole tag from then on, and cannot be undone. While another process
            uses such a tensor, the tag cannot be paused (see `TagSharedError`).

    The memory comes from a torch memory pool that uses memsaver's allocator. The pool is closed at
    the end of the region, so `torch.cuda.empty_cache()` can release the memory of deleted tensors.
    In preload mode, the region also applies to other libraries' calls to `cudaMalloc`. For the
    simulated driver, see `memsaver.simulator`.

    Raises:
        ConfigError: the tag is empty or not a string, the backup or the device is unknown, or
            `shareable` is not a bool.
        InvalidStateError: the tag is paused, so new tensors would have no physical memory.
        NotLoadedError: there is no CUDA driver, or there is neither torch with CUDA nor preload
            mode.
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
        if not isinstance(shareable, bool):  # it cannot be undone
            raise ConfigError(f"shareable must be True or False, not {shareable!r}", tag=tag)
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
    """A region that does not initialize cuBLAS, which would allocate about 100 MiB on an H100.

    Use this region only in programs that run no matrix product while the tag is paused. If a thread
    runs its first matrix product in this region, cuBLAS allocates its workspace in the tag, and the
    workspace is paused with the tag.
    """

    _warms_up = False


class disabled(_Section):
    """Assign the tensors created in a block to no tag, even inside a region or with a process-wide
    tag.

    The tensors' memory comes from torch's own allocator or from plain `cudaMalloc`, and no pause
    affects it. Like a region, `disabled` is also a decorator and affects only its own thread.
    Nested blocks must end on that thread, innermost first.
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
    """Return the devices to which this thread's innermost region is limited, or () for no limit."""
    *_, depth, devices = _entered.stack[-1] if _entered.stack else (0, ())
    return devices if depth == _C.region_depth() else ()


class _Entered(threading.local):
    """The open regions and disabled sections of this thread, innermost last.

    Each entry contains the objects to close, the native depth, and the devices of the section.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[_Section, Route | None, int, Sequence[int]]] = []


_entered = _Entered()
