"""The environment variables that begin with MEMSAVER_, and a warning about misspelled names."""

from __future__ import annotations

import difflib
import os
import warnings
from dataclasses import fields

from memsaver._runtime.settings import Options
from memsaver.errors import UsageWarning

__all__ = ["KNOWN_VARIABLES", "unknown_variables", "variable_of", "warn_of_misspelt_variables"]

_PREFIX = "MEMSAVER_"


def variable_of(option: str) -> str:
    """Return the name of an option's environment variable."""
    return _PREFIX + option.upper()


KNOWN_VARIABLES = frozenset(
    {
        *(variable_of(option.name) for option in fields(Options)),
        "MEMSAVER_BACKUP",
        "MEMSAVER_DRIVER",
        "MEMSAVER_SGLANG",
        "MEMSAVER_SGLANG_ASLEEP",
        "MEMSAVER_SGLANG_ASLEEP_REQUESTS",
        "MEMSAVER_SGLANG_ASLEEP_WAIT",
        "MEMSAVER_SGLANG_BACKUP",
        "MEMSAVER_SGLANG_CHECK_UPDATES",
        "MEMSAVER_SGLANG_PRELOAD",
        "MEMSAVER_SGLANG_SLEEP_AFTER",
        "MEMSAVER_SGLANG_SUSPEND_NCCL",
        "MEMSAVER_SGLANG_UNGUARDED",
        "MEMSAVER_SIM_DEVICES",
        "MEMSAVER_SIM_FAULTS",
        "MEMSAVER_SIM_MEMORY",
        "MEMSAVER_TAG",
        "MEMSAVER_TEST_SYSTEM_ROOT",
        "MEMSAVER_VLLM",
        "MEMSAVER_VLLM_ASLEEP",
        "MEMSAVER_VLLM_ASLEEP_REQUESTS",
        "MEMSAVER_VLLM_ASLEEP_WAIT",
        "MEMSAVER_VLLM_BACKUP",
        "MEMSAVER_VLLM_GRAPHS",
        "MEMSAVER_VLLM_SLEEP_AFTER",
        # Read only by the build.
        "MEMSAVER_BY_FOLDER",
        "MEMSAVER_CUDA_INCLUDE",
        "MEMSAVER_CXXFLAGS",
        "MEMSAVER_LDFLAGS",
        "MEMSAVER_WERROR",
    }
)


def unknown_variables() -> dict[str, str | None]:
    """Return the unknown variables with memsaver's prefix, sorted by name.

    Each value is the known name that is similar to the variable's name, or None.
    """
    unknown = {name for name in os.environ if name.startswith(_PREFIX)} - KNOWN_VARIABLES
    return {name: _similar(name) for name in sorted(unknown)}


def _similar(name: str) -> str | None:
    # Compared without the prefix, which would make all names resemble each other.
    ends = [known.removeprefix(_PREFIX) for known in KNOWN_VARIABLES]
    near = difflib.get_close_matches(name.removeprefix(_PREFIX)[:64], ends, n=1)
    return _PREFIX + near[0] if near else None


def warn_of_misspelt_variables() -> None:
    """Warn about each unknown variable whose name is similar to a known name."""
    for name, meant in unknown_variables().items():
        if meant is not None:
            text = f"the environment variable {name} has no effect; did you mean {meant}?"
            warnings.warn(text, UsageWarning, stacklevel=3)  # reported in the importing module
