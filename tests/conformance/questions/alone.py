"""The questions that each run in a separate process, by the names that are printed."""

from __future__ import annotations

from questions import access, blocks, captures, contexts, host_memory, launches, mappings, streams

ALONE = {
    **mappings.QUESTIONS,
    **access.QUESTIONS,
    **host_memory.QUESTIONS,
    **blocks.QUESTIONS,
    **launches.QUESTIONS,
    **contexts.QUESTIONS,
    **streams.QUESTIONS,
    **captures.QUESTIONS,
}
THE_GPU_TO_THEMSELVES = {"small cuMemAlloc blocks", "small block on a full device"}
