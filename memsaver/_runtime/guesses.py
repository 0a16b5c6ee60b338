"""Errors for unknown names in `memsaver` that state the correct location or name."""

from __future__ import annotations

import importlib.util
import sys

from memsaver._runtime.text import did_you_mean

__all__ = ["missing"]

# The keys of both tables are lowercase.
_CALLED = {
    "release": "pause",
    "sleep": "pause",
    "suspend": "pause",
    "free": "pause",
    "wake": "resume",
    "wake_up": "resume",
    "restore": "resume",
    "tag": "region",
    "use": "region",
    "graph_pool": "graph",
    "disable": "disabled",
    "config": "configure",
    "set_option": "configure",
    "statistics": "stats",
    "memory": "stats",
    "torch_memory_saver": "region",
}
_MODULES = {
    "distributed": "memsaver.distributed",
    "simulator": "memsaver.simulator",
    "sim": "memsaver.simulator",
    "sglang": "memsaver.integrations.sglang",
    "vllm": "memsaver.integrations.vllm",
    "rollout": "memsaver.integrations.rollout",
    "trainer": "memsaver.integrations.trainer",
    "offload": "memsaver.integrations.trainer",
    "lightrft": "memsaver.integrations.lightrft",
    "sleepcontroller": "memsaver.integrations.sglang or memsaver.integrations.vllm",
    "rolloutengine": "memsaver.integrations.rollout",
    "colocatedsession": "memsaver.integrations.rollout",
}


def missing(name: str, public: list[str]) -> AttributeError | ImportError:
    """Return the error for a missing attribute of `memsaver`, for its `__getattr__`.

    If `from memsaver import name` needs the attribute, the error is an ImportError, because Python
    would replace an AttributeError with an ImportError without advice. If the name is a module of
    the package, the error is an AttributeError, which makes Python import the module.
    """
    importing = sys._getframe(2).f_code.co_name == "_handle_fromlist"
    if importing and importlib.util.find_spec(f"memsaver.{name}") is None:
        return ImportError(
            f"cannot import name {name!r} from 'memsaver'{_advice(name, public)}", name=name
        )
    return AttributeError(f"module 'memsaver' has no attribute {name!r}{_advice(name, public)}")


def _advice(name: str, public: list[str]) -> str:
    """Return a suggestion to append to the error message, or ""."""
    if name.startswith("__"):  # programs look for many such names in every module
        return ""
    lower = name.lower()
    if lower in _MODULES:
        return f": it is in {_MODULES[lower]}, which has to be imported"
    if lower in _CALLED:
        return f": use memsaver.{_CALLED[lower]}"
    return did_you_mean(name, public)
