"""The environment variables of the vLLM plugin, which child processes inherit.

Flags are read at each use. The variables of the policy (`policy_of`) are read when an engine
starts.

MEMSAVER_VLLM: `0` turns the plugin off, so that vLLM does not use memsaver. Default `1`.
MEMSAVER_VLLM_BACKUP: the place where contents are saved: `host`, `pageable`, `disk` or `peer`; see
    `memsaver.region`. Default `host`.
MEMSAVER_VLLM_GRAPHS: `1` releases the memory of CUDA graphs together with all other memory, as
    vLLM's own option `sleep_mode_offload_cudagraph` does in versions that have it. Default `0`.
MEMSAVER_VLLM_ASLEEP: the policy for requests that need released memory: `refuse`, `wait` or `wake`;
    see `memsaver.integrations.engine.policies.Policy`. Default `refuse`.
MEMSAVER_VLLM_ASLEEP_WAIT: the longest time in seconds for which a request is held. Default `60`.
MEMSAVER_VLLM_ASLEEP_REQUESTS: the largest number of requests that are held at the same time.
    Default `65536`.
MEMSAVER_VLLM_SLEEP_AFTER: with `wake`, the seconds without a request after which the engine
    releases its memory. Default `0`: never.

vLLM's own variable `VLLM_PLUGINS`, its list of the plugins to load, must contain `memsaver` if it
is set.
"""

from __future__ import annotations

from memsaver._runtime.native import Backup

from ..engine import variables

__all__ = [
    "backup",
    "fix_policy",
    "graphs_are_pausable",
    "is_on",
    "policy",
    "policy_of",
    "policy_variables",
]

_policies = variables.EnginePolicies("MEMSAVER_VLLM")
policy, policy_of = _policies.new, _policies.of
fix_policy, policy_variables = _policies.fix, _policies.variables


def backup() -> Backup:
    """Return the place for backups. Raises `ConfigError` if the value is not a place."""
    return variables.backup("MEMSAVER_VLLM_BACKUP")


def is_on() -> bool:
    """Return whether vLLM uses memsaver. Raises `ConfigError` if the value is not a flag."""
    return variables.flag("MEMSAVER_VLLM", True)


def graphs_are_pausable() -> bool:
    """Return whether CUDA graphs are captured into pausable memory. Raises like `is_on`."""
    return variables.flag("MEMSAVER_VLLM_GRAPHS", False)
