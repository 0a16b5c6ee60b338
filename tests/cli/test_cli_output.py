"""Tests output that cannot be written, and the commands' output on all kinds of terminals.

If output cannot be written, one line reports the failure, and the exit status is 1.
"""

import os
import pty
import re
import subprocess
import sys

import pytest
from child_process import environment_without
from made_traces import made
from warm_processes import CommandPopen, run_command

from memsaver._runtime.native import LIBRARY_DIR
from memsaver.traces import files
from memsaver.traces.trace import TagSample

BENCH = "bench --size 32MiB --rounds 1"
# Plain text, rich's text and JSON: each is written in its own way.
WAYS = ["--help", "trace t.json", "top --json"]
COMMANDS = ["--version", "demo --help", "doctor", "doctor --json", "top", "trace t.json --json"]
COMMANDS += [BENCH, pytest.param("demo", marks=pytest.mark.long)]


@pytest.fixture
def run(tmp_path):
    """Run a command; with `fresh`, run it in a new interpreter."""

    def run_words(words, *, fresh=False, variables=(), **named):
        environment = environment_without("MEMSAVER_")
        environment |= {
            "PYTHONPATH": str(LIBRARY_DIR.parent),
            "MEMSAVER_DRIVER": "sim",
            "XDG_RUNTIME_DIR": str(tmp_path),
            **dict(variables),
        }
        return (subprocess.run if fresh else run_command)(
            [sys.executable, "-m", "memsaver", *words.split()],
            env=environment,
            cwd=tmp_path,
            text=True,
            timeout=60,
            **{"stderr": subprocess.PIPE, **named},
        )

    return run_words


@pytest.fixture(autouse=True)
def trace(tmp_path):
    (tmp_path / "t.json").touch()
    files.save(made(samples=[TagSample(0.0, "t ✓ é", 0, 1, 1)]), tmp_path / "t.json")


# A new interpreter for each way; without a buffer, too.
@pytest.mark.each_python
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", WAYS)
def test_a_full_disk_is_one_line_and_status_1(run, words, unbuffered):
    variables = {"PYTHONUNBUFFERED": unbuffered}
    check_a_full_disk(run, words, fresh=True, variables=variables)


@pytest.mark.parametrize("words", COMMANDS)
def test_each_command_reports_a_full_disk(run, words):
    check_a_full_disk(run, words)


def check_a_full_disk(run, words, **named):
    with open("/dev/full", "w") as full:
        done = run(words, stdout=full, **named)
    assert done.stderr == "memsaver: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", WAYS)
def test_a_closed_pipe_is_not_reported(run, words):
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait()
        done = run(words, fresh=True, stdout=gone.stdin)
    assert (done.stderr, done.returncode) == ("", 1)


@pytest.mark.parametrize("words", WAYS)
def test_a_closed_output_is_one_line_and_status_1(run, words):
    done = run(words, fresh=True, preexec_fn=lambda: os.close(1))
    assert done.stderr == "memsaver: the output cannot be written: Bad file descriptor\n"
    assert done.returncode == 1


@pytest.mark.parametrize(
    ("words", "status", "closed"),
    [
        *((words, 0, False) for words in ("doctor", "top")),
        ("trace none.json", 1, False),
        ("trace none.json", 1, True),
        ("top --nope", 2, False),
        ("top --nope", 2, True),
        ("trace t.json", 0, True),
        pytest.param("demo", 0, False, marks=pytest.mark.long),
        pytest.param("demo", 0, True, marks=pytest.mark.long),
    ],
)
def test_errors_that_cannot_be_written_change_no_status(run, words, status, closed):
    close = (lambda: os.close(2)) if closed else None
    with open("/dev/full", "w") as full:
        named = dict(stdout=subprocess.PIPE, stderr=full, preexec_fn=close)
        done = run(words, fresh=closed, **named)
    assert done.returncode == status


ENCODINGS = {
    "ascii": {"PYTHONIOENCODING": "ascii"},
    "latin-1": {"PYTHONIOENCODING": "latin-1"},
    "C": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"},
}
WORDS = {
    "--help": 0,
    "--wäh": 2,  # no such option
    "doctor": 0,
    "doctor --json": 0,
    "demo": 0,
    "bench --size 32MiB --rounds 1": 0,
    "top --once": 0,
    "top --pid 1": 1,
    "trace t.json": 0,
    "trace t.json --html ü.html": 0,
    "trace ü.json": 1,
    "run --tag ü✓ -- true": 0,
    "run -- ü✓": 127,
}
MARKS = {"run": [pytest.mark.preloads], "demo": [pytest.mark.long]}
CASES = [pytest.param(words, "ascii", marks=MARKS.get(words.split()[0], [])) for words in WORDS]
CASES += [("doctor", "latin-1")]
no_extension = pytest.mark.skipif(
    sys.version_info >= (3, 12) and not str(LIBRARY_DIR).isascii(),
    reason="in the locale C, this Python imports no extension from a folder with another letter",
)
CASES += [
    pytest.param(words, "C", marks=no_extension) for words in ("trace t.json", "trace ü.json")
]


@pytest.mark.parametrize("words, encoding", CASES)
def test_a_terminal_with_few_characters(run, words, encoding):
    done = run(words, variables=ENCODINGS[encoding], stdout=subprocess.PIPE, errors="replace")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == WORDS[words], done.stderr


def test_writable_output_succeeds(run):
    done = run("trace t.json", stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "") and "peak" in done.stdout


def on_a_terminal(words, tmp_path, **variables):
    """Return the command's status and its output on a terminal."""
    ours, terminal = pty.openpty()
    try:
        shown = b""
        environment = environment_without("MEMSAVER_") | {
            "PYTHONPATH": str(LIBRARY_DIR.parent),
            "MEMSAVER_DRIVER": "sim",
            "XDG_RUNTIME_DIR": str(tmp_path),
            "COLUMNS": "60",
            **variables,
        }
        command = [sys.executable, "-m", "memsaver", *words.split()]
        with CommandPopen(
            command, env=environment, cwd=tmp_path, stdin=terminal, stdout=terminal, stderr=terminal
        ) as process:
            os.close(terminal)
            terminal = -1
            while part := _read(ours):
                shown += part
            return process.wait(60), shown.decode()
    finally:
        os.close(ours)
        if terminal >= 0:
            os.close(terminal)


def _read(terminal):
    try:
        return os.read(terminal, 1 << 16)
    except OSError:  # the command has ended
        return b""


@pytest.mark.parametrize("words", ["doctor", "trace t.json", "top --once", "run --help"])
def test_a_terminal_that_wants_no_colour(tmp_path, words):
    status, shown = on_a_terminal(words, tmp_path, TERM="xterm", NO_COLOR="1")
    assert status == 0 and not re.search("\x1b\\[[0-9;]*3[0-9]m", shown)


@pytest.mark.parametrize("words", ["doctor", "trace t.json", "top", BENCH, "run --help"])
def test_a_dumb_terminal_is_not_redrawn(tmp_path, words):
    """Nothing is redrawn on a dumb terminal: `top` shows the processes once."""
    status, shown = on_a_terminal(words, tmp_path, TERM="dumb")
    assert (status, "\x1b" in shown) == (0, False)
    lines = shown.replace("\r\n", "\n").splitlines()
    assert len(lines) > 1 and max(map(len, lines)) <= 60  # COLUMNS
