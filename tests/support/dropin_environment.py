"""Builds the wheel of integrations/torch_memory_saver and runs code with the wheel installed."""

import fcntl
import os
import shutil
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path

from child_process import environment_without, reads_at_start, run_code
from repository import IMPORT_PATH, ROOT, TESTS


def wheel_in(folder: Path) -> Path:
    """Return the distribution's wheel in a folder; the first process to call this builds it."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        return next(folder.glob("*.whl"), None) or _build_wheel(folder)


def _build_wheel(folder: Path) -> Path:
    """Build the distribution's wheel in a folder with pip."""
    leftovers = shutil.ignore_patterns("build", "*.egg-info", "*.so", "__pycache__")
    source = ROOT / "integrations" / "torch_memory_saver"
    shutil.copytree(source, folder / "source", ignore=leftovers)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-build-isolation", "--no-deps"]
    subprocess.run(
        [*command, "--disable-pip-version-check", "-w", str(folder), str(folder / "source")],
        check=True,
        timeout=110,
    )
    (built,) = folder.glob("*.whl")
    return built


def make_site(wheel: Path, folder: Path) -> Path:
    """Turn a folder into a site-packages folder with memsaver and the wheel's contents."""
    from memsaver._runtime.native import LIBRARY_DIR

    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    (folder / "memsaver").symlink_to(LIBRARY_DIR)
    return folder


def run_with(
    packages: object,
    code: str,
    folder: Path,
    status: int,
    with_torch: bool = False,
    timeout: float = 60,
    fresh: bool = False,
    **env: str,
) -> subprocess.CompletedProcess[str]:
    """Run Python code after the usual import on the simulated driver and check the exit status."""
    environment = environment_without("MEMSAVER_", "TMS_")
    environment.pop("LD_PRELOAD", None)
    paths = [str(packages), str(TESTS / "fixtures" / "preload"), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [*paths, IMPORT_PATH]))
    environment["MEMSAVER_DRIVER"] = "sim"
    environment.update(env)
    return run_code(
        PREAMBLE + textwrap.dedent(code),
        environment,
        folder,
        status=status,
        timeout=timeout,
        with_torch=with_torch,
        fresh=fresh or reads_at_start(env),
    )


PREAMBLE = """
import ctypes, os, subprocess, sys
import memsaver
from memsaver import simulator
from refusals import raises
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver

MIB = 1 << 20

def block(byte, nbytes=3 * MIB):
    made = simulator.buffer(nbytes)
    ctypes.memset(made.address, byte, nbytes)
    return made

def reads(made, byte):
    return bytes(made.array) == bytes([byte]) * made.nbytes

def enter(context):
    with context:
        pass

def used():
    free, total = memsaver.device_memory(0)
    return total - free
"""
