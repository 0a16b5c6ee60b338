"""Tests updates from parts of tensors and from the shards of a Megatron trainer."""

import base64
import pickle
from types import SimpleNamespace

import pytest
import torch
from megatron_shards import shards_of

from memsaver.errors import ConfigError
from memsaver.integrations.rollout.weights import Part, megatron_parts
from memsaver.integrations.rollout.weights.buckets import buckets_of
from memsaver.integrations.rollout.weights.colocated import BucketMemory
from memsaver.integrations.rollout.weights.parts import check_cover
from memsaver.integrations.rollout.weights.payloads import opened
from memsaver.integrations.rollout.weights.sources import sources_of


def checkpoint(heads, groups, vocabulary, hidden=8, head=4, mlp=12, biases=False):
    torch.manual_seed(1)

    def made(*shape):
        return torch.randn(shape)

    weights = {"model.embed_tokens.weight": made(vocabulary, hidden)}
    for layer in range(2):
        name = f"model.layers.{layer}"
        for part, count in (("q", heads), ("k", groups), ("v", groups)):
            weights[f"{name}.self_attn.{part}_proj.weight"] = made(count * head, hidden)
            if biases:
                weights[f"{name}.self_attn.{part}_proj.bias"] = made(count * head)
        weights[f"{name}.self_attn.o_proj.weight"] = made(hidden, heads * head)
        weights[f"{name}.self_attn.q_norm.weight"] = made(head)
        weights[f"{name}.mlp.gate_proj.weight"] = made(mlp, hidden)
        weights[f"{name}.mlp.up_proj.weight"] = made(mlp, hidden)
        weights[f"{name}.mlp.down_proj.weight"] = made(hidden, mlp)
        weights[f"{name}.input_layernorm.weight"] = made(hidden)
        weights[f"{name}.post_attention_layernorm.weight"] = made(hidden)
    return {
        **weights,
        "model.norm.weight": made(hidden),
        "lm_head.weight": made(vocabulary, hidden),
    }


def test_megatrons_shards_of_one_rank_are_whole_tensors_except_for_the_projections_of_attention():
    """Tensors in a shareable region are read in place."""
    whole = checkpoint(heads=4, groups=2, vocabulary=10)
    shards = shards_of(whole, 0, 1, heads=4, groups=2, multiple=8, fused_norms=False)
    named = megatron_parts(shards, tp_rank=0, tp_size=1, heads=4, query_groups=2, vocabulary=10)
    sources = {source.spec.name: source.whole for source in sources_of(list(named))}
    assert sources.keys() == whole.keys()
    divided = {name for name, tensor in sources.items() if tensor is None}
    assert divided == {
        name for name in whole if name.split(".")[-2] in ("q_proj", "k_proj", "v_proj")
    }
    assert all(torch.equal(sources[name], whole[name]) for name in whole.keys() - divided)


@pytest.mark.parametrize(
    ("size", "heads", "groups", "vocabulary", "multiple"),
    [(1, 4, 2, 10, 8), (2, 4, 2, 14, 8), (2, 8, 8, 13, 4), (4, 8, 4, 9, 4)],
)
@pytest.mark.parametrize("fused", [False, True])
def test_megatrons_shards_are_the_tensors_of_a_checkpoint(
    size, heads, groups, vocabulary, multiple, fused
):
    whole = checkpoint(heads, groups, vocabulary, biases=fused)
    found = {name: torch.full_like(tensor, torch.nan) for name, tensor in whole.items()}
    boxes = {}
    for rank in range(size):
        shards = shards_of(
            whole, rank, size, heads=heads, groups=groups, multiple=multiple, fused_norms=fused
        )
        shards["decoder.layers.0.mlp._extra_state"] = None
        shards["decoder.layers.0.mlp.linear_fc1._extra_state"] = torch.empty(0, dtype=torch.uint8)
        shards["decoder.final_layernorm._extra_state"] = torch.empty(0, dtype=torch.uint8)
        named = megatron_parts(
            {f"module.{name}": tensor for name, tensor in shards.items()},
            tp_rank=rank,
            tp_size=size,
            heads=heads,
            query_groups=groups,
            vocabulary=vocabulary,
        )
        for name, tensor in named:
            if isinstance(tensor, Part):
                tensor.check(name)
                tensor.write(found[name])
                boxes.setdefault(name, []).append(tensor.box)
            else:
                found[name].copy_(tensor)
    for name, tensor in whole.items():
        assert torch.equal(found[name], tensor), name
        check_cover(name, tuple(tensor.shape), boxes.get(name, [None]))


def test_invalid_shards_of_megatron_are_rejected():
    sizes = {"tp_rank": 0, "tp_size": 2, "heads": 4, "query_groups": 2, "vocabulary": 10}

    def parts(state, **others):
        return list(megatron_parts(state, **{**sizes, **others}))

    with pytest.raises(ConfigError, match=r"experts\.linear_fc1"):
        parts({"decoder.layers.0.mlp.experts.linear_fc1.weight": torch.ones(2, 2)})
    for others in ({"tp_size": 4}, {"tp_size": 0}, {"query_groups": 0}, {"heads": 0}):
        with pytest.raises(ConfigError, match="cannot be divided among"):
            parts({}, **others)
    with pytest.raises(ConfigError, match="8 rows on all ranks, fewer than 10"):
        parts({"embedding.word_embeddings.weight": torch.ones(4, 2)})
    with pytest.raises(ConfigError, match="9 rows"):
        parts({"decoder.layers.0.self_attention.linear_qkv.weight": torch.ones(9, 2)})


def test_parts_must_be_boxes_that_cover_the_tensor():
    with pytest.raises(ConfigError, match="not a box"):
        Part(torch.ones(2, 3), (4, 3), (3,)).check("w")
    with pytest.raises(ConfigError, match="not a box"):
        Part(torch.ones(2), (4, 3)).check("w")
    with pytest.raises(ConfigError, match="not a box"):
        Part(torch.ones(2, 3), (4, 3), (), (4, 3)).check("w")
    with pytest.raises(ConfigError, match="whole rows"):
        Part(torch.ones(4), (4, 4), (), (2, 2)).check("w")
    halves = [((0, 2), (0, 3)), ((2, 4), (0, 3))]
    check_cover("w", (4, 3), halves)
    check_cover("w", (4, 3), [*halves, *halves, ((4, 4), (0, 3))])
    with pytest.raises(ConfigError, match="6 of its 12"):
        check_cover("w", (4, 3), halves[:1])
    with pytest.raises(ConfigError, match="overlap"):
        check_cover("w", (4, 3), [halves[0], ((1, 4), (0, 3))])
    with pytest.raises(ConfigError, match="on only some ranks"):
        check_cover("w", (4, 3), [halves[0], None])


def test_two_ranks_send_their_shards_to_an_engine_of_one_rank_or_two(run_ranks):
    run_ranks(2)("""
import re
from megatron_shards import shards_of
from memsaver.integrations.rollout.weights import Part, megatron_parts
from memsaver.integrations.engine.errors import EngineError

def hf(name):
    name = re.sub(r"(layers.\\d+)\\.norm", r"model.\\1.input_layernorm", name)
    name = re.sub(r"(layers.\\d+)\\.([qkvo])\\.", r"model.\\1.self_attn.\\2_proj.", name)
    return name.replace("embed.", "model.embed_tokens.")

def megatron(weights, tied):
    names = {hf(name): name for name in weights if "scale" not in name}
    whole = {name: weights[ours] for name, ours in names.items()}
    shards = shards_of(whole, RANK, 2, heads=4, groups=4, multiple=4)
    if tied:
        shards["output_layer.weight"] = shards["embedding.word_embeddings.weight"]
    else:
        del shards["output_layer.weight"]
    named = megatron_parts(shards, tp_rank=RANK, tp_size=2, heads=4, query_groups=4, vocabulary=14)
    scales = [(name, tensor) for name, tensor in weights.items() if "scale" in name]
    return [*((names[name], part) for name, part in named), *scales]

mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
for size in (1, 2):
    backend = Backend(Manager, size) if RANK == 0 else None
    engine = RolloutEngine(backend, layout_of(mesh), timeout=20)
    kinds = {"verify": "full", "bucket_bytes": 700}, {}, {"verify": "off"}
    for seed, options in enumerate(kinds):
        weights = checkpoint(seed)
        state = megatron(weights, tied=seed != 1)
        kept = [part.tensor.clone() for _, part in state if isinstance(part, Part)]
        report = update(engine, state, **options)
        assert holds(backend, weights), (size, seed)
        assert report.tied == (("lm_head.weight",) if seed != 1 else ()), report
        if seed == 0:
            assert report.buckets > 2 and report.held == report.tensors == report.received, report
        parts = [part.tensor for _, part in state if isinstance(part, Part)]
        assert all(map(torch.equal, parts, kept))
    # Whole tensors reach an engine with fewer ranks, too.
    update(engine, checkpoint(9), verify="full")
    assert holds(backend, checkpoint(9))
    # A part that is missing, an overlap, and replicas that differ.
    state = dict(megatron(checkpoint(1), tied=True))
    name = "layers.0.o.weight"
    if RANK == 1:
        state[name] = Part(state[name].tensor[:, :0], (8, 8))
    error = refused(ConfigError, update, engine, state)
    assert f"{name} have 32 of its 64" in str(error), error
    state = dict(megatron(checkpoint(1), tied=True))
    if RANK == 1:
        state["layers.0.norm.weight"] = state["layers.0.norm.weight"] + 1
    error = refused(WeightMismatchError, update, engine, state, verify="full")
    assert error.tensors == ("layers.0.norm.weight",), error
    if size == 1:
        error = refused(ConfigError, update, engine, weight_engine.Model(), layout="engine")
        assert "need equal numbers" in str(error)
    error = refused(ConfigError, update, engine, megatron(weights, True), layout="engine")
    update(engine, megatron(checkpoint(4), True), verify="full")
    assert holds(backend, checkpoint(4))
    engine.close()

""")


def test_parts_of_three_ranks_use_a_text_for_each_receiver(run_ranks):
    """A serialized handle can be opened only once because torch counts one receiver for each
    handle."""
    run_ranks(3)("""
from memsaver.integrations.rollout.weights import Part, colocated
made, opened = [], []
for name, calls in (("shared", made), ("opened", opened)):
    def noted(*given, own=getattr(colocated, name), calls=calls):
        calls.append(name)
        return own(*given)
    patch.setattr(colocated, name, noted)
mesh = init_device_mesh("cpu", (1, 3), mesh_dim_names=("dp", "tp"))
layout = layout_of(mesh)
backend = Backend(Manager) if RANK == 0 else None
engine = RolloutEngine(backend, layout, timeout=20)
for seed in (1, 2):
    whole = checkpoint(seed)
    del whole["lm_head.weight"]
    given = {}
    for name, tensor in whole.items():
        count = len(tensor)
        begin, end = RANK * count // 3, (RANK + 1) * count // 3
        start = [begin] + [0] * (tensor.dim() - 1)
        given[name] = Part(tensor[begin:end].clone(), tuple(tensor.shape), tuple(start))
    report = update(engine, given, verify="full", bucket_bytes=700)
    assert report.held == report.received == 13 and report.buckets > 2, report
    assert holds(backend, checkpoint(seed))
assert len(made) == len(opened) == 2 * 2, (made, opened)
""")


def rebuild(can_map, *arguments):
    """Return the ordinal of the GPU for which CUDA maps the memory."""
    if not can_map:
        raise RuntimeError("CUDA error: peer access is not supported between these two devices")
    return arguments[5]


@pytest.mark.parametrize(
    ("visible", "own", "has_access", "expected"),
    [
        (["a", "b"], 0, True, 0),
        (["b", "a"], 1, True, 1),
        (["a", "b"], 1, True, 1),
        (["a", "b"], 0, False, 1),
        (["a"], 0, True, 0),
        (["a"], 0, False, ConfigError),
    ],
)
def test_memory_of_another_gpu_is_mapped_for_the_gpu_that_writes_it(
    visible, own, has_access, expected, monkeypatch
):
    """A kernel must not access memory that is mapped for another GPU of the process."""
    named = [SimpleNamespace(uuid=uuid) for uuid in visible]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(visible))
    monkeypatch.setattr(torch.cuda, "get_device_properties", named.__getitem__)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda device, peer: has_access)
    arguments = (has_access or "b" in visible, *range(1, 6), "b", *range(7, 14))
    text = base64.b64encode(pickle.dumps((rebuild, arguments))).decode()
    if expected is ConfigError:
        with pytest.raises(ConfigError, match="cuda:0 cannot access GPU b of another rank"):
            opened(text, torch.device("cuda", own))
    else:
        assert opened(text, torch.device("cuda", own)) == expected


def test_parts_are_read_once_and_copied_from_the_ranks_own_bucket():
    """The GPU with the rank's bucket copies into other buckets, so a part can be on another
    device.
    """

    class Read(torch.Tensor):
        count = 0

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            Read.count += function is torch.Tensor.copy_
            return super().__torch_function__(function, types, args, kwargs or {})

    tensor = torch.arange(6.0).view(3, 2).as_subclass(Read)
    (source,) = sources_of({"w": Part(tensor, (3, 4), (0, 2))})
    (bucket,) = buckets_of([("w", 48)], 48)
    others = [torch.zeros(48, dtype=torch.uint8) for _ in range(2)]
    with BucketMemory(48, "cpu", True) as memory:
        memory._others = others
        ((_, _, view),) = memory.write(bucket, {"w": source})
        assert torch.equal(view[:, 2:], tensor)
    for other in others:
        found = other.view(torch.float32).view(3, 4)
        assert torch.equal(found[:, 2:], tensor) and not found[:, :2].any()
    assert Read.count == 1
