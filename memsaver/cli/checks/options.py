"""Checks of memsaver's installation, and of its options and their sources."""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import fields

import memsaver
from memsaver._runtime.native import _C, LIBRARY_DIR
from memsaver._runtime.text import size_text
from memsaver._runtime.variables import unknown_variables, variable_of
from memsaver.cli.checks.findings import Finding, bad, good, warned
from memsaver.cli.checks.system import installed_version
from memsaver.errors import ConfigError

__all__ = ["check_installation", "check_options"]


def check_installation() -> list[Finding]:
    """Check the installed version of memsaver, and report the version of Python."""
    version, python = memsaver.__version__, platform.python_version()
    data = {
        "version": version,
        "folder": str(LIBRARY_DIR),
        "python": python,
        "executable": sys.executable,
    }
    text = f"{version} in {LIBRARY_DIR}, Python {python}"
    packaged = installed_version("memsaver")
    if packaged is not None and packaged != version:
        advice = "reinstall memsaver, so that its library and its Python code have the same version"
        return [bad("memsaver", f"{text}, but installed as {packaged}", advice, **data)]
    return [good("memsaver", text, **data)]


def check_options() -> list[Finding]:
    """Report each option's value and source, and unknown variables with memsaver's prefix."""
    return [*(_option(option.name) for option in fields(memsaver.Options)), *_unknown_variables()]


def _option(name: str) -> Finding:
    variable = variable_of(name)
    source = "environment" if variable in os.environ else "default"
    try:
        value = _C.option(name)
    except ConfigError as error:
        text = os.environ.get(variable)
        advice = f"correct {variable}, or unset it"
        return bad(f"option {name}", str(error), advice, value=text, source=source)
    if value.isdigit() and name.endswith("_bytes"):
        shown = size_text(int(value)) if int(value) else "0"
    else:
        shown = value or "not set"
    text = f"{shown}, {f'from {variable}' if source == 'environment' else 'the default'}"
    data = {"value": value, "source": source}
    if name == "poison" and value == "on":
        text += ": contents without a backup resume as NaN"
        advice = "for debugging only, and not with SGLang, whose KV cache must resume as zeros"
        return warned("option poison", text, advice, **data)
    return good(f"option {name}", text, **data)


def _unknown_variables() -> list[Finding]:
    found = []
    for variable, meant in unknown_variables().items():
        advice = f"did you mean {meant}?" if meant else "unset it"
        found.append(warned(variable, "is not a variable of memsaver: no effect", advice))
    return found
