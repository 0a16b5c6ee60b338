"""Tests that wrong, missing and contradictory arguments print one line on stderr, and the exit
status."""

import re
import shlex

import pytest
from made_traces import made

from memsaver.cli import main
from memsaver.cli.app import app
from memsaver.traces import files
from memsaver.traces.trace import TagSample

NO_OPTION = "no such option: --nope"
EXTRA = "unexpected extra argument"
NO_VALUE = "requires an argument"
SEE_RUN = "put it after `--`, as in `memsaver run"
NO_COMMAND = "there is no command to run"
NO_TRACE = "not a memsaver trace"

# The arguments, the exit status, and a part of the line on stderr. Every line must begin with
# `memsaver`, followed by the command's name if the first argument is a command.
CASES = [
    ("nope", 2, "no such command 'nope'"),
    ("--nope", 2, NO_OPTION),
    ("run", 2, NO_COMMAND),
    ("run --", 2, NO_COMMAND),
    ("run ''", 2, NO_COMMAND),
    ("run --tag t", 2, SEE_RUN),
    ("run --tag", 2, NO_VALUE),
    ("run --tag -- true", 2, "'--' looks like an option"),
    ("run --tag '' -- true", 2, "a tag cannot be empty"),
    ("run --backup host -- true", 2, "needs a tag"),
    ("run --tag t --backup nope -- true", 2, "there is no backup 'nope'"),
    ("run -- /", 126, "cannot run /"),
    ("run -- no_such_command -x", 127, "command not found: no_such_command"),
    ("run -- /etc/passwd", 126, "cannot run /etc/passwd"),
    ("demo extra", 2, EXTRA),
    ("doctor --json=1", 2, "does not take a value"),
    ("top --interval", 2, NO_VALUE),
    ("top --interval x", 2, "'--interval'"),
    ("top --interval 0", 2, "'--interval'"),
    ("top --interval nan", 2, "'--interval'"),
    ("top --interval 2 --once", 2, "--interval and --once exclude each other"),
    ("top --interval 2 --json", 2, "--interval and --json exclude each other"),
    ("top --pid", 2, NO_VALUE),
    ("top --pid 0", 2, "'--pid'"),
    ("top --pid -1", 2, "'--pid'"),
    ("top --pid 1", 1, "process 1 is not among those"),
    (f"top --pid {10**20}", 1, "is not among those"),
    ("bench --size", 2, NO_VALUE),
    ("bench --size ''", 2, "'' is not a size"),
    ("bench --size 1MiB", 2, "a size of 1 MiB is too small"),
    ("bench --size 100GiB", 1, "device 0 has 80 GiB free"),
    ("bench --size 99999999999TiB", 1, "choose a smaller size"),
    ("bench --device -1", 2, "'--device'"),
    ("bench --device 9", 2, "no device 9"),
    ("bench --rounds 0", 2, "'--rounds'"),
    ("bench --rounds 1001", 2, "'--rounds'"),
    ("bench --picture", 2, NO_VALUE),
    ("bench --picture x.doc", 2, "must end in one of"),
    ("bench --picture no/x.png", 2, "the folder does not exist"),
    ("trace", 2, "missing argument 'FILE'"),
    ("trace t.json extra", 2, EXTRA),
    ("trace none.json", 1, "none.json: No such file"),
    ("trace /", 1, "Is a directory"),
    ("trace /dev/null", 1, NO_TRACE),
    ("trace bad.json", 1, NO_TRACE),
    ("trace t.json --html", 2, NO_VALUE),
    ("trace t.json --html ''", 2, "does not end in .html"),
    ("trace t.json --html no/x.html", 1, "no/x.html: No such file"),
    ("trace t.json --html full.html", 1, "No space left on device"),
    ("trace t.json --picture", 2, NO_VALUE),
    ("trace t.json --picture x.html", 2, ".png, .svg, .pdf"),
]


@pytest.fixture
def run_main(sim, tmp_path, monkeypatch, capfd):
    """Run the console script in a folder with some files; return its status and outputs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    (tmp_path / "t.json").touch()
    files.save(made(samples=[TagSample(0.0, "t", 0, 1, 1)]), tmp_path / "t.json")
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "full.html").symlink_to("/dev/full")

    def run(words):
        monkeypatch.setattr("sys.argv", ["memsaver", *shlex.split(words)])
        with pytest.raises(SystemExit) as end:
            main()
        return end.value.code, *capfd.readouterr()

    return run


@pytest.mark.parametrize(("words", "status", "says"), CASES, ids=[case[0] for case in CASES])
def test_bad_arguments_are_one_line(run_main, words, status, says):
    code, out, err = run_main(words)
    names = [command.name for command in app.registered_commands]
    who = " ".join(["memsaver", *(name for name in names if name == words.split()[0])])
    assert err.startswith(f"{who}: ") and says in err
    assert err.count("\n") == 1 and err.endswith("\n")
    assert code == status
    assert out == "" or status == 1  # a failure may come after some output


def test_a_missing_command_shows_the_help_too(run_main):
    code, out, err = run_main("")
    assert (code, err.count("\n")) == (2, 1) and "a command is missing" in err
    for command in app.registered_commands:
        assert f" {command.name} " in out


@pytest.mark.parametrize("columns", [120, 80, 50])
def test_help_is_not_cut(run_main, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", str(columns))
    for words in ("", *(command.name for command in app.registered_commands)):
        code, out, err = run_main(f"{words} --help")
        assert (code, err) == (0, "")
        assert (
            "…" not in out
            and not re.search(r"\w\.\.\.\s", out)
            and max(map(len, out.splitlines())) <= columns
        )
        assert "<bool>" not in out  # flags take no value


@pytest.mark.parametrize("command", ["doctor", "bench", "trace t.json", "top --once"])
def test_an_interrupt_is_one_line(run_main, monkeypatch, command):
    def interrupt(*arguments):
        raise KeyboardInterrupt

    for place in (
        "memsaver.cli.checks.check_all",
        "memsaver.cli.measurements.measure_machine",
        "memsaver.traces.files.load",
        "memsaver.cli.top.find_processes",
    ):
        monkeypatch.setattr(place, interrupt)
    assert run_main(command) == (130, "", "memsaver: interrupted\n")


def test_an_interrupt_of_the_imports_is_one_line(run_python):
    done = run_python(
        """
        import sys

        class Interrupter:
            def find_spec(self, name, path=None, target=None):
                if name == "typer":
                    raise KeyboardInterrupt

        sys.meta_path.insert(0, Interrupter())
        sys.argv = ["memsaver", "doctor"]
        from memsaver.cli import main

        main()
        """,
        status=130,
    )
    assert (done.stdout, done.stderr) == ("", "memsaver: interrupted\n")
