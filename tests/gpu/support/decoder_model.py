"""Builds decoders with static KV caches and captured decode steps in the regions of tags."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

import memsaver

STEPS = 4  # decoded tokens that are compared
_construction = threading.Lock()


@dataclass(frozen=True)
class Size:
    """The size of a decoder."""

    layers: int = 16
    hidden: int = 2048
    inter: int = 8192
    heads: int = 32
    kv_heads: int = 8
    vocab: int = 32000
    batch: int = 8
    length: int = 2048
    prompt: int = 16

    def config(self) -> LlamaConfig:
        """Return the configuration for the transformers library."""
        config = LlamaConfig(
            vocab_size=self.vocab,
            hidden_size=self.hidden,
            intermediate_size=self.inter,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.length,
            tie_word_embeddings=False,
        )
        config._attn_implementation = "eager"
        return config


FULL = Size()  # 1.1 billion parameters
SMALL = Size(layers=3, vocab=8000, batch=2)  # for additional threads


class Decoder:
    """A model with its cache and its decode step, which is captured in a CUDA graph."""

    def __init__(self, size: Size, device: str, kv_backup: str | None) -> None:
        self.size = size
        self.device = torch.device(device)
        self.kv_backup = kv_backup
        self.graph: Any = None
        self.model: Any
        self.cache: Any

    def build(self, scopes: Callable[[str, str | None], Any]) -> None:
        """Create the weights and the cache in their tags' regions, and everything else outside any
        region.
        """
        size, device = self.size, self.device
        config = size.config()
        with scopes("weights", "host"):
            # transformers replaces functions in torch.nn.init while it creates a model.
            with _construction, device:
                model = LlamaForCausalLM(config)
            self.model = model.eval().requires_grad_(False)
        with scopes("kv_cache", self.kv_backup):
            with device:
                self.cache = StaticCache(config=config, max_cache_len=size.length)
            self.cache.early_initialization(
                size.batch, size.kv_heads, size.hidden // size.heads, torch.bfloat16, device
            )
        self.token = torch.zeros(size.batch, 1, dtype=torch.long, device=device)
        self.position = torch.zeros((), dtype=torch.long, device=device)
        self.slots = torch.arange(size.length, device=device)

    def forward(self, tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Return the logits after the last token; `position` is the first token's position."""
        size, count = self.size, tokens.shape[1]
        for layer in self.cache.layers:
            layer.cumulative_length.copy_(position)  # the layer advances it; reset for replays
        positions = self.slots[:count] + position
        mask = torch.zeros(count, size.length, dtype=torch.bfloat16, device=self.device)
        mask.masked_fill_(self.slots[None, :] > positions[:, None], torch.finfo(mask.dtype).min)
        out = self.model(
            input_ids=tokens,
            attention_mask=mask[None, None],
            position_ids=positions[None].expand(size.batch, count),
            past_key_values=self.cache,
            use_cache=True,
        )
        return out.logits[:, -1].contiguous()

    def prefill(self) -> None:
        """Fill the cache with a prompt."""
        size = self.size
        generator = torch.Generator().manual_seed(size.layers)
        prompt = torch.randint(size.vocab, (size.batch, size.prompt), generator=generator)
        first = self.forward(prompt.to(self.device), self.position.zero_())
        self.first_token = first.argmax(-1, keepdim=True)

    def capture(self, scope: Callable[..., Any]) -> None:
        """Capture the decode step."""
        stream = torch.cuda.Stream(self.device)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        self.position.fill_(self.size.prompt)
        with torch.cuda.stream(
            stream
        ):  # cuBLAS allocates its workspace for this stream, outside the graph
            for _ in range(2):
                self.forward(self.token, self.position)
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with scope(self.graph, stream=stream):
            self.logits = self.forward(self.token, self.position)

    def decode(self) -> torch.Tensor:
        """Return the logits of STEPS tokens after the prompt, computed by graph replays."""
        found = []
        with torch.cuda.device(self.device):
            self.token.copy_(self.first_token)
            for step in range(STEPS):
                self.position.fill_(self.size.prompt + step)
                if self.graph is not None:
                    self.graph.replay()
                else:
                    self.logits = self.forward(self.token, self.position)
                found.append(self.logits.clone())
                self.token.copy_(found[-1].argmax(-1, keepdim=True))
        return torch.stack(found)

    def weights(self) -> list[torch.Tensor]:
        """Return the parameters and buffers."""
        return [*self.model.parameters(), *self.model.buffers()]

    def kv(self) -> list[torch.Tensor]:
        """Return the cache's tensors."""
        return [
            tensor
            for layer in self.cache.layers
            for tensor in (layer.keys, layer.values, layer.cumulative_length)
        ]


def build_all(decoders: list[Decoder], in_threads: bool) -> None:
    """Build the decoders in sequence, or concurrently with one thread and one open region per
    decoder.
    """
    ready = threading.Barrier(len(decoders))
    capturing = threading.Lock()
    failures: list[BaseException] = []

    def scopes(tag: str, backup: str | None) -> Any:
        return memsaver.region(tag, backup=backup)

    def build(decoder: Decoder) -> None:
        with torch.no_grad(), torch.cuda.device(decoder.device):
            if not in_threads:
                decoder.build(scopes)
                decoder.prefill()
                decoder.capture(memsaver.graph)
                return
            decoder.build(scopes)
            decoder.prefill()
            torch.cuda.synchronize()
            ready.wait(120)  # torch allows one capture at a time, and no other work during it
            with capturing:
                decoder.capture(memsaver.graph)
                torch.cuda.synchronize()

    def build_on_thread(decoder: Decoder) -> None:
        try:
            build(decoder)
        except BaseException as error:
            failures.append(error)
            ready.abort()

    if not in_threads:
        for decoder in decoders:
            build(decoder)
        return
    threads = [threading.Thread(target=build_on_thread, args=(each,)) for each in decoders]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise next(
            (e for e in failures if not isinstance(e, threading.BrokenBarrierError)), failures[0]
        )
