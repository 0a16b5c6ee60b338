"""The command line, `memsaver`: one module for each command.

`app` combines the commands. `checks` has the checks of `memsaver doctor`, `measurements` the
measurements of `memsaver bench`, and `watched` the processes that `memsaver top` shows. Importing
this package imports typer; rich is imported only for output.
"""

from memsaver.cli.app import app, main

__all__ = ["app", "main"]
