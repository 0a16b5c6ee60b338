"""The entry point through which vLLM loads memsaver, and its effects on vLLM.

vLLM calls the entry points of the group `vllm.general_plugins` in every process of an engine: the
front end, the engine core, the workers, Ray's actors, and the processes that inspect models. In
some of these processes, vLLM calls the entry points more than once. The effects begin when vLLM
imports the affected modules:

- `CuMemAllocator.get_instance`, through which vLLM obtains its sleep mode allocator, returns
  memsaver's allocator (`allocator`).
- The worker's `sleep`, `wake_up` and `discard` change all ranks or none (`worker`).
- The workers load and verify weights that a trainer sends (`weight_loads`), and the engine core
  answers memsaver's calls (`core_calls`). A route of the server shows that the plugin is present
  (`routes`).
- LoRA adapters, the buffers of draft models, and state that is created with the KV cache survive
  sleeps (`kept`).
- vLLM copies memsaver's environment variables to the workers of the Ray executor.
- CUDA graphs are captured into pausable memory if `settings` request it (`graphs`).
- A request to a sleeping engine is refused, waits, or wakes the engine (`hooks`, `http_answers`).

Until vLLM requests the allocator, the plugin neither opens the driver nor imports torch. Unless
`enable_sleep_mode` or `enable_cumem_allocator` is set, vLLM behaves as it does without memsaver.
Failures in this module do not terminate a vLLM process, with one exception: requesting sleep mode
without a CUDA driver is an error.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version as version_of
from types import ModuleType
from typing import Any

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, NotLoadedError

from ..engine.imports import when_imported
from . import (
    core_calls,
    graphs,
    hooks,
    http_answers,
    kept,
    routes,
    settings,
    versions,
    weight_loads,
    worker,
)
from .allocator import MemsaverAllocator
from .logs import logger

__all__ = ["load_plugin"]

_WORKER = "vllm.v1.worker.gpu_worker"
_CORE = "vllm.v1.engine.core"
_ROUTER = "vllm.entrypoints.serve.dev.rpc.api_router"
_PLATFORM = "vllm.platforms.interface"
_RAY = "vllm.ray.ray_env"
_NCCL = "NCCL_GRAPH_REGISTER"
Install = Callable[[Any], None]


def load_plugin() -> None:
    """Load memsaver as a vLLM plugin. Idempotent. Never raises."""
    when_imported(_RAY, _guarded([_copy_variables]))  # for MEMSAVER_VLLM=0 in the workers
    try:
        if not settings.is_on():
            return
        settings.check()
    except ConfigError as error:
        logger.error("memsaver is not active: %s", error)
        return
    refusal = versions.refusal(_version())
    if refusal is not None:
        when_imported(worker.CUMEM, lambda _: logger.warning("%s", refusal))
        return
    graphs_too = settings.graphs_are_pausable()
    if graphs_too:
        # A resume maps new pages at a graph's addresses, but collectives would still use the old
        # pages, which NCCL registered during the capture.
        os.environ.setdefault(_NCCL, "0")
    for name, installs in _effects(graphs_too).items():
        when_imported(name, _guarded(installs))


def _effects(graphs_too: bool) -> dict[str, list[Install]]:
    """Return the functions that install hooks in each of vLLM's modules."""
    found: dict[str, list[Install]] = {
        worker.CUMEM: [_replace_allocator],
        _WORKER: [
            lambda module: worker.install(module.Worker),
            lambda module: weight_loads.install(module.Worker),
        ],
        _CORE: [lambda module: core_calls.install(module.EngineCore)],
        _ROUTER: [routes.install],
        kept.LORA: [lambda module: kept.install_lora(module, worker.installed_allocator)],
    }
    for name in kept.CACHE_MODULES:
        found[name] = [lambda module: kept.install_cache(module, worker.installed_allocator)]
    if graphs_too:
        found[_PLATFORM] = [lambda module: graphs.install(module.Platform)]
    for name in hooks.modules():
        found.setdefault(name, []).append(hooks.install_in)
    for name in http_answers.MODULES:
        found.setdefault(name, []).append(http_answers.install)
    return found


def _copy_variables(module: ModuleType) -> None:
    """Make vLLM copy memsaver's variables to Ray's workers, together with vLLM's own variables."""
    module.DEFAULT_ENV_VAR_PREFIXES.add("MEMSAVER_")


def _guarded(installs: Sequence[Install]) -> Install:
    """Log the failures of installations, which would otherwise make an import by vLLM fail."""

    def call(module: ModuleType) -> None:
        for install in installs:
            try:
                install(module)
            except Exception:
                logger.exception(
                    "memsaver is not fully active: %s of vLLM %s does not have the expected "
                    "interface",
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
    """Check whether memsaver works in this process, and log memsaver's version."""
    try:
        _C.driver_info()
    except NotLoadedError as error:
        raise NotLoadedError(
            f"vLLM requests its sleep mode allocator, but memsaver cannot work here: {error}. Set "
            "MEMSAVER_VLLM=0 to use vLLM without memsaver"
        ) from error
    logger.info(
        "memsaver %s is vLLM's sleep mode allocator in process %d (%s CUDA graphs)",
        memsaver.__version__,
        os.getpid(),
        "with" if settings.graphs_are_pausable() else "without",
    )
    if _C.option("poison") == "on":
        logger.warning(
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
