"""Tests saved timelines: valid traces are read, invalid traces are rejected, and files are
replaced atomically.
"""

import json
import os

import pytest
from child_process import run_code
from made_traces import HOSTILE, made, transition
from repository import ROOT

import memsaver
from memsaver.traces import files
from memsaver.traces.trace import DeviceSample, TagSample

# --- JSON


def test_a_trace_is_read_back_unchanged(recorded, tmp_path):
    t, first, second = recorded
    path = t.save(tmp_path / "trace.json")
    assert files.load(path) == t.trace
    assert [row.outcome for row in files.load(path).transitions].count("failed") == 1
    assert {first, second} <= set(files.load(path).tags)


def test_odd_rows_are_read_back_as_they_were(tmp_path):
    trace = made(
        samples=[TagSample(0.1, HOSTILE, -1, 0, 0), TagSample(0.123456789, "t", 3, 2**60, 1)],
        memory=[DeviceSample(0.0, 3, 0, 2**40)],
        transitions=[
            transition(begin_seconds=None, tag=HOSTILE),
            transition(number=2, begin_seconds=3.1, end_seconds=None, outcome="under way"),
            transition(number=3, begin_seconds=0.3, end_seconds=0.1 + 0.3, outcome="given up"),
        ],
        dropped=12,
        begin=0.01,
    )
    files.save(trace, tmp_path / "t.json")
    read = files.load(tmp_path / "t.json")
    assert read == trace.__class__(
        **{**vars(trace), "transitions": (*trace.transitions[:2], read.transitions[2])}
    )
    assert read.transitions[2].end_seconds == pytest.approx(0.4, abs=1e-9)


def test_chrome_finds_tracks_spans_and_counters(recorded, tmp_path):
    t, first, second = recorded
    events = json.loads(t.save(tmp_path / "trace.json").read_text())["traceEvents"]
    for event in events:  # required by the format
        assert event["ph"] in "MXC" and event["name"] and isinstance(event["pid"], int)
        assert event["ph"] == "M" or event["ts"] >= 0
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [e for e in events if e["ph"] == "X"]
    on_track = [(names[e["tid"]], e["name"]) for e in spans]
    assert on_track == [
        (f"{first}, GPU 0", "pause"),
        (f"{first}, GPU 0", "resume (failed)"),
        (f"{second}, GPU 0", "swap"),
        (f"{first}, GPU 0", "swap"),
    ]
    for event, row in zip(spans, t.transitions, strict=True):
        assert event["ts"] == pytest.approx(row.begin_seconds * 1e6, abs=0.01)
        assert event["dur"] == pytest.approx(row.seconds * 1e6, abs=0.01)
        assert event["args"]["device_bytes"] == row.device_bytes
        assert event["args"]["caller"] == row.caller
    for series, want in (("resident", "resident_bytes"), ("allocated", "allocated_bytes")):
        line = [e["args"]["bytes"] for e in events if e["name"] == f"{first}, GPU 0: {series}"]
        happened = [getattr(row, want) for row in t.samples if row.tag == first]
        if series == "allocated":  # only changes
            happened = [n for i, n in enumerate(happened) if i == 0 or n != happened[i - 1]]
        assert line == happened
    free = [e["args"]["bytes"] for e in events if e["name"] == "GPU 0: free"]
    assert free == [row.free_bytes for row in t.memory]
    counters = [e["ts"] for e in events if e["ph"] == "C"]
    assert counters == sorted(counters)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "{",
        '{"otherData": 3}',
        '{"traceEvents": []}',
        b"\xff\xfe",
        "[" * 100_000,
        '{"otherData": {"memsaver_trace": 1}}',
    ],
)
def test_invalid_traces_are_rejected(tmp_path, text):
    path = tmp_path / "x.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(memsaver.ConfigError):
        files.load(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda event: event.pop("ts"),
        lambda event: event.update(ts="soon"),
        lambda event: event.update(ts=float("nan")),
        lambda event: event.update(ts=10**400),
        lambda event: event["args"].update(device_bytes=1.5),
        lambda event: event["args"].update(kind="explosion"),
        lambda event: event.update(args=None),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, damage):
    path = files.save(made(transitions=[transition()]), tmp_path / "t.json")
    document = json.loads(path.read_text())
    damage(next(e for e in document["traceEvents"] if e["ph"] == "X"))
    path.write_text(json.dumps(document))
    with pytest.raises(memsaver.ConfigError, match="damaged"):
        files.load(path)


def test_a_trace_of_another_format_is_reported(tmp_path):
    path = files.save(made(), tmp_path / "t.json")
    path.write_text(path.read_text().replace('"memsaver_trace":1', '"memsaver_trace":2'))
    with pytest.raises(memsaver.ConfigError, match="format 2"):
        files.load(path)


# --- files


def test_a_file_is_replaced_whole_or_not_at_all(recorded, tmp_path, monkeypatch):
    t, *_ = recorded
    target = tmp_path / "trace.json"
    target.write_text("before")
    target.chmod(0o640)
    (tmp_path / "link.json").symlink_to(target)

    def fail(*_):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            t.save(target)
    assert target.read_text() == "before"
    assert t.save(tmp_path / "link.json") == tmp_path / "link.json"
    assert files.load(target) == t.trace and (tmp_path / "link.json").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "trace.json"]


@pytest.mark.parametrize("name", ["trace", "trace.txt", ".json", "trace.json.gz"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(memsaver.ConfigError, match="must end in"):
        files.save(made(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_missing_folder_is_an_os_error(tmp_path):
    target = tmp_path / "no" / "t.json"
    with pytest.raises(FileNotFoundError) as caught:
        files.save(made(), target)
    assert caught.value.filename == str(target)


def test_a_full_disk_leaves_the_file_unchanged(tmp_path):
    """In a child process, a limit on file sizes makes the write fail half-way."""
    target = tmp_path / "t.json"
    target.write_text("before")
    code = f"""
        import resource, signal
        from pathlib import Path
        from memsaver._runtime.whole_files import replace_file
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            replace_file(Path({str(target)!r}), b"x" * 100_000)
        except OSError as error:
            assert error.filename == {str(target)!r}, error.filename
        else:
            raise AssertionError
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    run_code(code, environment, tmp_path)
    assert target.read_text() == "before" and os.listdir(tmp_path) == ["t.json"]


def test_a_name_may_be_as_long_as_the_file_system_allows(tmp_path):
    longest = os.pathconf(tmp_path, "PC_NAME_MAX")
    target = tmp_path / ("x" * (longest - len(".json")) + ".json")
    assert files.load(files.save(made(), target)) == made()
    with pytest.raises(OSError, match="too long") as caught:
        files.save(made(), target.with_name(f"x{target.name}"))
    assert caught.value.filename.endswith(f"/x{target.name}")
    assert os.listdir(tmp_path) == [target.name]
