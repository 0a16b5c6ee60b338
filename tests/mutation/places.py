"""A place: a built copy of the tree at a commit, with an environment that imports only this
copy.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from repository import ROOT, TESTS

from mutation import recorder

SECONDS_TO_BUILD = 1800


@dataclass(frozen=True)
class Ended:
    """A finished process; `status` is None if the process was killed at the time limit."""

    status: int | None
    output: str
    cpu_seconds: float


class Place:
    """A tree and its environment in one folder. Only one thread at a time can use a place."""

    def __init__(self, folder: Path, nice: int = 0) -> None:
        self.folder = folder
        self.tree = folder / "tree"
        self.python = folder / "venv" / "bin" / "python"
        self.nice = nice
        self._running: int | None = None

    @classmethod
    def create(cls, folder: Path, ref: str, nice: int = 0) -> Place:
        """Unpack a commit of this repository or a tar file, and build it. Raises RuntimeError."""
        place = cls(folder, nice)
        place.tree.mkdir(parents=True)
        archive = Path(ref)
        if not archive.is_file():
            archive = folder / "tree.tar"
            subprocess.run(["git", "archive", "-o", archive, ref], cwd=ROOT, check=True)
        subprocess.run(["tar", "-xf", archive, "-C", place.tree], check=True)
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
        (site,) = (folder / "venv" / "lib").glob("python*/site-packages")
        shutil.copy(recorder.__file__, site / "mutation_recorder.py")
        # The packages of this process, except those in the tests' folder.
        packages = [p for p in sys.path if "site-packages" in p or "dist-packages" in p]
        packages += [p for p in os.environ.get("PYTHONPATH", "").split(":") if p]
        kept = [p for p in dict.fromkeys(packages) if not Path(p).resolve().is_relative_to(TESTS)]
        lines = "\n".join([*kept, "import mutation_recorder"])
        (site / "packages.pth").write_text(f"{lines}\n")
        if (place.tree / "setup.py").is_file():
            pip = [str(place.python), "-m", "pip", "install", "--quiet", "--no-deps"]
            ended = place.run([*pip, "--no-build-isolation", "-e", "."], SECONDS_TO_BUILD)
            if ended.status != 0:
                raise RuntimeError(f"{ref} could not be built: {ended.output[-2000:]}")
        return place

    def copy(self, folder: Path) -> Place:
        """Copy the place without intermediate build files, because these contain the name of the
        place's folder."""
        ignored = shutil.ignore_patterns("build", "t", "__pycache__", ".pytest_cache")
        shutil.copytree(self.folder, folder, symlinks=True, ignore=ignored)
        for path in (folder / "venv").rglob("*"):
            if path.is_file() and not path.is_symlink() and path.stat().st_size < 1 << 20:
                data = path.read_bytes()
                path.write_bytes(data.replace(bytes(self.folder), bytes(folder)))
        return Place(folder, self.nice)

    def write(self, file: str, text: str) -> None:
        """Replace a source file and delete the compiled files that Python could use instead."""
        path = self.tree / file
        path.write_text(text)
        for compiled in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
            compiled.unlink()

    def build(self) -> Ended:
        """Build everything that has changed."""
        command = [str(self.python), "setup.py", "--quiet", "build_ext", "--inplace", "-j2"]
        return self.run(command, SECONDS_TO_BUILD)

    def built_core(self) -> bytes:
        """Return the bytes of the built core."""
        return (self.tree / "memsaver" / "libmemsaver.so").read_bytes()

    def run(self, command: list[str], seconds: float, **variables: str) -> Ended:
        """Run a command in the tree; kill the command and its children after at most `seconds`
        seconds.
        """
        temporary = self.folder / "t"  # short: tests create sockets below it
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        # Optimised code takes longer to compile, and mutants break it in the same way.
        environment.setdefault("MEMSAVER_CXXFLAGS", "-O0 -w")
        environment.update(variables, TMPDIR=str(temporary), OMP_NUM_THREADS="1")
        output = temporary / "output"
        nice = ["nice", "-n", str(self.nice)] if self.nice else []
        with output.open("wb") as file:
            process = subprocess.Popen(
                [*nice, *command],
                cwd=self.tree,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._running = process.pid
        deadline = time.monotonic() + seconds
        late = False
        while True:
            # Not Popen.wait(), which does not report CPU time.
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            if time.monotonic() > deadline:
                late = True
                _kill_group(process.pid)
                _, status, usage = os.wait4(process.pid, 0)
                break
            time.sleep(0.02)
        self._running = None
        process.returncode = os.waitstatus_to_exitcode(status)
        _kill_group(process.pid)  # children that outlive the command
        text = output.read_text(errors="replace") if output.is_file() else ""
        spent = usage.ru_utime + usage.ru_stime
        return Ended(None if late else process.returncode, text, spent)

    def stop(self) -> None:
        """Kill the command that another thread runs in this place."""
        running = self._running
        if running is not None:
            _kill_group(running)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass
