"""Tests `memsaver bench`: its measurements, output, content checks and clean-up."""

import dataclasses
import io
import json
import os
import sys
from types import SimpleNamespace

import pytest
from rich.console import Console
from typer.testing import CliRunner
from warm_processes import run_command

import memsaver
from memsaver._runtime.native import LIBRARY_DIR
from memsaver.cli import bench
from memsaver.cli.app import app
from memsaver.cli.bare_driver import BareDriver, BareMemory, PinnedMemory
from memsaver.cli.measurements import Measured, cycles, machine, measure_machine
from memsaver.cli.measurements.figures import Figure, Limits
from memsaver.errors import ConfigError, DriverError, MemsaverError, OutOfDeviceMemoryError

MIB = 1 << 20
LEAST = 32 * MIB  # the smallest measured size

NAMES = [
    "bus, to the host",
    "bus, to the device",
    "bus, both at once",
    "driver, create",
    "driver, map",
    "driver, unmap",
    "driver, release",
    "pause, none",
    "resume, none",
    "pause, host, first",
    "pause, host, changed",
    "pause, host, unchanged",
    "resume, host",
]


def run_bench(*arguments, **env):
    """Run the command in a separate process, on the simulated driver, with little memory."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    command = [sys.executable, "-m", "memsaver", "bench", "--size", "32MiB", "--rounds", "1"]
    environment = {**kept, "PYTHONPATH": str(LIBRARY_DIR.parent), "MEMSAVER_DRIVER": "sim", **env}
    command += arguments
    return run_command(command, env=environment, capture_output=True, text=True, timeout=100)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def printed():
    """Return the JSON output of one run."""
    done = run_bench("--json")
    assert (done.returncode, done.stderr) == (0, "")
    return json.loads(done.stdout)


def test_the_figures_as_json(printed):
    assert list(printed) == [
        "schema",
        "memsaver",
        "device",
        "name",
        "driver",
        "simulated",
        "size",
        "saved",
        "rounds",
        "figures",
        "notes",
    ]
    assert (printed["schema"], printed["memsaver"]) == (1, memsaver.__version__)
    assert (printed["simulated"], printed["size"], printed["saved"]) == (True, LEAST, LEAST)
    assert [row["name"] for row in printed["figures"]] == NAMES
    for row in printed["figures"]:
        assert list(row) == [
            "name",
            "group",
            "title",
            "bytes",
            "seconds",
            "limit",
            "limit_seconds",
            "median_seconds",
            "bytes_per_second",
            "of_limit_percent",
        ]
        assert min(row["seconds"]) > 0 and row["bytes"] in (LEAST, 2 * LEAST)
        ours = not row["name"].startswith(("bus", "driver"))
        assert (row["limit_seconds"] is not None) == ours == bool(row["limit"])


def test_the_command_prints_a_table():
    done = run_bench(COLUMNS="80")
    assert (done.returncode, done.stderr) == (0, "")
    check_look(done.stdout, 80)
    assert "32 MiB; medians of 1, the first pause once" in done.stdout
    assert "driver, pieces of 32 MiB" in done.stdout
    assert "do not predict a GPU's speed." in " ".join(done.stdout.split())


def check_look(text, columns):
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text and "\x1b" not in text
    for group in ("bus, pinned memory", "driver, pieces of ", "no backup", "backup on the"):
        assert f" {group}" in text
    assert text.count(" %") == 6


@pytest.fixture
def draw(printed):
    """Draw results like those of an H200: `draw(columns=80)`."""
    keys = [field.name for field in dataclasses.fields(Figure)]
    figures = [Figure(**{key: row[key] for key in keys}) for row in printed["figures"]]
    big = [
        dataclasses.replace(
            figure,
            bytes=64 << 30,
            seconds=(5.3777,),
            limit_seconds=figure.limit_seconds and 1.2345,
        )
        for figure in figures
    ]
    name, notes = "NVIDIA GH200 96GB HBM3", ["something to know"]
    measured = Measured(0, name, 13000, False, 64 << 30, 16 << 30, 5, big, notes)

    def go(**named):
        console = Console(file=io.StringIO(), highlight=False, **named)
        bench.draw(console, measured)
        return console.file.getvalue()

    return go


@pytest.mark.parametrize("columns", [50, 60, 80, 140])
def test_the_table_fits_the_terminal(draw, columns):
    text = draw(width=columns)
    check_look(text, columns)
    assert "5,377.7" in text and "11.9" in text and "23 %" in text
    assert "64 GiB, 16 GiB with a backup; medians of 5" in text and "something to know" in text
    assert "simulated" not in text


def test_without_a_driver_bench_is_an_error():
    done = run_bench(MEMSAVER_DRIVER="/nonexistent.so")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("memsaver bench: ") and "/nonexistent.so" in done.stderr
    assert "Traceback" not in done.stderr


# --- measurements ---------------------------------------------------------------------------------


def test_measuring_leaks_nothing(sim):
    """Measuring leaks no handles, mappings, pinned memory or device memory."""
    measure_machine(LEAST, 1)  # the tags' addresses stay reserved
    before, free = sim.counts(), memsaver.device_memory()[0]
    told = []
    measured = measure_machine(LEAST, 2, telling=told.append)
    assert [figure.name for figure in measured.figures] == NAMES
    assert [len(figure.seconds) for figure in measured.figures] == [2] * 9 + [1, 2, 2, 5]
    assert measured.notes == [] and len(told) == 5
    assert memsaver.device_memory()[0] == free
    after = sim.counts()
    for kind in ("handles", "mappings", "reservations", "pinned_bytes", "streams", "events"):
        assert getattr(after, kind) == getattr(before, kind)


@pytest.mark.long
def test_a_driver_that_fails_leaves_nothing(sim):
    """A fault in the first or last call of a kind, made by the benchmark or by memsaver, leaks
    nothing.
    """
    calls = ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemHostAlloc", "cuMemHostRegister"]
    before = {call: sim.calls(call) for call in calls}
    measure_machine(LEAST, 1)
    counted = {call: sim.calls(call) - before[call] for call in calls}
    assert min(counted.values()) > 0
    idle = sim.counts()
    for call in calls:
        for nth in {1, counted[call]}:
            with sim.fault(call, 2, nth=nth), pytest.raises(MemsaverError):
                measure_machine(LEAST, 1)
            left = sim.counts()
            for kind in ("handles", "mappings", "reservations", "pinned_bytes", "streams"):
                assert getattr(left, kind) <= getattr(idle, kind), f"{kind} after {call} {nth}"


def test_poisoned_memory_is_measured():
    done = run_bench("--size", "64MiB", "--rounds", "1", MEMSAVER_POISON="1")
    assert done.returncode == 0, done.stderr


def test_other_contents_are_an_error(sim):
    with BareDriver().context(0):
        tag = cycles.CycledTag(BareDriver(), 0, LEAST, "host", [])
        try:
            tag.fill()
            tag.pause()
            assert tag.resume() > 0
            tag.pause()
            memsaver.resume()
            sim.write(tag._addresses[5], b"?")
            with pytest.raises(MemsaverError, match="resumed with different contents"):
                tag.resume()  # finds the tag already mapped
        finally:
            tag.close()


def test_memory_that_is_not_released_is_reported(sim, monkeypatch):
    doubts = []
    with BareDriver().context(0):
        tag = cycles.CycledTag(BareDriver(), 0, LEAST, "none", doubts)
        try:
            tag.fill()
            tag.pause()
            assert doubts == []
            tag.resume()
            real = memsaver.pause

            def pause_beside_another(name):
                real(name)
                sim.occupy(LEAST)

            monkeypatch.setattr(memsaver, "pause", pause_beside_another)
            tag.pause()
            assert len(doubts) == 1 and "another process" in doubts[0]
            sim.occupy(0)
        finally:
            tag.close()


def test_every_fill_changes_every_block(sim):
    with BareDriver().context(0):
        tag = cycles.CycledTag(BareDriver(), 0, LEAST, "none", [])
        try:
            seen = []
            for _ in range(3):
                tag.fill()
                seen.append([sim.read(address, 1) for address in tag._addresses])
            for index in range(cycles.BLOCKS):
                assert len({values[index] for values in seen}) == 3
        finally:
            tag.close()


def test_sizes_fit_the_free_memory(sim):
    sim.occupy(memsaver.device_memory()[0] - 250 * MIB)
    assert machine._size(None, 0, False) == 192 * MIB  # four fifths, in steps of 32 MiB
    assert machine._size(200 * MIB, 0, False) == 192 * MIB
    with pytest.raises(OutOfDeviceMemoryError) as caught:
        machine._size(256 * MIB, 0, False)
    assert (caught.value.needed, caught.value.free) == (256 * MIB, 250 * MIB)
    sim.occupy(1 << 50)
    with pytest.raises(OutOfDeviceMemoryError):
        machine._size(None, 0, False)
    sim.occupy(0)
    assert machine._size(None, 0, False) == 16 << 30
    with pytest.raises(ConfigError):
        machine._size(MIB, 0, False)


def test_without_host_memory_no_backup_is_measured(sim, options):
    options(host_bytes="20MiB")
    measured = measure_machine(LEAST, 1)
    assert measured.saved == 0 and [f.name for f in measured.figures] == NAMES[:9]
    assert measured.notes == ["no backup is measured: the option host_bytes allows 20 MiB"]


GIB = 1 << 30


@pytest.mark.parametrize(
    ("size", "system", "option", "saved", "says"),
    [
        (32 * MIB, 5 * GIB // 2, 0, 32 * MIB, None),  # its copies pin 32 MiB, not 2 GiB
        (16 * GIB, 5 * GIB // 2, 0, 256 * MIB, "2.5 GiB of host memory are available"),
        (16 * GIB, 34 * GIB, 0, 16 * GIB, None),
        (16 * GIB, 34 * GIB, 8 * GIB, 8 * GIB, "the option host_bytes allows 8 GiB"),
        (16 * GIB, 10 * GIB, 12 * GIB, 4 * GIB, "10 GiB of host memory are available"),
        (GIB, 0, 0, 0, "no backup is measured: 0 bytes of host memory"),
        (GIB, (1 << 64) - 1, 0, GIB, None),  # the system does not report it
    ],
)
def test_measured_backups_fit_the_host(monkeypatch, size, system, option, saved, says):
    available = min(system, option or system)  # as in the library
    native = SimpleNamespace(host_memory=lambda: (0, available), option=lambda name: str(option))
    monkeypatch.setattr(machine, "_C", native)
    got, notes = machine._saved(size)
    assert got == saved and len(notes) == (says is not None)
    assert says is None or says in notes[0]


def test_without_fingerprints_nothing_is_unchanged(sim, options):
    options(fingerprints=False)
    measured = measure_machine(LEAST, 1)
    assert [f.name for f in measured.figures] == [n for n in NAMES if "unchanged" not in n]


def test_limits_are_scaled_to_the_bytes():
    out = Figure("out", "bus", "copy", 100, (3.0, 1.0, 2.0))
    also = Figure("unmap", "driver", "unmap", 50, (0.5,))
    assert out.median_seconds == 2 and out.bytes_per_second == 50 and out.of_limit_percent is None
    limits = Limits([out, also])
    assert limits.seconds(200, "out") == 4
    assert limits.seconds(200, "out", "unmap") == 6
    ours = Figure("pause", "ours", "pause", 200, (5.0,), "copy", limits.seconds(200, "out"))
    assert ours.of_limit_percent == 80


# --- the driver's bare calls ----------------------------------------------------------------------


def test_bare_memory_comes_and_goes(sim):
    driver = BareDriver()
    before, start = sim.counts(), sim.physical()
    memory = BareMemory(driver, (1 << 30) + 1)
    assert memory.bytes == (1 << 30) + 2 * MIB and sim.physical() == start
    memory.resume()
    assert sim.physical() == start + memory.bytes
    with driver.context(0):
        driver.fill(memory.address + memory.bytes - MIB, 7, MIB)
        assert driver.read(memory.address + memory.bytes - 3, 3) == b"\7\7\7"
    memory.pause()
    assert sim.physical() == start and not sim.accessible(memory.address)
    memory.resume()
    memory.close()
    after = sim.counts()
    assert (after.handles, after.reservations) == (before.handles, before.reservations)


def test_bare_memory_that_cannot_be_allocated_is_released(sim):
    memory = BareMemory(BareDriver(), 3 << 30)
    with sim.fault("cuMemCreate", 2, nth=3), pytest.raises(OutOfDeviceMemoryError) as caught:
        memory.resume()
    assert caught.value.call == "cuMemCreate" and "OUT_OF_MEMORY" in str(caught.value)
    assert sim.tag_bytes() == 0
    memory.resume()
    memory.close()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_bare_memory_that_is_mapped_in_part_is_released(sim, nth):
    before, start = sim.counts(), sim.physical()
    memory = BareMemory(BareDriver(), 3 << 30)  # three pieces
    with sim.fault("cuMemMap", 1, nth=nth), pytest.raises(DriverError) as caught:
        memory.resume()
    assert caught.value.call == "cuMemMap"
    memory.close()
    after = sim.counts()
    for kind in ("handles", "mappings", "reservations"):
        assert getattr(after, kind) == getattr(before, kind), kind
    assert sim.physical() == start


def test_copies_of_pinned_memory(sim):
    driver = BareDriver()
    memory = BareMemory(driver, 4 * MIB)
    memory.resume()
    with driver.context(0), driver.stream() as stream:
        host = PinnedMemory(driver, MIB)
        driver.fill(memory.address, 9, 2 * MIB)
        host.to_host(memory.address, MIB, stream)
        host.to_device(memory.address + 3 * MIB, MIB, stream)
        driver.call("cuStreamSynchronize", stream)
        assert driver.read(memory.address + 3 * MIB, MIB) == b"\x09" * MIB
        host.close()
    memory.close()
    assert sim.counts().pinned_bytes == 0


def test_a_call_that_does_not_exist():
    with pytest.raises(DriverError, match="has no cuNoSuchCall; update the driver"):
        BareDriver().call("cuNoSuchCall")


# --- the picture ----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_picture_is_written_in_the_requested_format(sim, tmp_path):
    for name, begins in (("bench.png", b"\x89PNG"), ("bench.svg", b"<?xml")):
        file = tmp_path / name
        arguments = ["bench", "--size", "32MiB", "--rounds", "1", "--picture", str(file)]
        done = CliRunner().invoke(app, arguments)
        assert (done.exit_code, done.stderr) == (0, "")
        assert done.stdout.endswith(f"picture: {file}\n")
        assert file.read_bytes().startswith(begins)


def test_a_picture_without_matplotlib(sim, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    done = CliRunner().invoke(app, ["bench", "--picture", "x.png"])
    assert (done.exit_code, done.stdout) == (2, "")
    assert "pip install 'memsaver[plot]'" in done.stderr
