"""Tests which other device is selected for backups in device memory, and driver calls that fail."""

import pytest

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
        scene = Scene([6 * MIB])
        with memsaver.region("t"):
            scene.blocks.append(Block(scene.sim, 4 * MIB, 99, 1))
        memsaver.pause("t")
        rows = {row.device: row for row in memsaver.stats()["t"]}
        assert rows[0].peer_bytes == scene.sim.tag_bytes(1) == 6 * MIB
        assert rows[1].peer_bytes == scene.sim.tag_bytes(0) == 4 * MIB
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
        assert scene.sim.tag_bytes(0) == 10 * MIB == scene.sim.tag_bytes(1)
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
        scene = Scene([6 * MIB])
        scene.sim.peer_access(False)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                memsaver.pause("t")
                assert scene.row.peer_bytes == 0 and scene.row.host_bytes == 6 * MIB
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
def test_a_failing_save_changes_nothing(run, call):
    run(f"""
        for times in (1, 0):  # once, and always
            scene = Scene([6 * MIB, 3 * MIB])
            pages = scene.sim.tag_bytes(0)
            scene.sim.fail("{call}", 1, 1, times)
            try:
                memsaver.pause("t")
            except DriverError as error:
                assert error.call == "{call}" and error.tag == "t", error
                scene.sim.clear_faults()
                assert memsaver.state("t") == "mapped" and scene.sim.tag_bytes(0) == pages, times
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


def test_a_failing_restore_keeps_the_backup(run):
    run("""
        scene = Scene([64 * MIB, 3 * MIB])
        memsaver.pause("t")
        held = scene.on_neighbour()
        copy = "cuMemcpyDtoDAsync"
        for fault in ((copy, 1), (copy, 2), ("cuStreamSynchronize", 1)):
            call, nth = fault
            scene.sim.fail(call, 1, nth, 0)
            error = fails(DriverError, lambda: memsaver.resume("t"))
            assert error.call == call and error.tag == "t", (fault, error)
            scene.sim.clear_faults()
            assert memsaver.state("t") == "paused" and scene.sim.tag_bytes(0) == 0, fault
            assert scene.on_neighbour() == held == scene.row.peer_bytes, fault
        memsaver.resume("t")
        scene.check()
        scene.check_freed()
    """)


def test_a_release_that_the_driver_refuses_is_made_later(run):
    run("""
        import warnings
        scene = Scene([6 * MIB])
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
        scene = Scene([6 * MIB], devices=1)
        scene.sim.fail("cuDevicePrimaryCtxRetain", 2, 1, 1)
        memsaver.pause("t")
        assert scene.row.peer_bytes == 0 and scene.row.host_bytes == 6 * MIB
        memsaver.resume("t")
        assert all(block.is_intact() for block in scene.blocks)
    """)
