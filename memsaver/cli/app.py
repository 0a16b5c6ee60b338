"""The application: its commands, and the options before them."""

from __future__ import annotations

import errno
import io
import os
import sys
from typing import Annotated

import typer

import memsaver
from memsaver.cli import bench, demo, doctor, run, top, trace
from memsaver.errors import MemsaverError

__all__ = ["app", "main"]

app = typer.Typer(
    name="memsaver",
    help="Give GPU memory back without losing its addresses.",
    no_args_is_help=True,
    rich_markup_mode="rich",
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


# Options end at the first word that is not one, so that the command keeps its own.
app.command("run", context_settings={"allow_interspersed_args": False})(run.command)
app.command("demo")(demo.command)
app.command("doctor")(doctor.command)
app.command("top")(top.command)
app.command("bench")(bench.command)
app.command("trace")(trace.command)


def main() -> None:
    """Run the console script.

    If the output cannot be written, prints one line about it on stderr and exits with status 1.
    Writes characters that the output's encoding lacks as escapes.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # stderr does so by itself
    try:
        try:
            app(prog_name="memsaver")
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except OSError as error:
        if not _is_of_output(error):
            raise
        _drop_output()
        typer.echo(f"memsaver: the output cannot be written: {error.strerror}", err=True)
        raise SystemExit(1) from None


def _is_of_output(error: OSError) -> bool:
    """Whether a write to stdout failed: errors of files name them, and memsaver's are typed."""
    of_a_write = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)
    return of_a_write and error.filename is None and not isinstance(error, MemsaverError)


def _drop_output() -> None:
    """What is still to be written goes nowhere, so that the interpreter does not try again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
