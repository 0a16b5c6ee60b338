"""Create checkpoints of small models with random weights, and their draft models and adapters.

The weights have the magnitude of trained weights, so the generated tokens depend on every layer.
The weights depend only on the seed.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RANK = 8  # of a LoRA adapter
BLOCK = 128  # the width of the blocks of an fp8 checkpoint
FP8_MAX = 448.0
RESIDUAL = 1 / 8  # scales the layers' outputs down, so that the last token mostly decides the next

# A name that transformers 5.12 writes, and the name in published checkpoints, which SGLang reads.
_RENAMED = {"backbone.embedding.weight": "backbone.embeddings.weight"}


def save_model(
    settings: Any, folder: Path, seed: int, quantization: str = "", predictable: bool = False
) -> None:
    """Save a model with the transformers configuration `settings` as a checkpoint in `folder`.

    If the model is `predictable`, a small draft model can predict most of its tokens.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    options = dict(settings)
    config = AutoConfig.for_model(options.pop("model_type"), **options)
    config.dtype = torch.bfloat16
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            made = _random(name, tensor, config.tie_word_embeddings)
            tensor.copy_(made * RESIDUAL if predictable and _adds(name) else made)
    model.save_pretrained(folder)
    named = tensors(folder)
    if not named.keys().isdisjoint(_RENAMED):
        _save(folder, _config(folder), {_RENAMED.get(n, n): t for n, t in named.items()})
    if quantization:
        _quantize(folder, quantization)


def _adds(name: str) -> bool:
    """Return whether a matrix computes the output of attention or of an MLP."""
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def _random(name: str, tensor: Any, tied: bool = False) -> Any:
    import torch

    noise = torch.randn(tensor.shape)
    if tensor.ndim < 2:
        # A scale, a bias or a state's decay. With tied embeddings and scales close to 1, the model
        # would repeat the last token, whatever its weights.
        return tensor.float() + (noise * 2 if tied else noise / 10)
    return noise if "embed" in name and not tied else noise / tensor.shape[-1] ** 0.5


def tensors(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's tensors on the CPU, by name."""
    from safetensors.torch import load_file

    found: dict[str, Any] = {}
    for path in sorted(folder.glob("*.safetensors")):
        found.update(load_file(str(path)))
    return found


def _save(folder: Path, config: dict[str, Any], named: dict[str, Any]) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    (folder / "config.json").write_text(json.dumps(config))
    made = {name: tensor.contiguous() for name, tensor in named.items()}
    save_file(made, str(folder / "model.safetensors"), metadata={"format": "pt"})


def _config(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def _quantize(folder: Path, method: str) -> None:
    """Replace the linear layers' weights with fp8 values scaled by block, or int8 scaled by row."""
    import torch

    named: dict[str, Any] = {}
    for name, tensor in tensors(folder).items():
        if not name.endswith("_proj.weight"):
            named[name] = tensor
        elif method == "fp8":
            rows, columns = (size // BLOCK for size in tensor.shape)
            blocks = tensor.float().view(rows, BLOCK, columns, BLOCK)
            scales = blocks.abs().amax((1, 3), keepdim=True) / FP8_MAX
            named[name] = (blocks / scales).view(tensor.shape).to(torch.float8_e4m3fn)
            named[f"{name}_scale_inv"] = scales.view(rows, columns)
        else:
            scales = tensor.float().abs().amax(1, keepdim=True) / 127
            named[name] = (tensor.float() / scales).round().to(torch.int8)
            named[f"{name}_scale"] = scales
    config = _config(folder)
    config["quantization_config"] = {"quant_method": method}
    if method == "fp8":
        config["quantization_config"] |= {
            "activation_scheme": "dynamic",
            "weight_block_size": [BLOCK, BLOCK],
        }
    _save(folder, config, named)


def save_draft(target: Path, folder: Path, algorithm: str, seed: int) -> None:
    """Save a one-layer draft model for a Llama, of the kind "eagle" or "eagle3".

    The "eagle" draft proposes the token that the target's embedding and head, with added noise,
    compute from the last token. The proposal is usually correct for a `predictable` target. The
    "eagle3" draft is random.
    """
    import torch

    config = {**_config(target), "num_hidden_layers": 1}
    hidden = config["hidden_size"]
    torch.manual_seed(seed)
    first = "model.layers.0."
    sizes = {
        name.removeprefix("model."): tensor.shape
        for name, tensor in tensors(target).items()
        if name.startswith(first)
    }
    if algorithm == "eagle":
        config["architectures"] = ["LlamaForCausalLMEagle"]
        sizes.pop("layers.0.input_layernorm.weight")
        sizes["fc.weight"] = torch.Size((hidden, 2 * hidden))
        sizes["fc.bias"] = torch.Size((hidden,))
    else:
        config["architectures"] = ["LlamaForCausalLMEagle3"]
        config["draft_vocab_size"] = config["vocab_size"]
        sizes = {name.replace("layers.0", "midlayer"): size for name, size in sizes.items()}
        for part in "qkv":
            name = f"midlayer.self_attn.{part}_proj.weight"
            sizes[name] = torch.Size((sizes[name][0], 2 * hidden))
        sizes["midlayer.hidden_norm.weight"] = torch.Size((hidden,))
        sizes["fc.weight"] = torch.Size((hidden, 3 * hidden))
        sizes["norm.weight"] = torch.Size((hidden,))
        sizes["lm_head.weight"] = torch.Size((config["vocab_size"], hidden))
    named = {}
    for name, size in sizes.items():
        start = torch.zeros(size) if "bias" in name else torch.ones(size)
        made = _random(name, start)
        if algorithm == "eagle" and (_adds(name) or name.startswith("fc.")):
            made = made * RESIDUAL
        named[name] = made.to(torch.bfloat16)
    if algorithm == "eagle":  # fc's input is the token's embedding, then the target's hidden state
        named["fc.weight"][:, :hidden] += torch.eye(hidden)
    _save(folder, config, named)


def save_adapter(model: Path, folder: Path, seed: int) -> None:
    """Save a random LoRA adapter for the attention of the model in `model`."""
    import torch
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"]
    named = {}
    for name, tensor in tensors(model).items():
        if not name.endswith(tuple(f"{target}.weight" for target in targets)):
            continue
        path = f"base_model.model.{name.removesuffix('.weight')}"
        outputs, inputs = tensor.shape
        named[f"{path}.lora_A.weight"] = torch.randn(RANK, inputs) / inputs**0.5
        named[f"{path}.lora_B.weight"] = torch.randn(outputs, RANK) / RANK**0.5
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(model),
        "bias": "none",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "target_modules": targets,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    made = {name: tensor.to(torch.bfloat16) for name, tensor in named.items()}
    save_file(made, str(folder / "adapter_model.safetensors"), metadata={"format": "pt"})
