"""`MemsaverAllocator`, which replaces vLLM's sleep mode allocator `CuMemAllocator`."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import memsaver
from memsaver._memory.torch_mode import torch_pools
from memsaver._runtime.native import _C, Backup
from memsaver._transitions.parts import names_of

from ..engine import moves
from ..engine.held import release_cache
from ..engine.tags import GRAPH, KV_CACHE, WEIGHTS
from . import settings, steps

__all__ = ["DEFERRABLE", "RUNTIME", "MemsaverAllocator"]

RUNTIME = "runtime"  # state of KV caches since vLLM 0.32, and LoRA's stacks

_DISCARDED = (KV_CACHE, "workspace")  # the tags whose regions request no backup
DEFERRABLE = (WEIGHTS, KV_CACHE)  # vLLM 0.33's DEFERRABLE_TAGS: any wake-up maps the others
_NAMES = {"cudagraph": GRAPH}  # vLLM's tags that have another name in memsaver


class MemsaverAllocator:
    """An implementation of vLLM's `CuMemAllocator` (versions 0.26 and 0.33) with memsaver.

    Each vLLM tag corresponds to a memsaver tag with the same name, except that CUDA graphs have the
    memsaver tag `cuda_graph`. Each process has one allocator, which vLLM's worker uses on one
    thread.

    Inside a `steps.Step`, `sleep`, `discard` and `wake_up` are collective calls that change all
    ranks or none. A failed call leaves the tags unchanged, except that contents without a backup
    can be lost. Raises memsaver's errors.
    """

    default_tag = "default"

    def __init__(self) -> None:
        self._tags: dict[str, None] = {}  # memsaver's tags, in the order of their first use
        self._saved: dict[str, Backup] = {}  # by tag, the backup of its last release
        self.losses = 0  # how many releases discarded the weights
        self._graphs: Any = None  # the pool of CUDA graphs
        self._chosen: frozenset[str] | None = None  # see `only`
        self._rewritten: frozenset[str] = frozenset()  # see `rewriting`

    # --- allocation -------------------------------------------------------------------------------

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Assign tensors created during the block to a tag. Blocks may be nested.

        Raises:
            InvalidStateError: the tag's memory is released.
        """
        name = self._named(self.default_tag if tag is None else tag)
        backup: Backup = "none" if name in _DISCARDED else settings.backup()
        self._tags.setdefault(name)
        self._forget_freed(name)
        with memsaver.region(name, backup=backup):
            yield
        if not _C.region_depth():
            _release_free_memory()

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Yield the id of the CUDA graphs' pool, whose memory a sleep also releases."""
        yield self.graph_pool()

    def graph_pool(self) -> tuple[int, int]:
        """Return the id of the CUDA graphs' pool, which the first call creates."""
        if self._graphs is None:
            self._tags.setdefault(GRAPH)
            with memsaver.disabled():
                self._graphs = memsaver.torch_pool(GRAPH, backup=settings.backup())
        first, second = self._graphs.id
        return int(first), int(second)

    def get_current_usage(self) -> int:
        """Return the number of bytes of all live allocations, both mapped and released."""
        if self._allocated():
            gc.collect()
            _release_free_memory()
        return self._allocated()

    @property
    def pointer_to_data(self) -> dict[int, Any]:
        """A mapping from the address of each live allocation to its `AllocationData`."""
        from vllm.device_allocator import AllocationData

        found = {}
        for tag in self._tags:
            for name in names_of(tag):
                for address, nbytes in memsaver.ranges(name):
                    found[address] = AllocationData((0, nbytes, address, 0), tag)
        return found

    def release_pools(self) -> None:
        """Close the pool of CUDA graphs, and release the memory of deleted tensors. Idempotent."""
        self._graphs = None
        gc.collect()
        _release_free_memory()

    def close(self) -> None:
        """Call `release_pools`."""
        self.release_pools()

    # --- transitions ------------------------------------------------------------------------------

    @property
    def tags(self) -> tuple[str, ...]:
        """The tags that have been used."""
        return tuple(self._tags)

    @property
    def released(self) -> tuple[str, ...]:
        """The tags whose memory is released."""
        return tuple(tag for tag in self._tags if not moves.is_mapped([tag]) and names_of(tag))

    def discards(self, tag: str) -> bool:
        """Return whether the last release of a tag discarded the tag's contents."""
        return self._saved.get(tag) == "none"

    def sleep(self, offload_tags: Sequence[str] | str | None = None) -> None:
        """Release all memory. Keep the contents of `offload_tags`, RUNTIME and CUDA graphs.

        Args:
            offload_tags: vLLM's tags; None means the tag "default".
        """
        kept = (self.default_tag,) if offload_tags is None else offload_tags
        names = {self._named(tag) for tag in ((kept,) if isinstance(kept, str) else kept)}
        names.update((GRAPH, RUNTIME))
        kept_in = settings.backup()
        self._pause({tag: kept_in if tag in names else "none" for tag in self._tags})

    @contextlib.contextmanager
    def only(self, tags: Sequence[str]) -> Iterator[None]:
        """Restrict releases and wake-ups during the block to these tags."""
        self._chosen = frozenset(tags)
        try:
            yield
        finally:
            self._chosen = None

    @contextlib.contextmanager
    def rewriting(self, tags: Sequence[str]) -> Iterator[None]:
        """In wake-ups during the block, do not restore these tags, because they will be rewritten.

        If such a wake-up fails after any rank has mapped the tag, the contents are lost.
        """
        self._rewritten = frozenset(tags)
        try:
            yield
        finally:
            self._rewritten = frozenset()

    @property
    def rewritten(self) -> frozenset[str]:
        """The tags of the innermost `rewriting` block."""
        return self._rewritten

    def discard(self, tags: Sequence[str] | str) -> None:
        """Release the memory of these tags without keeping its contents."""
        names = [self._named(tag) for tag in ((tags,) if isinstance(tags, str) else tags)]
        self._pause({tag: "none" for tag in self._tags if tag in names})

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Map the memory of these tags again, and restore the contents that were kept.

        Args:
            tags: vLLM's tags; None means all. Tags other than the weights and the KV cache are
                always mapped.
        """
        names = None if tags is None else {self._named(tag) for tag in tags}
        chosen = [
            tag
            for tag in self._tags
            if names is None or tag in names or tag not in DEFERRABLE
            if self._chosen is None or tag in self._chosen
        ]
        before = self.released
        if before:
            _release_free_memory()  # so that memory freed since the release is not mapped again
        rewritten = self._rewritten
        steps.move(
            lambda group: moves.resume(group, chosen, rewritten),
            undo=lambda group: self._pause_again(
                group, [tag for tag in chosen if tag in before], rewritten
            ),
        )

    def _pause(self, backups: Mapping[str, Backup]) -> None:
        if self._chosen is not None:
            backups = {tag: backup for tag, backup in backups.items() if tag in self._chosen}
        before = self.released
        going = [tag for tag in backups if tag not in before]
        self._saved.update((tag, backups[tag]) for tag in going)
        steps.move(
            lambda group: moves.pause(group, list(backups), backups),
            undo=lambda group: moves.resume(group, going),
        )
        if WEIGHTS in going and backups[WEIGHTS] == "none":
            self.losses += 1
        _release_free_memory()
        release_cache()

    def _pause_again(self, group: Any, tags: Sequence[str], rewritten: Collection[str]) -> Any:
        backups: dict[str, Backup] = {tag: self._saved.get(tag, "host") for tag in tags}
        # Memory that was mapped without its contents must not be backed up.
        backups.update((tag, "none") for tag in tags if tag in rewritten)
        ranks = moves.pause(group, tags, backups)
        for tag in rewritten:
            if any(rank.device_bytes.get(tag, 0) for rank in ranks):
                self._saved[tag] = "none"
                self.losses += tag == WEIGHTS
        return ranks

    # --- names ------------------------------------------------------------------------------------

    def _named(self, tag: str) -> str:
        return _NAMES.get(tag, tag)

    def _allocated(self) -> int:
        names = {name for tag in self._tags for name in names_of(tag)}
        return sum(int(row["allocated_bytes"]) for row in _C.stats() if row["tag"] in names)

    def _forget_freed(self, name: str) -> None:
        """Map a tag that a deleted engine left released, if all of the tag's memory was freed."""
        for part in names_of(name):
            if memsaver.state(part) == "paused" and not memsaver.ranges(part):
                memsaver.resume(part)


def _release_free_memory() -> None:
    """Release the cached memory of deleted tensors; vLLM's own allocator has no such cache."""
    pools = torch_pools(required=False)
    if pools is not None:
        pools.release_closed_pools()
