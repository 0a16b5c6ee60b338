"""Train on sums with GRPO, using a trainer and an engine that share their GPUs.

python train.py                                      one GPU
torchrun --nproc-per-node 2 train.py                 two: FSDP2, and the engine with TP=2
python train.py --engine model --model tiny          no GPU: the simulated driver, no SGLang
python train.py --no-sleep --out plain               the same without sleeping, to compare

requirements.txt lists the required packages; missing packages are reported before anything starts.
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
    """Return a function that checks the value of an option."""

    def check(value: str) -> str:
        if value not in names:
            raise typer.BadParameter(f"must be one of {', '.join(names)}, not {value!r}")
        return value

    return check


def results_name(name: Path) -> Path:
    """Check, before the long run, that results can be written; return the file name.

    Raises:
        typer.BadParameter: no files can be created with this name.
    """
    folder = name.parent
    if not folder.is_dir():
        raise typer.BadParameter(f"there is no folder {folder}")
    if not name.name or not os.access(folder, os.W_OK):
        raise typer.BadParameter(f"cannot create a file in {folder}")
    return name


def main(
    engine: Annotated[
        str,
        typer.Option(
            callback=one_of(*ENGINES),
            help="sglang, vllm, or model, which generates with a copy of the model.",
        ),
    ] = DEFAULT.engine,
    sleep: Annotated[
        bool,
        typer.Option(
            "--sleep/--no-sleep", help="Let the trainer and the engine take turns on the GPU."
        ),
    ] = DEFAULT.sleep,
    model: Annotated[
        str,
        typer.Option(
            help="tiny, small or 0.6b, with random weights; or the folder of a Qwen3 model."
        ),
    ] = DEFAULT.model,
    steps: Annotated[int, typer.Option(min=1)] = DEFAULT.steps,
    prompts: Annotated[int, typer.Option(min=1, help="Problems in a step.")] = DEFAULT.prompts,
    samples: Annotated[int, typer.Option(min=2, help="Answers to a problem.")] = DEFAULT.samples,
    largest: Annotated[int, typer.Option(min=0, help="The largest number.")] = DEFAULT.largest,
    answer_tokens: Annotated[int, typer.Option(min=1)] = DEFAULT.answer_tokens,
    temperature: Annotated[float, typer.Option(min=0.01)] = DEFAULT.temperature,
    rate: Annotated[float, typer.Option(min=0, help="The learning rate.")] = DEFAULT.rate,
    clip: Annotated[float, typer.Option(min=0)] = DEFAULT.clip,
    passes: Annotated[int, typer.Option(min=1, help="Passes over a rollout.")] = DEFAULT.passes,
    rows: Annotated[int, typer.Option(min=1, help="Sequences in a forward.")] = DEFAULT.rows,
    seed: Annotated[int, typer.Option(min=0)] = DEFAULT.seed,
    tp: Annotated[int, typer.Option(min=0, help="The engine's ranks; 0: all.")] = DEFAULT.tp,
    memory_fraction: Annotated[
        float,
        typer.Option(
            min=0.01, max=0.95, help="The fraction of the GPU's memory that the engine uses."
        ),
    ] = DEFAULT.memory_fraction,
    attention: Annotated[
        str, typer.Option(help="The engine's attention backend.")
    ] = DEFAULT.attention,
    bucket_mib: Annotated[int, typer.Option(min=1)] = DEFAULT.bucket_mib,
    verify: Annotated[
        str,
        typer.Option(
            callback=one_of(*VERIFY),
            help="The verification of weight updates: off, sampled or full.",
        ),
    ] = DEFAULT.verify,
    out: Annotated[
        Path,
        typer.Option(
            callback=results_name, help="Results are written to this name with .json and .png."
        ),
    ] = Path("grpo"),
    picture: Annotated[
        bool, typer.Option("--picture/--no-picture", help="Draw the results; needs matplotlib.")
    ] = True,
) -> None:
    """Train a small Qwen3 to add, with GRPO and a verifiable reward."""
    given = locals()
    settings = Settings(**{field.name: given[field.name] for field in fields(Settings)})
    try:
        results = start(settings, picture=picture)
    except SettingsError as error:
        raise typer.BadParameter(str(error)) from None
    if results is not None:
        publish(results, out, picture)


def start(
    settings: Settings, servers: Sequence[str] = (), *, picture: bool = False
) -> Results | None:
    """Run the training on this rank. Rank 0 prints the steps and returns the results.

    Args:
        settings: the run's settings.
        servers: URLs of running engines. If the list is empty, an engine is started.
        picture: whether the results will be plotted.

    Raises:
        SettingsError: the run cannot be divided among the ranks, the model does not exist, or a
            required package is not installed.
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
    from requirements import check_installed
    from vocabulary import Vocabulary

    place = take_place(settings.tp)
    settings.check(place.ranks)  # an engine takes minutes to start

    def show(number: int, step: Step) -> None:
        if place.rank == 0:
            print(
                f"step {number}: reward {step.reward:.3f}, right {100 * step.right:.1f} %",
                flush=True,
            )

    own = settings.model in SHAPES
    if not own and not Path(settings.model).is_dir():
        raise SettingsError(
            f"the model must be one of {', '.join(SHAPES)}, or a Qwen3's folder, not "
            f"{settings.model!r}"
        )
    check_installed(settings, picture=picture, started=bool(servers))
    vocabulary = Vocabulary.own() if own else Vocabulary.of_model(Path(settings.model))
    with tempfile.TemporaryDirectory(prefix="grpo-") as folder:
        # Starts the engine first: it measures free GPU memory, so the GPU must be idle.
        engine = make_engine(settings, vocabulary, place, Path(folder), servers)
        try:
            if settings.sleep:
                engine.sleep()
            model = make_model(settings.model, vocabulary, settings.seed, place.device)
            if place.shard_mesh is not None:
                model = shard(model, place.shard_mesh)
            results = run(settings, vocabulary, place, engine, model, show)
        finally:
            engine.close()
    leave_place()
    return results if place.rank == 0 else None


def publish(results: Results, out: Path, picture: bool = True) -> None:
    """Write the results, print the tables, and, if requested and possible, draw the picture."""
    from rich.console import Console
    from tables import draw

    results.save(Path(f"{out}.json"))
    draw(Console(highlight=False), results)
    if not picture:
        return
    try:
        from picture import save_picture
    except ImportError as error:
        print(f"no picture was written: {error} (pip install matplotlib)", file=sys.stderr)
    else:
        save_picture(results, Path(f"{out}.png"))


if __name__ == "__main__":
    # Python's own traceback reports an error, once for each rank.
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    app()
