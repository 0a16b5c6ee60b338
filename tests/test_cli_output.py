"""Where the commands' output cannot be written: one line says so, and the exit status is 1."""

import subprocess
import sys

import pytest
from child_process import environment_without
from made_traces import made

from memsaver.native import LIBRARY_DIR
from memsaver.traces import files
from memsaver.traces.trace import TagSample

COMMANDS = ["--help", "--version", "doctor", "doctor --json", "top", "top --json", "trace t.json"]


def run_command(words, tmp_path, unbuffered="", variables=(), **named):
    environment = environment_without("MEMSAVER_")
    environment |= {
        "PYTHONPATH": str(LIBRARY_DIR.parent),
        "MEMSAVER_DRIVER": "sim",
        "PYTHONUNBUFFERED": unbuffered,
        "XDG_RUNTIME_DIR": str(tmp_path),
        **dict(variables),
    }
    return subprocess.run(
        [sys.executable, "-m", "memsaver", *words.split()],
        env=environment,
        cwd=tmp_path,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        **named,
    )


@pytest.fixture(autouse=True)
def trace(tmp_path):
    (tmp_path / "t.json").touch()
    files.save(made(samples=[TagSample(0.0, "t ✓ é", 0, 1, 1)]), tmp_path / "t.json")


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("words", COMMANDS)
def test_a_full_disk(tmp_path, words, unbuffered):
    with open("/dev/full", "w") as full:
        done = run_command(words, tmp_path, unbuffered, stdout=full)
    assert done.stderr == "memsaver: the output cannot be written: No space left on device\n"
    assert done.returncode == 1


@pytest.mark.parametrize("words", ["doctor", "top --json"])
def test_a_reader_that_has_gone_is_no_news(tmp_path, words):
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as gone:
        gone.wait()
        done = run_command(words, tmp_path, stdout=gone.stdin)
    assert "Traceback" not in done.stderr and done.returncode == 1


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
CASES = [
    pytest.param(words, "ascii", marks=[pytest.mark.preloads] if words.startswith("run") else [])
    for words in WORDS
]
CASES += [(words, "latin-1") for words in ("demo", "doctor", "bench --size 32MiB --rounds 1")]
CASES += [(words, "C") for words in ("demo", "trace t.json", "trace ü.json")]


@pytest.mark.parametrize("words, encoding", CASES)
def test_a_terminal_that_knows_few_characters(tmp_path, words, encoding):
    done = run_command(
        words, tmp_path, variables=ENCODINGS[encoding], stdout=subprocess.PIPE, errors="replace"
    )
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == WORDS[words], done.stderr


def test_output_that_can_be_written_is(tmp_path):
    done = run_command("trace t.json", tmp_path, stdout=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "") and "peak" in done.stdout
