"""Tests the check of plain weight updates with the loaders of SGLang's own models."""

from __future__ import annotations

import types
from unittest import mock

import pytest
import torch
from installed import needs_sglang

from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.weights.plain_check import Found, PlainCheck, verdict

pytestmark = pytest.mark.recipes

RANKS, ROWS, WIDTH = 2, 60, 8
PADDED_ROWS = 64  # of both ranks together


def embedding(rank: int) -> torch.nn.Module:
    """Return a rank's part of SGLang's own embedding, whose last rows are padding."""
    from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding

    layer = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
    torch.nn.Module.__init__(layer)
    rows = PADDED_ROWS // RANKS
    begin = rank * rows
    layer.weight = torch.nn.Parameter(torch.full((rows, WIDTH), -1.0), requires_grad=False)
    layer.weight.output_dim = 0
    layer.weight.weight_loader = layer.weight_loader
    layer.org_vocab_size, layer.use_presharded_weights, layer.tp_size = ROWS, False, RANKS
    layer.shard_indices = types.SimpleNamespace(
        org_vocab_start_index=begin, org_vocab_end_index=min(begin + rows, ROWS)
    )
    return layer


class Model(torch.nn.Module):
    """A rank's part of a model that uses gpt-oss's loader, which loads tensors in sorted order."""

    config = types.SimpleNamespace(
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=WIDTH,
        num_hidden_layers=1,
        tie_word_embeddings=False,
        quantization_config=None,
    )

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.model = torch.nn.Module()
        self.model.embed_tokens = embedding(rank)
        self.model.norm = torch.nn.Parameter(torch.zeros(WIDTH), requires_grad=False)

    def _get_default_weight_mapping(self) -> dict[str, str]:
        return {}

    def load_weights(self, weights) -> None:
        from sglang.srt.models import gpt_oss

        load = gpt_oss.GptOssForCausalLM._load_normal_weights
        # Before 0.5.14, the loader queries its rank, but uses the rank only for experts.
        with mock.patch.object(gpt_oss, "get_tensor_model_parallel_rank", int, create=True):
            load(self, weights, is_nextn=False, weight_name_mapping={})


def message_of(named: dict[str, torch.Tensor]) -> str:
    """Load the tensors on all ranks; return the reason why the update fails, or ""."""
    found = []
    for rank in range(RANKS):
        model, check = Model(rank), PlainCheck(set())
        try:
            with check.around_loader(model):
                model.load_weights([*named.items()])
        except EngineError as error:
            return str(error)
        held = model.model.embed_tokens.weight.sum()
        assert held == WIDTH * min(PADDED_ROWS // RANKS, ROWS - PADDED_ROWS // RANKS * rank)
        found.append(Found(rank, True, "", None, check.unused, check.partial))
    return verdict(found)


@pytest.mark.parametrize(
    ("name", "tensor", "text"),
    [
        ("model.layers.0.nope.weight", torch.ones(2), "does not use model.layers.0.nope.weight"),
        (
            "model.embed_tokens.weight",
            torch.ones(ROWS, 1),
            "would repeat model.embed_tokens.weight",
        ),
    ],
)
def test_unused_names_and_repeated_tensors_fail_the_update(name, tensor, text):
    needs_sglang()
    named = {"model.embed_tokens.weight": torch.ones(ROWS, WIDTH), "model.norm": torch.ones(WIDTH)}
    assert message_of(named) == ""
    assert text in message_of({**named, name: tensor})
