"""Rules in which importers also use the memory of other exporters, which can be killed."""

from __future__ import annotations

import hashlib
import sys
from dataclasses import dataclass
from typing import Any

from exporting_processes import Exporter
from forked_processes import wait_until
from hypothesis.stateful import rule

from memsaver.errors import MemsaverError, SharingError
from model.arguments import PICK, SEED, lists
from model.checks import require
from model.importers import IMPORTERS
from model.place import DEVICES, MIB
from model.sharing_rules import IMPORT_CALLS, SharingRules

_SIZES = [512, 70_000, 2 * MIB, 3 * MIB + 4096]
_MOST_BLOCKS = 12  # of living exporters, and of dead ones
_MOST_WRITTEN = 300_000
_STEPS = [
    *("send_elsewhere", "send_elsewhere", "receive", "receive", "receive", "receive"),
    *("write_there", "write_there", "write_elsewhere", "release_there", "release_there"),
    *("kill_exporter", "kill_exporter_of_request"),
]


@dataclass(eq=False)
class Block:
    """A block that an exporter has sent."""

    exporter: Exporter
    key: int  # under which the exporter keeps it
    place: tuple[Any, ...]
    contents: bytearray


@dataclass(eq=False)
class Use:
    """An importer's use of a block."""

    block: Block
    importer: int
    key: int  # under which the importer keeps it


class ExporterRules(SharingRules):
    def __init__(self) -> None:
        super().__init__()
        self.blocks: list[Block] = []
        self.uses_elsewhere: list[Use] = []

    @rule(
        drawn=lists(
            *(4, 10),
            # The step, the block or its use, the importer, the call to refuse, and the size.
            (_STEPS, PICK, range(IMPORTERS), [*12 * [None], *IMPORT_CALLS], _SIZES),
            (SEED,),
        )
    )
    def share_elsewhere(self, drawn):
        """Run some steps with memory that belongs to other processes."""
        for (step, pick, importer, refused, nbytes), (seed,) in drawn:
            if step == "send_elsewhere" or not self.blocks:
                self.send_elsewhere(pick, nbytes, seed)
            elif step == "receive":
                self.receive_elsewhere(self.blocks[pick % len(self.blocks)], importer, refused)
            elif step == "kill_exporter":
                living = [each for each in self.blocks if not each.exporter.is_dead]
                if living and pick % 8:
                    self.receive_elsewhere(living[pick % len(living)], importer, None)
                self.kill_exporter()
            elif step == "kill_exporter_of_request":
                self.kill_exporter(self.blocks[pick % len(self.blocks)], importer)
            elif self.uses_elsewhere:
                self.use_elsewhere(step, self.uses_elsewhere[pick % len(self.uses_elsewhere)], seed)

    # --- steps

    def send_elsewhere(self, pick: int, nbytes: int, seed: int) -> None:
        if len(self.blocks) >= _MOST_BLOCKS:
            return
        self.begin("send_elsewhere", pick, nbytes, seed)
        exporter, data = self.process.exporters.alive(), self.place.some_bytes(nbytes, seed)
        self.process.exporters.is_used = True
        self.received += 1
        place = exporter.process.ask("send", self.received, pick % DEVICES, data)
        self.blocks.append(Block(exporter, self.received, place, bytearray(data)))

    def receive_elsewhere(self, block: Block, importer: int, refused: str | None) -> None:
        self.begin("receive_elsewhere", importer, refused, block.exporter.is_dead)
        if len(self.uses_elsewhere) >= _MOST_BLOCKS:
            return
        self.received += 1
        is_used = self.uses_block(importer, block)  # there is no exchange
        may = (MemsaverError,) if refused else (SharingError,) if block.exporter.is_dead else ()
        ask = self.importers[importer].ask
        made = self.call(ask, "receive", self.received, block.place, refused, may=may)
        if made.error is None:
            require(is_used or not block.exporter.is_dead, "memory of a dead exporter was received")
            self.uses_elsewhere.append(Use(block, importer, self.received))
            self.require_contents(self.uses_elsewhere[-1])
        else:
            require(not is_used, f"memory in use was not received: {made.error!r}")
        self.settle_elsewhere(block.exporter)

    def use_elsewhere(self, step: str, use: Use, seed: int) -> None:
        """Run a step with a block that an importer uses."""
        block, owner = use.block, use.block.exporter
        self.begin(step, "elsewhere", use.importer, owner.is_dead, seed)
        self.require_contents(use)
        if step == "release_there":
            self.uses_elsewhere.remove(use)
            self.importers[use.importer].ask("release", use.key)
            self.settle_elsewhere(owner)
            return
        data = self.place.some_bytes(min(_MOST_WRITTEN, len(block.contents)), seed)
        start = (len(block.contents) - len(data)) * (seed % 64) // 63
        if step == "write_there":
            self.importers[use.importer].ask("write", use.key, start, data)
        elif not owner.is_dead:
            owner.process.ask("write", block.key, start, data)
        else:
            return
        block.contents[start : start + len(data)] = data
        self.require_contents(use)

    def kill_exporter(self, block: Block | None = None, importer: int = 0) -> None:
        """Kill the live exporter; if a block is passed, kill it during an importer's request."""
        exporter = self.process.exporters.alive()
        if not any(each.exporter is exporter for each in self.blocks):
            return
        is_mapped = any(use.block.exporter is exporter for use in self.uses_elsewhere)
        what = "kill_exporter_in_use" if is_mapped else "kill_exporter"
        self.begin(what, importer, block is not None)
        used = None
        if block is not None and block.exporter is exporter:
            self.received += 1
            used = Use(block, importer, self.received)
            was_used = self.uses_block(importer, block)
            request = ("receive", used.key, block.place, None)
            self.importers[importer].begin(*request)
        exporter.kill()
        if used is not None:
            answer = self.call(self.importers[importer].finish, request, may=(SharingError,))
            require(answer.error is None or not was_used, f"{answer.error!r} for memory in use")
            if answer.error is None:
                self.uses_elsewhere.append(used)
        for use in self.uses_elsewhere:
            self.require_contents(use)
        self.settle_elsewhere(exporter)
        for use in self.uses_elsewhere:  # again, after the importers have noticed the end
            self.require_contents(use)
        killed = [each for each in self.blocks if each.exporter is exporter]
        for other in range(IMPORTERS):
            self.receive_elsewhere(killed[0], other, None)
        # A later request for one of them also fails, unless the importer still uses the block.
        used_blocks = [use.block for use in self.uses_elsewhere]
        self.blocks = [each for each in self.blocks if not each.exporter.is_dead]
        self.blocks += dict.fromkeys(
            [each for each in used_blocks if each.exporter.is_dead] + killed[-1:]
        )

    def kill(self, importer: int) -> None:
        ended = [use for use in self.uses_elsewhere if use.importer == importer]
        self.uses_elsewhere = [use for use in self.uses_elsewhere if use not in ended]
        super().kill(importer)
        for exporter in {use.block.exporter for use in ended}:
            self.settle_elsewhere(exporter)

    # --- checks

    def uses_block(self, importer: int, block: Block) -> bool:
        return any((use.importer, use.block) == (importer, block) for use in self.uses_elsewhere)

    def require_contents(self, use: Use) -> None:
        """Check that an importer, and the exporter if it is alive, see the expected contents."""
        expected = hashlib.blake2b(use.block.contents).digest()
        seen = self.importers[use.importer].ask("digest", use.key)
        dead = "a dead" if use.block.exporter.is_dead else "an"
        require(seen == expected, f"an importer sees other contents of {dead} exporter's block")
        if not use.block.exporter.is_dead:
            seen = use.block.exporter.process.ask("digest", use.block.key)
            require(seen == expected, "an exporter sees other contents than its importer")

    def settle_elsewhere(self, exporter: Exporter) -> None:
        """Wait until only blocks in use are kept, by the exporter or, if it is dead, by the
        importers.
        """
        uses = [use for use in self.uses_elsewhere if use.block.exporter is exporter]
        if not exporter.is_dead:
            count = len({(use.importer, use.block) for use in uses})
            ask = exporter.process.ask
            wait_until(lambda: ask("held") == count, f"an exporter does not keep {count} blocks")
            return
        for number in range(IMPORTERS):
            importer = self.importers[number]
            wait_until(
                lambda importer=importer: importer.ask("has_noticed", exporter.endpoint),
                "an importer does not notice the end of an exporter",
            )
            if any(use.importer == number for use in uses):
                require(exporter.has_memory_in(importer.pid), "an importer lost memory in use")
                continue
            wait_until(
                lambda importer=importer: not exporter.has_memory_in(importer.pid),
                "memory of a dead exporter stays mapped, although nobody uses it",
            )

    # --- the ends of a sequence

    def teardown(self) -> None:
        if not isinstance(sys.exc_info()[1], Exception):
            while self.uses_elsewhere:
                self.use_elsewhere("release_there", self.uses_elsewhere[-1], 0)
            self.process.exporters.clear()
        super().teardown()

    def _recover(self) -> None:
        if self.process.exporters.is_used:
            self.process.exporters.reset()
            self.importers.reset()
        super()._recover()
