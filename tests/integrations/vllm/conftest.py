"""Fixtures for the tests of vLLM's plugin."""

from __future__ import annotations

import os

import pytest
from repository import IMPORT_PATH, TESTS

FAKE = TESTS / "fixtures" / "vllm_engine"


@pytest.fixture
def run_vllm(run_python):
    """Run lines in a process with the fake vLLM, which finds the plugin through its entry point.

    The engine core runs in the process itself unless VLLM_ENABLE_V1_MULTIPROCESSING=1 is passed.
    """

    def run(lines: str, **env):
        env.setdefault("PYTHONPATH", os.pathsep.join([str(FAKE), IMPORT_PATH]))
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setdefault("VLLM_PLUGINS", None)
        start = (
            "import memsaver, vllm_calls\nfrom vllm_calls import PROMPTS\nfrom vllm import LLM\n"
        )
        body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        return run_python(f"{start}if __name__ == '__main__':\n{body}", **env)

    return run
