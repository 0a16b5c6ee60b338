"""Checks of torch and of its allocator's settings. Does not import torch."""

from __future__ import annotations

import importlib.util
import os
import re
from pathlib import Path

from memsaver.cli.bare_driver import BareDriver
from memsaver.cli.checks.findings import Finding, absent, bad, good, warned
from memsaver.cli.checks.system import installed_version
from memsaver.errors import MemsaverError

__all__ = ["check_torch"]

OLDEST_TORCH = (2, 6)
POOLS_BY_THREAD = (2, 8)  # since this version, a torch pool applies only to its own thread

ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"\bexpandable_segments\s*:\s*True\b", re.IGNORECASE)
_ASYNC = re.compile(r"\bbackend\s*:\s*cudaMallocAsync\b", re.IGNORECASE)


def check_torch() -> list[Finding]:
    """Check the version of torch, its CUDA version, and the settings of its allocator."""
    version = installed_version("torch") or _written("__version__")
    if version is None:
        text = "not installed"
        advice = "torch mode needs it: pip install 'torch>=2.6'"
        return [absent("torch version", text, advice, version=None)]
    found = [_torch_version(version), _torch_cuda(version), *_allocator_settings()]
    if os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "") not in ("", "0"):
        found.append(
            bad(
                "PYTORCH_NO_CUDA_MEMORY_CACHING",
                "set: torch bypasses its memory pools, so regions have no effect",
                "unset it",
            )
        )
    return found


def _torch_version(version: str) -> Finding:
    name, release = "torch version", _release(version)
    if not release:
        text = f"{version}: an unknown version"
        advice = "make sure that it is torch 2.6 or newer"
        return warned(name, text, advice, version=version)
    if release < OLDEST_TORCH:
        advice = "install torch 2.6 or newer"
        return bad(name, f"{version}: too old", advice, version=version)
    if release < POOLS_BY_THREAD:
        return warned(
            name,
            f"{version}: a region applies to the allocations of every thread on its device",
            "install torch 2.8 or newer, or do not allocate on other threads during a region",
            version=version,
        )
    return good(name, version, version=version)


def _torch_cuda(version: str) -> Finding:
    name, build = "torch CUDA build", _cuda_build(version)
    if build is None:
        return warned(
            name,
            "no CUDA version is known for this torch",
            "for a GPU, install a torch that is built for CUDA (https://pytorch.org)",
            cuda=None,
        )
    try:
        driver = BareDriver()
    except MemsaverError:
        return good(name, build, cuda=build)
    if not driver.simulated and int(build.split(".")[0]) > driver.version // 1000:
        return bad(
            name,
            f"{build}, which is newer than the driver's ({driver.version // 1000})",
            "update the driver, or install a torch that is built for an older CUDA",
            cuda=build,
        )
    return good(name, build, cuda=build)


def _cuda_build(version: str) -> str | None:
    local = re.search(r"\+cu(\d+)(\d)$", version)
    return _written("cuda") or (f"{local[1]}.{local[2]}" if local else None)


def _written(name: str) -> str | None:
    """Return a version from the text of torch/version.py, because importing torch is slow."""
    spec = importlib.util.find_spec("torch")
    if spec is None or not spec.origin:
        return None
    try:
        text = (Path(spec.origin).parent / "version.py").read_text()
    except OSError:
        return None
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", text, re.MULTILINE)
    return found[1] if found else None


def _allocator_settings() -> list[Finding]:
    set_here = {name: os.environ[name] for name in ALLOCATOR_SETTINGS if os.environ.get(name)}
    if not set_here:
        return [absent("torch allocator", "no settings in the environment", settings={})]
    return [_allocator_setting(name, text) for name, text in set_here.items()]


def _allocator_setting(name: str, text: str) -> Finding:
    says, data = f"{name}={text}", {"settings": {name: text}}
    if _ASYNC.search(text):
        return bad(
            "torch allocator",
            f"{says}: regions use torch's memory pools, which do not work with this backend",
            f"remove backend:cudaMallocAsync from {name}",
            **data,
        )
    if not _EXPANDABLE.search(text):
        return good("torch allocator", says, **data)
    if os.environ.get("MEMSAVER_TAG"):
        return bad(
            "torch allocator",
            f"{says}, with MEMSAVER_TAG: torch allocates memory that no hook detects, so the "
            "process-wide tag is empty",
            "start the process with `memsaver run`, which turns it off, or set "
            "expandable_segments:False",
            **data,
        )
    advice = "only a process-wide tag needs them off; `memsaver run --tag` turns them off"
    return good("torch allocator", f"{says}: regions work with it", advice, **data)


def _release(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
