"""Tests weight updates of an engine with data-parallel replicas, each with its own payloads."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from weight_engine import Backend, Output, Request, checkpoint  # noqa: E402
from weight_requests import payload, verification, weights  # noqa: E402

from memsaver.integrations.engine.weights.checks import VerificationRequest  # noqa: E402
from memsaver.integrations.sglang import replicas, weight_loads  # noqa: E402
from memsaver.integrations.sglang.places import place_of  # noqa: E402
from memsaver.integrations.sglang.protocol import checks_in, text_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("tensors_in_files")


@pytest.fixture
def ranks(manager):
    """Return the two ranks of an engine with two replicas."""
    return Backend(manager, replicas=2).ranks


def test_each_replica_loads_its_own_payload_and_compares_its_own_digests(ranks):
    names = ("layers.0.norm.weight",)
    named = [{names[0]: torch.full((8,), value)} for value in (2.0, 3.0)]
    texts, kept = [], []
    for one in named:
        texts.append(payload(one))
        kept.append(payload.kept)
    rows = tuple(verification(one).sent[0] for one in named)
    request = Request(text_of(VerificationRequest(names, (0,), rows)), texts)
    request.load_format = "flattened_bucket"
    for number, rank in enumerate(ranks):
        output = rank.update_weights_from_tensor(request)
        (check,) = checks_in(output.message)
        assert (check.rank, check.received, check.held) == (number, 1, 1), check
        assert rank.runner.model.norm_0.tolist() == [number + 2.0] * 8
    assert request.serialized_named_tensors == texts


def test_a_request_with_payloads_for_one_group_is_unchanged(ranks):
    named = weights()
    for rank in ranks:
        request = Request(None, [payload(named)], load_format="flattened_bucket")
        assert rank.update_weights_from_tensor(request).success
        assert rank.runner.model.holds(checkpoint())


def test_digests_for_too_few_ranks_are_rejected(ranks):
    names, row = ("layers.0.norm.weight",), ("digest",)
    for given in (3, 4):
        wanted = VerificationRequest(names, (0,), (row,) * given)
        ranks[0].scheduler.server_args.dp_size = given + 1
        output = ranks[0].update_weights_from_tensor(Request(text_of(wanted)))
        assert not output.success and f"the engine has {given + 1}" in output.message


def test_processes_join_a_group_with_different_ranks(ranks, monkeypatch):
    monkeypatch.setattr(weight_loads, "_message", lambda kind: Output)
    joined = []

    def join(updater, request):
        joined.append(request.rank_offset)
        return Output(True, "")

    hook = weight_loads.everywhere("InitWeightsUpdateGroupReqOutput")
    request = SimpleNamespace(rank_offset=1, group_name="g")
    assert all(hook(join, rank, request).success for rank in ranks)
    assert joined == [1, 2] and request.rank_offset == 1


@pytest.mark.parametrize("attention", [False, True])
def test_replicas_of_attention_have_no_ranks_of_their_own(ranks, attention):
    for number, rank in enumerate(ranks):
        rank.scheduler.server_args.enable_dp_attention = attention
        place = place_of(rank)
        assert (place.rank, place.size) == ((0, 1) if attention else (number, 2))


# --- the tokenizer manager ------------------------------------------------------------------------


class Manager:
    """A fake SGLang manager, whose own methods reject updates of several replicas."""

    def __init__(self, count, *answers):
        self.server_args = SimpleNamespace(dp_size=count)
        self.is_pause_cond, self.is_pause = asyncio.Condition(), False
        self.model_update_lock = SimpleNamespace(writer_lock=self.written())
        self.answers, self.events, self.version = answers, [], "old"

    @contextlib.asynccontextmanager
    async def written(self):
        self.events.append("locked")
        yield
        self.events.append("unlocked")

    def auto_create_handle_loop(self):
        asyncio.get_running_loop()

    async def update_weights_from_tensor_communicator(self, obj):
        assert self.is_pause_cond.locked() == self.is_pause
        self.events.append("sent")
        return self.answers

    init_weights_update_group_communicator = update_weights_from_tensor_communicator

    def _update_weight_version_if_provided(self, version):
        self.version = version


async def refusing(manager, obj, request=None):
    return False, "dp_size must be 1"


def sent(manager, hook, flush_cache=False):
    obj = SimpleNamespace(abort_all_requests=False, weight_version="new", flush_cache=flush_cache)
    return asyncio.run(hook(refusing, manager, obj, None))


GOOD, BAD = SimpleNamespace(success=True, message="a"), SimpleNamespace(success=False, message="b")


def test_all_replicas_receive_an_update_and_all_must_succeed():
    update = replicas.update("update_weights_from_tensor")
    manager = Manager(2, GOOD, GOOD)
    assert sent(manager, update) == (True, "a | a")
    assert manager.events == ["locked", "sent", "unlocked"] and manager.version == "new"
    manager = Manager(2, GOOD, BAD)
    assert sent(manager, update) == (False, "a | b") and manager.version == "old"
    manager = Manager(2, GOOD, GOOD)
    manager.is_pause = True  # a pause of generation holds the lock
    assert sent(manager, update) == (True, "a | a") and manager.events == ["sent"]
    join = replicas.join("init_weights_update_group")
    assert sent(Manager(2, GOOD, BAD), join) == (False, "a | b")


@pytest.mark.parametrize("flush_cache", [False, True])
@pytest.mark.parametrize("answer", [GOOD, BAD])
def test_a_flush_after_an_update_clears_the_processed_images(flush_cache, answer):
    images = {"a.png": "features of the old weights"}
    manager = Manager(2, GOOD, answer)
    manager.mm_processor = SimpleNamespace(clear_preprocess_cache=images.clear)
    sent(manager, replicas.update("update_weights_from_tensor"), flush_cache)
    assert bool(images) == (not flush_cache or answer is BAD)


@pytest.mark.parametrize("attention", [False, True])
def test_other_engines_use_sglangs_own_methods(attention):
    manager = Manager(2 if attention else 1)
    manager.server_args.enable_dp_attention = attention
    for hook in (replicas.update("any"), replicas.join("any")):
        assert sent(manager, hook) == (False, "dp_size must be 1")
