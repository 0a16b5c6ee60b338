"""Tests `memsaver doctor`'s findings about torch and its allocator."""

import sys

import pytest
from doctors import FakeDriver, of

from memsaver.cli.checks import pytorch


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
    plain.setattr(pytorch, "installed_version", lambda name: version)
    plain.setattr(pytorch, "_written", lambda name: None)
    found = of(pytorch.check_torch(), "torch version")
    assert (found.level, found.data["version"]) == (level, version)


@pytest.mark.parametrize(
    ("build", "cuda", "level"),
    [("13.0", 13000, "good"), ("12.8", 12000, "good"), ("13.0", 12080, "bad"), (None, 0, "warned")],
)
def test_the_cuda_version_of_torch(plain, build, cuda, level):
    plain.setattr(pytorch, "_cuda_build", lambda version: build)
    plain.setattr(pytorch, "BareDriver", lambda: FakeDriver(cuda))
    assert of(pytorch.check_torch(), "torch CUDA build").level == level


def test_the_build_is_read_from_the_text_of_torch(plain, tmp_path):
    folder = tmp_path / "torch"
    folder.mkdir()
    (folder / "__init__.py").write_text("raise AssertionError('torch was imported')")
    (folder / "version.py").write_text(
        "__version__ = '2.9.0'\ncuda: Optional[str] = '12.9'\nhip: Optional[str] = None\n"
    )
    plain.delitem(sys.modules, "torch", raising=False)
    plain.syspath_prepend(tmp_path)
    assert pytorch._cuda_build("2.9.0") == "12.9"
    plain.setattr(pytorch, "installed_version", lambda name: None)  # a folder on the path
    assert of(pytorch.check_torch(), "torch version").data == {"version": "2.9.0"}
    (folder / "version.py").write_text("cuda: Optional[str] = None\n")
    assert pytorch._cuda_build("2.9.0") is None
    assert pytorch._cuda_build("2.9.0+cu130") == "13.0"


@pytest.mark.parametrize(
    ("env", "level", "says"),
    [
        ({}, "absent", "no settings"),
        ({"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, "good", "regions work with it"),
        (
            {"PYTORCH_ALLOC_CONF": "expandable_segments:True", "MEMSAVER_TAG": "trainer"},
            "bad",
            "no hook detects",
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
    found = of(pytorch._allocator_settings(), "torch allocator")
    assert found.level == level and says in found.text


def test_torch_without_its_cache_is_bad(plain):
    plain.setattr(pytorch, "installed_version", lambda name: "2.13.0")
    plain.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    assert of(pytorch.check_torch(), "PYTORCH_NO_CUDA_MEMORY_CACHING").level == "bad"
