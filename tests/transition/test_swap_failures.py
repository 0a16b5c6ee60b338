"""Test that tags keep their states and contents if any driver call in a swap fails."""

import contextlib
import itertools
from itertools import chain

import pytest
from driver_faults import CODES, PAGE, Fault, Fixed, held, reported, states

import memsaver

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
# Pages of 2 and 4 MiB: some pages of the one side are usable for the other, some are not.
OUT = [4096, PAGE + 512, 100_000]
INTO = [PAGE, 512, PAGE + 512]


@pytest.fixture
def pair(sim, tag, make_blocks, options, tmp_path):
    """Return a function `pair("host", "none")` that creates tags with these backups to swap.

    The function returns two tags to pause, a tag to resume, and the blocks of both sides.
    """
    options(share_bytes="4MiB", slab_bytes="2MiB", disk_dir=str(tmp_path))

    def make(out, into):
        going, coming = [tag("out"), tag("more")], [tag("into")]
        first = [make_blocks(going[0], OUT, backup=out), make_blocks(going[1], [PAGE], backup=out)]
        second = make_blocks(coming[0], INTO, backup=into)
        return going, coming, Fixed(sim, chain.from_iterable(first)), Fixed(sim, second)

    return make


@pytest.fixture
def put_back(sim):
    """Return a function that prepares a pair for a swap; with `anew`, it drops kept backups."""

    def act(going, coming, out, into, anew):
        memsaver.resume(*going, *coming)
        out.fill()
        into.fill()
        if anew:
            memsaver.trim(wait=True)
        memsaver.pause(*coming)

    return act


def came_back(blocks, backup):
    return blocks.are_zero() if backup == "none" else blocks.are_intact()


PAIRS = [("host", "host"), ("host", "none"), ("none", "host"), ("pageable", "disk")]
# Pinning and staging are slow, so these pairs try only every nth fault. The steps are odd, so that
# faults that happen once alternate with permanent ones. `make faults` tries all faults.
EVERY = {("host", "host"): 3, ("pageable", "disk"): 15}


def leaves_pinned(fault, kinds):
    """Return whether the fault leaves the library's host memory pinned permanently."""
    staged = "pageable" in kinds and fault.call == "cuCtxPushCurrent"
    return fault.times == 0 and (staged or fault.call == "cuMemHostUnregister")


@pytest.mark.long
@pytest.mark.parametrize("kinds", PAIRS, ids="/".join)
def test_a_swap(sim, pair, put_back, each_fault, attempt, options, kinds):
    anew = kinds == ("host", "host")  # if true, also pins and hashes; else reuses kept backups
    options(fingerprints="on" if anew else "off")
    every = EVERY.get(kinds, 1)
    going, coming, out, into = pair(*kinds)
    names = going + coming
    codes = itertools.cycle(CODES.values())

    def swap():
        memsaver.swap(out=going, into=coming)

    put_back(going, coming, out, into, anew)
    for number, fault in enumerate(each_fault(lambda: None, swap, 1)):
        if number % every or leaves_pinned(fault, kinds):
            continue
        put_back(going, coming, out, into, anew)
        resident, code = held(names), next(codes)
        fault = Fault(fault.call, fault.nth, fault.times, code)
        error = attempt(swap, fault)
        if fault.call not in ("cuMemRelease", "cuMemUnmap"):  # retried by the next transition
            assert reported() == sim.tag_bytes(), fault
        if error is None:
            assert states(going) == {"paused"} and states(coming) == {"mapped"}, fault
            assert held(going) == 0 and out.are_gone(), fault
            assert came_back(into, kinds[1]), fault
        elif states(going) == {"paused"}:  # the rollback failed
            assert fault.times == 0 and "resume them" in str(error), fault
            assert states(coming) == {"paused"}, fault
        else:
            assert states(going) == {"mapped"} and states(coming) == {"paused"}, fault
            assert held(names) == held(going) == resident and into.are_gone(), fault
            assert reported() == sim.tag_bytes(), fault
            assert kinds[0] == "none" or out.are_intact(), fault
        memsaver.resume(*names)
        assert reported() == sim.tag_bytes(), fault
        assert kinds[0] == "none" or out.are_intact(), fault
        assert came_back(into, kinds[1]), fault
        if "pageable" not in kinds:  # its backup is not pinned
            assert sim.counts().registered_bytes == memsaver.stats().host_bytes, fault
        assert sim.violations() == [], fault


@pytest.mark.parametrize("kind", ["pageable", "disk"])
def test_a_swap_without_host_memory_for_its_copies_changes_nothing(
    sim, tag, make_blocks, options, tmp_path, kind
):
    """Copies of the resumed tag and the rollback both need a buffer in host memory."""
    options(disk_dir=str(tmp_path))
    going, coming = tag("out"), tag("into")
    out = Fixed(sim, make_blocks(going, OUT, backup=kind))
    into = Fixed(sim, make_blocks(coming, [3 * PAGE], backup="pageable"))
    memsaver.pause(going)
    memsaver.resume(going)  # keeps its backup, so that nothing is copied again
    memsaver.pause(coming)
    options(host_bytes=1)
    with pytest.raises(memsaver.OutOfHostMemoryError) as caught:
        memsaver.swap(out=going, into=coming)
    assert states([going]) == {"mapped"} and states([coming]) == {"paused"}, caught.value
    assert out.are_intact() and into.are_gone()
    options(host_bytes=0)
    memsaver.swap(out=going, into=coming)
    assert out.are_gone() and into.are_intact()
    memsaver.resume(going)
    assert out.are_intact()


# Device 1's page is transferred, returned and transferred again; then the rollback fails.
@pytest.mark.parametrize(
    ("call", "code", "times"),
    [("cuMemMap", "OUT_OF_MEMORY", 1), ("cuMemUnmap", "INVALID_VALUE", 0)],
)
def test_a_shortage_on_one_device_that_cannot_be_undone_on_another_says_so(
    run_python, call, code, times
):
    run_python(
        f"""
        import memsaver
        from simulated_driver import Block, Simulator

        sim, MIB = Simulator(), 1 << 20
        sim.start(0), sim.start(1)
        with memsaver.region("into", backup="host"):
            into = [Block(sim, 4 * MIB, 1, device) for device in (0, 1)]
        memsaver.pause("into")
        with memsaver.region("out", backup="host"):
            out = [Block(sim, 4 * MIB, 2, 1)]  # nothing to be handed over on device 0
        sim.occupy(80 << 30, 0)
        with sim.fault({call!r}, sim.{code}, nth=4, times={times}):
            try:
                memsaver.swap(out="out", into="into")
                raise AssertionError("it did not fail")
            except memsaver.OutOfDeviceMemoryError as error:
                said = error
        assert memsaver.state("out") == memsaver.state("into") == memsaver.State.PAUSED
        assert "could not be undone" in str(said) and "resume them" in str(said), said
        assert said.needed == 4 * MIB and said.free == 0, said
        sim.occupy(0, 0)
        memsaver.resume()
        assert all(block.is_intact() for block in out + into) and not sim.violations()
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


@pytest.mark.long
@pytest.mark.parametrize("call", ["cuMemMap", "cuMemcpyDtoHAsync", "cuMemHostRegister"])
@pytest.mark.parametrize("times", [1, 0], ids=["once", "forever"])
def test_a_swap_of_large_blocks_that_fails_on_its_way(sim, tag, make_blocks, call, times):
    # Each block has its own backup chunk, which is saved copy chunk by copy chunk; some are saved
    # before the failure, and if the rollback fails, transferred pages are restored from them.
    going, coming = tag("out"), tag("into")
    out = Fixed(sim, make_blocks(going, [66 * MIB, 65 * MIB], backup="host"))
    into = Fixed(sim, make_blocks(coming, [65 * MIB, 66 * MIB], backup="host"))
    memsaver.pause(coming)
    for nth in range(1, 5):
        with sim.fault(call, nth=nth, times=times), contextlib.suppress(memsaver.MemsaverError):
            memsaver.swap(out=going, into=coming)
        assert reported() == sim.tag_bytes(), nth
        for name, blocks in ((coming, into), (going, out)):
            memsaver.resume(name)
            assert blocks.are_intact(), nth
        memsaver.pause(coming)
        memsaver.trim(wait=True)
    memsaver.resume(coming)
    assert into.are_intact() and out.are_intact()
