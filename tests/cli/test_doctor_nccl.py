"""Tests `memsaver doctor`'s findings about NCCL's variables and files."""

import pytest
from doctors import FakeDriver, of, raising

from memsaver.cli.checks import nccl
from memsaver.errors import NotLoadedError


@pytest.mark.parametrize(
    ("env", "name", "level", "value"),
    [
        ({}, "NCCL_GRAPH_REGISTER", "absent", None),
        ({"NCCL_GRAPH_REGISTER": "0"}, "NCCL_GRAPH_REGISTER", "good", "0"),
        ({"NCCL_GRAPH_REGISTER": "1"}, "NCCL_GRAPH_REGISTER", "warned", "1"),
        ({"NCCL_CUMEM_ENABLE": "0"}, "NCCL_CUMEM_ENABLE", "good", "0"),
        ({"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE", "good", "1"),
        ({nccl.REGISTER_HOOK: "1"}, nccl.REGISTER_HOOK, "warned", "1"),
    ],
)
def test_variables_of_nccl_are_judged(plain, env, name, level, value):
    for variable, text in env.items():
        plain.setenv(variable, text)
    found = of(nccl.check_nccl(), name)
    assert (found.level, found.data["value"]) == (level, value)


@pytest.mark.parametrize(
    ("devices", "env", "level", "says"),
    [
        (2, {}, "warned", "current NCCL's default is 1"),
        (1, {}, "absent", "irrelevant for a single GPU"),
        (2, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1"}, "good", "memsaver sets it to 0"),
        (
            2,
            {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "MEMSAVER_SGLANG": "0"},
            "warned",
            "current NCCL's default is 1",
        ),
        (2, {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1", "MEMSAVER_SGLANG": "x"}, "warned", "default"),
        (2, {"NCCL_GRAPH_REGISTER": "0"}, "good", "can be paused"),
    ],
)
def test_an_unset_variable_is_reported_like_its_default(plain, devices, env, level, says):
    """An unset variable whose default is unsafe is reported like an explicit unsafe value."""
    plain.setattr(nccl, "BareDriver", lambda: FakeDriver(count=devices))
    for variable, text in env.items():
        plain.setenv(variable, text)
    found = of(nccl.check_nccl(), "NCCL_GRAPH_REGISTER")
    assert found.level == level and says in found.text
    assert level in ("good", "absent") or "set it to 0" in found.advice


def test_without_a_driver_an_unset_variable_is_not_reported(plain):
    plain.setattr(nccl, "BareDriver", raising(NotLoadedError("no libcuda.so.1")))
    assert of(nccl.check_nccl(), "NCCL_GRAPH_REGISTER").level == "absent"


def test_files_of_nccl_count_less_than_the_environment(plain, tmp_path):
    file = tmp_path / "nccl.conf"
    file.write_text("# registers\nNCCL_GRAPH_REGISTER=1 # all\nNCCL_NVLS_ENABLE = 0\n")
    plain.setenv("NCCL_CONF_FILE", str(file))
    found = of(nccl.check_nccl(), "NCCL_GRAPH_REGISTER")
    assert found.level == "warned" and str(file) in found.text
    plain.setenv("NCCL_GRAPH_REGISTER", "0")
    found = nccl.check_nccl()
    assert of(found, "NCCL_GRAPH_REGISTER").level == "good"
    assert of(found, "NCCL_NVLS_ENABLE").data == {"value": "0", "source": str(file)}
