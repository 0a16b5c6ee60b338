"""Runs decoder_scenario.py on a real GPU in every mode, each in a separate process."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest
from repository import GPU_SUPPORT
from torch_environment import torch_environment

import memsaver

SCENARIO = GPU_SUPPORT / "decoder_scenario.py"
SECONDS = 100

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="needs transformers"
    ),
]

MODES = ["torch", "preload"]
SEGMENTS = ["fixed", "expandable"]


def environment(mode: str, segments: str, tag: str | None = None) -> dict[str, str]:
    """Return the environment of a child process."""
    env = torch_environment(expandable=segments == "expandable")
    env["HF_HUB_OFFLINE"] = "1"
    if mode == "preload":
        env.update(memsaver.preload_env(tag, "host" if tag else None, env=env))
    return env


def run_scenario(mode: str, segments: str, *arguments: str, tag: str | None = None) -> None:
    # With a tag for the process, preload_env disables expandable segments.
    expandable = segments == "expandable" and tag is None
    command = [sys.executable, str(SCENARIO), *arguments]
    command += ["--expandable", "yes" if expandable else "no"]
    command += ["--preloaded", "yes" if mode == "preload" else "no"]
    try:
        child = subprocess.run(
            command,
            env=environment(mode, segments, tag),
            capture_output=True,
            text=True,
            timeout=SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"no end after {SECONDS} s\n{error.stdout!r}\n{error.stderr!r}")
    print(child.stdout[-4000:])
    assert child.returncode == 0, f"status {child.returncode}\n{child.stderr[-6000:]}"
    assert "MemsaverWarning" not in child.stderr, child.stderr[-6000:]


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_decoder_on_one_device(mode: str, segments: str) -> None:
    run_scenario(mode, segments)


@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_the_scenario_on_several_threads(mode: str, segments: str) -> None:
    run_scenario(mode, segments, "--threads", "3")


def test_kv_cache_without_a_backup_is_refilled() -> None:
    run_scenario("torch", "fixed", "--kv-backup", "none")


@pytest.mark.parametrize("segments", SEGMENTS)
def test_whole_process_in_one_tag(segments: str) -> None:
    run_scenario("preload", segments, "--whole-process", "--cycles", "2", tag="everything")


@pytest.mark.two_gpus
@pytest.mark.parametrize("segments", SEGMENTS)
@pytest.mark.parametrize("mode", MODES)
def test_two_devices_in_one_process(mode: str, segments: str) -> None:
    run_scenario(mode, segments, "--devices", "0,1")


@pytest.mark.two_gpus
def test_the_scenario_on_two_devices() -> None:
    run_scenario("torch", "fixed", "--devices", "0,1", "--threads", "2")
