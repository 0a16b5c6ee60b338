"""Tests that failed weight updates without verification return errors and that no rank exits."""

from __future__ import annotations

import json
import sys
import types
from dataclasses import asdict

import pytest

torch = pytest.importorskip("torch")

import weight_engine  # noqa: E402
from weight_engine import Eager, Model, Request, checkpoint  # noqa: E402
from weight_requests import load, weights  # noqa: E402

from memsaver.integrations.engine.errors import EngineError  # noqa: E402
from memsaver.integrations.engine.weights import plain_check  # noqa: E402
from memsaver.integrations.sglang import weight_loads  # noqa: E402

pytestmark = pytest.mark.usefixtures("tensors_in_files")

ZERO = torch.tensor(0.0)


@pytest.mark.parametrize(
    "named, text",
    [
        ({"embed.weight": torch.zeros(3, 3)}, "a vocabulary of 3"),
        ({"layers.7.q.weight": torch.zeros(8, 8)}, "qkv_7"),
        ({"layer.0.q.weight": torch.zeros(8, 8)}, "does not use layer.0.q.weight"),
        ({"layers.0.q.weight": torch.zeros(12, 8)}, "only a part of layers.0.q.weight"),
        ({"layers.0.q.weight": torch.zeros(8, 1)}, "would repeat layers.0.q.weight"),
    ],
)
@pytest.mark.parametrize("kind", [Model, Eager])
@pytest.mark.parametrize("sender", ["tensor", "distributed", "ipc"])
def test_a_failed_plain_update_returns_an_error(manager, named, text, kind, sender):
    """For the update's other tensors, the loader writes padding, and a number that it has read."""
    rank, named = manager(kind()), {**weights(), **named}
    if sender == "tensor":
        output = load(rank, named, None)
    else:
        request = Request(tensors=list(named.items()), flush_cache=False)
        output = getattr(rank, f"update_weights_from_{sender}")(request)
    assert output.success is False and text in output.message
    named = weights()
    assert load(rank, named, None).success and rank.runner.model.holds(checkpoint())


def test_a_write_of_unknown_source_does_not_mark_names_as_known(manager):
    class Constant(Eager):
        def load_weights(self, weights):
            super().load_weights(weights)
            self.norm_0.data.fill_(7)  # the source of this number is unknown

    rank, unknown = manager(Constant()), {"layer.0.q.weight": torch.zeros(8, 8)}
    assert load(rank, {**weights(), **unknown}, None).success
    rank.runner.model.load_weights = Model.load_weights.__get__(rank.runner.model)
    output = load(rank, unknown, None)
    assert not output.success and "does not use layer.0.q.weight" in output.message


@pytest.mark.parametrize(
    ("rows", "is_cut"),
    [
        ([(0, 6), (6, 12)], False),
        ([(0, 6), (6, 12), (0, 6), (6, 12)], False),  # replicas
        ([(0, 6), (0, 6)], True),  # no replica loads the rest
        ([(0, 4), (4, 8)], True),
        ([(0, 12), (0, 6)], False),
        ([(0, 4), (0, 8)], False),  # unequal parts that overlap count in full
    ],
)
def test_a_part_that_several_ranks_load_counts_once(rows, is_cut):
    class Part(torch.nn.Module):
        def __init__(self, begin, end):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(end - begin, 2))
            self.begin, self.end = begin, end

        def load_weights(self, named):
            for _, tensor in named:
                for _ in range(2):  # as for a tied layer
                    self.weight.data.copy_(tensor[self.begin : self.end])

    found = []
    for rank, (begin, end) in enumerate(rows):
        model, check = Part(begin, end), plain_check.PlainCheck(set())
        with check.around_loader(model):
            model.load_weights([("q.weight", torch.ones(12, 2))])
        one = plain_check.Found(rank, True, "", None, check.unused, check.partial)
        found.append(plain_check.Found.from_fields(json.loads(json.dumps(asdict(one)))))
    verdict = plain_check.verdict(found)
    assert ("only a part of q.weight was loaded" in verdict) == is_cut == bool(verdict)


def loaded(load, **named):
    """Load the tensors into a parameter of shape [6, 4] on one rank; return the verdict."""
    model, check = torch.nn.Module(), plain_check.PlainCheck(set())
    model.weight = torch.nn.Parameter(torch.zeros(6, 4), requires_grad=False)
    model.load_weights = lambda weights: load(model.weight.data, dict(weights))
    with check.around_loader(model):
        model.load_weights(list(named.items()))
    found = plain_check.Found(0, True, "", None, check.unused, check.partial)
    return plain_check.verdict([found])


@pytest.mark.parametrize(
    "pad", [lambda rest: rest.zero_(), lambda rest: rest.fill_(0), lambda rest: rest.copy_(ZERO)]
)
def test_zeros_after_a_part_hide_neither_the_part_nor_unknown_names(pad):
    def load(held, given):
        held[:4].copy_(given["a"][:4])
        held[4:4].copy_(given["a"][:0])  # as on a rank without rows of its own
        pad(held[4:])

    assert loaded(load, a=torch.ones(4, 4)) == ""
    assert "only a part of a was loaded" in loaded(load, a=torch.ones(6, 4))
    assert "does not use b" in loaded(load, a=torch.ones(4, 4), b=torch.ones(1))


# The loader's work on the parameter `held` and the tensor `a`, and the shape of `a`, which is ones.
VALID = {
    "a vector for each row": (lambda held, a: held.copy_(a), 4),
    "a vector with a new dimension": (lambda held, a: held.copy_(a[None]), 4),
    "the mean as padding": (
        lambda held, a: (held[:4].copy_(a), held[4:].copy_(a.mean(0))),
        (4, 4),
    ),
    "a constant beside it": (
        lambda held, a: (held[:4].copy_(a), held[4:].copy_(torch.arange(4.0))),
        (4, 4),
    ),
    "a number": (lambda held, a: held.fill_(a.sum().item() - 4), 5),
    "a number that is 0": (lambda held, a: held.fill_(a.sum().item() - 4), 4),
    "a number that is 0, in a part": (lambda held, a: held[:1].fill_(a.sum().item() - 4), 4),
    "a list of numbers": (lambda held, a: held.fill_(a.tolist()[0] - 1), 1),
}


@pytest.mark.parametrize(("work", "shape"), VALID.values(), ids=VALID)
def test_intended_repetitions_and_computed_numbers_are_accepted(work, shape):
    assert loaded(lambda held, given: work(held, given["a"]), a=torch.ones(shape)) == ""


@pytest.mark.parametrize("convert", [lambda a: a, lambda a: a.double(), lambda a: a.clone()])
def test_a_repeated_tensor_is_refused(convert):
    with pytest.raises(EngineError, match="would repeat a, of shape"):
        loaded(lambda held, given: held.copy_(convert(given["a"])), a=torch.ones(6, 1))


def test_a_plain_update_accepts_names_that_loaders_skip_on_purpose(manager):
    class Tied(Model):
        def __init__(self):
            super().__init__()
            self.lm_head = torch.nn.Linear(1, 1, bias=False)
            self.lm_head.weight = self.embed

    rank = manager(Tied())
    others = [
        "model.rotary_emb.inv_freq",
        "mtp.layers.0.norm.weight",
        "model.mtp_layers.0.fc.weight",
    ]
    named = {**checkpoint(), **dict.fromkeys(others, torch.ones(4))}
    assert load(rank, named, None).success
    named["lm_head.bias"] = torch.ones(4)
    output = load(rank, named, None)
    assert not output.success and "lm_head.bias" in output.message


@pytest.mark.parametrize(
    "arguments",
    [None, {"pp_size": 2}, {"enable_memory_saver": False}],
    ids=["with an option", "by a pipeline stage", "without a memory saver"],
)
def test_unknown_names_are_accepted(manager, monkeypatch, arguments):
    rank = manager(Model())
    if arguments is None:
        monkeypatch.setenv("MEMSAVER_SGLANG_CHECK_UPDATES", "0")
    else:
        rank.scheduler.server_args = types.SimpleNamespace(**arguments)
    assert load(rank, {**weights(), "layer.0.q.weight": torch.ones(2)}, None).success


def test_the_loader_is_watched_once_for_each_tensor(manager, monkeypatch):
    rank, named = manager(Model()), weights()
    watched_loads = []
    run = plain_check._Coverage.run
    monkeypatch.setattr(
        plain_check._Coverage, "run", lambda *args: watched_loads.append(1) or run(*args)
    )
    for seed in range(3):
        assert load(rank, named, None).success
        named = {name: tensor + seed for name, tensor in named.items()}
    assert len(watched_loads) == 1
    assert not load(rank, {**named, "layers.0.q.weight": torch.zeros(12, 8)}, None).success
    assert not load(rank, {**named, "layers.0.q.weight": torch.zeros(12, 8)}, None).success
    assert len(watched_loads) == 3


def test_a_failed_start_of_an_update_can_be_repeated(manager):
    """SGLang 0.5.23 updates weights in sessions."""
    updater = types.SimpleNamespace(tp_cpu_group=None, scheduler=types.SimpleNamespace())
    updater._session = None
    io_struct = sys.modules["sglang.srt.managers.io_struct"]
    io_struct.BeginWeightUpdateReqOutput = weight_engine.Output
    hook = weight_loads.plain("BeginWeightUpdateReqOutput", has_barrier=True, ends_session=True)

    def begin(updater, request):
        if updater._session is not None:
            return weight_engine.Output(success=False, message="a session is already open")
        updater._session = "open"
        raise RuntimeError("no memory for the unpacked weights")

    output = hook(begin, updater, Request())
    assert not output.success and "no memory for the unpacked weights" in output.message
    assert updater._session is None
    updater._session = "another caller's"
    output = hook(begin, updater, Request())
    assert (output.success, updater._session) == (False, "another caller's")
