"""Tests `memsaver doctor`'s findings about memsaver's options, and that the findings cover all
options."""

import json
import re
from dataclasses import fields

import pytest
from doctors import run_doctor
from repository import ROOT

import memsaver
from memsaver._runtime.native import _C
from memsaver._runtime.variables import KNOWN_VARIABLES, variable_of
from memsaver.errors import ConfigError


def test_options_and_where_they_are_from(tmp_path):
    done = run_doctor(
        "--json",
        MEMSAVER_SHARE_BYTES="256MiB",
        MEMSAVER_MARGIN_BYTES="lots",
        MEMSAVER_DISK_DIR=str(tmp_path / "missing"),
        MEMSAVER_POISON="1",
        MEMSAVER_HOSTBYTES="1GiB",
    )
    assert done.returncode == 1
    rows = {row["name"]: row for row in json.loads(done.stdout)["findings"]}
    share = rows["option share_bytes"]
    assert share["data"] == {"value": str(256 << 20), "source": "environment"}
    assert share["text"] == "256 MiB, from MEMSAVER_SHARE_BYTES"
    assert (
        rows["option margin_bytes"]["level"] == "bad"
        and "lots" in rows["option margin_bytes"]["text"]
    )
    assert rows["disk_dir"]["level"] == rows["option disk_dir"]["level"] == "bad"
    assert rows["option poison"]["level"] == "warned"
    assert rows["MEMSAVER_HOSTBYTES"]["advice"] == "did you mean MEMSAVER_HOST_BYTES?"
    assert rows["option slab_bytes"]["data"]["source"] == "default"


def test_every_option_and_variable_is_known():
    with pytest.raises(ConfigError) as caught:
        _C.option("")
    listed = re.findall(r"'(\w+)'", str(caught.value))
    assert {variable_of(name) for name in listed} <= KNOWN_VARIABLES
    assert sorted(listed) == sorted(field.name for field in fields(memsaver.Options))
    read = re.compile(r"""["'](MEMSAVER_[A-Z_]+)["']""")
    sources = [*(ROOT / "csrc").rglob("*.cpp"), *(ROOT / "csrc").rglob("*.h")]
    sources += [*(ROOT / "memsaver").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")]
    named = {name for path in sources for name in read.findall(path.read_text())}
    assert named <= KNOWN_VARIABLES


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("MEMSAVER_HOSTBYTES", "MEMSAVER_HOST_BYTES"),
        ("MEMSAVER_BACKUPS", "MEMSAVER_BACKUP"),
        ("MEMSAVER_DISK_DIRECTORY", "MEMSAVER_DISK_DIR"),
        ("MEMSAVER_OF_ANOTHER_PROGRAM", None),
        ("MEMSAVER_TOP", None),
    ],
)
def test_a_misspelt_variable_is_a_warning_at_import(run_python, variable, meant):
    told = run_python("import memsaver", **{variable: "0"}).stderr
    warning = (
        f"UsageWarning: the environment variable {variable} has no effect; did you mean {meant}?"
    )
    assert warning in told if meant else not told
