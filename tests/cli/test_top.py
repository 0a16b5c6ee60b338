"""Tests `memsaver top`: the contents, the layout, and the end of the command."""

import dataclasses
import io
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time

import pytest
from child_process import environment_without
from rich.console import Console
from typer.testing import CliRunner
from watched_children import Child, top_command

import memsaver
from memsaver._inspection.statistics import TagStats
from memsaver._runtime.native import LIBRARY_DIR
from memsaver.cli.app import app
from memsaver.cli.process_tables import NOBODY, view
from memsaver.cli.watched import Device, Driver, Found, Process, Silent, WatchedTag

GIB = 1 << 30


def environment(runtime, **more):
    return {
        **environment_without("MEMSAVER_"),
        "PYTHONPATH": str(LIBRARY_DIR.parent),
        "XDG_RUNTIME_DIR": str(runtime),
        "MEMSAVER_DRIVER": "sim",
        **more,
    }


def run_top(runtime, *arguments, **env):
    """Run the command in this process."""
    return CliRunner().invoke(app, ["top", *arguments], env=environment(runtime, **env))


# --- processes and figures ------------------------------------------------------------------------


def test_two_processes_are_listed_with_their_tags(runtime):
    with Child(runtime) as first, Child(runtime) as second:
        first("make('weights', 3 << 20, 'host')")
        first("make('kv_cache', 70 << 20)")
        first("memsaver.pause()")
        second("make('optimizer', 5 << 20, 'disk')")
        second("memsaver.pause()")
        second("memsaver.resume()")
        done = run_top(runtime, "--json")
        assert (done.exit_code, done.stderr) == (0, "")
        said = json.loads(done.stdout)
        assert (said["schema"], said["memsaver"]) == (1, memsaver.__version__)
        assert (said["silent"], said["refused"]) == ([], [])
        by_pid = {row["pid"]: row for row in said["processes"]}
        assert set(by_pid) == {first.pid, second.pid}
        for child in (first, second):
            row = by_pid[child.pid]
            own = child("stats()")
            names = [field.name for field in dataclasses.fields(TagStats)]
            figures = [{name: tag[name] for name in names} for tag in row["tags"]]
            assert figures == list(own["tags"])
            assert row["host_bytes"] == own["host_bytes"]
            for figure in ("resident_bytes", "paused_now_bytes", "disk_bytes", "peer_bytes"):
                assert row[figure] == sum(tag[figure] for tag in row["tags"])
            assert row["driver"] == {"opened": "sim", "version": 13000, "simulated": True}
        weights, cache = by_pid[first.pid]["tags"]
        assert weights["paused_now_bytes"] == weights["allocated_bytes"] > 0
        assert cache["last_pause_rate"] == cache["last_paused_bytes"] / cache["last_pause_seconds"]
        assert cache["last_save_rate"] == cache["last_saved_bytes"] / cache["last_pause_seconds"]
        assert "last_restore_rate" in cache
        assert by_pid[second.pid]["tags"][0]["paused_now_bytes"] == 0

        alone = json.loads(run_top(runtime, "--json", "--pid", str(second.pid)).stdout)
        assert [row["pid"] for row in alone["processes"]] == [second.pid]

        shown = run_top(runtime, COLUMNS="140")  # not a terminal: shown once
        assert (shown.exit_code, shown.stderr) == (0, "")
        for text in (f"{first.pid} ", f"{second.pid} ", "weights", "kv_cache", "optimizer"):
            assert text in shown.stdout
        rows = {line.split()[0]: line for line in shown.stdout.splitlines() if line.strip()}
        assert re.search(r"0 +paused +- +4 MiB +host 4 MiB +pause \d+ s ago", rows["weights"])
        assert re.search(r"0 +paused +- +70 MiB +none +pause \d+ s ago", rows["kv_cache"])
        assert re.search(r"0 +mapped +6 MiB +- +disk 6 MiB +resume \d+ s ago", rows["optimizer"])
        assert re.search(r"simulated\) +6 MiB +74 MiB +80 GiB +2", shown.stdout)


def test_nothing_is_found(runtime):
    done = run_top(runtime, COLUMNS="80")
    assert (done.exit_code, done.stderr) == (0, "")
    text = " ".join(done.stdout.split())
    assert text.startswith(NOBODY) and "once it has a tag" in text
    assert "MEMSAVER_TOP" in text and max(map(len, done.stdout.splitlines())) <= 80
    assert json.loads(run_top(runtime, "--json").stdout)["processes"] == []


def test_searching_creates_nothing(runtime):
    command = top_command(runtime)
    done = subprocess.run(
        command, env=environment(runtime), capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "") and NOBODY in done.stdout
    assert list(runtime.iterdir()) == []


# --- layout ---------------------------------------------------------------------------------------


def tag_of(name, state="mapped", age=0.0, caller=None, **figures):
    zeros = {field.name: 0 for field in dataclasses.fields(TagStats)}
    named = {"tag": name, "state": state, "backup": "none"}
    return WatchedTag(TagStats(**{**zeros, **named, **figures}), age, caller)


PAUSED = {
    "allocated_bytes": 60 * GIB,
    "pauses": 3,
    "last_pause_seconds": 1.085,
    "last_paused_bytes": 60 * GIB,
}
CALLER = "/srv/training/scheduler/rollout_manager.py:123 in release_memory, thread 'MainThread'"
ENGINE = Process(
    4242,
    "python -m some.inference.engine --model-path /models/large --tensor-parallel-size 8 --port 1",
    "0.1.0",
    Driver("libcuda.so.1", 13000, False),
    (Device(0, "0000:19:00.0", 140 * GIB), Device(1, "0000:3b:00.0", 140 * GIB)),
    (
        tag_of("weights", "paused", 12, CALLER, backup="host", host_bytes=60 * GIB, **PAUSED),
        tag_of("weights", "paused", 12, CALLER, device=1, backup="host", **PAUSED),
        tag_of("kv_cache", "saving", 0.3, CALLER, allocated_bytes=GIB, resident_bytes=GIB),
        tag_of(
            "a name as a framework makes it: model.layers.0.experts.17.w13_weight_scale_inv",
            backup="disk",
            disk_bytes=123 * GIB,
            allocated_bytes=125 * GIB,
            resident_bytes=125 * GIB,
            resumes=1,
            age=7200,
            last_resume_seconds=2.5,
            last_resumed_bytes=125 * GIB,
        ),
        tag_of("empty", device=-1),
        tag_of("\x1b[31mred\x07", "paused", 1e6, **PAUSED),
    ),
    61 * GIB,
    100 * GIB,
)
TRAINER = dataclasses.replace(
    ENGINE,
    pid=17,
    command="python train.py",
    devices=(Device(0, "0000:3b:00.0", 140 * GIB),),
    tags=(tag_of("optimizer", allocated_bytes=7 * GIB, resident_bytes=7 * GIB),),
)
FOUND = Found(
    (TRAINER, ENGINE),
    (Silent(99, "python stopped.py", "no answer within 0.5 s: is it stopped?"),),
    ("/tmp/memsaver-0",),
)


def draw(found=FOUND, **options):
    console = Console(file=io.StringIO(), highlight=False, **options)
    console.print(view(found, console))
    return console.file.getvalue()


@pytest.mark.parametrize("columns", [46, 50, 60, 80, 110, 140])
def test_nothing_is_cut_at_any_width(columns):
    text = draw(width=columns)
    assert max(map(len, text.splitlines())) <= columns and "…" not in text
    for whole in ("60 GiB", "123 GiB", "125 GiB", "1.08 s 55.3 GiB/s", "2.50 s 50.0 GiB/s"):
        assert whole in text
    for whole in ("pause 12 s ago", "pause for 0 s", "resume 2 h ago", "pause 11 d ago"):
        assert whole in text
    letters = re.sub(r"\s", "", text)
    assert "4242python-msome.inference.engine" in letters
    assert ("--port 1\n" in text) == (columns > 80) and ("...\n" in text) == (columns <= 80)
    assert "99pythonstopped.pynoanswerwithin0.5s:isitstopped?" in letters
    assert "/tmp/memsaver-0isignored" in letters
    assert ("rollout_manager.py:123" in text) == (columns == 140)
    assert "\x1b" not in text and "\x07" not in text and "[31mred" in text


@pytest.mark.parametrize("columns", [46, 50, 60, 80])
def test_every_row_is_named_at_any_width(columns):
    lines = draw(width=columns).splitlines()
    end = next(line.index("Resident") for line in lines if line.startswith("Tag"))
    end -= 8 if columns == 80 else 0  # the columns GPU and state are in between
    names = "".join(line[: max(end, 8)].strip() for line in lines).replace(" ", "")
    for name in ("weights", "kv_cache", "model.layers.0.experts.17.w13_weight_scale_inv", "empty"):
        assert name[:12] in names


def test_totals_are_by_the_place_on_the_bus():
    # Device 0 of one process is device 1 of another.
    rows = [line.split() for line in draw(width=140).splitlines()]
    by_device = {row[0]: " ".join(row[1:]) for row in rows if row and row[0][:5] == "0000:"}
    assert by_device["0000:19:00.0"] == "126 GiB 120 GiB 140 GiB 1"
    assert by_device["0000:3b:00.0"] == "7 GiB 60 GiB 140 GiB 2"


def test_states_are_coloured_unless_disabled():
    colour = re.compile(r"\x1b\[[0-9;]*m")
    coloured = draw(width=80, force_terminal=True, color_system="truecolor")
    assert "\x1b[33mpaused" in coloured and "\x1b[32mmapped" in coloured
    assert colour.sub("", coloured) == draw(width=80)
    plain = draw(width=80, force_terminal=True, color_system="truecolor", no_color=True)
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", plain)


def test_an_output_limited_to_ascii():
    class Ascii(io.StringIO):
        encoding = "ascii"

    console = Console(file=Ascii(), width=80, highlight=False)
    console.print(view(FOUND, console))
    console.file.getvalue().encode("ascii")


# --- live -----------------------------------------------------------------------------------------


class Terminal:
    """`memsaver top` on a terminal with `lines` lines."""

    def __init__(self, runtime, *arguments, lines=40, columns=100):
        self.pid, self.terminal = pty.fork()
        if self.pid == 0:
            env = environment(runtime, TERM="xterm", LINES=str(lines), COLUMNS=str(columns))
            command = top_command(runtime, *arguments)
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # the test run may ignore SIGINT
            os.execve(sys.executable, command, env)
        self.seen = ""

    def wait_for(self, pattern, since=0):
        end = time.monotonic() + 30
        while not re.search(pattern, self.seen[since:]):
            assert time.monotonic() < end, self.seen
            self.read(0.2)

    def read(self, seconds):
        ready, _, _ = select.select([self.terminal], [], [], seconds)
        if ready:
            try:
                self.seen += os.read(self.terminal, 1 << 16).decode(errors="replace")
            except OSError:  # the process has ended
                time.sleep(0.01)

    def end(self, number):
        os.kill(self.pid, number)
        end = time.monotonic() + 30
        while True:
            assert time.monotonic() < end, "it does not end"
            self.read(0.05)
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                os.close(self.terminal)
                return os.waitstatus_to_exitcode(status)


LEFT = "\x1b[?1049l"  # restores the earlier screen
CURSOR = "\x1b[?25h"


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 0), (signal.SIGTERM, 143)])
def test_it_follows_and_ends_quietly(runtime, number, status):
    with Child(runtime) as child:
        child("make('weights', 3 << 20, 'host')")
        shown = Terminal(runtime, "--interval", "0.1")
        shown.wait_for("weights.*mapped")
        child("memsaver.pause()")
        shown.wait_for("weights.*paused")
        child("make('another', 1000)")
        shown.wait_for("another")
        child.end()
        shown.wait_for(NOBODY[:40])
        assert shown.end(number) == status
        assert shown.seen.rstrip().endswith((LEFT, CURSOR)) and LEFT in shown.seen
        assert "Traceback" not in shown.seen and "Aborted" not in shown.seen


def test_more_than_the_screen_has_lines_for(runtime):
    with Child(runtime) as child:
        child("[make(f'tag {n}', 1000) for n in range(40)] and None")
        shown = Terminal(runtime, "--interval", "0.1", lines=20)
        shown.wait_for(r"\d+ more lines: memsaver top --once shows all")
        assert "tag 3" in shown.seen and "tag 39" not in shown.seen
        assert shown.end(signal.SIGINT) == 0
