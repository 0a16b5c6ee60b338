"""The SGLang plugin's environment variables, which child processes inherit.

Flags are read at each use. The variables of the policy (`policy_of`) are read when an engine
starts.

MEMSAVER_SGLANG: `0` turns the plugin off, so SGLang does not use memsaver. Default `1`.
MEMSAVER_SGLANG_BACKUP: the backing store for saved contents: `host`, `pageable`, `disk` or `peer`;
    see `memsaver.region`. Default `host`.
MEMSAVER_SGLANG_PRELOAD: `1` starts scheduler processes in preload mode, which a plain installation
    does not need; see `memsaver.preload`. Default `0`.
MEMSAVER_SGLANG_ASLEEP: the policy for requests that need released memory: `refuse`, `wait` or
    `wake`; see `memsaver.integrations.engine.policies.Policy`. Default `refuse`.
MEMSAVER_SGLANG_ASLEEP_WAIT: the longest time in seconds for which a request is held. Default `60`.
MEMSAVER_SGLANG_ASLEEP_REQUESTS: the maximum number of requests that are held at the same time.
    Default `65536`.
MEMSAVER_SGLANG_SLEEP_AFTER: with `wake`, the seconds without a request after which the engine
    releases its memory. Default `0` (never).
MEMSAVER_SGLANG_SUSPEND_NCCL: `1` suspends NCCL's communicators while all memory is released.
    Requires NCCL 2.29.7. Default `0`.
MEMSAVER_SGLANG_UNGUARDED: `1` releases memory even if memsaver cannot refuse requests that need
    released memory. Such a request may crash the engine. Default `0`.
MEMSAVER_SGLANG_CHECK_UPDATES: `0` accepts unknown names and wrong shapes in weight updates without
    verification, as SGLang does. Default `1`.

SGLang's own variables apply as well. If `SGLANG_PLUGINS`, the list of the plugins to load, is set,
it must contain `memsaver`. If `SGLANG_PLATFORM` selects another platform plugin, SGLang does not
load memsaver's platform plugin.
"""

from __future__ import annotations

import os

from memsaver._runtime.native import Backup

from ..engine import variables

__all__ = [
    "backup",
    "check",
    "fix_policy",
    "graphs_are_pausable",
    "is_on",
    "is_preloading",
    "policy",
    "policy_of",
    "policy_variables",
    "releases_unguarded",
    "suspends_nccl",
    "updates_are_checked",
]

_policies = variables.EnginePolicies("MEMSAVER_SGLANG")
policy, policy_of = _policies.new, _policies.of
fix_policy, policy_variables = _policies.fix, _policies.variables


def backup() -> Backup:
    """Return the backing store for backups. Raises `ConfigError` if the value is invalid."""
    return variables.backup("MEMSAVER_SGLANG_BACKUP")


def is_on() -> bool:
    """Return whether SGLang uses memsaver. Raises `ConfigError` if the value is invalid."""
    return variables.flag("MEMSAVER_SGLANG", True)


def is_preloading() -> bool:
    """Return whether scheduler processes start in preload mode. Raises like `is_on`."""
    return variables.flag("MEMSAVER_SGLANG_PRELOAD", False)


def releases_unguarded() -> bool:
    """Return whether an engine without a guard may release memory. Raises like `is_on`."""
    return variables.flag("MEMSAVER_SGLANG_UNGUARDED", False)


def suspends_nccl() -> bool:
    """Return whether a release of all memory suspends communicators. Raises like `is_on`."""
    return variables.flag("MEMSAVER_SGLANG_SUSPEND_NCCL", False)


def updates_are_checked() -> bool:
    """Return whether an update fails for names that the model does not use. Raises like `is_on`."""
    return variables.flag("MEMSAVER_SGLANG_CHECK_UPDATES", True)


def check() -> None:
    """Raise `ConfigError` now if a setting is invalid, rather than later in a scheduler."""
    policy()
    backup()
    releases_unguarded()
    suspends_nccl()
    updates_are_checked()


def graphs_are_pausable() -> bool:
    """Return whether SGLang's own variable enables graph capture with the memory saver."""
    return os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").strip().lower() in ("1", "true")
