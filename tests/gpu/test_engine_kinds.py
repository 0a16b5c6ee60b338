"""Tests memsaver in every kind of SGLang engine: releases, resumes and updates preserve the output.

Each test runs two engines of one kind, as benchmarks/sglang_kinds.py does. A test fails if the
kernels for its kind are not installed. The tests use the installed memsaver package.
"""

from __future__ import annotations

import importlib
from typing import Any

import pytest
from repository import ROOT

pytestmark = [pytest.mark.gpu, pytest.mark.sglang, pytest.mark.timeout(900)]


def _kinds() -> list[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "benchmarks")
        kinds = importlib.import_module("sglang_kind_table").KINDS
    return [
        pytest.param(kind.name, marks=[pytest.mark.two_gpus] if kind.gpus > 1 else [], id=kind.name)
        for kind in kinds
    ]


@pytest.mark.parametrize("name", _kinds())
def test_a_kind_of_engine_keeps_its_output(name, benchmark_module, tmp_path) -> None:
    kinds = benchmark_module("sglang_kinds")
    kind = next(kind for kind in kinds.KINDS if kind.name == name)
    row = kinds.measure(kind, tmp_path / "engines")
    verdicts = {row.get(key, kinds.SAME) for key in kinds.VERDICTS}
    assert verdicts == {kinds.SAME} and "errors" not in row, row
