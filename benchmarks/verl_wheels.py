#!/usr/bin/env python3
"""Pack verl 0.9.1 and its dependencies for a test machine that has no network.

    python benchmarks/verl_wheels.py ARCHIVE.tar.xz

The archive contains packages for Python 3.12 on x86-64. Unpack it into a folder on PYTHONPATH that
already contains SGLang 0.5.16 and its packages. torch, accelerate, pandas, peft, pyarrow and
tensorboard must be installed. Parts of Ray that a local cluster does not load are omitted, and
symbols are stripped. The archive is only for tests. Do not publish it.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGES = (
    "verl==0.9.1",
    "ray==2.48.0",
    "tensordict==0.10.0",
    "transferqueue==0.1.11",
    "torchdata==0.11.0",
    "hydra-core==1.3.8",
    "omegaconf==2.3.0",
    "codetiming==1.4.0",
    "datasets==4.8.5",
    "multiprocess==0.70.19",
    "cachetools==7.3.3",
    "pylatexenc==2.11",
    "pyvers==0.1.0",
    "importlib-metadata==8.7.0",
    "jsonschema==4.26.0",
    "jsonschema-specifications==2025.9.1",
    "referencing==0.37.0",
    "rpds-py==2026.9.1",
    "python-multipart==0.0.34",  # this and the next two are for SGLang's HTTP server
    "soundfile==0.14.0",
    "cffi==2.1.1",
)
SOURCES = ("antlr4-python3-runtime==4.9.3",)  # published without a wheel

# Prefixes of the names of files in wheels.
OMITTED = (
    "ray/cpp/",
    "ray/dashboard/client/",
    "ray/core/libjemalloc.so",
    "ray/include/",
    "ray/jars/",
    "ray/rllib/",
    "ray/serve/",
    "recipe/",  # packages' own tests and tools, under names that others use
    "scripts/",
    "tests/",
    "tutorial/",
)

# flashinfer modules that SGLang's image modules import, in addition to the fake flashinfer in
# SGLang's packages. Nothing calls their functions.
FAKES = {
    "flashinfer/prefill.py": "cudnn_batch_prefill_with_kv_cache",
    "flashinfer/autotuner.py": "autotune",
}
FAKE = """\
def {name}(*args, **kwargs):
    raise RuntimeError("flashinfer is not installed; choose another attention backend")
"""
PLATFORMS = (
    *(f"manylinux_2_{minor}_x86_64" for minor in (5, 12, 17, 24, 26, 27, 28, 31, 34, 35)),
    "manylinux2014_x86_64",
    "manylinux2010_x86_64",
    "manylinux1_x86_64",
)
ELF = b"\x7fELF"


def fetch(folder: Path) -> None:
    """Download the published wheels into a folder, and build the other wheels."""
    pip = (sys.executable, "-m", "pip")
    platforms = [word for name in PLATFORMS for word in ("--platform", name)]
    target = ("--python-version", "3.12", "--implementation", "cp", *platforms)
    command = (*pip, "download", "--quiet", "--no-deps", "--only-binary=:all:", *target)
    subprocess.run((*command, "--dest", str(folder), *PACKAGES), check=True)
    command = (*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder))
    subprocess.run((*command, *SOURCES), check=True)


def unpack(wheel: Path, folder: Path) -> None:
    """Unpack a wheel without the omitted files, and strip its programs and libraries."""
    with zipfile.ZipFile(wheel) as archive:
        for item in archive.infolist():
            if item.is_dir() or item.filename.startswith(OMITTED):
                continue
            path = Path(archive.extract(item, folder))
            # Ray starts programs that need the permissions stored in the wheel.
            path.chmod((item.external_attr >> 16) & 0o777 | 0o644)
            with path.open("rb") as file:
                is_native = file.read(len(ELF)) == ELF
            if is_native:
                subprocess.run(("strip", "--strip-unneeded", str(path)), check=True)


def write_fakes(folder: Path) -> None:
    """Write the fake modules of flashinfer."""
    for place, name in FAKES.items():
        path = folder / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(name=name))


def pack(folder: Path, archive: Path) -> None:
    """Write the folder's contents to a compressed archive, with xz's filter for x86 code."""
    compress = "xz --format=xz --threads=2 --x86 --lzma2=preset=9e"
    names = sorted(path.name for path in folder.iterdir())
    command = ("tar", "--create", f"--use-compress-program={compress}", f"--file={archive}")
    subprocess.run((*command, "--directory", str(folder), *names), check=True)


def main() -> None:
    """Write the archive."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("archive", type=Path)
    archive = parser.parse_args().archive.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        wheels, site = Path(temporary, "wheels"), Path(temporary, "site")
        fetch(wheels)
        for wheel in sorted(wheels.glob("*.whl")):
            unpack(wheel, site)
        write_fakes(site)
        pack(site, archive)
    print(f"{archive}: {archive.stat().st_size / 2**20:.1f} MiB", file=sys.stderr)


if __name__ == "__main__":
    main()
