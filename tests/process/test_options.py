"""Tests options from the environment and from `configure`, with valid and invalid values."""

import dataclasses
import inspect
import re

import pytest
from process_code import code
from repository import ROOT

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError

NONSENSE = [
    "",
    "many",
    "-1",
    "1.5GiB",
    "64 MiB",
    "64MB",
    "0",
    "1MiB",
    "2GiB",
    "99999999999999999999",
]


@pytest.mark.parametrize(
    "option, value",
    [
        *(("share_bytes", value) for value in [*NONSENSE, "0x200000", "18446744073709551615GiB"]),
        *(("slab_bytes", value) for value in ("many", "1MiB", "2GiB")),
    ],
)
def test_an_invalid_environment_is_an_error_before_anything_is_done(run_python, option, value):
    variable = f"MEMSAVER_{option.upper()}"
    run_python(
        code(
            f"""
            with memsaver.region("t"):
                message = raises(memsaver.ConfigError, simulator.buffer, 4096)
                assert {option!r} in message and {variable!r} in message, message
                assert "from 2 MiB to 1 GiB" in message
            assert memsaver.ranges("t") == () and sim.counts().handles == 0
            assert sim.counts().reservations == 0
            for call in (memsaver.pause, memsaver.resume):
                assert {variable!r} in raises(memsaver.ConfigError, call, "t")
            assert memsaver.state("t") == "mapped"
            memsaver.configure({option}="64MiB")  # counts more than the environment
            use()
            """
        ),
        **{variable: value},
    )


def test_options_from_the_environment(run_python):
    run_python(
        code(
            """
            assert (_C.option("share_bytes"), _C.option("slab_bytes")) == ("4194304", "1073741824")
            use()
            """
        ),
        MEMSAVER_SHARE_BYTES="4096KiB",
        MEMSAVER_SLAB_BYTES="1GiB",
    )


@pytest.mark.parametrize("value", [*NONSENSE, 1.5, -1, 0, 1 << 40, True, b"64MiB"])
def test_configure_rejects_invalid_values(options, value):
    options(share_bytes="64MiB")
    with pytest.raises(ConfigError, match="share_bytes") as caught:
        memsaver.configure(share_bytes=value)
    assert caught.value.status == "BAD_CONFIG"
    assert "MEMSAVER_SHARE_BYTES" in str(caught.value)
    assert _C.option("share_bytes") == str(64 << 20)


@pytest.mark.each_python
def test_configure_names_the_options(options):
    options(share_bytes="64MiB")
    with pytest.raises(ConfigError, match=r"no option 'shared_bytes'.*'share_bytes', 'slab_bytes'"):
        memsaver.configure(share_bytes="128MiB", shared_bytes=1)
    with pytest.raises(ConfigError, match=r"did you mean 'host_bytes'\?"):
        memsaver.configure(host_byte=3)
    assert _C.option("share_bytes") == str(64 << 20)  # an unknown name sets nothing
    with pytest.raises(ConfigError):
        memsaver.configure(slab_bytes="no", share_bytes="128MiB")
    assert _C.option("share_bytes") == str(128 << 20)  # options before the invalid one are set
    memsaver.configure()


def test_options_are_those_of_the_core(options):
    table = (ROOT / "csrc/core/platform/options.h").read_text()
    rows = re.findall(r"^  X\((\w+), k(\w+),", table, re.M)
    kinds = {
        "Size": "int",
        "Flag": "bool",
        "Path": "str",
        "Device": "int | str",
        "Seconds": "float",
    }
    assert {field.name: field.type for field in dataclasses.fields(memsaver.Options)} == {
        name: kinds[kind] for name, kind in rows
    }
    parameters = inspect.signature(memsaver.configure).parameters
    assert list(parameters) == [*(name for name, _ in rows), "_unknown"]
    options(share_bytes="64MiB", poison=True)
    now = memsaver.options()
    assert now.share_bytes == 64 << 20 and now.poison is True and now.disk_dir == ""
    memsaver.configure(**dataclasses.asdict(now))
    assert memsaver.options() == now
    memsaver.configure(poison=None)
    assert memsaver.options().poison is True


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        *[(True, "on"), (1, "on"), ("on", "on"), ("TRUE", "on"), ("1", "on")],
        *[(False, "off"), (0, "off"), ("off", "off"), ("False", "off"), ("0", "off")],
    ],
)
def test_a_flag_accepts_every_spelling(options, run_python, given, kept):
    options(fingerprints=kept == "off")
    options(fingerprints=given)
    assert _C.option("fingerprints") == kept


@pytest.mark.parametrize("value", [2, "", "yes", "o", "onn", " on", 1.0, b"on", "on\0"])
def test_a_flag_rejects_invalid_values(options, value):
    options(fingerprints=False)
    with pytest.raises(ConfigError, match="fingerprints"):
        memsaver.configure(fingerprints=value)
    assert _C.option("fingerprints") == "off"


def test_a_directory_is_stored_as_an_absolute_path(options, tmp_path, monkeypatch):
    assert _C.option("disk_dir") == ""
    options(disk_dir=tmp_path)
    assert _C.option("disk_dir") == str(tmp_path)
    odd = tmp_path / "with space, \u00fc and \udcff"
    odd.mkdir()
    monkeypatch.chdir(tmp_path)
    options(disk_dir=odd.name)
    monkeypatch.chdir("/")  # the name was resolved before
    assert _C.option("disk_dir") == str(odd)
    options(disk_dir="")
    assert _C.option("disk_dir") == ""


def test_an_invalid_backup_directory_is_rejected(options, tmp_path):
    options(disk_dir=tmp_path)
    (tmp_path / "file").write_text("")
    for value, reason in (
        (tmp_path / "missing", "No such file"),
        (tmp_path / "file", "Not a directory"),
        ("/proc/self/nothing", "No such file"),
        (f"{tmp_path}\0", "NUL"),
        (1, "No such file"),
        (b"/tmp", "No such file"),
    ):
        with pytest.raises(ConfigError, match=reason) as caught:
            memsaver.configure(disk_dir=value)
        assert "disk_dir" in str(caught.value)
    assert _C.option("disk_dir") == str(tmp_path)


def test_a_directory_that_cannot_be_written_to_is_refused(run_python, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    run_python(
        code(
            f"""
            import os
            if os.geteuid() == 0:  # whom no mode stops
                os.seteuid(65534)
            message = raises(memsaver.ConfigError, memsaver.configure, disk_dir={str(locked)!r})
            assert "disk_dir" in message and "Permission denied" in message, message
            """
        )
    )


def test_every_kind_of_option_from_the_environment(run_python, tmp_path):
    run_python(
        code(
            f"""
            names = ("host_bytes", "fingerprints", "disk_dir")
            assert [_C.option(name) for name in names] == ["1073741824", "off", {str(tmp_path)!r}]
            memsaver.configure(host_bytes=0, fingerprints=True, disk_dir="")
            assert [_C.option(name) for name in names] == ["0", "on", ""]
            """
        ),
        MEMSAVER_HOST_BYTES="1GiB",
        MEMSAVER_FINGERPRINTS="0",
        MEMSAVER_DISK_DIR=tmp_path,
    )


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("MEMSAVER_HOST_BYTES", "1152921504606846977"),  # 2**60 + 1
        ("MEMSAVER_FINGERPRINTS", "maybe"),
        ("MEMSAVER_DISK_DIR", "/nowhere"),
    ],
)
def test_nonsense_of_every_kind_in_the_environment(run_python, variable, value):
    run_python(
        code(
            f"""
            with memsaver.region("t"):
                message = raises(memsaver.ConfigError, simulator.buffer, 4096)
            assert {variable!r} in message and {value!r} in message, message
            assert sim.counts().handles == 0
            """
        ),
        **{variable: value},
    )


@pytest.mark.parametrize(
    "value, text",
    [
        (0, "0"),
        (1.5, "1.5"),
        ("0.001", "0.001"),
        ("03.50", "3.5"),
        (3600, "3600"),
        (1 / 3, "0.333"),
        (1e-6, "0.001"),
    ],
)
def test_seconds(options, value, text):
    options(importer_seconds=value)
    assert _C.option("importer_seconds") == text
    assert memsaver.options().importer_seconds == float(text)


@pytest.mark.parametrize(
    "value", ["", "-1", "1e3", "1s", ".5", "5.", "1.2345", 3601, "9" * 20, "1.2.3"]
)
def test_invalid_seconds(options, value):
    options(importer_seconds=2)
    with pytest.raises(ConfigError, match="from 0 to 3600"):
        memsaver.configure(importer_seconds=value)
    assert _C.option("importer_seconds") == "2"
