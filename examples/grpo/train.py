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
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from settings import ENGINES, VERIFY, Settings, SettingsError

if TYPE_CHECKING:
    from results import Results, Step

DEFAULT = Settings()


def one_of(*names: str) -> Callable[[str], str]:
    """A check of an option's value."""

    def check(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"{value!r} is none of {', '.join(names)}")
        return value

    return check


def results_name(name: Path) -> Path:
    """The name itself, where results can be written under it: a run takes minutes.

    Raises:
        typer.BadParameter: they cannot.
    """
    folder = name.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}")
    if not name.name or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"no file can be made in {folder}")
    return name


def main(
    engine: Annotated[
        str, typer.Option(callback=one_of(*ENGINES), help="sglang, or model: a copy of it.")
    ] = DEFAULT.engine,
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
    verify: Annotated[
        str, typer.Option(callback=one_of(*VERIFY), help="off, sampled, full.")
    ] = DEFAULT.verify,
    out: Annotated[
        Path,
        typer.Option(
            callback=results_name, help="Where the results go: this name with .json and .png."
        ),
    ] = Path("grpo"),
) -> None:
    """Train a small Qwen3 to add, by GRPO with a reward that is checked."""
    given = locals()
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    try:
        results = start(settings)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    if results is not None:
        publish(results, out)


def start(settings: Settings, servers: Sequence[str] = ()) -> Results | None:
    """One run on this rank. Rank 0 tells of it, and has its results.

    Args:
        settings: of the run.
        servers: URLs of engines that run already; else they are started here.

    Raises:
        SettingsError: the ranks cannot share the run, or there is no such model.
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
    if not own and not Path(settings.model).is_dir():
        raise SettingsError(
            f"the model is one of {', '.join(SHAPES)}, or a Qwen3's folder, not {settings.model!r}"
        )
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

    results.save(Path(f"{out}.json"))
    draw(Console(highlight=False), results)
    try:
        from picture import save_picture
    except ImportError as error:
        print(f"there is no picture: {error} (pip install matplotlib)", file=sys.stderr)
    else:
        save_picture(results, Path(f"{out}.png"))


if __name__ == "__main__":
    # An error of a run is shown as Python shows it, once for each rank.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
