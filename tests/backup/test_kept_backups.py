"""Tests retained backups: the restored contents, and unchanged memory that is not copied again."""

import random

import pytest
from looks import held, intact, row_of
from simulated_driver import known_parts

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import DriverError

KIB = 1 << 10
MIB = 1 << 20
KINDS = ["host", "pageable", "disk"]
CODE = {"none": 0, "host": 1, "pageable": 2, "disk": 3}
ODD = [1, 511, 4097, MIB - 1, MIB + 1, 5 * MIB + 12345]


class Memory:
    """A block of device memory with its expected contents."""

    def __init__(self, sim, nbytes, seed):
        self.sim, self.nbytes = sim, nbytes
        self.buffer = simulator.buffer(nbytes)
        self.address = self.buffer.address
        self.expected = bytearray(nbytes)
        self.fill(seed)

    def fill(self, seed):
        for at, part in known_parts(seed, self.nbytes):
            self.write(at, part)

    def write(self, at, data):
        """Write to the block and update its expected contents."""
        self.expected[at : at + len(data)] = data
        self.sim.write(self.address + at, data)

    def is_intact(self):
        return self.sim.contains(self.address, self.expected)


@pytest.fixture
def make(sim):
    def make(name, sizes, backup, seed=1):
        with memsaver.region(name, backup=backup):
            return [Memory(sim, nbytes, seed + i) for i, nbytes in enumerate(sizes)]

    return make


def live_bytes(name):
    """Return the number of bytes that a pause saves: live allocations, rounded as by the
    allocator.
    """
    return sum(r.bytes for r in memsaver.ranges(name))


def cycle(name, **options):
    """Pause and resume a tag; return the number of bytes that the pause copied."""
    copied = memsaver.pause(name, **options).copied_bytes
    memsaver.resume(name)
    return copied


def pause_but(name, kind, unowned):
    """Pause a tag except for its unowned ranges; return the number of bytes copied."""
    return sum(r[4] for r in _C.begin([name], [], CODE[kind], unowned).run())


# --- contents -------------------------------------------------------------------------------------


@pytest.mark.parametrize("fingerprints", [True, False], ids=["fingerprints", "none"])
@pytest.mark.parametrize("kind", KINDS)
def test_contents_over_cycles_with_changes_between(sim, tag, make, options, kind, fingerprints):
    options(fingerprints=fingerprints)
    blocks = make(name := tag(), ODD, kind)
    for round_ in range(4):
        report = memsaver.pause(name)
        assert sim.tag_bytes() == 0 and not sim.accessible(blocks[0].address)
        assert row_of(name).backup_bytes == live_bytes(name)
        if round_ == 0 or not fingerprints:
            assert report.copied_bytes == live_bytes(name)
        assert memsaver.resume(name).copied_bytes == live_bytes(name)
        assert intact(blocks), round_
        for block in blocks[round_ % 2 :: 2]:
            block.fill(round_ + 50)
        blocks[-1].write(5 * MIB + round_, b"one more")


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_block_larger_than_a_copy_chunk(sim, tag, make, kind):
    blocks = make(name := tag(), [66 * MIB, 1], kind)
    cycle(name)
    for at in (0, 64 * MIB - 3, 66 * MIB - 6):  # the second spans two copy chunks
        blocks[0].write(at, b"change")
        assert cycle(name) == (2 * MIB if at % MIB > MIB - 6 and at < 65 * MIB else MIB)
    assert intact(blocks)


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_large_backup_stays_when_its_neighbours_change(sim, tag, make, kind):
    blocks = make(name := tag(), [3 * MIB, 70 * MIB, 2 * MIB], kind)
    cycle(name)
    del blocks[2], blocks[0]
    assert cycle(name) == 0
    blocks += make(name, [MIB], kind, 9)
    assert cycle(name) == MIB
    assert intact(blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_come_and_go_between_cycles(sim, tag, make, kind):
    dice = random.Random(kind)
    name = tag()
    blocks = make(name, [dice.choice(ODD) for _ in range(6)], kind)
    for round_ in range(5):
        for _ in range(2):
            del blocks[dice.randrange(len(blocks))]
        blocks += make(name, [dice.choice(ODD) for _ in range(2)], kind, 100 + 10 * round_)
        memsaver.pause(name)
        if round_ % 2:
            del blocks[dice.randrange(len(blocks))]
        memsaver.resume(name)
        assert intact(blocks), round_
        blocks += make(name, [4097], kind, 200 + round_)


@pytest.mark.parametrize("kind", KINDS)
def test_another_block_at_the_same_address(sim, tag, make, kind):
    name = tag()
    stays, goes = make(name, [2 * MIB, 4 * MIB], kind)
    cycle(name)
    address = goes.address
    del goes
    (comes,) = make(name, [4 * MIB], kind, 30)
    assert comes.address == address
    assert cycle(name) == 4 * MIB
    assert intact([stays, comes])
    assert cycle(name) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_unowned_ranges_are_not_saved(sim, tag, make, kind):
    (block,) = make(name := tag(), [6 * MIB], kind)
    cuts = [(1000, 5000), (MIB - 700, MIB + 700), (3 * MIB, 4 * MIB), (6 * MIB - 1, 6 * MIB)]
    unowned = [(block.address + a, b - a) for a, b in cuts]
    lost = sum(b - a for a, b in cuts)
    assert pause_but(name, kind, unowned) == 6 * MIB - lost == row_of(name).backup_bytes
    memsaver.resume(name)
    for a, b in cuts:
        assert not any(sim.read(block.address + a, b - a))
        block.expected[a:b] = bytes(b - a)
    assert block.is_intact()
    # The unowned ranges are live again: they are saved now, although everything else is kept.
    for a, b in cuts:
        block.write(a, b"\x5a" * (b - a))
    assert cycle(name) < 6 * MIB
    assert block.is_intact()
    assert pause_but(name, kind, unowned) < 6 * MIB
    memsaver.resume(name)
    block.fill(60)
    cycle(name)
    assert block.is_intact()


@pytest.mark.parametrize("kinds", [("host", "disk"), ("disk", "pageable"), ("pageable", "host")])
def test_another_backup_from_pause_to_pause(sim, tag, make, kinds):
    blocks = make(name := tag(), ODD, "none")
    everything = live_bytes(name)
    for kind in (*kinds, kinds[1], "none", kinds[1]):
        copied = memsaver.pause(name, backup=kind).copied_bytes
        held = row_of(name)
        if kind == "disk":
            assert held.host_bytes == 0 and held.disk_bytes >= everything
        elif kind != "none":
            assert held.disk_bytes == 0 and held.host_bytes >= everything
        if kind == "host":
            assert sim.counts().registered_bytes >= held.host_bytes
        elif kind != "none":
            assert sim.counts().registered_bytes < MIB, "fingerprints only"
        memsaver.resume(name)
        if kind == "none":
            assert copied == 0
            assert not any(sim.read(blocks[-1].address, blocks[-1].nbytes))
            for block in blocks:
                block.fill(9)
        assert intact(blocks), kind
    memsaver.trim(wait=True)
    assert row_of(name).host_bytes == row_of(name).disk_bytes == sim.counts().registered_bytes == 0


@pytest.mark.parametrize("kind", KINDS)
def test_backups_on_two_devices_are_kept(run_python, kind):
    run_python(
        f"""
        import memsaver
        from simulated_driver import Block, Simulator

        sim = Simulator()
        blocks = []
        for device in (0, 1):
            sim.start(device)
            with memsaver.region("t", backup="{kind}"):
                blocks += [Block(sim, n, 10 * device + n, device) for n in (1, 4097, 4 << 20)]
        for cycle in range(3):
            report = memsaver.pause("t")
            assert [c.device for c in report.changes] == [0, 1]
            copied = [c.copied_bytes for c in report.changes]
            assert copied[0] > 4 << 20 if cycle == 0 else copied[0] == 0, copied
            assert copied[1] > 4 << 20 if cycle == 0 else copied[1] == 4 << 20, copied
            assert sim.tag_bytes(0) == sim.tag_bytes(1) == 0
            memsaver.resume("t")
            assert all(b.is_intact() for b in blocks)
            blocks[-1].fill(99 + cycle)
        memsaver.trim(wait=True)
        assert sim.counts().registered_bytes == 0 and not sim.violations()
        assert memsaver.stats().disk_bytes == memsaver.stats().host_bytes == 0
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


# --- unchanged memory is not copied again ---------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_only_changed_pieces_are_copied(sim, tag, make, kind):
    (block,) = make(name := tag(), [20 * MIB], kind)
    assert block.address % MIB == 0
    assert cycle(name) == 20 * MIB
    assert cycle(name) == 0
    for at, data, pieces in (
        (7 * MIB, b"x", 1),
        (8 * MIB - 1, b"x", 1),
        (9 * MIB - 1, b"xy", 2),
        (20 * MIB - 1, b"x", 1),
    ):
        block.write(at, data)
        assert cycle(name) == pieces * MIB, at
        assert block.is_intact()
    block.fill(60)
    assert cycle(name) == 20 * MIB
    assert block.is_intact()


@pytest.mark.parametrize("kind", KINDS)
def test_without_fingerprints_everything_is_copied(sim, tag, make, options, kind):
    (block,) = make(name := tag(), [4 * MIB], kind)
    assert cycle(name) == 4 * MIB and cycle(name) == 0
    options(fingerprints=False)
    assert cycle(name) == 4 * MIB
    assert cycle(name) == 4 * MIB
    block.write(MIB, b"changed while there were none")
    assert cycle(name) == 4 * MIB and block.is_intact()
    options(fingerprints=True)
    cycle(name)
    assert cycle(name) == 0 and block.is_intact()


@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_bytes_written_through_a_view_are_saved_again(sim, tag, make, kind):
    (block,) = make(name := tag(), [4 * MIB], kind)
    before = bytes(block.expected)
    memsaver.pause(name)
    _C.backup_view(block.address + 2 * MIB + 5, 3, True)[:3] = b"new"
    memsaver.resume(name)
    at = 2 * MIB + 5
    assert sim.read(block.address + at, 3) == b"new"
    # Restore the contents that were saved first; the backup has changed since.
    sim.write(block.address, before)
    memsaver.pause(name)
    memsaver.resume(name)
    assert block.is_intact()
    memsaver.pause(name)
    _C.backup_view(block.address, 4 * MIB)  # reading changes nothing
    memsaver.resume(name)
    assert cycle(name) == 0


@pytest.mark.parametrize(
    "kind, call, nth",
    [
        ("host", "cuMemcpyDtoHAsync", 1),
        ("host", "cuMemUnmap", 1),
        ("pageable", "cuMemcpyDtoHAsync", 1),
        ("pageable", "cuMemcpyDtoHAsync", 2),
        ("disk", "cuMemcpyDtoHAsync", 2),
        ("disk", "cuMemUnmap", 1),
    ],
)
def test_no_stale_fingerprint_after_a_failed_pause(sim, tag, make, kind, call, nth):
    # The contents change, their copy fails midway, and the contents change back.
    (block,) = make(name := tag(), [18 * MIB], kind)
    before = bytes(block.expected)
    cycle(name)
    for at in (MIB, 17 * MIB):
        block.write(at, b"changed")
    with sim.fault(call, 1, nth), pytest.raises(DriverError):
        memsaver.pause(name)
    assert memsaver.state(name) == "mapped" and block.is_intact()
    block.write(0, before)
    assert cycle(name) <= 2 * MIB
    assert block.is_intact()
    assert cycle(name) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_after_a_trim_everything_is_copied(sim, tag, make, kind):
    (block,) = make(name := tag(), [4 * MIB], kind)
    cycle(name)
    held = row_of(name).host_bytes + row_of(name).disk_bytes
    assert memsaver.trim(wait=True) >= held == 4 * MIB
    assert row_of(name).host_bytes == row_of(name).disk_bytes == 0
    assert cycle(name) == 4 * MIB and block.is_intact()
    memsaver.pause(name)
    assert memsaver.trim(wait=True) < MIB, "backs a paused tag"
    memsaver.resume(name)
    assert block.is_intact()


def test_a_trim_waits_for_a_free_that_waits_for_the_device(sim, tag, make, in_thread, wait_until):
    (block,) = make(name := tag(), [4 * MIB], "host")
    cycle(name)
    with memsaver.region(name):
        freed = _C.malloc(MIB, 0)
    with sim.stream() as stream, held(sim):
        sim.memset(block.address, block.expected[0], 1, stream)
        free = in_thread(_C.free, freed)
        wait_until(lambda: len(memsaver.ranges(name)) == 1)
        trim = memsaver.trim(tags=name)
        with pytest.raises(TimeoutError):
            trim.wait(0.05)
    free.result()
    assert trim.wait(10) == 4 * MIB
    assert block.is_intact()


def test_a_trim_skips_a_tag_in_a_transition(sim, tag, make):
    (block,) = make(name := tag(), [4 * MIB], "host")
    cycle(name)
    with held(sim):
        block.write(0, b"changed")
        pause = memsaver.pause(name, wait=False)
        assert memsaver.trim(tags=name).wait(10) == 0
    pause.wait()
    memsaver.resume(name)
    assert block.is_intact()


# --- copies that fail midway, and progress --------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_copy_of_several_copy_chunks_fails(sim, tag, make, kind):
    blocks = make(name := tag(), [66 * MIB, 2 * MIB], kind)
    for nth in (1, 2, 3):
        with sim.fault("cuMemcpyDtoHAsync", 719 if nth == 2 else 1, nth):
            try:
                memsaver.pause(name)
            except DriverError as error:
                assert error.call == "cuMemcpyDtoHAsync" and error.tag == name
        if memsaver.state(name) == "mapped":
            assert intact(blocks)
            assert sim.counts().registered_bytes <= memsaver.stats().host_bytes
    memsaver.pause(name)
    for nth in (1, 2):
        with sim.fault("cuMemcpyHtoDAsync", 1, nth), pytest.raises(DriverError) as caught:
            memsaver.resume(name)
        assert caught.value.call == "cuMemcpyHtoDAsync" and caught.value.tag == name
        assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    memsaver.resume(name)
    assert intact(blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_progress_ends_at_the_reported_total(sim, tag, make, kind):
    names = [tag("first"), tag("second")]
    blocks = make(names[0], ODD, kind) + make(names[1], [1, 4097, 600 * KIB], kind)
    everything = sum(map(live_bytes, names))
    for expected in (everything, 0):
        pause = _C.begin(names, [], -1, [])
        copied = sum(r[4] for r in pause.run())
        assert copied == expected and pause.progress() == (expected, expected)
        resume = _C.begin([], names, -1, [])
        assert sum(r[4] for r in resume.run()) == everything
        assert resume.progress() == (everything, everything)
    unowned = [(blocks[-1].address + 100, 5000)]
    blocks[-1].write(0, b"x")
    blocks[-1].write(300 * KIB, b"x")
    pause = _C.begin(names, [], CODE[kind], unowned)
    copied = sum(r[4] for r in pause.run())
    assert pause.progress() == (copied, copied)
    resume = _C.begin([], names, -1, [])
    copied = sum(r[4] for r in resume.run())
    assert resume.progress() == (copied, copied) == (everything - 5000,) * 2
    block = blocks[-1]
    block.expected[100:5100] = bytes(5000)
    assert intact(blocks)
