"""Tests `memsaver run` and the modules that the command imports."""

import re
import signal
import sys
import textwrap

import pytest
from preloading import SIM, program_lines

# --- memsaver run ---------------------------------------------------------------------------------


@pytest.fixture
def cli(run):
    def go(*arguments, env=None):
        command = [sys.executable, "-m", "memsaver", "run", *map(str, arguments)]
        return run(command, env, preloaded=())

    return go


@pytest.mark.preloads
def test_run_end_to_end(cli, built):
    done = cli("--tag", "all", "--backup", "host", "--", built / "program", "leak", env=SIM)
    assert "main 0 ours 0" in done.stdout.splitlines()
    assert (done.returncode, done.stderr) == (42, "")


@pytest.mark.preloads
@pytest.mark.parametrize("backup", ["none", "disk"])
def test_run_keeps_contents_with_a_backup(cli, backup):
    code = """
        import ctypes
        import memsaver
        from child import MIB, Caller

        pointer = Caller("caller_1.so").malloc(4 * MIB)
        ctypes.memset(pointer, 7, 4 * MIB)
        memsaver.pause()
        (row,) = memsaver.stats().tags
        memsaver.resume()
        contents = set(ctypes.string_at(pointer, 4 * MIB))
        print(row.tag, row.backup, row.host_bytes > 0, row.disk_bytes > 0, contents)
        """
    code = textwrap.dedent(code)
    done = cli("--tag", "all", "--backup", backup, "--", sys.executable, "-c", code, env=SIM)
    assert (done.returncode, done.stderr) == (0, "")
    on_disk = backup == "disk"
    assert done.stdout == f"all {backup} False {on_disk} { ({7} if on_disk else {0}) }\n"


@pytest.mark.preloads
def test_run_without_a_tag_leaves_regions_to_the_command(cli, built):
    done = cli("--", built / "program", env=SIM)
    assert done.stdout.splitlines() == program_lines("theirs")


@pytest.mark.preloads
@pytest.mark.parametrize(
    "arguments",
    [
        ["--", "sh", "-c", 'echo "$@"', "sh", "--tag", "x", "--", "-y"],
        ["sh", "-c", 'echo "$@"', "sh", "--tag", "x", "--", "-y"],
    ],
)
def test_run_leaves_the_commands_options_to_it(cli, arguments):
    assert cli(*arguments).stdout == "--tag x -- -y\n"


@pytest.mark.preloads
def test_run_hands_over_signals(cli):
    done = cli("--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == -signal.SIGTERM
    ignored = cli("--", "grep", "SigIgn", "/proc/self/status").stdout.split()[1]
    assert not int(ignored, 16) & (1 << signal.SIGPIPE - 1 | 1 << signal.SIGXFSZ - 1)


@pytest.mark.preloads
def test_run_distinguishes_a_missing_interpreter_from_a_missing_command(cli, tmp_path):
    script = tmp_path / "script"
    script.write_text("#!/no/such/interpreter\n")
    script.chmod(0o755)
    done = cli("--", script)
    assert done.returncode == 127 and "interpreter" in done.stderr
    script.write_text("echo without a first line\n")
    done = cli("--", script)
    assert done.returncode == 126 and f"memsaver run -- sh {script}" in done.stderr


def test_run_rejects_an_invalid_option_before_the_command_starts(cli):
    folder = {"MEMSAVER_DISK_DIR": "/created/by/the/command"}  # checked when it is used
    done = cli("--", "echo", "started", env=folder)
    assert (done.returncode, done.stdout) == (0, "started\n")
    done = cli("--", "echo", "started", env={"MEMSAVER_HOST_BYTES": "64GB"})
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("memsaver run: ") and "MEMSAVER_HOST_BYTES" in done.stderr


def test_version_and_help_need_no_preloading(run):
    done = run([sys.executable, "-m", "memsaver", "--version"], preloaded=())
    assert done.returncode == 0 and re.match(r"memsaver \d", done.stdout)
    done = run([sys.executable, "-m", "memsaver", "run", "--help"], preloaded=())
    assert done.returncode == 0 and "--backup" in done.stdout


# --- imports of the command -----------------------------------------------------------------------


def test_running_a_command_takes_no_other_commands_parts(run):
    words = [sys.executable, "-X", "importtime", "-m", "memsaver", "run", "--", "true"]
    imported = {line.split("|")[-1].strip() for line in run(words, SIM, ()).stderr.splitlines()}
    assert "memsaver.cli.run" in imported
    of_others = ("memsaver.cli.checks", "memsaver.cli.measurements", "memsaver.integrations")
    of_others += ("memsaver.traces.files", "memsaver.cli.trace_summary")
    of_others += ("memsaver.cli.bare_driver",)
    assert imported & set(of_others) == set()
