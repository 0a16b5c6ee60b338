"""The command line, `memsaver`: one module for each command.

`app` combines the commands. `checks` contains the checks of `memsaver doctor`, `measurements` the
measurements of `memsaver bench`, and `watched` finds the processes that `memsaver top` shows.
Importing this package does not import typer: `main` imports it, and reports an interrupt during
that import like any other interrupt. rich is imported only for output.
"""

import sys

from memsaver.cli.failures import INTERRUPTED, complain

__all__ = ["main"]


def main() -> None:
    """Run the console script, and exit with its status.

    An interrupt prints one line, and the status is 130.
    """
    try:
        from memsaver.cli.app import run_words

        status = run_words(sys.argv[1:])
    except KeyboardInterrupt:
        complain("memsaver", "interrupted")
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(status)
