"""Tests torch mode on a real GPU.

Every test runs a `case_*` function of torch_cases. The tests share a child process that runs the
cases. After a failure, which might have destroyed the CUDA context, a new child process is started.
To run cases without pytest:

    export PYTHONPATH=tests/support:tests/gpu/support
    python tests/gpu/test_torch_mode.py case_backup_view [more cases]
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import time
import traceback
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
from repository import GPU_SUPPORT
from torch_environment import torch_environment

import memsaver

SECONDS = 90  # for one case, including the start of its child

SETTINGS = ("fixed", "expandable", "preload")


# --- the cases -----------------------------------------------------------------------------------

FOLDER = GPU_SUPPORT / "torch_cases"


def find_cases() -> dict[str, str]:
    """Return the module of each case, by the case's name.

    The function parses the modules because this process does not load torch.
    """
    found = [
        (node.name, f"{FOLDER.name}.{path.stem}")
        for path in sorted(FOLDER.glob("*.py"))
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
    ]
    assert len(dict(found)) == len(found), "two cases have one name"
    return dict(found)


CASES = find_cases()
ON_TWO_GPUS = [name for name in CASES if name.startswith("case_two_gpus_")]
ON_ONE_GPU = [name for name in CASES if name not in ON_TWO_GPUS]
WARNING = (  # these cases cause warnings on purpose
    "case_allocation_without_enough_memory",
    "case_dead_blocks_are_not_copied",
    "case_shortage_in_a_region",
    "case_torch_pool_in_use",
    "case_torch_pool_of_a_paused_tag",
)
FRESH = (  # these cases need a new process
    "case_a_region_of_sglang_does_not_start_cublas",
    "case_two_gpus_copies",
)


# --- the child -----------------------------------------------------------------------------------


def run_case(name: str) -> dict[str, Any]:
    """Run one case; return its outcome and whether the process can run another case."""
    case = getattr(importlib.import_module(CASES[name]), name)
    tidy = importlib.import_module(f"{FOLDER.name}.tensors").tidy
    start = time.perf_counter()
    reply: dict[str, Any] = {"ok": True, "usable": True}
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            case(name.removeprefix("case_"))
        ours = [str(w.message) for w in caught if issubclass(w.category, memsaver.MemsaverWarning)]
        assert not ours or name in WARNING, f"warnings: {ours}"
    except BaseException:
        reply = {"ok": False, "trace": traceback.format_exc(), "usable": False}
    try:
        tidy()
    except BaseException:
        reply.update(ok=False, usable=False)
        reply["trace"] = reply.get("trace", "") + traceback.format_exc()
    reply["seconds"] = round(time.perf_counter() - start, 2)
    return reply


def serve() -> None:
    """Run the cases named on stdin and write a JSON line about each case."""
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        replies.write(json.dumps(run_case(line.strip())) + "\n")
        replies.flush()


# --- the tests -----------------------------------------------------------------------------------


def environment(setting: str) -> dict[str, str]:
    """Return the environment of a child process."""
    env = torch_environment(expandable=setting == "expandable")
    if setting == "preload":
        env.update(memsaver.preload_env(env=env))
    return env


class Child:
    """A process that runs cases and is replaced after a case that makes the process unusable."""

    def __init__(self, setting: str) -> None:
        self._env = environment(setting)
        self._process: subprocess.Popen[bytes] | None = None

    def run(self, name: str) -> None:
        """Run a case; if it fails, fail with its traceback."""
        if name in FRESH:
            self.close()
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, __file__, "--serve"],
                env=self._env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin and stdout
        with contextlib.suppress(BrokenPipeError):
            stdin.write(name.encode() + b"\n")
            stdin.flush()
        if not select.select([stdout], [], [], SECONDS)[0]:
            self.close(kill=True)
            pytest.fail(f"{name} did not end in {SECONDS} s")
        line = stdout.readline()
        if not line:
            status = self._process.wait()
            self._process = None
            pytest.fail(f"the process ended in {name}, status {status}")
        reply = json.loads(line)
        if not reply["usable"]:
            self.close(kill=True)
        if not reply["ok"]:
            pytest.fail(reply["trace"], pytrace=False)

    def close(self, kill: bool = False) -> None:
        """End the process."""
        if self._process is None:
            return
        if kill:
            self._process.kill()
        self._process.communicate()
        self._process = None


@pytest.fixture(scope="module", params=SETTINGS)
def child(request: pytest.FixtureRequest) -> Iterator[Child]:
    process = Child(request.param)
    yield process
    process.close()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ON_ONE_GPU, ids=lambda name: name.removeprefix("case_"))
def test_cases_on_one_gpu(child: Child, name: str) -> None:
    child.run(name)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.parametrize("name", ON_TWO_GPUS, ids=lambda name: name.removeprefix("case_"))
def test_cases_on_two_gpus(child: Child, name: str) -> None:
    child.run(name)


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        serve()
    else:
        failed = 0
        for chosen in sys.argv[1:] or ON_ONE_GPU:
            outcome = run_case(chosen)
            print(chosen, "ok" if outcome["ok"] else outcome["trace"], outcome["seconds"], "s")
            failed += not outcome["ok"]
            if not outcome["usable"]:
                break
        sys.exit(failed)
