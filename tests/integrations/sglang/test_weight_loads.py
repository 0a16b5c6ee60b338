"""Tests weight updates in an engine's ranks: verification, answers, and ranks that survive."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import rank_processes  # noqa: E402
from weight_engine import Model, Request, checkpoint  # noqa: E402
from weight_requests import load, payload, verification, weights  # noqa: E402

from memsaver.integrations.engine.errors import EngineError  # noqa: E402
from memsaver.integrations.engine.weights import load_check  # noqa: E402
from memsaver.integrations.engine.weights.checks import RankCheck, VerificationRequest  # noqa: E402
from memsaver.integrations.engine.weights.held import watched  # noqa: E402
from memsaver.integrations.sglang import lost_weights  # noqa: E402
from memsaver.integrations.sglang.protocol import (  # noqa: E402
    INCOMPLETE,
    text_of,
    text_of_checks,
    verification_of,
)
from memsaver.integrations.sglang.replies import Reply  # noqa: E402
from memsaver.integrations.sglang.weight_calls import checks_of  # noqa: E402

pytestmark = pytest.mark.usefixtures("tensors_in_files")


def checks(output):
    """Return the checks in a rank's output in the form that the sender receives."""
    return checks_of(Reply(output.success, output.message))


def test_an_update_without_verification_is_sglangs_own(manager):
    rank, named = manager(Model()), weights()
    output = load(rank, named, None)
    assert (output.success, output.message) == (True, "Success")
    assert rank.runner.model.holds(checkpoint())
    assert checks(output) == []


@pytest.mark.parametrize("verified", [False, True])
def test_weights_are_lost_until_the_last_load_of_an_update(manager, verified):
    rank, named = manager(Model()), weights()
    wanted = verification(named) if verified else None
    lost_weights.lose(rank)
    for fields, is_lost in (({"flush_cache": False}, True), ({"flush_cache": True}, False)):
        assert load(rank, named, wanted, **fields).success
        assert lost_weights.are_lost(rank.scheduler) is is_lost
    lost_weights.lose(rank)
    assert not load(rank, {**named, "embed.weight": torch.zeros(3, 3)}, wanted).success
    assert load(rank, named, wanted, selector="draft").success
    assert lost_weights.are_lost(rank.scheduler)


@pytest.mark.parametrize(
    ("selector", "rid", "is_lost"),
    [
        ("all", None, False),
        ("target", None, False),
        ("draft", None, True),
        ("all", INCOMPLETE, True),
    ],
)
def test_weights_are_lost_until_the_end_of_an_update_session(manager, selector, rid, is_lost):
    rank, named = manager(Model()), weights()
    lost_weights.lose(rank)
    rank._session = session = SimpleNamespace(selector=selector)
    assert load(rank, named, None).success
    assert lost_weights.are_lost(rank.scheduler)  # the weights are converted at the end
    lost_weights.session_ended(rank, session, Request(rid))
    assert lost_weights.are_lost(rank.scheduler) is is_lost


def corrupting(monkeypatch, *parameters):
    """Corrupt the model's memory after each load."""

    def loaded(model, named, load):
        result = watched(model, named, load)
        for name in parameters:
            dict(model.named_parameters())[name].data.view(-1)[0] += 1
        return result

    monkeypatch.setattr(load_check, "watched", loaded)


def test_requests_that_wait_in_a_pause_do_not_bar_a_flush(manager):
    rank, named = manager(Model()), weights()
    rank.scheduler.waiting_queue = waiting = ["retracted"]
    output = load(rank, named, verification(named))
    with pytest.raises(EngineError, match="Cache flush failed"):
        checks(output)
    rank.scheduler._engine_paused = True
    assert load(rank, named, verification(named)).success and rank.flushed == 1
    assert rank.scheduler.waiting_queue is waiting and rank.flush_cache == rank._flush
    rank.can_flush = False  # as if a request were paused in place
    assert not load(rank, named, verification(named)).success and rank.flushed == 1


def test_shards_that_the_model_does_not_have_are_an_error(manager):
    rank = manager(Model())
    for bad in ({"nope": torch.ones(1)}, {"embed": torch.ones(3, 8, dtype=torch.bfloat16)}):
        output = load(rank, bad, verification(bad), "direct")
        with pytest.raises(EngineError, match=r"KeyError: 'nope'|embed is"):
            checks(output)


def test_broadcasts_are_checked_alike(manager):
    rank, named = manager(Model()), weights()
    request = Request(text_of(verification(named)), tensors=list(named.items()))
    output = rank.update_weights_from_distributed(request)
    (check,) = checks(output)
    assert (check.received, check.held) == (len(named), len(named))
    request.tensors[4] = (request.tensors[4][0], request.tensors[4][1] + 1)
    flushes = rank.flushed
    output = rank.update_weights_from_distributed(request)
    (check,) = checks(output)
    assert check.damaged == (request.tensors[4][0],) and rank.flushed == flushes
    request = Request(text_of(verification({"embed.weight": torch.zeros(2, 2)})))
    request.tensors = [("embed.weight", torch.zeros(2, 2))]
    output = rank.update_weights_from_distributed(request)
    with pytest.raises(EngineError, match="vocabulary of 2"):
        checks(output)


def test_a_model_that_keeps_the_senders_memory_is_rejected(manager):
    class Keeper(Model):
        def load_weights(self, weights):
            for _, tensor in weights:
                self.norm_0.data = tensor

    rank, named = manager(Keeper()), {"layers.0.norm.weight": torch.ones(8)}
    output = load(rank, named, verification(named))
    with pytest.raises(EngineError, match="norm_0, which is the sender's memory"):
        checks(output)


def test_a_loader_that_cannot_be_run_twice_reports_the_reason(manager):
    class Once(Model):
        def load_weights(self, weights):
            if hasattr(self, "done"):
                raise RuntimeError("quantised already")
            super().load_weights(weights)
            self.done = True

    rank, named = manager(Once()), weights()
    output = load(rank, named, verification(named))
    (check,) = checks(output)
    assert output.success and check.held == 0 and check.received == len(named)
    assert check.unverified == "RuntimeError: quantised already"


@pytest.mark.parametrize("fields", ["", "[]", '{"names": 5}'])
def test_an_invalid_verification_request_fails_the_update_and_not_the_engine(manager, fields):
    named, rank = weights(), manager(Model())
    request = Request(f"memsaver:{fields}", [payload(named)], load_format="flattened_bucket")
    output = rank.update_weights_from_tensor(request)
    assert not output.success and "a verification request" in output.message
    assert load(rank, named, verification(named)).success


def test_requests_and_checks_travel_as_text():
    made = VerificationRequest(("a", "b"), (1,), (("x",), ("y",)))
    assert verification_of(text_of(made)) == made and made.digests(1) == {"b": "y"}
    assert VerificationRequest(("a",), (0,), (("z",),)).digests(5) == {"a": "z"}
    assert verification_of(None) is None and verification_of("rid-7") is None
    several = [
        RankCheck(0, "h", 1, 2, 3, ("a",), ("b",), ("c",), "why"),
        RankCheck(1, "h", 2),
    ]
    first, second = text_of_checks(several), text_of_checks(several[1:])
    text = f"before {first} | {second} Weight version updated to 7."
    assert checks_of(Reply(True, text)) == [*several, several[1]]
    with pytest.raises(EngineError, match="was truncated"):
        checks_of(Reply(True, first[:-5]))


RANKS = """
import signal, torch, torch.distributed as dist, pytest
import weight_engine
from weight_engine import Model, checkpoint
import test_weight_loads as t
from memsaver.integrations.sglang.protocol import text_of
from memsaver.integrations.engine.errors import EngineError
torch.multiprocessing.set_sharing_strategy("file_system")
dist.init_process_group("gloo")
rank = dist.get_rank()
named = t.weights()
with pytest.MonkeyPatch.context() as patch, weight_engine.hooked(patch) as kind:
    updater = kind(Model(rank, 2), dist.group.WORLD)
    def load(named, wanted):
        text = t.payload(named)
        rid = text_of(wanted) if wanted else None
        request = t.Request(rid, [text, text], load_format="flattened_bucket")
        return updater.update_weights_from_tensor(request)
    output = load(named, t.verification(named))
    found = t.checks(output)
    assert [c.rank for c in found] == [0, 1] and all(c.held == len(named) for c in found)
    assert updater.runner.model.holds(checkpoint())
    # One rank holds something else: all of them say so, and which.
    good = type(updater.runner.model).load_weights
    with pytest.MonkeyPatch.context() as inner:
        t.corrupting(inner, *(["qkv_0"] if rank == 1 else []))
        output = load(named, t.verification(named))
    found = t.checks(output)
    assert [c.differing for c in found] == [(), ("layers.0.q.weight",)], found
    assert not output.success
    # One rank raises before the barrier where the other one waits.
    def ugly(self, weights):
        if rank == 0:
            raise ValueError("rank 0 has a bad day")
        good(self, weights)
    type(updater.runner.model).load_weights = ugly
    output = load(named, t.verification(named))
    with pytest.raises(EngineError, match="rank 0 .* ValueError: rank 0 has a bad day"):
        t.checks(output)
    output = load(named, None)
    assert not output.success and "rank 0 of 2: ValueError: rank 0 has a bad" in output.message
    # An interrupt or an exit on one rank is an answer on the other one, at once.
    for raised in (KeyboardInterrupt, SystemExit):
        def ends(self, weights):
            if rank == 0:
                raise raised
            good(self, weights)
        type(updater.runner.model).load_weights = ends
        for wanted in (t.verification(named), None):
            if rank == 0:
                with pytest.raises(raised):
                    load(named, wanted)
                continue
            output = load(named, wanted)
            assert not output.success and raised.__name__ in output.message, output
    type(updater.runner.model).load_weights = good
    # A signal in the handler's own barrier is raised after the exchange of results.
    barrier = dist.barrier
    for wanted in (t.verification(named), None):
        def interrupted(*args, **options):
            barrier(*args, **options)
            dist.barrier = barrier
            signal.raise_signal(signal.SIGINT)
        if rank == 0:
            dist.barrier = interrupted
            with pytest.raises(KeyboardInterrupt):
                load(named, wanted)
        else:
            assert load(named, wanted).success
    assert load(named, t.verification(named)).success
    # Without verification, the ranks find unknown names and wrong shapes together.
    assert load(named, None).success and updater.runner.model.holds(checkpoint())
    for bad in ("layers.0.o.weight", "layer.0.o.weight"):
        output = load({**named, bad: torch.zeros(8, 12)}, None)
        assert not output.success and bad in output.message, output
    # Each rank uses only some of the names, as with experts, and loads whole tensors.
    def mine(self, weights):
        good(self, [(n, t) for n, t in weights if n.startswith(f"layers.{rank}") or "emb" in n])
    type(updater.runner.model).load_weights = mine
    updater.runner.model = Model()
    updater.scheduler._memsaver_known_weights.clear()
    assert load(named, None).success
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(120)
def test_all_ranks_of_a_group_answer_together(tmp_path):
    here = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
    found = rank_processes.run(here + RANKS, 2, tmp_path, timeout=100)
    assert all("fine" in said for said in found)
