"""The command-line tool `memsaver`, with one module for each command.

`app` combines the commands. The module `checks` contains the checks of `memsaver doctor`,
`measurements` contains the measurements of `memsaver bench`, and `watched` finds the processes that
`memsaver top` shows. Importing this package does not import typer. `main` imports typer, and
reports an interrupt during that import like any other interrupt. rich is imported only for output.
"""

import sys

from memsaver.cli.failures import INTERRUPTED, complain

__all__ = ["main"]


def main() -> None:
    """Run the command line, and exit with its status.

    After an interrupt, one line is printed, and the exit status is 130.
    """
    try:
        from memsaver.cli.app import run_words

        status = run_words(sys.argv[1:])
    except KeyboardInterrupt:
        complain("memsaver", "interrupted")
        raise SystemExit(INTERRUPTED) from None
    raise SystemExit(status)
