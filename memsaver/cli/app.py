"""The command-line application, with its commands and global options."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated, cast

import typer

import memsaver
from memsaver.cli import bench, demo, doctor, run, top, trace
from memsaver.cli.failures import FAILURE, INTERRUPTED, USAGE, complain, drop_output
from memsaver.errors import MemsaverError

__all__ = ["app", "run_words"]

# The base class of all argument errors. typer does not export it: click defines it, or typer itself
# in later versions.
_UsageError = cast(type[typer.BadParameter], typer.BadParameter.__base__)

app = typer.Typer(
    name="memsaver",
    help="Release GPU memory and keep its addresses.",
    rich_markup_mode=None,  # boxes show flags as `<bool>`, and truncate help on a narrow terminal
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _show_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"memsaver {memsaver.__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_show_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    pass


# Option parsing stops at the first word that is not an option, so that a command after `run` keeps
# its own options. The short help fits in the list of commands on a narrow terminal.
app.command(
    "run",
    short_help="Run a command through memsaver.",
    context_settings={"allow_interspersed_args": False},
)(run.command)
app.command("demo", short_help="Show pauses and resumes, checked.")(demo.command)
app.command("doctor", short_help="Check this machine and environment.")(doctor.command)
app.command("top", short_help="Show processes and their tags, live.")(top.command)
app.command("bench", short_help="Measure this machine and memsaver.")(bench.command)
app.command("trace", short_help="Summarize a saved timeline.")(trace.command)


def run_words(words: list[str]) -> int:
    """Run the command line with these arguments, and return the exit status.

    Every error prints one line on stderr. The exit status is 2 for invalid arguments, and 1 if the
    output cannot be written. If the reader of the output has closed the pipe, nothing is printed,
    and the status is 1. Characters that the output's encoding lacks are written as escape
    sequences.

    Raises:
        KeyboardInterrupt: the user interrupted the command.
    """
    try:
        return _run(words)
    except _UsageError as error:
        who = _command_of(error, words)
        text = error.format_message().rstrip(".")
        text = f"{text} See" if text.endswith("?") else f"{text}; see"
        complain(who, f"{text[:1].lower()}{text[1:]} `{who} --help`")
        return USAGE
    except OSError as error:
        if not _is_of_output(error):
            raise
        drop_output(1)
        if error.errno != errno.EPIPE:
            complain("memsaver", f"the output cannot be written: {error.strerror}")
        return FAILURE


def _run(words: list[str]) -> int:
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # stderr does this by default
    elif sys.stdout is None and words[:1] != ["run"]:  # the command to run may not need it
        raise OSError(errno.EBADF, os.strerror(errno.EBADF))
    try:
        # For an interrupt, typer returns status 130, and the demo raises SystemExit itself.
        status = app(args=words or ["--help"], prog_name="memsaver", standalone_mode=False)
        if status == INTERRUPTED:
            raise KeyboardInterrupt
        if not words:
            complain("memsaver", "a command is missing: choose one of the commands above")
            return USAGE
        return int(status or 0)
    finally:
        if sys.stdout is not None:
            sys.stdout.flush()


def _command_of(error: typer.BadParameter, words: list[str]) -> str:
    """Return the command whose arguments are invalid."""
    if error.ctx is not None:
        return str(error.ctx.command_path)
    names = [command.name for command in app.registered_commands]
    return " ".join(["memsaver", *(word for word in words[:1] if word in names)])


def _is_of_output(error: OSError) -> bool:
    """Return whether the error is a failed write to stdout.

    OSErrors from files have a `filename`, and memsaver's OSErrors are `MemsaverError`s.
    """
    return (
        error.errno in _OF_A_WRITE
        and error.filename is None
        and not isinstance(error, MemsaverError)
    )


_OF_A_WRITE = (
    errno.EBADF,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EIO,
    errno.ENOSPC,
    errno.EPIPE,
)
