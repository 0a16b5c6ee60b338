"""Checks which frameworks are installed here."""

from __future__ import annotations

import importlib.util

import pytest

# SGLang with the plugin system through which it finds memsaver: 0.5.11 or newer.
SGLANG = "sglang.srt.plugins"

# Packages with SGLang's kernels: without a GPU they are not installed, or cannot be imported.
KERNELS = {"deep_gemm", "flashinfer", "sgl_kernel", "triton"}


def is_there(module: str) -> bool:
    """Return whether a module can be found; this imports its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def is_for_want_of_kernels(error: ImportError) -> bool:
    """Return whether an import failed because of SGLang's kernels, not SGLang or memsaver."""
    if error.name is None:  # raised by sgl_kernel, which searches for its libraries itself
        return str(error).lstrip().startswith("[sgl_kernel]")
    return error.name.split(".")[0] in KERNELS


def needs(module: str, why: str) -> None:
    """Skip the test if a module is not installed."""
    if not is_there(module):
        pytest.skip(f"{module} is not installed: {why}")
