"""Run memsaver in every kind of SGLang engine, and record a row for each kind.

    python benchmarks/sglang_kinds.py [--only dense,moe] [--at-once 4] [--seconds 400]

Requires SGLang, transformers, and an installed memsaver whose plugin SGLang finds. Two engines of
each kind (sglang_kind_table.py) run, each in a separate process, and several engines share a GPU:

    with a backup       starts with a first set of weights. All tags are released and resumed one by
                        one; then a second set is sent between a release and a resume, and then the
                        first set again
    without a backup    starts with the second set. Both sets are sent in the same way

An engine's output after a resume must equal its output before the release, and its output after an
update must equal that of the other engine, which loaded the same weights when it started. Outputs
are equal if all tokens are equal. With a draft model, the number of verifications must also be
equal. For kinds with `reloads`, the output after an update must equal the engine's own output after
the same update without a release.

A kind that fails also gets a row. Kinds that need more GPUs than are visible, and kinds that are
not started within --seconds, are recorded as not run. If the file already contains rows for these
kinds, those rows are preserved instead. Each row is written to --output when its engines have
exited. Progress goes to stderr.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import results
from children import Child, Failed
from engine_process import say
from libraries import OURS
from sglang_engine import environment
from sglang_kind_table import KINDS, Kind

from memsaver._runtime.whole_files import replace_file

RESULTS = results.ROOT / "benchmarks" / "results" / "sglang_kinds.json"
WORKER = "sglang_kind_worker:KindWorker"

START_SECONDS = 200
STEP_SECONDS = 90
FIRST, OTHER = 1, 2  # seeds of weights
MODES = ("abort", "retract", "in_place")

SAME, DIFFERS, FAILED, NOT_RUN = "same", "differs", "failed", "not run"
VERDICTS = ("resumed", "updated", "updated_without_backup")  # keys of a row

Steps = dict[str, dict[str, Any]]


def run_engine(kind: Kind, backup: bool, folder: Path) -> Steps:
    """Run one engine; return its steps' results.

    The error that ended the steps, if any, is under the key "error".
    """
    folder.mkdir(parents=True)
    found: Steps = {}
    step = "start"
    first, other = (FIRST, OTHER) if backup else (OTHER, FIRST)
    variables = {**environment(OURS), **kind.environment}
    variables.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1")
    try:
        with Child(
            WORKER,
            OURS,
            environment=variables,
            cwd=str(folder),
            tree=True,
            kind=kind.name,
            backup=backup,
            seed=first,
            folder=str(folder),
        ) as child:
            child.ready()
            found[step] = child.ask("start", within=START_SECONDS)
            if backup:
                step = "cycle"
                found[step] = child.ask("cycle", within=STEP_SECONDS)
            for step in MODES if backup and kind.pauses else ():
                found[step] = child.ask("pause", within=STEP_SECONDS, mode=step)
            if backup and kind.tiers:
                step = "tier"
                found[step] = child.ask(step, within=STEP_SECONDS)
            seeds = {"update": other, "restore": first} if kind.update else {}
            for name in seeds if kind.reloads else ():
                step = f"awake_{name}"
                found[step] = child.ask("reload", within=STEP_SECONDS, seed=seeds[name])
            for step, seed in seeds.items():
                found[step] = child.ask("update", within=STEP_SECONDS, seed=seed)
            step = "stop"
            child.ask("stop")
    except Failed as error:
        found["error"] = {"step": step, "text": f"{error}", "log": _last_error(folder / "log")}
    return found


def _last_error(log: Path) -> str:
    """Return the last line of a log that names an exception."""
    text = log.read_text(errors="replace") if log.exists() else ""
    lines = [line.strip() for line in text.splitlines() if "server_args=" not in line]
    named = [line for line in lines if "Error: " in line or line.endswith("Error")]
    return named[-1][-400:] if named else ""


def judged(kind: Kind, backed: Steps, plain: Steps) -> dict[str, Any]:
    """Return the row for a kind, from the steps of its two engines."""

    def output(steps: Steps, step: str) -> Any:
        return steps.get(step, {}).get("output")

    first, other = output(backed, "start"), output(plain, "start")
    updated = {
        "updated": (backed, {"update": other, "restore": first}),
        "updated_without_backup": (plain, {"update": first, "restore": other}),
    }
    if kind.reloads:
        for steps, wanted in updated.values():
            wanted.update({step: output(steps, f"awake_{step}") for step in wanted})

    def verdict(steps: Steps, wanted: Mapping[str, Any]) -> str:
        pairs = [(output(steps, step), known) for step, known in wanted.items()]
        if any(found is None or known is None for found, known in pairs):
            return FAILED
        return SAME if all(found == known for found, known in pairs) else DIFFERS

    others = [*(MODES if kind.pauses else ()), *(["tier"] if kind.tiers else ())]
    row: dict[str, Any] = {
        "name": kind.name,
        "gpus": kind.gpus,
        "resumed": verdict(backed, dict.fromkeys(["cycle", *others], first)),
    }
    for name, (steps, wanted) in updated.items() if kind.update else ():
        seen = wanted["update"] is None or wanted["update"] != wanted["restore"]
        row[name] = verdict(steps, wanted) if seen else FAILED
    row |= {
        name: backed["cycle"][name]
        for name in ("release_ms", "resume_ms", "released_MiB")
        if "cycle" in backed
    }
    row["start_s"] = backed.get("start", {}).get("seconds")
    if kind.pauses:
        row["pauses"] = {
            mode: {name: backed[mode][name] for name in ("refused", "tokens")}
            for mode in MODES
            if mode in backed
        }
    if "tier" in backed:
        row["host_tier"] = {name: backed["tier"][name] for name in ("weights", "all")}
    if first and kind.draft:
        tokens, checks = sum(len(line) - 1 for line in first), sum(line[0] for line in first)
        row["tokens_per_verification"] = round(tokens / checks, 2)
    errors = {
        name: steps["error"]
        for name, steps in (("with_backup", backed), ("without_backup", plain))
        if "error" in steps
    }
    if errors:
        row["errors"] = errors
    return row


def measure(kind: Kind, folder: Path) -> dict[str, Any]:
    """Run both engines of a kind, one after the other; return its row."""
    backed = run_engine(kind, True, folder / "backup")
    plain = run_engine(kind, False, folder / "no_backup") if kind.update else {}
    return judged(kind, backed, plain)


class File:
    """The file of results, to which rows are added one at a time."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, threading.Lock()
        self._stamp = results.stamp()

    def add(self, row: dict[str, Any]) -> None:
        """Add a row; replace an earlier row of its kind unless the kind did not run this time."""
        with self._lock:
            rows = {known["name"]: known for known in results.read(self._path)}
            if row["resumed"] == NOT_RUN:
                rows.setdefault(row["name"], row)
            else:
                rows[row["name"]] = {**row, **self._stamp}
            ordered = [rows[kind.name] for kind in KINDS if kind.name in rows]
            text = "[\n" + ",\n".join(map(json.dumps, ordered)) + "\n]\n"
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self._path, text.encode())


def gpus() -> int:
    """Return the number of visible GPUs. Creates no CUDA context."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return len([part for part in visible.split(",") if part.strip()])
    try:
        done = subprocess.run(("nvidia-smi", "-L"), capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return 0
    return len(done.stdout.splitlines())


def run(options: argparse.Namespace) -> int:
    """Run the kinds, and return an exit status, which is 1 if any kind failed."""
    file = File(options.output.resolve())
    end = time.monotonic() + options.seconds
    present = gpus()
    folder = Path(options.logs or tempfile.mkdtemp(prefix="memsaver-kinds-")).resolve()
    alone = threading.Lock()  # kinds that need several GPUs run one at a time

    def one(kind: Kind) -> bool:
        with alone if kind.gpus > 1 else threading.Lock():
            why = f"needs {kind.gpus} GPUs" if kind.gpus > present else ""
            if not why and time.monotonic() > end:
                why = "no time was left"
            if why:
                file.add({"name": kind.name, "gpus": kind.gpus, "resumed": NOT_RUN, "why": why})
                return True
            row = measure(kind, folder / kind.name)
        file.add(row)
        verdicts = {key: row.get(key) for key in VERDICTS}
        say(f"{kind.name}: {verdicts} {row.get('errors', '')}")
        return "errors" not in row and all(value in (SAME, None) for value in verdicts.values())

    with concurrent.futures.ThreadPoolExecutor(options.at_once) as pool:
        fine = list(pool.map(one, [kind for kind in KINDS if kind.name in options.only]))
    return 0 if all(fine) else 1


def kind_names(text: str) -> list[str]:
    """Parse the value of --only."""
    found = [part for part in text.split(",") if part]
    unknown = set(found) - {kind.name for kind in KINDS}
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown kinds: {', '.join(sorted(unknown))}")
    return found


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    every = ",".join(kind.name for kind in KINDS)
    add("--only", type=kind_names, default=every, help=every)
    add("--at-once", type=int, default=4, help="number of kinds that run at the same time")
    add("--seconds", type=float, default=400, help="seconds after which no further kind is started")
    add("--output", type=Path, default=RESULTS)
    add(
        "--logs",
        type=Path,
        help="an empty folder for checkpoints and logs (default: a temporary folder)",
    )
    return made


if __name__ == "__main__":
    sys.exit(run(parser().parse_args()))
