"""A small Qwen2.5-VL model with random weights, a tokenizer and an image processor, created
offline.

The tokenizer has a token for each byte and Qwen's special tokens.
"""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
BYTES, VOCABULARY = 256, 512
HIDDEN, HEADS, LAYERS = 256, 4, 2
PATCH, MERGED = 14, 2
IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}"
)


def token_id(special: str) -> int:
    return BYTES + SPECIAL.index(special)


def tokens_of(text: str) -> list[int]:
    """Return a text's tokens, which must equal the saved tokenizer's tokens."""
    tokens: list[int] = []
    while text:
        special = next((name for name in SPECIAL if text.startswith(name)), None)
        if special is not None:
            tokens.append(token_id(special))
            text = text[len(special) :]
        else:
            tokens += text[0].encode()
            text = text[1:]
    return tokens


def config() -> Any:
    from transformers import Qwen2_5_VLConfig

    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "num_key_value_heads": HEADS,
            "max_position_embeddings": 4096,
            "bos_token_id": token_id("<|im_start|>"),
            "eos_token_id": token_id("<|im_end|>"),
            "rope_scaling": {"type": "mrope", "rope_type": "default", "mrope_section": [8, 12, 12]},
        },
        vision_config={
            "depth": 2,
            "hidden_size": HIDDEN,
            "intermediate_size": 2 * HIDDEN,
            "num_heads": HEADS,
            "patch_size": PATCH,
            "spatial_merge_size": MERGED,
            "temporal_patch_size": 2,
            "window_size": 4 * PATCH * MERGED,
            "out_hidden_size": HIDDEN,
            "fullatt_block_indexes": [1],
            "in_channels": 3,
            "in_chans": 3,
        },
        image_token_id=token_id("<|image_pad|>"),
        video_token_id=token_id("<|video_pad|>"),
        vision_start_token_id=token_id("<|vision_start|>"),
        vision_end_token_id=token_id("<|vision_end|>"),
        tie_word_embeddings=False,
        dtype="bfloat16",
    )


def model(seed: int) -> Any:
    """Return the model on the CPU, with weights that depend only on the seed."""
    import torch
    from transformers import Qwen2_5_VLForConditionalGeneration

    made = Qwen2_5_VLForConditionalGeneration(config()).to(torch.bfloat16)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            values = torch.randn(parameter.shape, generator=random)
            if parameter.dim() == 1:
                values = values / 10 + (1 if "norm" in name else 0)
            elif "embed_tokens" not in name:
                values /= parameter[0].numel() ** 0.5
            parameter.copy_(values)
    return made


def processor() -> Any:
    """Return the tokenizer and the image processor."""
    from transformers import Qwen2_5_VLProcessor, Qwen2TokenizerFast, Qwen2VLImageProcessor
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor

    letters = _letters()
    vocabulary = {letter: byte for byte, letter in enumerate(letters)}
    tokenizer = Qwen2TokenizerFast(
        vocab=vocabulary, merges=[], additional_special_tokens=list(SPECIAL[1:])
    )
    tokenizer.chat_template = TEMPLATE
    sizes = {"min_pixels": 4 * 28 * 28, "max_pixels": 64 * 28 * 28}
    return Qwen2_5_VLProcessor(
        image_processor=Qwen2VLImageProcessor(**sizes),
        tokenizer=tokenizer,
        video_processor=Qwen2VLVideoProcessor(**sizes),
        chat_template=TEMPLATE,
    )


def _letters() -> list[str]:
    """Return the characters that represent the bytes in a byte-level vocabulary."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in plain else next(others)) for byte in range(BYTES)]


def save(folder: Path, seed: int) -> None:
    """Save the model and its processor as a checkpoint."""
    model(seed).save_pretrained(folder)
    processor().save_pretrained(folder)


def image(red: int, size: tuple[int, int] = (84, 56)) -> str:
    """Return a picture as a base64 PNG in a data URL, which servers also accept."""
    from PIL import Image

    picture = Image.new("RGB", size, (red, 255 - red, 40))
    picture.paste((red // 2, 200, red), (8, 8, size[0] // 2, size[1] // 2))
    out = io.BytesIO()
    picture.save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
