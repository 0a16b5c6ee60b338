"""Tests `RolloutEngine` in one process with the fake SGLang."""

import contextlib
from types import SimpleNamespace

import fake_sglang
import pytest
import torch
from sleep_worlds import started
from tasks import Task

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.engine.errors import EngineError, EngineTimeoutError
from memsaver.integrations.engine.status import Status
from memsaver.integrations.rollout import RolloutEngine, Sample

TWO = {"max_new_tokens": 2}


@pytest.fixture
def make_engine(monkeypatch):
    """Return a function that creates a rollout engine and its fake's manager:
    `make_engine("local" | "server")`.
    """
    with contextlib.ExitStack() as cleanup:

        def make(kind: str = "local", **options):
            manager, target = started(cleanup, monkeypatch, kind)
            return RolloutEngine.connect(target, timeout=30, **options), manager

        yield make


def rows(output):
    """Return the samples' tokens, without padding."""
    return [
        row[mask.bool()].tolist()
        for row, mask in zip(output.token_ids, output.attention_mask, strict=True)
    ]


@pytest.mark.parametrize("kind", ["local", "server"])
def test_the_output_of_a_rollout(make_engine, kind):
    engine, _ = make_engine(kind, pad_token_id=-7)
    params = [{"max_new_tokens": 3}, {"max_new_tokens": 1}, {"max_new_tokens": 0}]
    output = engine.generate([[10, 20], [4], [5]], params)
    assert output.token_ids.tolist() == [[30, 31, 32], [4, -7, -7], [-7, -7, -7]]
    assert output.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert output.lengths.tolist() == [3, 1, 0] and output.prompt_index.tolist() == [0, 1, 2]
    expected = torch.tensor([[-0.030, -0.031, -0.032], [-0.004, 0, 0], [0, 0, 0]])
    assert torch.equal(output.logprobs, expected)
    kinds = (output.token_ids, output.attention_mask, output.lengths, output.prompt_index)
    assert {tensor.dtype for tensor in kinds} == {torch.int64}
    assert output.logprobs.dtype is torch.float32 and len(output) == 3
    assert output.finish_reasons == ("length",) * 3 and output.weight_version == "default"
    nothing = engine.generate([])
    assert len(nothing) == 0 and nothing.token_ids.shape == (0, 0)


def test_samples_of_a_prompt_stand_together(make_engine):
    engine, _ = make_engine()
    params = [{**TWO, "n": 3, "sampling_seed": 5}, TWO, {**TWO, "n": 2}]
    output = engine.generate([[100], [200], [300]], params)
    assert output.prompt_index.tolist() == [0, 0, 0, 1, 2, 2]
    firsts = [100 + 7 * 5, 100 + 7 * 6, 100 + 7 * 7, 200, 300, 300]
    assert rows(output) == [[first, first + 1] for first in firsts]


def test_prompts_of_any_kind(make_engine):
    engine, _ = make_engine()
    wanted = [[6, 7], [9, 10]]
    lists = [[1, 2, 3], [4, 5]]
    assert rows(engine.generate(lists, TWO)) == wanted
    assert rows(engine.generate(tuple(map(tuple, lists)), TWO)) == wanted
    assert rows(engine.generate([torch.tensor(one) for one in lists], TWO)) == wanted
    for side in ([[1, 2, 3], [0, 4, 5]], [[1, 2, 3], [4, 5, 0]]):
        tensor = torch.tensor(side)
        assert rows(engine.generate(tensor, TWO, attention_mask=tensor != 0)) == wanted
    assert rows(engine.generate(torch.tensor([[1], [2]]), TWO)) == [[1, 2], [2, 3]]
    images = [{"image_data": ["a.png"]}, None]
    assert rows(engine.generate(lists, TWO, multimodal=images))[0][0] == 106


def test_texts_are_passed_to_the_engines_tokenizer(make_engine):
    engine, manager = make_engine()
    with pytest.raises(ConfigError, match="no tokenizer"):
        engine.generate(["ab"], TWO)
    manager.server_args.skip_tokenizer_init = False
    engine = RolloutEngine.connect(engine.backend.link)
    output = engine.generate(["ab", "c"], {**TWO, "n": 2}, multimodal=[None, {"image_data": "c"}])
    assert rows(output) == [[195, 196]] * 2 + [[199, 200]] * 2
    for prompts, match in (("ab", "a list"), (["ab", [1]], "or none"), ([""], "prompt 0")):
        with pytest.raises(ConfigError, match=match):
            engine.generate(prompts, TWO)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (([1, 2, 3],), "list of prompts"),
        (([[1], []],), "prompt 1 has no tokens"),
        (([[1, -4]],), "-4"),
        (([[1, 2.5]],), "2.5"),
        (([[True]],), "True"),
        ((7,), "list of prompts"),
        ((torch.tensor([1, 2]),), "2 dimensions"),
        ((torch.tensor([[1.0]]),), "1.0"),
        (([[1]], [TWO, TWO]), "one for each of 1"),
        (([[1]], {"n": 0}), "not 0"),
        (([[1]], {"n": True}), "not True"),
        (([[1]], ()), "one for each of 1"),
        (([[1]], ""), "sampling_params"),
        (([[1]], 0), "sampling_params"),
        (([[1]], {"sampling_seed": "7"}), "sampling_seed"),
        (([[1 << 63]],), "9223372036854775808"),
        (([[1]], ["n"]), "sampling_params"),
        (([[1]], 5), "sampling_params"),
    ],
)
def test_invalid_prompts_are_rejected(make_engine, arguments, match):
    engine, manager = make_engine()
    with pytest.raises(ConfigError, match=match):
        engine.generate(*arguments)
    with pytest.raises(ConfigError, match="shape"):
        engine.generate(torch.ones(2, 3, dtype=int), attention_mask=torch.ones(2, 2))
    with pytest.raises(ConfigError, match="padded tensor"):
        engine.generate([[1]], attention_mask=torch.ones(1, 1))
    with pytest.raises(ConfigError, match="not list"):
        engine.generate(torch.ones(1, 2, dtype=int), attention_mask=[[1, 0]])
    for multimodal in ([None, None], [5], 5):
        with pytest.raises(ConfigError, match="multimodal"):
            engine.generate([[1]], multimodal=multimodal)
    assert manager.schedulers[0].generated == 0


@pytest.mark.parametrize("kind", ["local", "server"])
def test_sleep_and_wake_up_change_the_given_tags(make_engine, kind):
    engine, manager = make_engine(kind)
    released = manager.schedulers[0].weight_updater.offload_tags
    assert engine.status is Status.AWAKE and engine.released == frozenset()
    assert engine.sleep(["kv_cache"]).changed == ("kv_cache",)
    assert engine.status is Status.WEIGHTS_ONLY and released == {"kv_cache"}
    engine.check("update_weights")
    with pytest.raises(InvalidStateError, match="kv_cache"):
        engine.check("generate")
    with pytest.raises(InvalidStateError, match="kv_cache"):
        engine.generate([[1]])
    for tags, what in (
        ("optimizer", "optimizer"),
        ([], "None means all"),
        ([5], "no tag 5"),
        (5, "not int"),
    ):
        for call in (engine.sleep, engine.wake_up, lambda tags: engine.asleep(tags).__enter__()):
            with pytest.raises(ConfigError, match=what):
                call(tags)
    assert engine.status is Status.WEIGHTS_ONLY
    assert engine.wake_up().changed == ("kv_cache",) and released == set()
    with engine.asleep() as report:
        assert set(report.changed) == released == set(fake_sglang.TAGS)
    assert engine.status is Status.AWAKE and released == set()
    engine.sleep()
    assert engine.wake_up().changed == ("cuda_graph", "weights", "kv_cache")
    engine.sleep()
    with engine.staged_wake() as reports:
        assert engine.status is Status.WEIGHTS_ONLY and reports[0].changed == ("weights",)
    assert reports[1].changed == ("cuda_graph", "kv_cache") and released == set()
    with pytest.raises(OSError), engine.asleep():
        raise OSError
    assert engine.status is Status.AWAKE
    engine.sleep()
    with pytest.raises(OSError), engine.staged_wake():
        raise OSError
    assert engine.status is Status.WEIGHTS_ONLY
    engine.wake_up()
    assert rows(engine.generate([[1]], TWO)) == [[1, 2]]


def test_others_may_have_changed_it(make_engine):
    engine, manager = make_engine(kind="server")
    engine.backend.control.sleep("weights")
    assert engine.status is Status.AWAKE and engine.refresh() is Status.NO_WEIGHTS
    engine.wake_up()
    fake_sglang.dies_in_a_release(manager)
    with pytest.raises(EngineTimeoutError):
        engine.sleep(timeout=0.2)
    assert engine.status is Status.UNKNOWN
    with pytest.raises(InvalidStateError, match="unknown"):
        engine.check("generate")


def test_a_generation_is_aborted_by_a_pause_of_another_thread(make_engine):
    engine, manager = make_engine()
    manager.generate_seconds = 60
    generation = Task(engine.generate, [[1], [2]], {"max_new_tokens": 8})
    while not manager.schedulers[0].running:
        assert generation.is_alive()
    engine.pause_generation()
    output = generation.result(30)
    assert output.finish_reasons == ("abort", "abort") and output.lengths.tolist() == [4, 4]
    engine.continue_generation()
    manager.generate_seconds = 0
    assert len(engine.generate([[1]], TWO)) == 1


def test_a_version_that_changes_among_samples_is_none(make_engine):
    engine, _ = make_engine()
    samples = engine.backend.generate
    engine.backend.generate = lambda requests, timeout: [
        type(sample)(sample.token_ids, None, sample.finish_reason, str(number))
        for number, sample in enumerate(samples(requests, timeout))
    ]
    output = engine.generate([[1], [2]], TWO)
    assert output.weight_version is None and output.logprobs is None


def test_a_closed_engine_rejects_calls(make_engine):
    engine, manager = make_engine()
    with engine:
        assert "awake" in repr(engine) and "rank 0 of 1" in repr(engine)
    engine.close()
    assert "closed" in repr(engine)
    for call in (lambda: engine.generate([[1]]), engine.sleep, engine.pause_generation):
        with pytest.raises(InvalidStateError, match="closed"):
            call()
    assert manager.pause_mode == "" and not manager.schedulers[0].weight_updater.offload_tags


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf"), True, "soon"])
def test_invalid_times_are_rejected(make_engine, timeout):
    engine, _ = make_engine()
    for call in (
        lambda: engine.generate([[1]], timeout=timeout),
        lambda: engine.sleep(timeout=timeout),
        lambda: engine.pause_generation(timeout=timeout),
        lambda: RolloutEngine.connect("http://127.0.0.1:9", timeout=timeout),
    ):
        with pytest.raises(ConfigError, match="positive number of seconds"):
            call()
    assert engine.status is Status.AWAKE


def test_connecting_to_unreachable_or_mismatched_servers_fails(make_engine):
    for engine in (None, 5, b"http://host", object()):
        with pytest.raises(ConfigError, match=r"must be an sglang\.Engine or a server's URL"):
            RolloutEngine.connect(engine)
    with pytest.raises(ConfigError, match="DeviceMesh"):
        RolloutEngine.connect("http://127.0.0.1:9", mesh="dp")
    with pytest.raises(EngineError, match="cannot be reached"):
        RolloutEngine.connect("http://127.0.0.1:9", timeout=2)
    with pytest.raises(ConfigError, match="2 servers for 1"):
        RolloutEngine.connect(["http://a", "http://b"], timeout=2)


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_subclass_of_an_engines_class_is_recognised(depth):
    """vLLM's own RLHF example defines a subclass of `LLM`."""
    kind = type("LLM", (), {"__module__": "vllm.entrypoints.llm"})
    for _ in range(depth):
        kind = type("MyLLM", (kind,), {})
    with pytest.raises(ConfigError, match=rf"must be a vllm\.LLM.*not {kind.__name__}"):
        RolloutEngine.connect(kind())


class Given:
    """A backend that returns the given samples."""

    tp_size = 1
    control = SimpleNamespace(
        status=Status.AWAKE, released=frozenset(), request=contextlib.nullcontext
    )

    def __init__(self, *samples):
        self.samples = samples

    def generate(self, requests, timeout):
        return self.samples

    def close(self):
        pass


@pytest.mark.parametrize(
    ("samples", "text"),
    [
        ([Sample([1, 2, 3], [-0.5], "stop", None)], "1 log-probabilities for the 3 tokens"),
        ([Sample([1], [-0.5], "stop", None)] * 2, "2 samples for 1 requests"),
        ([], "0 samples for 1 requests"),
        ([[1, 2]], "must return a list of samples"),
    ],
)
def test_invalid_samples_are_rejected(samples, text):
    with RolloutEngine(Given(*samples)) as engine, pytest.raises(EngineError, match=text):
        engine.generate([[7]])


def test_invalid_arguments_of_the_constructor_are_rejected():
    with pytest.raises(ConfigError, match=r"not a `Backend`.*RolloutEngine\.connect"):
        RolloutEngine("http://127.0.0.1:9")
    with pytest.raises(ConfigError, match="pad_token_id must be an integer, not None"):
        RolloutEngine(Given(), pad_token_id=None)
    with pytest.raises(ConfigError, match="mesh must be a DeviceMesh"):
        RolloutEngine(Given(), "dp")


@pytest.mark.parametrize("mask", [[[1, 0, 1]], [[1, 2, 0]], [[0.5, 1, 1]]])
def test_invalid_masks_are_rejected(mask):
    with (
        RolloutEngine(Given()) as engine,
        pytest.raises(ConfigError, match="contiguous run of tokens"),
    ):
        engine.generate(torch.ones(1, 3, dtype=int), attention_mask=torch.tensor(mask))
