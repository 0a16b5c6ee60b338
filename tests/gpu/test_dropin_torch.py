"""Tests the distribution that provides torch_memory_saver with tensors and graphs on a real GPU.

Every test runs a `case_*` function of `dropin_cases` in a separate child process.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from repository import GPU_SUPPORT

CHILD = GPU_SUPPORT / "dropin_child.py"
SECONDS = 90  # for one case, including the start of its child

# How the child is started.
SETTINGS = ("plain", "torch", "expandable", "preload")

ANYWHERE = [
    "cycles",
    "regions_of_one_tag",
    "graphs_of_one_pool",
    "a_graph_with_a_backup",
    "get_cpu_backup",
    "disable",
    "margin",
    "retained_backups",
    "mmap_backups_leave_the_host",
]
# Cases for a process that is one region, with a backup.
WHOLE_PROCESS = [
    "a_training_engine",
    "disabled_blocks",
    "nested_regions",
    "memory_by_ctypes",
]


def run_child(case: str, setting: str, site: Path, **variables: str) -> None:
    """Run a case in a child process with this setting; if the case fails, fail with its output."""
    program = [sys.executable, str(CHILD), f"case_{case}", setting]
    if setting == "preload":
        start = "import subprocess, sys; from torch_memory_saver import configure_subprocess\n"
        start += "with configure_subprocess(): sys.exit(subprocess.run(sys.argv[1:]).returncode)"
        program = [sys.executable, "-c", start, *program]
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("MEMSAVER_", "TMS_", "PYTORCH_")) and name != "LD_PRELOAD"
    }
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(site), env.get("PYTHONPATH")]))
    if setting == "expandable":
        env["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"
    done = subprocess.run(
        program, env={**env, **variables}, capture_output=True, text=True, timeout=SECONDS
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("case", ANYWHERE)
def test_cases_on_one_gpu(case: str, setting: str, dropin_site: Path) -> None:
    run_child(case, setting, dropin_site)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("setting", ["plain", "torch", "preload"])
def test_the_case_on_two_gpus(setting: str, dropin_site: Path) -> None:
    run_child("two_devices", setting, dropin_site)


@pytest.mark.gpu
@pytest.mark.parametrize("how", ["configure_subprocess", "by hand"])
@pytest.mark.parametrize("segments", ["", "expandable_segments:True"])
def test_a_whole_process_is_one_region(how: str, segments: str, dropin_site: Path) -> None:
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    if segments:
        variables["PYTORCH_CUDA_ALLOC_CONF"] = segments
    setting = "preload"
    if how == "by hand":
        setting = "plain"
        library = "torch_memory_saver_hook_mode_preload.abi3.so"
        variables["LD_PRELOAD"] = str(dropin_site / library)
    run_child("a_whole_trainer", setting, dropin_site, **variables)


@pytest.mark.gpu
@pytest.mark.parametrize("case", WHOLE_PROCESS)
def test_the_originals_examples_of_a_whole_process(case: str, dropin_site: Path) -> None:
    variables = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
    run_child(case, "preload", dropin_site, **variables)
