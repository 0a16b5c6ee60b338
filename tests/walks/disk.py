"""A random walk with disk backups whose files are corrupted, truncated or emptied, or cannot grow.

The walk writes to tags on two devices, pauses them with every policy, resumes, swaps and frees
them, and loads the same or other contents again. At the same time, the walk changes the backup
files from outside, and lowers and raises the limit on file sizes. A model contains the expected
bytes of each block. The walk checks:

- every byte equals the model's after a resume or a swap, so no stale bytes are returned;
- a tag whose file was not changed can be resumed;
- a failed pause leaves its tag mapped with its bytes, and a failed resume leaves its tag paused;
- after a resume raises `BackupError`, the error's advice (free the tag's blocks, resume the tag,
  load its contents again) restores the tag; the next pause saves the contents, and the next resume
  restores them.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import functools
import os
import random
import resource
import time
import warnings
from dataclasses import dataclass, field

from backup_files import deleted_files, overwrite, truncate
from simulated_driver import Simulator

import memsaver
from memsaver import simulator
from memsaver.errors import BackupError

MIB = 1 << 20
SIZES = (512, 5000, MIB, 2 * MIB + 512, 5 * MIB, 17 * MIB + 4096)
NAMES = ("first", "second", "third")
POLICIES = ("disk", "disk", "disk", "host", "pageable")


@functools.cache
def noise() -> bytes:
    return random.Random(1).randbytes(20 * MIB)


@dataclass
class Block:
    """Memory on a device with its expected bytes."""

    device: int
    buffer: simulator.Buffer
    expected: bytes

    def write(self, at: int, data: bytes) -> None:
        self.expected = self.expected[:at] + data + self.expected[at + len(data) :]
        ctypes.memmove(self.buffer.address + at, data, len(data))

    def is_intact(self) -> bool:
        return ctypes.string_at(self.buffer.address, len(self.expected)) == self.expected


@dataclass
class Tag:
    """A tag's blocks, and a flag that indicates whether a file of the tag's backup might have
    changed."""

    name: str
    blocks: list[Block] = field(default_factory=list)
    paused: bool = False
    suspect: bool = False

    def check(self) -> None:
        state = "paused" if self.paused else "mapped"
        assert memsaver.state(self.name) == state, (self.name, memsaver.state(self.name), state)
        if not self.paused:
            wrong = [hex(b.buffer.address) for b in self.blocks if not b.is_intact()]
            assert not wrong, f"tag {self.name}: wrong bytes in {wrong}"


class Walk:
    """The tags, the model and the walk's operations."""

    def __init__(self, seed: int) -> None:
        self.dice = random.Random(seed)
        self.folder = os.environ["MEMSAVER_DISK_DIR"]
        self.tags = [Tag(name) for name in NAMES]
        self.owners: dict[int, Tag] = {}  # the files' tags, by inode
        self.done: collections.Counter[str] = collections.Counter()
        for tag in self.tags:
            with memsaver.region(tag.name, backup="disk"):
                pass
            self.load(tag, self.contents())

    @contextlib.contextmanager
    def adopting(self, tag: Tag):
        """Record the files created within the block as belonging to this tag."""
        try:
            yield
        finally:
            files = {os.fstat(file).st_ino for file in deleted_files(self.folder)}
            self.owners = {inode: self.owners.get(inode, tag) for inode in files}

    # Contents.

    def contents(self) -> list[tuple[int, bytes]]:
        """Choose a tag's blocks, with the device and the bytes of each block."""
        made = []
        for _ in range(self.dice.randint(1, 4)):
            size, at = self.dice.choice(SIZES), self.dice.randrange(2 * MIB)
            made.append((self.dice.randrange(2), noise()[at : at + size]))
        return made

    def load(self, tag: Tag, contents: list[tuple[int, bytes]]) -> None:
        with memsaver.region(tag.name):
            for device, data in contents:
                block = Block(device, simulator.buffer(len(data), device), data)
                block.write(0, data)
                tag.blocks.append(block)

    # Transitions.

    def pause(self, tag: Tag) -> None:
        policy = self.dice.choice(POLICIES)
        try:
            with self.adopting(tag):
                memsaver.pause(tag.name, backup=policy)
        except BackupError as error:
            self.refused(error, tag)
            assert policy == "disk", error
        else:
            self.paused(tag, policy)

    def paused(self, tag: Tag, policy: str) -> None:
        tag.suspect &= policy == "disk"
        tag.paused = True
        self.done["paused"] += 1

    def refused(self, error: BackupError, *tags: Tag) -> None:
        """Record an error, which must name one of these tags."""
        assert error.tag in {tag.name for tag in tags}, (error, error.tag)
        self.done["refused"] += 1
        for tag in tags:
            tag.check()

    def resume(self, tag: Tag) -> None:
        try:
            memsaver.resume(tag.name)
        except BackupError as error:
            self.refused(error, tag)
            self.heal(tag)
        else:
            tag.paused = False
            self.done["resumed"] += 1

    def heal(self, tag: Tag) -> None:
        """Follow the error's advice, then pause and resume the tag without disturbance."""
        assert tag.suspect, f"nobody damaged the backup of tag {tag.name}"
        kept = [(block.device, block.expected) for block in tag.blocks]
        same = self.dice.random() < 0.7
        tag.blocks.clear()
        memsaver.resume(tag.name)
        tag.paused = tag.suspect = False
        self.load(tag, kept if same else self.contents())
        if self.dice.random() < 0.8:
            with self.adopting(tag):
                memsaver.pause(tag.name, backup="disk")
            memsaver.resume(tag.name)
            tag.check()
        self.done["healed with the same" if same else "healed with others"] += 1

    def swap(self) -> None:
        going = [tag for tag in self.tags if not tag.paused]
        coming = [tag for tag in self.tags if tag.paused]
        if not going or not coming:
            return
        out, into = self.dice.choice(going), self.dice.choice(coming)
        policy = self.dice.choice(POLICIES)
        try:
            with self.adopting(out):
                memsaver.swap(out=out.name, into=into.name, backup=policy)
        except BackupError as error:
            # A tag whose rollback failed is paused, and keeps its contents.
            out.paused = memsaver.state(out.name) == "paused"
            self.refused(error, out, into)
            if error.tag == into.name:
                self.heal(into)
        else:
            self.paused(out, policy)
            into.paused = False
            self.done["swapped"] += 1

    # The program's operations.

    def write(self, tag: Tag) -> None:
        if tag.paused or not tag.blocks:
            return
        block = self.dice.choice(tag.blocks)
        at = self.dice.randrange(len(block.expected))
        data = noise()[at : at + self.dice.choice((1, 100, MIB))]
        block.write(at, data[: len(block.expected) - at])
        self.done["written"] += 1

    def free(self, tag: Tag) -> None:
        if tag.blocks:
            del tag.blocks[self.dice.randrange(len(tag.blocks))]
            self.done["freed"] += 1

    def add(self, tag: Tag) -> None:
        if not tag.paused and len(tag.blocks) < 6:
            self.load(tag, self.contents()[:1])

    # Damage to files.

    def damage(self) -> None:
        """Change a file from outside."""
        files = deleted_files(self.folder)
        if not files:
            return
        file = self.dice.choice(files)
        data = self.extents(file)
        if not data:
            return
        begin, end = self.dice.choice(data)
        at = self.dice.randrange(begin, end)
        kind = self.dice.choice(("flip", "zeros", "noise", "cut", "empty"))
        if kind == "flip":
            byte = overwrite(file, at, b"\0")
            overwrite(file, at, bytes([byte[0] ^ 1 << self.dice.randrange(8)]))
        elif kind in ("zeros", "noise"):
            size = min(self.dice.choice((1, 4096, MIB)), end - at)
            overwrite(file, at, bytes(size) if kind == "zeros" else noise()[7 : 7 + size])
        else:
            truncate(file, at if kind == "cut" else 0)
        self.owners[os.fstat(file).st_ino].suspect = True
        self.done[kind] += 1

    @staticmethod
    def extents(file: int) -> list[tuple[int, int]]:
        """Return the extents of a file that contain data."""
        found, at = [], 0
        with contextlib.suppress(OSError):  # ENXIO: no further data
            while True:
                begin = os.lseek(file, at, os.SEEK_DATA)
                at = os.lseek(file, begin, os.SEEK_HOLE)
                found.append((begin, at))
        return found

    @contextlib.contextmanager
    def little_room(self):
        """Limit file sizes to a few MiB within the block."""
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        limit = self.dice.choice((0, 1, 5, 20)) * MIB
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
            self.done["little room"] += 1

    # One step.

    def move(self, tag: Tag) -> None:
        if tag.paused:
            self.resume(tag)
        elif self.dice.random() < 0.2:
            with self.little_room():
                self.pause(tag)
        else:
            self.pause(tag)

    def step(self) -> None:
        tag = self.dice.choice(self.tags)
        action = self.dice.choices(
            (self.move, self.write, self.free, self.add, self.damage, self.swap, memsaver.trim),
            (40, 15, 6, 10, 12, 12, 2),
        )[0]
        if action in (self.damage, self.swap):
            action()
        elif action is memsaver.trim:
            with self.adopting(tag):  # no new files are expected
                memsaver.trim(wait=True)
        else:
            action(tag)
        for each in self.tags:
            each.check()


def walk(seed: int, seconds: float) -> dict[str, object]:
    """Walk for about `seconds` seconds; return how often each event happened."""
    warnings.simplefilter("ignore", memsaver.MemsaverWarning)
    sim = Simulator()
    world = Walk(seed)
    end, steps = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        world.step()
        steps += 1
    for tag in world.tags:
        if tag.paused:
            world.resume(tag)
        tag.check()
        tag.blocks.clear()
    memsaver.trim(wait=True)
    figures = memsaver.stats()
    assert figures.disk_bytes == figures.host_bytes == figures.resident_bytes == 0, figures
    assert deleted_files(world.folder) == []
    assert sim.violations() == [], sim.violations()
    return {"steps": steps, **world.done}
