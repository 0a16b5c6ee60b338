"""Tests backups in another device's memory: their location, contents, statistics and ownership."""

import pytest

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
        scene = Scene([64 * MIB, 3 * MIB])
        assert memsaver.pause("t").copied_bytes == 68 * MIB
        memsaver.resume("t")
        assert memsaver.pause("t").copied_bytes == 0 == memsaver.resume("t").copied_bytes - 68 * MIB
        scene.rewrite(1)
        assert memsaver.pause("t").copied_bytes == 3 * MIB
        assert scene.row.last_unchanged_bytes == 65 * MIB
        memsaver.resume("t")
        scene.check()
        memsaver.configure(fingerprints=False)
        assert memsaver.pause("t").copied_bytes == 68 * MIB
        memsaver.resume("t")
        scene.check()
    """)


def test_a_wait_for_memory_sees_its_contents_and_needs_no_later_copies(run):
    run("""
        scene = Scene([64 * MIB, 64 * MIB])
        memsaver.pause("t")
        scene.sim.copy_rate(128 * MIB)
        under_way = memsaver.resume("t", wait=False)
        first, last = scene.blocks
        under_way.wait_memory(first)
        assert first.is_intact() and not under_way.done()
        assert scene.sim.read(last.address + 64 * MIB - 64, 64) == bytes(64)
        under_way.wait_memory(last)
        assert last.is_intact()
        under_way.wait()
        scene.check()
    """)


@pytest.mark.parametrize(
    ("sizes", "room", "margin", "there"),
    [
        # A block longer than the longest chunk (256 MiB), and a small one.
        ("[258 * MIB, 4 * MIB]", "260 * MIB", "0", 258),
        ("[64 * MIB, 4 * MIB]", "0", "0", 0),
        ("[64 * MIB, 4 * MIB]", "106 * MIB", "100 * MIB", 4),
    ],
    ids=["part", "full", "margin"],
)
def test_contents_without_room_are_saved_on_the_host(run, sizes, room, margin, there):
    run(f"""
        scene = Scene({sizes}, margin={margin})
        scene.leave_free({room})
        for _ in range(2):
            memsaver.pause("t")
            row = scene.row
            assert row.peer_bytes == scene.on_neighbour() and row.disk_bytes == 0
            assert row.peer_bytes >> 20 == {there}, row.peer_bytes >> 20
            assert row.host_bytes + row.peer_bytes == sum({sizes}) == row.backup_bytes
            memsaver.resume("t")
            scene.check()
            scene.rewrite(0), scene.rewrite(1)
        scene.sim.occupy(0, 1)
        scene.check_freed()
    """)


def test_memory_that_another_process_takes_first_is_replaced_by_the_host(run):
    run("""
        scene = Scene([64 * MIB, 4 * MIB])
        scene.sim.fail("cuMemCreate", 2, nth=2, times=0)
        memsaver.pause("t")
        assert 0 < scene.row.peer_bytes == scene.on_neighbour() < 68 * MIB
        assert scene.row.host_bytes + scene.row.peer_bytes == 68 * MIB
        scene.sim.clear_faults()
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


def test_a_budget_refuses_the_hosts_part_before_anything_changes(run):
    run("""
        scene = Scene([64 * MIB, 4 * MIB])
        scene.leave_free(6 * MIB)
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
        scene = Scene([64 * MIB, 4 * MIB])
        scene.leave_free(6 * MIB)
        memsaver.pause("t"), memsaver.resume("t")
        place = scene.row.host_bytes, scene.row.peer_bytes
        scene.sim.occupy(0, 1)
        assert memsaver.pause("t").copied_bytes == 0
        assert (scene.row.host_bytes, scene.row.peer_bytes) == place
        memsaver.resume("t")
        memsaver.trim(wait=True)
        memsaver.pause("t")
        assert (scene.row.host_bytes, scene.row.peer_bytes) == (0, 68 * MIB)
        memsaver.resume("t")
        scene.check()
    """)


@pytest.mark.parametrize("first", ["host", "pageable", "disk"])
def test_a_pause_may_choose_another_place(run, first):
    run(f"""
        scene = Scene([6 * MIB, 700])
        for backup in ("{first}", "peer", "{first}", "peer"):
            memsaver.pause("t", backup=backup)
            row = scene.row
            assert (row.peer_bytes > 0) is (backup == "peer") is (scene.on_neighbour() > 0)
            assert (row.host_bytes + row.disk_bytes > 0) is (backup != "peer")
            memsaver.resume("t")
            scene.check()
    """)


# --- ownership ------------------------------------------------------------------------------------


def test_the_backup_is_released_with_the_tags_memory(run):
    run("""
        scene = Scene([6 * MIB, 3 * MIB])
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
        scene = Scene([6 * MIB])
        with memsaver.region("other", backup="none"):
            others = [Block(scene.sim, 4 * MIB, 5, 1)]
        memsaver.pause("t"), memsaver.pause("other")
        memsaver.resume("t")
        scene.leave_free(MIB)
        error = fails(OutOfDeviceMemoryError, lambda: memsaver.resume("other"))
        assert "up to 6 MiB" in str(error) and "trim()" in str(error), error
        memsaver.trim(wait=True)
        memsaver.resume("other")
    """)


def test_swapped_tags_on_the_neighbour(run):
    run("""
        scene = Scene([6 * MIB, 3 * MIB])
        with memsaver.region("other", backup="peer"):
            others = [Block(scene.sim, 4 * MIB, 77, 0)]
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
        scene = Scene([6 * MIB])
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
