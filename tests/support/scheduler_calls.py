"""Calls to a fake SGLang scheduler, and checks of its tags."""

from __future__ import annotations

import fake_sglang

import memsaver
from memsaver.integrations.sglang.protocol import answers_of

MIB = 1 << 20


def hold(scheduler, make_blocks, backup="host"):
    """Allocate weights with a backup, graphs with a host backup, and a KV cache without backup."""
    scheduler.model = make_blocks("weights", [4 * MIB], backup=backup)[0]
    scheduler.kv = make_blocks("kv_cache", [8 * MIB], backup="none")[0]
    scheduler.graph = make_blocks("cuda_graph", [2 * MIB], backup="host")[0]


def let_go(scheduler):
    """Check that the scheduler is alive and can resume its memory, then free the memory."""
    assert scheduler.death is None
    assert ask(scheduler, "resume").failure is None
    del scheduler.model, scheduler.kv, scheduler.graph


def ask(scheduler, operation, tags=None, rid=None):
    """Send one message and return the answer that the tokenizer manager receives."""
    kind = {
        "release": fake_sglang.ReleaseMemoryOccupationReqInput,
        "resume": fake_sglang.ResumeMemoryOccupationReqInput,
    }[operation]
    output = scheduler.handle(f"{operation}_memory_occupation", kind(tags=tags, rid=rid))
    assert scheduler.death is None, repr(scheduler.death)
    (answer,) = answers_of([output])
    return answer


def states():
    return {tag: memsaver.state(tag) for tag in fake_sglang.TAGS}
