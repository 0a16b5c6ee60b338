"""Test `memsaver doctor`'s findings about torch, SGLang and torch_memory_saver."""

import sys

import pytest
from doctors import FakeDriver, of

from memsaver.cli.checks import frameworks


@pytest.mark.parametrize(
    ("version", "level"),
    [
        ("2.13.0+cpu", "good"),
        ("2.7.1", "warned"),
        ("2.5.1", "bad"),
        (None, "absent"),
        ("git1a2b3c", "warned"),
    ],
)
def test_versions_of_torch(plain, version, level):
    plain.setattr(frameworks, "installed_version", lambda name: version)
    plain.setattr(frameworks, "_written", lambda name: None)
    found = of(frameworks.check_torch(), "torch version")
    assert (found.level, found.data["version"]) == (level, version)


@pytest.mark.parametrize(
    ("build", "cuda", "level"),
    [("13.0", 13000, "good"), ("12.8", 12000, "good"), ("13.0", 12080, "bad"), (None, 0, "warned")],
)
def test_the_cuda_version_of_torch(plain, build, cuda, level):
    plain.setattr(frameworks, "_cuda_build", lambda version: build)
    plain.setattr(frameworks, "BareDriver", lambda: FakeDriver(cuda))
    assert of(frameworks.check_torch(), "torch CUDA build").level == level


def test_the_build_is_read_from_the_text_of_torch(plain, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (folder / "version.py").write_text(
        "__version__ = '2.9.0'\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n"
    )
    plain.delitem(sys.modules, "torch", raising=False)
    plain.syspath_prepend(tmp_path)
    assert frameworks._cuda_build("2.9.0") == "12.9"
    plain.setattr(frameworks, "installed_version", lambda name: None)  # a folder on the path
    assert of(frameworks.check_torch(), "torch version").data == {"version": "2.9.0"}
    (folder / "version.py").write_text("cuda: Optional[str] = None\n")
    assert frameworks._cuda_build("2.9.0") is None
    assert frameworks._cuda_build("2.9.0+cu130") == "13.0"


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({}, "absent", "no settings"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "good", "regions work with it"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MEMSAVER_TAG": "trainer"},
            "bad",
            "no hook sees it",
        ),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:False", "MEMSAVER_TAG": "trainer"},
            "good",
            "False",
        ),
        ({"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}, "bad", "memory pools"),
        ({"PYTORCH_ALLOC_CONF": "max_split_size_mb:64"}, "good", "max_split_size_mb:64"),
    ],
)
def test_settings_of_torchs_allocator(plain, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    found = of(frameworks._allocator_settings(), "torch allocator")
    assert found.level == level and says in found.text


def test_torch_without_its_cache_is_bad(plain):
    plain.setattr(frameworks, "installed_version", lambda name: "2.13.0")
    plain.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert of(frameworks.check_torch(), "PYTORCH_NO_CUDA_MEMORY_CACHING").level == "bad"


@pytest.mark.parametrize(
    ("version", "level", "tried"),
    [("0.5.16", "good", True), ("0.5.24", "warned", False), ("0.5.2", "warned", False)],
)
def test_versions_of_sglang(plain, version, level, tried):
    plain.setattr(
        frameworks, "installed_version", lambda name: version if name == "sglang" else None
    )
    found = frameworks.check_engines()
    assert of(found, "SGLang").level == level and of(found, "SGLang").data["tried"] is tried
    assert of(found, "SGLang plugin").level == "good"
    assert (of(found, "vLLM").level, of(found, "vLLM").text) == ("absent", "not installed")


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({"MEMSAVER_SGLANG": "0"}, "warned", "turned off"),
        ({"MEMSAVER_SGLANG": "maybe"}, "bad", "maybe"),
        ({"SGLANG_PLUGINS": "other"}, "warned", "SGLANG_PLUGINS=other"),
        ({"SGLANG_PLUGINS": "other, memsaver"}, "good", "on"),
        ({"SGLANG_PLATFORM": "other"}, "warned", "SGLANG_PLATFORM=other"),
        ({"MEMSAVER_SGLANG_PRELOAD": "1"}, "good", "preload mode"),
        ({"MEMSAVER_SGLANG_ASLEEP": "wait"}, "good", "requests to a sleeping engine: wait"),
        ({"MEMSAVER_SGLANG_ASLEEP": "sleep"}, "bad", "must be one of refuse, wait, wake"),
        ({"MEMSAVER_SGLANG_SLEEP_AFTER": "9"}, "bad", "needs MEMSAVER_SGLANG_ASLEEP=wake"),
        ({"MEMSAVER_SGLANG_SUSPEND_NCCL": "x"}, "bad", "MEMSAVER_SGLANG_SUSPEND_NCCL"),
        ({"MEMSAVER_SGLANG_CHECK_UPDATES": "x"}, "bad", "MEMSAVER_SGLANG_CHECK_UPDATES"),
    ],
)
def test_sglangs_settings_decide_whether_it_loads_the_plugin(plain, env, level, says):
    for name, value in env.items():
        plain.setenv(name, value)
    plain.setattr(frameworks, "installed_version", lambda name: "0.5.16")
    found = of(frameworks.check_engines(), "SGLang plugin")
    assert found.level == level and says in found.text


@pytest.mark.parametrize(
    ("version", "says"),
    [("0.0.10+memsaver", "provided by memsaver"), ("0.0.10", "the original")],
)
def test_the_provider_of_torch_memory_saver(plain, version, says):
    plain.setattr(frameworks, "installed_version", lambda name: version)
    found = of(frameworks.check_engines(), "torch_memory_saver")
    assert says in found.text and found.data["is_memsaver"] == ("memsaver" in version)
