"""Tests the distribution that implements torch_memory_saver with memsaver, as users install it."""

import re
import zipfile
from email import message_from_string

import pytest
from dropin_preload import LIBRARIES
from elftools.elf.elffile import ELFFile
from repository import ROOT

SOURCE = ROOT / "integrations" / "torch_memory_saver"
# The functions that the original's preloaded library exports for programs.
EXPORTS = {
    "set_memory_margin_bytes",
    "tms_get_cpu_backup_backend",
    "tms_get_cpu_backup_pointer",
    "tms_get_current_tag",
    "tms_get_enable_cpu_backup",
    "tms_get_enable_disk_backup",
    "tms_get_interesting_region",
    "tms_get_retain_cpu_backup",
    "tms_pause",
    "tms_resume",
    "tms_set_cpu_backup_backend",
    "tms_set_current_tag",
    "tms_set_disk_backup_dir",
    "tms_set_enable_cpu_backup",
    "tms_set_enable_disk_backup",
    "tms_set_interesting_region",
    "tms_set_retain_cpu_backup",
}


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
    assert facts.get_all("Requires-Dist") == ["memsaver<0.3,>=0.2"]
    ours = {str(path.relative_to(SOURCE)) for path in (SOURCE / "torch_memory_saver").rglob("*.py")}
    files = {name for name in names if ".dist-info/" not in name}
    assert files == {*ours, *LIBRARIES, "torch_memory_saver/py.typed"}


def test_its_version_meets_the_requirements_of_engines():
    requirements = pytest.importorskip("packaging.requirements")
    for text in ("torch_memory_saver>=0.0.9.post1", "torch-memory-saver==0.0.10"):
        assert requirements.Requirement(text).specifier.contains("0.0.10+memsaver")


def test_the_libraries_need_nothing_and_export_the_originals_names(dropin_site):
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
        # The dynamic linker provides the function for thread-local variables.
        assert {name for name in needed if not name.startswith("ld-linux")} <= {
            "libc.so.6",
            "libdl.so.2",
        }
        assert set(exported) == EXPORTS
        # Programs search the library for this name to determine whether it supports disk backups.
        assert b"TMS_INIT_ENABLE_DISK_BACKUP" in (dropin_site / name).read_bytes()


def test_importing_it_is_light(run_dropin):
    run_dropin("""
        assert "torch" not in sys.modules and "numpy" not in sys.modules
        assert simulator.control().sim_calls(b"cuInit") == 0
        import torch_memory_saver
        from torch_memory_saver import hooks, testing_utils, utils
        from torch_memory_saver.hooks import base, mode_preload
        assert mode_preload.configure_subprocess is torch_memory_saver.configure_subprocess
        assert testing_utils.is_xpu() is False
        assert "torch" not in sys.modules
    """)


# --- regions, pause, resume -----------------------------------------------------------------------


def test_tags_are_paused_and_resumed_one_by_one(run_dropin):
    """All objects refer to the same tags."""
    run_dropin("""
        with saver.region(tag="weights", enable_cpu_backup=True):
            weights = block(1)
        with TorchMemorySaver().region("kv_cache"):
            kv = block(2)
        with saver.region():
            rest = block(3)
        before = used()
        saver.pause("kv_cache")
        assert before - used() == 4 * MIB
        assert reads(weights, 1) and reads(rest, 3)
        TorchMemorySaver().pause(tag="weights")
        assert [memsaver.state(tag) for tag in ("weights", "kv_cache", "default")] == [
            "paused", "paused", "mapped"]
        saver.resume(tag="weights")
        assert reads(weights, 1)
        saver.resume("kv_cache")
        assert reads(kv, 0)
        assert used() == before
        assert saver.enabled is True
    """)


def test_regions_of_a_tag_keep_their_own_policies(run_dropin):
    """In a tag with all four policies, each buffer keeps the policy of its region."""
    run_dropin("""
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
        backups = {row.tag: row.backup for row in memsaver.stats().tags}
        assert backups["tag1"] == "host" and backups["tag1\\x1fnone"] == "none"
        assert backups["tag4"] == "disk" and backups["tag4\\x1fpageable"] == "pageable"
    """)


def test_parts_of_a_tag_take_no_tag_of_the_program(run_dropin):
    """The names of a tag's parts never collide with the names of the program's tags."""
    run_dropin("""
        makers = {"memsaver": memsaver.region, "saver": saver.region}
        for maker, region in makers.items():
            for other in ("{} (host)", "{}:host", "{} (none)", "{}:none", "{}'"):
                tag = maker + other
                other = other.format(tag)
                with saver.region(tag):
                    plain = block(1)
                with saver.region(tag, enable_cpu_backup=True):
                    kept = block(2)
                keeps = {"backup": "disk"} if maker == "memsaver" else {"enable_disk_backup": True}
                with region(other, **keeps):
                    mine = block(3)
                assert memsaver.stats()[other][0].backup == "disk"
                saver.pause(tag)
                assert memsaver.state(other) == "mapped" and reads(mine, 3)
                saver.resume(tag)
                saver.pause(other)
                assert memsaver.state(tag) == "mapped" and reads(plain, 0) and reads(kept, 2)
                with saver.region(tag, enable_cpu_backup=True):
                    pass
                saver.resume(other)
                assert reads(mine, 3) and memsaver.stats()[other][0].backup == "disk"
    """)


def test_a_tag_of_the_program_keeps_its_backup(run_dropin):
    """A region with a different backup becomes a part, even of a tag that memsaver.region created.

    A program cannot open a region of a part.
    """
    run_dropin("""
        with memsaver.region("w", backup="disk"):
            mine = block(1)
        with saver.region("w", enable_cpu_backup=True):
            kept = block(2)
        assert memsaver.stats()["w"][0].backup == "disk"
        (part,) = [row.tag for row in memsaver.stats().tags if row.tag != "w"]
        with saver.region("w"):
            plain = block(3)
        saver.pause("w")
        assert memsaver.state("w") == "paused"
        saver.resume("w")
        assert reads(mine, 1) and reads(kept, 2) and reads(plain, 0)
        for enter_part in (memsaver.region, saver.region):
            assert "reserved" in raises(ValueError, lambda: enter(enter_part(part)))
        memsaver.pause(part), memsaver.resume(part)  # as any tag that memsaver shows
    """)


def test_first_regions_of_a_tag_on_several_threads_agree(run_dropin):
    run_dropin("""
        import threading
        for n in range(30):
            tag, made, start = f"t{n}", {}, threading.Barrier(3)
            def make(byte, **options):
                start.wait(30)
                with saver.region(tag, **options):
                    made[byte] = block(byte, 4096)
            asked = {1: {}, 2: {"enable_cpu_backup": True}, 3: {"enable_disk_backup": True}}
            threads = [threading.Thread(target=make, args=[byte], kwargs=options)
                       for byte, options in asked.items()]
            [thread.start() for thread in threads], [thread.join(60) for thread in threads]
            saver.pause(tag), saver.resume(tag)
            assert reads(made[1], 0) and reads(made[2], 2) and reads(made[3], 3)
            made.clear()
    """)


def test_a_pause_of_mixed_backups_is_all_or_nothing(run_dropin):
    run_dropin("""
        with saver.region("t"):
            plain = block(1)
        with saver.region("t", enable_cpu_backup=True):
            kept = block(2, 64 * MIB)
            text = raises(memsaver.InvalidStateError, saver.pause, "t")
            assert "tag 't' cannot be paused" in text, text
        simulator.control().sim_host_limit(0)
        text = raises(memsaver.OutOfHostMemoryError, saver.pause, "t")
        assert "'t'" in text and "\\x1f" not in text, text
        assert reads(plain, 1) and reads(kept, 2)
        simulator.control().sim_host_limit((1 << 64) - 1)
        saver.pause("t")
        needed = 68 * MIB
        free = memsaver.device_memory(0)[0]
        simulator.control().sim_occupy(0, free - needed // 2)
        error = raises(memsaver.OutOfDeviceMemoryError, saver.resume, "t")
        assert "resuming 't' needs" in error, error
        assert memsaver.device_memory(0)[0] == needed // 2
        simulator.control().sim_occupy(0, 0)
        saver.resume("t")
        assert reads(plain, 0) and reads(kept, 2)
    """)


def test_calls_that_end_a_process_with_the_original_have_no_effect(run_dropin):
    done = run_dropin("""
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


def test_pausing_works_before_any_region_and_without_a_driver(run_dropin):
    code = "saver.pause('kv'), saver.resume('kv'), saver.pause(), saver.resume()"
    run_dropin(code)
    run_dropin(code, MEMSAVER_DRIVER="/nonexistent.so")


def test_a_region_that_raises_is_left_and_a_decorator_is_one(run_dropin):
    run_dropin("""
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


def test_disable_makes_exceptions(run_dropin):
    run_dropin("""
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


def test_options_that_contradict_each_other(run_dropin):
    run_dropin("""
        both = dict(enable_cpu_backup=True, enable_disk_backup=True)
        for options in (both, dict(cpu_backup_backend="pinned"),
                        dict(enable_cpu_backup=True, cpu_backup_backend="tape")):
            raises(ValueError, enter, saver.region("a", **options))
        raises(ValueError, enter, saver.region(""))
        raises(ValueError, enter, saver.cuda_graph(None, cpu_backup_backend="mmap"))
        assert memsaver.stats().tags == ()
    """)


def test_graphs_without_a_gpu_are_an_error_with_advice(run_dropin):
    run_dropin("""
        context = saver.cuda_graph(cuda_graph=None, pool=None, stream=None, tag="cuda_graph",
                                   capture_error_mode="global", enable_cpu_backup=True)
        assert "GPU" in raises(memsaver.NotLoadedError, enter, context)
        saver.pause("cuda_graph"), saver.resume("cuda_graph")
    """)


# --- internal state that frameworks use -----------------------------------------------------------


def test_allocations_can_be_switched_off_underneath(run_dropin):
    """Frameworks disable regions around calls to a library that allocates its own buffers."""
    run_dropin("""
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
