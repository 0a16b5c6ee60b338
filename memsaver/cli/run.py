"""`memsaver run`: a command whose CUDA allocations go through memsaver."""

from __future__ import annotations

import errno
import os
import signal
import sys
from typing import Annotated, NoReturn

import typer

from memsaver.errors import ConfigError, NotLoadedError
from memsaver.preload import preload_env

__all__ = ["command"]

# Exit statuses as a shell gives them.
_USAGE = 2
_NOT_EXECUTABLE = 126
_NOT_FOUND = 127


def command(
    words: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="What to run, after `--`.", show_default=False),
    ] = None,
    tag: Annotated[
        str | None,
        typer.Option(
            "--tag",
            metavar="TAG",
            help="Everything the command allocates belongs to this tag. Without it, only what the "
            "command itself puts into regions.",
            show_default=False,
        ),
    ] = None,
    backup: Annotated[
        str | None,
        typer.Option(
            "--backup",
            metavar="none|host|pageable|disk",
            help="What a pause does with the tag's contents: discard them, or keep them in pinned "
            "or ordinary host memory, or in a file.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Run a command with its CUDA allocations going through memsaver.

    For example: [bold]memsaver run --tag trainer --backup host -- python train.py[/bold]

    The command replaces this process: its signals and its exit status are its own.
    """
    if not words or not words[0]:
        _fail(
            "there is no command to run; put it after `--`, as in "
            "`memsaver run --tag trainer -- python train.py`"
        )
    try:
        added = preload_env(tag, backup)
    except (ConfigError, NotLoadedError) as error:
        _fail(str(error))
    _execute(words, {**os.environ, **added})


def _execute(words: list[str], environment: dict[str, str]) -> NoReturn:
    name = words[0]
    sys.stdout.flush()
    sys.stderr.flush()
    # Python ignores these, and what is ignored stays so in the program that follows.
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
            f"{name} is no program and has no interpreter in its first line; name one, as in "
            f"`memsaver run -- sh {name}`",
            _NOT_EXECUTABLE,
        )
    _fail(f"cannot run {name}: {failure.strerror}", _NOT_EXECUTABLE)


_IGNORED_BY_PYTHON = (signal.SIGPIPE, signal.SIGXFSZ)


def _fail(message: str, status: int = _USAGE) -> NoReturn:
    typer.echo(f"memsaver run: {message}", err=True)
    raise typer.Exit(status)
