"""Runs code on the ranks of a mesh whose engines are fake SGLang engines."""

import textwrap

import distributed_ranks

PRELUDE = """
import threading
import pytest
from torch.distributed.device_mesh import init_device_mesh

import fake_sglang
import refusals
from memsaver.errors import *
from memsaver.integrations.rollout import RolloutEngine
from memsaver.integrations.sglang import EngineAsleepError, EngineBusyError, EngineError
from memsaver.integrations.sglang import EngineTimeoutError, Status
from tasks import Task

begin("gloo")
TWO = {"max_new_tokens": 2}
classes = contextlib.ExitStack().enter_context(kept := fake_sglang.modules(pytest.MonkeyPatch()))

def fake_engine():
    manager = classes.Tokenizer([classes.Scheduler(classes.Updater)])
    return manager, fake_sglang.Engine(manager)

def rows(output):
    return [row[:length].tolist() for row, length in zip(output.token_ids, output.lengths)]

def refused(kind, call, *arguments, **named):
    # The error, which must be the same on all ranks.
    error = refusals.refused(MemsaverError, call, *arguments, **named)
    assert type(error) is kind, repr(error)
    same = gathered((str(error), error.failures, error.tag, error.status))
    assert all(other == same[0] for other in same), same
    return error

def fails_on(rank, block):
    # A block that raises on one rank; the others get an error that names it.
    try:
        with block:
            if RANK == rank:
                raise OSError("no update")
    except OSError:
        assert RANK == rank
    except md.RankError as error:
        assert RANK != rank and f"rank {rank} of {SIZE}" in str(error) and "no update" in str(error)
    else:
        raise AssertionError("nothing failed")
"""


def runner(folder):
    """Return a function that runs code in one process per rank: `runner(folder)(size)(code)`."""

    def on(size, statuses=None):
        def run(code):
            text = PRELUDE + textwrap.dedent(code)
            distributed_ranks.run(folder, text, size, statuses, timeout=110)

        return run

    return on
