"""Compares the tests' fake vLLM with vLLM's own modules."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from interfaces import Sources
from repository import TESTS

pytestmark = pytest.mark.recipes

# Classes that the fake has in another module.
ELSEWHERE = {
    "vllm.distributed.kv_transfer.Connector": (
        "vllm.distributed.kv_transfer.kv_connector.v1.base",
        "KVConnectorBase_V1",
    ),
    "vllm.v1.engine.core.Scheduler": ("vllm.v1.core.sched.scheduler", "Scheduler"),
}
EXCEPTIONS = {
    "vllm.distributed.parallel_state.init_distributed_environment": "one store for all groups",
    "vllm.entrypoints.llm.LLM.shutdown": "tests do not wait for an interpreter to end the engine",
    "vllm.platforms.interface.Platform.graph_pool_handle": "vLLM passes unknown names to torch",
    "vllm.v1.worker.gpu_model_runner.Model": "the model of the tests",
}


@pytest.fixture(scope="module")
def sources():
    """Return the sources of the fake's modules and of vLLM's own modules."""
    try:
        installed = version("vllm")
    except PackageNotFoundError:
        pytest.skip("vLLM is not installed")
    found = importlib.util.find_spec("vllm")
    fake = TESTS / "fixtures" / "vllm_engine"
    return Sources(fake, installed), Sources(Path(found.origin).parents[1], installed)


def differences(fake, real):
    """Yield the calls that only the fake or only vLLM accepts."""
    for module in set(fake.modules()).intersection(real.modules()):
        for name, made in fake.defined(module).items():
            where = f"{module}.{name}"
            own = real.find(*ELSEWHERE.get(where, (module, name)))
            if own is None:
                if "" not in made.methods:  # a function of the fake's own
                    yield where, "does not exist"
                continue
            for method, parameters in made.methods.items():
                if method in own.methods and not method.startswith("__"):
                    why = parameters.difference(own.methods[method])
                else:
                    why = "does not exist" * (
                        method not in own.fields and not method.startswith("_")
                    )
                if why:
                    yield f"{where}.{method}".rstrip("."), why


def test_the_fake_has_the_interface_of_vllm(sources):
    found = dict(differences(*sources))
    wrong = [f"{name} {why}" for name, why in found.items() if name not in EXCEPTIONS]
    assert not wrong, "\n".join(wrong)
    assert set(found) == set(EXCEPTIONS)


def test_differences_are_found(tmp_path):
    for name, code in {
        "fake": "class C:\n def f(self, a): ...\n def g(self): ...\n def h(self, b, a): ...",
        "real": "class B:\n def f(self, b): ...\nclass C(B):\n def h(self, a, b=1): ...",
    }.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.py").write_text(code)
    found = differences(Sources(tmp_path / "fake", "1"), Sources(tmp_path / "real", "1"))
    assert dict(found) == {
        "m.C.f": "has no a",
        "m.C.g": "does not exist",
        "m.C.h": "has the order a, b",
    }
