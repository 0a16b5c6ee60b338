"""Tests a `group` argument that is invalid or different on some of the ranks."""

import pytest

pytest.importorskip("torch")


@pytest.mark.timeout(120)
def test_a_rank_whose_group_is_invalid_is_an_error_on_all_ranks_at_once(run_ranks):
    run_ranks(
        """
        from memsaver.integrations.rollout.together import Together

        begin("gloo")
        weights = blocks("w", [3 * MIB], "host")
        pair, used, closed = (dist.new_group(ranks) for ranks in ([0, 1], [1, 0], [0, 1, 2]))
        everyone = dist.new_group([2, 0, 1])
        dist.destroy_process_group(closed)
        if RANK < 2:
            md.pause("w", group=used)
            md.resume("w", group=used)

        class Odd:
            __repr__ = __eq__ = __hash__ = lambda self, *_: 1 / 0

        def fails_everywhere(group, bad, odd_rank):
            given = bad if RANK == odd_rank else group
            error = raises(md.RankError, md.pause, "w", group=given, timeout=40)
            assert list(error.failures) == [odd_rank], error
            kind = "InvalidStateError" if bad is closed else "ConfigError"
            assert error.failures[odd_rank].kind == kind
            texts = gathered(str(error), group)
            assert texts == [texts[0]] * dist.get_world_size(group)
            assert states("w") == ["mapped"] and intact(weights)
            for lane in ("one", "one", "another"):  # a lane's number is that of the other ranks
                error = raises(memsaver.MemsaverError, Together, given, 40, lane)
                assert type(error).__name__ == kind and list(error.failures) == [odd_rank], error
                together = Together(group, 40, lane)
                assert RANK in together.gather("then", lambda: RANK)
                together.close()
            # The group is as good as before.
            with md.paused("w", group=group):
                assert states("w") == ["paused"]

        start = time.monotonic()
        for bad in ("pair", Odd(), closed):
            if RANK < 2:
                fails_everywhere(pair, bad, 1)
                fails_everywhere(used, bad, 0)
            dist.barrier()
            fails_everywhere(everyone, bad, 2)
            fails_everywhere(dist.group.WORLD, bad, 1)
        # On several ranks, and on all of them.
        for groups in ((everyone, "x", 7), (None, "x", 7), ("x", 7, closed)):
            error = refused(md.pause, "w", group=groups[RANK], timeout=40)
            assert list(error.failures) == [0, 1, 2][groups[0] != "x":], error
        # The rank with the invalid group comes first, and waits for the others.
        if RANK != 1:
            time.sleep(1)
        error = refused(md.pause, "w", group="everyone" if RANK == 1 else everyone, timeout=40)
        assert list(error.failures) == [1] and intact(weights)
        assert time.monotonic() - start < 35, "no wait lasted until a timeout"
        dist.barrier()
        dist.destroy_process_group()
        """,
        3,
        timeout=100,
    )


@pytest.mark.timeout(120)
def test_ranks_on_different_groups_wait_no_longer_than_the_timeout(run_ranks):
    # Each group is valid on its rank, so no rank can determine which one is wrong.
    run_ranks(
        """
        begin("gloo")
        weights = blocks("w", [3 * MIB], "host")
        wrong = {
            "world": (None, md.GroupError),
            "other": (dist.new_group([1, 2]), md.GroupError),
            "not in it": (dist.GroupMember.NON_GROUP_MEMBER, memsaver.InvalidStateError),
        }
        store = dist.distributed_c10d._get_default_store()
        for name, (group, kind) in wrong.items():
            right = dist.new_group([0, 1])
            # A rank that is still connecting would fail if another rank's call timed out meanwhile.
            store.set(f"{RANK} is connected for {name}", "")
            store.wait([f"{rank} is connected for {name}" for rank in range(SIZE)])
            if RANK < 2:
                if RANK == 0:
                    group, kind = right, md.GroupError
                start = time.monotonic()
                raises(kind, md.pause, "w", group=group, timeout=1)
                assert time.monotonic() - start < 25
                assert states("w") == ["mapped"] and intact(weights)
            store.set(f"{RANK} {name}", "")
            store.wait([f"{rank} {name}" for rank in range(SIZE)])
        if RANK == 1:  # of an invalid group, while no other rank makes a call
            error = raises(md.GroupError, md.pause, "w", group="odd", timeout=1)
            assert "not str" in str(error) and "within 1 s" in str(error)
            assert isinstance(error.__cause__, memsaver.ConfigError)
        store.set(f"{RANK} end", "")
        if RANK == 0:  # which has torch's store, and so leaves last
            store.wait([f"{rank} end" for rank in range(SIZE)])
        os._exit(0)
        """,
        3,
        timeout=100,
    )
