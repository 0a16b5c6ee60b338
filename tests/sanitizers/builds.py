"""The sanitized libraries, the programs over them, and a package that has them."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from pathlib import Path

from repository import ROOT, TESTS

from build_support.artefacts import ARTEFACTS
from build_support.native import (
    Variant,
    build,
    compiler,
    include_folders,
    place,
)

STRESS = TESTS / "native" / "stress"
# The hooks first: they stand before the runtime, as if they were preloaded.
STRESS_LINKS = ["libmemsaver_preload.so", "libmemsaver.so", "libmemsaver_sim.so"]
LIBRARIES = [artefact for artefact in ARTEFACTS if not artefact.python_module]


def version() -> str:
    """The project's: the hooks serve only a core of their own."""
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


class Build:
    """One variant, built: where its libraries, the stress, and the package are.

    Only a build with `package` contains the Python module, which `site` needs.
    """

    def __init__(self, variant: Variant, package: bool) -> None:
        self.variant = variant
        artefacts = ARTEFACTS if package else LIBRARIES
        self.folder = build(ROOT, artefacts, version(), variant, ["--quiet"])

    @property
    def compiler(self) -> str:
        """The compiler's command line for programs that are to be sanitized alike."""
        flags = [flag for flag in self.variant.cxxflags if flag.startswith(("-fsan", "-fno-san"))]
        return f"{compiler()} {shlex.join(flags)}"

    def stress(self) -> Path:
        """The program of tests/native/stress."""
        program = self.folder / "stress"
        runtime = self.folder / "libstress_runtime.so"
        self._compile(runtime, [STRESS / "runtime.cpp"], ["-fPIC", "-shared"])
        sources = sorted(set(STRESS.glob("*.cpp")) - {STRESS / "runtime.cpp"})
        libraries = [f"-l:{name}" for name in [*STRESS_LINKS, runtime.name]]
        links = [f"-L{self.folder}", "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN"]
        self._compile(program, sources, [], links)
        return program

    def site(self) -> Path:
        """A folder of packages with memsaver and the sanitized libraries in it."""
        site = self.folder / "site"
        leave = shutil.ignore_patterns("*.so", "__pycache__", "include")
        shutil.copytree(ROOT / "memsaver", site / "memsaver", ignore=leave, dirs_exist_ok=True)
        place(ROOT, ARTEFACTS, self.folder, site / "memsaver")
        return site

    def runtimes(self) -> str:
        """The sanitizers' libraries, to be preloaded into a program without them."""
        paths = []
        for name in ("libasan.so", "libubsan.so"):
            command = [*shlex.split(compiler()), f"-print-file-name={name}"]
            found = subprocess.run(command, capture_output=True, text=True, check=True)
            paths.append(os.path.realpath(found.stdout.strip()))
        return ":".join(paths)

    def _compile(
        self, out: Path, sources: list[Path], flags: list[str], links: list[str] | None = None
    ) -> None:
        includes = [f"-isystem{folder}" for folder in include_folders()]
        command = [
            *shlex.split(compiler()),
            *["-std=c++17", "-pthread", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'csrc'}"],
            *[*self.variant.cxxflags, *includes, *flags, *map(str, sources)],
            *[*(links or []), "-ldl", "-o", str(out)],
        ]
        if out.exists() and all(
            out.stat().st_mtime > made.stat().st_mtime
            for made in [*sources, *STRESS.glob("*.h"), *self.folder.glob("libmemsaver*.so")]
        ):
            return
        subprocess.run(command, check=True)
