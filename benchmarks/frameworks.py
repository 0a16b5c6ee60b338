"""Measure unmodified training frameworks with and without memsaver.

    python benchmarks/frameworks.py [--only trl,trainer,verl,calls]

Each part trains a small Qwen3 model with random weights in separate processes. The processes run
one after the other, and each has exclusive use of the GPU. The tokenizer is created locally, so no
part needs a network.

Measurements
    trl       TRL's GRPOTrainer with a colocated vLLM in sleep mode: seconds of its sleeps and
              wake-ups, seconds of a step, peak memory; losses, rewards, gradients and responses are
              compared. Needs TRL and vLLM
    trainer   transformers' Trainer whose optimizer, weights and reference model are in tags:
              seconds of their pauses and resumes, and memory in use. Needs transformers
    verl      verl's own trainer with SGLang on the same GPUs: seconds of a release with both
              resumes, of a step and its phases, peak memory, KV tokens; see
              parts/frameworks_verl.py. Needs verl, Ray and SGLang; verl_wheels.py prepares them
    calls     the calls of slime, miles, xtuner and LightRFT, replayed without these frameworks:
              seconds of each call and memory in use; see parts/frameworks_calls.py. Needs SGLang
              and --calls-dropin; writes results/framework_calls.json instead of --output

framework_wheels.py prepares the packages for a machine without a network. Progress goes to stderr.
Prints a table, and merges each row into --output as soon as it exists (see results.py).
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import engine_benchmark
import runs
from parts import frameworks_calls, frameworks_trainer, frameworks_trl, frameworks_verl


@dataclass(frozen=True)
class Part:
    """A part of the benchmark.

    Attributes:
        measure: a function that yields the part's rows.
        add_options: a function that adds the part's options to the command line.
        needs: the modules that must be installed.
    """

    measure: runs.Measure
    add_options: Callable[[argparse.ArgumentParser], None]
    needs: tuple[str, ...]


PARTS: dict[str, Part] = {
    "trl": Part(frameworks_trl.measure, frameworks_trl.add_options, ("trl", "vllm")),
    "trainer": Part(
        frameworks_trainer.measure, frameworks_trainer.add_options, ("transformers", "accelerate")
    ),
    "verl": Part(frameworks_verl.measure, frameworks_verl.add_options, ("verl", "sglang", "ray")),
    "calls": Part(frameworks_calls.measure, frameworks_calls.add_options, ("sglang",)),
}
MEASURES: dict[str, runs.Measure] = {name: part.measure for name, part in PARTS.items()}


def run(options: argparse.Namespace) -> int:
    """Run the selected parts, and return an exit status."""
    return engine_benchmark.run(MEASURES, options, lambda: why_not(options.only))


def why_not(chosen: list[str]) -> str:
    """Return the missing requirements of the chosen parts; "" if there are none."""
    needed = {module for name in chosen for module in PARTS[name].needs}
    missing = sorted(module for module in needed if find_spec(module) is None)
    return f"not installed: {', '.join(missing)}" if missing else ""


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = engine_benchmark.parser(__doc__, MEASURES, wait=0.5, touch_gib=0)
    made.set_defaults(small=True)
    for part in PARTS.values():
        part.add_options(made)
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
