"""Tests that a process with low limits survives without faults on the simulated driver."""

import textwrap

import pytest

SETUP = """
    import ctypes, os, resource, signal
    import memsaver
    from simulated_driver import Block, Simulator

    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    MIB = 1 << 20

    def limit(what, soft):
        resource.setrlimit(what, (soft, resource.getrlimit(what)[1]))

    KINDS = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)

    def limits():
        return [resource.getrlimit(kind) for kind in KINDS]

    def lift(before):
        for kind, limit in zip(KINDS, before):
            resource.setrlimit(kind, limit)

    def contents(address, nbytes, value):
        return ctypes.string_at(address, nbytes).count(value) == nbytes

    def check(sim):
        assert sim.violations() == [] and sim.counts().illegal_accesses == 0, sim.violations()
"""

LIMITS = {
    "no file may grow": "limit(resource.RLIMIT_FSIZE, 0)",
    "files of 64 KiB": "limit(resource.RLIMIT_FSIZE, 64 << 10)",
    "no descriptor": "limit(resource.RLIMIT_NOFILE, 3)",
}


@pytest.mark.parametrize("low", LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("backup", ["host", "pageable"])
def test_memory_is_paused_and_resumed_under_a_limit(run_python, low, backup):
    run_python(
        textwrap.dedent(SETUP)
        + textwrap.dedent(
            f"""
            sim = Simulator()
            with memsaver.region("t", backup={backup!r}):
                block = memsaver.simulator.buffer(6 * MIB)
            ctypes.memset(block.address, 7, 6 * MIB)
            before = limits()
            {low}
            for value in (7, 8):
                ctypes.memset(block.address, value, 6 * MIB)
                try:
                    memsaver.pause("t")
                    memsaver.resume("t")
                except memsaver.OutOfHostMemoryError as error:  # nobody says what there is
                    assert "ulimit -n" in str(error), error
                assert memsaver.state("t") == "mapped"
                assert contents(block.address, 6 * MIB, value)
                assert memsaver.fingerprint("t")
            with memsaver.region("u"):
                other = memsaver.simulator.buffer(3 * MIB)
            with sim.stream() as stream:
                sim.memset(other.address, 9, 3 * MIB, stream)
            assert contents(other.address, 3 * MIB, 9)
            lift(before)
            with memsaver.paused("t"):
                pass
            assert contents(block.address, 6 * MIB, 8)
            check(sim)
            """
        )
    )


@pytest.mark.parametrize("low", LIMITS.values(), ids=LIMITS)
def test_a_disk_backup_under_a_limit_is_an_error_and_works_afterwards(run_python, low):
    run_python(
        textwrap.dedent(SETUP)
        + textwrap.dedent(
            f"""
            sim = Simulator()
            with memsaver.region("t", backup="disk"):
                block = memsaver.simulator.buffer(6 * MIB)
            ctypes.memset(block.address, 7, 6 * MIB)
            before = limits()
            {low}
            try:
                memsaver.pause("t")
            except memsaver.BackupError as error:
                assert error.tag == "t" and "ulimit" in str(error), error
            else:
                raise AssertionError("not refused")
            assert memsaver.state("t") == "mapped" and contents(block.address, 6 * MIB, 7)
            lift(before)
            with memsaver.paused("t"):
                pass
            assert contents(block.address, 6 * MIB, 7)
            check(sim)
            """
        )
    )


@pytest.mark.parametrize("low", LIMITS.values(), ids=LIMITS)
def test_a_start_under_a_limit_names_it_and_succeeds_later(run_python, low):
    run_python(
        textwrap.dedent(SETUP)
        + textwrap.dedent(
            f"""
            sim = Simulator()
            before = limits()
            {low}
            try:
                memsaver.device_memory(0)
            except memsaver.NotLoadedError as error:
                assert "ulimit" in str(error), error
            else:
                raise AssertionError("not refused")
            lift(before)
            with memsaver.region("t", backup="host"):
                block = Block(sim, 3 * MIB, 1)
            with memsaver.paused("t"):
                pass
            assert block.is_intact()
            check(sim)
            """
        )
    )


def test_a_stream_without_a_thread_is_out_of_memory_once(run_python):
    run_python(
        textwrap.dedent(SETUP)
        + textwrap.dedent(
            """
            sim = Simulator()
            with memsaver.region("t", backup="host"):
                block = Block(sim, 3 * MIB, 1)
            library, stream = sim.opened, ctypes.c_void_p()
            context = ctypes.c_void_p()
            assert library.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
            assert library.cuCtxPushCurrent_v2(context) == 0
            assert library.cuStreamCreate(ctypes.byref(stream), 1) == 0
            # No room for another thread's stack.
            pages = int(open("/proc/self/statm").read().split()[0])
            before = resource.getrlimit(resource.RLIMIT_AS)
            resource.setrlimit(resource.RLIMIT_AS, (pages * os.sysconf("SC_PAGE_SIZE"), before[1]))
            code = library.cuMemsetD8Async(block.address, 5, 3 * MIB, stream)
            resource.setrlimit(resource.RLIMIT_AS, before)
            assert code == sim.OUT_OF_MEMORY, code
            assert block.is_intact()
            assert library.cuMemsetD8Async(block.address, 5, 3 * MIB, stream) == 0
            assert library.cuStreamSynchronize(stream) == 0
            assert contents(block.address, 3 * MIB, 5)
            library.cuStreamDestroy_v2(stream)
            check(sim)
            """
        )
    )
