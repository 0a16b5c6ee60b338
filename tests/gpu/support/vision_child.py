"""Runs a scenario on an engine with a vision model; exits with status 0 on success.

usage: vision_child.py SCENARIO FOLDER
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import vision_model
from rollout_child import flushed, greedy, play, rows
from vision_model import IMAGE, image, tokens_of

ONE, TWO = image(200), image(10, (56, 112))
ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "mm_attention_backend": "triton_attn",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "max_total_tokens": 8192,
    "enable_weights_cpu_backup": True,
    "disable_cuda_graph": True,
    "random_seed": 1,
    "log_level": "info",
}
TEXTS = (f"look: {IMAGE} and {IMAGE}, then", "no image at all", f"{IMAGE} what is it?")
IMAGES: tuple[dict[str, Any] | None, ...] = (
    {"image_data": [ONE, TWO]},
    None,
    {"image_data": ONE},
)
TOKENS = 8


def reference(folder: Path, prompt: str, images: list[str], made: list[int]) -> Any:
    """Return the log-probabilities of generated tokens from transformers' own model."""
    import base64
    import io

    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    processor = AutoProcessor.from_pretrained(folder)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16).eval()
    pictures = [Image.open(io.BytesIO(base64.b64decode(one.partition(",")[2]))) for one in images]
    given = processor(text=[prompt], images=pictures or None, return_tensors="pt")
    count = given["input_ids"].shape[1]
    added = torch.tensor([made])
    given["input_ids"] = torch.cat([given["input_ids"], added], 1)
    given["attention_mask"] = torch.ones_like(given["input_ids"])
    if "mm_token_type_ids" in given:
        given["mm_token_type_ids"] = torch.cat(
            [given["mm_token_type_ids"], torch.zeros_like(added)], 1
        )
    with torch.no_grad():
        logits = model(**given).logits[0, count - 1 : -1].float()
    return logits.log_softmax(-1).gather(1, added[0][:, None])[:, 0]


def close_to(found: Any, expected: Any) -> float:
    return float((found - expected).abs().max())


def check_images(engine: Any, prompts: Any, folder: Path) -> list[list[int]]:
    """Check the output for prompts with two images, no image and one image; return the output's
    tokens.
    """
    from memsaver.integrations.rollout import RolloutOutput

    def generated(prompts: Any, images: Any, **options: Any) -> RolloutOutput:
        flushed(engine)
        return engine.generate(prompts, greedy(TOKENS, **options), multimodal=images)

    found, likely = [], []
    for prompt, images in zip(prompts, IMAGES, strict=True):
        output = generated([prompt], [images])
        found += rows(output)
        likely += [float(output.logprobs[0, 0])] * 2
        data = (images or {}).get("image_data", [])
        data = data if isinstance(data, list) else [data]
        text = TEXTS[len(found) - 1]
        off = close_to(output.logprobs[0], reference(folder, text, data, found[-1]))
        print(f"log-probabilities differ by at most {off:.3f} from transformers", flush=True)
        assert off < 0.35, (text, off)
        if data:  # the pictures matter: with others, the model's probabilities differ
            other = close_to(
                output.logprobs[0], reference(folder, text, [image(90)] * len(data), found[-1])
            )
            assert other > 2 * off, (text, off, other)
    together = generated(list(prompts), list(IMAGES), n=2)
    assert together.prompt_index.tolist() == [0, 0, 1, 1, 2, 2]
    assert together.lengths.tolist() == [TOKENS] * 6
    first = together.logprobs[:, 0].tolist()  # in a batch, another token may be as likely
    assert max(abs(a - b) for a, b in zip(first, likely, strict=True)) < 0.35, (first, likely)
    swapped = generated(prompts[:1], [{"image_data": [TWO, ONE]}])
    assert rows(swapped) != found[:1], "the order of the images does not matter"
    return found


def tokens(folder: Path) -> None:
    """Send prompts as token ids to an engine without a tokenizer, before and after weight
    updates.
    """
    import torch
    from safetensors.torch import load_file

    from memsaver.integrations.rollout import RolloutEngine
    from memsaver.integrations.sglang import EngineError

    torch.cuda.set_device(0)
    for seed in (1, 2):
        vision_model.save(folder / str(seed), seed)
    prompts = [tokens_of(text) for text in TEXTS]
    with RolloutEngine.launch(model_path=str(folder / "1"), timeout=240, **ARGUMENTS) as engine:
        first = check_images(engine, prompts, folder / "1")
        with engine.asleep(wait_idle=True):
            pass
        assert check_images(engine, prompts, folder / "1") == first
        engine.sleep(wait_idle=True)
        with engine.staged_wake():
            weights = load_file(folder / "2" / "model.safetensors")
            report = engine.update_weights(
                {name: tensor.cuda() for name, tensor in weights.items()}, verify="full"
            )
        assert report.held == report.tensors == report.received, report
        assert check_images(engine, prompts, folder / "2") != first
        weights = load_file(folder / "1" / "model.safetensors", device="cuda")
        engine.update_weights(weights, verify="full")
        assert check_images(engine, prompts, folder / "1") == first
        try:  # a placeholder without an image
            engine.generate(prompts[:1], greedy(TOKENS), multimodal=[{"image_data": ["no.png"]}])
        except EngineError as error:
            print(f"refused: {str(error)[:200]}", flush=True)
        else:
            raise AssertionError("an image that does not exist was read")
        assert rows(engine.generate(prompts[1:2], greedy(TOKENS))) == first[1:2]


def texts(folder: Path) -> None:
    """Send prompts as text and as token ids to an engine with a tokenizer."""
    import torch

    from memsaver.integrations.rollout import RolloutEngine

    torch.cuda.set_device(0)
    vision_model.save(folder / "1", 1)
    named = {**ARGUMENTS, "skip_tokenizer_init": False}
    with RolloutEngine.launch(model_path=str(folder / "1"), timeout=240, **named) as engine:
        first = check_images(engine, list(TEXTS), folder / "1")
        assert check_images(engine, [tokens_of(text) for text in TEXTS], folder / "1") == first
        with engine.asleep(wait_idle=True):
            pass
        assert check_images(engine, list(TEXTS), folder / "1") == first


SCENES = {"tokens": tokens, "texts": texts}


if __name__ == "__main__":
    play(SCENES)
