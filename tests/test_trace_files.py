"""Saved timelines: the files read back, parsed, and compared with what happened."""

import io
import json
import re
from html.parser import HTMLParser

import pytest

import memsaver
from memsaver.traces import files
from memsaver.traces.series import device_series, peaks
from memsaver.traces.summary import summary
from memsaver.traces.trace import DeviceSample, TagSample, TagTransition, Trace

MIB = 1 << 20
HOSTILE = "</script><!--<script>alert('x')</script> & \"$a$ ä\u2028"


@pytest.fixture
def recorded(sim, tag, make_blocks):
    """A timeline with a pause, a failed resume, a resume and a swap, and its two tags."""
    first, second = tag("weights"), tag("kv_cache")
    with memsaver.timeline() as t:
        blocks = make_blocks(first, [4 * MIB, 6 * MIB], backup="host")
        memsaver.pause(first)
        blocks += make_blocks(second, [8 * MIB])
        with sim.fault("cuMemCreate", sim.OUT_OF_MEMORY, times=0):
            with pytest.raises(memsaver.OutOfDeviceMemoryError):
                memsaver.resume(first)
        memsaver.swap(out=second, into=first)
    assert len(blocks) == 3
    return t, first, second


def transition(**changes):
    """A row, such as a pause of one second."""
    row = dict(
        number=1,
        kind="pause",
        direction="out",
        tag="t",
        device=0,
        begin_seconds=1.0,
        end_seconds=2.0,
        outcome="done",
        device_bytes=10,
        copied_bytes=5,
        thread=7,
        caller="x.py:1 in f",
    )
    return TagTransition(**(row | changes))


def made(samples=(), memory=(), transitions=(), seconds=10.0, dropped=0, begin=0.0):
    return Trace(
        1.5e9, seconds, 42, dropped, begin, tuple(samples), tuple(memory), tuple(transitions)
    )


# --- JSON


def test_a_trace_is_read_back_as_it_was(recorded, tmp_path):
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
    for event in events:  # what the format asks for
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
        if series == "allocated":  # where it changes
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
def test_what_is_no_trace_is_refused(tmp_path, text):
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


def test_a_trace_of_another_format_says_so(tmp_path):
    path = files.save(made(), tmp_path / "t.json")
    path.write_text(path.read_text().replace('"memsaver_trace":1', '"memsaver_trace":2'))
    with pytest.raises(memsaver.ConfigError, match="format 2"):
        files.load(path)


# --- the page


class Page(HTMLParser):
    """What a browser makes of the text: elements, their attributes, what scripts hold."""

    def __init__(self, text):
        super().__init__()
        self.elements, self.scripts, self._in_script = [], [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))
        if name == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, name):
        self._in_script = self._in_script and name != "script"

    def handle_data(self, data):
        if self._in_script:
            self.scripts[-1] += data

    @property
    def data(self):
        return json.loads(self.scripts[0])


def test_the_page_holds_what_happened(recorded, tmp_path):
    t, first, second = recorded
    page = Page(t.save(tmp_path / "memory.html").read_text())
    (device,) = [row for row in page.data["devices"] if row["device"] == 0]
    for name in (first, second):
        own = [row for row in t.samples if row.tag == name]
        line = dict(zip(device["seconds"], device["resident"][name], strict=True))
        assert [line[row.seconds] for row in own] == [row.resident_bytes for row in own]
    assert device["total"] == memsaver.device_memory(0)[1]
    free = dict(zip(device["seconds"], device["free"], strict=True))
    assert [free[row.seconds] for row in t.memory] == [row.free_bytes for row in t.memory]
    rows = [(r["tag"], r["kind"], r["outcome"], r["bytes"]) for r in page.data["transitions"]]
    want = [(r.tag, r.kind, r.outcome, r.device_bytes) for r in t.transitions]
    assert rows == want


def test_the_page_needs_nothing_else_and_no_tag_breaks_out(tmp_path):
    trace = made(
        samples=[TagSample(0.0, HOSTILE, 0, 5, 5), TagSample(0.1, "@SCRIPT@", 0, 5, 5)],
        transitions=[transition(tag=HOSTILE, caller=HOSTILE)],
    )
    text = files.save(trace, tmp_path / "x.html").read_text()
    page = Page(text)
    assert page.data["tags"] == [HOSTILE, "@SCRIPT@", "t"][:2]
    assert page.data["transitions"][0]["caller"] == HOSTILE
    assert len(page.scripts) == 3 and all(page.scripts)
    for name, attributes in page.elements:
        assert not attributes.keys() & {"src", "href", "srcset", "data"}, name
    policy = next(a for n, a in page.elements if a.get("http-equiv"))["content"]
    assert policy.startswith("default-src 'none'") and "http" not in policy
    assert not re.findall(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket|\bimport\(", text)
    assert "The MIT License (MIT)" in text and "uPlot" in text  # the notice goes with the copy


def test_thinning_loses_no_peak():
    samples = [TagSample(i / 1000, "t", 0, 0, (i * 7919) % 1000) for i in range(50_000)]
    samples[31_415] = TagSample(31.415, "t", 0, 0, 10**9)
    trace = made(samples=samples, seconds=50.0)
    whole = device_series(trace, 0, most=10**6)
    thin = device_series(trace, 0, most=2_000)
    assert len(thin.seconds) <= 2_100 < len(whole.seconds) == 50_001
    assert thin.resident["t"][thin.seconds.index(31.415)] == 10**9
    assert set(thin.seconds) <= set(whole.seconds)
    assert (thin.seconds[0], thin.seconds[-1]) == (0.0, 50.0)


# --- pictures


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_a_picture(tmp_path, kind, magic):
    pytest.importorskip("matplotlib")
    trace = made(
        samples=[TagSample(1.0, "_$x$" * 50, 0, 8, 8), TagSample(2.0, "_$x$", 1, 8, 8)],
        memory=[DeviceSample(1.0, 0, 5, 10)],
        transitions=[transition(), transition(number=2, end_seconds=None, outcome="under way")],
    )
    assert files.save(trace, tmp_path / f"x.{kind}").read_bytes().startswith(magic)


def test_the_pictures_pixels_are_the_tags(tmp_path):
    """The tag's colour fills the time in which it held memory, and none of the rest."""
    matplotlib = pytest.importorskip("matplotlib.image")
    trace = made(samples=[TagSample(0.0, "a", 0, 100, 100), TagSample(5.0, "a", 0, 100, 0)])
    content = files.save(trace, tmp_path / "x.png").read_bytes()
    pixels = matplotlib.imread(io.BytesIO(content))[:, :, :3]
    blue = abs(pixels - [0x4E / 255, 0x79 / 255, 0xA7 / 255]).sum(axis=2) < 0.02
    left, right = blue[:, :650], blue[:, 800:1200]
    assert left.sum() > 50_000 and right.sum() == 0


def test_a_picture_without_matplotlib_says_what_to_do(run_python):
    run_python(
        """
        import sys
        sys.modules["matplotlib"] = None
        import memsaver
        with memsaver.timeline() as t:
            pass
        try:
            t.save("x.png")
        except memsaver.ConfigError as error:
            assert "memsaver[plot]" in str(error), error
        else:
            raise AssertionError
        import os
        assert os.listdir() == []
        """
    )


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
        patched.setattr(files.os, "replace", fail)
        with pytest.raises(OSError, match="No space"):
            t.save(target)
    assert target.read_text() == "before"
    assert t.save(tmp_path / "link.json") == tmp_path / "link.json"
    assert files.load(target) == t.trace and (tmp_path / "link.json").is_symlink()
    assert target.stat().st_mode & 0o777 == 0o640
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link.json", "trace.json"]


@pytest.mark.parametrize("name", ["trace", "trace.txt", ".json", "trace.json.gz"])
def test_another_ending_is_refused(tmp_path, name):
    with pytest.raises(memsaver.ConfigError, match="ends in"):
        files.save(made(), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path):
    with pytest.raises(FileNotFoundError):
        files.save(made(), tmp_path / "no" / "t.json")


# --- summaries


def test_a_summary_is_what_happened(recorded):
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

    from memsaver.cli import app

    return CliRunner().invoke(app, ["trace", *map(str, arguments)], **named)


def test_the_command_shows_a_summary_and_writes_files(recorded, tmp_path, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    t, first, second = recorded
    path = t.save(tmp_path / "trace.json")
    page, picture = tmp_path / "x.html", tmp_path / "x.svg"
    pytest.importorskip("matplotlib")
    done = run_trace(path, "--html", page, "--picture", picture)
    assert done.exit_code == 0, done.output
    lines = [line.split() for line in done.stdout.splitlines()]
    begin = next(i for i, line in enumerate(lines) if line[:1] == [first])
    assert lines[begin][1:] == ["peak", "10", "MiB"]
    assert lines[begin + 1][:7] == ["paused", "1", "0", "10", "MiB", "10", "MiB"]
    assert lines[begin + 2][:7] == ["resumed", "1", "1", "10", "MiB", "10", "MiB"]
    assert [second, "peak", "8", "MiB"] in lines
    assert Page(page.read_text()).data["process"] == t.trace.process
    assert picture.read_text().startswith("<?xml")


@pytest.mark.parametrize("columns", [80, 140])
def test_nothing_is_cut_at_either_width(tmp_path, monkeypatch, columns):
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
    for figure in ("1,000 GiB", "1234.50 s", "869.8 MB/s"):
        assert figure in whole
    assert "oldest 5 events" in whole


def test_an_empty_trace_says_so(tmp_path):
    done = run_trace(files.save(made(), tmp_path / "t.json"))
    assert done.exit_code == 0 and "No tag had memory" in done.stdout


def test_colour_only_where_it_is_wanted(tmp_path, monkeypatch, run_python):
    path = files.save(made(samples=[TagSample(0.0, "t", 0, 1, 1)]), tmp_path / "t.json")
    code = f"import sys; sys.argv = ['memsaver', 'trace', {str(path)!r}]\n"
    code += "from memsaver.cli import main; main()"
    assert "\x1b" not in run_python(code, TERM="xterm").stdout  # a pipe
    assert "\x1b[" in run_python(code, TERM="xterm", FORCE_COLOR="1").stdout
    plain = run_python(code, TERM="xterm", FORCE_COLOR="1", NO_COLOR="1").stdout
    assert not re.search("\x1b\\[[0-9;]*3[0-9]m", plain)


def test_what_the_command_refuses(tmp_path):
    good = files.save(made(), tmp_path / "t.json")
    bad = tmp_path / "bad.json"
    bad.write_text("{}")
    for arguments, status, words in (
        ([tmp_path / "none.json"], 1, "none.json: No such file"),
        ([bad], 1, "no trace of memsaver's"),
        ([good, "--html", "x.txt"], 2, "does not end in .html"),
        ([good, "--picture", "x.html"], 2, ".png, .svg, .pdf"),
        ([good, "--html", tmp_path / "no" / "x.html"], 1, "No such file"),
    ):
        done = run_trace(*arguments)
        assert done.exit_code == status and words in done.stderr, done.output
        assert len(done.stderr.splitlines()) == 1
