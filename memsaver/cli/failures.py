"""Report a command's failure with one line on stderr and an exit status."""

from __future__ import annotations

import os
import sys
from typing import NoReturn

from memsaver._runtime.text import plain_text

__all__ = ["FAILURE", "INTERRUPTED", "USAGE", "complain", "drop_output", "fail"]

# Exit statuses.
FAILURE = 1
USAGE = 2  # wrong, missing or contradictory arguments
INTERRUPTED = 130  # as in a shell: 128 plus the number of SIGINT


def complain(who: str, message: str) -> None:
    """Print one line on stderr, beginning with the command's name. Ignores write errors."""
    if sys.stderr is None:
        return
    try:
        print(f"{who}: {plain_text(message)}", file=sys.stderr, flush=True)
    except OSError:
        drop_output(2)


def drop_output(descriptor: int) -> None:
    """Discard the rest of an output, which the interpreter would otherwise try to write again."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    if nowhere != descriptor:
        os.close(nowhere)


def fail(who: str, message: str, status: int) -> NoReturn:
    """Print one line on stderr, and exit with this status."""
    import typer  # slow to import

    complain(who, message)
    raise typer.Exit(status)
