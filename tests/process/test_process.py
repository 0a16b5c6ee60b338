"""Tests a process's import, forks, spawns and exit, and processes on machines without a driver."""

import pytest
from process_code import code

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, NotLoadedError

pytestmark = pytest.mark.each_python

# --- fork -----------------------------------------------------------------------------------------


def test_a_child_forked_after_the_driver_was_opened_is_inert(run_python):
    run_python(
        code(
            """
            block = use("mapped")
            with memsaver.region("paused", backup="host"):
                other = Block(sim, 5 << 20, 2)
            memsaver.pause("paused")
            addresses = [block.address, other.address]
            before = memsaver.stats(), sim.physical()

            def child():
                for address in addresses:
                    _C.free(address)
                    _C.free(address)  # a no-op, not a double free
                error = memsaver.InvalidStateError
                for call in (memsaver.pause, memsaver.resume):
                    assert "fork" in raises(error, call, "mapped")
                    raises(error, call)
                assert "spawn" in raises(error, enter, "new")
                for call in (memsaver.stats, _C.trim, memsaver.device_memory):
                    raises(error, call)
                raises(error, memsaver.state, "mapped")
                raises(error, memsaver.ranges, "mapped")
                raises(error, memsaver.explain, addresses[0])
                raises(error, _C.malloc, 4096)
                raises(error, _C.fingerprint, [(addresses[0], 4096)])
                raises(error, _C.backup_view, addresses[1], 1)
                assert _C.owns(addresses[0]) and _C.region_tag() is None
                del globals()["block"], globals()["other"]

            in_fork(child)
            assert (memsaver.stats(), sim.physical()) == before
            assert block.is_intact()
            memsaver.resume("paused")
            assert other.is_intact()
            in_fork(lambda: in_fork(lambda: raises(memsaver.InvalidStateError, memsaver.pause)))
            assert sim.violations() == []
            """
        )
    )


def test_an_inert_child_exits_with_status_0(run_python):
    # An ordinary exit: objects are deleted, and atexit runs.
    done = run_python(
        code(
            """
            block = use()
            region = memsaver.region("open")
            region.__enter__()
            child = os.fork()
            if child == 0:
                sys.exit(0)
            assert os.waitpid(child, 0)[1] == 0
            region.__exit__(None, None, None)
            assert block.is_intact()
            print("parent")
            """
        )
    )
    assert done.stdout == "parent\n" and done.stderr == ""


def test_a_child_forked_during_another_threads_pause(run_python):
    run_python(
        code(
            """
            import time
            from tasks import Task

            block = use()
            block.fill(2)
            sim.stream_delay(0.3)
            task = Task(memsaver.pause, "used")
            while memsaver.state("used") != "saving":
                time.sleep(0.001)
            for _ in range(5):
                in_fork(lambda: (_C.free(block.address),
                                 raises(memsaver.InvalidStateError, memsaver.stats)))
            assert memsaver.state("used") == "saving"
            task.result()
            sim.stream_delay(0)
            memsaver.resume("used")
            assert block.is_intact() and sim.violations() == []
            """
        )
    )


def test_a_child_forked_before_the_driver_was_opened_is_like_any_process(run_python):
    run_python(
        code(
            """
            memsaver.configure(share_bytes="64MiB")
            raises(memsaver.UnknownTagError, memsaver.state, "nothing")
            in_fork(use)
            in_fork(lambda: in_fork(use))
            block = use()
            in_fork(lambda: raises(memsaver.InvalidStateError, enter, "late"))
            assert block.is_intact()
            """
        )
    )


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_children_of_multiprocessing_can_use_memsaver(run_python, tmp_path, method):
    (tmp_path / "work_of_child.py").write_text(code("def work(n):\n    use()\n    return n + 1\n"))
    (tmp_path / "main.py").write_text(
        code(
            f"""
            import multiprocessing
            from work_of_child import work

            if __name__ == "__main__":
                block = use()
                with multiprocessing.get_context({method!r}).Pool(2) as pool:
                    assert pool.map(work, range(4)) == [1, 2, 3, 4]
                assert block.is_intact()
            """
        )
    )
    run_python(
        "import runpy, sys; sys.path.insert(0, '.'); runpy.run_path('main.py', None, '__main__')"
    )


# --- exit -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [1, 2], ids=["ends meanwhile", "ends after it"])
def test_exit_while_a_thread_pauses(run_python, seed):
    # With unchanged contents, the pause ends while the interpreter exits.
    done = run_python(
        code(
            f"""
            import time
            from tasks import Task

            block = use()
            block.fill({seed})
            sim.stream_delay(0.5)
            task = Task(memsaver.pause, "used")
            while memsaver.state("used") != "saving":
                time.sleep(0.001)
            print("done")
            """
        )
    )
    assert (done.stdout, done.stderr) == ("done\n", "")


def test_memory_freed_after_the_driver_has_shut_down(run_python):
    done = run_python(
        code(
            """
            import warnings

            block, other = use("first"), use("second")
            memsaver.pause("second")
            sim.deinitialize(True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                del block, other
            """
        )
    )
    assert (done.stdout, done.stderr) == ("", "")


# --- no driver ------------------------------------------------------------------------------------

WITHOUT_DRIVER = """
import contextlib
import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C

errors = []
for call in (
    lambda: memsaver.region("t").__enter__(),
    lambda: memsaver.region("t", backup="host").__enter__(),
    memsaver.device_memory,
    lambda: memsaver.graph(object()).__enter__(),
    simulator.active,
):
    for _ in range(2):
        try:
            call()
        except memsaver.NotLoadedError as error:
            assert isinstance(error, memsaver.MemsaverError) and error.status == "NOT_LOADED"
            errors.append(str(error))
        else:
            raise AssertionError("no error")
assert _C.region_depth() == 0 and _C.region_tag() is None
with memsaver.disabled():
    assert _C.region_depth() == 1
assert _C.region_depth() == 0
for call in (memsaver.state, memsaver.pause, memsaver.resume, memsaver.ranges):
    try:
        call("t")
    except memsaver.UnknownTagError:
        pass
    else:
        raise AssertionError("a tag that no region named")
assert memsaver.pause().changes == memsaver.resume().changes == ()
assert memsaver.stats().tags == () and memsaver.trim(wait=True) == 0
memsaver.configure(share_bytes="64MiB")
print(*errors, sep="\\n")
"""


def library_without_symbols():
    from importlib.util import find_spec

    return find_spec("_ctypes").origin


@pytest.mark.parametrize("which", ["absent", "directory", "no symbols", "no device", "no init"])
def test_without_a_driver(run_python, which, tmp_path):
    env, says = {
        "absent": ({"MEMSAVER_DRIVER": "/nonexistent.so"}, "/nonexistent.so"),
        "directory": ({"MEMSAVER_DRIVER": str(tmp_path)}, str(tmp_path)),
        "no symbols": ({"MEMSAVER_DRIVER": library_without_symbols()}, "has no cuInit"),
        "no device": ({"MEMSAVER_SIM_FAULTS": "cuInit:1:100:0"}, "CUDA_ERROR_NO_DEVICE"),
        "no init": ({"MEMSAVER_SIM_FAULTS": "cuInit:1:999:0"}, "cuInit failed"),
    }[which]
    done = run_python(WITHOUT_DRIVER, **env)
    messages = done.stdout.splitlines()
    assert len(messages) == 10
    for message in messages:
        assert says in message
        assert "MEMSAVER_DRIVER=sim" in message and "525 or newer" in message
    assert done.stderr == ""


def test_a_driver_that_comes_later_is_found(run_python):
    run_python(
        code(
            """
            raises(memsaver.NotLoadedError, enter, "t")
            in_fork(lambda: raises(memsaver.NotLoadedError, enter, "t"))
            os.environ["MEMSAVER_DRIVER"] = "sim"
            in_fork(use)
            use()
            in_fork(lambda: raises(memsaver.InvalidStateError, enter, "late"))
            """
        ),
        MEMSAVER_DRIVER="/nonexistent.so",
    )


def test_a_driver_by_its_path(run_python):
    from memsaver._runtime.native import LIBRARY_DIR

    run_python(
        """
        import memsaver
        from memsaver._runtime.native import _C
        version, library, simulated = _C.driver_info()
        assert library.endswith("libmemsaver_sim.so") and not simulated and version >= 12000
        assert memsaver.device_memory()[1] == 80 << 30
        """,
        MEMSAVER_DRIVER=LIBRARY_DIR / "libmemsaver_sim.so",
    )


def test_a_graph_needs_a_gpu(sim, tag):
    name = tag()
    with pytest.raises(NotLoadedError, match="needs a GPU and a torch") as caught:
        with memsaver.graph(object(), tag=name):
            pytest.fail("entered")
    assert "simulated driver" in str(caught.value)
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.state(name)
    with pytest.raises(ConfigError):
        with memsaver.graph(object(), tag=""):
            pytest.fail("entered")
    assert _C.region_depth() == 0


# --- quiet ----------------------------------------------------------------------------------------


def test_nothing_is_printed(run_python):
    # Not even after failures: errors that have no caller are warnings.
    done = run_python(
        code(
            """
            import warnings

            block = use()
            with memsaver.region("t"):
                raises(memsaver.OutOfDeviceMemoryError, simulator.buffer, 1 << 40)
            sim.fail("cuMemUnmap", 1, times=0)
            raises(memsaver.DriverError, memsaver.pause, "used")
            sim.clear_faults()
            with memsaver.region("t"):
                large = simulator.buffer(64 << 20)
            sim.fail("cuMemRelease", 1, times=0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", memsaver.MemsaverWarning)
                del large
            assert caught and issubclass(caught[0].category, memsaver.MemsaverWarning)
            sim.clear_faults()
            memsaver.trim(wait=True)
            """
        )
    )
    assert (done.stdout, done.stderr) == ("", "")
