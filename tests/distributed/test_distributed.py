"""Tests that calls change all ranks or none, in groups with faults in some of the processes."""

import pytest

pytest.importorskip("torch")


def test_all_ranks_or_none(run_ranks):
    # Faults occur on one of the ranks during the call.
    run_ranks(
        """
        error = raises(memsaver.InvalidStateError, md.pause, "w")
        assert "init_process_group" in str(error) and "memsaver.pause" in str(error)
        begin("gloo")
        memsaver.configure(share_bytes="2MiB", slab_bytes="2MiB")
        weights, cache = blocks("w", [3 * MIB, 4096], "host"), blocks("kv", [5 * MIB])
        extra = blocks("extra", [MIB], "pageable")
        cache_was_saved = blocks("saved once", [2 * MIB, 512])

        # Done on all when it returns on any: rank 2 needs longer.
        resident = held("w", "kv", "extra", "saved once")
        dist.barrier()
        start = time.monotonic()
        if RANK == 2:
            sim.stream_delay(0.4)
        report = md.pause()
        end = time.monotonic()
        sim.stream_delay(0)
        assert states("w", "kv", "extra", "saved once") == ["paused"] * 4
        times = gathered((start, end, resident))
        assert report.slowest.rank == 2 and report.ranks[2].seconds >= 0.4
        assert min(end for _, end, _ in times) >= times[2][0] + report.ranks[2].seconds
        assert report.seconds >= report.ranks[2].seconds
        assert [rank.rank for rank in report.ranks] == [0, 1, 2]
        assert [rank.bytes for rank in report.ranks] == [resident for _, _, resident in times]
        assert report.local.bytes == resident and report.bytes == sum(t[2] for t in times)
        assert report.local.copied_bytes == report.ranks[RANK].copied_bytes > 3 * MIB
        assert gathered(report.ranks) == [report.ranks] * 3
        assert md.resume().local.changed == ("w", "kv", "extra", "saved once")
        assert intact(weights + extra) and all(b.is_zero() for b in cache + cache_was_saved)
        for block in cache + cache_was_saved:
            block.fill(block.seed)

        # No memory for a resume on rank 1; rank 0 has one of the tags mapped already, and one was
        # saved although its regions did not ask for it.
        md.pause("saved once", backup="host")
        md.pause("w", "kv", "extra", timeout=20)
        if RANK == 0:
            memsaver.resume("extra")
        names = ("w", "kv", "extra", "saved once")
        before = states(*names)
        with full(on=1):
            error = refused(md.resume, *names)
            assert states(*names) == before == ["paused"] * 2 + [
                "mapped" if RANK == 0 else "paused", "paused"
            ]
            assert held("w", "kv", "saved once") == 0
            assert list(error.failures) == [1] and error.stuck == {}
            failure = error.failures[1]
            assert failure.kind == "OutOfDeviceMemoryError" and failure.host
            assert failure.status == "OUT_OF_DEVICE_MEMORY" and failure.tag in names
            assert error.status == "RANK_FAILED" and error.tag == failure.tag
            assert "resume('extra', 'kv', 'saved once', 'w') failed on rank 1 of 3" in str(error)
            assert failure.message in str(error)
            cause = memsaver.OutOfDeviceMemoryError if RANK == 1 else type(None)
            assert isinstance(error.__cause__, cause)
        assert sorted(md.resume(*names).local.changed) == sorted(
            set(names) - ({"extra"} if RANK == 0 else set())
        )
        assert intact(weights + extra + cache_was_saved) and all(b.is_zero() for b in cache)

        # A pause of one rank cannot save; the others had paused, with a backup or without.
        with fault("cuMemHostRegister", on=2), fault("cuMemcpyDtoHAsync", on=2):
            memsaver.trim(wait=True)
            for block in weights:
                block.fill(block.seed + 50)
            error = refused(md.pause, "w")
        assert list(error.failures) == [2] and error.failures[2].tag == "w"
        assert states("w") == ["mapped"] and intact(weights)

        # A swap, done and not done.
        md.pause("kv")
        with full(on=0), fault("cuMemcpyDtoHAsync", on=1), fault("cuMemHostRegister", on=1):
            memsaver.trim(wait=True)
            memsaver.configure(fingerprints=False)
            error = refused(md.swap, out="w", into=["kv"])
            assert 1 in error.failures and states("w", "kv") == ["mapped", "paused"]
            memsaver.configure(fingerprints=True)
        assert intact(weights)
        report = md.swap(out=["w"], into="kv")
        assert states("w", "kv") == ["paused", "mapped"]
        assert sorted(report.local.changed) == ["kv", "w"]
        md.resume("w")
        assert intact(weights)

        # The rollback fails too.
        md.pause("w")
        with full(on=1), fault("cuMemcpyDtoHAsync", on=0), fault("cuMemHostRegister", on=0):
            if RANK == 0:
                memsaver.configure(fingerprints=False)
            error = refused(md.resume, "w")
            assert list(error.failures) == [1] and list(error.stuck) == [0]
            assert states("w") == ["mapped" if RANK == 0 else "paused"]
            assert "rank 0" in str(error) and "'w' is mapped" in error.stuck[0].message
        memsaver.configure(fingerprints=True)
        assert md.resume("w").local.changed == (("w",) if RANK else ())
        assert intact(weights)
        with fault("cuMemcpyDtoHAsync", on=2), fault("cuMemHostRegister", on=2):
            with fault("cuMemCreate", on=1, code=2):
                if RANK == 2:
                    memsaver.trim(wait=True)
                for block in weights:
                    block.fill(block.seed + 1)
                error = refused(md.pause, "w")
            assert list(error.failures) == [2] and list(error.stuck) == [1]
            assert "'w' is paused" in str(error) and "OutOfDeviceMemoryError" in str(error)
            assert states("w") == ["paused" if RANK == 1 else "mapped"]
        md.resume("w")
        assert states("w") == ["mapped"] and intact(weights)

        # In place of another process, rank 1 itself uses the tensor that it shares.
        import pickle
        from multiprocessing.reduction import ForkingPickler
        memsaver.configure(importer_seconds=0.2)
        with memsaver.region("shared", backup="host", shareable=True):
            tensor = memsaver.simulator.empty(4096)
        used = pickle.loads(bytes(ForkingPickler.dumps(tensor))) if RANK == 1 else None
        error = refused(md.pause, "w", "shared")
        assert list(error.failures) == [1] and error.failures[1].kind == "TagSharedError"
        assert states("w", "shared") == ["mapped"] * 2 and intact(weights)
        del used
        md.pause("w", "shared")
        md.resume("w", "shared")
        assert intact(weights)

        # A group of some ranks; the ranks' numbers are the world's.
        pair = dist.new_group([0, 2])
        if RANK == 1:
            error = raises(memsaver.InvalidStateError, md.pause, group=pair)
            assert "not in the group" in str(error)
            assert states("w") == ["mapped"]
        else:
            report = md.pause("w", group=pair)
            assert [rank.rank for rank in report.ranks] == [0, 2]
            with full(on=2):
                error = raises(md.RankError, md.resume, "w", group=pair)
            assert list(error.failures) == [2] and "rank 2 of 2" in str(error)
            assert md.resume("w", group=pair).local.changed == ("w",)
            assert intact(weights)
        dist.barrier()

        # A pause of rank 0 can neither be done nor undone: its pages are kept, and what is in them
        # outlives a resume that is taken back, although the tag has no backup.
        cache = blocks("parts", [2 * MIB] * 4)
        if RANK == 0:
            sim.fail("cuMemMap", 1, 1, 0)
            sim.fail("cuMemUnmap", 1, 3, 1)
        error = refused(md.pause, "parts")
        sim.clear_faults()
        assert list(error.failures) == [0] == list(error.stuck) and error.failures[0].kind
        assert states("parts") == ["mapped" if RANK else "paused"]
        md.pause("parts")
        assert (held("parts") > 0) == (RANK == 0)
        with full(on=1):
            error = refused(md.resume, "parts")
        assert list(error.failures) == [1] and held("parts") == 0
        md.resume("parts")
        assert intact(cache) if RANK == 0 else all(block.is_zero() for block in cache)
        dist.barrier()
        group = dist.group.WORLD
        dist.destroy_process_group()
        raises(memsaver.InvalidStateError, md.pause, "w")
        store = dist.FileStore("store", SIZE)  # the first one's port may still be in use
        begin("gloo", store=store, rank=RANK, world_size=SIZE)
        error = refused(md.pause, "w", group=group)
        assert {failure.kind for failure in error.failures.values()} == {"InvalidStateError"}
        error = refused(md.pause, "w", group="gloo" if RANK == 1 else None)
        assert list(error.failures) == [1] and error.failures[1].kind == "ConfigError"
        with md.paused("w"):
            assert states("w") == ["paused"]
        assert intact(weights)
        dist.destroy_process_group()
        """,
        3,
    )


@pytest.mark.long
def test_a_group_without_a_cpu_backend(run_ranks):
    # As init_process_group("nccl") creates it: torch cannot send CPU tensors over it.
    run_ranks(
        """
        import torch
        begin("cuda:gloo")
        raises(RuntimeError, dist.all_reduce, torch.zeros(1))
        weights = blocks("w", [3 * MIB], "host")
        md.pause("w")
        with full(on=1):
            error = raises(md.RankError, md.resume, "w")
        assert list(error.failures) == [1] and states("w") == ["paused"]
        torch.set_default_device("meta")  # the device of new tensors must not matter
        report = md.resume("w", timeout=10)
        torch.set_default_device("cpu")
        assert report.local.changed == ("w",) and len(report.ranks) == 2
        assert intact(weights)
        other = dist.new_group()
        md.resume("w", group=other, timeout=0.5)  # the connections that this makes are kept
        if RANK == 1:
            time.sleep(2)
        md.resume("w", group=other)
        with md.paused("w", group=other):
            assert states("w") == ["paused"]
        assert intact(weights)
        with memsaver.paused("w"):
            pass
        if RANK == 1:
            os._exit(0)
        error = lost(md.pause, "w", timeout=5)
        assert error.missing == (1,) and intact(weights)
        """,
        2,
    )
