"""Tests how each policy handles requests that reach a sleeping engine, with a fake engine."""

import asyncio
import gc
import random

import pytest

from memsaver.errors import ConfigError, OutOfDeviceMemoryError
from memsaver.integrations.engine import admission
from memsaver.integrations.engine.admission import EVERYTHING, Admission, ClientGoneError
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.policies import Policy
from memsaver.integrations.engine.tags import GRAPH, KV_CACHE, WEIGHTS

WEIGHTS_ONLY = frozenset({WEIGHTS})


@pytest.fixture(autouse=True)
def quick_polls(monkeypatch):
    monkeypatch.setattr(admission, "_POLL_SECONDS", 0.02)


class Engine:
    """A fake engine. A resume takes a moment and fails while `full` is true."""

    def __init__(self, released=EVERYTHING) -> None:
        self.tags = set(released)
        self.full = False
        self.error: Exception | None = None
        self.reports = True
        self.resumes: list[tuple[str, ...]] = []
        self.queries = 0

    async def released(self):
        self.queries += 1
        await asyncio.sleep(0)
        return frozenset(self.tags) if self.reports else None

    async def resume(self, tags):
        self.resumes.append(tuple(tags))
        await asyncio.sleep(0.001)
        if self.full:
            raise OutOfDeviceMemoryError("out of memory: 8 MiB are needed")
        if self.error is not None:
            raise self.error
        self.tags -= set(tags)
        return frozenset(self.tags)


def made(when, engine, seconds=5.0, most_held=100, **options) -> Admission:
    found = Admission(Policy(when, seconds, most_held=most_held), engine, **options)
    found.learn(engine.tags)
    return found


@pytest.mark.parametrize("when", ["refuse", "wait", "wake"])
@pytest.mark.parametrize(
    ("released", "needed"), [(frozenset(), EVERYTHING), ({KV_CACHE}, WEIGHTS_ONLY)]
)
async def test_a_request_whose_tags_are_mapped_is_admitted_without_a_query(when, released, needed):
    engine = Engine(released)
    await made(when, engine).admit(needed, "work")
    assert (engine.queries, engine.resumes, engine.tags) == (0, [], released)


async def test_a_refusal_is_checked_with_the_engine():
    """Another process might have resumed the memory, so the refusal is checked with the engine."""
    engine = Engine()
    found = made("refuse", engine)
    engine.tags.clear()
    await found.admit(EVERYTHING, "generate")
    assert found.released == frozenset()
    found.learn(EVERYTHING)
    engine.reports = False
    with pytest.raises(EngineAsleepError):
        await found.admit(EVERYTHING, "generate")


async def test_a_query_in_progress_does_not_delay_the_first_request():
    engine, order, asked = Engine(), [], asyncio.Event()
    found = made("wait", engine)

    async def slow():
        asked.set()
        await asyncio.sleep(0.2)
        return frozenset(engine.tags)

    engine.released = slow

    async def request(number):
        await found.admit(EVERYTHING, "generate")
        order.append(number)

    tasks = [asyncio.ensure_future(request(number)) for number in range(3)]
    await asked.wait()
    engine.tags.clear()
    found.learn(())
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]


@pytest.mark.parametrize(
    ("when", "most_held"), [("wait", 5000), ("wait", 1000), ("wake", 5000), ("wake", 1000)]
)
async def test_requests_that_arrive_after_a_wake_up_do_not_overtake_held_ones(when, most_held):
    """A later request does not overtake held requests, even if an earlier request is checking its
    client or the queue is full.
    """
    engine, order, checking = Engine(), [], asyncio.Event()
    found = made(when, engine, most_held=most_held)

    async def is_gone():
        checking.set()
        await asyncio.sleep(0.05)
        return False

    async def request(number):
        await found.admit(EVERYTHING, "work", is_gone=None if number else is_gone)
        order.append(number)

    tasks = [asyncio.ensure_future(request(number)) for number in range(1000)]
    await (checking.wait() if when == "wait" else asyncio.sleep(0))
    engine.tags.clear()
    found.learn(())
    tasks += [asyncio.ensure_future(request(number)) for number in range(1000, 2000)]
    await asyncio.gather(*tasks)
    assert order == list(range(2000))
    assert found.waiting == 0 and engine.queries <= 1  # that of the first request


async def test_failed_wake_ups_have_pauses_although_the_memory_was_mapped_meanwhile():
    engine = Engine()
    engine.full = True
    found = made("wake", engine, seconds=1.5)
    task = asyncio.ensure_future(found.admit(EVERYTHING, "work"))
    await asyncio.sleep(0)
    found.learn(())
    found.learn(EVERYTHING)
    with pytest.raises(EngineAsleepError, match="out of memory"):
        await task
    assert len(engine.resumes) < 10


async def test_a_request_that_waits_for_earlier_ones_checks_its_client_and_its_deadline():
    engine = Engine()
    found = made("wait", engine, seconds=0.5)
    stuck = asyncio.Event()

    async def checks():
        await stuck.wait()
        return False

    async def is_gone():
        return True

    earlier = asyncio.ensure_future(found.admit(EVERYTHING, "work", is_gone=checks))
    await asyncio.sleep(0.1)  # it checks its client
    engine.tags.clear()
    found.learn(())
    with pytest.raises(ClientGoneError):
        await found.admit(EVERYTHING, "work", is_gone=is_gone)
    await asyncio.wait_for(found.admit(EVERYTHING, "work"), 5)  # at its deadline
    assert not earlier.done()
    stuck.set()
    await earlier


async def test_a_waiting_request_notices_a_resume_by_another_process():
    engine = Engine()
    found = made("wait", engine)
    waiting = [asyncio.ensure_future(found.admit(EVERYTHING, "generate")) for _ in range(20)]
    await asyncio.sleep(0.05)
    queries = engine.queries
    engine.tags.clear()
    await asyncio.gather(*waiting)
    assert engine.queries <= queries + 2  # only the first in the queue asks


async def test_a_wake_up_resumes_once_for_all_requests_and_in_the_engines_order():
    engine = Engine()
    found = made("wake", engine)
    await asyncio.gather(*(found.admit(EVERYTHING, "generate") for _ in range(10)))
    assert engine.resumes == [(GRAPH, WEIGHTS, KV_CACHE)] and found.released == frozenset()


async def test_a_wake_up_of_a_part_does_not_use_up_the_time_of_a_request_that_needs_more():
    engine = Engine()
    found = made("wake", engine, seconds=0.0)
    await asyncio.gather(
        found.admit(WEIGHTS_ONLY, "update its weights"), found.admit(EVERYTHING, "generate")
    )
    assert engine.resumes == [(WEIGHTS,), (GRAPH, KV_CACHE)] and engine.tags == set()


async def test_a_wake_up_without_memory_is_repeated_until_its_bound():
    """Another engine might release memory in the meantime, so the wake-up is repeated."""
    engine = Engine()
    engine.full = True
    found = made("wake", engine, seconds=0.2)
    with pytest.raises(EngineAsleepError, match="8 MiB are needed") as caught:
        await found.admit(EVERYTHING, "generate")
    assert isinstance(caught.value.__cause__, OutOfDeviceMemoryError)
    assert len(engine.resumes) > 1 and engine.tags == EVERYTHING
    found = made("wake", engine)
    task = asyncio.ensure_future(found.admit(EVERYTHING, "generate"))
    await asyncio.sleep(0.02)
    engine.full = False
    await task
    assert engine.tags == set()


@pytest.mark.parametrize("reads", [True, False])
async def test_a_wake_up_queries_first_what_other_processes_have_discarded(reads):
    engine = Engine({KV_CACHE})
    found = made("wake", engine)

    async def released():
        found.without_backup = WEIGHTS_ONLY if WEIGHTS in engine.tags else frozenset()
        return frozenset(engine.tags)

    engine.released = released
    engine.tags.add(WEIGHTS)
    if not reads:
        await found.admit(EVERYTHING, "update its weights", reads=False)
        assert engine.tags == set()
        return
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await found.admit(EVERYTHING, "generate")
    assert engine.resumes == [] and engine.tags == {KV_CACHE, WEIGHTS}


async def test_a_wake_up_that_waited_for_another_change_does_not_resume_discarded_contents():
    engine = Engine()
    found = made("wake", engine)
    async with found.changing:
        task = asyncio.ensure_future(found.admit(EVERYTHING, "generate"))
        await asyncio.sleep(0.01)
        found.without_backup = WEIGHTS_ONLY
    with pytest.raises(EngineAsleepError, match="weights has no backup"):
        await task
    assert engine.resumes == []


@pytest.mark.parametrize("is_gone", [False, True])
async def test_a_wake_up_ends_although_the_memory_changes_before_each_attempt(monkeypatch, is_gone):
    monkeypatch.setattr(admission, "_WAKE_SECONDS", 0.1)
    engine = Engine({KV_CACHE})
    found = made("wake", engine, seconds=0.1)

    async def released():
        engine.tags ^= {GRAPH}  # another process wakes the graphs, or releases them
        return frozenset(engine.tags)

    async def has_gone():
        return is_gone

    engine.released = released
    error = ClientGoneError if is_gone else EngineAsleepError
    with pytest.raises(error, match=None if is_gone else "during each wake-up"):
        await asyncio.wait_for(found.admit({KV_CACHE}, "generate", is_gone=has_gone), 5)
    assert engine.resumes == []


async def test_weights_that_are_not_loaded_yet_are_not_read():
    """The weights are mapped, and another caller is updating the weights."""
    engine = Engine({KV_CACHE})
    found = made("wake", engine)
    found.learn({KV_CACHE})
    found.lost = WEIGHTS_ONLY
    with pytest.raises(EngineAsleepError, match="load all of weights, and resume the rest"):
        await found.admit(EVERYTHING, "generate")
    assert engine.resumes == []

    async def released():
        found.lost = frozenset()  # the update has ended
        return frozenset(engine.tags)

    engine.released = released
    await found.admit(EVERYTHING, "generate")
    assert engine.tags == set()


async def test_weights_without_a_backup_that_were_not_released_do_not_prevent_a_wake_up():
    """The engine does not report its state."""
    engine = Engine({KV_CACHE})
    found = made("wake", engine, without_backup=WEIGHTS_ONLY)
    found.learn({KV_CACHE})

    async def released():
        return None

    engine.released = released
    await found.admit(EVERYTHING, "generate")
    assert engine.tags == set()


async def test_a_backup_that_a_query_reports_is_used():
    engine = Engine()
    found = made("wake", engine, without_backup=WEIGHTS_ONLY)

    async def released():
        found.without_backup = frozenset()
        return frozenset(engine.tags)

    engine.released = released
    await found.admit(EVERYTHING, "generate")
    assert engine.tags == set()


async def test_a_cancelled_request_leaves_the_wake_up_in_progress():
    engine = Engine()
    found = made("wake", engine)
    task = asyncio.ensure_future(found.admit(EVERYTHING, "generate"))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    await found.admit(EVERYTHING, "generate")
    assert len(engine.resumes) == 1 and engine.tags == set()


@pytest.mark.parametrize("when", ["wait", "wake"])
async def test_requests_beyond_the_limit_are_refused(when):
    engine = Engine()
    engine.full = True
    found = made(when, engine, most_held=3)
    held = [asyncio.ensure_future(found.admit(EVERYTHING, "generate")) for _ in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(EngineAsleepError, match="3 requests are held"):
        await found.admit(EVERYTHING, "generate")
    held.pop().cancel()
    await asyncio.sleep(0.01)
    held.append(asyncio.ensure_future(found.admit(EVERYTHING, "generate")))
    await asyncio.sleep(0.01)
    assert not any(one.done() for one in held)
    engine.tags.clear()
    await found.admit(EVERYTHING, "generate")  # the query shows that the engine is awake
    engine.full = False
    await asyncio.gather(*held)


async def test_requests_that_have_ended_are_freed_while_others_are_held():
    def alive():
        gc.collect()
        return sum(isinstance(one, admission._Waiter) for one in gc.get_objects())

    before = alive()
    found = made("wait", Engine(), seconds=0.05)

    async def request():
        with pytest.raises(EngineAsleepError):
            await found.admit(EVERYTHING, "generate")

    requests = []
    for _ in range(300):
        requests.append(asyncio.ensure_future(request()))
        await asyncio.sleep(0.001)
    assert 0 < found.waiting < 200
    assert alive() - before <= found.waiting + 1
    await asyncio.gather(*requests)


async def _gone():
    return True


@pytest.mark.parametrize(
    "when, seconds, full, options, reason",
    [
        ("refuse", 5.0, False, {}, "wake it up first;"),
        ("wait", 0.01, False, {}, "no caller woke it up within 0.01 s"),
        ("wait", 5.0, False, {"is_gone": _gone}, "the client disconnected"),
        ("wake", 5.0, True, {"is_gone": _gone}, "the client disconnected"),
        ("wake", 0.0, True, {}, "it could not be woken: out of memory: 8 MiB are needed"),
    ],
)
async def test_a_request_that_fails_is_logged_once_until_the_engine_is_awake(
    caplog, when, seconds, full, options, reason
):
    engine = Engine({KV_CACHE, WEIGHTS})
    engine.full = full
    found = made(when, engine, seconds)
    for _ in range(2):
        for _ in range(30):
            with pytest.raises(ClientGoneError if options else EngineAsleepError):
                await found.admit(EVERYTHING, "generate", **options)
            assert found.waiting == 0
        found.learn(())
        found.learn(engine.tags)
    first, count, *again = [one.getMessage() for one in caplog.records]
    assert "(released: kv_cache, weights) and cannot generate" in first and reason in first
    assert "29 more requests" in count
    assert again == [first, count]
    assert {(one.levelname, one.name) for one in caplog.records} == {("WARNING", "memsaver.engine")}


@pytest.mark.parametrize("when", ["wait", "wake"])
async def test_a_cancelled_request_leaves_the_queue_and_is_logged(caplog, when):
    engine = Engine()
    engine.full = True
    found = made(when, engine)
    task = asyncio.ensure_future(found.admit(EVERYTHING, "generate"))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    (line,) = caplog.messages
    assert "the request was cancelled while it waited" in line and found.waiting == 0


async def test_other_failures_of_a_wake_up_are_not_repeated_and_logged_with_a_bound(caplog):
    engine = Engine()
    found = made("wake", engine)
    for number in range(100):
        engine.error = ConfigError(f"{number} bytes")
        with pytest.raises(EngineAsleepError, match=f"could not be woken: {number} bytes"):
            await found.admit(EVERYTHING, "generate")
    assert len(engine.resumes) == 100
    found.learn(())
    assert len(caplog.messages) == 21 and "80 more requests" in caplog.messages[-1]


@pytest.mark.parametrize("when", ["wait", "wake"])
@pytest.mark.parametrize("seed", range(3))
async def test_a_storm_of_releases_and_requests(when, seed):
    """No request runs without memory, no request is lost, and the queue is empty at the end."""
    chance = random.Random(seed)
    engine = Engine(released=())
    found = made(when, engine, seconds=20)
    running, served, retried = 0, 0, 0

    async def change(operation):
        async with found.changing:
            await asyncio.sleep(0.001 * chance.random())
            if operation == "resume":
                engine.tags.clear()
            elif not running:  # a release needs an idle engine
                engine.tags |= {WEIGHTS, KV_CACHE}
            found.learn(engine.tags)

    async def request():
        nonlocal running, served, retried
        await asyncio.sleep(0.2 * chance.random())
        while True:
            await found.admit(EVERYTHING, "generate")
            await asyncio.sleep(0.002 * chance.random())  # it is tokenised
            if not engine.tags:
                break
            retried += 1  # the scheduler refuses it
            found.learn(engine.tags)
        running += 1
        await asyncio.sleep(0.001 * chance.random())
        assert not engine.tags
        running -= 1
        served += 1

    async def trainer():
        for _ in range(60):
            await asyncio.sleep(0.004 * chance.random())
            await change(chance.choice(["release", "resume"]))
        await change("resume")

    requests = [asyncio.ensure_future(request()) for _ in range(100)]
    leaving = [asyncio.ensure_future(request()) for _ in range(20)]
    asyncio.get_running_loop().call_later(0.1, lambda: [one.cancel() for one in leaving])
    await asyncio.gather(trainer(), trainer(), *requests)
    await asyncio.wait(leaving)
    assert found.waiting == 0 and served >= 100
    assert when == "wake" or engine.resumes == []
