"""The kinds of SGLang engines that run with memsaver: models, arguments and update methods.

All models are small and have random weights; see `sglang_kind_models`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Settings = Mapping[str, Any]

VOCABULARY = 2048
DRAFT_VOCABULARY = 128  # small, so that a random draft model is sometimes right

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_EXPERTS = {"moe_intermediate_size": 256, "num_experts_per_tok": 2, "norm_topk_prob": True}

DENSE = {**_BASE, "model_type": "qwen3"}
LLAMA = {**_BASE, "model_type": "llama", "vocab_size": DRAFT_VOCABULARY, "num_hidden_layers": 8}
MOE = {**_BASE, **_EXPERTS, "model_type": "qwen3_moe", "num_experts": 8}
MLA = {
    **{name: value for name, value in _BASE.items() if name != "head_dim"},
    **_EXPERTS,
    "model_type": "deepseek_v2",
    "q_lora_rank": 256,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "scoring_func": "softmax",
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
}
_LAYERS = ["sliding_attention", "full_attention"] * 2
GEMMA3 = {
    **_BASE,
    "model_type": "gemma3_text",
    "tie_word_embeddings": True,
    "sliding_window": 64,
    "layer_types": _LAYERS,
}
GPT_OSS = {
    **_BASE,
    "model_type": "gpt_oss",
    "head_dim": 64,
    "num_attention_heads": 8,
    "num_local_experts": 8,
    "swiglu_limit": 7.0,
    "num_experts_per_tok": 2,
    "sliding_window": 128,
    "layer_types": _LAYERS,
}
QWEN3_NEXT = {
    **_BASE,
    **_EXPERTS,
    "model_type": "qwen3_next",
    "num_experts": 8,
    "shared_expert_intermediate_size": 256,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
}
FALCON_H1 = {
    **_BASE,
    "model_type": "falcon_h1",
    "mamba_d_ssm": 1024,
    "mamba_n_heads": 16,
    "mamba_d_head": 64,
    "mamba_n_groups": 1,
    "mamba_d_state": 128,
    "mamba_expand": 2,
}
NEMOTRON_H = {
    **_BASE,
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*M-",
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "n_groups": 8,
    "ssm_state_size": 128,
}

_FEW: dict[str, Any] = {"max_running_requests": 8, "max_mamba_cache_size": 64}
_SPECULATE: dict[str, Any] = {
    "max_running_requests": 8,
    "speculative_num_steps": 3,
    "speculative_eagle_topk": 4,
    "speculative_num_draft_tokens": 8,
}
# If drafts have branches, the draft model's KV cache cannot be paged.
_CHAIN = {**_SPECULATE, "speculative_eagle_topk": 1, "speculative_num_draft_tokens": 4}


@dataclass(frozen=True)
class Kind:
    """A kind of engine.

    Attributes:
        name: the key of the kind's row.
        title: the kind's name in the documentation.
        model: the configuration of the model, as in transformers.
        arguments: the arguments of the engine.
        update: the device of the tensors that update the weights, "cpu" or "cuda"; "" if SGLang
            cannot update them.
        quantization: the checkpoint's quantization: "fp8" in blocks, "w8a8_int8", or "" for
            bfloat16.
        draft: the draft model: "eagle", "eagle3", "target" (the target's first weights), or "".
        adapter: whether a LoRA adapter is loaded.
        pauses: whether generation is paused, in each mode, before releases.
        tiers: whether the cache has a tier in host memory whose prefixes are used after releases.
        reloads: whether, even without memsaver, an awake engine's outputs after an update differ
            from those of a fresh engine with the same weights. For such kinds, other updates are
            compared with an update of an awake engine.
        gpus: the number of GPUs.
        environment: additional environment variables.
    """

    name: str
    title: str
    model: Settings = field(default_factory=lambda: DENSE)
    arguments: Settings = field(default_factory=dict)
    update: str = "cpu"
    quantization: str = ""
    draft: str = ""
    adapter: bool = False
    pauses: bool = False
    tiers: bool = False
    reloads: bool = False
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


TRITON_MOE = {"moe_runner_backend": "triton"}
_SLOW = {"cuda_graph_bs_decode": [1], "torch_compile_max_bs": 1, "max_running_requests": 1}
_FA3 = {"attention_backend": "fa3"}
_STEPPED = {**_CHAIN, "speculative_algorithm": "STANDALONE"}

# The slowest kinds come first.
KINDS = (
    Kind(
        "torch_compile", "`enable_torch_compile`", arguments={"enable_torch_compile": True, **_SLOW}
    ),
    Kind("pause", "`pause_generation` before a release", pauses=True),
    Kind("dense", "dense"),
    Kind("moe", "mixture of experts", MOE, TRITON_MOE),
    Kind("mla", "latent attention (MLA), DeepSeek-V2", MLA, TRITON_MOE),
    Kind("gemma3", "sliding windows, Gemma 3", GEMMA3),
    Kind("gpt_oss", "sliding windows, gpt-oss", GPT_OSS, TRITON_MOE),
    Kind("qwen3_next", "state cache, Qwen3-Next", QWEN3_NEXT, {**TRITON_MOE, **_FEW}),
    Kind("falcon_h1", "state cache, Falcon-H1", FALCON_H1, _FEW),
    Kind("nemotron_h", "state cache, Nemotron-H", NEMOTRON_H, {**_FEW, **_FA3}),
    # SGLang transposes these weights after loading, so it cannot load other weights into them.
    Kind("fp8_online", "fp8, quantized on loading", arguments={"quantization": "fp8"}, update=""),
    Kind(
        "fp8_reload",
        "the same with `load_format=flash_rl`",
        arguments={"quantization": "fp8", "load_format": "flash_rl"},
        update="cuda",  # the weights are quantized in place
        reloads=True,
    ),
    Kind("w8a8_fp8", "`w8a8_fp8`", arguments={"quantization": "w8a8_fp8"}, update=""),
    Kind("w8a8_int8", "`w8a8_int8`", quantization="w8a8_int8", update=""),
    Kind(
        "fp8_blocks",
        "fp8 checkpoint, in blocks",
        quantization="fp8",
        arguments={"fp8_gemm_runner_backend": "triton"},
        environment={"SGLANG_ENABLE_JIT_DEEPGEMM": "0"},
    ),
    Kind("fp8_kv", "KV cache in fp8", arguments={"kv_cache_dtype": "fp8_e5m2"}),
    Kind("lora", "LoRA adapter", adapter=True, arguments={"lora_backend": "triton"}),
    Kind(
        "eagle",
        "speculative, EAGLE",
        LLAMA,
        {**_SPECULATE, "speculative_algorithm": "EAGLE"},
        draft="eagle",
    ),
    Kind(
        "eagle3",
        "speculative, EAGLE-3",
        LLAMA,
        {**_SPECULATE, "speculative_algorithm": "EAGLE3"},
        draft="eagle3",
    ),
    Kind("standalone", "speculative, a draft model", LLAMA, _STEPPED, draft="target"),
    Kind(
        "ngram",
        "speculative, n-grams",
        LLAMA,
        {"speculative_algorithm": "NGRAM", "max_running_requests": 8},
    ),
    Kind(
        "hicache",
        "hierarchical cache",
        tiers=True,
        arguments={
            "enable_hierarchical_cache": True,
            "hicache_ratio": 2.0,
            "hicache_io_backend": "kernel",
        },
    ),
    Kind("fa3", "FlashAttention 3", arguments=_FA3),
    Kind("tp2", "TP=2", arguments={"tp_size": 2}, gpus=2),
    Kind("moe_tp2", "mixture of experts, TP=2", MOE, {**TRITON_MOE, "tp_size": 2}, gpus=2),
    Kind(
        "moe_ep2",
        "mixture of experts, EP=2",
        MOE,
        {**TRITON_MOE, "tp_size": 2, "ep_size": 2},
        gpus=2,
    ),
    Kind("dp2", "`dp_size=2`", arguments={"dp_size": 2}, gpus=2),
    Kind(
        "dp_attention",
        "data-parallel attention",
        MLA,
        {**TRITON_MOE, "tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
        gpus=2,
    ),
    Kind("pp2", "PP=2", arguments={"pp_size": 2}, gpus=2),
)
