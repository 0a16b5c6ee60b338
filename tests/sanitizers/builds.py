"""Builds the sanitized libraries, programs that use these libraries, and a package that contains
them.
"""

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
# The hooks come first, so that they override the runtime as if they were preloaded.
STRESS_LINKS = ["libmemsaver_preload.so", "libmemsaver.so", "libmemsaver_sim.so"]
LIBRARIES = [artefact for artefact in ARTEFACTS if not artefact.python_module]


def version() -> str:
    """Return the project's version, because the hooks work only with a core of the same version."""
    found = re.search(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found
    return found[1]


class Build:
    """The build of one variant: the libraries, the stress program and the package.

    Only a build with `package` contains the Python module that `site` needs.
    """

    def __init__(self, variant: Variant, package: bool) -> None:
        self.variant = variant
        artefacts = ARTEFACTS if package else LIBRARIES
        self.folder = build(ROOT, artefacts, version(), variant, ["--quiet"])

    @property
    def compiler(self) -> str:
        """The compiler command line for programs built with the same sanitizers."""
        flags = [flag for flag in self.variant.cxxflags if flag.startswith(("-fsan", "-fno-san"))]
        return f"{compiler()} {shlex.join(flags)}"

    def stress(self) -> Path:
        """Build the program of tests/native/stress and return its path."""
        program = self.folder / "stress"
        runtime = self.folder / "libstress_runtime.so"
        self._compile(runtime, [STRESS / "runtime.cpp"], ["-fPIC", "-shared"])
        sources = sorted(set(STRESS.glob("*.cpp")) - {STRESS / "runtime.cpp"})
        # Compiling the sources as one file takes about half of the time.
        whole = self.folder / "stress.cpp"
        text = "".join(f'#include "{source}"\n' for source in sources)
        if not whole.exists() or whole.read_text() != text:
            whole.write_text(text)
        libraries = [f"-l:{name}" for name in [*STRESS_LINKS, runtime.name]]
        links = [f"-L{self.folder}", "-Wl,--no-as-needed", *libraries, "-Wl,-rpath,$ORIGIN"]
        self._compile(program, [whole], [], links)
        return program

    def site(self) -> Path:
        """Create a site-packages folder with memsaver and the sanitized libraries; return the
        folder.
        """
        site = self.folder / "site"
        leave = shutil.ignore_patterns("*.so", "__pycache__", "include")
        shutil.copytree(ROOT / "memsaver", site / "memsaver", ignore=leave, dirs_exist_ok=True)
        place(ROOT, ARTEFACTS, self.folder, site / "memsaver")
        return site

    def runtimes(self) -> str:
        """Return the sanitizers' libraries for LD_PRELOAD, for programs that are not sanitized."""
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
            for made in [*sources, *STRESS.iterdir(), *self.folder.glob("libmemsaver*.so")]
        ):
            return
        subprocess.run(command, check=True)
