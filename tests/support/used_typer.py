"""Imports typer and the modules that typer itself imports only when a command runs."""

import typer
from typer.testing import CliRunner

_app = typer.Typer()


@_app.command()
def _command(number: int = 0, path: str = "") -> None:
    """Parse options of two kinds."""


assert CliRunner().invoke(_app, ["--number", "1"]).exit_code == 0
