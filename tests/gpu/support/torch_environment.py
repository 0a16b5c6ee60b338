"""Child processes that use torch: their environment, and runs of a program as several ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from child_process import run_together
from program_runs import free_port
from repository import GPU_SUPPORT, IMPORT_PATH

import memsaver


def torch_environment(expandable: bool) -> dict[str, str]:
    """Return the environment without variables for torch's allocator and memsaver.

    In this environment, Python finds memsaver and the tests' helper modules. With `expandable`,
    torch uses expandable segments.
    """
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MEMSAVER_")
        and name not in ("LD_PRELOAD", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    }
    root = str(Path(memsaver.__file__).resolve().parent.parent)
    paths = [root, IMPORT_PATH, str(GPU_SUPPORT), env.get("PYTHONPATH")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    env["PYTHONFAULTHANDLER"] = "1"
    if expandable:
        env["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    return env


def run_on_ranks(
    command: Sequence[str], ranks: int, expandable: bool = False, **variables: str
) -> list[str]:
    """Run a program once for each rank; every run must succeed. Return each rank's output."""
    env = torch_environment(expandable) | variables
    env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    each = [(command, {**env, "RANK": str(rank)}) for rank in range(ranks)]
    return run_together(each, timeout=200)
