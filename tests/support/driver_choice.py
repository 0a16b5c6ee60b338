"""Chooses the driver and the skipped tests for a test run."""

from __future__ import annotations

import ctypes
import re
from importlib.util import find_spec

import pytest
from repository import ROOT


def count_gpus() -> int:
    """Return the number of GPUs that the real driver reports, or 0 without a driver.

    The query creates no CUDA context.
    """
    try:
        library = ctypes.CDLL("libcuda.so.1")
        count = ctypes.c_int(0)
        if library.cuInit(0) != 0 or library.cuDeviceGetCount(ctypes.byref(count)) != 0:
            return 0
    except (OSError, AttributeError):
        return 0
    return count.value


GPUS = count_gpus()


def asks_for_gpu_tests(expression: str) -> bool:
    """Return whether `-m expression` selects tests marked gpu and no other tests."""
    if not expression:
        return False
    words = set(re.findall(r"[A-Za-z_]\w*", expression)) - {"and", "or", "not"}
    kinds = [{"gpu", *more} for more in [(), ("two_gpus",), ("sglang",), ("vllm",), ("soak",)]]

    def selects(marks: set[str]) -> bool:
        return bool(eval(expression, {"__builtins__": {}}, {word: word in marks for word in words}))

    try:
        return any(map(selects, kinds)) and not selects(set())
    except Exception:
        return False


def why_not(config: pytest.Config, item: pytest.Item) -> str | None:
    """Return the reason why a test cannot run, or None if it can."""
    marked = {mark.name for mark in item.iter_markers()}
    if ("gpu" in marked or "two_gpus" in marked) and GPUS == 0:
        return "no NVIDIA GPU: libcuda.so.1 cannot be opened, or finds none"
    if "two_gpus" in marked and GPUS < 2:
        return "there is only one NVIDIA GPU"
    opens_its_own = "conformance" in item.path.parts
    if ("gpu" in marked or "two_gpus" in marked) and not (config.real_driver or opens_its_own):
        return "this run is on the simulated driver; choose GPU tests with -m gpu"
    on_the_simulator = "sim" in getattr(item, "fixturenames", ()) and not opens_its_own
    if config.real_driver and on_the_simulator:
        return "this run is on the real driver"
    for mark, engine in (("sglang", "SGLang"), ("vllm", "vLLM")):
        if mark in marked and find_spec(mark) is None:
            return f"{engine} is not installed"
    if "preloads" in marked and re.search(r"[\s:]", str(ROOT.resolve())):
        return f"LD_PRELOAD cannot name a library below {ROOT}: the path has a space or a colon"
    if "soak" in marked and not config.soak:
        return "runs for minutes; choose it with -m soak"
    return None
