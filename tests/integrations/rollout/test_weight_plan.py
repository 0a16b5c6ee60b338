"""Tests the contents of an update: the buckets and the tied tensors."""

import pytest
import torch
from wrapped_tensors import Opaque, Wrapped

from memsaver.integrations.rollout.weights.agreement import common_tie
from memsaver.integrations.rollout.weights.buckets import ALIGNMENT, buckets_of
from memsaver.integrations.rollout.weights.sources import sources_of


def test_buckets_keep_the_order_and_split_nothing():
    sizes = [100, 700, 5000, 1, 0, 513, 511, 20]
    named = [(f"t{at}", size) for at, size in enumerate(sizes)]
    buckets = buckets_of(named, 2048)
    assert [s.name for b in buckets for s in b.slots] == [name for name, _ in named]
    assert [s.room for b in buckets for s in b.slots] == sizes
    assert all(s.begin % ALIGNMENT == 0 for b in buckets for s in b.slots)
    for bucket in buckets:
        ends = [s.begin + s.room for s in bucket.slots]
        following = [*[s.begin for s in bucket.slots][1:], bucket.nbytes]
        assert all(end <= begin for end, begin in zip(ends, following, strict=True))
        assert bucket.nbytes <= 2048 or len(bucket.slots) == 1
    assert [len(b.slots) for b in buckets] == [2, 1, 4, 1]
    assert buckets_of([], 10) == []


def test_tied_weights_are_recognised_by_their_memory_and_layout():
    one, two = torch.ones(4, 2), torch.ones(3, dtype=torch.complex64)
    state = {"a": one, "b": one, "c": one.t(), "d": one[:2], "e": one.clone(), "f": torch.ones(0)}
    state.update({"g": two, "h": two.conj(), "i": torch._neg_view(one), "j": two.conj()})
    state.update({"k": Wrapped(two), "l": Wrapped(torch.ones_like(two)), "m": Wrapped(two)})
    state.update({"n": Opaque(one), "o": Opaque(one.clone())})  # at an unknown address
    specs = {source.spec.name: source.spec for source in sources_of(state)}
    told = {name: spec.same for name, spec in specs.items()}
    assert told.pop("f") is None  # this rank has none of its elements
    assert {name: same for name, same in told.items() if same} == {"b": "a", "j": "h", "m": "k"}
    assert (specs["c"].shape, specs["c"].dtype, specs["c"].nbytes) == ((2, 4), "float32", 32)


@pytest.mark.parametrize(
    ("told", "tie"),
    [
        (["a", "a"], "a"),
        (["a", None], "a"),
        (["a", ""], ""),
        (["a", "b"], ""),
        (["", ""], ""),
        ([None, None], None),
    ],
)
def test_a_tie_counts_only_if_all_ranks_with_an_element_have_it(told, tie):
    assert common_tie(told) == tie
