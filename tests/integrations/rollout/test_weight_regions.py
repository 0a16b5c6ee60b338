"""Tests updates in a single process with tensors in shareable regions, which the engine maps."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch
from importing_process import release_shared
from looks import held
from weight_engine import Backend, Model, checkpoint
from weight_regions import cycle, in_region, in_region_wrapped, shareable

import memsaver
from memsaver._memory.sharing import importing, sending
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError, SharingError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.rollout.rollout_engine import RolloutEngine
from memsaver.integrations.rollout.weights import Part, update
from memsaver.integrations.trainer import offload

pytestmark = pytest.mark.usefixtures("tensors_in_files")


@pytest.fixture
def name(sim, tag, options, wait_until, caplog):
    caplog.set_level(logging.CRITICAL + 1)  # pytest keeps the frames of logged exceptions
    options(importer_seconds=5)
    yield tag("trainer")
    release_shared(wait_until)


def is_untouched(backend):
    return all(p.isnan().all() for model in backend.models for p in model.parameters())


# --- sent weights ---------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
def test_an_offloaded_model_is_sent_without_a_bucket(engine, backend, name, verify):
    with memsaver.region(name, backup="host", shareable=True):
        pass
    model, expected = torch.nn.ParameterDict(), checkpoint(1)
    for key, tensor in expected.items():  # a parameter's name cannot contain a dot
        model[key.replace(".", "/")] = torch.nn.Parameter(tensor.clone())
    model["lm_head/weight"] = model["embed/weight"]
    handle = offload(model, tag=name)
    for step in range(3):
        report = update(
            engine, model, rename=lambda k: k.replace("/", "."), verify=verify, version=str(step)
        )
        assert backend.holds(expected) and backend.version == str(step)
        assert (report.mapped, report.tensors) == (13, 13)
        assert (report.buckets, report.bucket_bytes) == (0, 0)
        assert report.received == report.held == {"off": 0, "full": 13}.get(verify, report.held)
        assert report.held or verify == "off"
        assert report.bytes == sum(t.nbytes for t in dict(model.named_parameters()).values())
        assert report.tied == ("lm_head.weight",)
        cycle(name)  # at once
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        expected = {key: tensor + 1 for key, tensor in expected.items()}
    assert backend.calls == ["begin", "load", "end"] * 3
    handle.close()


def test_shards_in_the_engines_layout_are_mapped(engine, backend, name):
    like = Model()
    like.load_weights(checkpoint(6).items())
    shards = shareable(name, dict(like.named_parameters()))
    report = update(engine, shards, layout="engine", verify="full")
    assert backend.holds(checkpoint(6))
    assert report.mapped == report.held == report.tensors == 9 and report.buckets == 0
    assert [request.load_format for request in backend.requests] == ["direct"]
    cycle(name)


def test_tensors_that_cannot_be_mapped_are_sent_in_a_bucket(engine, backend, name, tag):
    expected = checkpoint(2)
    weights = shareable(name, expected)
    square = weights["layers.0.q.weight"]
    pair = shareable(name, {"pair": torch.stack([expected["layers.1.q.weight"]] * 2)})["pair"]
    unshared = in_region(tag("unshared"), {"k": expected["layers.0.k.weight"]})
    weights.update(
        {
            "embed.weight": expected["embed.weight"],
            "lm_head.weight": expected["embed.weight"],
            "layers.0.k.weight": unshared["k"],
            "layers.0.q.weight": square.copy_(square.T.clone()).T,  # not contiguous
            "layers.1.q.weight": pair[1],  # a view of a part of its memory
        }
    )
    before = {key: tensor.clone() for key, tensor in weights.items()}
    for _ in range(2):
        report = update(engine, weights, verify="full", bucket_bytes=512, version="new")
        assert backend.holds(expected) and report.held == report.tensors == 13
        assert (report.mapped, report.buckets) == (10, 3) and report.bucket_bytes < 1024
        cycle(name)
    assert all(torch.equal(weights[key], tensor) for key, tensor in before.items())
    formats = [None, *["flattened_bucket"] * 3]
    assert [request.load_format for request in backend.requests] == formats * 2
    versions = [request.weight_version for request in backend.requests]
    assert versions == [*[None] * 3, "new"] * 2
    assert [r.flush_cache for r in backend.requests] == [*[False] * 3, True] * 2


def test_parts_are_mapped_if_they_are_whole_and_contiguous(engine, backend, name):
    """Without tensor parallelism, Megatron's trainer has whole, contiguous parts."""
    expected = checkpoint(2)
    weights = shareable(name, expected)
    q = [expected[f"layers.{layer}.q.weight"] for layer in (0, 1)]
    k = expected["layers.0.k.weight"]
    fused = shareable(name, {"rows": torch.cat(q), "columns": torch.cat([k, k], dim=1)})
    rows, columns = fused["rows"], fused["columns"]
    half = len(rows) // 2
    pieces = {
        "layers.0.q.weight": Part(rows[:half], tuple(q[0].shape)),
        "layers.1.q.weight": Part(rows[half:].flatten(), tuple(q[1].shape), (), q[1].shape),
        "layers.0.k.weight": Part(columns[:, : k.shape[1]], tuple(k.shape)),  # not contiguous
    }
    for _ in range(2):
        report = update(engine, weights | pieces, verify="full")
        assert backend.holds(expected) and report.held == report.tensors == 13
        buckets = int("layers.0.k.weight" in pieces)
        assert (report.mapped, report.buckets) == (13 - buckets, buckets)
        cycle(name)
        pieces.pop("layers.0.k.weight", None)


@pytest.mark.parametrize(
    "kind", ["without the plugin", "of an older version", "elsewhere", "in no domain"]
)
def test_an_engine_that_cannot_map_receives_buckets(engine, backend, name, monkeypatch, kind):
    if kind == "without the plugin":
        backend = Backend()
        engine = RolloutEngine(backend, timeout=30)
    else:
        backend.domain = "another network" if kind == "elsewhere" else ""
    if kind == "in no domain":  # this process does not know its domain either
        monkeypatch.setattr("memsaver.integrations.engine.backend.domain", lambda: "")
    report = update(engine, shareable(name, checkpoint(3)), verify="full")
    assert backend.holds(checkpoint(3)) and (report.mapped, report.buckets) == (0, 1)
    cycle(name)


# --- failures -------------------------------------------------------------------------------------


@pytest.mark.parametrize("verify", ["off", "sampled", "full"])
@pytest.mark.parametrize("copies", [shareable, in_region, in_region_wrapped])
def test_a_paused_tag_changes_nothing_in_the_engine(engine, backend, name, copies, verify):
    weights = copies(name, checkpoint(4))
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match=rf"sent while tag '{name}' is paused") as caught:
        update(engine, weights)
    assert caught.value.tag == name and backend.calls == []
    memsaver.resume(name)

    def pausing(timeout, begin=backend.begin_update):
        memsaver.pause(name)
        begin(timeout)

    backend.begin_update = pausing
    with pytest.raises(InvalidStateError, match=rf"sent while tag '{name}' is paused") as caught:
        update(engine, weights, verify=verify, version="new")
    assert caught.value.tag == name and backend.calls == ["begin", "end"]
    assert is_untouched(backend) and backend.version is None
    memsaver.resume(name)
    del backend.begin_update
    update(engine, weights)
    assert backend.holds(checkpoint(4))


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("copies", [shareable, in_region, in_region_wrapped])
def test_a_pause_by_another_thread_waits_for_the_update(engine, backend, name, copies, verify):
    weights = copies(name, checkpoint(4))
    other = threading.Thread(target=memsaver.pause, args=(name,))

    def begin(timeout, own=backend.begin_update):
        other.start()
        time.sleep(0.2)
        own(timeout)

    backend.begin_update = begin
    update(engine, weights, verify=verify)
    assert backend.holds(checkpoint(4))
    other.join(30)
    assert memsaver.state(name) == "paused"


@pytest.mark.parametrize("on_main_thread", [True, False])
@pytest.mark.parametrize("copies", [shareable, in_region, in_region_wrapped])
def test_the_wait_for_another_threads_transition_ends(
    engine, backend, name, copies, on_main_thread
):
    weights = copies(name, checkpoint(4))
    with ThreadPoolExecutor(1) as other, ThreadPoolExecutor(1) as third:
        reservation = _C.Reservation([name])
        other.submit(reservation.take).result(10)
        work = partial(update, engine, weights, timeout=0.3)
        with pytest.raises(InvalidStateError, match=r"trainer.*took longer than 0\.3 s") as caught:
            work() if on_main_thread else third.submit(work).result(10)
        assert caught.value.tag == name and backend.calls == [] and is_untouched(backend)
        other.submit(reservation.release).result(10)
    update(engine, weights)
    assert backend.holds(checkpoint(4))


@pytest.mark.parametrize("engine_timeout", [0.1, 30])
def test_an_update_raises_if_a_state_dict_waits_too_long_for_a_resume(
    backend, name, sim, engine_timeout
):
    engine, limit = RolloutEngine(backend, timeout=engine_timeout), min(engine_timeout, 0.3)
    weights = checkpoint(4)
    names = {key.replace(".", "_"): key for key in weights}
    model = torch.nn.ParameterDict({key: weights[names[key]] for key in names})
    offloaded = offload(model, tag=name)
    offloaded.pause()
    lazily = (pair for part in [model] for pair in part.state_dict().items())
    with ThreadPoolExecutor(1) as other, held(sim):
        arrival = offloaded.resume(wait=False)
        for state in (model, lazily):
            work = partial(update, engine, state, rename=names.get, timeout=0.3)
            with pytest.raises(InvalidStateError, match=rf"may take {limit} s") as caught:
                other.submit(work).result(10)
            assert caught.value.tag == name and backend.calls == [] and not arrival.done()
    arrival.wait()
    update(engine, model, rename=names.get, timeout=30)
    assert backend.holds(weights)


@pytest.mark.parametrize("pool", [False, True])
def test_an_engine_that_fails_in_the_middle_releases_the_memory(engine, backend, name, pool):
    backend.models[0].pool = pool  # its futures and the exception refer to each other
    weights = checkpoint(5)
    del weights["lm_head.weight"]
    wrong = shareable(name, {**weights, "layers.1.norm.weight": torch.ones(3)})
    for _ in range(2):
        with pytest.raises(EngineError, match="failed on rank 0"):
            update(engine, wrong, version="bad")
        cycle(name)  # at once
    assert backend.version is None and torch.equal(wrong["layers.1.norm.weight"], torch.ones(3))
    update(engine, shareable(name, weights), verify="full")
    assert backend.holds(checkpoint(5))
    cycle(name)


def test_a_loader_that_cannot_run_twice_releases_the_memory(engine, backend, name, monkeypatch):
    def once(self, tensors, own=Model.load_weights):
        tensors = list(tensors)
        if self.is_loaded:
            tensors.append(("layers.0.norm.weight", torch.ones(3)))
        self.is_loaded = True
        own(self, tensors)

    backend.models[0].pool, backend.models[0].is_loaded = True, False
    weights = shareable(name, checkpoint(5))
    with monkeypatch.context() as patch:
        patch.setattr(Model, "load_weights", once)
        report = update(engine, weights, verify="full")
    cycle(name)  # at once
    assert report.mapped == 13 and "expanded size" in report.unverified
    assert backend.holds(checkpoint(5))


def test_an_engine_that_fails_to_map_raises_sharing_error(engine, backend, name, monkeypatch):
    weights = shareable(name, checkpoint(5))
    with monkeypatch.context() as patch:
        backend.damage = lambda _: patch.setattr(importing, "_names", lambda: ())
        with pytest.raises(SharingError, match=r"rank 0 .*CUDA_VISIBLE_DEVICES") as caught:
            update(engine, weights, version="bad")
    assert caught.value.tag == name and is_untouched(backend) and backend.version is None
    backend.damage = lambda _: None
    cycle(name)
    update(engine, weights)
    assert backend.holds(checkpoint(5))


@pytest.mark.parametrize("with_the_model", [False, True])
def test_a_loader_cannot_write_to_the_trainers_memory(
    engine, backend, name, monkeypatch, with_the_model
):
    def load(self, tensors, own=Model.load_weights):
        for key, tensor in tensors:
            if ".q." in key:
                own_memory = [self.embed.data] if with_the_model else []
                torch._foreach_mul_([*own_memory, tensor], 2)
            own(self, [(key, tensor)])

    weights = checkpoint(5)
    sent = shareable(name, weights)
    with monkeypatch.context() as patch:
        patch.setattr(Model, "load_weights", load)
        with pytest.raises(SharingError, match=r"writes to layers\.0\.q\.weight"):
            update(engine, sent, verify="off", version="bad")
        cycle(name)
    assert backend.version is None
    assert all(torch.equal(sent[key], tensor) for key, tensor in weights.items())
    update(engine, sent, verify="full")
    assert backend.holds(weights)


def test_tensors_of_one_storage_are_sent_in_one_message(engine, backend, name, options, wait_until):
    options(importer_seconds=60)
    expected = {key: t for key, t in checkpoint(5).items() if t.shape == (8, 8)}
    whole = shareable(name, {"": torch.stack(list(expected.values()))})[""]
    report = update(engine, dict(zip(expected, whole, strict=True)), verify="full")
    assert report.mapped == report.held == len(expected) == 8
    del whole
    wait_until(lambda: sending.kept() == 0 and _C.stats(name)[0]["allocations"] == 0)


def test_the_trainer_may_free_its_tensors_after_the_update(engine, backend, name, wait_until):
    weights = shareable(name, checkpoint(6))
    update(engine, weights)
    del weights
    wait_until(lambda: _C.stats(name)[0]["allocations"] == 0)
    assert backend.holds(checkpoint(6))
