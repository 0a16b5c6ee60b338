"""The distribution that provides torch_memory_saver over memsaver, as its users meet it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import textwrap
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

from memsaver.native import LIBRARY_DIR

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "integrations" / "torch_memory_saver"
FIXTURES = ROOT / "tests" / "fixtures" / "preload"
LIBRARIES = [
    f"torch_memory_saver_hook_mode_preload{suffix}.abi3.so" for suffix in ("", "_cu12", "_cu13")
]
CC = (sysconfig.get_config_var("CC") or "cc").split()


@pytest.fixture
def run(dropin_site, tmp_path):
    """Runs Python code after the usual import; gives its CompletedProcess, status checked."""

    def go(code, *, status=0, packages=dropin_site, **env):
        environment = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MEMSAVER_", "TMS_")) and name != "LD_PRELOAD"
        }
        paths = [str(packages), str(FIXTURES), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        environment["MEMSAVER_DRIVER"] = "sim"
        environment.update(env)
        done = subprocess.run(
            [sys.executable, "-c", PREAMBLE + textwrap.dedent(code)],
            env=environment,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == status, done.stdout + done.stderr
        return done

    return go


PREAMBLE = """
import os, subprocess, sys
import memsaver
from memsaver import simulator
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver as saver

MIB = 1 << 20

def block(byte, nbytes=3 * MIB):
    made = simulator.buffer(nbytes)
    made.array[:] = bytes([byte]) * nbytes
    return made

def reads(made, byte):
    return bytes(made.array) == bytes([byte]) * made.nbytes

def raises(kind, function, *arguments, **named):
    try:
        function(*arguments, **named)
    except kind as error:
        return str(error)
    raise AssertionError(f"{kind.__name__} was not raised")

def enter(context):
    with context:
        pass

def used():
    free, total = memsaver.device_memory(0)
    return total - free
"""


# --- the distribution -----------------------------------------------------------------------------


def test_the_wheel_takes_the_place_of_the_original(dropin_wheel):
    assert re.fullmatch(
        r"torch_memory_saver-0\.0\.10\+memsaver-cp310-abi3-.*\.whl", dropin_wheel.name
    )
    with zipfile.ZipFile(dropin_wheel) as archive:
        names = archive.namelist()
        (metadata,) = [name for name in names if name.endswith(".dist-info/METADATA")]
        facts = message_from_string(archive.read(metadata).decode())
    assert facts["Name"] == "torch-memory-saver"
    assert facts["Version"] == "0.0.10+memsaver"
    assert [text.split(">")[0] for text in facts.get_all("Requires-Dist")] == ["memsaver"]
    ours = {str(path.relative_to(SOURCE)) for path in (SOURCE / "torch_memory_saver").rglob("*.py")}
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {*ours, *LIBRARIES, "torch_memory_saver/py.typed"}


def test_its_version_meets_the_requirements_of_engines():
    requirements = pytest.importorskip("packaging.requirements")
    for text in ("torch_memory_saver>=0.0.9.post1", "torch-memory-saver==0.0.10"):
        assert requirements.Requirement(text).specifier.contains("0.0.10+memsaver")


def test_the_libraries_need_nothing_and_export_nothing(dropin_site):
    for name in LIBRARIES:
        with (dropin_site / name).open("rb") as file:
            elf = ELFFile(file)
            needed = {
                tag.needed
                for tag in elf.get_section_by_name(".dynamic").iter_tags()
                if tag.entry.d_tag == "DT_NEEDED"
            }
            symbols = elf.get_section_by_name(".dynsym").iter_symbols()
            exported = [s.name for s in symbols if s.entry.st_shndx != "SHN_UNDEF" and s.name]
        assert needed <= {"libc.so.6", "libdl.so.2"}
        assert exported == []
        # A program looks for this in it, to know whether backups on disk are possible.
        assert b"TMS_INIT_ENABLE_DISK_BACKUP" in (dropin_site / name).read_bytes()


def test_memsaver_does_not_ship_it():
    setup = (ROOT / "setup.py").read_text()
    assert 'include=["integrations", "integrations.*"]' in setup
    from setuptools import find_packages

    found = find_packages(str(ROOT), include=["integrations", "integrations.*"])
    assert not [name for name in found if "torch_memory_saver" in name]


def test_importing_it_is_light(run):
    run("""
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert simulator.control().sim_calls(b"cuInit") == 0
        import torch_memory_saver
        from torch_memory_saver import hooks, testing_utils, utils
        from torch_memory_saver.hooks import base, mode_preload
        assert mode_preload.configure_subprocess is torch_memory_saver.configure_subprocess
        assert "torch" not in sys.modules
    """)


# --- regions, pause, resume -----------------------------------------------------------------------


def test_tags_are_paused_and_resumed_one_by_one(run):
    run("""
        with saver.region(tag="weights", enable_cpu_backup=True):
            weights = block(1)
        with saver.region("kv_cache"):
            kv = block(2)
        with saver.region():
            rest = block(3)
        before = used()
        saver.pause("kv_cache")
        assert before - used() == 4 * MIB
        assert reads(weights, 1) and reads(rest, 3)
        saver.pause(tag="weights")
        assert [memsaver.state(tag).value for tag in ("weights", "kv_cache", "default")] == [
            "paused", "paused", "mapped"]
        saver.resume(tag="weights")
        assert reads(weights, 1)
        saver.resume("kv_cache")
        assert reads(kv, 0)
        assert used() == before
        assert saver.enabled is True
    """)


def test_regions_of_a_tag_keep_what_each_asked_for(run):
    """One tag, all four policies: each buffer gets what its own region said."""
    run("""
        import itertools
        asked = {
            1: dict(enable_cpu_backup=True),
            2: dict(),
            3: dict(enable_cpu_backup=True, cpu_backup_backend="mmap"),
            4: dict(enable_disk_backup=True),
        }
        for order in (list(asked), list(asked)[::-1]):
            tag = f"tag{order[0]}"
            buffers = {}
            for byte in order:
                with saver.region(tag, **asked[byte]):
                    buffers[byte] = block(byte)
            before = used()
            for _ in range(2):
                saver.pause(tag)
                assert before - used() == 16 * MIB
                saver.resume(tag)
                assert used() == before
                assert {byte: reads(made, byte) for byte, made in buffers.items()} == {
                    1: True, 2: False, 3: True, 4: True}
                assert reads(buffers[2], 0)
        backups = {row.tag: row.backup.value for row in memsaver.stats().tags}
        assert backups["tag1"] == "host" and backups["tag1 (none)"] == "none"
        assert backups["tag4"] == "disk" and backups["tag4 (pageable)"] == "pageable"
    """)


def test_a_tag_named_like_a_member_of_another_is_a_tag_of_its_own(run):
    run("""
        with saver.region("a"):
            first = block(1)
        with saver.region("a", enable_cpu_backup=True):
            second = block(2)
        with saver.region("a (host)"):
            third = block(3)
        with saver.region("a (host)", enable_cpu_backup=True):
            fourth = block(4)
        saver.pause("a")
        assert reads(third, 3) and reads(fourth, 4)
        saver.resume("a")
        saver.pause("a (host)")
        assert reads(first, 0) and reads(second, 2)
        saver.resume("a (host)")
        assert reads(third, 0) and reads(fourth, 4)
    """)


def test_a_pause_of_mixed_backups_is_all_or_nothing(run):
    run("""
        with saver.region("t"):
            plain = block(1)
        with saver.region("t", enable_cpu_backup=True):
            kept = block(2, 64 * MIB)
        simulator.control().sim_host_limit(0)
        raises(memsaver.OutOfHostMemoryError, saver.pause, "t")
        assert reads(plain, 1) and reads(kept, 2)
        simulator.control().sim_host_limit((1 << 64) - 1)
        saver.pause("t")
        needed = 68 * MIB
        free = memsaver.device_memory(0)[0]
        simulator.control().sim_occupy(0, free - needed // 2)
        error = raises(memsaver.OutOfDeviceMemoryError, saver.resume, "t")
        assert memsaver.device_memory(0)[0] == needed // 2
        simulator.control().sim_occupy(0, 0)
        saver.resume("t")
        assert reads(plain, 0) and reads(kept, 2)
    """)


def test_what_ends_the_process_elsewhere_does_nothing_here(run):
    done = run("""
        with saver.region("a", enable_cpu_backup=True):
            first = block(1)
        with saver.region("b", enable_cpu_backup=True):
            second = block(2)
        saver.resume()
        saver.pause("a"), saver.pause("a"), saver.pause(), saver.pause()
        saver.resume("b"), saver.resume("b"), saver.resume(), saver.resume()
        assert reads(first, 1) and reads(second, 2)
        saver.pause("never"), saver.resume("never"), saver.pause(""), saver.resume("")
        assert reads(first, 1) and reads(second, 2)
        saver.pause("a")
        for backed in (True, False):
            raises(memsaver.InvalidStateError, enter, saver.region("a", enable_cpu_backup=backed))
        saver.resume("a")
        assert reads(first, 1)
        print("alive")
    """)
    assert (done.stdout, done.stderr) == ("alive\n", "")


def test_pausing_works_before_any_region_and_without_a_driver(run):
    run("saver.pause('cuda_graph'), saver.resume('cuda_graph'), saver.pause(), saver.resume()")
    run("saver.pause('kv'), saver.pause(), saver.resume()", MEMSAVER_DRIVER="/nonexistent.so")


def test_every_object_means_the_same_tags(run):
    run("""
        with TorchMemorySaver().region("a", enable_cpu_backup=True):
            first = block(1)
        TorchMemorySaver().pause("a")
        assert memsaver.state("a") is memsaver.State.PAUSED
        saver.resume("a")
        assert reads(first, 1)
    """)


def test_a_region_that_raises_is_left_and_a_decorator_is_one(run):
    run("""
        def fail():
            with saver.region("a"):
                raise KeyError("mine")
        raises(KeyError, fail)

        @saver.region("b", enable_cpu_backup=True)
        def make():
            return block(1)

        made = [make(), make()]
        saver.pause("a"), saver.pause("b"), saver.resume("b")
        assert all(reads(one, 1) for one in made)
    """)


def test_disable_makes_exceptions(run):
    run("""
        state = lambda: saver._impl._binary_wrapper.cdll.tms_get_interesting_region()
        with saver.disable():
            assert not state()
        with saver.region("a"):
            assert state()
            with saver.disable():
                assert not state()
                raises(memsaver.InvalidStateError, simulator.buffer, MIB)
                with saver.region("b", enable_cpu_backup=True):
                    inner = block(2)
            outer = block(1)
        saver.pause("a")
        assert reads(inner, 2)
        saver.resume("a")
        assert reads(outer, 0)
    """)


def test_options_that_contradict_each_other(run):
    run("""
        both = dict(enable_cpu_backup=True, enable_disk_backup=True)
        for options in (both, dict(cpu_backup_backend="pinned"),
                        dict(enable_cpu_backup=True, cpu_backup_backend="tape")):
            raises(ValueError, enter, saver.region("a", **options))
        raises(ValueError, enter, saver.region(""))
        raises(ValueError, enter, saver.cuda_graph(None, cpu_backup_backend="mmap"))
        assert memsaver.stats().tags == ()
    """)


def test_graphs_need_a_gpu_and_say_so(run):
    run("""
        context = saver.cuda_graph(cuda_graph=None, pool=None, stream=None, tag="cuda_graph",
                                   capture_error_mode="global", enable_cpu_backup=True)
        assert "GPU" in raises(memsaver.NotLoadedError, enter, context)
        saver.pause("cuda_graph"), saver.resume("cuda_graph")
    """)


# --- the state that frameworks reach for ----------------------------------------------------------


def test_allocations_can_be_switched_off_underneath(run):
    """As frameworks do around a library that makes buffers of its own."""
    run("""
        assert saver._impl is None
        with saver.region("a", enable_cpu_backup=True, cpu_backup_backend="mmap"):
            cdll = saver._impl._binary_wrapper.cdll
            assert cdll.tms_get_interesting_region() is True
            assert cdll.tms_get_current_tag() == b"a"
            assert cdll.tms_get_enable_cpu_backup() and not cdll.tms_get_enable_disk_backup()
            assert cdll.tms_get_cpu_backup_backend() == b"mmap"
            cdll.tms_set_interesting_region(False)
            cdll.tms_set_interesting_region(False)
            assert cdll.tms_get_interesting_region() is False
            raises(memsaver.InvalidStateError, simulator.buffer, MIB)
            cdll.tms_set_interesting_region(True)
            inside = block(1)
            with saver.disable():
                prior = cdll.tms_get_interesting_region()
                cdll.tms_set_interesting_region(False)
                cdll.tms_set_interesting_region(prior)
                assert prior is False and not cdll.tms_get_interesting_region()
                cdll.tms_set_interesting_region(True)  # there is nothing of its own to undo
            assert cdll.tms_get_interesting_region()
            cdll.tms_set_interesting_region(False)  # and the region is left like this
        assert not cdll.tms_get_interesting_region()
        assert cdll.tms_get_current_tag() == b"default"
        cdll.tms_set_interesting_region(True)
        assert not cdll.tms_get_interesting_region()
        saver.pause("a"), saver.resume("a")
        assert reads(inside, 1)
        with saver.region("a"):
            assert cdll.tms_get_current_tag() == b"a" and not cdll.tms_get_enable_cpu_backup()
        with memsaver.region("memsaver's", backup="disk"):
            assert cdll.tms_get_current_tag() == b"memsaver's"
            assert cdll.tms_get_enable_disk_backup() and not cdll.tms_get_enable_cpu_backup()
    """)


# --- settings -------------------------------------------------------------------------------------


def test_hook_mode_can_be_set_until_the_first_use(run):
    run("""
        assert saver.hook_mode == "preload"
        saver.hook_mode = "torch"
        raises(ValueError, setattr, saver, "hook_mode", "magic")
        with saver.region("a", enable_cpu_backup=True):
            made = block(1)
        assert "first" in raises(memsaver.InvalidStateError, setattr, saver, "hook_mode", "torch")
        assert saver.hook_mode == "torch"
        saver.pause("a"), saver.resume("a")
        assert reads(made, 1)
    """)


def test_the_margin_stays_free(run):
    run("""
        free, total = memsaver.device_memory(0)
        assert saver.memory_margin_bytes == 0
        saver.memory_margin_bytes = free - 20 * MIB
        assert saver.memory_margin_bytes == free - 20 * MIB
        with saver.region("a"):
            first = block(1, 16 * MIB)
            raises(memsaver.OutOfDeviceMemoryError, simulator.buffer, 16 * MIB)
            saver.memory_margin_bytes = 0
            second = block(2, 16 * MIB)
        raises(ValueError, setattr, saver, "memory_margin_bytes", -1)
    """)


@pytest.mark.parametrize("how", ["default", "true", "false", "environment"])
def test_host_memory_is_kept_unless_told_otherwise(run, how):
    env = {"TMS_RETAIN_CPU_BACKUP": "no"} if how == "environment" else {}
    run(
        f"""
        import time
        how = {how!r}
        assert saver.retain_cpu_backup is False
        if how in ("true", "false"):
            saver.retain_cpu_backup = how == "true"
        assert saver.retain_cpu_backup is (how == "true")
        with saver.region("a", enable_cpu_backup=True):
            made = block(1, 16 * MIB)
        host = lambda: memsaver.stats()["a"][0].host_bytes
        for _ in range(2):
            saver.pause("a")
            assert host() >= 16 * MIB
            saver.resume("a")
            if how in ("default", "true"):
                time.sleep(0.1)
                assert host() >= 16 * MIB
            else:
                end = time.monotonic() + 20
                while host() and time.monotonic() < end:
                    time.sleep(0.01)
                assert host() == 0
            assert reads(made, 1)
        """,
        **env,
    )


def test_the_directory_for_backups_is_made_and_used(run, tmp_path):
    code = """
        with saver.region("a", enable_disk_backup=True):
            made = block(1, 16 * MIB)
        if {named!r}:
            saver.set_disk_backup_dir({named!r})
        folder = {folder!r}
        assert os.path.isdir(folder)
        saver.pause("a")
        open_files = map("/proc/self/fd/{{}}".format, os.listdir("/proc/self/fd"))
        files = [os.readlink(path) for path in open_files if os.path.islink(path)]
        assert [name for name in files if name.startswith(folder)], files
        saver.resume("a")
        assert reads(made, 1)
        raises(ValueError, saver.set_disk_backup_dir, "/proc/nowhere/at/all")
    """
    by_call, by_env = str(tmp_path / "call" / "deep"), str(tmp_path / "env" / "deep")
    run(code.format(named=by_call, folder=by_call))
    run(
        code.format(named="", folder=by_env),
        TMS_DISK_BACKUP_DIR=by_env,
        TMS_DISK_BACKUP_CHUNK_MB="64",
    )


def test_the_kind_of_host_memory_from_the_environment(run):
    run(
        """
        with saver.region("a", enable_cpu_backup=True):
            first = block(1)
        with saver.region("b", enable_cpu_backup=True, cpu_backup_backend="pinned"):
            second = block(2)
        backups = {row.tag: row.backup.value for row in memsaver.stats().tags}
        assert backups == {"a": "pageable", "b": "host"}
        """,
        TMS_INIT_CPU_BACKUP_BACKEND="mmap",
    )


@pytest.mark.parametrize(
    "env",
    [
        {"TMS_INIT_ENABLE": "maybe"},
        {"TMS_INIT_ENABLE_CPU_BACKUP": ""},
        {"TMS_RETAIN_CPU_BACKUP": "2"},
        {"TMS_INIT_CPU_BACKUP_BACKEND": "tape"},
        {"TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_ENABLE_DISK_BACKUP": "1"},
    ],
)
def test_variables_that_mean_nothing_are_errors_at_the_first_use(run, env):
    run(
        f"""
        message = raises(ValueError, saver.pause)
        assert {next(iter(env))!r} in message, message
        assert saver._impl is None
        """,
        **env,
    )


# --- what was saved -------------------------------------------------------------------------------


def test_get_cpu_backup(run):
    pytest.importorskip("torch")
    run("""
        import torch
        def made(tag, **options):
            with saver.region(tag, **options):
                return simulator.empty((4, 3)).copy_(torch.arange(12.0).reshape(4, 3))
        kept, plain = made("a", enable_cpu_backup=True), made("a")
        disk = made("c", enable_disk_backup=True)
        expected = torch.arange(12.0).reshape(4, 3)
        assert saver.get_cpu_backup(kept) is None  # on the GPU
        assert saver.get_cpu_backup(torch.ones(3)) is None
        raises(ValueError, saver.get_cpu_backup, "kept")
        saver.pause()
        copy, view = saver.get_cpu_backup(kept), saver.get_cpu_backup(kept, zero_copy=True)
        for found in (copy, view, saver.get_cpu_backup(kept[1:, :2])):
            assert type(found) is torch.Tensor and found.device.type == "cpu"
        assert torch.equal(copy, expected) and torch.equal(view, expected)
        assert torch.equal(saver.get_cpu_backup(kept[1:, :2]), expected[1:, :2])
        assert copy.data_ptr() != view.data_ptr()
        copy.zero_()
        view[0, 0] = 7
        raises(memsaver.InvalidStateError, saver.get_cpu_backup, plain)
        raises(memsaver.InvalidStateError, saver.get_cpu_backup, disk)
        saver.resume()
        expected[0, 0] = 7
        assert torch.equal(kept, expected)
        assert saver.get_cpu_backup(kept) is None
        assert not plain.any()
    """)


# --- preloaded processes --------------------------------------------------------------------------


@pytest.fixture(scope="session")
def runtime(tmp_path_factory):
    """A stand-in for the CUDA runtime, and a library that calls it."""
    folder = tmp_path_factory.mktemp("runtime")
    for output, source, options in (
        ("libcudart.so.13", "standin_runtime.c", ["-DRUNTIME_ID=1", "-Wl,-soname,libcudart.so.13"]),
        ("caller.so", "caller.c", ["-Wl,-rpath,$ORIGIN,--no-as-needed", "./libcudart.so.13"]),
    ):
        command = [*CC, "-O1", "-fPIC", "-shared", str(FIXTURES / source), "-o", output, *options]
        subprocess.run(command, cwd=folder, check=True)
    return folder


CHILD = """
from child import Caller
caller = Caller("caller.so")
assert caller.lib is not None

def filled(byte, nbytes=3 * MIB):
    import ctypes
    pointer = caller.malloc(nbytes)
    assert pointer, caller.status
    ctypes.memset(pointer, byte, nbytes)
    return (ctypes.c_char * nbytes).from_address(pointer)

def has(array, byte):
    return bytes(array) == bytes([byte]) * len(array)
"""


@pytest.fixture
def preloaded(run, dropin_site, runtime):
    """Runs code in a child with `LD_PRELOAD` set as a framework sets it by hand."""

    def go(code, library=LIBRARIES[0], **options):
        options = {"LD_PRELOAD": str(dropin_site / library), "FIXTURES": str(runtime), **options}
        done = run(CHILD + textwrap.dedent(code), **options)
        assert done.stderr == ""
        return done

    return go


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_whole_process_is_a_region(preloaded, library):
    """As slime and miles start their trainers."""
    preloaded(
        """
        assert memsaver.is_preloaded()
        first = filled(1)
        with saver.disable():
            outside = caller.malloc(MIB)
            assert outside >> 56 == 1  # from the runtime
        with saver.region("other"):
            other = filled(2)
        with saver.region("default", enable_cpu_backup=False):
            plain = filled(3)
        cdll = saver._impl._binary_wrapper.cdll
        assert cdll.tms_get_interesting_region() and cdll.tms_get_enable_cpu_backup()
        assert cdll.tms_get_current_tag() == b"default"
        cdll.tms_set_interesting_region(False)
        assert caller.malloc(MIB) >> 56 == 1
        cdll.tms_set_interesting_region(True)
        before = used()
        saver.pause("default")
        assert before - used() == 8 * MIB
        assert has(other, 2)
        with saver.disable():
            assert caller.malloc(MIB) >> 56 == 1
        saver.resume("default")
        assert has(first, 1) and has(plain, 0) and has(other, 2)
        saver.pause(), saver.resume()
        assert has(first, 1) and has(other, 0)
        """,
        library,
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


@pytest.mark.parametrize(
    "backup, env",
    [
        ("none", {}),
        ("none", {"TMS_INIT_ENABLE_CPU_BACKUP": "0"}),
        ("host", {"TMS_INIT_ENABLE_CPU_BACKUP": "yes"}),
        ("pageable", {"TMS_INIT_ENABLE_CPU_BACKUP": "1", "TMS_INIT_CPU_BACKUP_BACKEND": "mmap"}),
        ("disk", {"TMS_INIT_ENABLE_CPU_BACKUP": "0", "TMS_INIT_ENABLE_DISK_BACKUP": "true"}),
    ],
)
def test_the_backup_of_a_whole_process(preloaded, backup, env):
    preloaded(
        f"""
        first = filled(1)
        assert memsaver.stats()["default"][0].backup == {backup!r}
        saver.pause(), saver.resume()
        assert has(first, {int(backup != "none")})
        """,
        TMS_INIT_ENABLE="TRUE",
        **env,
    )


@pytest.mark.parametrize("env", [{}, {"TMS_INIT_ENABLE": "0"}, {"TMS_INIT_ENABLE": "maybe"}])
def test_a_preloaded_process_is_no_region_unless_told(preloaded, env):
    preloaded(
        """
        assert memsaver.is_preloaded()
        assert caller.malloc(MIB) >> 56 == 1
        with memsaver.region("mine", backup="host"):
            first = filled(1)
        memsaver.pause(), memsaver.resume()
        assert has(first, 1)
        """,
        **env,
    )


def test_a_child_of_a_whole_process_can_be_an_ordinary_one(preloaded):
    """The variables that were made for the parent end with TMS_INIT_ENABLE."""
    preloaded(
        """
        assert os.environ["MEMSAVER_TAG"] == "default"
        report = "import os; print([n for n in os.environ if n.startswith('MEMSAVER_')])"
        child = lambda **env: subprocess.run([sys.executable, "-c", report], check=True,
            capture_output=True, text=True, env={**os.environ, **env}).stdout
        assert "MEMSAVER_TAG" in child()
        assert "MEMSAVER_TAG" not in child(TMS_INIT_ENABLE="0")
        assert "MEMSAVER_BACKUP" not in child(TMS_INIT_ENABLE="0")
        """,
        TMS_INIT_ENABLE="1",
    )


def test_memsavers_own_variables_come_first(preloaded):
    preloaded(
        """
        first = filled(1)
        assert [row.tag for row in memsaver.stats().tags] == ["mine"]
        saver.pause("mine"), saver.resume()
        assert has(first, 1)
        """,
        TMS_INIT_ENABLE="1",
        MEMSAVER_TAG="mine",
        MEMSAVER_BACKUP="host",
    )


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_a_whole_process_has_no_expandable_segments(preloaded, variable):
    setting = "a:1,expandable_segments : True,b:2,EXPANDABLE_SEGMENTS:true,c:True"
    code = f"assert os.environ[{variable!r}] == {{!r}}, os.environ[{variable!r}]"
    off = "a:1,expandable_segments : False,b:2,EXPANDABLE_SEGMENTS:False,c:True"
    preloaded(code.format(off), TMS_INIT_ENABLE="1", **{variable: setting})
    preloaded(code.format(setting), **{variable: setting})


def test_configure_subprocess(run, runtime):
    """Children are preloaded, whole processes or not, and the environment is put back."""
    run(
        """
        child = '''
        import os
        import memsaver
        from child import Caller
        assert memsaver.is_preloaded()
        inside = Caller("caller.so").malloc(1 << 20) >> 56 == 0
        assert inside == bool(os.environ.get("TMS_INIT_ENABLE"))
        '''.replace("        ", "")
        def start(**env):
            subprocess.run([sys.executable, "-c", child], check=True, env={**os.environ, **env})
        with configure_subprocess():
            first = os.environ["LD_PRELOAD"].split(":")
            assert "torch_memory_saver" in first[0]
            start()
            start(TMS_INIT_ENABLE="1")
        assert "LD_PRELOAD" not in os.environ
        os.environ["LD_PRELOAD"] = "/lib/a.so:/lib/b.so"
        def fail():
            with configure_subprocess():
                inside = os.environ["LD_PRELOAD"].split(":")
                assert inside == [*first, "/lib/a.so", "/lib/b.so"]
                with configure_subprocess():
                    assert os.environ["LD_PRELOAD"].split(":") == inside
                raise KeyError
        raises(KeyError, fail)
        assert os.environ.pop("LD_PRELOAD") == "/lib/a.so:/lib/b.so"
        """,
        FIXTURES=str(runtime),
    )


def test_the_library_finds_memsaver_or_harms_nothing(run, dropin_wheel, dropin_site, tmp_path):
    """Alone in a folder it does nothing; LD_LIBRARY_PATH shows it the way; Python says so."""
    alone = tmp_path / "alone"
    with zipfile.ZipFile(dropin_wheel) as archive:
        archive.extractall(alone)
    library, paths = str(alone / LIBRARIES[0]), f"{alone}{os.pathsep}{LIBRARY_DIR.parent}"
    env = {"LD_PRELOAD": library, "TMS_INIT_ENABLE": "1", "PATH": os.environ["PATH"]}
    done = subprocess.run(["/bin/sh", "-c", "echo out; exit 3"], env=env, capture_output=True)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"out\n", b"")
    code = """
        from torch_memory_saver.utils import get_binary_path_from_package
        name = "torch_memory_saver_hook_mode_preload"
        message = raises(memsaver.NotLoadedError, get_binary_path_from_package, name)
        assert "LD_LIBRARY_PATH" in message
        assert "preload" in raises(memsaver.NotLoadedError, saver.pause)
        os.environ["LD_LIBRARY_PATH"] = os.path.dirname(memsaver._C.__file__)
        path = get_binary_path_from_package(name)
        child = subprocess.run([sys.executable, "-c", "import memsaver; "
            "assert memsaver.is_preloaded()"], env={**os.environ, "LD_PRELOAD": str(path)})
        assert child.returncode == 0
    """
    run(code, packages=paths, TMS_INIT_ENABLE="1", LD_PRELOAD=library)


def test_the_path_of_the_library(run, dropin_site):
    run(
        f"""
        import torch_memory_saver
        from torch_memory_saver.utils import change_env, get_binary_path_from_package, is_xpu
        path = get_binary_path_from_package("torch_memory_saver_hook_mode_preload")
        assert str(path.parent) == {str(dropin_site)!r} and path.is_file()
        by_hand = os.path.dirname(os.path.dirname(torch_memory_saver.__file__))
        assert by_hand == str(path.parent)
        raises(ValueError, get_binary_path_from_package, "torch_memory_saver_hook_mode_torch")
        with change_env("A", "1"), change_env("A", "2"):
            assert os.environ["A"] == "2"
        assert "A" not in os.environ and not is_xpu()
        """
    )
