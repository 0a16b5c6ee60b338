"""Tests the option `poison`: only memory that is not restored from a backup is filled with NaNs."""

import pytest

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import DriverError

MIB = 1 << 20
GIB = 1 << 30
PAGE = 2 * MIB
SAVED = ["host", "pageable", "disk"]


@pytest.fixture(autouse=True)
def poison(options, tmp_path):
    options(poison=True, disk_dir=str(tmp_path))


def is_poisoned(block):
    return block.bytes().count(0xFF) == block.nbytes


@pytest.mark.parametrize("share", ["2MiB", "512MiB"])
def test_contents_without_a_backup_are_poisoned(sim, tag, make_blocks, options, share):
    options(share_bytes=share)
    name = tag()
    blocks = make_blocks(name, [512, 5000, 3 * PAGE + 512, 100])
    for _ in range(2):
        memsaver.pause(name)
        memsaver.resume(name)
        assert all(map(is_poisoned, blocks))
        blocks[2].fill(5)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16", "float8_e4m3fn"])
def test_it_is_nan_in_every_float(sim, tag, dtype):
    torch = pytest.importorskip("torch")
    from memsaver import simulator

    name = tag()
    with memsaver.region(name):
        tensor = simulator.empty(1000, getattr(torch, dtype)).zero_()
    memsaver.pause(name)
    memsaver.resume(name)
    assert tensor.float().isnan().all()


@pytest.mark.parametrize("kind", SAVED)
def test_contents_with_a_backup_are_restored(sim, tag, make_blocks, kind):
    name, other = tag("saved"), tag("discarded")
    saved = make_blocks(name, [512, 3 * PAGE + 512, 700], backup=kind)
    discarded = make_blocks(other, [700, PAGE])
    memsaver.pause()
    memsaver.resume()
    assert all(b.is_intact() for b in saved)
    assert all(map(is_poisoned, discarded))


@pytest.mark.parametrize("kind", SAVED)
def test_unowned_ranges_of_a_backed_up_tag_are_poisoned(sim, tag, make_blocks, kind):
    name = tag()
    (block,) = make_blocks(name, [3 * PAGE], backup=kind)
    before = block.bytes()
    holes = [(512, 1024), (PAGE - 512, 1024), (3 * PAGE - 4096, 4096)]
    _C.begin([name], [], -1, [(block.address + at, n) for at, n in holes]).run()
    memsaver.resume(name)
    expected = bytearray(before)
    for at, n in holes:
        expected[at : at + n] = b"\xff" * n
    assert block.bytes() == bytes(expected)


def test_a_pause_that_discards_for_once(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [PAGE], backup="host")
    memsaver.pause(name, backup="none")
    memsaver.resume(name)
    assert is_poisoned(block)


def test_without_poison_memory_is_zero_again(sim, tag, make_blocks, options):
    name = tag()
    (block,) = make_blocks(name, [PAGE])
    memsaver.pause(name)
    options(poison=False)
    memsaver.resume(name)
    assert block.is_zero()


@pytest.mark.parametrize("backup", ["none", "host"], ids=["discarded", "saved"])
@pytest.mark.parametrize("free", [0, GIB], ids=["handed over", "new"])
def test_a_swap_poisons_transferred_and_new_pages(sim, tag, make_blocks, options, backup, free):
    """A swap poisons transferred pages and new pages, on full and on free devices."""
    options(share_bytes="4MiB", slab_bytes="2MiB")
    out, into = tag("out"), tag("into")
    coming = make_blocks(into, [PAGE, 700, PAGE])
    memsaver.pause(into)
    sizes = [PAGE, 100, 2 * PAGE] if free == 0 else [100]
    going = make_blocks(out, sizes, backup=backup)
    if free == 0:
        sim.occupy(memsaver.device_memory(0)[0])
    memsaver.swap(out=out, into=into)
    assert all(map(is_poisoned, coming))
    sim.occupy(0)
    memsaver.resume(out)
    assert all(is_poisoned(b) if backup == "none" else b.is_intact() for b in going)


def test_poison_is_complete_when_the_resume_returns(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [PAGE, 3000])
    memsaver.pause(name)
    sim.stream_delay(0.05)
    memsaver.resume(name)
    assert all(map(is_poisoned, blocks))


@pytest.mark.parametrize("alone", [False, True], ids=["all memory", "its memory"])
@pytest.mark.parametrize("kind", ["none", *SAVED])
@pytest.mark.filterwarnings("ignore:cuMemHostUnregister")
def test_poison_is_complete_for_a_stream_that_waits(sim, tag, make_blocks, options, kind, alone):
    """Work queued after wait_stream overwrites the poison, and the poison never overwrites this
    work.
    """
    options(share_bytes="2MiB", slab_bytes="2MiB")  # each block is filled by one call of the driver
    blocks = make_blocks(name := tag(), [PAGE] * 4, backup=kind)
    saved = blocks[0].bytes()[:4096]
    begin, last = blocks[0].address + 4096, blocks[-1]
    _C.begin([name], [], -1, [(begin, PAGE - 4096), *((b.address, PAGE) for b in blocks[1:])]).run()
    sim.stream_delay(0.05)
    # Unpinning a staging buffer would wait for the fills, too.
    with sim.fault("cuMemHostUnregister", times=0), sim.stream() as stream:
        resume = memsaver.resume(name, wait=False)
        resume.wait_stream(stream.value, memory=last if alone else None)
        sim.memset(last.address, 7, 4096, stream)
        resume.wait()
        assert sim.opened.cuStreamSynchronize(stream) == 0
    assert all(map(is_poisoned, blocks[1:-1]))
    assert last.bytes() == b"\x07" * 4096 + b"\xff" * (PAGE - 4096)
    assert blocks[0].bytes()[:4096] == (b"\xff" * 4096 if kind == "none" else saved)


@pytest.mark.parametrize("nth", [1, 2])
def test_a_failed_fill_leaves_all_tags_paused(sim, tag, make_blocks, nth):
    """If either of two tags cannot be filled, both tags stay paused and no memory stays mapped."""
    first, second = tag("first"), tag("second")
    saved = make_blocks(first, [PAGE], backup="host")
    others = make_blocks(second, [3 * PAGE])
    memsaver.pause(first)
    memsaver.pause(second)
    # Each tag has its own pages; the saved tag has nothing to fill.
    third = make_blocks(tag("third"), [PAGE])
    memsaver.pause()
    sim.stream_delay(0.02)
    with sim.fault("cuMemsetD8Async", sim.LAUNCH_FAILED, nth=nth), pytest.raises(DriverError):
        memsaver.resume()
    assert memsaver.state(first) == memsaver.state(second) == "paused"
    assert sim.tag_bytes() == 0
    memsaver.resume()
    assert saved[0].is_intact()
    assert all(map(is_poisoned, others + third))


def test_an_error_after_fills_were_queued(sim, tag, make_blocks):
    """Memory is released only after its fills have completed; otherwise, the simulator reports a
    violation.
    """
    name = tag()
    blocks = make_blocks(name, [3 * PAGE])
    memsaver.pause(name)
    sim.stream_delay(0.05)
    with sim.fault("cuEventRecord", sim.LAUNCH_FAILED), pytest.raises(DriverError):
        memsaver.resume(name)
    assert sim.tag_bytes() == 0
    memsaver.resume(name)
    assert all(map(is_poisoned, blocks))


def test_retained_pages_keep_their_contents(sim, tag, make_blocks, options):
    """Poison never overwrites retained pages, even if a pause and its rollback fail."""
    options(share_bytes="2MiB", slab_bytes="2MiB")
    name = tag()
    blocks = make_blocks(name, [PAGE, PAGE, PAGE])
    sim.fail("cuMemUnmap", sim.LAUNCH_FAILED, 2)
    sim.fail("cuMemMap", sim.LAUNCH_FAILED, 1)
    with pytest.raises(DriverError):
        memsaver.pause(name)
    assert memsaver.state(name) == "paused"  # because the rollback failed too
    sim.clear_faults()
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


def test_the_environment_turns_poison_on(run_python):
    code = """
        import memsaver
        from memsaver import simulator
        with memsaver.region("kv"):
            block = simulator.buffer(4096)
        memsaver.pause()
        memsaver.resume()
        print(bytes(block.array) == b"\\xff" * 4096)
    """
    assert run_python(code, MEMSAVER_POISON="1").stdout.split() == ["True"]
    assert run_python(code, MEMSAVER_POISON="off").stdout.split() == ["False"]
