"""Fixtures of the tests of benchmarks."""

import os
import subprocess

import pytest

SMI = """#!/bin/sh
case "$*" in *"-i 1 "*) echo 1200;; *memory.used*) echo 1000;; *) echo "Some GPU, 1.2.3";; esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a fake nvidia-smi on PATH: 1,000 MiB of GPU 0 are in use, 1,200 MiB of GPU 1."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def warm_children(monkeypatch):
    """Let this process start scripts from a process that has imported torch."""
    import warm_processes  # imports the package

    monkeypatch.setattr(subprocess, "Popen", warm_processes.WarmPopen)
