"""Compiles the tests' C and C++ sources into build/tests and recompiles them if they change.

Compiles into a folder for temporary files if the repository's path contains a space or a colon,
because LD_PRELOAD cannot contain such a path.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path

from repository import ROOT

CC = (sysconfig.get_config_var("CC") or "cc").split()
BUILT = ROOT / "build" / "tests"
if any(separator in str(BUILT) for separator in " :"):
    BUILT = Path(tempfile.gettempdir()) / f"memsaver-tests-{os.getuid()}"
LIBRARY = ("-O1", "-Wall", "-fPIC", "-shared")


def built(
    name: str,
    sources: Sequence[Path],
    flags: Sequence[str] = LIBRARY,
    *,
    compiler: Sequence[str] = CC,
    libraries: Sequence[str] = (),
    headers: Sequence[Path] = (),
) -> Path:
    """Compile and link the sources; return the path of the output file `name`.

    The file is reused by other tests, processes and test runs that have the same command and the
    same contents of `sources` and `headers`. Raises AssertionError if the compiler fails or warns.
    """
    command = [*compiler, *flags, *map(str, sources)]
    digest = hashlib.sha256(repr((command, libraries)).encode())
    for path in (*sources, *headers):
        digest.update(path.read_bytes())
    folder = BUILT / digest.hexdigest()[:16]
    folder.mkdir(parents=True, exist_ok=True)
    output = folder / name
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling it
        if not output.is_file():
            part = folder / f"{name}.part"
            done = subprocess.run(
                [*command, "-o", str(part), *libraries], capture_output=True, text=True
            )
            assert done.returncode == 0 and not done.stderr, done.stderr
            part.rename(output)
    return output


def sources_of_the_core() -> list[Path]:
    """Return the files of csrc that test sources can include or link with."""
    return sorted(path for path in (ROOT / "csrc").rglob("*") if path.suffix in {".h", ".cpp"})
