"""Tests reads of weights that a release overtakes, with a fake tokenizer manager."""

from __future__ import annotations

import pytest
from sleeping_manager import Manager

from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.sglang import admissions

pytestmark = pytest.mark.usefixtures("manager_modules")
VALUES = [0.5, 0.25]


async def read(manager, results):
    """Read a weight; return the result, and the number of requests that were sent."""
    sent = []

    async def original(manager, obj, request=None):
        """Return the value of SGLang's reply, which is None if a scheduler refuses the request."""
        sent.append(obj)
        manager.between()
        return results["weights" in manager.tags]

    hook = admissions.call("read its weights")
    return await hook(original, manager, "model.norm.weight", None), len(sent)


@pytest.mark.parametrize(
    "results", [(VALUES, None), ([VALUES] * 2, [None, None]), ([VALUES] * 2, [VALUES, None])]
)
@pytest.mark.parametrize("when", ["refuse", "wake"])
async def test_a_read_that_a_release_overtakes_is_refused_or_sent_again(policy, when, results):
    """The replies have no text, so the released tags are queried."""
    policy(when)
    manager = Manager()
    assert await read(manager, results) == (results[0], 1)
    overtaken = []

    def between():
        if not overtaken:
            overtaken.append(1)
            manager.tags = {"kv_cache", "weights"}

    manager.between = between
    if when == "wake":
        assert await read(manager, results) == (results[0], 2)
        return
    with pytest.raises(EngineAsleepError, match="cannot read its weights") as caught:
        await read(manager, results)
    assert caught.value.tags == ("kv_cache", "weights") and caught.value.status_code == 503


@pytest.mark.parametrize("released", [set(), {"kv_cache"}])
@pytest.mark.parametrize("result", [None, [None, None]])
async def test_a_weight_that_the_model_does_not_have_has_no_value(released, result):
    manager = Manager()
    manager.tags = released
    assert await read(manager, (result, result)) == (result, 1)
