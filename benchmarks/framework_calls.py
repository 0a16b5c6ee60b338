"""Replay the calls of slime, miles, xtuner and LightRFT to their memory saver and to SGLang.

    python benchmarks/framework_calls.py --dropin FOLDER [--only slime,xtuner]

The calls are those of the frameworks' sources, in their order; see framework_steps.py. A small
SGLang engine performs the engine's calls, with memsaver's plugin. A trainer in another process,
preloaded with the library of the package torch_memory_saver, performs the trainer's calls, and
sends its weights to the engine as CUDA IPC handles. FOLDER contains memsaver's package of that name
and memsaver:

    pip install --no-deps --target FOLDER . ./integrations/torch_memory_saver

With --peer, the original torch_memory_saver, which must be importable, also performs the calls.

In each round, the trainer compares all its contents with those of a trainer that never slept. At
the end, a plain trainer that made the same steps sends its weights to the engine: its checksum and
its output must stay the same. Progress goes to stderr; one row for each framework and saver is
merged into --output.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import results
from children import Child, Failed
from engine_model import SMALL, write_config
from engine_process import START_SECONDS, inherited_without, say, used_mib, wait_until_free
from framework_steps import BUCKETS, ENGINE, FRAMEWORKS, TRAINER, Framework, Step, engine
from libraries import DEFAULT, OURS
from runs import part_names
from sglang_engine import DROPPED, engine_process

from memsaver._runtime.whole_files import replace_file

RESULTS = results.ROOT / "benchmarks" / "results" / "framework_calls.json"
LIBRARY = "torch_memory_saver_hook_mode_preload_cu13.abi3.so"  # the first that slime looks for
FRACTION = 0.4
PLAIN_TRAINER = "lightrft"  # a framework whose trainer has no memory saver
CALL_SECONDS = 60


class Replay:
    """An engine and a trainer that perform a framework's calls.

    Args:
        name: the memory saver that the engine and the trainer use.
        framework: the framework's name.
        options: the options of the command line.
        stack: stops the processes.
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
                tokens=options.tokens,
            )
        )
        self.trainer = stack.enter_context(trainer_process(name, framework, options))
        for child in (self.engine, self.trainer):
            child.ask("start", within=START_SECONDS)

    def perform(self, step: Step) -> None:
        """Perform a step, and record its seconds and the memory in use afterwards."""
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
    """Start a trainer, preloaded if the framework preloads its trainers."""
    variables = inherited_without(DROPPED, os.environ)
    given = FRAMEWORKS[framework].trainer
    preload = ""
    if given is not None:
        folder = options.dropin if name == OURS else original()
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
    """Return the folder of the importable torch_memory_saver."""
    found = importlib.util.find_spec("torch_memory_saver")
    if found is None or found.origin is None:
        raise Failed("torch_memory_saver is not installed")
    return Path(found.origin).parent.parent


def replay(name: str, framework: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replay a framework's calls for some rounds, and return the row. Raises Failed."""
    wait_until_free(options.idle_mib)
    say(f"{name}: {framework}")
    with ExitStack() as stack:
        pair = Replay(name, framework, options, stack)
        for step in pair.calls.start:
            pair.perform(step)
        states = []
        for _ in range(options.rounds):
            for step in pair.calls.round:
                pair.perform(step)
            states.append(pair.engine.ask("state", CALL_SECONDS))
        if len({state["checksum"] for state in states}) < options.rounds:
            raise Failed(f"{name}, {framework}: an update left the engine's weights unchanged")
        plain = stack.enter_context(trainer_process(name, PLAIN_TRAINER, options))
        plain.ask("start", within=START_SECONDS)
        for _ in range(options.rounds):
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
        "rounds": options.rounds,
        "steps": pair.steps,
    }


def rows(options: argparse.Namespace, failures: list[str]) -> Iterator[dict[str, Any]]:
    """Yield the rows of the selected frameworks, and add the failures to the list."""
    for framework in options.only:
        for name in (OURS, DEFAULT) if options.peer else (OURS,):
            try:
                yield replay(name, framework, options)
            except (Failed, RuntimeError) as error:
                failures.append(f"{name}, {framework}: {error}")


def merge(path: Path, row: dict[str, Any]) -> None:
    """Write a row into a JSON file, in place of the row of the same framework and saver."""
    key = (row["framework"], row["saver"])
    found = [old for old in results.read(path) if (old["framework"], old["saver"]) != key]
    text = ",\n".join(json.dumps(each) for each in [*found, row])
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, f"[\n{text}\n]\n".encode())


def run(options: argparse.Namespace) -> int:
    """Replay the selected frameworks' calls, and return an exit status."""
    if importlib.util.find_spec("sglang") is None:
        print("SGLang is not installed", file=sys.stderr)
        return 2
    if not (options.dropin / LIBRARY).exists():
        print(f"{options.dropin / LIBRARY} does not exist", file=sys.stderr)
        return 2
    options.dropin, options.output = options.dropin.resolve(), options.output.resolve()
    failures: list[str] = []
    circumstances = results.stamp()
    options.idle_mib = used_mib()
    with tempfile.TemporaryDirectory(prefix="memsaver-calls-") as folder:
        options.model = Path(folder)
        write_config(SMALL, options.model)
        for row in rows(options, failures):
            merge(options.output, row | circumstances)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return 1 if failures else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--dropin", type=Path, required=True, help="folder of memsaver's torch_memory_saver")
    names = ",".join(FRAMEWORKS)
    add("--only", type=part_names(FRAMEWORKS), default=list(FRAMEWORKS), help=names)
    add("--rounds", type=int, default=3, help="rounds of training")
    add("--tokens", type=int, default=65536, help="tokens of the engine's KV cache")
    add("--peer", action="store_true", help="also with the original torch_memory_saver")
    add("--output", type=Path, default=RESULTS)
    made.set_defaults(small=True, wait=0.0, device="cuda")
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
