"""What `memsaver doctor` looks at: findings as data, one module for each kind of thing.

Nothing here draws or prints, starts a CUDA context, or imports torch or a framework. The driver is
opened and initialised (cuInit), which can take seconds on a machine with several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from memsaver.cli.checks.disk import check_disk
from memsaver.cli.checks.driver import check_devices, check_driver
from memsaver.cli.checks.findings import Finding, Level, warned
from memsaver.cli.checks.frameworks import check_engines, check_torch
from memsaver.cli.checks.host import check_host
from memsaver.cli.checks.nccl import check_nccl
from memsaver.cli.checks.options import check_installation, check_options
from memsaver.cli.checks.preloading import check_preloading

__all__ = ["SUBJECTS", "Finding", "Level", "check_all", "worst"]

SUBJECTS: dict[str, Callable[[], list[Finding]]] = {
    "memsaver": check_installation,
    "driver": check_driver,
    "devices": check_devices,
    "torch": check_torch,
    "engines": check_engines,
    "preloading": check_preloading,
    "NCCL": check_nccl,
    "host": check_host,
    "disk": check_disk,
    "options": check_options,
}
"""Each subject's check, in the order in which they are shown."""


def check_all() -> dict[str, list[Finding]]:
    """Every subject's findings. Raises nothing: a check that fails says so in a finding."""
    found: dict[str, list[Finding]] = {}
    for subject, check in SUBJECTS.items():
        try:
            found[subject] = check()
        except Exception as error:  # one that fails must not hide the others
            text = f"this could not be checked: {type(error).__name__}: {error}"
            found[subject] = [warned(subject, text, "please report it")]
    return found


def worst(findings: dict[str, list[Finding]]) -> Level:
    """The worst level of all."""
    order = list(Level)
    levels = [finding.level for rows in findings.values() for finding in rows]
    return max(levels, key=order.index, default=Level.GOOD)
