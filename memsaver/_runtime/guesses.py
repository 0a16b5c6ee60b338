"""Advice about names that `memsaver` does not have: their actual place or name."""

from __future__ import annotations

from memsaver._runtime.text import did_you_mean

__all__ = ["advice"]

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
    "rollout": "memsaver.integrations.rollout",
    "trainer": "memsaver.integrations.trainer",
    "offload": "memsaver.integrations.trainer",
    "lightrft": "memsaver.integrations.lightrft",
    "SleepController": "memsaver.integrations.sglang",
    "RolloutEngine": "memsaver.integrations.rollout",
    "ColocatedSession": "memsaver.integrations.rollout",
}
_VLLM = "vLLM is not supported yet; memsaver works with SGLang, and in programs that call it"


def advice(name: str, public: list[str]) -> str:
    """Return the end of the message about a missing attribute of `memsaver`, or ""."""
    if name.lower() == "vllm":
        return f": {_VLLM}"
    if name in _MODULES:
        return f": it is in {_MODULES[name]}, which has to be imported"
    if name in _CALLED:
        return f": use memsaver.{_CALLED[name]}"
    return did_you_mean(name, public)
