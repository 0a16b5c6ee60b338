"""Builds the fuzzing programs from libFuzzer, a target, and the core with coverage.

atheris's wheels contain libFuzzer as a library for programs without Python. g++ reports coverage to
libFuzzer through tests/native/fuzz/coverage.cpp.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
from importlib import metadata
from pathlib import Path

from repository import ROOT, TESTS
from sanitizers.builds import version

from build_support.artefacts import ARTEFACTS
from build_support.native import build, compiler, include_folders
from build_support.variants import ASAN, FUZZ

SOURCES = TESTS / "native" / "fuzz"
LIBFUZZER = "libclang_rt.fuzzer_no_main.a"
# Additional sources for a target that includes sources of the core.
MORE_SOURCES = {
    "options": [
        SOURCES / "coverage.cpp",
        ROOT / "csrc" / "core" / "platform" / "text.cpp",
        ROOT / "csrc" / "sim" / "faults.cpp",
    ]
}
LIBRARIES = {"abi": ["libmemsaver.so", "libmemsaver_sim.so"], "options": []}
TARGETS = tuple(LIBRARIES)


def libfuzzer() -> Path:
    """Return the path of libFuzzer's library in the installed atheris."""
    try:
        files = metadata.files("atheris") or []
    except metadata.PackageNotFoundError:
        raise SystemExit("libFuzzer is not installed: `pip install atheris`") from None
    for file in files:
        if file.name == LIBFUZZER:
            return Path(str(file.locate()))
    raise SystemExit(f"atheris has no {LIBFUZZER} on this platform; its wheels for x86-64 do")


def core() -> Path:
    """Build the simulator and the core with coverage; return their folder."""
    names = {"libmemsaver", "libmemsaver_sim"}
    wanted = {artefact.name: artefact for artefact in ARTEFACTS if artefact.name in names}
    folder = build(ROOT, [wanted["libmemsaver"]], version(), FUZZ, ["--quiet"])
    plain = build(ROOT, [wanted["libmemsaver_sim"]], version(), ASAN, ["--quiet"])
    shutil.copy(plain / "libmemsaver_sim.so", folder)
    return folder


def program(folder: Path, target: str) -> Path:
    """Build the program of a target."""
    covered = MORE_SOURCES.get(target, [])
    flags = FUZZ.cxxflags if covered else ASAN.cxxflags
    library = folder / f"libfuzz_{target}.so"
    sources = [SOURCES / f"{target}.cpp", *covered]
    _compile([*flags, "-fPIC", "-shared", *map(str, sources), "-o", str(library)])
    made = folder / f"fuzz_{target}"
    libraries = [f"-l:{name}" for name in [library.name, *LIBRARIES[target]]]
    # Instrumented code resolves libFuzzer's symbols in the program.
    links = ["-rdynamic", f"-L{folder}", "-Wl,--no-as-needed", *libraries, str(libfuzzer())]
    ends = ["-Wl,-rpath,$ORIGIN", "-ldl", "-o", str(made)]
    _compile([*ASAN.cxxflags, str(SOURCES / "main.cpp"), *links, *ends])
    return made


def _compile(arguments: list[str]) -> None:
    command = [*shlex.split(compiler()), "-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror"]
    command += [f"-I{ROOT / 'csrc'}", *(f"-isystem{folder}" for folder in include_folders())]
    subprocess.run([*command, *arguments], check=True)
