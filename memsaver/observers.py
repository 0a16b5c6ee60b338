"""Callbacks around pauses and resumes, for those who must know that pages change.

NCCL and RDMA registrations, CUDA IPC handles and the like refer to physical pages: undo them before
a pause, make them again after a resume. `memsaver.ranges(tag)` says which addresses are concerned.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.native import _C, STATES, State, check_tag

__all__ = ["Registration", "on_pause", "on_resume"]

Callback = Callable[[str], object]


class Registration:
    """A registered callback. Calling it calls the function, so that it can stay decorated.

    Attributes:
        is_removed: whether `remove` was called.
    """

    def __init__(self, callbacks: list[Registration], function: Callback, tag: str | None) -> None:
        if not callable(function):
            raise ConfigError(f"a callback is a function of the tag, not {function!r}")
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
        """The name of the function and its module."""
        function = self._function
        name = getattr(function, "__qualname__", None) or repr(function)
        module = getattr(function, "__module__", None)
        return f"{module}.{name}" if module else str(name)

    def concerns(self, tag: str) -> bool:
        """Whether a transition of the tag is its affair."""
        return self._tag is None or self._tag == tag

    def remove(self) -> None:
        """Call it no more. Doing so twice is allowed, and so is a finalizer."""
        self.is_removed = True
        with contextlib.suppress(ValueError):
            self._callbacks.remove(self)


# Changed by single calls only, each of which is whole: a finalizer may come at any moment.
_before_pause: list[Registration] = []
_after_resume: list[Registration] = []


def on_pause(function: Callback, tag: str | None = None) -> Registration:
    """Call `function(tag)` before a tag is paused, on the calling thread, while all is mapped.

    Args:
        function: the callback. Callbacks run in the order of registration. If one raises, nothing
            is paused, the exception propagates to the caller with a note that names the callback
            and the tag (shown from Python 3.11 on), and the `on_resume` callbacks are called for
            tags whose callbacks had run.
        tag: the callback's tag; None means every tag.

    Callbacks are not called for tags that are already paused. May be used as a decorator. On the
    main thread, signals (Ctrl-C) wait for the callbacks, so callbacks must end. A transition of the
    tag that a callback begins is refused with `InvalidStateError`.

    Raises:
        ConfigError: `function` cannot be called, or `tag` is invalid.
    """
    return Registration(_before_pause, function, tag)


def on_resume(function: Callback, tag: str | None = None) -> Registration:
    """Call `function(tag)` after a tag was resumed, on the thread that finishes the transition.

    That is the calling thread, or the transition's own with `wait=False` or `progress`.

    Args:
        function: the callback. Callbacks run in the order of registration. If one raises, the tags
            stay resumed, the other callbacks run, and the first error propagates to the caller.
        tag: the callback's tag; None means every tag.

    Also called if a pause fails after its `on_pause` callbacks ran. May be used as a decorator. If
    a callback pauses the tag, the callbacks after it hear of that pause alone.

    Raises:
        ConfigError: `function` cannot be called, or `tag` is invalid.
    """
    return Registration(_after_resume, function, tag)


# Tags in a block of `announcing`. Only the thread of the block can have them reserved too.
_being_announced: set[str] = set()
# The last announcement for each tag.
_latest: dict[str, object] = {}


class announcing:
    """Keep this thread from beginning another transition of the tags in the block.

    The thread, which has reserved the tags, announces their pause in the block and begins it. A
    callback, a signal's handler or a finalizer that paused or resumed one of them in between would
    leave callbacks with a state that is over.

    Raises:
        InvalidStateError: on entry: the thread is in such a block of one of the tags already.
    """

    def __init__(self, tags: list[str]) -> None:
        self._tags = tags

    def __enter__(self) -> None:
        for tag in self._tags:
            if tag in _being_announced:
                raise InvalidStateError(
                    f"this thread is about to begin a transition of tag {tag!r} and has come here "
                    "in a callback, a signal handler or a finalizer, so another transition of the "
                    "tag cannot begin: do this after the callback, handler or finalizer",
                    tag=tag,
                )
        _being_announced.update(self._tags)

    def __exit__(self, *_: object) -> None:
        _being_announced.difference_update(self._tags)


def announce_pause(tag: str) -> None:
    """Call what `on_pause` registered for the tag."""
    _call(_before_pause, "on_pause", tag)


def announce_resume(tag: str) -> None:
    """Call what `on_resume` registered for a mapped tag: all of it, then raise the first error."""
    _call(_after_resume, "on_resume", tag, keep_going=True)


def _call(callbacks: list[Registration], kind: str, tag: str, keep_going: bool = False) -> None:
    concerned = [callback for callback in tuple(callbacks) if callback.concerns(tag)]
    first: BaseException | None = None
    _latest[tag] = this = object()
    if STATES[_C.tag_state(tag)] is not State.MAPPED:
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
    """Add a note about an error's origin, which tracebacks show from Python 3.11 on."""
    text = f"raised by the {what}"
    if hasattr(error, "add_note"):
        error.add_note(text)
    else:
        setattr(error, "__notes__", [*getattr(error, "__notes__", []), text])  # noqa: B010
