"""Tests that tags keep their states and contents if a swap fails. `make faults` fails each call."""

import contextlib

import pytest
from driver_faults import PAGE, Fixed, reported, states

import memsaver

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20
OUT = [4096, PAGE + 512, 100_000]


@pytest.mark.parametrize("kind", ["pageable", "disk"])
def test_a_swap_without_host_memory_for_its_copies_changes_nothing(
    sim, tag, make_blocks, options, tmp_path, kind
):
    """The copies of the resumed tag and the rollback both need a buffer in host memory."""
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
def test_a_shortage_on_one_device_whose_rollback_fails_on_another_is_reported(
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
        assert memsaver.state("out") == memsaver.state("into") == "paused"
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
@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_swap_of_large_blocks_that_fails_on_its_way(
    sim, tag, make_blocks, options, tmp_path, call, times, kind
):
    # Each block has its own backup chunk, which is saved copy chunk by copy chunk; some are saved
    # before the failure, and if the rollback fails, transferred pages are restored from them.
    options(disk_dir=str(tmp_path))
    going, coming = tag("out"), tag("into")
    out = Fixed(sim, make_blocks(going, [66 * MIB, 65 * MIB], backup=kind))
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
