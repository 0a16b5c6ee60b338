"""Tests the commands' options with any version of typer."""

import typing

import pytest
import typer.models

from memsaver.cli.app import app

COMMANDS = {found.name: found.callback for found in app.registered_commands}


@pytest.mark.parametrize("name", COMMANDS)
def test_options_are_named_where_they_are_declared(name):
    """Every option declares its name, because typer 0.27 might otherwise derive the name from
    the metavar.
    """
    hints = typing.get_type_hints(COMMANDS[name], include_extras=True)
    unnamed = []
    for parameter, hint in hints.items():
        for extra in getattr(hint, "__metadata__", ()):
            if isinstance(extra, typer.models.OptionInfo):
                names = [extra.default, *(extra.param_decls or ())]  # `default` is the first
                if not any(str(option).startswith("--") for option in names):
                    unnamed.append(parameter)
    assert unnamed == []
