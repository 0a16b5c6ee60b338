"""Tests SECURITY.md's promises about access to data and about data that is never executed."""

import ast
import os
import re
import stat
import textwrap
import time

import pytest
from descriptors import open_descriptors
from repository import ROOT

import memsaver
from memsaver.errors import BackupError

MIB = 1 << 20
SOURCES = sorted(
    path for folder in ("memsaver", "integrations") for path in (ROOT / folder).rglob("*.py")
)

# Functions that execute data: builtins, and patterns of names in modules.
EXECUTES = {"eval", "exec", "compile", "execfile"}
UNPICKLES = re.compile(
    r"\b(c?pickle|dill|marshal|shelve|all_gather_object|gather_object|scatter_object_list|"
    r"broadcast_object_list|send_object_list|recv_object_list|torch\.load|yaml\.(unsafe_)?load|"
    r"os\.system|os\.popen|shell=True)\b"
)
# Documented in SECURITY.md.
RANKS_OF_A_JOB = ROOT / "integrations" / "rollout" / "pickles.py"
OPENED_TENSORS = ROOT / "integrations" / "engine" / "weights" / "payloads.py"


def test_no_data_is_executed_or_unpickled():
    executed, unpickled = {}, {}
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        called = {
            node.func.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        }
        if called & EXECUTES:
            executed[path] = called & EXECUTES
        if found := UNPICKLES.search(ast.unparse(_without_docstrings(tree))):
            unpickled[path] = found[0]
    assert len(SOURCES) > 200 and executed == {}
    assert set(unpickled) == {RANKS_OF_A_JOB, OPENED_TENSORS}, unpickled


def _without_docstrings(tree):
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [
                line
                for line in body
                if not (isinstance(line, ast.Expr) and isinstance(line.value, ast.Constant))
            ] or [ast.Pass()]
    return tree


def open_files(folder):
    return [
        number for number, where in open_descriptors().items() if where.startswith(f"{folder}/")
    ]


@pytest.mark.parametrize("mask", [0, 0o077])
def test_a_backup_on_disk_is_private(sim, tag, make_blocks, options, tmp_path, mask):
    # With any umask, the file has no name, no rights for others, and is not inherited by an exec.
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o1777)
    options(disk_dir=folder)
    blocks = make_blocks(name := tag(), [3 * MIB], backup="disk")
    before = os.umask(mask)
    try:
        memsaver.pause(name)
    finally:
        os.umask(before)
    (file,) = open_files(folder)
    facts = os.fstat(file)
    assert stat.S_ISREG(facts.st_mode) and stat.S_IMODE(facts.st_mode) == 0o600
    assert facts.st_nlink == 0 and facts.st_uid == os.geteuid() and list(folder.iterdir()) == []
    assert not os.get_inheritable(file)
    with pytest.raises(OSError):  # it cannot be linked to a name
        os.link(f"/proc/self/fd/{file}", folder / "name", follow_symlinks=True)
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_a_directory_that_became_a_link(sim, tag, make_blocks, options, tmp_path):
    # Files are created without a name, so that another user's link cannot redirect them.
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    options(disk_dir=folder)
    blocks = make_blocks(name := tag(), [MIB], backup="disk")
    folder.rmdir()
    folder.symlink_to(elsewhere)
    with pytest.raises(BackupError):
        memsaver.pause(name)
    assert not elsewhere.exists() and blocks[0].is_intact()


@pytest.mark.parametrize("top", ["off", "on"])
def test_one_socket_at_most_and_no_names_in_shared_places(run_python, tmp_path, top):
    # Objects that others could open: one descriptor of the process is a socket (see
    # test_stats_server.py), none is a shared file, and nothing appears in /dev/shm or the directory
    # of temporary files.
    def new_names():
        done = run_python(
            """
            import ctypes, os, stat
            NEW_MOUNTS, PRIVATE = 0x20000, 0x44000  # CLONE_NEWNS, MS_REC | MS_PRIVATE
            libc = ctypes.CDLL(None)
            alone = libc.unshare(NEW_MOUNTS) == libc.mount(b"none", b"/", None, PRIVATE, None) == 0
            alone = alone and libc.mount(b"none", b"/dev/shm", b"tmpfs", 0, None) == 0
            print("alone" if alone else "shared")
            before = set(os.listdir("/dev/shm"))
            import memsaver
            from memsaver import simulator
            for kind in ("host", "pageable", "disk"):
                with memsaver.region(kind, backup=kind):
                    block = simulator.buffer(1 << 20)
                memsaver.pause(kind)
                kinds = [os.stat(f"/proc/self/fd/{n}").st_mode for n in os.listdir("/proc/self/fd")
                         if os.path.exists(f"/proc/self/fd/{n}")]
                assert sum(map(stat.S_ISSOCK, kinds)) == (os.environ["MEMSAVER_TOP"] == "on")
                print(*set(os.listdir("/dev/shm")) - before)
                assert os.listdir(os.environ["TMPDIR"]) == []
                memsaver.resume(kind)
            """,
            TMPDIR=tmp_path,
            MEMSAVER_TOP=top,
        )
        place, *names = done.stdout.split()
        return place, names

    # Only root gets a /dev/shm of its own. Other processes add names to the shared one, but not
    # whenever this one runs.
    place, names = new_names()
    for _ in range(4):
        if place == "shared" and names:
            time.sleep(0.5)
            place, names = new_names()
    assert names == [], f"new in the {place} /dev/shm"


HOSTILE = [
    "__import__('os').system('touch owned')",
    "$(touch owned)",
    "`touch owned`",
    "; touch owned",
    "%n%n%n%n%s%s",
    "../../../../etc/passwd",
    "\x1b]0;owned\x07",
    "A" * 5000,
    "\udcff",
]


# A folder, which may be any text; a number and a flag. test_options.py tests all options.
CASES = [("DISK_DIR", value) for value in HOSTILE]
CASES += [("SHARE_BYTES", value) for value in HOSTILE[1::3]]
CASES += [("POISON", value) for value in HOSTILE[2::3]]


@pytest.mark.parametrize("name, value", CASES, ids=range(len(CASES)))
def test_variables_are_data(run_python, tmp_path, name, value):
    run_python(
        textwrap.dedent(
            f"""
            import memsaver
            from memsaver import simulator
            try:
                with memsaver.region("t", backup="disk"):
                    block = simulator.buffer(1 << 20)
                memsaver.pause("t")
            except memsaver.ConfigError as error:
                assert "MEMSAVER_{name}" in str(error)
            except memsaver.BackupError as error:
                assert {name == "DISK_DIR"}, error
            else:
                raise AssertionError("accepted")
            """
        ),
        **{f"MEMSAVER_{name}": value},
        MEMSAVER_TAG=value,
        MEMSAVER_BACKUP=value,
    )
    assert not (tmp_path / "owned").exists()
