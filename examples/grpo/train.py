"""GRPO on sums, with a trainer and an engine that share their GPUs.

python train.py                                      one GPU
torchrun --nproc-per-node 2 train.py                 two: FSDP2, and the engine with TP=2
python train.py --engine model --model tiny          no GPU: the simulated driver, no SGLang
python train.py --no-sleep --out plain               the same without sleeping, to compare
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from settings import Settings

if TYPE_CHECKING:
    from results import Results, Step

DEFAULT = Settings()


def main(
    engine: Annotated[str, typer.Option(help="sglang, or model: a copy of it.")] = DEFAULT.engine,
    sleep: Annotated[
        bool, typer.Option("--sleep/--no-sleep", help="Give each other the memory.")
    ] = DEFAULT.sleep,
    model: Annotated[
        str, typer.Option(help="tiny, small, 0.6b (random weights), or a Qwen3's folder.")
    ] = DEFAULT.model,
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    prompts: Annotated[int, typer.Option(min=1, help="Problems of a step.")] = DEFAULT.prompts,
    samples: Annotated[int, typer.Option(min=2, help="Answers to each.")] = DEFAULT.samples,
    largest: Annotated[int, typer.Option(min=0, help="Largest number.")] = DEFAULT.largest,
    answer_tokens: Annotated[int, typer.Option(min=1)] = DEFAULT.answer_tokens,
    temperature: Annotated[float, typer.Option(min=0.01)] = DEFAULT.temperature,
    rate: Annotated[float, typer.Option(min=0, help="Learning rate.")] = DEFAULT.rate,
    clip: Annotated[float, typer.Option(min=0)] = DEFAULT.clip,
    passes: Annotated[int, typer.Option(min=1, help="Per rollout.")] = DEFAULT.passes,
    rows: Annotated[int, typer.Option(min=1, help="Sequences of a forward.")] = DEFAULT.rows,
    seed: Annotated[int, typer.Option(min=0)] = DEFAULT.seed,
    tp: Annotated[int, typer.Option(min=0, help="The engine's ranks; 0: all.")] = DEFAULT.tp,
    memory_fraction: Annotated[
        float, typer.Option(min=0.01, max=0.95, help="Of the GPU, for the engine.")
    ] = DEFAULT.memory_fraction,
    attention: Annotated[str, typer.Option(help="The engine's backend.")] = DEFAULT.attention,
    bucket_mib: Annotated[int, typer.Option(min=1)] = DEFAULT.bucket_mib,
    verify: Annotated[str, typer.Option(help="off, sampled, full.")] = DEFAULT.verify,
    out: Annotated[
        Path, typer.Option(help="Where the results go: this name with .json and .png.")
    ] = Path("grpo"),
) -> None:
    """Train a small Qwen3 to add, by GRPO with a reward that is checked."""
    given = locals()
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    results = start(settings)
    if results is not None:
        publish(results, out)


def start(settings: Settings, servers: Sequence[str] = ()) -> Results | None:
    """One run on this rank. Rank 0 tells of it, and has its results.

    Args:
        settings: of the run.
        servers: URLs of engines that run already; else they are started here.

    Raises:
        ValueError: the ranks cannot share the run.
    """
    if settings.engine == "model" and not os.path.exists("/dev/nvidiactl"):
        os.environ.setdefault("MEMSAVER_DRIVER", "sim")
    # Before torch starts CUDA, and after the driver is chosen.
    from determinism import make_deterministic

    make_deterministic(settings.seed)
    from engines import make_engine
    from loop import run
    from places import leave_place, take_place
    from policy_model import SHAPES, make_model, shard
    from vocabulary import Vocabulary

    place = take_place(settings.tp)
    settings.check(place.ranks)  # an engine takes minutes to start

    def tell(number: int, step: Step) -> None:
        if place.rank == 0:
            print(
                f"step {number}: reward {step.reward:.3f}, right {100 * step.right:.1f} %",
                flush=True,
            )

    own = settings.model in SHAPES
    vocabulary = Vocabulary.own() if own else Vocabulary.of_model(Path(settings.model))
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        # The engine first: what it takes of the GPU, it measures while nobody else is there.
        engine = make_engine(settings, vocabulary, place, Path(folder), servers)
        try:
            if settings.sleep:
                engine.sleep()
            model = make_model(settings.model, vocabulary, settings.seed, place.device)
            if place.shard_mesh is not None:
                model = shard(model, place.shard_mesh)
            results = run(settings, vocabulary, place, engine, model, tell)
        finally:
            engine.close()
    leave_place()
    return results if place.rank == 0 else None


def publish(results: Results, out: Path) -> None:
    """Write the results, show the tables, and write the picture, for which matplotlib is needed."""
    from rich.console import Console
    from tables import draw

    results.save(out.with_suffix(".json"))
    draw(Console(highlight=False), results)
    try:
        from picture import save_picture
    except ImportError as error:
        print(f"there is no picture: {error} (pip install matplotlib)", file=sys.stderr)
    else:
        save_picture(results, out.with_suffix(".png"))


if __name__ == "__main__":
    typer.run(main)
