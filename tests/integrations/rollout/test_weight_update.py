"""Tests `update`, which sends a trainer's weights to an engine in verified buckets, in one
process.
"""

import pytest
import torch
import weight_engine
from weight_engine import Backend, checkpoint, module_of

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.weights import load_check
from memsaver.integrations.engine.weights.held import watched
from memsaver.integrations.rollout import WeightMismatchError
from memsaver.integrations.rollout.rollout_engine import RolloutEngine
from memsaver.integrations.rollout.together import GRACE_SECONDS
from memsaver.integrations.rollout.weights import update
from memsaver.integrations.sglang.protocol import verification_of

pytestmark = pytest.mark.usefixtures("tensors_in_files")


# --- sent weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("bucket_bytes", [1, 2048, 1 << 30])
@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_update_brings_all_weights(engine, backend, verify, bucket_bytes, dtype):
    weights = checkpoint(1, dtype)
    report = update(engine, weights, version="7", verify=verify, bucket_bytes=bucket_bytes)
    assert backend.holds(weights) and backend.version == "7"
    assert "load_weights" not in vars(backend.models[0])  # the check has restored the loader
    assert backend.calls == ["begin", *["load"] * report.buckets, "end"]
    assert (report.tensors, report.tied) == (len(weights) - 1, ("lm_head.weight",))
    assert report.bytes == sum(t.nbytes for t in weights.values()) - weights["embed.weight"].nbytes
    assert report.version == "7" and report.seconds > 0 and report.unverified == ""
    assert report.bucket_bytes <= max(bucket_bytes, weights["embed.weight"].nbytes)
    assert report.buckets == len(backend.requests)
    assert report.buckets == {1: 13, 1 << 30: 1}.get(bucket_bytes, report.buckets)
    assert report.received == report.held
    if verify == "sampled" and bucket_bytes > 1:
        assert report.buckets <= report.held < 13
    else:  # the sample of a bucket with one tensor is that tensor
        assert report.held == (0 if verify == "off" else 13)
    # Only the last request flushes the cache and sets the version.
    assert [request.flush_cache for request in backend.requests] == [
        *[False] * (report.buckets - 1),
        True,
    ]
    assert {r.weight_version for r in backend.requests[:-1]} <= {None}


def test_every_tensor_is_in_the_sample_of_some_update(engine, backend):
    seen = []
    for _ in range(8):
        update(engine, checkpoint())
        seen += verification_of(backend.requests[-1].rid).looked_at
    assert sorted(seen) == list(range(13))


def test_modules_pairs_and_renamed_tensors_can_be_sent(engine, backend):
    report = update(engine, module_of(checkpoint(3)), verify="full")
    assert backend.holds(checkpoint(3)) and report.held == 13

    named = [(f"actor.{name}", tensor) for name, tensor in checkpoint(4).items()]
    named.append(("value_head", torch.ones(3)))
    update(
        engine,
        iter(named),
        rename=lambda name: name.removeprefix("actor.") if name.startswith("actor.") else None,
    )
    assert backend.holds(checkpoint(4))


def test_views_and_layouts_of_any_kind(engine, backend):
    weights = checkpoint(5)
    odd = dict(weights)
    odd["layers.0.q.weight"] = weights["layers.0.q.weight"].t().contiguous().t()
    odd["layers.1.norm.weight"] = torch.stack([weights["layers.1.norm.weight"]] * 2, 1)[:, 1]
    assert not odd["layers.1.norm.weight"].is_contiguous()
    before = {name: tensor.clone() for name, tensor in odd.items()}
    update(engine, odd, verify="full")
    assert backend.holds(weights)
    assert all(torch.equal(odd[name], tensor) for name, tensor in before.items())


# --- rejected calls and failures ------------------------------------------------------------------


@pytest.mark.parametrize(
    "state, options, text",
    [
        ({"a": 1}, {}, "a must be a tensor, not int"),
        ({}, {}, "no tensors to send"),
        (7, {}, "not int"),
        (torch.ones(2), {}, "not Tensor"),
        ({"a": torch.ones(2).to_sparse()}, {}, "not a dense tensor"),
        ({"a": torch.ones(2, device="meta")}, {}, "on no device"),
        ([("a", torch.ones(1)), ("a", torch.ones(2))], {}, "two tensors are called 'a'"),
        ({"a\ud800": torch.ones(2)}, {}, r"not 'a\\ud800'"),
        ({"a\ud800": torch.ones(2)}, {"verify": "off"}, r"not 'a\\ud800'"),
        ({"a": torch.ones(2)}, {"rename": lambda name: 7}, "must be text that UTF-8 can encode"),
        ({"a": torch.ones(2)}, {"verfy": "off"}, "'verfy'; did you mean 'verify'"),
        ({"a": torch.ones(2)}, {"engine": None, "nope": 1}, "no option 'engine'"),
        ({"a": torch.ones(2)}, {"verify": "some"}, "off, sampled, full"),
        ({"a": torch.ones(2)}, {"layout": "megatron"}, "'whole' or 'engine'"),
        ({"a": torch.ones(2)}, {"bucket_bytes": 0}, "positive number of bytes"),
        ({"a": torch.ones(2)}, {"bucket_bytes": True}, "positive number of bytes, not True"),
        ({"a": torch.ones(2)}, {"flush_cache": "no"}, "flush_cache must be True, False or None"),
        ({"a": torch.ones(2)}, {"version": 7}, "version must be text or None"),
        ({"a": torch.ones(2)}, {"version": "\udfff"}, r"not '\\udfff'"),
        ({"a": torch.ones(2)}, {"timeout": "soon"}, "positive number of seconds"),
        ({"a": torch.ones(2)}, {"timeout": -1}, "positive number of seconds"),
        ({"a": torch.ones(2)}, {"pause": "stop"}, "pause must be one of abort"),
        ({"a": torch.ones(2)}, {"rename": {"a": "b"}}, "rename must be a function"),
        ({"a": torch.ones(2)}, {"group": "g"}, "group must be a WeightGroup"),
        ({"a": torch.ones(2)}, {"pause": "in_place", "flush_cache": True}, "paused in place"),
    ],
)
def test_invalid_options_are_rejected_before_any_request(engine, backend, state, options, text):
    with pytest.raises(ConfigError, match=text):
        update(engine, state, **options)
    assert backend.calls == []


def test_an_engine_that_cannot_be_updated_receives_no_request(engine, backend):
    backend.control.released = frozenset({"weights"})
    with pytest.raises(InvalidStateError, match="weights is released"):
        update(engine, checkpoint())
    engine.tp_size = 2
    with pytest.raises(ConfigError, match=r"2 ranks, and the trainer's group 1.*WeightGroup"):
        update(engine, checkpoint())
    engine.close()
    with pytest.raises(InvalidStateError, match="closed"):
        update(engine, checkpoint())
    assert backend.calls == []


def test_a_name_that_the_engine_does_not_know(engine, backend):
    weights = {f"model.{name}": tensor for name, tensor in checkpoint().items()}
    with pytest.raises(
        WeightMismatchError, match="the engine's model loads nothing from them"
    ) as caught:
        update(engine, weights, verify="off", version="new")
    assert backend.version is None
    assert caught.value.tensors == tuple(weights)[:-1]
    assert "and 5 more" in str(caught.value) and caught.value.status == "WEIGHTS_DIFFER"
    assert backend.calls == ["begin", "load", "end"]


def test_a_shape_that_the_engine_does_not_have(engine, backend):
    weights = checkpoint()
    kept = weights["embed.weight"].clone()
    with pytest.raises(EngineError, match=r"failed on rank 0 .*a vocabulary of 3"):
        update(engine, {**weights, "embed.weight": torch.zeros(3, 3)}, version="bad")
    assert backend.version is None and torch.equal(weights["embed.weight"], kept)
    update(engine, weights, version="good")
    assert backend.holds(checkpoint()) and backend.version == "good"


def test_after_a_failure_a_hanging_engine_is_waited_for_briefly(engine, backend, monkeypatch):
    ends = []
    monkeypatch.setattr(backend, "end_update", lambda *arguments: ends.append(arguments))
    update(engine, checkpoint(), timeout=900)
    monkeypatch.setattr(backend, "damage", lambda number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        update(engine, checkpoint(), timeout=900)
    assert ends[0] == (900, True) and ends[1][0] <= GRACE_SECONDS and not ends[1][1]


@pytest.mark.parametrize("kind", [EngineError, KeyboardInterrupt])
def test_an_update_that_began_too_late_is_ended(engine, backend, monkeypatch, kind):
    def begins_late(timeout, begin=backend.begin_update):
        begin(timeout)
        raise kind("too late")

    monkeypatch.setattr(backend, "begin_update", begins_late)
    with pytest.raises(kind, match="too late"):
        update(engine, checkpoint())
    assert backend.calls == ["begin", "end"]


def test_a_bucket_that_changes_on_the_way(engine, backend, monkeypatch):
    from memsaver.integrations.rollout.weights import updates

    taken = updates.digests_of

    def and_then_damaged(views, places):
        digests = taken(views, places)
        views[4][2].view(-1)[0] += 1
        return digests

    monkeypatch.setattr(updates, "digests_of", and_then_damaged)
    with pytest.raises(WeightMismatchError, match="contents that differ from those sent") as caught:
        update(engine, checkpoint(), verify="full", version="new")
    assert caught.value.tensors == ("layers.0.o.weight",) and backend.version is None
    assert torch.isnan(backend.models[0].embed).all()


def test_an_engine_that_holds_something_else(engine, backend, monkeypatch):
    def corrupting(model, named, load):
        result = watched(model, named, load)
        model.qkv_1.data[8, 3] += 1
        return result

    with monkeypatch.context() as patch:
        patch.setattr(load_check, "watched", corrupting)
        with pytest.raises(WeightMismatchError, match="the engine's contents differ") as caught:
            update(engine, checkpoint(), verify="full", pause="retract")
    assert caught.value.tensors == ("layers.1.k.weight",) and "rank 0" in str(caught.value)
    assert "generation is still paused" in str(caught.value)
    assert backend.calls == ["pause retract", "begin", "load", "end"]
    backend.calls.clear()
    update(engine, checkpoint(), verify="full", pause="retract")
    assert backend.holds(checkpoint())
    assert backend.calls == ["pause retract", "begin", "load", "end", "continue"]


@pytest.mark.parametrize("mode, flushes", [("abort", True), ("retract", True), ("in_place", False)])
def test_pausing_in_each_mode(engine, backend, mode, flushes):
    update(engine, checkpoint(), pause=mode)
    assert backend.calls == [f"pause {mode}", "begin", "load", "end", "continue"]
    assert [request.flush_cache for request in backend.requests] == [flushes]
    update(engine, checkpoint(), pause=mode, flush_cache=False)
    assert backend.requests[-1].flush_cache is False


def test_an_engine_without_the_plugin_is_reported():
    backend = Backend()
    report = update(RolloutEngine(backend), checkpoint(), verify="full")
    assert backend.holds(checkpoint()) and (report.received, report.held) == (0, 0)
    assert "lacks memsaver's plugin" in report.unverified
    assert report.checksums == tuple(backend.checksums(1)) and len(report.checksums) == 1
    assert update(RolloutEngine(backend), checkpoint(), verify="off").checksums == ()


def test_a_dtensor_is_no_shard_in_the_engines_layout(engine, backend):
    class Distributed(torch.Tensor):
        device_mesh = placements = ()

        def to_local(self):
            return torch.ones(2)

    with pytest.raises(ConfigError, match=r"a is a DTensor.*to_local"):
        update(engine, {"a": torch.ones(2).as_subclass(Distributed)}, layout="engine")


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 20])
def test_tensors_without_elements_are_sent_like_others(engine, backend, bucket_bytes):
    none = {"layers.0.empty": torch.ones(0, 3)}
    for state in (none, {**none, **checkpoint(7)}, {**checkpoint(8), **none}):
        report = update(engine, state, verify="full", bucket_bytes=bucket_bytes)
        assert report.held == report.received == report.tensors
    assert backend.holds(checkpoint(8))


def test_conjugated_and_negated_views_bring_their_own_values(monkeypatch):
    """Each view is sent together with its base."""

    class Pair(torch.nn.Module):
        rank = 0

        def __init__(self):
            super().__init__()
            for name in "ab":
                zeros = torch.zeros(5, dtype=torch.complex64)
                self.register_parameter(name, torch.nn.Parameter(zeros, requires_grad=False))

        def load_weights(self, weights):
            for name, tensor in weights:
                getattr(self, name).data.copy_(tensor)

    value = torch.randn(5, dtype=torch.complex64)
    for view in (value.conj(), torch._neg_view(value)):
        with weight_engine.hooked(monkeypatch) as kind:
            backend = Backend(kind)
            backend.models = [Pair()]
            backend.ranks = [kind(backend.models[0])]
            report = update(
                RolloutEngine(backend, timeout=30), {"a": value, "b": view}, verify="full"
            )
        assert report.tied == () and report.held == 2
        assert torch.equal(backend.models[0].a, value) and torch.equal(backend.models[0].b, view)


@pytest.mark.parametrize(("fails", "frees"), [("before", True), ("after", False)])
def test_memory_whose_text_was_not_sent_is_freed(engine, backend, monkeypatch, fails, frees):
    """No receiver closes such memory, and torch keeps the memory until each receiver has closed it.

    The receiver of a text that was sent might still use the memory, and closes it.
    """
    from memsaver.integrations.rollout.weights import colocated, updates

    open_texts = []

    class Receivers(colocated.Receivers):
        def release(self):
            open_texts.clear()
            super().release()

    def payload(*args, own=colocated.flattened):
        open_texts.append("a text")
        return own(*args)

    def fail(*_):
        raise EngineError("it failed")

    monkeypatch.setattr(colocated, "Receivers", Receivers)
    monkeypatch.setattr(colocated, "flattened", payload)
    if fails == "before":
        monkeypatch.setattr(updates, "raise_unlike", fail)
    else:
        monkeypatch.setattr(backend, "load_weights", fail)
    with pytest.raises(EngineError, match="it failed"):
        engine.update_weights(checkpoint(), bucket_bytes=1 << 20)
    assert open_texts == ([] if frees else ["a text"])
