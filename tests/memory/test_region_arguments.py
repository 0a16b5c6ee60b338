"""Tests the arguments of regions: policies and devices.

The module test_tag_names.py tests regions' names.
"""

import pytest
from region_memory import buffer_in

import memsaver
from memsaver import simulator
from memsaver.errors import ConfigError, UnknownTagError

pytestmark = pytest.mark.each_python

MIB = 1 << 20


# --- policies -------------------------------------------------------------------------------------


@pytest.mark.parametrize("backup", ["disk?", "", "HOST", 1, object(), b"host"])
def test_an_unknown_backup_is_rejected(sim, tag, backup):
    name = tag()
    with pytest.raises(ConfigError, match="'none', 'host'"):
        memsaver.region(name, backup=backup)
    with pytest.raises(UnknownTagError):
        memsaver.state(name)  # the rejected region has not created the tag
    buffer_in(name)
    with pytest.raises(ConfigError, match="'none', 'host'"):
        memsaver.pause(name, backup=backup)
    assert memsaver.state(name) == "mapped"


def test_the_last_region_that_passes_a_backup_decides(sim, tag):
    name = tag()

    def policy():
        return memsaver.stats()[name][0].backup

    with memsaver.region(name):
        first = simulator.buffer(4096)
    assert policy() == "none"
    with memsaver.region(name, backup="host"):
        second = simulator.buffer(4096)
    assert policy() == "host"
    with memsaver.region(name):
        pass
    assert policy() == "host"
    sim.write(first.address, b"first")
    sim.write(second.address, b"second")
    memsaver.pause(name)
    memsaver.resume(name)
    assert sim.read(first.address, 5) == b"first"
    assert sim.read(second.address, 6) == b"second"
    with pytest.warns(memsaver.UsageWarning, match="withdraws the backup"):
        with memsaver.region(name, backup="none"):
            pass
    assert policy() == "none"
    memsaver.pause(name)
    memsaver.resume(name)
    assert sim.read(first.address, 5) == bytes(5)
    assert sim.read(second.address, 6) == bytes(6)


def test_entering_a_region_names_the_tag(sim, tag):
    name = tag()
    with pytest.raises(UnknownTagError):
        memsaver.state(name)
    with memsaver.region(name, backup="host"):
        pass
    assert memsaver.state(name) == "mapped"
    row = memsaver.stats()[name][0]
    assert (row.device, row.allocations, row.resident_bytes, row.backup) == (-1, 0, 0, "host")
    report = memsaver.pause(name)
    assert report.changed == (name,) and report.bytes == 0
    memsaver.resume(name)


# --- devices --------------------------------------------------------------------------------------


def test_a_region_on_a_second_device(run_python):
    run_python(
        """
        import memsaver
        from simulated_driver import Simulator
        from memsaver import simulator

        sim = Simulator()
        sim.start(0), sim.start(1)
        free, total = memsaver.device_memory(1)
        with memsaver.region("t", backup="host", device=[0, 1]):
            first = simulator.buffer(4 << 20, device=1)
            both = simulator.buffer(4 << 20, device=0)
        assert [r.address for r in memsaver.ranges("t", 1)] == [first.address]
        assert [r.address for r in memsaver.ranges("t", 0)] == [both.address]
        assert len(memsaver.ranges("t")) == 2
        rows = {row.device: row for row in memsaver.stats()["t"]}
        assert rows[0].resident_bytes == sim.tag_bytes(0) == 4 << 20
        assert rows[1].resident_bytes == sim.tag_bytes(1) == 4 << 20
        assert memsaver.device_memory(1) == (free - (4 << 20), 1 << 30)
        try:
            with memsaver.region("t"):
                simulator.buffer(1, device=2)
        except memsaver.ConfigError as error:
            assert "no device 2" in str(error), error
        else:
            raise AssertionError("no device 2, and no error")
        """,
        MEMSAVER_SIM_DEVICES=2,
        MEMSAVER_SIM_MEMORY="1GiB",
    )


def test_a_device_that_does_not_exist(sim, tag):
    with memsaver.region(tag()):
        with pytest.raises(ConfigError, match="there is no device 7: this process sees 1"):
            simulator.buffer(4096, device=7)
    with pytest.raises(ConfigError, match="there is no device 7"):
        memsaver.device_memory(7)
