"""Regions: which tag new tensors belong to."""

from __future__ import annotations

import contextlib
import inspect
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, TypeVar

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.native import _C, backup_code, check_tag, emit_warnings
from memsaver.torch_mode import Devices, torch_pools

__all__ = ["disabled", "region"]

Function = TypeVar("Function", bound=Callable[..., Any])


class region(contextlib.ContextDecorator):
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
            `torch.device`, or a sequence of those. None is the current device.

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
        self.tag = check_tag(tag)
        self.backup = backup
        self.device = device
        self._backup_code = backup_code(backup)

    def __call__(self, function: Function) -> Function:
        """The function, with the region around each of its calls.

        Raises:
            ConfigError: a coroutine or generator function: what runs later would be outside.
        """
        kinds = (inspect.iscoroutinefunction, inspect.isgeneratorfunction)
        if any(kind(function) for kind in (*kinds, inspect.isasyncgenfunction)):
            raise ConfigError(
                f"{function.__qualname__} runs after its call has returned, outside of the region: "
                "enter the region inside it, around what makes the tensors"
            )
        return super().__call__(function)

    def __enter__(self) -> region:
        pools = torch_pools()
        devices = pools.prepare(self.device) if pools else []
        _C.region_enter(self.tag, self._backup_code)
        try:
            if devices:
                _C.region_limit(sum(1 << device for device in devices))
            _enter(self, pools.route(self.tag, devices) if pools else None)
        except BaseException:
            _C.region_exit()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            _leave(self, f"a region of tag {self.tag!r}")
        finally:
            emit_warnings()


class disabled(contextlib.ContextDecorator):
    """Tensors made inside belong to no tag, whatever region or process-wide tag is around.

    Their memory is torch's own, or plain `cudaMalloc` memory; no pause touches it. Like a region,
    it concerns its own thread, and is left there, innermost first.
    """

    def __enter__(self) -> None:
        pools = torch_pools(required=False)
        _C.disable_enter()
        try:
            _enter(self, pools.unrouted() if pools else None)
        except BaseException:
            _C.region_exit()
            raise

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _leave(self, "a disabled section")


def _enter(section: region | disabled, route: Any) -> None:
    """The native side is entered already."""
    _entered.stack.append((section, route, _C.region_depth()))


def _leave(section: region | disabled, what: str) -> None:
    """Leave both sides, if this is the innermost of the thread. Raises InvalidStateError."""
    innermost, route, depth = _entered.stack[-1] if _entered.stack else (None, None, 0)
    if innermost is not section or depth != _C.region_depth():
        raise InvalidStateError(
            f"{what} is not the innermost of this thread: leave regions and disabled sections in "
            "the reverse order, on the thread that entered them, and do not hold one open over an "
            "`await` or a `yield`"
        )
    _entered.stack.pop()
    try:
        if route is not None:
            route.close()
    finally:
        _C.region_exit()


class _Entered(threading.local):
    """The open regions and disabled sections of this thread, innermost last.

    With what each must close, and how deep it lies natively.
    """

    def __init__(self) -> None:
        self.stack: list[tuple[region | disabled, Any, int]] = []


_entered = _Entered()
