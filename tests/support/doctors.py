"""`memsaver doctor` in a separate process, a sample finding, and a fake driver for the checks."""

from __future__ import annotations

import os
import sys

from warm_processes import run_command

from memsaver._runtime.native import LIBRARY_DIR

SIM = {"MEMSAVER_DRIVER": "sim"}


def run_doctor(*arguments, command=("-m", "memsaver"), cwd=None, **env):
    """Run the command in a separate process with additional environment variables."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("MEMSAVER_", "NCCL_"))}
    environment = {**kept, "PYTHONPATH": str(LIBRARY_DIR.parent), **SIM, **env}
    whole = [sys.executable, *command, "doctor", *arguments]
    return run_command(whole, env=environment, cwd=cwd, capture_output=True, text=True, timeout=60)


def of(findings, name):
    (found,) = [finding for finding in findings if finding.name == name]
    return found


def raising(error):
    def raise_it(*arguments):
        raise error

    return raise_it


class FakeDriver:
    """A fake driver that returns the same results as a real GPU's driver."""

    name, simulated = "libcuda.so.1", False

    def __init__(self, version=13000, count=1, **attributes):
        self.version, self.count = version, count
        self.attributes = {18: 0, 20: 0, 75: 9, 76: 0, 102: 1, 110: 1, 116: 1}
        self.attributes |= {int(name[1:]): value for name, value in attributes.items()}

    def device_count(self):
        return self.count

    def device_name(self, device):
        return "NVIDIA H200"

    def total_bytes(self, device):
        return 141 << 30

    def attribute(self, device, number):
        return self.attributes[number]
