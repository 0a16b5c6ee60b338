"""Code shared by child processes of tests for fork and exit."""

from __future__ import annotations

import textwrap

PRELUDE = """
import os, sys
import memsaver
from refusals import raises
from simulated_driver import Block, Simulator
from memsaver import simulator
from memsaver._runtime.native import _C

sim = Simulator()

def in_fork(function):
    child = os.fork()
    if child == 0:
        status = 1
        try:
            function()
            status = 0
        except BaseException:
            import traceback
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(status)
    assert os.waitpid(child, 0)[1] == 0

def use(name="used", **region):
    with memsaver.region(name, backup="host", **region):
        block = Block(sim, 3 << 20, 1)
    with memsaver.paused(name):
        assert not sim.accessible(block.address)
    assert block.is_intact()
    return block

def enter(name):
    with memsaver.region(name):
        pass
"""


def code(body: str) -> str:
    """Return a child's code: the shared code, followed by `body`."""
    return PRELUDE + textwrap.dedent(body)
