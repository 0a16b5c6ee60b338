"""Tests a trainer's memory in tags on real GPUs; each case runs in its own process."""

from __future__ import annotations

import ast
import sys

import pytest
from repository import GPU_SUPPORT
from torch_environment import run_on_ranks

FILES = ("offload_cases.py", "offload_graph_cases.py", "overlap_cases.py")
CASES = {
    node.name: path
    for path in (GPU_SUPPORT / name for name in FILES)
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("case_")
}
ALONE = [name for name in CASES if name not in {"case_fsdp2", "case_on_the_second_gpu"}]


def run(name: str, ranks: int = 1, expandable: bool = False) -> None:
    """Run a case on `ranks` ranks; if the case fails, fail with the ranks' output."""
    said = run_on_ranks([sys.executable, str(CASES[name]), name], ranks, expandable)
    assert all(text.splitlines()[-1] == "held" for text in said), "\n".join(said)


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("expandable", [False, True], ids=["fixed", "expandable"])
@pytest.mark.parametrize("name", ALONE, ids=lambda name: name.removeprefix("case_"))
def test_cases_on_one_gpu(name: str, expandable: bool) -> None:
    run(name, expandable=expandable)


@pytest.mark.gpu
@pytest.mark.timeout(240)
def test_fsdp2_on_one_rank() -> None:
    run("case_fsdp2")


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.timeout(240)
def test_fsdp2_on_two_ranks() -> None:
    run("case_fsdp2", ranks=2)


@pytest.mark.gpu
@pytest.mark.two_gpus
@pytest.mark.timeout(240)
def test_on_the_second_gpu() -> None:
    run("case_on_the_second_gpu")
