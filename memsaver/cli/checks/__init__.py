"""The checks of `memsaver doctor`, which return findings, with one module for each subject.

The checks do not print, create a CUDA context, or import torch or a framework. The checks open and
initialize the driver (cuInit), which can take seconds on a machine with several GPUs.
"""

from __future__ import annotations

from collections.abc import Callable

from memsaver.cli.checks.disk import check_disk
from memsaver.cli.checks.driver import check_devices, check_driver, check_nvml
from memsaver.cli.checks.engines import check_engines
from memsaver.cli.checks.findings import Finding, Level, warned
from memsaver.cli.checks.host import check_host
from memsaver.cli.checks.nccl import check_nccl
from memsaver.cli.checks.options import check_installation, check_options
from memsaver.cli.checks.preloading import check_preloading
from memsaver.cli.checks.pytorch import check_torch

__all__ = ["SUBJECTS", "Finding", "Level", "check_all", "worst"]

SUBJECTS: dict[str, Callable[[], list[Finding]]] = {
    "memsaver": check_installation,
    "driver": check_driver,
    "devices": check_devices,
    "NVML": check_nvml,
    "torch": check_torch,
    "engines": check_engines,
    "preloading": check_preloading,
    "NCCL": check_nccl,
    "host": check_host,
    "disk": check_disk,
    "options": check_options,
}
"""The check of each subject, in display order."""


def check_all() -> dict[str, list[Finding]]:
    """Return the findings of every subject. The function never raises an exception. A check that
    fails becomes a finding.
    """
    found: dict[str, list[Finding]] = {}
    for subject, check in SUBJECTS.items():
        try:
            found[subject] = check()
        except Exception as error:  # a failing check must not hide the others
            text = f"this could not be checked: {type(error).__name__}: {error}"
            found[subject] = [warned(subject, text, "please report it")]
    return found


def worst(findings: dict[str, list[Finding]]) -> Level:
    """Return the worst level of all findings, ignoring absent optional parts."""
    order = list(Level)
    levels = [finding.level for rows in findings.values() for finding in rows]
    levels = [level for level in levels if level is not Level.ABSENT]
    return max(levels, key=order.index, default=Level.GOOD)
