"""Build the native artifacts with ninja, for setuptools' build_ext command.

Environment:
    CXX                    the compiler; the default is g++ or, if g++ is missing, c++
    MEMSAVER_CXXFLAGS      additional flags for every compilation
    MEMSAVER_LDFLAGS       additional flags for every link
    MEMSAVER_WERROR=1      treat warnings as errors
    MEMSAVER_BY_FOLDER=1   compile the sources of each folder together (see `Variant.by_folder`)
    MEMSAVER_CUDA_INCLUDE  the folder with cuda.h, or `pip` for the folder of nvidia-cuda-runtime;
                           also searched for the headers of NVTX, before nvidia-nvtx
"""

from __future__ import annotations

import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

from setuptools import Extension
from setuptools.command.build_ext import build_ext

PACKAGE = "memsaver"
PUBLIC_HEADERS = (
    "memsaver.h",
    "memsaver_transitions.h",
    "memsaver_inspection.h",
    "memsaver_sharing.h",
)

CXXFLAGS = [
    "-std=c++17",
    "-O2",
    "-g1",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-fvisibility-inlines-hidden",
    "-fno-plt",
    "-fstack-protector-strong",
    "-U_FORTIFY_SOURCE",
    "-D_FORTIFY_SOURCE=2",
    "-Wall",
    "-Wextra",
]
LDFLAGS = [
    "-shared",
    "-pthread",
    "-Wl,-z,relro",
    "-Wl,-z,now",
    "-Wl,-z,noexecstack",
    "-Wl,--enable-new-dtags",
]
# A preloaded library must depend only on libc, and must report missing symbols at link time.
# Unused parts of the static libstdc++ are dropped, because its random_device needs a new C library.
STANDALONE_LDFLAGS = ["-static-libstdc++", "-static-libgcc", "-Wl,-z,defs", "-Wl,--gc-sections"]


@dataclass(frozen=True)
class Artefact:
    """A shared object in memsaver/.

    `sources` are globs and `exports` is a version script, both relative to the repository root.
    `links` names other artifacts, which are loaded from the same folder at run time. A Python
    module shares the process's C++ runtime, because pybind11 throws exceptions. Other artifacts
    link their own C++ runtime. `embeds` maps each source to the file that the source embeds. The
    macro MEMSAVER_EMBEDDED contains the path of this file.
    """

    name: str
    sources: list[str]
    exports: str
    links: list[str] = field(default_factory=list)
    python_module: bool = False
    embeds: dict[str, str] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Return the name of the artifact's file in the package."""
        suffix = sysconfig.get_config_var("EXT_SUFFIX") if self.python_module else ".so"
        return self.name + suffix

    def source_files(self, root: Path) -> list[str]:
        """Return the paths of the existing sources, relative to the root."""
        files = [path for glob in self.sources for path in sorted(root.glob(glob))]
        if not files:
            raise SystemExit(f"memsaver: no sources for {self.name}: {', '.join(self.sources)}")
        return [path.relative_to(root).as_posix() for path in files]

    def extension(self, root: Path) -> Extension:
        """Return the artifact as a setuptools extension, for the installation and the sdist."""
        return Extension(f"{PACKAGE}.{self.name}", self.source_files(root), language="c++")


@dataclass(frozen=True)
class Variant:
    """A configuration of the build, with a separate build folder.

    `cxxflags` and `ldflags` are added after all other flags. With `shared_runtime`, all artifacts
    use the process's C++ runtime, because a sanitizer must observe this runtime. With `by_folder`,
    the sources of a folder are compiled together. `by_folder` reduces the time of a full build to
    a third, but each change recompiles an entire folder. `sources` maps the name of an artifact to
    additional sources.
    """

    name: str
    cxxflags: list[str] = field(default_factory=list)
    ldflags: list[str] = field(default_factory=list)
    shared_runtime: bool = False
    by_folder: bool = False
    sources: dict[str, list[str]] = field(default_factory=dict)

    def build_dir(self, root: Path) -> Path:
        """Return the folder of objects and artifacts.

        The folder is outside setuptools' own folders, because an editable install deletes those
        folders. Therefore, every build is incremental.
        """
        return root / "build" / f"{self.name}-{sys.implementation.cache_tag}"


ORDINARY = Variant("native", by_folder=os.environ.get("MEMSAVER_BY_FOLDER") == "1")


@dataclass(frozen=True)
class Compilation:
    """One invocation of the compiler. The paths of sources are relative to the repository root.

    Several sources are compiled through a generated file `name` that includes them.
    """

    artefact: Artefact
    name: str
    sources: list[str]

    @property
    def object(self) -> str:
        """Return the path of the object file, relative to the build folder."""
        return f"{self.artefact.name}/{self.name}.o"

    def embedded(self) -> list[str]:
        """Return the paths of the files that the sources embed, relative to the root."""
        return [self.artefact.embeds[s] for s in self.sources if s in self.artefact.embeds]

    def source(self, root: Path, build_dir: Path) -> Path:
        """Return the file to compile, and write it if it is generated and has changed."""
        if len(self.sources) == 1:
            return root / self.sources[0]
        generated = build_dir / self.artefact.name / self.name
        text = "".join(f'#include "{root / source}"\n' for source in self.sources)
        if not generated.is_file() or generated.read_text() != text:
            generated.parent.mkdir(parents=True, exist_ok=True)
            generated.write_text(text)
        return generated


def compilations(root: Path, artefact: Artefact, variant: Variant) -> list[Compilation]:
    """Return the compilations of an artifact's sources, one for each source or for each folder."""
    sources = artefact.source_files(root) + variant.sources.get(artefact.name, [])
    if not variant.by_folder:
        return [Compilation(artefact, source, [source]) for source in sources]
    folders: dict[str, list[str]] = {}
    for source in sources:
        folders.setdefault(str(Path(source).parent), []).append(source)
    return [Compilation(artefact, f"{name}/all.cpp", each) for name, each in folders.items()]


@dataclass(frozen=True)
class Header:
    """A header from NVIDIA that is part of a CUDA toolkit or of one of the pip packages."""

    path: str  # as in the #include
    packages: tuple[str, ...]

    def folders_of_packages(self) -> list[Path]:
        """Return the include folders of the installed packages."""
        depth = len(Path(self.path).parts)
        folders = []
        for package in self.packages:
            try:
                files = metadata.files(package) or []
            except metadata.PackageNotFoundError:
                continue
            named = [file for file in files if file.parts[-depth:] == Path(self.path).parts]
            folders += [Path(file.locate()).parents[depth - 1] for file in named]
        return folders


CUDA = Header("cuda.h", ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu12"))
NVTX = Header("nvtx3/nvToolsExt.h", ("nvidia-nvtx", "nvidia-nvtx-cu12"))


def include_folders() -> list[Path]:
    """Return the folders of cuda.h and NVTX in a toolkit or, without one, in the pip packages.

    A toolkit may lack NVTX, so the two folders can belong to different installations.
    """
    asked = os.environ.get("MEMSAVER_CUDA_INCLUDE", "")
    named = asked not in ("", "pip")
    toolkits = [Path(asked)] if named else [home / "include" for home in _toolkits()]
    if asked == "pip":
        toolkits = []
    cuda = _folder_with(CUDA, toolkits + ([] if named else CUDA.folders_of_packages()))
    nvtx = _folder_with(NVTX, toolkits + NVTX.folders_of_packages())
    return list(dict.fromkeys([cuda, nvtx]))


def _folder_with(header: Header, candidates: list[Path]) -> Path:
    for folder in candidates:
        if (folder / header.path).is_file():
            return folder
    looked = ", ".join(map(str, candidates)) or "no candidates"
    raise SystemExit(
        f"memsaver: no {header.path} (looked in: {looked}). Install a CUDA toolkit and set "
        f"CUDA_HOME, or `pip install '{header.packages[0]}>=13'`, or set MEMSAVER_CUDA_INCLUDE to "
        "its folder."
    )


def _toolkits() -> list[Path]:
    homes = [Path(os.environ[name]) for name in ("CUDA_HOME", "CUDA_PATH") if os.environ.get(name)]
    nvcc = shutil.which("nvcc")
    if nvcc:
        homes.append(Path(nvcc).resolve().parent.parent)
    return [*homes, Path("/usr/local/cuda")]


def ninja_program() -> str:
    """Return the ninja program of the pip package or, without this package, the program on PATH."""
    try:
        import ninja

        program = Path(ninja.BIN_DIR) / "ninja"
        if program.is_file():
            return str(program)
    except ImportError:
        pass
    found = shutil.which("ninja")
    if not found:
        raise SystemExit("memsaver: ninja not found; `pip install ninja`")
    return found


def compiler() -> str:
    """Return the command line of the C++ compiler, which may begin with a compiler launcher."""
    found = os.environ.get("CXX") or shutil.which("g++") or shutil.which("c++")
    if not found:
        raise SystemExit("memsaver: no C++ compiler found; install g++ or set CXX")
    return found


def ninja_file(
    root: Path, artefacts: list[Artefact], version: str, variant: Variant = ORDINARY
) -> str:
    """Write the generated sources, and return the text of build.ninja.

    The paths of outputs are relative to the build folder.
    """
    import pybind11

    def from_root(path: str) -> str:
        return _escape(str(root / path))

    flags = [
        *CXXFLAGS,
        *(["-Werror"] if os.environ.get("MEMSAVER_WERROR") == "1" else []),
        f'-DMEMSAVER_VERSION="{version}"',
        f"-ffile-prefix-map={root}=.",
        f"-I{root / 'csrc'}",
        *(word for folder in include_folders() for word in ("-isystem", str(folder))),
    ]
    python_includes = [sysconfig.get_path("include"), pybind11.get_include()]
    python_flags = [word for folder in python_includes for word in ("-isystem", folder)]
    extra_cxxflags = " ".join(
        [os.environ.get("MEMSAVER_CXXFLAGS", ""), shlex.join(variant.cxxflags)]
    )
    extra_ldflags = " ".join([os.environ.get("MEMSAVER_LDFLAGS", ""), shlex.join(variant.ldflags)])

    lines = [
        "ninja_required_version = 1.5",
        f"cxx = {_escape_value(compiler())}",
        f"cxxflags = {_escape_value(shlex.join(flags))}",
        f"ldflags = {_escape_value(shlex.join(LDFLAGS))}",
        "rule compile",
        "  command = $cxx $cxxflags $extra "
        f"{_escape_value(extra_cxxflags)} -MD -MF $out.d -c $in -o $out",
        "  depfile = $out.d",
        "  deps = gcc",
        "  description = compile $in",
        "rule link",
        f"  command = $cxx $ldflags $in $extra {_escape_value(extra_ldflags)} -ldl -o $out",
        "  description = link $out",
    ]
    for artefact in artefacts:
        objects = []
        for compilation in compilations(root, artefact, variant):
            objects.append(_escape(compilation.object))
            source = compilation.source(root, variant.build_dir(root))
            embedded = compilation.embedded()
            needed = "".join(f" | {from_root(file)}" for file in embedded)
            lines.append(f"build {objects[-1]}: compile {_escape(str(source))}{needed}")
            special = python_flags if artefact.python_module else []
            special = [*special, *(f'-DMEMSAVER_EMBEDDED="{root / file}"' for file in embedded)]
            if special:
                lines.append(f"  extra = {_escape_value(shlex.join(special))}")
        linked = [f"{name}.so" for name in artefact.links]
        extra = [
            f"-Wl,-soname,{artefact.file_name}",
            f"-Wl,--version-script={root / artefact.exports}",
            *([] if artefact.python_module or variant.shared_runtime else STANDALONE_LDFLAGS),
            *(["-Wl,-rpath,$ORIGIN", *linked] if linked else []),
            "-Wl,--as-needed",
        ]
        lines += [
            f"build {_escape(artefact.file_name)}: link {' '.join(objects)} | "
            f"{from_root(artefact.exports)} {' '.join(linked)}",
            f"  extra = {_escape_value(shlex.join(extra))}",
        ]
    return "\n".join(lines) + "\n"


def _escape_value(text: str) -> str:
    return text.replace("$", "$$")


def _escape(path: str) -> str:
    return path.replace("$", "$$").replace(":", "$:").replace(" ", "$ ")


def install_file(source: Path, target: Path) -> None:
    """Replace a changed file by a rename, because a process might have mapped the old file."""
    if target.is_file() and target.read_bytes() == source.read_bytes():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=target.parent) as folder:
        new = Path(folder) / target.name
        shutil.copy(source, new)
        new.replace(target)


def build(
    root: Path,
    artefacts: list[Artefact],
    version: str,
    variant: Variant = ORDINARY,
    options: Sequence[str] = (),
) -> Path:
    """Build with these ninja options, and return the folder of the artifacts. Exits on failure."""
    folder = variant.build_dir(root)
    folder.mkdir(parents=True, exist_ok=True)
    command = [ninja_program(), "-C", str(folder), *options]
    with (folder / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # ninja does not exclude concurrent builds
        (folder / "build.ninja").write_text(ninja_file(root, artefacts, version, variant))
        if subprocess.run(command).returncode:
            raise SystemExit("memsaver: the native build failed")
    return folder


def place(root: Path, artefacts: list[Artefact], built: Path, package: Path) -> None:
    """Copy the artifacts and the public headers into a package's folder."""
    for artefact in artefacts:
        install_file(built / artefact.file_name, package / artefact.file_name)
    for header in PUBLIC_HEADERS:
        install_file(root / "csrc" / header, package / "include" / header)


def build_native(root: Path, artefacts: list[Artefact]) -> type[build_ext]:
    """Return a build_ext command for these artifacts."""
    by_name = {f"{PACKAGE}.{artefact.name}": artefact for artefact in artefacts}

    class NativeBuild(build_ext):
        def get_ext_filename(self, fullname: str) -> str:
            return str(Path(PACKAGE, by_name[fullname].file_name))

        def build_extensions(self) -> None:
            jobs = [f"-j{self.parallel}"] if self.parallel else []
            build(root, artefacts, self.distribution.get_version(), options=jobs)
            self._place(Path(self.build_lib, PACKAGE))

        def copy_extensions_to_source(self) -> None:
            self._place(root / PACKAGE)

        def _place(self, package: Path) -> None:
            place(root, artefacts, ORDINARY.build_dir(root), package)

    return NativeBuild
