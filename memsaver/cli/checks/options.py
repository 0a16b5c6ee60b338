"""memsaver itself: its installation, and its options with their sources."""

from __future__ import annotations

import difflib
import os
import platform
import sys

import memsaver
from memsaver._runtime.native import _C, LIBRARY_DIR
from memsaver._runtime.text import size_text
from memsaver.cli.checks.findings import Finding, bad, good, warned
from memsaver.cli.checks.system import installed_version
from memsaver.errors import ConfigError

__all__ = ["check_installation", "check_options"]

# In the order of the library's options table.
OPTIONS = (
    "share_bytes",
    "slab_bytes",
    "margin_bytes",
    "host_bytes",
    "fingerprints",
    "poison",
    "disk_dir",
    "top",
)
OTHER_VARIABLES = (
    "MEMSAVER_BACKUP",
    "MEMSAVER_DRIVER",
    "MEMSAVER_SGLANG",
    "MEMSAVER_SGLANG_PRELOAD",
    "MEMSAVER_SIM_DEVICES",
    "MEMSAVER_SIM_FAULTS",
    "MEMSAVER_SIM_MEMORY",
    "MEMSAVER_TAG",
    "MEMSAVER_TEST_SYSTEM_ROOT",
)
# Read by the build.
BUILD_VARIABLES = (
    "MEMSAVER_CUDA_INCLUDE",
    "MEMSAVER_CXXFLAGS",
    "MEMSAVER_LDFLAGS",
    "MEMSAVER_WERROR",
)


def check_installation() -> list[Finding]:
    """Check the installed memsaver version, and report the Python it runs on."""
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
        advice = "reinstall memsaver, so that its library and its Python are of one version"
        return [bad("memsaver", f"{text}, but installed as {packaged}", advice, **data)]
    return [good("memsaver", text, **data)]


def check_options() -> list[Finding]:
    """Report each option's value and source, and unknown variables with memsaver's prefix."""
    return [*(_option(name) for name in OPTIONS), *_unknown_variables()]


def _option(name: str) -> Finding:
    variable = _variable(name)
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
        text += ": contents without a backup come back as NaN"
        advice = "for debugging only, and not with SGLang, whose KV cache must come back as zeros"
        return warned("option poison", text, advice, **data)
    return good(f"option {name}", text, **data)


def _unknown_variables() -> list[Finding]:
    known = {*map(_variable, OPTIONS), *OTHER_VARIABLES, *BUILD_VARIABLES}
    found = []
    for variable in sorted(os.environ):
        if variable.startswith("MEMSAVER_") and variable not in known:
            near = difflib.get_close_matches(variable, known, n=1)
            advice = f"did you mean {near[0]}?" if near else "unset it"
            found.append(warned(variable, "is not memsaver's: no effect", advice))
    return found


def _variable(option: str) -> str:
    return f"MEMSAVER_{option.upper()}"
