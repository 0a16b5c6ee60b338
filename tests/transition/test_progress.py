"""Tests the progress bar on a recorded console, and the values of `progress=` arguments."""

import io
import re

import pytest
from rich.console import Console

from memsaver._transitions.progress import ProgressBar, callback_of

GIB = 1 << 30
ERASE_LINE = "\x1b[2K"


class Screen:
    """A terminal of 120 columns whose clock advances only when the test sets it."""

    def __init__(self, terminal=True):
        self.seconds = 0.0
        self.file = io.StringIO()
        self.console = Console(
            file=self.file,
            force_terminal=terminal,
            width=120,
            color_system=None,
            get_time=lambda: self.seconds,
            _environ={},
        )

    def last_line(self):
        """Return the last line that was drawn before the bar was erased."""
        lines = re.split(r"[\r\n]|\x1b\[[0-9;?]*[A-Za-z]", self.file.getvalue())
        return [line for line in lines if line.strip()][-1]


def test_the_bar_shows_title_bytes_rate_and_remaining_time():
    screen = Screen()
    with ProgressBar("pause 'weights'", screen.console) as bar:
        bar(2 * GIB, 16 * GIB)
        screen.seconds += 1
        bar(8 * GIB, 16 * GIB)
    line = screen.last_line()
    assert line.startswith("pause 'weights' ━")
    assert " 8.0/16.0 GiB " in line
    assert " 6.0 GiB/s " in line
    assert "0:00:02" in line  # 8 GiB at 6 GiB/s, rounded up


def test_the_bar_vanishes_also_after_an_error():
    screen = Screen()
    with pytest.raises(ZeroDivisionError):
        with ProgressBar("pause", screen.console) as bar:
            bar(1, 2)
            raise ZeroDivisionError
    drawn, _, rest = screen.file.getvalue().rpartition(ERASE_LINE)
    assert "1/2 bytes" in drawn
    assert not re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", rest).strip()


def test_a_title_is_taken_as_it_is():
    screen = Screen()
    with ProgressBar("resume '[red]{tag}[/]'", screen.console):
        pass
    assert screen.last_line().startswith("resume '[red]{tag}[/]' ")


def test_the_bar_moves_from_any_thread(in_thread):
    screen = Screen()
    with ProgressBar("pause", screen.console) as bar:
        in_thread(bar, 3 * GIB, 4 * GIB).result()
    assert " 3.0/4.0 GiB " in screen.last_line()


def test_true_is_a_bar_on_stderr(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    stdout, stderr = io.StringIO(), io.StringIO()
    stdout.isatty = stderr.isatty = lambda: True
    monkeypatch.setattr("sys.stdout", stdout)
    monkeypatch.setattr("sys.stderr", stderr)
    with callback_of(True, "swap 'a' for 'b'") as callback:
        callback(GIB, 2 * GIB)
    assert "swap 'a' for 'b'" in stderr.getvalue()
    assert "1.0/2.0 GiB" in stderr.getvalue()
    assert stdout.getvalue() == ""


@pytest.mark.parametrize("progress", ["yes", 1, 0.5])
def test_anything_else_is_an_error(progress):
    with pytest.raises(TypeError, match=f"not {progress!r}"):
        callback_of(progress, "pause")
