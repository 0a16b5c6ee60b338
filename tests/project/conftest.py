"""Fixtures for the tests of benchmarks."""

import os
import subprocess

import pytest

SMI = """#!/bin/sh
case "$*" in *"-i 1 "*) echo 1200;; *memory.used*) echo 1000;; *) echo "Some GPU, 1.2.3";; esac
"""


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Put a fake nvidia-smi on PATH, which reports 1,000 MiB in use on GPU 0 and 1,200 MiB on
    GPU 1.
    """
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "nvidia-smi").write_text(SMI)
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")


@pytest.fixture
def warm_children(monkeypatch):
    """Make this process start scripts as forks of a process that has already imported torch."""
    import warm_processes  # imports the package

    monkeypatch.setattr(subprocess, "Popen", warm_processes.WarmPopen)
