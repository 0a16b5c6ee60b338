"""Tests comparisons of a model's weights with loaded weights, for loaders that transform
weights.
"""

import concurrent.futures

import pytest

torch = pytest.importorskip("torch")

from weight_engine import HIDDEN, Eager, Model, checkpoint  # noqa: E402

from memsaver.integrations.engine.weights import held as held_weights  # noqa: E402
from memsaver.integrations.engine.weights.held import differing, watched  # noqa: E402


def given(seed=0, dtype=torch.float32):
    return list(checkpoint(seed, dtype).items())


def loaded(**model):
    made = Model(**model)
    made.load_weights(given())
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("pool", [False, True])
@pytest.mark.parametrize("rank, size", [(0, 1), (1, 2)])
def test_a_load_equals_the_models_contents(rank, size, pool, dtype):
    model = Model(rank, size, pool=pool)
    named = given(dtype=dtype)
    watched(model, named, model.load_weights)
    assert model.holds(dict(named))
    assert differing(model, named, model.load_weights) == ()


def test_watching_names_the_unused_tensors_that_have_elements():
    model = Model()
    named = [*given(), ("layers.0.bias", torch.ones(0, 3)), ("layers.0.rotary", torch.ones(4))]
    assert watched(model, named, model.load_weights)[1] == ("lm_head.weight", "layers.0.rotary")
    assert model.holds(dict(given()))


@pytest.mark.parametrize(
    "parameter, place, names",
    [
        ("qkv_1", (0, 0), ["layers.1.q.weight"]),
        ("qkv_1", (HIDDEN, 3), ["layers.1.k.weight"]),
        ("qkv_0", (3 * HIDDEN - 1, HIDDEN - 1), ["layers.0.v.weight"]),
        ("o_t_0", (2, 5), ["layers.0.o.weight"]),
        ("norm_1", (7,), ["layers.1.norm.weight"]),
        ("scale_0", (0,), ["layers.0.scale"]),
        ("embed", (0, 0), ["embed.weight"]),
        ("embed", (15, 7), ["embed.weight"]),  # the loader's padding
    ],
)
@pytest.mark.parametrize("pool", [False, True])
def test_one_wrong_element_is_found_in_every_layout(parameter, place, names, pool):
    model = loaded(pool=pool)
    held = dict(model.named_parameters())[parameter].data
    before = held.clone()
    held[place] += 1
    changed = held.clone()
    assert list(differing(model, given(), model.load_weights)) == names
    assert torch.equal(held, changed), "a comparison wrote something"
    held.copy_(before)
    assert differing(model, given(), model.load_weights) == ()


@pytest.mark.parametrize(
    ("given_as", "held_as"), [(torch.float32, torch.bfloat16), (torch.float16, torch.float32)]
)
def test_the_payload_of_a_nan_that_is_cast_is_that_of_the_load(given_as, held_as):
    """On the CPU, the payload depends on how the cast is vectorized and therefore on strides and
    lengths.
    """

    class Strided(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(1003, 2, dtype=held_as), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.a.data[:, 0].copy_(tensor)

    whole = {2: torch.int16, 4: torch.int32}
    payloads = torch.arange(1, 1004).to(whole[given_as.itemsize])
    nans = (torch.full((1003,), torch.inf, dtype=given_as).view(payloads.dtype) | payloads).view(
        given_as
    )
    model, named = Strided(), [("a", nans)]
    model.load_weights(named)
    assert differing(model, named, model.load_weights) == ()
    held = model.a.data[:, 0].view(whole[held_as.itemsize])
    for other in (held ^ 1, nans.to(held_as).view(held.dtype)):  # another NaN
        if not torch.equal(held, other):
            before = held.clone()
            held.copy_(other)
            assert differing(model, named, model.load_weights) == ("a",)
            held.copy_(before)


def test_a_loader_that_reads_its_own_writes_is_compared_with_its_result():
    class Scaled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.zeros(8), requires_grad=False)

        def load_weights(self, weights):
            for _, tensor in weights:
                self.a.data.copy_(tensor)
                self.a.data.copy_(self.a.data.clone() / self.a.data.abs().max())

    model, named = Scaled(), [("a", torch.randn(8))]
    model.load_weights(named)
    assert differing(model, named, model.load_weights) == ()
    model.a.data[5] += 1
    assert differing(model, named, model.load_weights) == ("a",)


def test_a_difference_is_reported_without_room_for_a_second_comparison(monkeypatch):
    def no_room(*_):
        raise MemoryError("no room for a copy")

    monkeypatch.setattr(held_weights._Replay, "_twin", no_room)
    model = loaded()
    assert differing(model, given(), model.load_weights) == ()
    model.qkv_0.data[0, 0] += 1
    with pytest.raises(RuntimeError, match=r"^layers.0.q.weight may differ.*no room for a copy"):
        differing(model, given(), model.load_weights)


def test_only_some_of_the_tensors_can_be_compared():
    model = loaded()
    model.qkv_0.data += 1
    some = [(name, t) for name, t in given() if not name.startswith("layers.0")]
    assert differing(model, some, model.load_weights) == ()


def test_unused_names_are_found_if_the_loader_reads_all_tensors_first():
    model, named = Eager(), given()
    _, unused = watched(model, [*named, ("unknown", torch.ones(2))], model.load_weights)
    assert unused == ("unknown",)
    assert differing(model, named, model.load_weights) == ()
    model.qkv_0.data[0, 0] += 1
    assert differing(model, named, model.load_weights) == ("layers.0.q.weight",)
    model.o_t_0.data[0, 0] += 1  # is cast before it is written
    found = differing(model, named, model.load_weights)
    assert sorted(found) == ["layers.0.o.weight", "layers.0.q.weight"]


@pytest.mark.parametrize("copies", [False, True])
def test_a_loader_that_writes_one_tensor_made_of_two(copies):
    """Loaders of DeepSeek models keep one tensor until the other tensor has arrived."""

    class Fusing(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fused = torch.nn.Parameter(torch.zeros(5, 3), requires_grad=False)

        def load_weights(self, weights):
            kept = {}
            for name, tensor in weights:
                if name == "other":
                    continue
                kept[name] = tensor.clone() if copies else tensor
                if len(kept) == 2:
                    self.fused.data.copy_(torch.cat([kept["q_a"], kept["kv_a"]]))

    named = [("kv_a", torch.randn(2, 3)), ("other", torch.ones(1)), ("q_a", torch.randn(3, 3))]
    model = Fusing()
    assert watched(model, named, model.load_weights)[1] == ("other",)
    assert torch.equal(model.fused, torch.cat([named[2][1], named[0][1]]))
    assert differing(model, named, model.load_weights) == ()
    model.fused.data[4, 0] += 1
    assert differing(model, named, model.load_weights) == ("kv_a", "q_a")
    assert watched(model, named[:1], model.load_weights)[1] == ("kv_a",)


def test_results_that_operations_write_to_buffers_are_compared():
    class Inverted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("a", torch.zeros(6, dtype=torch.bool))

        def load_weights(self, weights):
            for _, tensor in weights:
                torch.logical_not(tensor, out=self.a)

    model, named = Inverted(), [("a", torch.ones(6) > 0)]
    _, unused = watched(model, named, model.load_weights)
    assert unused == () and differing(model, named, model.load_weights) == ()
    model.a[5] = True
    assert differing(model, named, model.load_weights) == ("a",)


def test_errors_propagate_and_leave_nothing_behind():
    model, submit = Model(), concurrent.futures.ThreadPoolExecutor.submit
    bad = [("embed.weight", torch.zeros(3, 3))]
    with pytest.raises(AssertionError, match="vocabulary of 3"):
        watched(model, bad, model.load_weights)
    with pytest.raises(AssertionError, match="vocabulary of 3"):
        differing(model, bad, model.load_weights)
    assert concurrent.futures.ThreadPoolExecutor.submit is submit
    model.norm_0.data.zero_()  # writable again
    assert float(model.norm_0.sum()) == 0
