"""The environment variables of the vLLM plugin, which child processes inherit.

Flags are read each time they are used. The variables of the policy (`policy_of`) are read when an
engine starts.

MEMSAVER_VLLM: `0` disables the plugin, so that vLLM does not use memsaver. Default `1`.
MEMSAVER_VLLM_BACKUP: the backing store for saved contents: `host`, `pageable`, `disk` or `peer`;
    see `memsaver.region`. Default `host`.
MEMSAVER_VLLM_GRAPHS: `1` releases the memory of CUDA graphs together with all other memory, like
    vLLM's own option `sleep_mode_offload_cudagraph` in versions that have it. Default `0`.
MEMSAVER_VLLM_ASLEEP: the policy for requests that need released memory: `refuse`, `wait` or `wake`;
    see `memsaver.integrations.engine.policies.Policy`. Default `refuse`.
MEMSAVER_VLLM_ASLEEP_WAIT: the maximum time in seconds for which a request is held. Default `60`.
MEMSAVER_VLLM_ASLEEP_REQUESTS: the maximum number of requests that are held at the same time.
    Default `65536`.
MEMSAVER_VLLM_SLEEP_AFTER: with `wake`, the idle time in seconds after which the engine releases
    its memory. Default `0`: never.

If vLLM's own variable `VLLM_PLUGINS` (the list of the plugins to load) is set, it must contain
`memsaver`.
"""

from __future__ import annotations

from memsaver._runtime.native import Backup

from ..engine import variables

__all__ = [
    "backup",
    "check",
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
    """Return the backing store for backups; raise `ConfigError` if the value is invalid."""
    return variables.backup("MEMSAVER_VLLM_BACKUP")


def is_on() -> bool:
    """Return whether vLLM uses memsaver; raise `ConfigError` if the value is not a flag."""
    return variables.flag("MEMSAVER_VLLM", True)


def graphs_are_pausable() -> bool:
    """Return whether CUDA graphs are captured into pausable memory. Raises like `is_on`."""
    return variables.flag("MEMSAVER_VLLM_GRAPHS", False)


def check() -> None:
    """Raise `ConfigError` if a variable other than MEMSAVER_VLLM is invalid."""
    policy()
    backup()
    graphs_are_pausable()
