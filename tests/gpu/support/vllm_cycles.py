"""Scenarios for sleep levels and tags on a running vLLM engine.

The engine is awake at the start and end of each scenario. If a scenario raises an exception, the
engine is replaced.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import vllm_adapters
import vllm_in_worker
from expected_errors import raises
from gpu_trainer import MIB
from vllm_engines import KV_CACHE, PROMPTS, SLACK, TOKENS, Session, greedy

from memsaver.errors import ConfigError

WEIGHTS = 160 * MIB  # at least, of the small model in bfloat16, on all ranks
# Of WEIGHTS, in groups with other or more weights.
SHARES = {"quantized": 0.5, "quantized_v1": 0.5, "draft": 2}
RELOADS = {  # in groups for which vLLM's own reload does not suffice
    "draft": ("reload_weights", "check_reload_draft"),
    "adapters": ("check_reload_adapted",),
}
GRAPHS = ("in_process", "graphs_tp2")  # groups whose graphs are pausable


def check_output(session: Session) -> None:
    outputs = session.outputs()
    assert outputs == session.expected, f"{outputs} instead of {session.expected}"


@contextlib.contextmanager
def releases(session: Session) -> Iterator[None]:
    """Check that the block releases the memory of all of the engine's tags to the driver."""
    tags, before = session.in_workers("check_tags"), session.free()
    yield
    for rank, now in enumerate(session.in_workers("check_tags")):
        assert not any(now.values()), (rank, now)
    for gpu, (now, then) in enumerate(zip(session.free(), before, strict=True)):
        told = sum(sum(held.values()) for held in tags[gpu :: session.gpus])
        assert now - then >= told - SLACK, (gpu, now - then, tags)


def memsaver_is_active(session: Session) -> None:
    """Each worker's weights and KV cache are in memsaver's tags, and the settings take effect."""
    setting = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    asked = {
        "uses_v2": session.group != "draft" and os.environ.get("VLLM_USE_V2_MODEL_RUNNER") != "0",
        "expands": "expandable_segments:True" in setting,
    }
    assert session.in_workers("check_settings") == [asked] * session.ranks
    states = session.in_workers("memsaver_state")
    tags = session.in_workers("check_tags")
    assert len(states) == len(tags) == session.ranks
    assert not any(state["released"] for state in states), states
    for held in tags:
        assert held["kv_cache"] >= 0.9 * KV_CACHE, held
        assert held["weights"] >= SHARES.get(session.group, 1) * WEIGHTS / session.ranks, held
        assert bool(held.get("cuda_graph")) == (session.group in GRAPHS), held
    assert all(count > 0 for count in session.in_workers("check_graphs"))


def level_1(session: Session) -> None:
    """A sleep at level 1 releases all memory, and the wake-up restores the output."""
    with releases(session):
        session.llm.sleep(level=1)
    assert session.is_asleep()
    assert all(
        {"weights", "kv_cache"} <= set(state["released"])
        for state in session.in_workers("memsaver_state")
    )
    session.llm.wake_up()
    assert not session.is_asleep()
    check_output(session)


def runtime_state(session: Session) -> None:
    """A sleep preserves the state that vLLM creates with the KV cache.

    The wake-up replaces part of this state.
    """
    before = session.in_workers("check_runtime_state")
    session.llm.sleep(level=1)
    session.llm.wake_up()
    for then, now in zip(before, session.in_workers("check_runtime_state"), strict=True):
        same = then.keys() & now.keys()
        assert same and {at: then[at] for at in same} == {at: now[at] for at in same}
    check_output(session)


def weights_first(session: Session) -> None:
    """The weights wake first; the engine stays asleep until the KV cache is also mapped."""
    in_stages(session, ("weights", "kv_cache"))


def kv_cache_first(session: Session) -> None:
    """The KV cache wakes first; the engine stays asleep until the weights are also mapped."""
    in_stages(session, ("kv_cache", "weights"))


def in_stages(session: Session, tags: tuple[str, str]) -> None:
    session.llm.sleep(level=1)
    session.llm.wake_up(tags=[tags[0]])
    assert session.is_asleep()
    for held in session.in_workers("check_tags"):
        assert held[tags[0]] > 0 and held[tags[1]] == 0, held
    session.llm.wake_up(tags=[tags[1]])
    assert not session.is_asleep()
    check_output(session)


def repeated_calls(session: Session) -> None:
    """A sleep of a sleeping engine and a wake-up of an awake engine have no effect."""
    session.llm.wake_up()
    check_output(session)
    session.llm.sleep(level=1)
    asleep = session.free()
    session.llm.sleep(level=1)
    session.llm.sleep(level=2)  # does not lose the saved weights
    assert all(abs(now - then) <= SLACK for now, then in zip(session.free(), asleep, strict=True))
    session.llm.wake_up(tags=["weights"])
    session.llm.wake_up(tags=["weights"])
    session.llm.wake_up()
    check_output(session)


def unknown_tags_and_levels(session: Session) -> None:
    """An unknown tag has no effect and an unknown level is refused; the engine keeps its state."""
    session.llm.wake_up(tags=["no such tag"])
    check_output(session)
    session.llm.sleep(level=1)
    session.llm.wake_up(tags=["no such tag"])
    assert session.is_asleep()
    assert not any(sum(held.values()) for held in session.in_workers("check_tags"))
    session.llm.wake_up()
    check_output(session)
    with raises(ConfigError) as caught:
        session.llm.sleep(level=7)
    assert "level 7" in str(caught[0]), caught[0]
    assert all(held["weights"] > 0 for held in session.in_workers("check_tags"))
    check_output(session)


def level_2(session: Session) -> None:
    """After a sleep at level 2, reloading the weights restores the output; buffers are
    preserved.
    """
    for _ in range(2):
        lose_and_reload(session, ("weights", "kv_cache"))
    level_1(session)


def level_2_kv_cache_first(session: Session) -> None:
    """After a sleep at level 2, a reload restores the output even if the KV cache wakes first."""
    for _ in range(2):
        lose_and_reload(session, ("kv_cache", "weights"))
    level_1(session)


def lose_and_reload(session: Session, tags: tuple[str, str]) -> None:
    """Sleep at level 2, wake the tags in this order, and reload the weights once they are mapped.

    Check the output.
    """
    with releases(session):
        session.llm.sleep(level=2)
    for tag in tags:
        assert session.is_asleep()
        session.llm.wake_up(tags=[tag])
        if tag == "weights":
            reload(session)
    assert not session.is_asleep()
    check_output(session)


def reload(session: Session) -> None:
    """Load all weights from the checkpoints."""
    for method in RELOADS.get(session.group, ("reload_weights",)):
        session.in_workers(method)


def level_0(session: Session) -> None:
    """A sleep at level 0 pauses the scheduler and releases no memory."""
    before = session.in_workers("check_tags")
    session.llm.sleep(level=0)
    assert session.is_asleep() and session.in_workers("check_tags") == before
    session.llm.wake_up(tags=["scheduling"])
    assert not session.is_asleep()
    check_output(session)


def fifty_cycles(session: Session) -> None:
    """The memory use of the GPUs and the processes does not grow over 50 cycles."""
    check_growth(session, 50, 4 * MIB, 16 * MIB)


def thousand_cycles(session: Session) -> None:
    """The memory use of the GPUs and the processes hardly grows over 1,000 cycles."""
    check_growth(session, 1000, 32 * MIB, 64 * MIB)


def check_growth(session: Session, cycles: int, gpu_bytes: int, host_bytes: int) -> None:
    """Check that memory use grows by at most this number of bytes after the first 10 cycles.

    The check measures each GPU, each worker's process, and this process.
    """
    readings, begin = [], time.monotonic()
    step = max(10, cycles // 10)
    for number in range(1, cycles + 1):
        session.llm.sleep(level=1)
        is_checked = number == 10 or number % step == 0
        if is_checked:  # asleep, because torch's caches are empty
            host = [*session.in_workers("check_host_bytes"), vllm_in_worker.host_bytes()]
            readings.append((session.free(), host))
        if number % 2:
            session.llm.wake_up()
        else:
            session.llm.wake_up(tags=["weights"])
            session.llm.wake_up(tags=["kv_cache"])
        if is_checked:
            check_output(session)
    print(f"--- {cycles} cycles in {time.monotonic() - begin:.1f} s: {readings}", flush=True)
    first_free, first_host = readings[0]
    for free, host in readings[1:]:
        grown = [then - now for now, then in zip(free, first_free, strict=True)]
        assert max(grown) <= gpu_bytes, (grown, readings)
        grown = [now - then for now, then in zip(host, first_host, strict=True)]
        assert max(grown) <= host_bytes, (grown, readings)


def drafts_are_accepted(session: Session) -> None:
    """After each kind of sleep, the engine accepts the same drafts and needs the same number of
    steps.
    """
    steps = steps_of_a_request(session)
    assert steps <= TOKENS / 2, f"{steps} steps for {TOKENS} tokens: drafts are not accepted"
    for sleep in (level_1, kv_cache_first, level_2, level_2_kv_cache_first):
        sleep(session)
        assert (again := steps_of_a_request(session)) == steps, (sleep.__name__, again, steps)


def steps_of_a_request(session: Session) -> int:
    """Return the number of steps in which the engine generates the first prompt's tokens."""
    engine = session.llm.llm_engine
    engine.add_request("steps", {"prompt_token_ids": PROMPTS[0]}, greedy(TOKENS))
    steps = 0
    while engine.has_unfinished_requests():
        steps += bool(engine.step())
    return steps


def adapters(session: Session) -> None:
    """LoRA adapters still work after sleeps, and further adapters can be loaded afterwards."""
    first = vllm_adapters.save(session.folder / "first", seed=1)
    with_first = session.outputs(first)
    assert with_first == session.outputs(first) != session.expected
    for _ in range(2):
        level_1(session)
        assert session.outputs(first) == with_first
    second = vllm_adapters.save(session.folder / "second", seed=2)
    with_second = session.outputs(second)
    assert with_second not in (with_first, session.expected)
    level_1(session)
    assert session.outputs(second) == with_second
    assert session.outputs(first) == with_first


def adapters_at_level_2(session: Session) -> None:
    """A loaded LoRA adapter works after sleeps at level 2, and further adapters can be loaded."""
    loaded = vllm_adapters.save(session.folder / "third", seed=3)
    expected = session.outputs(loaded)
    assert expected != session.expected
    for tags in (("weights", "kv_cache"), ("kv_cache", "weights")):
        lose_and_reload(session, tags)
        assert session.outputs(loaded) == expected
    later = vllm_adapters.save(session.folder / "fourth", seed=4)
    assert session.outputs(later) not in (expected, session.expected)
    check_output(session)
