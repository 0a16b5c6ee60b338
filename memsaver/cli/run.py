"""`memsaver run`: run a command whose CUDA allocations go through memsaver."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, NoReturn, cast

import typer

from memsaver._memory.preload import preload_env
from memsaver._runtime.native import Backup
from memsaver.cli.failures import USAGE, fail
from memsaver.errors import ConfigError, NotLoadedError

__all__ = ["command"]

# Exit statuses, as in a shell.
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="The command, after `--`.", show_default=False),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            metavar="TAG",
            help="The tag of everything that the command allocates. Without a tag, only memory "
            "that the command allocates in regions can be paused.",
            show_default=False,
        ),
    ] = None,
    backup: Annotated[
        str | None,
        typer.Option(
            "--backup",
            metavar="none|host|pageable|disk|peer",
            help="The tag's backup: a pause discards the contents, or saves them in pinned host "
            "memory, in ordinary host memory, in a file, or in another GPU's memory. Without it, "
            "a pause of 256 MiB or more must pass a backup.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command and route its CUDA allocations through memsaver.

    Example: `memsaver run --tag trainer --backup host -- python train.py`

    The command replaces this process, receives its signals and determines its exit status.
    """
    if not words or not words[0]:
        _fail(
            "there is no command to run; put it after `--`, as in "
            "`memsaver run --tag trainer -- python train.py`"
        )
    if tag is not None and tag.startswith("-"):
        _fail(f"--tag takes a name, and {tag!r} looks like an option: a tag cannot begin with '-'")
    try:
        added = preload_env(tag, cast("Backup | None", backup))  # preload_env checks it
    except (ConfigError, NotLoadedError) as error:
        _fail(str(error))
    _execute(words, {**os.environ, **added})


def _execute(words: list[str], environment: dict[str, str]) -> NoReturn:
    name = words[0]
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # stderr is None if the descriptor is closed
            stream.flush()
    # Python ignores these signals. Without this reset, the command would ignore them too.
    ours = {number: signal.signal(number, signal.SIG_DFL) for number in _IGNORED_BY_PYTHON}
    try:
        os.execvpe(name, words, environment)
    except OSError as error:
        failure = error
    for number, handler in ours.items():
        signal.signal(number, handler)
    if failure.errno in (errno.ENOENT, errno.ENOTDIR):
        if os.path.dirname(name) and os.path.exists(name):
            _fail(f"the interpreter in the first line of {name} does not exist", _NOT_FOUND)
        _fail(f"command not found: {name}; check its spelling and PATH", _NOT_FOUND)
    if failure.errno == errno.ENOEXEC:
        _fail(
            f"{name} is not a program and has no interpreter in its first line; name one, as in "
            f"`memsaver run -- sh {name}`",
            _NOT_EXECUTABLE,
        )
    _fail(f"cannot run {name}: {failure.strerror}", _NOT_EXECUTABLE)


_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def _fail(message: str, status: int = USAGE) -> NoReturn:
    fail("memsaver run", message, status)
