"""Test the arguments of regions: valid and invalid names, policies and devices."""

import pytest
from region_memory import buffer_in, owned

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, InvalidStateError, OutOfDeviceMemoryError, UnknownTagError

pytestmark = pytest.mark.each_python

MIB = 1 << 20


# --- names ----------------------------------------------------------------------------------------

NAMES = [
    "a",
    "kv_cache",
    " leading and trailing ",
    "weights/0 [x] {y} %s %n \\ \" ' ` $HOME",
    "line\nbreak\ttab\x1b[31m\x7f",
    "Gewichte für Köln, naïve ﬁ",
    "重み",
    "веса",
    "أوزان",
    "משקולות",
    "वज़न",
    "น้ำหนัก",
    "e\u0301 is not \u00e9",
    "👩‍🔬🧪",
    "\U0010ffff\ufeff\u200b",
    "0",
    "None",
]


@pytest.mark.parametrize("text", NAMES)
def test_a_tag_in_any_script(sim, tag, text):
    name = f"{text} {tag()}"
    tag.names.append(name)
    block = buffer_in(name, backup="host")
    sim.write(block.address, text.encode())
    report = memsaver.pause(name)
    assert report.changed == (name,)
    assert memsaver.state(name) == "paused"
    with pytest.raises(InvalidStateError) as caught:
        with memsaver.region(name):
            pass
    assert caught.value.tag == name
    memsaver.resume(name)
    assert [row.tag for row in memsaver.stats()[name]] == [name]
    assert sim.read(block.address, len(text.encode())) == text.encode()


def test_tags_that_look_alike_are_different(sim, tag):
    base = tag()
    names = [f"{base}é", f"{base}e\u0301", f"{base}é ", f"{base}É"]
    tag.names.extend(names)
    blocks = [buffer_in(name) for name in names]
    assert [owned(name) for name in names] == [[b.address] for b in blocks]


def test_a_tag_of_a_million_characters(sim, tag):
    name = tag() + "ä" * 1_000_000
    tag.names.append(name)
    block = buffer_in(name, backup="host")
    sim.write(block.address, b"kept")
    memsaver.pause(name)
    assert memsaver.stats()[name][0].tag == name
    with pytest.raises(InvalidStateError) as caught:
        with memsaver.region(name):
            pass
    assert len(str(caught.value)) < 1024
    assert name.startswith(caught.value.tag) and len(caught.value.tag.encode()) < 128
    with pytest.raises(UnknownTagError) as caught:
        memsaver.resume(name + "x")
    assert len(str(caught.value)) < 3000
    with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(OutOfDeviceMemoryError) as caught:
            memsaver.resume(name)
    assert len(str(caught.value)) < 1100
    memsaver.resume(name)
    assert sim.read(block.address, 4) == b"kept"


@pytest.mark.parametrize("name", ["", "\0", "a\0b", None, 7, b"weights", ["weights"], object()])
def test_what_cannot_be_a_tag(sim, name):
    before = memsaver.stats()
    for call in (
        memsaver.region,
        memsaver.pause,
        memsaver.resume,
        memsaver.state,
        memsaver.ranges,
    ):
        with pytest.raises(ConfigError, match="tag"):
            call(name)
    assert memsaver.stats() == before
    assert _C.region_depth() == 0


def test_a_tag_that_is_no_text_is_refused(sim):
    # A lone surrogate: a str that has no UTF-8 encoding.
    before = memsaver.stats()
    with pytest.raises(ConfigError, match="tag"):
        with memsaver.region("\ud800"):
            pass
    with pytest.raises(ConfigError, match="tag"):
        memsaver.pause("\ud800")
    assert memsaver.stats() == before


def test_a_subclass_of_str_is_a_tag(sim, tag):
    class Name(str):
        pass

    name = tag()
    block = buffer_in(Name(name))
    assert owned(name) == [block.address]
    assert memsaver.state(Name(name)) == "mapped"


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
    assert policy() is memsaver.Backup.NONE
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
        with memsaver.region(name, backup=memsaver.Backup.NONE):
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
