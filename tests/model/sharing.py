"""The base class of the rules that share memory: importers, messages, and the blocks in use."""

from __future__ import annotations

import hashlib
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from forked_processes import SETTLE_SECONDS, wait_until

import memsaver
from memsaver._memory.sharing import exporter, sending, sent_storages
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError, MemsaverError, TagSharedError
from model.apparatus import DEFAULTS, Apparatus
from model.checks import require
from model.expected import Allocation, Owner, Tag, pages_under
from model.importers import Importers

_IMPATIENT_SECONDS = 0.002  # the wait of a pause that must be refused


@dataclass(eq=False)
class Message:
    """A sent block, with its location and the number of pauses of its tag so far."""

    allocation: Allocation
    place: tuple[Any, ...]
    pauses: int

    @property
    def is_stale(self) -> bool:
        """Return whether the block's memory was freed or might have been replaced by a resume."""
        tag = self.allocation.tag
        return tag.pauses != self.pauses or self.allocation not in tag.allocations


@dataclass(eq=False)
class Import:
    """An importer's use of a block."""

    message: Message
    importer: int
    key: int  # under which the importer keeps it

    @property
    def allocation(self) -> Allocation:
        return self.message.allocation


class Sharing(Apparatus):
    """Shareable tags, the messages that the sequence has sent, and the importers' uses of blocks.

    All work of other processes ends before the next operation begins. The only exception is the
    release of memory that these processes keep mapped for later messages.
    """

    def __init__(self) -> None:
        super().__init__()
        for tag in self.tags:
            tag.shareable = sending.is_shareable(tag.name)
        self.messages: list[Message] = []
        self.imports: list[Import] = []
        self.received = 0

    @property
    def importers(self) -> Importers:
        return self.process.importers

    def refusals(self, going: Iterable[Tag]) -> tuple[type[MemsaverError], ...]:
        """Return the possible errors of a pause of these tags, or () if the tags can be paused."""
        found: list[type[MemsaverError]] = []
        if any(tag.regions for tag in going):
            found.append(InvalidStateError)
        if any(tag.is_imported for tag in going):
            found.append(TagSharedError)
        return tuple(found)

    def refuse(self, going: list[Tag], call: Callable[..., Any], **named: Any) -> bool:
        """If these tags cannot be paused now, request a pause and check that it is refused."""
        kinds = self.refusals(going)
        if not kinds:
            return False
        shared = TagSharedError in kinds
        if shared:
            memsaver.configure(importer_seconds=_IMPATIENT_SECONDS)
        error = self.refused(kinds, call, **named)
        require(type(error) in kinds, f"{error!r} is none of {kinds}")
        if shared:
            memsaver.configure(importer_seconds=DEFAULTS["importer_seconds"])
        if isinstance(error, TagSharedError):
            self._check_importers(error)
        return True

    def _check_importers(self, error: TagSharedError) -> None:
        (tag,) = self.named((error.tag,))
        named = dict(error.importers)
        require(tag.is_imported, f"no process uses {tag.name}: {error}")
        for importer in {each.importer for each in self.imports if each.allocation.tag is tag}:
            used = [each.allocation for each in self.imports if each.importer == importer]
            at_least = pages_under((each.address, each.nbytes) for each in used if each.tag is tag)
            found = named.get(self.importers[importer].pid, 0)
            require(found >= at_least, f"{named} does not have {at_least} bytes of {importer}")

    # --- sending and importing

    def own(self, allocation: Allocation) -> Owner:
        """Return the tensor that owns a block; create the tensor when the block is first sent."""
        if allocation.owner is None:
            allocation.owner = Owner(allocation.address, allocation.nbytes)
            self.importers.owners.append(allocation.owner)
        return allocation.owner

    def reduced(self, owner: Owner) -> tuple[Any, ...]:
        """Send a tensor and return its location, which is all that an importer needs."""

        def otherwise(tensor: Any) -> Any:
            raise AssertionError("a tensor of a region was passed to torch")

        _, arguments = sending.reduce_any(owner.tensor, otherwise)
        return tuple(arguments[-1])

    def uses(self, importer: int, message: Message) -> bool:
        """Return whether an importer has already imported the memory, which makes an exchange
        unnecessary.
        """
        return any(
            (each.importer, each.allocation, each.message.pauses)
            == (importer, message.allocation, message.pauses)
            for each in self.imports
        )

    def release_imports(self) -> None:
        """Make the importers release all their memory."""
        while self.imports:
            self.release(self.imports[-1])

    def release(self, used: Import) -> None:
        self.synchronize()
        self.imports.remove(used)
        used.allocation.users.remove(used.importer)
        self.importers[used.importer].ask("release", used.key)
        self.settle()

    def sees(self, used: Import) -> bool:
        """Return whether an importer sees the contents that the model expects."""
        seen = self.importers[used.importer].ask("digest", used.key)
        return bool(seen == hashlib.blake2b(used.allocation.contents).digest())

    def expire(self) -> None:
        """Expire all messages, so that the messages no longer keep deleted blocks alive."""
        self.synchronize()
        for allocation in self.allocations():
            allocation.in_transit = 0
        sent_storages.forget_expired(math.inf)
        self.settle()

    def settle(self) -> None:
        """Wait until the importers' uses have ended and the blocks kept by these uses are freed."""
        held = len({(each.importer, each.allocation) for each in self.imports})
        wait_until(
            lambda: exporter.held() == held, f"{exporter.held()} blocks are held, not {held}"
        )
        for allocation in self.allocations():
            owner = allocation.owner
            if not allocation.is_deleted or allocation.in_transit or allocation.users:
                continue
            require(owner.freed.wait(SETTLE_SECONDS), f"{allocation} is not freed")
            require(owner.error is None, f"a free failed: {owner.error!r}")
            self.freed(allocation, owing=False)

    def freed(self, allocation: Allocation, *, owing: bool) -> None:
        tag = allocation.tag
        tag.allocations.remove(allocation)
        tag.owing = owing
        tag.known = None
        self.touched.add(tag)

    # --- the ends of a sequence

    def teardown(self) -> None:
        if isinstance(sys.exc_info()[1], Exception):
            super().teardown()
            return
        self.land()
        self.release_imports()
        self.expire()
        for allocation in self.allocations():
            if allocation.owner is not None:
                allocation.owner.disown()  # it is freed by its address
        self.importers.owners.clear()
        super().teardown()
        wait_until(lambda: not _C.importers(), "freed memory stays imported")

    def _recover(self) -> None:
        if self.importers.owners:
            self.importers.reset()
        super()._recover()
