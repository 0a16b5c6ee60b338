"""The entry points by which SGLang finds memsaver, and what they put in place.

SGLang has two groups of entry points, and neither is enough. `sglang.srt.plugins` is loaded in the
main process and in spawned schedulers, but in no Ray actor of SGLang's, and in 0.5.16 in no
data-parallel controller; `sglang.srt.platforms` is asked in every process, in the middle of
SGLang's imports. So memsaver is in both, under the name `memsaver`; whichever comes first, the
result is the same:

- the factory of SGLang's memory savers, `TorchMemorySaverAdapter.create`, gives memsaver's, where
  one that is enabled is asked for;
- SGLang's release, resume and weight updates have the hooks of
  `memsaver.integrations.sglang.hooks`. An update is as ever, unless memsaver's own sender asks for
  checks (`weight_loads`).

They are put in place when SGLang imports the modules concerned. Until a saver is asked for, nothing
else happens: no driver is opened, no torch imported. SGLang with `enable_memory_saver=False` works
as without memsaver.
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
from memsaver.errors import NotLoadedError
from memsaver.integrations.sglang import hooks, settings, versions
from memsaver.integrations.sglang.adapter import MemsaverAdapter
from memsaver.integrations.sglang.imports import no_longer, when_imported
from memsaver.native import _C
from memsaver.preload import is_preloaded

__all__ = ["create", "load_platform", "load_plugin"]

_ADAPTERS = "sglang.srt.utils.torch_memory_saver_adapter"
_CLASS = "TorchMemorySaverAdapter"
_NCCL = "NCCL_GRAPH_REGISTER"
_logger = logging.getLogger("memsaver.sglang")


def load_plugin() -> None:
    """The entry point of the group `sglang.srt.plugins`: hooks in SGLang's registry. Idempotent.

    Raises:
        ConfigError: an environment variable of `settings` has no meaning; SGLang logs it.
    """
    if not settings.is_on():
        return
    _hook_schedulers()
    if not _first("registered"):
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(f"{_ADAPTERS}.{_CLASS}.create", create, HookType.AROUND)


def load_platform() -> None:
    """The entry point of the group `sglang.srt.platforms`. Idempotent.

    Returns None, which tells SGLang that there is no such platform: it takes its own.

    Raises:
        ConfigError: as `load_plugin`.
    """
    if settings.is_on():
        when_imported(_ADAPTERS, _replace_factory)
        _hook_schedulers()
        # Now: Ray actors make their groups before they ask for a saver.
        _keep_nccl_from_registering()


def create(original: Callable[..., Any], enable: bool) -> Any:
    """SGLang's `TorchMemorySaverAdapter.create`, around its original. Any thread.

    Raises:
        NotLoadedError: a saver is asked for, and there is no CUDA driver for it to use.
    """
    if not enable:
        return original(enable=enable)
    _start()
    return MemsaverAdapter()


def _replace_factory(module: ModuleType) -> None:
    owner: Any = getattr(module, _CLASS, None)
    original = getattr(owner, "create", None)
    if original is None:
        _logger.warning(
            "memsaver is not active: this SGLang has no %s.%s.create. %s",
            _ADAPTERS,
            _CLASS,
            versions.doubt(_version()) or "",
        )
    elif not isinstance(original, functools.partial):
        owner.create = staticmethod(functools.partial(create, original))


def _start() -> None:
    """What the first enabled saver of a process needs, and says."""
    try:
        _C.driver_info()
    except NotLoadedError as error:
        raise NotLoadedError(
            f"SGLang was asked for a memory saver (enable_memory_saver), and memsaver, which is "
            f"installed for it, cannot work here: {error}. On a machine without NVIDIA GPUs set "
            "MEMSAVER_SGLANG=0"
        ) from error
    _keep_nccl_from_registering()
    if not _first("started"):
        return
    _hook_schedulers()
    mode = "preload mode" if is_preloaded() else "torch mode"
    graphs = "CUDA graphs included" if settings.graphs_are_pausable() else "without CUDA graphs"
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
    if _C.option("poison") == "on":
        _logger.warning(
            "memsaver's option poison is on (MEMSAVER_POISON): SGLang relies on zeros in what "
            "comes back of its KV cache, and may generate nonsense after a resume; turn it off"
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
    """Now or when they are imported; once more where they are being imported. Idempotent."""
    for name in hooks.modules():
        when_imported(name, _hook)
    for name in hooks.modules():
        if name in sys.modules and not _is_being_imported(sys.modules[name]):
            _await_no_more(name)


def _hook(module: ModuleType) -> None:
    _await_no_more(module.__name__)
    try:
        hooks.install_in(module)
    except Exception:
        # The saver works without; what SGLang's own handlers do not survive, they then do not.
        _logger.exception(
            "memsaver cannot guard the release and resume of this SGLang: %s is not as expected",
            module.__name__,
        )


def _is_being_imported(module: ModuleType) -> bool:
    return bool(getattr(module.__spec__, "_initializing", False))


def _await_no_more(name: str) -> None:
    """A module is there: what it would have imported, and has not, never comes."""
    for other in hooks.left_out_by(name):
        no_longer(other)


def _keep_nccl_from_registering() -> None:
    """Turn off what binds NCCL to the pages of a graph, for this process and its children.

    A resume puts new pages behind a graph's addresses, while collectives that NCCL registered at
    the capture go on using the old ones. SGLang 0.5.23 does the same itself.
    """
    if settings.graphs_are_pausable():
        os.environ.setdefault(_NCCL, "0")


def _version() -> str:
    """The version that SGLang says of itself."""
    return str(importlib.import_module("sglang.version").__version__)


def _first(what: str) -> bool:
    """Whether this process has not come here before."""
    mine = object()
    return _done.setdefault(what, mine) is mine


_done: dict[str, object] = {}  # by name, the token of the call that came first
