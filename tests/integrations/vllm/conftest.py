"""Fixtures for the tests of vLLM's plugin."""

from __future__ import annotations

import os

import pytest
from repository import IMPORT_PATH, TESTS

FAKE = TESTS / "fixtures" / "vllm_engine"


@pytest.fixture
def run_vllm(run_python):
    """Run lines in a process with a fake vLLM, which finds the plugin through its entry point.

    The engine core runs in this process unless VLLM_ENABLE_V1_MULTIPROCESSING=1 is passed. The
    process has already imported torch and memsaver unless `fresh=True` is passed, which takes
    seconds longer.
    """

    def run(lines: str, *, fresh=False, **env):
        env.setdefault("PYTHONPATH", os.pathsep.join([str(FAKE), IMPORT_PATH]))
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        env.setdefault("VLLM_PLUGINS", None)
        start = (
            "import memsaver, vllm_calls\nfrom refusals import raising, refused\n"
            "from vllm_calls import PROMPTS\nfrom vllm import LLM\n"
        )
        body = "".join(f"    {line}\n" for line in lines.strip().splitlines())
        code = f"{start}if __name__ == '__main__':\n{body}"
        return run_python(code, with_memsaver=not fresh, fresh=fresh, **env)

    return run


@pytest.fixture
def asleep(run_vllm):
    """Run the body of a coroutine with a running `AsyncLLM`, in a separate process.

    The policy for requests to a sleeping engine is `when`, with a limit of `wait` seconds. An idle
    engine sleeps after `after` seconds.
    """

    def run(body, engine="engine_of()", when="refuse", wait=20, after=0, **env):
        lines = "".join(f"        {line}\n" for line in body.strip().splitlines())
        return run_vllm(
            "import asyncio, json, time, vllm_calls\n"
            "from vllm_requests import *\n"
            "from memsaver.errors import *\n"
            "from memsaver.integrations.engine.errors import *\n"
            "from memsaver.integrations.vllm.admissions import admission_of\n"
            f"async def test():\n    async with {engine} as engine:\n{lines}run(test())",
            timeout=120,
            MEMSAVER_VLLM_ASLEEP=when,
            MEMSAVER_VLLM_ASLEEP_WAIT=wait,
            MEMSAVER_VLLM_SLEEP_AFTER=after,
            **env,
        )

    return run
