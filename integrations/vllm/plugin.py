"""The entry point through which vLLM finds memsaver, and its effects.

vLLM calls the entry point of the group `vllm.general_plugins` in every process of an engine: the
front end, the engine core, the workers, Ray's actors, and the processes that inspect models; in
some of them more than once. The effects begin when vLLM imports the modules concerned:

- `CuMemAllocator.get_instance`, through which vLLM obtains its sleep mode allocator, returns
  memsaver's (`allocator`).
- The worker's `sleep`, `wake_up` and `discard` change all ranks or none (`worker`).
- CUDA graphs are captured into pausable memory, if `settings` request it (`graphs`).
- Requests to a sleeping engine are refused, wait, or wake it (`hooks`, `http_answers`).

Before vLLM requests the allocator, no driver is opened and torch is not imported. Without
`enable_sleep_mode` or `enable_cumem_allocator`, vLLM works as it does without memsaver. No failure
of this module ends a process of vLLM, except that a requested sleep mode without a CUDA driver is
an error.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from importlib.metadata import version as version_of
from types import ModuleType
from typing import Any

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, NotLoadedError

from ..engine.imports import when_imported
from . import graphs, hooks, http_answers, settings, versions, worker
from .allocator import MemsaverAllocator

__all__ = ["load_plugin"]

_WORKER = "vllm.v1.worker.gpu_worker"
_PLATFORM = "vllm.platforms.interface"
_NCCL = "NCCL_GRAPH_REGISTER"
_logger = logging.getLogger("memsaver.vllm")


def load_plugin() -> None:
    """Load memsaver as a plugin of vLLM. Idempotent. Never raises."""
    try:
        if not settings.is_on():
            return
        settings.policy()
        graphs_too = settings.graphs_are_pausable()
    except ConfigError as error:
        _logger.error("memsaver is not active: %s", error)
        return
    refusal = versions.refusal(_version())
    if refusal is not None:
        when_imported(worker.CUMEM, lambda _: _logger.warning("%s", refusal))
        return
    if graphs_too:
        # A resume maps new pages at a graph's addresses, but collectives that NCCL registered
        # during the capture would still use the old pages.
        os.environ.setdefault(_NCCL, "0")
        when_imported(_PLATFORM, _guarded(lambda module: graphs.install(module.Platform)))
    when_imported(worker.CUMEM, _guarded(_replace_allocator))
    when_imported(_WORKER, _guarded(lambda module: worker.install(module.Worker)))
    for name in hooks.modules():
        when_imported(name, _guarded(hooks.install_in))
    for name in http_answers.MODULES:
        when_imported(name, _guarded(http_answers.install))


def _guarded(install: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
    """Log the failures of an installation, which would otherwise end an import of vLLM's."""

    def call(module: ModuleType) -> None:
        try:
            install(module)
        except Exception:
            _logger.exception(
                "memsaver is not fully active: %s of vLLM %s does not have the expected interface",
                module.__name__,
                _version(),
            )

    return call


def _replace_allocator(module: ModuleType) -> None:
    owner: Any = module.CuMemAllocator
    original = owner.get_instance
    if isinstance(original, functools.partial):
        return
    public = {name for name in vars(owner) if not name.startswith("_")} - {"get_instance"}
    missing = sorted(public - {"instance"} - set(dir(MemsaverAllocator)))
    if missing:
        raise AttributeError(f"memsaver's allocator has no {', '.join(missing)}")
    owner.get_instance = staticmethod(functools.partial(_get_instance, owner, original))


def _get_instance(owner: Any, original: Callable[[], Any]) -> Any:
    """Wrap `CuMemAllocator.get_instance`.

    Raises:
        NotLoadedError: there is no CUDA driver.
    """
    if owner.instance is None:
        if _is_rocm():
            return original()
        _start()
        owner.instance = MemsaverAllocator()
    return owner.instance


def _start() -> None:
    """Check that memsaver can work in this process, and log it."""
    try:
        _C.driver_info()
    except NotLoadedError as error:
        raise NotLoadedError(
            f"vLLM requests its sleep mode allocator, but memsaver cannot work here: {error}. Set "
            "MEMSAVER_VLLM=0 to use vLLM without memsaver"
        ) from error
    _logger.info(
        "memsaver %s is vLLM's sleep mode allocator in process %d (%s CUDA graphs)",
        memsaver.__version__,
        os.getpid(),
        "with" if settings.graphs_are_pausable() else "without",
    )
    if _C.option("poison") == "on":
        _logger.warning(
            "memsaver's option poison is on (MEMSAVER_POISON): the KV cache contains NaN after a "
            "wake-up, and vLLM may generate nonsense; turn it off"
        )


def _is_rocm() -> bool:
    platforms = importlib.import_module("vllm.platforms")
    return bool(platforms.current_platform.is_rocm())


def _version() -> str:
    """Return the version that vLLM reports."""
    module = sys.modules.get("vllm")
    return str(getattr(module, "__version__", None) or version_of("vllm"))
