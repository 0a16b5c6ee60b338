"""Test backups in another device's memory: places, contents, figures, failures."""

import textwrap

import pytest

SCENE = """
import memsaver
from peer_scene import *
from memsaver._runtime.native import _C
from memsaver.errors import *

def fails(kind, call=lambda: memsaver.pause("t")):
    try:
        call()
    except kind as error:
        return error
    raise AssertionError("no error")
"""


@pytest.fixture
def run(run_python):
    def run(code: str, devices: int = 2, **env: object):
        return run_python(SCENE + textwrap.dedent(code), MEMSAVER_SIM_DEVICES=devices, **env)

    return run


# --- places ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", ["[1]", "[4097, 3]", "[66 * MIB]", "[3 * MIB + 5, 700]"])
def test_the_backup_is_on_the_neighbour(run, sizes):
    run(f"""
        scene = Scene({sizes})
        for _ in range(2):
            report = memsaver.pause("t")
            assert 0 < report.copied_bytes or _, report
            assert scene.row.backup_bytes <= scene.row.peer_bytes == scene.on_neighbour()
            assert scene.row.host_bytes == scene.row.disk_bytes == scene.sim.tag_bytes(0) == 0
            memsaver.resume("t")
            scene.check()
        scene.check_freed()
    """)


def test_only_changed_contents_are_copied_again(run):
    run("""
        scene = Scene([70 * MIB, 3 * MIB])
        assert memsaver.pause("t").copied_bytes == 74 * MIB
        memsaver.resume("t")
        assert memsaver.pause("t").copied_bytes == 0 == memsaver.resume("t").copied_bytes - 74 * MIB
        scene.rewrite(1)
        assert memsaver.pause("t").copied_bytes == 3 * MIB
        assert scene.row.last_unchanged_bytes == 71 * MIB
        memsaver.resume("t")
        scene.check()
        memsaver.configure(fingerprints=False)
        assert memsaver.pause("t").copied_bytes == 74 * MIB
        memsaver.resume("t")
        scene.check()
    """)


@pytest.mark.parametrize(
    ("room", "margin", "there"),
    [
        ("0", "0", 0),
        ("300 * MIB", "0", 258),
        ("300 * MIB", "100 * MIB", 66),
        ("330 * MIB", "0", 322),
    ],
    ids=["full", "part", "margin", "all"],
)
def test_contents_without_room_are_saved_on_the_host(run, room, margin, there):
    # One block longer than the longest chunk (256 MiB), and a small one.
    run(f"""
        scene = Scene([258 * MIB, 64 * MIB], margin={margin})
        scene.leave_free({room})
        for _ in range(2):
            memsaver.pause("t")
            row = scene.row
            assert row.peer_bytes == scene.on_neighbour() and row.disk_bytes == 0
            assert row.peer_bytes >> 20 == {there}, row.peer_bytes >> 20
            assert row.host_bytes + row.peer_bytes == 322 * MIB == row.backup_bytes
            memsaver.resume("t")
            scene.check()
            scene.rewrite(0), scene.rewrite(1)
        scene.sim.occupy(0, 1)
        scene.check_freed()
    """)


def test_memory_that_another_process_takes_first_is_replaced_by_the_host(run):
    run("""
        scene = Scene([258 * MIB, 64 * MIB])
        scene.sim.fail("cuMemCreate", 2, nth=2, times=0)
        memsaver.pause("t")
        assert 0 < scene.row.peer_bytes == scene.on_neighbour() < 322 * MIB
        assert scene.row.host_bytes + scene.row.peer_bytes == 322 * MIB
        scene.sim.clear_faults()
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


def test_a_budget_refuses_the_hosts_part_before_anything_changes(run):
    run("""
        scene = Scene([258 * MIB, 64 * MIB])
        scene.leave_free(300 * MIB)
        memsaver.configure(host_bytes=8 * MIB)
        error = fails(OutOfHostMemoryError)
        assert error.tag == "t" and error.needed == 64 * MIB, error
        scene.check()
        assert scene.on_neighbour() == 0 == scene.row.host_bytes
        scene.sim.occupy(0, 1)
        memsaver.pause("t"), memsaver.resume("t")
        scene.check()
    """)


def test_retained_chunks_keep_their_place(run):
    run("""
        scene = Scene([258 * MIB, 64 * MIB])
        scene.leave_free(300 * MIB)
        memsaver.pause("t"), memsaver.resume("t")
        place = scene.row.host_bytes, scene.row.peer_bytes
        scene.sim.occupy(0, 1)
        assert memsaver.pause("t").copied_bytes == 0
        assert (scene.row.host_bytes, scene.row.peer_bytes) == place
        memsaver.resume("t")
        memsaver.trim(wait=True)
        memsaver.pause("t")
        assert (scene.row.host_bytes, scene.row.peer_bytes) == (0, 322 * MIB)
        memsaver.resume("t")
        scene.check()
    """)


@pytest.mark.parametrize("first", ["host", "pageable", "disk"])
def test_a_pause_may_choose_another_place(run, first):
    run(f"""
        scene = Scene([66 * MIB, 700])
        for backup in ("{first}", "peer", "{first}", "peer"):
            memsaver.pause("t", backup=backup)
            row = scene.row
            assert (row.peer_bytes > 0) is (backup == "peer") is (scene.on_neighbour() > 0)
            assert (row.host_bytes + row.disk_bytes > 0) is (backup != "peer")
            memsaver.resume("t")
            scene.check()
    """)


# --- which neighbour ------------------------------------------------------------------------------


def test_the_device_with_most_free_memory_is_chosen_once(run):
    run(
        """
        scene = Scene([3 * MIB], devices=1)
        scene.sim.occupy(40 * GIB, 1), scene.sim.occupy(20 * GIB, 2), scene.sim.occupy(30 * GIB, 3)
        before = scene.sim.counts().retained_contexts
        memsaver.pause("t")
        assert scene.sim.counts().retained_contexts == before + 1, "only the chosen one's is kept"
        memsaver.resume("t")
        memsaver.trim(wait=True)
        scene.sim.idle[2] = scene.sim.physical(2)
        scene.sim.occupy(70 * GIB, 2)
        memsaver.pause("t")
        assert scene.sim.physical(2) - scene.sim.idle[2] == 4 * MIB
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
        """,
        devices=4,
    )


def test_the_option_chooses_the_device(run):
    run(
        """
        scene = Scene([3 * MIB], devices=4)
        for neighbour in (3, 1, "auto"):
            memsaver.configure(peer=neighbour)
            assert memsaver.options().peer == neighbour
            memsaver.pause("t")
            row = scene.row
            held = [device for device in (1, 2, 3) if scene.sim.tag_bytes(device)]
            assert held == [2 if neighbour == "auto" else neighbour], held
            memsaver.resume("t")
            assert all(block.is_intact() for block in scene.blocks)
            memsaver.trim(wait=True)
            scene.sim.occupy(1 * GIB, 1), scene.sim.occupy(1 * GIB, 3)
            for device in (1, 3):
                scene.sim.idle[device] = scene.sim.physical(device)
        """,
        devices=4,
    )


def test_two_devices_hold_each_others_backups(run):
    run("""
        scene = Scene([66 * MIB])
        with memsaver.region("t"):
            scene.blocks.append(Block(scene.sim, 10 * MIB, 99, 1))
        memsaver.pause("t")
        rows = {row.device: row for row in memsaver.stats()["t"]}
        assert rows[0].peer_bytes == scene.sim.tag_bytes(1) == 66 * MIB
        assert rows[1].peer_bytes == scene.sim.tag_bytes(0) == 10 * MIB
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
        assert scene.sim.tag_bytes(0) == 76 * MIB == scene.sim.tag_bytes(1)
    """)


@pytest.mark.parametrize(
    ("peer", "why"),
    [("5", "sees 2 devices"), ("0", "memory to save is on it")],
)
def test_an_unusable_choice_is_a_typed_error(run, peer, why):
    run(
        f"""
        scene = Scene([3 * MIB])
        error = fails(ConfigError)
        assert "MEMSAVER_PEER" in str(error) and "{why}" in str(error), error
        scene.check()
        memsaver.configure(peer=1)
        memsaver.pause("t"), memsaver.resume("t")
        scene.check()
        """,
        MEMSAVER_PEER=peer,
    )


def test_without_peer_access_the_host_is_used_with_a_warning(run):
    run("""
        import warnings
        scene = Scene([66 * MIB])
        scene.sim.peer_access(False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                memsaver.pause("t")
                assert scene.row.peer_bytes == 0 and scene.row.host_bytes == 66 * MIB
                memsaver.resume("t")
        assert len([w for w in said if "peer access" in str(w.message)]) == 1, said
        scene.check()
        memsaver.configure(peer=1)
        memsaver.trim(wait=True)
        assert "peer access" in str(fails(ConfigError))
        scene.check()
    """)


def test_without_another_device_the_host_is_used(run):
    run(
        """
        import warnings
        warnings.simplefilter("ignore")
        scene = Scene([3 * MIB], devices=1)
        memsaver.pause("t")
        assert scene.row.peer_bytes == 0 < scene.row.host_bytes
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
        """,
        devices=1,
    )


@pytest.mark.parametrize("text", ["-1", "", "one", "64", "1 ", "99999999999999999999"])
def test_an_invalid_option_is_refused(text):
    import memsaver

    before = memsaver.options().peer
    with pytest.raises(memsaver.ConfigError, match="peer"):
        memsaver.configure(peer=text)
    assert memsaver.options().peer == before == "auto"


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        *("cuMemGetInfo", "cuMemAddressReserve", "cuMemCreate", "cuMemMap", "cuMemSetAccess"),
        *("cuMemcpyDtoDAsync", "cuStreamSynchronize", "cuEventSynchronize"),
    ],
)
@pytest.mark.parametrize("forever", [False, True], ids=["once", "always"])
def test_a_failing_save_changes_nothing(run, call, forever):
    run(f"""
        scene = Scene([66 * MIB, 3 * MIB])
        pages = scene.sim.tag_bytes(0)
        scene.sim.fail("{call}", 1, 1, {0 if forever else 1})
        try:
            memsaver.pause("t")
        except DriverError as error:
            assert error.call == "{call}" and error.tag == "t", error
            scene.sim.clear_faults()
            assert memsaver.state("t") == "mapped" and scene.sim.tag_bytes(0) == pages
            scene.check()
        else:
            calls = ("cuStreamSynchronize", "cuEventSynchronize", "cuMemAddressReserve")
            assert "{call}" in calls, "no error"
        scene.sim.clear_faults()
        memsaver.pause("t")
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


@pytest.mark.parametrize(
    ("call", "nth"),
    [("cuMemcpyDtoDAsync", 1), ("cuMemcpyDtoDAsync", 2), ("cuStreamSynchronize", 1)],
)
def test_a_failing_restore_keeps_the_backup(run, call, nth):
    run(f"""
        scene = Scene([66 * MIB, 3 * MIB])
        memsaver.pause("t")
        held = scene.on_neighbour()
        scene.sim.fail("{call}", 1, {nth}, 0)
        error = fails(DriverError, lambda: memsaver.resume("t"))
        assert error.call == "{call}" and error.tag == "t", error
        scene.sim.clear_faults()
        assert memsaver.state("t") == "paused" and scene.sim.tag_bytes(0) == 0
        assert scene.on_neighbour() == held == scene.row.peer_bytes
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


def test_a_release_that_the_driver_refuses_is_made_later(run):
    run("""
        import warnings
        scene = Scene([66 * MIB])
        memsaver.pause("t"), memsaver.resume("t")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            scene.sim.fail("cuMemUnmap", 1, 1, 0)
            memsaver.trim(wait=True)
            assert scene.row.peer_bytes == 0 < _C.deferred_releases()[0]
            scene.sim.clear_faults()
            memsaver.trim(wait=True)
        assert scene.on_neighbour() == 0 == _C.deferred_releases()[0]
        scene.check()
    """)


def test_a_neighbour_without_room_for_a_context(run):
    run("""
        scene = Scene([66 * MIB], devices=1)
        scene.sim.fail("cuDevicePrimaryCtxRetain", 2, 1, 1)
        memsaver.pause("t")
        assert scene.row.peer_bytes == 0 and scene.row.host_bytes == 66 * MIB
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
    """)


# --- ownership ------------------------------------------------------------------------------------


def test_the_backup_is_released_with_the_tags_memory(run):
    run("""
        scene = Scene([66 * MIB, 3 * MIB])
        memsaver.pause("t")
        del scene.blocks[0]
        memsaver.resume("t")
        assert scene.blocks[0].is_intact()
        memsaver.pause("t")
        assert scene.on_neighbour() == scene.row.peer_bytes == 4 * MIB
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


def test_a_shortage_on_the_neighbour_names_the_backups(run):
    run("""
        scene = Scene([66 * MIB])
        with memsaver.region("other", backup="none"):
            others = [Block(scene.sim, 40 * MIB, 5, 1)]
        memsaver.pause("t"), memsaver.pause("other")
        memsaver.resume("t")
        scene.leave_free(MIB)
        error = fails(OutOfDeviceMemoryError, lambda: memsaver.resume("other"))
        assert "up to 66 MiB" in str(error) and "trim()" in str(error), error
        memsaver.trim(wait=True)
        memsaver.resume("other")
    """)


def test_swapped_tags_on_the_neighbour(run):
    run("""
        scene = Scene([66 * MIB, 3 * MIB])
        with memsaver.region("other", backup="peer"):
            others = [Block(scene.sim, 40 * MIB, 77, 0)]
        memsaver.pause("other")
        for out, into in (("t", "other"), ("other", "t")) * 2:
            memsaver.swap(out=out, into=into)
            mapped = others if into == "other" else scene.blocks
            assert all(block.is_intact() for block in mapped)
        memsaver.resume("other")
        assert all(block.is_intact() for block in [*others, *scene.blocks])
        assert memsaver.stats().peer_bytes == scene.on_neighbour()
    """)


def test_a_backup_on_the_neighbour_cannot_be_viewed(run):
    run("""
        scene = Scene([3 * MIB])
        memsaver.pause("t")
        block = scene.blocks[0]
        error = fails(memsaver.MemsaverError, lambda: _C.backup_view(block.address, block.nbytes))
        assert "not in host memory" in str(error), error
        memsaver.resume("t")
        scene.check()
    """)


def test_a_forked_child_and_an_exit_while_paused(run):
    done = run("""
        import os
        scene = Scene([66 * MIB])
        memsaver.pause("t")
        child = os.fork()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        memsaver.resume("t")
        scene.check()
        memsaver.pause("t")
        print("end")
    """)
    assert done.stdout.endswith("end\n") and done.stderr == ""
