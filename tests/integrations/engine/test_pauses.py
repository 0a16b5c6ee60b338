"""Tests pauses on one rank that discard an engine's KV cache while other tags are saved."""

import time

import distributed_ranks
import pytest
from driver_faults import TYPED
from looks import held, intact

import memsaver
from memsaver.integrations.engine import moves
from memsaver.integrations.engine.messages import raisable
from memsaver.integrations.engine.ranks import Group
from memsaver.integrations.engine.tags import RELEASE_ORDER

MIB = 1 << 20
KV, SAVED = {"kv_cache"}, {"weights", "cuda_graph"}


@pytest.fixture
def blocks(request, tag, make_blocks):
    """Allocate an engine's memory with outdated backups; the parameter is the kind of backup."""
    place = getattr(request, "param", "host")
    tag.names.extend(RELEASE_ORDER)
    made = {
        name: make_blocks(name, [4 * MIB], backup="none" if name in KV else place)
        for name in RELEASE_ORDER
    }
    assert pause().failure is None
    resume()
    for seed, (block,) in enumerate(made.values(), 100):
        block.fill(seed)
    yield made
    made.clear()


def pause():
    (rank,) = moves.pause(Group(None), RELEASE_ORDER)
    return rank


def resume():
    (rank,) = moves.resume(Group(None), RELEASE_ORDER)
    assert rank.failure is None and paused() == set()


def paused():
    return {name for name in RELEASE_ORDER if memsaver.state(name) == "paused"}


def pause_beside(sim, in_thread, wait_until):
    """Pause, and block all copies until the driver call that unmaps the KV cache."""
    before = sim.calls("cuMemUnmap")
    with held(sim):
        task = in_thread(pause)
        wait_until(lambda: sim.calls("cuMemUnmap") == before + 1)
    return task.result()


@pytest.mark.parametrize("blocks", ["host", "disk"], indirect=True)
def test_the_kv_cache_is_paused_while_other_contents_are_saved(sim, blocks, in_thread, wait_until):
    start = time.perf_counter()
    rank = pause_beside(sim, in_thread, wait_until)
    assert rank.failure is None and 0 < rank.seconds <= time.perf_counter() - start
    assert paused() == KV | SAVED and sim.tag_bytes() == 0
    assert {name: count > 0 for name, count in rank.copied_bytes.items()} == {
        "kv_cache": False, "weights": True, "cuda_graph": True,
    }  # fmt: skip
    resume()
    assert blocks["kv_cache"][0].is_zero()
    assert all(intact(blocks[name]) for name in SAVED)


@pytest.mark.parametrize(
    ("faults", "failed"),
    [
        (["cuMemUnmap"], KV),
        (["cuMemcpyDtoHAsync"], SAVED),
        (["cuMemUnmap", "cuMemcpyDtoHAsync"], KV | SAVED),
    ],
)
def test_a_failed_pause_changes_only_its_own_tags(
    sim, blocks, in_thread, wait_until, faults, failed
):
    notified = []
    registration = memsaver.on_resume(notified.append)
    for call in faults:
        sim.fail(call, sim.INVALID_VALUE)
    rank = pause_beside(sim, in_thread, wait_until)
    registration.remove()
    sim.clear_faults()
    assert {tag.partition("\x1f")[0] for tag in notified} == failed
    assert paused() == (KV | SAVED) - failed
    with pytest.raises(memsaver.DriverError, match=faults[0]) as caught:
        raise raisable(rank.failure)
    assert caught.value.tag in failed
    assert all(intact(blocks[name]) for name in failed)
    if failed == KV:  # the same call again pauses the rest, as a sleep after a failed one
        assert pause().failure is None
    resume()
    assert all(intact(blocks[name]) for name in SAVED)
    assert pause().failure is None and paused() == KV | SAVED
    resume()
    assert all(intact(blocks[name]) for name in SAVED)


def test_a_failed_wait_for_the_devices_work_is_tried_again(sim, blocks):
    with sim.fault("cuMemFree"):
        assert pause().failure is None and paused() == KV | SAVED
    resume()
    assert all(intact(blocks[name]) for name in SAVED)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::memsaver.MemsaverWarning")  # of deferred releases
def test_after_every_fault_nothing_is_lost_and_a_pause_can_be_repeated(
    sim, blocks, in_thread, each_fault
):
    def before():
        resume()
        for (block,) in blocks.values():
            block.fill(block.seed + 1)

    for fault in each_fault(before, pause, sim.INVALID_VALUE):
        sim.fail(fault.call, fault.code, fault.nth, fault.times)
        rank = in_thread(pause).result()
        sim.clear_faults()
        gone = paused()
        assert rank.failure is None or isinstance(raisable(rank.failure), TYPED), fault
        assert gone == KV | SAVED or rank.failure is not None, fault
        assert gone & SAVED in (set(), SAVED), fault
        assert all(intact(blocks[name]) for name in (KV | SAVED) - gone), fault
        assert pause().failure is None and paused() == KV | SAVED and sim.tag_bytes() == 0, fault
        resume()
        assert all(intact(blocks[name]) for name in SAVED), fault


RANKS = """
import threading
from memsaver.integrations.engine import moves
from memsaver.integrations.engine.ranks import Group, first_failure

begin("gloo")
(block,) = blocks("weights", [MIB], "host")
group, tags = Group(dist.group.WORLD), ["weights"]
for number, error in ((signal.SIGINT, KeyboardInterrupt), (signal.SIGALRM, TimeoutError)):
    def handler(*_):
        raise error

    signal.signal(number, handler)
    if RANK == 0:  # a transition in the background has the tag
        sim.hold_streams(True)
        before = memsaver.pause("weights", wait=False)
        threading.Timer(0.3, signal.raise_signal, [number]).start()
    start = time.monotonic()
    try:
        failed = first_failure(moves.pause(group, tags))
        assert (failed.rank, failed.failure.kind) == (0, error.__name__), failed
        assert RANK == 1 or error is TimeoutError
    except KeyboardInterrupt:
        assert RANK == 0 and error is KeyboardInterrupt
    assert time.monotonic() - start < 20, "the group's timeout is 30 s"
    if RANK == 0:
        assert not before.done()
        sim.hold_streams(False)
        before.wait()
    else:
        assert states("weights") == ["mapped"]
    assert not first_failure(moves.pause(group, tags))
    assert not first_failure(moves.resume(group, tags)) and block.is_intact()
"""


def test_all_ranks_learn_of_a_signal_that_ends_the_wait_of_one(tmp_path):
    pytest.importorskip("torch")
    distributed_ranks.run(tmp_path, RANKS, 2)
