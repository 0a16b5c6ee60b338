"""Prepare an archive of the packages that the frameworks need, for a machine without a network.

    python benchmarks/framework_wheels.py ARCHIVE.tar.xz

The machine needs Python 3.12, torch, transformers and, for the benchmark's trl part, vLLM. The
archive contains

    site/        TRL and accelerate, for PYTHONPATH
    deepspeed/   DeepSpeed and the packages that it imports, for PYTHONPATH. This folder is
                 separate because TRL and accelerate import DeepSpeed if they find it
    standins/    one folder for each of the packages in STANDINS, which TRL imports but the
                 benchmarks hardly use. Copy the packages that the machine lacks to site/

DeepSpeed is published as a source distribution. Without its compiled operations, DeepSpeed is pure
Python code, which is copied. The archive is only for benchmarks. Do not publish it.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

PYTHON = "3.12"
WHEELS = {
    "site": ("trl==1.16.0", "accelerate==1.15.0"),
    "deepspeed": ("einops==0.8.2", "hjson==3.1.0", "msgpack==1.2.4", "py-cpuinfo==9.0.0"),
}
DEEPSPEED = "deepspeed==0.19.8"
PLATFORMS = ("manylinux_2_28", "manylinux_2_17", "manylinux2014", "manylinux_2_12", "manylinux1")
OMITTED = {"test", "tests", "csrc", "scripts"}  # folders

ANY = '''"""A fake for imports, written by framework_wheels.py: it defines every name."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = globals()[name] = type(name, (), {"__module__": __name__})
    return made
'''
DATASETS = '''"""A fake of the part of datasets that a trainer uses (framework_wheels.py)."""

import torch.utils.data

__version__ = "4.7.0"


class Dataset(torch.utils.data.Dataset):
    """Columns of equal length in memory."""

    cache_files = ()

    def __init__(self, columns):
        self._columns = columns

    @classmethod
    def from_dict(cls, mapping):
        return cls({name: list(values) for name, values in mapping.items()})

    @property
    def column_names(self):
        return list(self._columns)

    def __len__(self):
        return len(next(iter(self._columns.values())))

    def __getitem__(self, row):
        return {name: values[row] for name, values in self._columns.items()}


class IterableDataset:
    """Never created."""


class DatasetDict(dict):
    """Never created."""


class IterableDatasetDict(dict):
    """Never created."""


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)
    made = globals()[name] = type(name, (), {"__module__": __name__})
    return made
'''
STANDINS = {
    "datasets": {"__init__.py": DATASETS},
    "pandas": {"__init__.py": ANY},
    "pyarrow": {"__init__.py": ANY, "compute.py": ANY, "types.py": ANY},
}


def download(into: Path, name: str, *options: str) -> None:
    """Download one package with pip, without its dependencies."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(into)]
    subprocess.run([*pip, *options, name], check=True)


def is_kept(path: str) -> bool:
    """Return whether the archive contains a file of a wheel or a source distribution."""
    return not OMITTED.intersection(path.split("/")[:-1])


def unpack_wheels(wheels: Path, site: Path) -> None:
    """Unpack all wheels in a folder."""
    for path in sorted(wheels.glob("*.whl")):
        with zipfile.ZipFile(path) as wheel:
            for name in wheel.namelist():
                if is_kept(name) and not name.endswith("/"):
                    wheel.extract(name, site)


def unpack_deepspeed(source: Path, site: Path, work: Path) -> None:
    """Copy the Python code of DeepSpeed's source distribution, as an installation does."""
    with tarfile.open(source) as archive:
        archive.extractall(work, filter="data")
    root = next(work.glob("deepspeed-*/"))
    version = root.name.removeprefix("deepspeed-")
    package = site / "deepspeed"
    for path in sorted(root.glob("deepspeed/**/*")):
        name = path.relative_to(root).as_posix()
        if path.is_file() and is_kept(name):
            target = site / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    (package / "git_version_info_installed.py").write_text(
        "from collections import defaultdict\n\n"
        f"version = '{version}'\ngit_hash = git_branch = accelerator_name = ''\n"
        "installed_ops = defaultdict(bool)\n"
        "names = ('version', 'cuda_version', 'nccl_version', 'hip_version')\n"
        "torch_info = dict.fromkeys(names, '0.0')\n"
    )
    information = site / f"deepspeed-{version}.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: deepspeed\nVersion: {version}\n"
    )


def write_standins(folder: Path) -> None:
    """Write the packages of STANDINS."""
    for package, files in STANDINS.items():
        for name, text in files.items():
            path = folder / package / package / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    archive: Path = parser.parse_args().archive
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        made, source = work / "made", work / "source"
        platforms = [f"--platform={name}_x86_64" for name in PLATFORMS]
        exact = [f"--python-version={PYTHON}", "--implementation=cp", *platforms]
        for part, names in WHEELS.items():
            for name in names:
                download(work / part, name, "--only-binary=:all:", *exact)
            unpack_wheels(work / part, made / part)
        download(source, DEEPSPEED, "--no-binary=:all:", "--no-build-isolation")
        unpack_deepspeed(next(source.glob("deepspeed-*.tar.gz")), made / "deepspeed", source)
        write_standins(made / "standins")
        with tarfile.open(archive, "w:xz") as written:
            for path in sorted(made.iterdir()):
                written.add(path, path.name)
    print(f"{archive}: {archive.stat().st_size / 1e6:.1f} MB")


if __name__ == "__main__":
    main()
