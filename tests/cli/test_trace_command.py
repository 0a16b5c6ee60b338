"""Tests the per-tag summary of a trace, and `memsaver trace`, which prints this summary."""

import dataclasses
import json

import pytest
from made_traces import made, transition

import memsaver
from memsaver.cli.trace_summary import summary
from memsaver.traces import files
from memsaver.traces.series import peaks
from memsaver.traces.trace import TagSample

MIB = 1 << 20

# --- summaries


def test_a_summary_equals_the_recorded_transitions(recorded):
    t, first, second = recorded
    rows = {row.tag: row for row in summary(t.trace)}
    stats = memsaver.stats()[first][0]
    out, into = rows[first].out, rows[first].into
    assert (out.count, out.failed, into.count, into.failed) == (1, 0, 1, 1)
    assert (out.device_bytes, out.copied_bytes) == (stats.paused_bytes, stats.saved_bytes)
    assert (into.device_bytes, into.copied_bytes) == (stats.resumed_bytes, stats.restored_bytes)
    assert out.seconds == pytest.approx(stats.pause_seconds, abs=0.1)
    assert out.rate == out.device_bytes / out.seconds
    assert rows[first].peak_bytes == max(stats.resident_bytes, 10 * MIB)
    assert (rows[second].out.count, rows[second].into.count) == (1, 0)


def test_devices_side_by_side_take_their_time_once():
    trace = made(
        transitions=[
            transition(),
            transition(device=1, begin_seconds=1.1, end_seconds=2.05),
            transition(number=2, begin_seconds=None, device_bytes=100),
        ]
    )
    (row,) = summary(trace)
    assert (row.out.count, row.out.device_bytes, row.out.copied_bytes) == (2, 120, 15)
    assert row.out.seconds == 1.0 and row.out.rate == 20.0


def test_a_peak_is_of_all_devices_at_one_time():
    trace = made(
        samples=[
            TagSample(0.0, "t", 0, 9, 4),
            TagSample(1.0, "t", 1, 9, 5),
            TagSample(2.0, "t", 0, 9, 0),
            TagSample(3.0, "t", 1, 9, 8),
        ]
    )
    assert peaks(trace) == {"t": 9}


# --- memsaver trace


def run_trace(*arguments, **named):
    from typer.testing import CliRunner

    from memsaver.cli.app import app

    return CliRunner().invoke(app, ["trace", *map(str, arguments)], **named)


def test_the_command_shows_a_summary_and_writes_files(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    t, first, second = recorded
    path = t.save(tmp_path / "trace.json")
    page, picture = tmp_path / "x.html", tmp_path / "x.svg"
    done = run_trace(path, "--html", page, "--picture", picture)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line[:1] == [first])
    assert lines[begin][1:] == ["peak", "10", "MiB"]
    assert lines[begin + 1][:7] == ["paused", "1", "0", "10", "MiB", "10", "MiB"]
    assert lines[begin + 2][:7] == ["resumed", "1", "1", "10", "MiB", "10", "MiB"]
    assert [second, "peak", "8", "MiB"] in lines
    assert f'"process":{t.trace.process},' in page.read_text()
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize("columns", [50, 60, 80, 140])
def test_nothing_is_cut_at_any_width(tmp_path, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    big = dict(device_bytes=1000 * 2**30, copied_bytes=1000 * 2**30, begin_seconds=0.0)
    trace = made(
        samples=[TagSample(0.0, "a_tag_with_a_long_name" * 5, 0, 2**39, 1000 * 2**30)],
        transitions=[
            transition(tag="a_tag_with_a_long_name" * 5, end_seconds=1234.5, **big),
            transition(number=2, direction="into", outcome="failed"),
        ],
        seconds=2000.0,
        dropped=5,
    )
    done = run_trace(files.save(trace, tmp_path / "t.json"))
    assert done.exit_code == 0
    assert all(len(line) <= columns for line in done.stdout.splitlines())
    assert "…" not in done.stdout and "\x1b" not in done.stdout
    whole = done.stdout.replace("\n", " ")
    for figure in ("1,000 GiB", "1234.50 s", "829.5 MiB/s"):
        assert figure in whole
    assert "oldest 5 events" in whole


def test_the_summary_as_json(recorded, tmp_path):
    t, first, second = recorded
    done = run_trace(t.save(tmp_path / "trace.json"), "--json", "--html", tmp_path / "x.html")
    assert done.exit_code == 0 and done.stderr == f"wrote {tmp_path / 'x.html'}\n"
    told = json.loads(done.stdout)
    assert list(told) == [
        "schema",
        "memsaver",
        "process",
        "started",
        "seconds",
        "dropped",
        "begin_seconds",
        "calls",
        "tags",
        "devices",
    ]
    assert (told["schema"], told["memsaver"]) == (1, memsaver.__version__)
    assert (told["process"], told["calls"]) == (t.trace.process, 3)
    rows = {row["tag"]: row for row in told["tags"]}
    assert set(rows) == {first, second} and rows[first]["peak_bytes"] == 10 * MIB
    for row, summed in zip(told["tags"], summary(t.trace), strict=True):
        for name, moves in (("pauses", summed.out), ("resumes", summed.into)):
            assert row[name] == {**dataclasses.asdict(moves), "bytes_per_second": moves.rate}
    free = [row.free_bytes for row in t.trace.memory]
    assert told["devices"] == [{"device": 0, "least_free_bytes": min(free)}]


def test_control_characters_in_a_tag_are_escaped(tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    trace = made(samples=[TagSample(0.0, "\x1b[31mred\nline\x9b\x07", 0, 1, 1)])
    done = run_trace(files.save(trace, tmp_path / "t.json"))
    assert done.exit_code == 0
    assert "[31mred line peak" in " ".join(done.stdout.split())
    assert all(line.isprintable() for line in done.stdout.splitlines())


def test_an_empty_trace_is_reported(tmp_path):
    done = run_trace(files.save(made(), tmp_path / "t.json"))
    assert done.exit_code == 0 and "No tag had memory" in done.stdout
