"""Tests charts of saved timelines.

The line data, the HTML page and the images are compared with the recorded events.
"""

import io
import json
import re
import time
from html.parser import HTMLParser
from random import Random

import pytest
from made_traces import HOSTILE, made, transition

import memsaver
from memsaver.traces import files, picture
from memsaver.traces.series import device_series
from memsaver.traces.trace import DeviceSample, TagSample

MIB = 1 << 20


def new_axes():
    """Create the axes of a plot. Only the processes that run these tests import matplotlib."""
    from matplotlib.figure import Figure

    return Figure().subplots()


# --- the lines


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


def test_many_tags_cost_no_more_than_their_lines(tmp_path):
    """A full timeline with many tags is saved within seconds, as a page that a browser can open."""
    random = Random(0)
    samples = [
        TagSample(i / 1000, f"tag {random.randrange(1000)}", 0, 9, random.randrange(1 << 36))
        for i in range(1 << 16)
    ]
    trace = made(samples=samples, seconds=66.0)
    began = time.process_time()
    page = files.save(trace, tmp_path / "x.html")
    assert time.process_time() - began < 10
    assert page.stat().st_size < 32 * MIB
    held, total, sums = {}, 0, {66.0: 0}
    for row in samples:
        total += row.resident_bytes - held.get(row.tag, 0)
        held[row.tag] = row.resident_bytes
        sums[row.seconds] = sums[66.0] = total
    series = device_series(trace, 0)
    lines = zip(*series.resident.values(), strict=True)
    shown = dict(zip(series.seconds, map(sum, lines), strict=True))
    assert len(series.resident) == 1000 and shown == {at: sums[at] for at in series.seconds}
    assert max(shown.values()) == max(sums.values())


@pytest.mark.parametrize("most", [10**6, 40])
def test_lines_show_the_last_known_values(most):
    """Lines are correct if samples are simultaneous, a tag is created late, or driver samples lie
    between others.
    """
    random = Random(1)
    samples = [
        TagSample(i // 2 / 10, random.choice("abc" if i > 50 else "ab"), 0, i, random.randrange(99))
        for i in range(200)
    ]
    asked = [DeviceSample(i / 3, 0, random.randrange(9), 9) for i in range(2, 20)]
    series = device_series(made(samples=samples, memory=asked, seconds=12.0), 0, most)
    for index, at in enumerate(series.seconds):
        for tag in "abc":
            own = [row for row in samples if row.tag == tag and row.seconds <= at]
            last = own[-1] if own else TagSample(0.0, tag, 0, 0, 0)
            assert series.resident[tag][index] == last.resident_bytes
            assert series.allocated[tag][index] == last.allocated_bytes
        told = [row.free_bytes for row in asked if row.seconds <= at]
        assert series.free[index] == (told[-1] if told else None)


# --- the page


class Page(HTMLParser):
    """A parsed page: its elements, the elements' attributes, and the contents of its scripts."""

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


def test_the_page_contains_the_recorded_events(recorded, tmp_path):
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
    assert "The MIT License (MIT)" in text and "uPlot" in text  # the copy includes its notice


# --- pictures


@pytest.mark.parametrize(("kind", "magic"), [("svg", b"<?xml"), ("pdf", b"%PDF")])
def test_pictures_are_written_for_any_tag(tmp_path, kind, magic):
    trace = made(
        samples=[TagSample(1.0, "_$x$" * 50, 0, 8, 8), TagSample(2.0, "_$x$", 1, 8, 8)],
        memory=[DeviceSample(1.0, 0, 5, 10)],
        transitions=[transition(), transition(number=2, end_seconds=None, outcome="under way")],
    )
    assert files.save(trace, tmp_path / f"x.{kind}").read_bytes().startswith(magic)


def test_a_pictures_object_count_does_not_grow_with_its_transitions(tmp_path):
    """With one object for each transition, drawing would take quadratic time."""
    counts = []
    for number in (1, 50):
        rows = [transition(number=index, begin_seconds=index / 10) for index in range(number)]
        path = files.save(made(transitions=rows), tmp_path / f"{number}.svg")
        counts.append(path.read_text().count("<g id="))
    assert counts[0] == counts[1]


def test_the_pictures_pixels_are_the_tags(tmp_path):
    """The tag's color fills exactly the time during which the tag had memory."""
    trace = made(samples=[TagSample(0.0, "a", 0, 100, 100), TagSample(5.0, "a", 0, 100, 0)])
    content = files.save(trace, tmp_path / "x.png").read_bytes()
    from matplotlib.image import imread

    pixels = imread(io.BytesIO(content))[:, :, :3]
    blue = abs(pixels - [0x4E / 255, 0x79 / 255, 0xA7 / 255]).sum(axis=2) < 0.02
    left, right = blue[:, :650], blue[:, 800:1200]
    assert left.sum() > 50_000 and right.sum() == 0


def test_a_picture_shows_a_full_device():
    """The line of free memory falls to zero, stays at zero, and rises again."""
    free = [(0.0, 80), (2.0, 0), (4.0, 0), (6.0, 40)]
    memory = [DeviceSample(at, 0, nbytes, 80) for at, nbytes in free]
    axes = new_axes()
    picture._draw_free(axes, device_series(made(memory=memory), 0))
    (line,) = axes.lines
    assert [tuple(point) for point in line.get_xydata()] == [*free, (10.0, 40)]


def test_the_legend_names_the_colour_of_every_band():
    rows = [
        transition(number=1),
        transition(number=2, kind="resume", direction="into", begin_seconds=3.0, end_seconds=4.0),
        transition(number=3, kind="swap", begin_seconds=5.0, end_seconds=6.0),
        transition(number=3, kind="swap", direction="into", begin_seconds=5.5, end_seconds=7.0),
        transition(number=4, outcome="failed", begin_seconds=8.0, end_seconds=9.0),
    ]
    trace = made(samples=[TagSample(0.0, "t", 0, 9, 9)], transitions=rows)
    axes = new_axes()
    picture._draw_tags(axes, trace, device_series(trace, 0))
    of_tags = len(axes.collections)
    picture._draw_transitions(axes, trace, 0)
    bands = axes.collections[of_tags::2]  # each is followed by its edges
    spans = [tuple(path.get_extents().intervalx) for one in bands for path in one.get_paths()]
    assert spans == [(1.0, 2.0), (3.0, 4.0), (5.0, 7.0), (8.0, 9.0)]  # a swap is one band
    entries = {patch.get_facecolor() for patch in axes.get_legend().get_patches()}
    assert {tuple(colour) for one in bands for colour in one.get_facecolor()} <= entries
    names = [text.get_text() for text in axes.get_legend().get_texts()]
    assert names == ["t", *picture._WORDS.values()]


def test_a_picture_without_matplotlib_gives_advice(run_python):
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
