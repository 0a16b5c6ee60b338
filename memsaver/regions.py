"""Regions: which tag new tensors belong to."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

from memsaver.blocks import check_decorated
from memsaver.devices import Devices, indices_of
from memsaver.errors import InvalidStateError
from memsaver.native import _C, backup_code, check_new_tag, emit_warnings
from memsaver.torch_mode import Route, torch_pools

__all__ = ["disabled", "named_devices", "region"]

Function = TypeVar("Function", bound=Callable[..., Any])
Section = TypeVar("Section", bound="_Section")


class _Section(contextlib.ContextDecorator):
    """What concerns one thread's allocations from here to there; left in the reverse order."""

    _what: str  # its name in errors

    def __call__(self, function: Function) -> Function:
        """The function, with this around each of its calls.

        Raises:
            ConfigError: a coroutine or generator function: what runs later would be outside, and on
                whichever thread; or a class.
        """
        check_decorated(function, self._what)
        return super().__call__(function)

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        """Enter both sides or, after an error, neither.

        Returns:
            The route, and the devices that this is limited to.
        """
        raise NotImplementedError

    # Native, so that no signal handler runs halfway. Both sides are entered, or neither; both are
    # left, or, if this is not the thread's innermost section (InvalidStateError), neither.
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
                f"{self._what} is not the innermost of this thread: leave regions and disabled "
                "sections in the reverse order, on the thread that entered them, and do not hold "
                "one open over an `await` or a `yield`"
            )
        _entered.stack.pop()
        try:
            if route is not None:
                route.close()
                route.explain_shortage(error)
        finally:
            _C.region_exit()


class region(_Section):
    """Tensors made inside belong to `tag` and are paused and resumed with it.

    A context manager and a decorator; may be nested (the innermost counts), entered on any thread
    (it concerns that thread's allocations only), left by an exception, and used more than once.

    Args:
        tag: the name to pause and resume by.
        backup: "none" (contents are discarded by a pause; memory reads as zero after the resume,
            or as NaN under the option `poison`),
            or where they are kept, to come back byte for byte: "host" (pinned host memory, the
            fastest), "pageable" (ordinary host memory), "disk" (a private file in the directory of
            the option `disk_dir`). None keeps what an earlier region of the tag said; a new tag
            gets "none". The last region that says something decides, for all of the tag.
        device: the CUDA device, or several, whose allocations are meant: an index, "cuda:1", a
            `torch.device`, or a sequence of those. None is the current device; where torch has no
            pools (on the simulated driver, or in preload mode without torch), any.

    Memory comes from a torch memory pool over memsaver's allocator; the pool is closed when the
    region is left, so `torch.cuda.empty_cache()` gives back what deleted tensors held. In preload
    mode `cudaMalloc` of other libraries is served too. On the simulated driver see
    `memsaver.simulator`.

    Raises:
        ConfigError: the tag is empty or no string, the backup or the device unknown.
        InvalidStateError: the tag is paused; a new tensor would have no memory behind it.
        NotLoadedError: no CUDA driver, or neither torch with CUDA nor preload mode.
    """

    def __init__(self, tag: str, backup: str | None = None, device: Devices = None) -> None:
        self.tag = check_new_tag(tag)
        self.backup = backup
        self.device = device
        self._backup_code = backup_code(backup)
        self._what = f"a region of tag {self.tag!r}"

    def _begin(self) -> tuple[Route | None, Sequence[int]]:
        pools = torch_pools()
        devices = pools.prepare(self.device) if pools else indices_of(self.device)
        _C.region_enter(self.tag, self._backup_code)
        try:
            if devices:
                _C.region_limit(sum(1 << device for device in devices))
            return (pools.route(self.tag, devices) if pools else None), devices
        except BaseException:
            _C.region_exit()
            raise


class disabled(_Section):
    """Tensors made inside belong to no tag, whatever region or process-wide tag is around.

    Their memory is torch's own, or plain `cudaMalloc` memory; no pause touches it. Like a region,
    it is a decorator too, concerns its own thread, and is left there, innermost first.
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
    """The devices that this thread's innermost region is limited to; empty where it is not."""
    *_, depth, devices = _entered.stack[-1] if _entered.stack else (0, ())
    return devices if depth == _C.region_depth() else ()


class _Entered(threading.local):
    """The open regions and disabled sections of this thread, innermost last.

    With what each must close, how deep it lies natively, and the devices that it is limited to.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[_Section, Route | None, int, Sequence[int]]] = []


_entered = _Entered()
