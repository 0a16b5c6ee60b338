"""Tests functions of the preloaded library that programs call through ctypes or dlsym."""

import subprocess
import sys
import textwrap
import zipfile

import pytest
from dropin_preload import LIBRARIES

pytestmark = pytest.mark.each_python

FUNCTIONS = """
import ctypes
tms = ctypes.CDLL(None)
flag, text, pointer, size = ctypes.c_bool, ctypes.c_char_p, ctypes.c_void_p, ctypes.c_uint64
for name in ("interesting_region", "enable_cpu_backup", "enable_disk_backup", "retain_cpu_backup"):
    getattr(tms, f"tms_set_{name}").argtypes, getattr(tms, f"tms_get_{name}").restype = [flag], flag
for name in ("set_current_tag", "set_cpu_backup_backend", "set_disk_backup_dir", "pause", "resume"):
    getattr(tms, f"tms_{name}").argtypes = [text]
tms.tms_get_current_tag.restype = tms.tms_get_cpu_backup_backend.restype = text
tms.tms_get_cpu_backup_pointer.argtypes = [pointer, size]
tms.tms_get_cpu_backup_pointer.restype = pointer
tms.set_memory_margin_bytes.argtypes = [size]
ours = lambda array: ctypes.addressof(array) >> 56 == 0
"""


@pytest.fixture
def by_ctypes(preloaded):
    """Run code in a preloaded child process, with the library's functions as `tms`."""
    return lambda code, **options: preloaded(FUNCTIONS + textwrap.dedent(code), **options)


def test_a_whole_process_is_paused_and_resumed_by_ctypes(by_ctypes):
    """Allocations have odd sizes, and some allocations are freed while they are paused."""
    by_ctypes(
        """
        pointers = [caller.malloc(6912) for _ in range(3)]
        write = lambda pointer, byte: ctypes.memset(pointer, byte, 6912)
        write(pointers[0], 0xA5)
        assert tms.tms_pause(None) == 0
        assert memsaver.state("default") == "paused"
        assert tms.tms_pause(b"") == 0 and tms.tms_pause(b"never") == 0
        assert caller.free(pointers.pop(1)) == 0
        assert tms.tms_resume(None) == 0 and tms.tms_resume(b"default") == 0
        for pointer in pointers:
            assert ctypes.string_at(pointer, 6912) == bytes(6912)
            write(pointer, 0x5A)
            assert ctypes.string_at(pointer, 6912) == b"\\x5a" * 6912
            assert caller.free(pointer) == 0
        assert memsaver.stats().tags[0].allocations == 0
        """,
        TMS_INIT_ENABLE="1",
    )


def test_regions_by_ctypes(by_ctypes):
    """A region can surround a single allocation, as in a C++ engine's cache."""
    by_ctypes("""
        assert (tms.tms_get_interesting_region(), tms.tms_get_current_tag()) == (False, b"default")
        def begin(tag, cpu):
            tms.tms_set_current_tag(tag)
            tms.tms_set_enable_cpu_backup(cpu)
            tms.tms_set_interesting_region(True)
        def end():
            tms.tms_set_interesting_region(False)
            tms.tms_set_current_tag(b"default")
            tms.tms_set_enable_cpu_backup(False)
        made = {}
        for byte, tag, cpu in ((1, b"kv", False), (2, b"kv", True), (3, b"other", True)):
            begin(tag, cpu)
            assert tms.tms_get_interesting_region() and tms.tms_get_current_tag() == tag
            assert tms.tms_get_enable_cpu_backup() is cpu
            made[byte] = filled(byte)
            end()
            assert not tms.tms_get_interesting_region()
            assert tms.tms_get_current_tag() == b"default"
            assert not ours((ctypes.c_char * 1).from_address(caller.malloc(MIB)))
        before = used()
        assert tms.tms_pause(b"kv") == 0 and before - used() == 8 * MIB
        assert has(made[3], 3)
        begin(b"kv", True)  # while it is paused
        assert not tms.tms_get_interesting_region()
        assert tms.tms_resume(b"kv") == 0
        assert tms.tms_get_interesting_region()  # from here on
        made[4] = filled(4)
        assert tms.tms_pause(b"kv") == 0 and tms.tms_resume(b"kv") == 0
        end()
        assert [has(made[byte], byte) for byte in (1, 2, 3, 4)] == [False, True, True, True]
        assert has(made[1], 0)
        saver.pause("kv"), saver.resume("kv")  # one tag, whoever names it
        assert has(made[2], 2) and {row.tag for row in memsaver.stats().tags} == {
            "kv", "kv\\x1fhost", "other"}
        with saver.region("kv"):
            assert tms.tms_get_current_tag() == b"kv" and not tms.tms_get_enable_cpu_backup()
            tms.tms_set_interesting_region(False)
            assert not ours((ctypes.c_char * 1).from_address(caller.malloc(MIB)))
            tms.tms_set_interesting_region(True)
            assert ours(filled(5))
    """)


def test_settings_by_ctypes(by_ctypes, tmp_path):
    by_ctypes(f"""
        assert tms.tms_get_cpu_backup_backend() == b"pinned"
        tms.tms_set_interesting_region(True)
        assert (tms.tms_get_current_tag(), tms.tms_get_enable_cpu_backup()) == (b"default", False)
        plain = filled(1)
        tms.tms_set_enable_cpu_backup(True)
        tms.tms_set_cpu_backup_backend(b"mmap")
        assert tms.tms_get_cpu_backup_backend() == b"mmap" and tms.tms_get_enable_cpu_backup()
        mmap = filled(2)
        tms.tms_set_enable_cpu_backup(False)
        tms.tms_set_enable_disk_backup(True)
        tms.tms_set_disk_backup_dir({str(tmp_path)!r}.encode())
        assert tms.tms_get_enable_disk_backup() and not tms.tms_get_enable_cpu_backup()
        disk = filled(3)
        tms.tms_set_interesting_region(False)
        pointer = lambda array: tms.tms_get_cpu_backup_pointer(ctypes.addressof(array), len(array))
        host = lambda: sum(row.host_bytes for row in memsaver.stats().tags)
        for retain in (True, False):
            tms.tms_set_retain_cpu_backup(retain)
            assert tms.tms_get_retain_cpu_backup() is retain
            assert tms.tms_pause(b"default") == 0
            saved = pointer(mmap)
            assert ctypes.string_at(saved, len(mmap)) == bytes([2]) * len(mmap)
            assert pointer(plain) is None and pointer(disk) is None
            assert tms.tms_resume(b"default") == 0
            assert has(plain, 0) and has(mmap, 2) and has(disk, 3)
            assert pointer(mmap) == (saved if retain else None)
            assert (host() > 0) is retain
        free, total = memsaver.device_memory(0)
        tms.set_memory_margin_bytes(free - 8 * MIB)
        assert saver.memory_margin_bytes == free - 8 * MIB
    """)


def test_a_failure_is_a_number_and_a_warning(by_ctypes):
    by_ctypes(
        """
        import warnings
        made = filled(1, 64 * MIB)
        simulator.control().sim_host_limit(0)
        assert tms.tms_pause(None) == 2 and has(made, 1)
        simulator.control().sim_host_limit((1 << 64) - 1)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            saver.pause("never"), memsaver.trim(wait=True)
        assert any("out of memory" in str(each.message) for each in found), [
            str(each.message) for each in found]
        assert tms.tms_pause(None) == 0
        simulator.control().sim_occupy(0, memsaver.device_memory(0)[0] - 32 * MIB)
        assert tms.tms_resume(None) == 2
        simulator.control().sim_occupy(0, 0)
        assert tms.tms_resume(None) == 0 and has(made, 1)
        memsaver._runtime.native._C.next_warning()
        """,
        TMS_INIT_ENABLE="1",
        TMS_INIT_ENABLE_CPU_BACKUP="1",
    )


def test_without_memsaver_the_functions_report_errors(dropin_wheel, tmp_path):
    with zipfile.ZipFile(dropin_wheel) as archive:
        library = archive.extract(LIBRARIES[0], tmp_path)
    code = """
import ctypes
tms = ctypes.CDLL(None)
assert not tms.tms_get_interesting_region() & 255
raise SystemExit(tms.tms_pause(b"a"))
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    done = subprocess.run(command, env={"LD_PRELOAD": library}, capture_output=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"", b"")
