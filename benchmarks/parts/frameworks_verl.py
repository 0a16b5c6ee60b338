"""Measure steps of verl's GRPO trainer with an SGLang engine on the same GPUs.

verl releases the engine's memory after each generation, and resumes the weights before the weight
update and the KV cache after it. The same training runs once with memsaver and once with
torch_memory_saver. If the losses, rewards or responses differ, the training with the peer runs a
second time. The measurements are still used if the peer's two runs also differ from each other, and
if memsaver's values of SIZED differ from the peer's by at most `training_differences.FACTOR` times
the difference between the peer's runs. Otherwise, no row is written. No row is written either if
the engine and the trainer seem to have different weights: their probabilities of the responses
differ, with memsaver, by more than MORE times the difference with the peer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import comparison
import results
import runs
import training_differences
import verl_model
import verl_reward
from children import Failed, attempt
from device_memory import DeviceMemory, Peaks
from engine_process import NOISE_MIB, say, used_mib, wait_until_free
from libraries import DEFAULT, OURS, PEERS
from verl_trainer import Found, Settings, Trainer, read

from memsaver._runtime.whole_files import replace_file

BENCH = "frameworks"
PEER = PEERS[DEFAULT]
START_SECONDS = 300  # limit for the start of Ray, the trainer and the engine
STEP_SECONDS = 20
FREE_SECONDS = 60  # limit for the memory of an ended trainer to become free
EXIT_SECONDS = 60  # limit for an interrupted trainer to exit
FLAT_MIB = 64  # limit for the change of the memory in use over cycles of sleep and wake-up
WARM = 5  # cycles after which the memory must be flat
SIZED = ("actor/grad_norm", "critic/score/mean")  # values whose differences are compared in size
COMPARED = ("actor/pg_loss", *SIZED)  # the loss is about 0 unless a response ends early
# verl's mean difference between the engine's and the trainer's probabilities of the responses.
PROBABILITIES = "training/rollout_probs_diff_mean"
ALLOWED = "the largest allowed value"
ENDED = "ended.json"  # conditions of a finished training run, and its peak in MiB
MORE = 2  # the largest allowed ratio to the peer's value of PROBABILITIES
FRACTIONS = (0.6, 0.65, 0.7, 0.75)  # of the GPU's memory, to be tried in this order


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("verl").add_argument
    chosen = runs.part_names(SCENES)
    add("--verl-only", type=chosen, default=["steps"], help=",".join(SCENES))
    add("--verl-steps", type=runs.at_least(2), default=5, help="number of training steps")
    add(
        "--verl-gpus",
        type=runs.at_least(1),
        default=1,
        help="number of GPUs, for FSDP2 and for tensor parallelism",
    )
    add("--verl-fraction", type=float, default=0.5, help="gpu_memory_utilization")
    text = "fractions: gpu_memory_utilization to try, up to the first that fails"
    add("--verl-fractions", type=float, nargs="+", default=FRACTIONS, help=text)
    add("--verl-small", action="store_true", help="use a model with 4 layers, for a quick trial")
    text = "folder for models, logs and results, which remain in it; see frameworks_verl.py"
    add("--verl-folder", type=Path, help=text)
    add(
        "--verl-cycles",
        type=runs.at_least(WARM + 2),
        default=50,
        help="cycles: number of steps, each with a few short responses",
    )


@dataclass(frozen=True)
class Training:
    """A finished training run, with its results and its peak memory use in MiB."""

    found: Found
    peak: float

    def seconds(self, phase: str) -> list[float]:
        """Return verl's own times for a phase, without the first step, which compiles kernels."""
        return [step[f"timing_s/{phase}"] for step in self.found.metrics[1:]]

    @property
    def phases(self) -> dict[str, list[float]]:
        """Return the seconds of all phases of all steps."""
        names = sorted(
            {name for step in self.found.metrics for name in step if "timing_s/" in name}
        )
        return {
            name.removeprefix("timing_s/"): [
                round(step.get(name, 0.0), 4) for step in self.found.metrics
            ]
            for name in names
        }


def settings(options: argparse.Namespace, folder: Path, **changed: Any) -> Settings:
    """Return the settings of a training run, and write its model and its prompts."""
    given = {
        "steps": options.verl_steps,
        "gpus": options.verl_gpus,
        "fraction": options.verl_fraction,
    }
    made = Settings(folder, **(given | changed))
    verl_model.save(folder, small=options.verl_small, prompts=made.prompts)
    return made


def train(name: str, options: argparse.Namespace, chosen: Settings, run: int = 1) -> Training:
    """Train with a memory saver, unless this training run has already finished. Raises Failed.

    `run` distinguishes training runs that have the same settings.
    """
    words = (name, f"{chosen.gpus}gpus", f"{chosen.steps}x{chosen.tokens}", chosen.fraction, run)
    place = chosen.folder / "-".join(map(str, words))
    ran_with = {key: value for key, value in results.stamp().items() if key != "date"}
    peak = peak_of_ended(place, ran_with)
    if peak is None:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        peak = train_in(place, name, options, chosen)
    training = Training(read(name, place), peak)
    if len(training.found.metrics) != chosen.steps:
        raise Failed(f"{name}: verl reported {len(training.found.metrics)} of {chosen.steps} steps")
    replace_file(place / ENDED, json.dumps({"ran_with": ran_with, "peak": peak}).encode())
    say(f"{name}: steps {training.seconds('step')}; cycles {training.found.cycles}")
    say(f"{name}: {training.found.tokens} KV tokens; peak {training.peak} MiB")
    return training


def peak_of_ended(place: Path, ran_with: Mapping[str, Any]) -> float | None:
    """Return the peak, in MiB, of a finished run in this folder under the same conditions."""
    path = place / ENDED
    ended = json.loads(path.read_text()) if path.exists() else {}
    return ended["peak"] if ended.get("ran_with") == ran_with else None


def train_in(place: Path, name: str, options: argparse.Namespace, chosen: Settings) -> float:
    """Train once, and return the peak of the memory in use in MiB. Raises Failed."""
    wait_until_free(options.idle_mib)
    say(f"{name}: training with verl, gpu_memory_utilization={chosen.fraction}")
    begin = time.monotonic()
    peaks = Peaks(DeviceMemory().used)
    with peaks.stage("training"), Trainer(name, chosen, place) as trainer:
        status = trainer.wait(START_SECONDS + STEP_SECONDS * chosen.steps)
        if status != 0:
            raise Failed(f"{name}: verl ended with status {status}; {trainer.log()}")
    say(f"{name}: {time.monotonic() - begin:.0f} s")
    return round(peaks.stages["training"] / (1 << 20), 1)


def differences(one: Found, other: Found) -> list[str]:
    """Describe the values that differ between two runs, such as "step 2: name 1.0, 1.1"."""
    found = []
    for number, (mine, others) in enumerate(zip(one.metrics, other.metrics, strict=True), 1):
        for key in COMPARED:
            if mine[key] != others[key]:
                found.append(f"step {number}: {key} {mine[key]}, {others[key]}")
        if one.responses[number - 1] != other.responses[number - 1]:
            found.append(f"step {number}: responses")
    return found


def steps(
    options: argparse.Namespace, folder: Path, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows for a training run of a few steps."""
    chosen = settings(options, folder)
    ours = train(OURS, options, chosen)
    if not options.peer:
        comparison.show("verl_sleep_wake_seconds", ours.found.cycles)
        comparison.show("verl_step_seconds", ours.seconds("step"))
        return
    theirs = train(DEFAULT, options, chosen)
    if wrong := other_weights(ours.found, theirs.found):
        failures.append(f"verl: {wrong}")
        return
    differing = differences(ours.found, theirs.found)
    again: list[str] = []
    if differing:
        say(f"the training runs differ: {differing}; {PEER} trains once more")
        third = train(DEFAULT, options, chosen, run=2).found
        again = differences(theirs.found, third)
        if not again:
            failures.append(f"verl: two runs of the peer agree, memsaver differs: {differing}")
            return
        metrics = (ours.found.metrics, theirs.found.metrics, third.metrics)
        if larger := training_differences.larger(*metrics, SIZED):
            failures.append(f"verl: {'; '.join(larger)}")
            return
    yield from rows(ours, theirs, prefix(options), differing, again)


def other_weights(ours: Found, theirs: Found) -> str:
    """Return a message if engine and trainer seem to have different weights, otherwise ""."""
    values = [[step[PROBABILITIES] for step in one.metrics] for one in (ours, theirs)]
    mine, others = map(max, values)
    if mine <= MORE * others and not any(map(math.isnan, (*values[0], *values[1]))):
        return ""
    return f"{PROBABILITIES} is {mine:.4g}, with {PEER} {others:.4g}"


def prefix(options: argparse.Namespace) -> str:
    """Return the prefix of the metrics' names."""
    return f"verl_tp{options.verl_gpus}_" if options.verl_gpus > 1 else "verl_"


def rows(
    ours: Training,
    theirs: Training,
    start: str,
    differing: Sequence[str],
    again: Sequence[str],
) -> Iterator[dict[str, Any]]:
    """Yield the rows for two training runs.

    Args:
        ours: the training run with memsaver.
        theirs: the training run with the peer.
        start: the prefix of the metrics' names.
        differing: the differences between these two runs.
        again: the differences between two runs with the peer, if `differing` is not empty.
    """
    values: Mapping[str, tuple[Sequence[float], Sequence[float]]] = {
        "sleep_wake_seconds": (ours.found.cycles, theirs.found.cycles),
        "step_seconds": (ours.seconds("step"), theirs.seconds("step")),
        "update_weights_seconds": (
            ours.seconds("update_weights"),
            theirs.seconds("update_weights"),
        ),
        "peak_MiB": ([ours.peak], [theirs.peak]),
        "kv_tokens": ([ours.found.tokens], [theirs.found.tokens]),
    }
    for metric, (mine, others) in values.items():
        row = results.measurement(
            start + metric,
            mine,
            PEER,
            others,
            bench=BENCH,
            higher_is_better=metric == "kv_tokens",
        )
        if metric == "step_seconds":
            row["detail"] |= {
                "memsaver_phases": ours.phases,
                "peer_phases": theirs.phases,
                "compared": {
                    key: [step[key] for step in ours.found.metrics]
                    for key in (*COMPARED, PROBABILITIES)
                },
                "differences": list(differing),
                "differences_of_the_peer": list(again),
            }
        yield row


def fractions(
    options: argparse.Namespace, folder: Path, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the rows for the largest gpu_memory_utilization with which two steps succeed."""
    largest: dict[str, tuple[float, int]] = {}
    for name in (OURS, DEFAULT) if options.peer else (OURS,):
        for fraction in sorted(options.verl_fractions):
            chosen = settings(options, folder, steps=2, fraction=fraction)
            try:
                training = train(name, options, chosen)
            except Failed as error:
                say(f"{name}: {fraction} does not work: {error}")
                break
            largest[name] = fraction, training.found.tokens
        if name not in largest:
            failures.append(f"{name}: verl does not train with {min(options.verl_fractions)}")
    if len(largest) == 2:
        for place, metric in enumerate(("max_fraction", "max_kv_tokens")):
            yield results.measurement(
                prefix(options) + metric,
                [largest[OURS][place]],
                PEER,
                [largest[DEFAULT][place]],
                bench=BENCH,
                higher_is_better=True,
            )


def cycles(
    options: argparse.Namespace, folder: Path, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield the row for the change in the sleeping engine's memory use over many cycles."""
    changes: dict[str, list[float]] = {}
    for name in (OURS, DEFAULT) if options.peer else (OURS,):
        chosen = settings(
            options, folder, steps=options.verl_cycles, prompts=2, answers=2, tokens=16
        )
        used = train(name, options, chosen).found.sleeping[WARM:]
        bytes_used = [number for number in used if number is not None]
        if not bytes_used:
            raise Failed("NVML did not report the memory in use")
        changes[name] = [(max(bytes_used) - min(bytes_used)) / (1 << 20)]
        say(f"{name}: memory in use asleep changed by {changes[name][0]:.0f} MiB")
    if changes[OURS][0] > FLAT_MIB:
        failures.append(f"verl: the memory in use asleep changed by {changes[OURS][0]:.0f} MiB")
    yield results.measurement(
        prefix(options) + "cycles_change_MiB",
        changes[OURS],
        PEER if options.peer else ALLOWED,
        changes[DEFAULT] if options.peer else [FLAT_MIB],
        bench=BENCH,
    )


def interrupted(
    options: argparse.Namespace, folder: Path, failures: list[str]
) -> Iterator[dict[str, Any]]:
    """Interrupt one training run during a step, and raise an error in a step of another run.

    Both trainers must end. Yields a row with the additional memory in use. Yields no row if a
    process is still running or if more than NOISE_MIB MiB remain in use.
    """
    used: list[float] = []
    for how in ("interrupted", "raises"):
        with attempt(failures):
            used.append(end_early(how, options, folder))
    if len(used) == 2:
        metric = prefix(options) + "left_MiB"
        yield results.measurement(metric, used, ALLOWED, [NOISE_MIB], bench=BENCH)


def end_early(how: str, options: argparse.Namespace, folder: Path) -> float:
    """Interrupt a training run in its second step, or raise an error in a reward.

    Returns:
        The growth of the GPU's memory use since the start, in MiB.

    Raises:
        Failed: the trainer ended without an error, or processes or memory remain.
    """
    variables = {verl_reward.FAILURE: "40"} if how == "raises" else {}
    chosen = settings(options, folder, steps=100, variables=variables)
    wait_until_free(options.idle_mib)
    place = Path(tempfile.mkdtemp(prefix=f"{how}-", dir=folder))
    with Trainer(OURS, chosen, place) as trainer:
        trainer.wait_for_step(1, START_SECONDS + STEP_SECONDS)
        if how == "interrupted":
            time.sleep(0.5)  # within the next step
            trainer.interrupt()
        begin = time.monotonic()
        status = trainer.wait(EXIT_SECONDS)
        say(f"{how}: ended with status {status} after {time.monotonic() - begin:.1f} s")
        say(trainer.log())
        used = leftovers(options, trainer)
    if not status:
        raise Failed(f"verl, {how}: it ended without an error")
    return used


def leftovers(options: argparse.Namespace, trainer: Trainer) -> float:
    """Wait until a trainer's processes exit; return the memory in use (see `end_early`).

    Raises Failed if processes are still running or memory is still in use.
    """
    end = time.monotonic() + FREE_SECONDS
    while True:
        used, left = used_mib() - options.idle_mib, trainer.left()
        if used <= NOISE_MIB and not left:
            say(f"no process is running; {used:.0f} MiB more are in use than at the start")
            return used
        if time.monotonic() > end:
            raise Failed(f"verl: {used:.0f} MiB are still in use; processes running: {left}")
        time.sleep(0.5)


SCENES = {"steps": steps, "fractions": fractions, "cycles": cycles, "interrupted": interrupted}


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows for verl_*."""
    with contextlib.ExitStack() as stack:
        folder = options.verl_folder
        if folder is None:
            made = tempfile.TemporaryDirectory(prefix="memsaver-verl-")
            folder = Path(stack.enter_context(made))
        folder.mkdir(parents=True, exist_ok=True)
        for scene in options.verl_only:
            yield from SCENES[scene](options, folder.resolve(), failures)
