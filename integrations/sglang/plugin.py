"""The entry points through which SGLang finds memsaver, and their effects.

SGLang has two groups of entry points, neither of which is sufficient alone. `sglang.srt.plugins` is
loaded in the main process and in spawned schedulers, but not in SGLang's Ray actors nor, in 0.5.16,
in the data-parallel controller; `sglang.srt.platforms` is loaded in every process, during SGLang's
imports. memsaver is therefore registered in both groups, as `memsaver`, and has the same effects
for every load order:

- The factory of SGLang's memory savers, `TorchMemorySaverAdapter.create`, returns memsaver's saver
  if an enabled saver is requested.
- SGLang's release, resume and weight updates are wrapped by the hooks of
  `memsaver.integrations.sglang.hooks`. Failed updates do not crash the engine (`weight_loads`), and
  neither do requests that need released memory (`guard`).
- SGLang receives tensors in shareable regions (`shared_tensors`).

The effects begin when SGLang imports the affected modules. Until the first request for a saver,
memsaver neither opens the driver nor imports torch. With `enable_memory_saver=False`, SGLang works
as it does without memsaver, except that a failed weight update does not crash the engine.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import memsaver
from memsaver._memory.preload import is_preloaded
from memsaver._runtime.native import _C
from memsaver.errors import NotLoadedError

from ..engine.imports import no_longer, when_imported
from . import hooks, http_answers, hybrid_pools, settings, shared_tensors, unguarded, versions
from .adapter import MemsaverAdapter

__all__ = ["create", "load_platform", "load_plugin"]

_ADAPTERS = "sglang.srt.utils.torch_memory_saver_adapter"
_CLASS = "TorchMemorySaverAdapter"
_SERVER = "sglang.srt.entrypoints.http_server"
_NCCL = "NCCL_GRAPH_REGISTER"
_CHANNELS = "12"  # the limit on the channels of each NCCL communicator; see docs/sglang.md
_logger = logging.getLogger("memsaver.sglang")


def load_plugin() -> None:
    """Load memsaver as a plugin of the group `sglang.srt.plugins`. Idempotent.

    Raises:
        ConfigError: an environment variable of `settings` is invalid; SGLang logs the error.
    """
    if not settings.is_on():
        return
    settings.check()
    _hook_schedulers()
    _let_nccl_suspend()
    if not _first("registered"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ADAPTERS}.{_CLASS}.create", create, HookType.AROUND)


def load_platform() -> None:
    """Load memsaver as a plugin of the group `sglang.srt.platforms`. Idempotent.

    Returns None, so that SGLang uses its own platform.

    Raises:
        ConfigError: see `load_plugin`.
    """
    if settings.is_on():
        settings.check()
        when_imported(_ADAPTERS, _replace_factory)
        _hook_schedulers()
        # Set now, because Ray actors create their groups before they request a saver.
        _keep_nccl_from_registering()
        _let_nccl_suspend()


def create(original: Callable[..., Any], enable: bool) -> Any:
    """Wrap SGLang's `TorchMemorySaverAdapter.create`. Any thread.

    A pool that ignores the engine's option (`hybrid_pools`) receives an enabled saver if the
    process has already requested one, because a model runner requests its own saver before the pool
    does.

    Raises:
        NotLoadedError: an enabled saver is requested, but there is no CUDA driver.
    """
    if not enable and not (hybrid_pools.is_building() and "started" in _done):
        return original(enable=enable)
    _start()
    return MemsaverAdapter()


def _replace_factory(module: ModuleType) -> None:
    owner: Any = getattr(module, _CLASS, None)
    original = getattr(owner, "create", None)
    if original is None:
        _logger.warning(
            "memsaver is not active: this version of SGLang has no %s.%s.create. %s",
            _ADAPTERS,
            _CLASS,
            versions.doubt(_version()) or "",
        )
    elif not isinstance(original, functools.partial):
        owner.create = staticmethod(functools.partial(create, original))


def _start() -> None:
    """Prepare the process for its first enabled saver, and log that it is ready."""
    try:
        _C.driver_info()
    except NotLoadedError as error:
        raise NotLoadedError(
            f"SGLang requests a memory saver (enable_memory_saver), but memsaver cannot work here: "
            f"{error}. On a machine without NVIDIA GPUs set MEMSAVER_SGLANG=0"
        ) from error
    _keep_nccl_from_registering()
    if not _first("started"):
        return
    _hook_schedulers()
    mode = "preload mode" if is_preloaded() else "torch mode"
    graphs = "with CUDA graphs" if settings.graphs_are_pausable() else "without CUDA graphs"
    _logger.info(
        "memsaver %s is SGLang's memory saver in process %d (%s, %s)",
        memsaver.__version__,
        os.getpid(),
        mode,
        graphs,
    )
    doubt = versions.doubt(_version())
    if doubt is not None:
        _logger.warning("%s", doubt)
    if hooks.lacks_guard():
        unguarded.log(hooks.NO_PLACE)
    if _C.option("poison") == "on":
        _logger.warning(
            "memsaver's option poison is on (MEMSAVER_POISON): SGLang relies on a zeroed KV cache "
            "after a resume, and may generate nonsense; turn it off"
        )
    registers = os.environ.get(_NCCL, "0")
    if settings.graphs_are_pausable() and registers != "0":
        _logger.warning(
            "%s=%s: with several GPUs, graphs may hang or compute nonsense after their memory was "
            "paused (SGLANG_MEMORY_SAVER_CUDA_GRAPH is set); unset it, or set it to 0",
            _NCCL,
            registers,
        )


def _hook_schedulers() -> None:
    """Install the hooks in imported modules now, and in other modules when they are imported.

    Idempotent.
    """
    for name in hooks.modules():
        when_imported(name, _hook)
    when_imported(_SERVER, _hook_server)
    when_imported(shared_tensors.MODULE, shared_tensors.install)
    for name in hooks.modules():
        if name in sys.modules and not _is_being_imported(sys.modules[name]):
            _await_no_more(name)


def _hook(module: ModuleType) -> None:
    _await_no_more(module.__name__)
    try:
        hooks.install_in(module)
    except Exception:
        # The saver works without the hooks, but calls that are fatal in SGLang's handlers stay
        # fatal.
        _logger.exception(
            "memsaver cannot protect release and resume in this version of SGLang: %s does not "
            "have the expected interface",
            module.__name__,
        )


def _hook_server(module: ModuleType) -> None:
    if not _first("server"):
        return
    try:
        http_answers.install(module)
    except Exception:
        _logger.exception(
            "memsaver cannot write a sleeping server's responses in this version of SGLang: %s "
            "does not have the expected interface",
            module.__name__,
        )


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _await_no_more(name: str) -> None:
    """Stop waiting for modules that SGLang lacks: importing `name` would have imported them."""
    for other in hooks.left_out_by(name):
        no_longer(other)


def _keep_nccl_from_registering() -> None:
    """Prevent NCCL from registering a graph's pages, in this process and its children.

    A resume maps new pages at a graph's addresses, but collectives would still use the old pages,
    which NCCL registered during the capture. SGLang 0.5.23 sets the environment variable itself.
    """
    if settings.graphs_are_pausable():
        os.environ.setdefault(_NCCL, "0")


def _let_nccl_suspend() -> None:
    """Make NCCL allocate memory that it can release, in this process and its children.

    This function must run before SGLang turns off NCCL's use of the virtual memory functions. NCCL
    restores the memory of its channels in small pieces, one after the other, so a resume is faster
    with fewer channels.
    """
    if settings.suspends_nccl():
        os.environ.setdefault("NCCL_CUMEM_ENABLE", "1")
        os.environ.setdefault("NCCL_MAX_CTAS", _CHANNELS)


def _version() -> str:
    """Return the version that SGLang reports."""
    return str(importlib.import_module("sglang.version").__version__)


def _first(what: str) -> bool:
    """Return whether this is the first call with this name in the process."""
    mine = object()
    return _done.setdefault(what, mine) is mine


_done: dict[str, object] = {}  # by name, the token of the first call
