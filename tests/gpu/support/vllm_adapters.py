"""LoRA adapters with random weights for the small model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from qwen_model import HEAD, HEADS, HIDDEN, LAYERS

RANK = 8
OUTPUTS = {"q_proj": HEADS * HEAD, "v_proj": HEADS * HEAD}


def save(folder: Path, seed: int) -> Any:
    """Save an adapter whose weights depend on the seed; return vLLM's request for the adapter."""
    import torch
    from safetensors.torch import save_file
    from vllm.lora.request import LoRARequest

    folder.mkdir(parents=True)
    config = {
        "peft_type": "LORA",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "target_modules": list(OUTPUTS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for number in range(LAYERS):
        for name, outputs in OUTPUTS.items():
            at = f"base_model.model.model.layers.{number}.self_attn.{name}"
            shapes = {"lora_A": (RANK, HIDDEN), "lora_B": (outputs, RANK)}
            for part, shape in shapes.items():
                values = torch.randn(shape, generator=random) / shape[1] ** 0.5
                weights[f"{at}.{part}.weight"] = values.to(torch.bfloat16)
    save_file(weights, str(folder / "adapter_model.safetensors"))
    return LoRARequest(f"adapter-{seed}", seed, str(folder))
