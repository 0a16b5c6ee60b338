"""Tests the names of a model's weights while its layers are wrapped for LoRA adapters."""

import pytest

from memsaver.integrations.engine.weights.adapters import without_adapters

torch = pytest.importorskip("torch")


class BaseLayerWithLoRA(torch.nn.Module):
    def __init__(self, base_layer) -> None:
        super().__init__()
        self.base_layer = base_layer


class Linear(BaseLayerWithLoRA):
    pass


def names(model) -> list[str]:
    return [name for name, _ in model.named_parameters(remove_duplicate=False)]


@pytest.fixture
def model():
    """Return a model with wrapped experts, a plain layer, and a wrapped layer with two names."""
    model = torch.nn.Module()
    model.head = model.embed = Linear(torch.nn.Linear(2, 2, bias=False))
    model.blocks = torch.nn.ModuleList([BaseLayerWithLoRA(torch.nn.Linear(2, 2, bias=False))])
    model.blocks[0].base_layer.lora_base_layer_prefix = "base_layer."
    model.norm = torch.nn.LayerNorm(2, bias=False)
    return model


def test_the_names_are_those_of_the_checkpoint_in_the_block(model):
    before, experts = names(model), model.blocks[0].base_layer
    assert "head.base_layer.weight" in before
    with pytest.raises(ValueError, match="in the block"), without_adapters(model) as renamed:
        plain = ["head.weight", "embed.weight", "blocks.0.weight", "norm.weight"]
        assert names(model) == plain and experts.lora_base_layer_prefix == ""
        assert list(renamed([("a.base_layer.b", 1), ("c", 2)])) == [("a.b", 1), ("c", 2)]
        with without_adapters(model):
            assert names(model) == plain
        assert names(model) == plain and experts.lora_base_layer_prefix == ""
        raise ValueError("in the block")
    assert names(model) == before and model.head is model.embed
    assert experts.lora_base_layer_prefix == "base_layer."


def test_a_model_without_adapters_keeps_its_names():
    model = torch.nn.Module()
    model.base_layer = torch.nn.Linear(2, 2)
    named = [("x.base_layer.weight", 1)]
    with without_adapters(model) as renamed:
        assert renamed(named) == named
