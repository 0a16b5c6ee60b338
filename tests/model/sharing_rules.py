"""Rules that send blocks to other processes, which read, write and release the blocks or die."""

from __future__ import annotations

from faults.injections import INVALID_VALUE, Injection
from hypothesis.stateful import rule

import memsaver
from memsaver.errors import ConfigError, InvalidStateError, MemsaverError, SharingError
from model.arguments import OVERRIDE, PICK, SEED, lists
from model.checks import require
from model.expected import Allocation, Tag
from model.importers import IMPORTERS
from model.memory_rules import MemoryRules
from model.place import MIB
from model.sharing import Import, Message
from model.transition_rules import TransitionRules

SHAREABLE = ("c", "d", "e")  # the other tags are never shareable
MOST_IMPORTS = 4
_MOST_WRITTEN = MIB
_EXPORT = "cuMemExportToShareableHandle"
IMPORT_CALLS = [
    *("cuMemAddressReserve", "cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"),
]
_STEPS = [
    *("send", "send", "send", "receive", "receive", "write_there", "write_there"),
    *("release_there", "release_there", "forget_there", "delete", "delete", "kill"),
    *("pause_shareable", "pause_shareable", "resume_shareable", "resume_shareable"),
    *("swap_shareable", "make_shareable"),
]
shares = rule(
    drawn=lists(
        *(4, 10),
        # The step, what it concerns, the importer, and the call to refuse.
        (_STEPS, PICK, range(IMPORTERS), [*12 * [None], _EXPORT, *IMPORT_CALLS], OVERRIDE),
        (SEED,),
    )
)


class SharingRules(MemoryRules, TransitionRules):
    @shares
    def share(self, drawn):
        """Run several sharing steps; no other operation changes the tags between the steps."""
        for i, ((step, pick, importer, refused, backup), (seed,)) in enumerate(drawn):
            if i > 0:
                self.compare()
            self.land()
            self.synchronize()
            self.step(step, pick, importer, refused, backup, seed)

    @shares
    def share_more(self, drawn):
        self.share(drawn)

    def step(self, step, pick, importer, refused, backup, seed):
        tag = self.shareable(pick)
        if step == "make_shareable" or tag is None:
            self.make_shareable(SHAREABLE[pick % len(SHAREABLE)])
        elif step == "send" and self.allocations():
            self.send(pick, importer, refused)
        elif step == "receive" and self.messages:
            self.begin(step, pick, importer, refused)
            fresh = [each for each in self.messages if not each.is_stale]
            among = fresh if fresh and pick % 4 else self.messages
            self.receive(among[pick % len(among)], importer, refused)
        elif step == "pause_shareable":
            self.begin("pause", tag.name, backup)
            self.transition("pause", (tag.name,), backup, 0)
        elif step == "resume_shareable":
            self.begin("resume", tag.name, backup)
            self.transition("resume", (tag.name,), backup, 0)
        elif step == "swap_shareable":
            into = tuple(each.name for each in self.tags if each.paused)
            if into and not tag.paused:
                self.begin("swap", tag.name, into, backup)
                self.transition("swap", ((tag.name,), into), backup, 0)
        elif step == "delete":
            sent = [each for each in self.allocations() if each.owner is not None]
            if sent:
                self.begin("free", pick)
                self.free_one(sent[pick % len(sent)], 0, ())
        elif self.imports:
            used = self.imports[pick % len(self.imports)]
            self.begin(step, pick, importer)
            if step == "write_there":
                self.write_there(used, pick, seed)
            elif step == "release_there":
                self.release(used)
            elif step == "kill":
                self.kill(importer)
            else:
                self.release_imports()
                self.expire()

    def shareable(self, pick: int) -> Tag | None:
        """Return a shareable tag, in most cases one with imports if such a tag exists."""
        tags = [each for each in self.tags if each.shareable]
        imported = [each for each in tags if each.is_imported]
        among = imported if imported and pick % 4 else tags
        return among[pick % len(among)] if among else None

    def make_shareable(self, name: str) -> None:
        """Make a tag shareable until the process ends."""
        self.begin("make_shareable", name)
        (tag,) = self.named((name,))
        entered = memsaver.region(name, shareable=True)
        if tag.paused:
            self.refused(InvalidStateError, entered.__enter__)
            return
        self.call(entered.__enter__)
        self.call(entered.__exit__, None, None, None)
        tag.mixed = tag.mixed or not tag.shareable
        tag.shareable = True

    def send(self, pick: int, importer: int, refused: str | None) -> None:
        """Send a block; in most cases, receive it immediately."""
        self.begin("send", pick, importer, refused)
        sendable = [each for each in self.allocations(mapped=True) if each.tag.shareable]
        among = sendable if sendable and pick % 8 else self.allocations()
        allocation = among[pick % len(among)]
        tag = allocation.tag
        if allocation.is_deleted:
            return
        owner = self.own(allocation)
        if not tag.shareable:
            self.refused(ConfigError, self.reduced, owner)
        elif tag.paused:
            self.refused(SharingError, self.reduced, owner)
        else:
            made = self.call(self.reduced, owner, may=(SharingError,) if tag.mixed else ())
            if made.error is None:
                allocation.in_transit += 1
                self.messages.append(Message(allocation, made.result, tag.pauses))
                if pick % 4:
                    self.receive(self.messages[-1], importer, refused)

    def receive(self, message: Message, importer: int, refused: str | None) -> None:
        """Receive a message, possibly late, more than once, or after its memory was freed or
        replaced.
        """
        if len(self.imports) >= MOST_IMPORTS:
            return
        allocation, tag = message.allocation, message.allocation.tag
        is_there = allocation in tag.allocations and not tag.paused
        is_used = self.uses(importer, message)
        may: tuple[type[MemsaverError], ...] = ()
        faults: tuple[Injection, ...] = ()
        there = None if refused == _EXPORT else refused
        if there:
            may = (MemsaverError,)
        elif message.is_stale:
            may = (SharingError,)
        elif refused == _EXPORT:
            faults = (Injection("model", _EXPORT, 1, INVALID_VALUE, True),)
            may = (SharingError,)
        self.received += 1
        request = ("receive", self.received, message.place, there)
        made = self.call(self.importers[importer].ask, *request, faults=faults, may=may)
        if is_there and not is_used and not made.met:
            allocation.in_transit = max(0, allocation.in_transit - 1)
        if made.error is None:
            require(is_there, f"{allocation} was received")
            allocation.users.append(importer)
            self.imports.append(Import(message, importer, self.received))
        self.settle()
        if made.error is None:
            require(self.sees(self.imports[-1]), f"other contents of {allocation} were received")

    def write_there(self, used: Import, start: int, seed: int) -> None:
        """Make an importer read a block and write to it."""
        allocation: Allocation = used.allocation
        require(self.sees(used), f"an importer sees other contents of {allocation}")
        data = self.place.some_bytes(min(_MOST_WRITTEN, allocation.nbytes), seed)
        start = (allocation.nbytes - len(data)) * start // 63
        self.importers[used.importer].ask("write", used.key, start, data)
        allocation.contents[start : start + len(data)] = data
        allocation.tag.known = None
        self.touched.add(allocation.tag)

    def kill(self, importer: int) -> None:
        for used in [each for each in self.imports if each.importer == importer]:
            self.imports.remove(used)
            used.allocation.users.remove(importer)
        self.importers.restart(importer)
        self.settle()
