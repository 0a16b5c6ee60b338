"""Which frameworks are installed here."""

from __future__ import annotations

import importlib.util

import pytest

# SGLang with plugins, which is what finds memsaver: 0.5.11 or newer.
SGLANG = "sglang.srt.plugins"

# Packages with SGLang's kernels: without a GPU they are not installed, or cannot be imported.
KERNELS = {"deep_gemm", "flashinfer", "sgl_kernel", "triton"}


def is_there(module: str) -> bool:
    """Whether a module can be found; its parents are imported for it."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def is_for_want_of_kernels(error: ImportError) -> bool:
    """Whether it is the kernels that cannot be imported, and not what is memsaver's or SGLang's."""
    if error.name is None:  # as sgl_kernel has it, which looks for its libraries itself
        return str(error).lstrip().startswith("[sgl_kernel]")
    return error.name.split(".")[0] in KERNELS


def needs(module: str, why: str) -> None:
    """Skip where a module is not installed."""
    if not is_there(module):
        pytest.skip(f"{module} is not installed: {why}")
