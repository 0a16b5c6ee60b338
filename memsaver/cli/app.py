"""The application: its commands, and the options before them."""

from __future__ import annotations

from typing import Annotated

import typer

import memsaver
from memsaver.cli import bench, demo, doctor, run, top, trace

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
    """The console script."""
    app(prog_name="memsaver")
