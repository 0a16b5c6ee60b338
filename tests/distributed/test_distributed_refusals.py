"""Tests calls that all ranks of a group reject together, before anything changes."""

import pytest

import memsaver
import memsaver.distributed
from memsaver.errors import UsageWarning

pytest.importorskip("torch")


@pytest.mark.long
def test_invalid_calls_are_rejected_before_anything_changes(run_ranks):
    run_ranks(
        """
        begin("gloo")
        weights, cache = blocks("w", [3 * MIB], "host"), blocks("kv", [MIB])
        blocks(f"only on {RANK}", [MIB])
        told = []
        memsaver.on_pause(lambda tag: told.append(("pause", tag)))
        memsaver.on_resume(lambda tag: told.append(("resume", tag)))

        def unchanged():
            assert states("w", "kv") == ["mapped"] * 2 and intact(weights + cache)
            return not told

        def throw(error):
            raise error

        class Odd:
            __repr__ = __eq__ = __hash__ = lambda self, *_: 1 / 0

        class OddName(str):
            __repr__ = __str__ = __hash__ = lambda self, *_: 1 / 0

        class OddList(list):
            __iter__ = __len__ = lambda self, *_: 1 / 0

        class OddError(Exception):
            __str__ = lambda self: 1 / 0

        # Arguments that are wrong on one rank.
        error = refused(md.pause, "w", "only on 1")
        assert list(error.failures) == [0, 2] and error.failures[0].kind == "UnknownTagError"
        assert error.tag == "only on 1" and "ranks 0, 2 of 3" in str(error) and unchanged()
        error = refused(md.pause, "w", backup="tape" if RANK == 1 else None)
        assert list(error.failures) == [1] and "tape" in str(error) and unchanged()
        error = refused(md.pause, "w", timeout=-1 if RANK == 2 else 20)
        assert list(error.failures) == [2] and "timeout" in str(error) and unchanged()
        error = refused(md.pause, 7 if RANK == 0 else "w")
        assert list(error.failures) == [0] and unchanged()
        error = refused(md.pause, "w", group=Odd() if RANK == 2 else None)
        assert list(error.failures) == [2] and "not Odd" in str(error) and unchanged()
        for odd in (Odd(), OddName("w"), OddName("x")):
            error = refused(md.pause, odd if RANK == 1 else "w")
            assert list(error.failures) == [1] and "pause('w') failed" in str(error)
            assert unchanged()
        error = refused(md.swap, out=OddList("w") if RANK == 0 else "w", into="kv")
        assert list(error.failures) == [0] and unchanged()
        with registered(memsaver.on_pause, lambda tag: throw(OddError()), on=1):
            error = refused(md.pause, "w")
        assert list(error.failures) == [1] and error.failures[1].kind == "OddError"
        assert states("w") == ["mapped"]
        told.clear()
        error = refused(md.swap, out="w", into="w")
        assert list(error.failures) == [0, 1, 2] and unchanged()
        assert str(error).count("both paused and resumed") == 1

        # Different calls.
        error = refused(md.resume if RANK == 1 else md.pause, "w")
        assert list(error.failures) == [0, 1, 2] and error.failures[1].kind == "" and unchanged()
        assert "ranks 0, 2: pause('w')" in str(error) and "resume('w')" in str(error)
        error = refused(md.pause, *(["w", "kv"] if RANK else ["w"]))
        assert "pause('kv', 'w')" in str(error) and "pause('w')" in str(error) and unchanged()
        error = refused(md.pause, *(["w", "kv"] if RANK else []))
        assert "pause(every tag)" in str(error) and unchanged()
        md.pause(*(["w", "kv", "w"] if RANK else ["kv", "w"]), backup="disk" if RANK else "host")
        assert states("w", "kv") == ["paused"] * 2
        md.resume("kv", "w")
        assert intact(weights + cache)
        assert sorted(told[:2]) == [("pause", "kv"), ("pause", "w")] and len(told) == 4
        told.clear()

        # Another version, by its protocol.
        from memsaver.distributed import messages
        ours = messages.PROTOCOL
        messages.PROTOCOL += RANK == 1
        error = refused(md.pause, "w")
        assert f"ranks 0, 2: uses protocol {ours}; install" in str(error) and unchanged()
        assert error.failures[1].message.startswith(f"uses protocol {ours + 1};")
        messages.PROTOCOL = ours

        # What one rank cannot begin is not begun on others: what has no backup keeps its bytes.
        with memsaver.region("kv") if RANK == 1 else contextlib.nullcontext():
            error = refused(md.pause, "w", "kv")
        assert list(error.failures) == [1] and error.failures[1].kind == "InvalidStateError"
        assert not unchanged() and [kind for kind, _ in told] == ["pause"] * 2 + ["resume"] * 2
        told.clear()

        # Callbacks that raise.
        def fail(tag):
            raise ValueError(f"not {tag}")

        with registered(memsaver.on_pause, fail, on=0):
            error = refused(md.pause, "w", "kv")
        assert list(error.failures) == [0] and error.failures[0].kind == "ValueError"
        assert isinstance(error.__cause__, ValueError if RANK == 0 else type(None))
        assert error.failures[0].status == "" and not unchanged()
        md.pause("w", "kv", backup="pageable")
        with registered(memsaver.on_resume, fail, on=2):
            error = refused(md.resume, "w", "kv")
        assert error.failures[2].message == "not w" and states("w", "kv") == ["paused"] * 2
        md.resume("w", "kv")
        assert intact(weights + cache)

        # A callback that fails only in the rollback: the rank's tag is mapped, with a warning.
        md.pause("w")
        with full(on=1), registered(memsaver.on_pause, fail, on=2):
            error = refused(md.resume, "w")
        assert list(error.failures) == [1] and list(error.stuck) == [2]
        assert states("w") == ["mapped" if RANK == 2 else "paused"], "a pause asks first"
        md.resume("w")
        assert intact(weights)
        warned = contextlib.nullcontext()
        with fault("cuMemcpyDtoHAsync", on=0), fault("cuMemHostRegister", on=0):
            if RANK == 0:
                memsaver.trim(wait=True)
                weights[0].fill(77)
            with registered(memsaver.on_resume, fail, on=1):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    error = refused(md.pause, "w")
        assert list(error.failures) == [0] and error.stuck == {} and unchanged() is False
        texts = [str(w.message) for w in caught if w.category is memsaver.MemsaverWarning]
        assert len(texts) == (RANK == 1) and all("not w" in text for text in texts)

        # Ctrl-C during the pause is raised after the pause is complete. If a callback raises an
        # exit, nothing is paused.
        with registered(memsaver.on_pause, lambda tag: signal.raise_signal(signal.SIGINT), on=1):
            if RANK == 1:
                raises(KeyboardInterrupt, md.pause, "w")
            else:
                md.pause("w")
        assert states("w") == ["paused"]
        md.resume("w")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

        def leave(tag):
            sys.exit(3)

        with registered(memsaver.on_pause, leave, on=2):
            error = raises(SystemExit if RANK == 2 else md.RankError, md.pause, "w")
        if RANK == 2:
            error = error.__cause__
        assert error.failures[2].kind == "SystemExit" and states("w") == ["mapped"]

        # paused(): resumes what it paused on each rank, also after an error on one of them.
        if RANK == 0:
            memsaver.pause("kv")
        with contextlib.suppress(ZeroDivisionError):
            with md.paused("w", "kv") as report:
                assert report.local.changed == (("w",) if RANK == 0 else ("w", "kv"))
                assert states("w", "kv") == ["paused"] * 2
                if RANK == 1:
                    1 / 0
        assert states("w", "kv") == ["mapped" if tag == "w" or RANK else "paused" for tag in "wk"]
        assert intact(weights)
        error = raises(md.RankError, md.paused("w", "x").__enter__)
        assert list(error.failures) == [0, 1, 2] and states("w") == ["mapped"]
        if RANK == 0:
            memsaver.resume("kv")
        with registered(memsaver.on_pause, lambda tag: signal.raise_signal(signal.SIGINT), on=1):
            with contextlib.suppress(KeyboardInterrupt):
                with md.paused("w"):
                    assert RANK != 1, "the interrupt comes before the block"
        assert states("w") == ["mapped"] and intact(weights)
        dist.barrier()
        dist.destroy_process_group()
        """,
        3,
    )


def test_a_warning_that_is_an_error_does_not_keep_the_tags_paused(run_ranks):
    """The rank waits at the end of the block, like a rank whose block raises an error."""
    run_ranks(
        """
        import warnings
        begin("gloo")
        kept = blocks("w", [MIB] * (RANK == 0), "host")  # rank 1 has no memory in the tag
        if RANK == 1:
            with memsaver.region("w", backup="host"):
                pass

        def block():
            with md.paused("w"):
                assert states("w") == ["paused"]

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            raises(memsaver.errors.UsageWarning, block) if RANK == 1 else block()
        assert states("w") == ["mapped"] and intact(kept)

        def broken(tag):
            raise LookupError(tag)

        failing = memsaver.on_resume(broken)
        with warnings.catch_warnings(), fault("cuMemUnmap", on=0, times=1):
            warnings.simplefilter("error")
            raises(md.RankError, md.pause, "w")
        failing.remove()
        assert states("w") == ["mapped"] and intact(kept)
        """,
        2,
    )


def test_a_warning_names_the_callers_line(sim, tag):
    torch = pytest.importorskip("torch")
    dist = torch.distributed
    with memsaver.region(name := tag(), backup="host"):
        pass
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.warns(UsageWarning, match="has no device memory") as caught:
            memsaver.distributed.pause(name)
    finally:
        dist.destroy_process_group()
    assert [warning.filename for warning in caught] == [__file__]
    memsaver.resume(name)
