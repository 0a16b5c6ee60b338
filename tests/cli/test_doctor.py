"""Tests the command `memsaver doctor`: its JSON, its layout, and the absence of side effects."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from doctors import run_doctor
from repository import ROOT
from typer.testing import CliRunner

import memsaver
from memsaver.cli import checks
from memsaver.cli.app import app
from memsaver.cli.checks.findings import absent, warned

# The console script's code, so that it can be tested in a tree where the script is not installed.
_SCRIPT = "import sys; from memsaver.cli import main; sys.exit(main())"
COMMANDS = [("-m", "memsaver"), ("-c", _SCRIPT)]


def test_the_findings_as_json():
    done = run_doctor("--json")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert list(found) == ["schema", "memsaver", "status", "counts", "findings"]
    assert (found["schema"], found["memsaver"]) == (1, memsaver.__version__)
    assert found["status"] == "warned"  # because of the simulated driver
    assert list(found["counts"]) == ["good", "absent", "warned", "bad"]
    assert sum(found["counts"].values()) == len(found["findings"])
    for row in found["findings"]:
        assert list(row) == ["subject", "name", "level", "text", "advice", "data"]
        assert row["level"] in found["counts"] and row["name"] and row["text"]
        assert row["level"] in ("good", "absent") or row["advice"], row
        assert "could not be checked" not in row["text"]
    names = [row["name"] for row in found["findings"]]
    assert len(set(names)) == len(names)
    assert {row["subject"] for row in found["findings"]} == set(checks.SUBJECTS)
    by_name = {row["name"]: row for row in found["findings"]}
    assert by_name["driver"]["data"]["simulated"] is True
    assert by_name["device 0"]["data"]["bytes"] == 80 << 30
    assert by_name["device 0 VMM"]["data"] == {"supported": True}
    assert by_name["host memory budget"]["data"]["bytes"] > 0
    assert by_name["option share_bytes"]["data"] == {"value": str(512 << 20), "source": "default"}


def test_without_a_driver_the_rest_is_still_checked():
    done = run_doctor("--json", MEMSAVER_DRIVER="/nonexistent.so")
    assert (done.returncode, done.stderr) == (1, "")
    found = json.loads(done.stdout)
    bad = [row for row in found["findings"] if row["level"] == "bad"]
    assert [row["name"] for row in bad] == ["driver"] and found["status"] == "bad"
    assert "/nonexistent.so" in bad[0]["text"] and "MEMSAVER_DRIVER=sim" in bad[0]["advice"]
    assert {row["subject"] for row in found["findings"]} == set(checks.SUBJECTS) - {"devices"}


def test_doctor_works_in_an_empty_environment():
    script = Path(sys.executable).with_name("memsaver")
    command = [script] if script.exists() else [sys.executable, "-m", "memsaver"]
    done = subprocess.run(
        [*command, "doctor"], env={}, cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode in (0, 1) and done.stderr == ""
    assert "NCCL_GRAPH_REGISTER" in done.stdout and re.search(r"\d+ good", done.stdout)
    assert "could not be checked" not in done.stdout


@pytest.mark.parametrize("columns", [50, 80, 140])
def test_the_report_fits_the_terminal(columns, tmp_path, sim, plain):
    missing = tmp_path / ("a-rather-long-name-" * 6) / "lib.so"
    env = {"LD_PRELOAD": str(missing), "COLUMNS": str(columns)}
    done = CliRunner().invoke(app, ["doctor"], env=env)
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= columns
    assert "…" not in done.stdout and "\x1b" not in done.stdout
    for subject in checks.SUBJECTS:
        assert subject in lines
    assert any(re.match(" ✓ device 0 VMM[ :]", line) for line in lines)
    assert any(re.match(" - vLLM[ :] *not installed", line) for line in lines)
    assert any(re.match(" ! driver[ :]", line) for line in lines)
    assert "→ unset MEMSAVER_DRIVER to use a GPU" in done.stdout
    assert "a-rather-long-name-" in done.stdout
    assert re.fullmatch(r"\d+ good, \d+ absent, \d+ warned, 0 bad", lines[-1])


def test_bad_findings_are_repeated_at_the_end():
    done = run_doctor(MEMSAVER_DRIVER="/nonexistent.so", MEMSAVER_SHARE_BYTES="lots")
    assert done.returncode == 1
    assert done.stdout.splitlines()[-1].endswith(" 2 bad: driver, option share_bytes")


@pytest.mark.parametrize("without", [None, "1"])
def test_colours_follow_the_users_settings(sim, plain, without):
    done = CliRunner().invoke(
        app, ["doctor"], color=True, env={"FORCE_COLOR": "1", "NO_COLOR": without}
    )
    assert bool(re.search(r"\x1b\[[0-9;]*3[0-9]", done.stdout)) is (without is None)


@pytest.mark.parametrize("command", COMMANDS, ids=["module", "console script"])
def test_a_path_beyond_the_outputs_encoding_is_escaped(command, tmp_path):
    folder = tmp_path / "é"
    folder.mkdir()
    env = {"MEMSAVER_DISK_DIR": str(folder), "PYTHONIOENCODING": "ascii", "COLUMNS": "400"}
    done = run_doctor(command=command, **env)
    assert (done.returncode, done.stderr) == (0, "") and done.stdout.isascii()
    assert rf"{tmp_path}/\xe9" in done.stdout


def test_it_starts_no_context_and_imports_no_framework(run_python):
    done = run_python(
        """
        import sys
        from memsaver.cli import checks
        from memsaver import simulator
        found = checks.check_all()
        library = simulator.control()
        print(library.sim_calls(b"cuInit"), library.sim_calls(b"cuDevicePrimaryCtxRetain"))
        print([name for name in ("torch", "sglang", "vllm", "rich.table") if name in sys.modules])
        """
    )
    calls, frameworks_imported = done.stdout.splitlines()
    assert calls.split()[0] != "0" and calls.split()[1] == "0"
    assert frameworks_imported == "[]"


def test_an_absent_part_is_neither_good_nor_bad():
    finding = absent("vLLM", "not installed")
    assert checks.worst({"engines": [finding]}) is checks.Level.GOOD
    assert checks.worst({"engines": [finding, warned("x", "y", "z")]}) is checks.Level.WARNED


def test_a_check_that_fails_hides_no_other(plain):
    def fail():
        raise RuntimeError("of all things")

    plain.setitem(checks.SUBJECTS, "NCCL", fail)
    found = checks.check_all()
    assert list(found) == list(checks.SUBJECTS)
    (finding,) = found["NCCL"]
    assert finding.level == "warned" and "of all things" in finding.text
