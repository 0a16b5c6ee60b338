"""Compile the device code: `python build_support/kernels.py`, or `make kernels`.

Run this program only after a change in csrc/kernels/. Its result, fingerprint.fatbin, is in the
repository, and every build embeds this file in libmemsaver.so. The file fingerprint.fatbin.json
contains the hashes of the sources, which a test checks.

The program uses three NVIDIA programs from CUDA_HOME or PATH. If any is missing, the programs are
installed from PyPI into build/cuda:

    nvcc       compiles C++ to PTX, for the lowest architecture that this nvcc supports
    ptxas      compiles PTX to machine code; must be from CUDA 12.8 or 12.9, because drivers of CUDA
               12 before 12.8 cannot read the output of ptxas 13 (ELF ABI 8)
    fatbinary  combines the results in one uncompressed file, because older drivers do not support
               all compressions

Between the first two steps, the program changes the version and the target in the PTX to
PTX_VERSION and PTX_TARGET, because nvcc 13 cannot generate these values. ptxas checks that the PTX
is valid for this version and this target. Therefore, drivers 525 and newer can compile the PTX for
GPUs for which the file contains no machine code.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "csrc" / "kernels"
SOURCES = ["fingerprint.cu", "fingerprint_hash.h"]
FATBIN = "fingerprint.fatbin"
RECORD = "fingerprint.fatbin.json"
ENTRY = "ms_fingerprint"

PTX_VERSION = "8.0"  # of CUDA 12.0, whose driver is 525
PTX_TARGET = 70
# Machine code also runs on later GPUs of the same generation: 80 on 87 and 88, 100 on 103, 120 on
# 121.
MACHINES = [70, 75, 80, 86, 89, 90, 100, 120]

NVCC_OPTIONS = ["-std=c++17", "-O3", "-ptx"]
PTXAS_OPTIONS = ["--opt-level=3", "--warn-on-spills"]
FATBINARY_OPTIONS = ["-64", "--compress=false"]

PYPI_COMPILER = [
    "nvidia-cuda-nvcc==13.5.*",
    "nvidia-nvvm==13.5.*",
    "nvidia-cuda-crt==13.5.*",
    "nvidia-cuda-runtime==13.5.*",
]
PYPI_ASSEMBLER = ["nvidia-cuda-nvcc-cu12==12.9.*"]
ASSEMBLER_VERSIONS = ("12.8", "12.9")


def described() -> dict[str, object]:
    """Return the current inputs of the result: the hashes of the sources and the options."""
    return {
        "sources": {name: _sha256(FOLDER / name) for name in SOURCES},
        "options": {
            "nvcc": NVCC_OPTIONS,
            "ptxas": PTXAS_OPTIONS,
            "fatbinary": FATBINARY_OPTIONS,
            "ptx": [PTX_VERSION, f"sm_{PTX_TARGET}"],
            "machines": [f"sm_{machine}" for machine in MACHINES],
        },
    }


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _run(*command: str | Path, path: Path | None = None) -> str:
    environment = dict(os.environ)
    if path:
        environment["PATH"] = f"{path}{os.pathsep}{environment.get('PATH', '')}"
    try:
        done = subprocess.run(
            [str(word) for word in command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
    except OSError as error:
        raise SystemExit(f"memsaver: {command[0]} cannot be run: {error}") from None
    if done.returncode:
        raise SystemExit(f"memsaver: {' '.join(map(str, command))} failed:\n{done.stdout}")
    return done.stdout


def _version(program: Path) -> str:
    found = re.search(r"V(\d+\.\d+\.\d+)", _run(program, "--version"))
    return found[1] if found else "unknown"


def _toolkit() -> Path | None:
    """Return a CUDA toolkit's folder that contains all three programs, or None."""
    homes = [os.environ.get(name) for name in ("CUDA_HOME", "CUDA_PATH")]
    folders = [Path(home) / "bin" for home in homes if home]
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(Path(nvcc).resolve().parent)
    programs = ("nvcc", "ptxas", "fatbinary")
    return next((f for f in folders if all((f / p).is_file() for p in programs)), None)


def _install(packages: list[str], program: str) -> Path:
    """Install PyPI packages in build/cuda if necessary, and return the folder of `program`."""
    name = re.sub(r"[^\w.]+", "-", packages[0]).strip("-.")
    target = ROOT / "build" / "cuda" / name
    if not list(target.glob(f"nvidia/*/bin/{program}")):
        print(f"installing {', '.join(packages)} into {target}", flush=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        _run(*pip, "--no-deps", "--upgrade", "--target", target, *packages)
    found = list(target.glob(f"nvidia/*/bin/{program}"))
    if not found:
        raise SystemExit(f"memsaver: {packages[0]} has no {program}")
    found[0].chmod(0o755)
    return found[0].parent


def compile_kernels(output: Path) -> dict[str, str]:
    """Write the fatbin, and return the versions of the programs."""
    tools = _toolkit() or _install(PYPI_COMPILER, "nvcc")
    assembler = tools / "ptxas"
    if not _version(assembler).startswith(ASSEMBLER_VERSIONS):
        assembler = _install(PYPI_ASSEMBLER, "ptxas") / "ptxas"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lowest = re.findall(r"compute_(\d+)$", _run(tools / "nvcc", "--list-gpu-arch"), re.M)
        lowest_known = max(min(map(int, lowest)), PTX_TARGET)
        ptx = folder / "fingerprint.ptx"
        arguments = [*NVCC_OPTIONS, f"-arch=compute_{lowest_known}", f"-I{ROOT / 'csrc'}"]
        _run(tools / "nvcc", *arguments, FOLDER / SOURCES[0], "-o", ptx, path=tools)
        text = re.sub(r"^\.version .*$", f".version {PTX_VERSION}", ptx.read_text(), flags=re.M)
        text = re.sub(r"^\.target .*$", f".target sm_{PTX_TARGET}", text, flags=re.M)
        if f".entry {ENTRY}(" not in text:
            raise SystemExit(f"memsaver: the PTX has no {ENTRY}")
        ptx.write_text(text)
        images = []
        for machine in MACHINES:
            cubin = folder / f"fingerprint.sm_{machine}.cubin"
            said = _run(assembler, *PTXAS_OPTIONS, f"--gpu-name=sm_{machine}", ptx, "-o", cubin)
            if said.strip():
                raise SystemExit(f"memsaver: ptxas for sm_{machine} says:\n{said}")
            images.append(f"--image3=kind=elf,sm={machine},file={cubin}")
        images.append(f"--image3=kind=ptx,sm={PTX_TARGET},file={ptx}")
        _run(tools / "fatbinary", *FATBINARY_OPTIONS, *images, f"--create={output}")
    return {
        "nvcc": _version(tools / "nvcc"),
        "ptxas": _version(assembler),
        "fatbinary": _version(tools / "fatbinary"),
    }


def main() -> None:
    """Compile the device code, and record the inputs."""
    output = FOLDER / FATBIN
    before = described()
    programs = compile_kernels(output)
    record = {**before, "programs": programs, "fatbin": _sha256(output)}
    (FOLDER / RECORD).write_text(json.dumps(record, indent=2) + "\n")
    print(f"{output.relative_to(ROOT)}: {output.stat().st_size} bytes, {programs}")


if __name__ == "__main__":
    main()
