"""Replay the calls that slime, miles, xtuner and LightRFT make to their saver and to SGLang.

The calls and their order come from the frameworks' sources; see framework_steps.py. A small SGLang
engine with memsaver's plugin performs the engine's calls. A trainer in another process performs the
trainer's calls, and sends its weights to the engine as CUDA IPC handles. The library of the package
torch_memory_saver is preloaded into the trainer. The folder of --calls-dropin contains memsaver
and memsaver's package torch_memory_saver:

    pip install --no-deps --target FOLDER . ./integrations/torch_memory_saver

Unless --no-peer is given, the original torch_memory_saver also performs the calls.

In each round, the trainer compares all of its contents with those of a trainer that has never
slept. At the end, a plain trainer that has performed the same steps sends its weights to the
engine. The engine's checksum and output must not change. For each framework and saver, a row that
lists all calls is merged into --calls-output.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import results
import runs
from children import Child, Failed
from engine_process import START_SECONDS, inherited_without, say, used_mib, wait_until_free
from framework_steps import BUCKETS, ENGINE, FRAMEWORKS, TRAINER, Framework, Step, engine
from libraries import DEFAULT, OURS
from sglang_engine import DROPPED, engine_process, why_no_peer

from memsaver._runtime.whole_files import replace_file

RESULTS = results.DEFAULT_PATH.with_name("framework_calls.json")
LIBRARY = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"  # the first name that slime looks for
FRACTION = 0.4
PLAIN_TRAINER = "lightrft"  # a framework whose trainer has no memory saver
CALL_SECONDS = 60


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this part."""
    add = parser.add_argument_group("calls").add_argument
    add("--calls-dropin", type=Path, help="the folder of memsaver's torch_memory_saver; required")
    names = ",".join(FRAMEWORKS)
    add("--calls-only", type=runs.part_names(FRAMEWORKS), default=list(FRAMEWORKS), help=names)
    add("--calls-rounds", type=runs.at_least(1), default=3, help="number of training rounds")
    add("--calls-tokens", type=int, default=65536, help="size of the engine's KV cache in tokens")
    add("--calls-output", type=Path, default=RESULTS, help="the file for this part's rows")


class Replay:
    """An engine and a trainer that replay a framework's calls.

    Args:
        name: the memory saver that the engine and the trainer use.
        framework: the framework's name.
        options: the command-line options.
        stack: the exit stack that stops the processes.
    """

    def __init__(
        self, name: str, framework: str, options: argparse.Namespace, stack: ExitStack
    ) -> None:
        self.calls: Framework = FRAMEWORKS[framework]
        self.steps: list[dict[str, Any]] = []
        graphs = {"SGLANG_MEMORY_SAVER_CUDA_GRAPH": "1" if self.calls.graphs else "0"}
        self.engine = stack.enter_context(
            engine_process(
                "framework_engine:CallsWorker",
                name,
                options,
                variables=graphs,
                fraction=FRACTION,
                backup=False,
                tokens=options.calls_tokens,
            )
        )
        self.trainer = stack.enter_context(trainer_process(name, framework, options))
        for child in (self.engine, self.trainer):
            child.ask("start", within=START_SECONDS)

    def perform(self, step: Step) -> None:
        """Perform a step; record its duration in seconds and the memory in use after the step."""
        begin = time.perf_counter()
        if step.side == ENGINE:
            reply = self._engine_call(step)
        elif step.side == TRAINER:
            reply = self.trainer.ask("call", CALL_SECONDS, call=step.call, arguments=step.arguments)
        else:
            self.update(self.trainer, **step.arguments)
            reply = {"seconds": round(time.perf_counter() - begin, 6)}
        self.steps.append({"step": str(step), "seconds": reply["seconds"], "used_MiB": used_mib()})
        say(f"{step}: {reply['seconds']:.4f} s, {self.steps[-1]['used_MiB']:.0f} MiB in use")

    def update(
        self, trainer: Child, source: str, requests: str, disabled: bool, pause: str
    ) -> None:
        """Send a trainer's weights to the engine; see `framework_steps.update`."""
        counts = trainer.ask("begin_update", CALL_SECONDS, source=source, disabled=disabled)
        if pause:
            self._engine_call(engine("pause_generation", mode=pause))
            self._engine_call(engine("flush"))
        count = counts["buckets" if requests == BUCKETS else "single"]
        for number in range(count):
            sent = trainer.ask("request", CALL_SECONDS, number=number, requests=requests)
            self.engine.ask(
                "load",
                CALL_SECONDS,
                names=sent["names"],
                data=sent["data"],
                requests=requests,
                last=number == count - 1,
            )
        trainer.ask("end_update", CALL_SECONDS)
        if pause:
            self._engine_call(engine("continue_generation"))

    def _engine_call(self, step: Step) -> dict[str, Any]:
        return self.engine.ask("call", CALL_SECONDS, call=step.call, arguments=dict(step.arguments))


def trainer_process(name: str, framework: str, options: argparse.Namespace) -> Child:
    """Start a trainer; preload the saver's library if the framework's own trainers preload it."""
    variables = inherited_without(DROPPED, os.environ)
    given = FRAMEWORKS[framework].trainer
    preload = ""
    if given is not None:
        folder = options.calls_dropin if name == OURS else original()
        preload = str(folder / LIBRARY)
        variables |= given | {"TMS_DISK_BACKUP_DIR": str(options.model)}
        if name == OURS:
            variables["PYTHONPATH"] = os.pathsep.join(
                [str(folder), variables.get("PYTHONPATH", "")]
            )
    return Child(
        "framework_trainer:TrainerWorker",
        name,
        environment=variables,
        cwd=str(options.model),
        preload=preload,
        framework=framework,
    )


def original() -> Path:
    """Return the folder from which `torch_memory_saver` is imported."""
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None or found.origin is None:
        raise Failed("torch_memory_saver is not installed")
    return Path(found.origin).parent.parent


def replay(name: str, framework: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replay several rounds of a framework's calls, and return the row. Raises Failed."""
    wait_until_free(options.idle_mib)
    say(f"{name}: {framework}")
    with ExitStack() as stack:
        pair = Replay(name, framework, options, stack)
        for step in pair.calls.start:
            pair.perform(step)
        states = []
        for _ in range(options.calls_rounds):
            for step in pair.calls.round:
                pair.perform(step)
            states.append(pair.engine.ask("state", CALL_SECONDS))
        if len({state["checksum"] for state in states}) < options.calls_rounds:
            raise Failed(f"{name}, {framework}: an update left the engine's weights unchanged")
        plain = stack.enter_context(trainer_process(name, PLAIN_TRAINER, options))
        plain.ask("start", within=START_SECONDS)
        for _ in range(options.calls_rounds):
            plain.ask("call", CALL_SECONDS, call="train", arguments={})
        for step in FRAMEWORKS[PLAIN_TRAINER].start:
            pair.update(plain, **step.arguments)
        if pair.engine.ask("state", CALL_SECONDS) != states[-1]:
            raise Failed(f"{name}, {framework}: the engine differs with a plain trainer's weights")
    return {
        "framework": framework,
        "saver": name,
        "source": pair.calls.source,
        "files": list(pair.calls.files),
        "rounds": options.calls_rounds,
        "steps": pair.steps,
    }


def merge(path: Path, row: dict[str, Any]) -> None:
    """Write a row into a JSON file; replace an earlier row of the same framework and saver."""
    key = (row["framework"], row["saver"])
    found = [old for old in results.read(path) if (old["framework"], old["saver"]) != key]
    text = ",\n".join(json.dumps(each) for each in [*found, row])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"[\n{text}\n]\n".encode())


def measure(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Replay the selected frameworks' calls; write all rows to --calls-output and yield no row."""
    if options.calls_dropin is None:
        raise Failed("calls: --calls-dropin is missing")
    if not (options.calls_dropin / LIBRARY).exists():
        raise Failed(f"calls: {options.calls_dropin / LIBRARY} does not exist")
    if options.peer and (reason := why_no_peer()):
        raise Failed(f"calls: {reason}; use --no-peer")
    options.calls_dropin = options.calls_dropin.resolve()
    circumstances = results.stamp()
    for framework in options.calls_only:
        for name in (OURS, DEFAULT) if options.peer else (OURS,):
            try:
                row = replay(name, framework, options)
            except (Failed, RuntimeError) as error:
                failures.append(f"{name}, {framework}: {error}")
            else:
                merge(options.calls_output, row | circumstances)
    return iter(())
