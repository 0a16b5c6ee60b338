"""The command line, `memsaver`: one module for each command.

`app` puts the commands together; `checks` is what `memsaver doctor` looks at, `measurements` what
`memsaver bench` measures, `watched` the processes that `memsaver top` shows. Importing this imports
typer, rich not before it draws something.
"""

from memsaver.cli.app import app, main

__all__ = ["app", "main"]
