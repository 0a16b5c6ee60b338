"""Tests the errors of driver calls, and failures to free memory. `make faults` fails each call."""

import pytest
from driver_faults import held, reported

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

pytestmark = pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")

MIB = 1 << 20


# --- one call fails -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "transition, call",
    [
        ("pause", "cuMemUnmap"),
        ("pause", "cuLaunchKernel"),
        ("resume", "cuMemMap"),
        ("resume", "cuMemSetAccess"),
        ("swap", "cuEventRecord"),
    ],
)
def test_the_error_of_a_driver_call_names_the_tags_and_the_bytes(
    sim, tag, make_blocks, transition, call
):
    out, into = tag("out"), tag("into")
    blocks = [make_blocks(name, [2 * MIB], backup="host")[0] for name in (out, into)]
    memsaver.pause(into)
    run, names = {
        "pause": (lambda: memsaver.pause(out), {out}),
        "resume": (lambda: memsaver.resume(into), {into}),
        "swap": (lambda: memsaver.swap(out=out, into=into), {out, into}),
    }[transition]
    with simulator.fault(call, 999, times=0), pytest.raises(memsaver.DriverError) as caught:
        run()
    text = str(caught.value)
    assert text.startswith(f"{call} failed with CUDA_ERROR_UNKNOWN (999)")
    assert all(f"'{name}'" in text for name in names) and ", 2 MiB, failed" in text
    assert text.endswith("failed and was undone: it can be tried again")
    run()
    memsaver.resume()
    assert all(block.is_intact() for block in blocks)


# --- frees that failed ----------------------------------------------------------------------------


def test_a_free_whose_memory_could_not_be_unmapped(sim, tag, make_blocks):
    name = tag()
    kept, gone = make_blocks(name, [64 * MIB, 64 * MIB], backup="host")
    where = gone.address
    with sim.fault("cuMemUnmap", times=0):
        del gone
        assert [r.address for r in memsaver.ranges(name)] == [kept.address]
        assert held([name]) == 128 * MIB and reported() == sim.tag_bytes()
    with pytest.raises(memsaver.ConfigError, match="freed twice"):
        _C.free(where)
    (again,) = make_blocks(name, [64 * MIB])
    assert held([name]) == 128 * MIB and reported() == sim.tag_bytes()
    assert kept.is_intact() and again.is_intact()
    with sim.fault("cuMemUnmap", times=0):
        del again
    memsaver.pause(name)
    assert held([name]) == 0 and reported() == sim.tag_bytes()
    memsaver.resume(name)
    assert kept.is_intact()
    assert held([name]) == 64 * MIB and reported() == sim.tag_bytes()


def test_a_free_that_fails_is_a_warning(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [64 * MIB])
    with sim.fault("cuMemUnmap", times=0):
        with pytest.warns(memsaver.MemsaverWarning, match="could not be released yet") as caught:
            del block
    assert all(name in str(w.message) or "cuMemUnmap" in str(w.message) for w in caught)


def test_refused_releases_are_counted_and_retried(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [64 * MIB], backup="pageable")
    assert memsaver.stats().deferred == memsaver.Deferred()
    for call in ("cuMemRelease", "cuMemHostUnregister"):
        with sim.fault(call, times=0):
            with pytest.warns(memsaver.MemsaverWarning, match="stay allocated until the next"):
                memsaver.pause(name)
            deferred = memsaver.stats().deferred
            assert deferred.objects > 0
            if call == "cuMemRelease":
                assert deferred.device_bytes == sim.tag_bytes() > 0 == deferred.host_bytes
            else:
                assert 0 < deferred.host_bytes <= memsaver.stats().host_bytes
                assert deferred.device_bytes == 0
        memsaver.resume(name)
        assert memsaver.stats().deferred == memsaver.Deferred()
        assert all(block.is_intact() for block in blocks) and reported() == sim.tag_bytes()
        blocks[0].fill(7)
