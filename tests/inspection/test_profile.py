"""Tests NVTX ranges, which tests/native/nvtx_injection.c records in a child process."""

import pytest
from built_sources import LIBRARY, built
from repository import TESTS

MIB = 1 << 20
SOURCE = TESTS / "native" / "nvtx_injection.c"

PRELUDE = """
import memsaver
from simulated_driver import Block, Simulator
from memsaver import simulator

sim = Simulator()
with memsaver.region("weights", backup="host"):
    weights = [Block(sim, 8 << 20, seed) for seed in range(2)]
with memsaver.region("kv_cache"):
    kv = simulator.buffer(32 << 20)
"""


@pytest.fixture(scope="module")
def injection():
    return built("nvtx_injection.so", [SOURCE], (*LIBRARY, "-Wextra"))


@pytest.fixture
def profile(run_python, injection, tmp_path):
    """Run code in a child process under the profiler; return its output and each thread's ranges.

    A range is a tuple (message, payload). The test fails if a range is not ended, or is ended on
    another thread or out of order.
    """

    def run(code):
        seen = tmp_path / "ranges"
        seen.unlink(missing_ok=True)
        done = run_python(
            PRELUDE + code, NVTX_INJECTION64_PATH=injection, MEMSAVER_TEST_RANGES=seen
        )
        assert done.stderr == ""
        ranges, open_ranges = {}, {}
        for line in seen.read_text().splitlines() if seen.exists() else []:
            kind, thread, domain, *rest = line.split("\t", 5)
            assert domain == "memsaver"
            if kind == "push":
                payload_type, payload, message = rest
                assert payload_type == "1", "not NVTX_PAYLOAD_TYPE_UNSIGNED_INT64"
                open_ranges.setdefault(thread, []).append((message, int(payload)))
            else:
                ranges.setdefault(thread, []).append(open_ranges[thread].pop())
        assert not any(open_ranges.values()), "a range was not ended"
        return done.stdout.split(), list(ranges.values())

    return run


def of(verb, ranges):
    return [(message, payload) for message, payload in ranges if message.startswith(verb + " ")]


def test_one_range_for_all_tags_of_a_call_and_none_without_work(profile):
    _, (ranges,) = profile("""
memsaver.pause()
memsaver.pause()
memsaver.resume("kv_cache")
memsaver.resume()
memsaver.resume()
""")
    size = "48 MiB"
    assert of("pause", ranges) == [(f"pause 'weights', 'kv_cache' {size}", 48 * MIB)]
    assert [payload for _, payload in of("resume", ranges)] == [32 * MIB, 16 * MIB]


def test_a_swap_is_one_range_with_the_tags_of_both_sides(profile):
    _, (ranges,) = profile("""
memsaver.pause("kv_cache")
memsaver.swap(out="weights", into="kv_cache")
memsaver.swap(out="weights", into="kv_cache")
memsaver.resume("weights")
assert all(block.is_intact() for block in weights)
""")
    size = "16 MiB"
    assert of("swap", ranges) == [(f"swap 'weights', 'kv_cache' {size}", 16 * MIB)]


def test_a_failure_ends_its_range(profile):
    _, (ranges,) = profile("""
for call, transition in (("cuMemUnmap", memsaver.pause), ("cuMemCreate", memsaver.resume)):
    with sim.fault(call, 2):
        try:
            transition("weights")
            raise AssertionError("it did not fail")
        except memsaver.MemsaverError:
            pass
    transition("weights")
""")
    assert [payload for _, payload in of("pause", ranges)] == [16 * MIB] * 2
    assert [payload for _, payload in of("resume", ranges)] == [16 * MIB] * 2


def test_threads_have_ranges_of_their_own(profile):
    _, threads = profile("""
import threading

def cycle(tag):
    for _ in range(20):
        memsaver.pause(tag)
        memsaver.resume(tag)

tasks = [threading.Thread(target=cycle, args=(tag,)) for tag in ("weights", "kv_cache")]
for task in tasks:
    task.start()
for task in tasks:
    task.join()
""")
    assert len(threads) == 2
    for ranges in threads:
        assert len(of("pause", ranges)) == len(of("resume", ranges)) == 20
        assert len({message for message, _ in of("pause", ranges)}) == 1


def test_a_forked_child_has_no_range_and_exits(profile):
    said, (ranges,) = profile("""
import os, warnings

warnings.simplefilter("ignore", DeprecationWarning)  # of forks of a process with threads
memsaver.pause("weights")
child = os.fork()
if child == 0:
    try:
        memsaver.resume("weights")
    except memsaver.InvalidStateError:
        os._exit(7)
    os._exit(1)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
memsaver.resume("weights")
""")
    assert said == ["7"]
    assert len(of("pause", ranges)) == len(of("resume", ranges)) == 1


def test_a_pause_while_the_process_exits(profile):
    _, (ranges,) = profile("""
import atexit

atexit.register(memsaver.pause, "weights")
""")
    assert len(of("pause", ranges)) == 1


@pytest.mark.parametrize("path", [None, "/nonexistent.so", ""])
def test_without_a_profiler_that_can_be_loaded(run_python, tmp_path, path):
    seen = tmp_path / "ranges"
    done = run_python(
        PRELUDE
        + """
memsaver.pause()
memsaver.resume()
assert all(block.is_intact() for block in weights)
""",
        NVTX_INJECTION64_PATH=path,
        MEMSAVER_TEST_RANGES=seen,
    )
    assert (done.stdout, done.stderr) == ("", "")
    assert not seen.exists()
