"""Imports typer with the modules that it imports only when a command runs."""

import typer
from typer.testing import CliRunner

_app = typer.Typer()


@_app.command()
def _command(number: int = 0, path: str = "") -> None:
    """Use options of two kinds."""


assert CliRunner().invoke(_app, ["--number", "1"]).exit_code == 0
