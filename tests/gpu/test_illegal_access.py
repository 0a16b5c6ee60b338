"""After an access to paused memory has destroyed the context, `explain` still names the pause."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import memsaver

PROGRAM = """
import os
import torch
import memsaver

with memsaver.region("weights", backup="host"):
    weights = torch.ones(1 << 20, device="cuda")
weights.add_(1)


def sleep():
    memsaver.pause("weights")


sleep()
try:
    weights.add_(1)
    torch.cuda.synchronize()
except RuntimeError as error:
    assert "illegal memory access" in str(error), error
else:
    raise AssertionError("paused memory could be touched")
found = memsaver.explain(weights[7])
print(found.tag, found.state, found.offset, "in sleep" in found.caller, flush=True)
print(found, flush=True)
os._exit(0)
"""


# Ends normally, even after an access to paused memory.
UNDER = """
import os
import torch
import memsaver

with memsaver.region("weights", backup="host"):
    weights = torch.ones(1 << 20, device="cuda")
memsaver.pause("weights")
if {touches}:
    try:
        weights.add_(1)
        torch.cuda.synchronize()
    except RuntimeError:
        pass
else:
    memsaver.resume("weights")
    assert weights.all()
print("through", flush=True)
os._exit(0)
"""


COPY = """
import os
import torch
import memsaver

with memsaver.region("weights", backup="host"):
    weights = torch.ones(1 << 20, device="cuda")
memsaver.pause("weights")
try:
    weights.cpu()
    torch.cuda.synchronize()
except RuntimeError:
    print(memsaver.explain(weights), flush=True)
os._exit(0)
"""


# The same options as for the soak test: see test_soak.py.
SANITIZER = "compute-sanitizer --error-exitcode 9 --report-api-errors no --show-backtrace no"


def run(program: str, *under: str) -> subprocess.CompletedProcess[str]:
    """Run a program, prefixed with the command `under` if given."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("MEMSAVER_")}
    root = str(Path(memsaver.__file__).resolve().parent.parent)
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [root, env.get("PYTHONPATH")]))
    return subprocess.run(
        [*under, sys.executable, "-c", textwrap.dedent(program)],
        env=env,
        capture_output=True,
        text=True,
        timeout=100,
    )


def lines_of(program: str) -> list[str]:
    """Return the lines that a program prints."""
    done = run(program)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.splitlines()


@pytest.mark.gpu
def test_paused_memory_that_was_touched_is_explained() -> None:
    assert lines_of(PROGRAM)[0] == "weights paused 28 True"


@pytest.mark.gpu
def test_a_paused_tensor_that_was_copied_is_explained() -> None:
    """`explain` works after the error that torch raises if safetensors or a checkpoint copies a
    tensor.
    """
    (said,) = lines_of(COPY)
    assert "has been paused" in said and "nothing that saves or sends it" in said


@pytest.mark.gpu
@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="compute-sanitizer is not here")
@pytest.mark.parametrize("touches", [True, False])
def test_the_sanitizer_detects_accesses_to_paused_memory(touches: bool) -> None:
    """compute-sanitizer reports accesses to unmapped memory; the soak test relies on these
    reports.
    """
    done = run(UNDER.format(touches=touches), *SANITIZER.split())
    said = done.stdout + done.stderr
    assert done.returncode == (9 if touches else 0), said[-4000:]
    assert ("Invalid __global__" in said) == touches and "through" in said, said[-4000:]
