"""Callbacks around pauses and resumes, for code that depends on physical pages.

NCCL and RDMA registrations, CUDA IPC handles and similar objects refer to physical pages. Release
such objects before a pause, and create them again after a resume. `memsaver.ranges(tag)` returns
the addresses.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from memsaver._runtime.native import _C, STATES, check_tag
from memsaver.errors import ConfigError, InvalidStateError

__all__ = ["Registration", "on_pause", "on_resume"]

Callback = Callable[[str], object]


class Registration:
    """A registered callback.

    Calling a registration calls the function, so a decorated function still works.

    Attributes:
        is_removed: whether `remove` was called.
    """

    def __init__(self, callbacks: list[Registration], function: Callback, tag: str | None) -> None:
        if not callable(function):
            raise ConfigError(f"a callback must be a function of the tag, not {function!r}")
        if tag is not None:
            check_tag(tag)
        self._callbacks = callbacks
        self._function = function
        self._tag = tag
        self.is_removed = False
        callbacks.append(self)

    def __call__(self, tag: str) -> object:
        """Call the function itself."""
        return self._function(tag)

    @property
    def name(self) -> str:
        """The module and the name of the function."""
        function = self._function
        name = getattr(function, "__qualname__", None) or repr(function)
        module = getattr(function, "__module__", None)
        return f"{module}.{name}" if module else str(name)

    def concerns(self, tag: str) -> bool:
        """Return whether transitions of this tag invoke the callback."""
        return self._tag is None or self._tag == tag

    def remove(self) -> None:
        """Unregister the callback. Idempotent, and safe in finalizers."""
        self.is_removed = True
        with contextlib.suppress(ValueError):
            self._callbacks.remove(self)


# Changed only by single, atomic calls, because a finalizer may run at any time.
_before_pause: list[Registration] = []
_after_resume: list[Registration] = []


def on_pause(function: Callback, tag: str | None = None) -> Registration:
    """Call `function(tag)` on the caller's thread before a tag is paused.

    Args:
        function: the callback. Callbacks run in registration order. If a callback raises, no tag is
            paused, and the exception propagates to the caller. A note on the exception names the
            callback and the tag (Python 3.11 and newer show notes). The `on_resume` callbacks are
            then called for the tags whose `on_pause` callbacks had run.
        tag: the tag whose transitions call the callback; None means every tag.

    The tag is still mapped when the callbacks run. Callbacks are not called for tags that are
    already paused. This function can be used as a decorator. On the main thread, signals (Ctrl-C)
    are handled only after the callbacks, so a callback must not block indefinitely. If a callback
    begins a transition of the tag, that call raises `InvalidStateError`.

    Raises:
        ConfigError: `function` is not callable, or `tag` is invalid.
    """
    return Registration(_before_pause, function, tag)


def on_resume(function: Callback, tag: str | None = None) -> Registration:
    """Call `function(tag)` after a tag is resumed, on the thread that completes the transition.

    Callbacks run on the thread that called `resume`, or, with `wait=False` or `progress`, on the
    transition's own thread.

    Args:
        function: the callback. Callbacks run in registration order. If a callback raises, the tags
            stay resumed, the other callbacks still run, and the first error propagates to the
            caller.
        tag: the tag whose transitions call the callback; None means every tag.

    The callbacks also run if a pause fails after its `on_pause` callbacks have run. If a callback
    pauses the tag again, the remaining callbacks are called only for that new pause. This function
    can be used as a decorator.

    Raises:
        ConfigError: `function` is not callable, or `tag` is invalid.
    """
    return Registration(_after_resume, function, tag)


# Tags in a `notifying` block. Only the block's thread can have reserved them.
_being_notified: set[str] = set()
# The last notification for each tag.
_latest: dict[str, object] = {}


class notifying:
    """A block in which this thread cannot begin any other transition of the tags.

    The thread must have reserved the tags. In the block, the thread calls the callbacks and then
    begins the transition. If a callback, a signal handler or a finalizer paused or resumed one of
    the tags between these two steps, other callbacks would have an outdated view of the tag's
    state.

    Raises:
        InvalidStateError: the thread is already in such a block for one of the tags.
    """

    def __init__(self, tags: list[str]) -> None:
        self._tags = tags

    def __enter__(self) -> None:
        for tag in self._tags:
            if tag in _being_notified:
                raise InvalidStateError(
                    f"this thread is about to begin a transition of tag {tag!r} and is now inside "
                    "a callback, a signal handler or a finalizer: another transition of the tag "
                    "must begin after the callback, handler or finalizer",
                    tag=tag,
                )
        _being_notified.update(self._tags)

    def __exit__(self, *_: object) -> None:
        _being_notified.difference_update(self._tags)


def notify_pause(tag: str) -> None:
    """Call the `on_pause` callbacks of the tag."""
    _call(_before_pause, "on_pause", tag)


def notify_resume(tag: str) -> None:
    """Call all `on_resume` callbacks of a mapped tag, and then raise the first error."""
    _call(_after_resume, "on_resume", tag, keep_going=True)


def _call(callbacks: list[Registration], kind: str, tag: str, keep_going: bool = False) -> None:
    concerned = [callback for callback in tuple(callbacks) if callback.concerns(tag)]
    first: BaseException | None = None
    _latest[tag] = this = object()
    if STATES[_C.tag_state(tag)] != "mapped":
        return
    for callback in concerned:
        # A callback or a finalizer has paused the tag again, and that pause called the other
        # callbacks.
        if _latest[tag] is not this:
            break
        try:
            callback(tag)
        except BaseException as error:
            _name_callback(error, f"{kind} callback {callback.name} of tag {tag!r}")
            if not keep_going:
                raise
            first = first or error
    if first is not None:
        raise first


def _name_callback(error: BaseException, what: str) -> None:
    """Add a note with an error's origin to the error; Python 3.11 and newer show such notes."""
    text = f"raised by the {what}"
    with contextlib.suppress(Exception):  # some exceptions, such as frozen dataclasses, accept none
        if hasattr(error, "add_note"):
            error.add_note(text)
        else:
            setattr(error, "__notes__", [*getattr(error, "__notes__", []), text])  # noqa: B010
