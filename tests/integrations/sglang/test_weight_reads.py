"""Tests reads of weights that a release overtakes, with a fake tokenizer manager."""

from __future__ import annotations

import pytest
from sleeping_manager import Manager

from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.sglang import admissions, weight_reads

pytestmark = pytest.mark.usefixtures("manager_modules")
VALUES = [0.5, 0.25]


@pytest.fixture
def manager():
    """Return a fake manager; `after` is called between a scheduler's reply and its arrival."""
    made = Manager()
    made.after = lambda: None
    return made


def overtake(manager, resumed):
    """Release memory once before the scheduler's next reply; resume it after this reply."""
    overtaken = []

    def between():
        if not overtaken:
            overtaken.append(1)
            manager.tags = {"kv_cache", "weights"}

    manager.between = between
    if resumed:
        manager.after = lambda: manager.tags.clear()


async def read(manager, results):
    """Read a weight; return the result, and the number of requests that were sent."""
    sent = []

    async def original(manager, obj, request=None):
        """Return the value of SGLang's reply, which is None if a scheduler refuses the request."""
        sent.append(obj)
        manager.between()
        result = results["weights" in manager.tags]
        manager.after()
        return result

    result = await weight_reads.by_name(original, manager, "model.norm.weight", None)
    return result, len(sent)


@pytest.mark.parametrize(
    "results", [(VALUES, None), ([VALUES] * 2, [None, None]), ([VALUES] * 2, [VALUES, None])]
)
@pytest.mark.parametrize(
    "when, resumed", [("refuse", False), ("wake", False), ("refuse", True), ("wake", True)]
)
async def test_a_read_that_a_release_overtakes_is_refused_or_sent_again(
    policy, manager, when, resumed, results
):
    """The replies have no text, so the released tags are queried."""
    policy(when)
    assert await read(manager, results) == (results[0], 1)
    overtake(manager, resumed)
    if when == "wake" or resumed:
        assert await read(manager, results) == (results[0], 2)
        return
    with pytest.raises(EngineAsleepError, match="cannot read its weights") as caught:
        await read(manager, results)
    assert caught.value.tags == ("kv_cache", "weights") and caught.value.status_code == 503


@pytest.mark.parametrize("released", [set(), {"kv_cache"}])
@pytest.mark.parametrize("result", [None, [None, None]])
async def test_a_weight_that_the_model_does_not_have_has_no_value(manager, released, result):
    manager.tags = released
    assert await read(manager, (result, result)) == (result, 2)


async def test_a_result_of_none_is_no_refusal_of_other_requests(manager):
    async def original(manager, obj):
        manager.tags = {"weights"}  # released after the update

    hook = admissions.call("update its weights", reads=False)
    assert await hook(original, manager, "weights") is None
