"""`make fuzz`: fuzzes the C ABI and the environment's options, guided by the core's coverage.

Both targets run concurrently under the address and undefined-behavior sanitizers, for a limited
time. The targets start from tests/fuzz/corpus, which includes inputs that have failed in the past.
If an input fails, the program saves it, prints the command that runs it alone, and exits with 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import reliability
from repository import ROOT, TESTS

from fuzz import builds
from fuzz.builds import TARGETS

CORPUS = TESTS / "fuzz" / "corpus"
FAILED = ROOT / "build" / "fuzz-failed"
LONGEST = 400  # the maximum length of an input, in bytes
MEMORY = "64MiB"  # per device


@dataclass
class Found:
    """The results of a fuzzing target."""

    runs: int
    first: tuple[int, int]  # blocks covered and features, for the initial corpus
    last: tuple[int, int]
    failed: list[Path]
    text: str


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument(
        "--seconds",
        type=int,
        default=60,
        metavar="N",
        help="the total time of both targets, in seconds",
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="libFuzzer's seed; 0: a new seed for each run"
    )
    parser.add_argument("--target", choices=TARGETS, help="run only this target")
    parser.add_argument("--input", type=Path, metavar="FILE", help="run the target with one input")
    parser.add_argument(
        "--keep", type=Path, metavar="FOLDER", help="store new corpus inputs in this folder"
    )
    parser.add_argument(
        "--write", action="store_true", help="write the figures to reliability.json"
    )
    asked = parser.parse_args()
    if asked.input and not asked.target:
        parser.error("--input needs --target")
    return asked


def environment(folder: Path) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    return {
        **kept,
        "MEMSAVER_DRIVER": "sim",
        "MEMSAVER_SIM_DEVICES": "2",
        "MEMSAVER_SIM_MEMORY": MEMORY,
        "TMPDIR": str(folder),  # for backups on disk
        "XDG_RUNTIME_DIR": str(folder),
        # The targets check for leaks themselves. libFuzzer saves an input that aborts.
        "ASAN_OPTIONS": "detect_leaks=0:abort_on_error=1",
        "UBSAN_OPTIONS": "print_stacktrace=1:abort_on_error=1",
    }


def covered(text: str, event: str) -> tuple[int, int]:
    """Return the numbers of blocks and features in libFuzzer's last line with this event."""
    found = re.findall(rf"^#\d+\s+(?:{event})\s+cov: (\d+) ft: (\d+)", text, re.MULTILINE)
    return (int(found[-1][0]), int(found[-1][1])) if found else (0, 0)


def fuzz(program: Path, target: str, seconds: int, seed: int, folder: Path, corpus: Path) -> Found:
    FAILED.mkdir(parents=True, exist_ok=True)
    command = [
        *[str(program), f"-max_total_time={seconds}", f"-seed={seed}", f"-max_len={LONGEST}"],
        *["-timeout=20", "-rss_limit_mb=4096", f"-artifact_prefix={FAILED}/{target}-"],
        *[str(corpus), str(CORPUS / target)],
    ]
    done = subprocess.run(command, env=environment(folder), capture_output=True, cwd=folder)
    text = done.stderr.decode(errors="replace")
    runs = re.findall(r"^#(\d+)\s", text, re.MULTILINE)
    failed = [Path(name) for name in re.findall(r"Test unit written to (.+)", text)]
    if done.returncode and not failed:
        failed = [Path("unknown")]
    return Found(
        int(runs[-1]) if runs else 0, covered(text, "INITED"), covered(text, r"\w+"), failed, text
    )


def main() -> int:
    asked = arguments()
    folder = builds.core()
    targets = [asked.target] if asked.target else list(TARGETS)
    programs = {target: builds.program(folder, target) for target in targets}
    failures = 0
    figures: dict[str, object] = {"seconds": asked.seconds}
    with tempfile.TemporaryDirectory(prefix="memsaver-fuzz-") as name:
        place = Path(name)
        if asked.input:
            command = [str(programs[asked.target]), str(asked.input.resolve())]
            return subprocess.run(command, env=environment(place), cwd=place).returncode
        seconds = max(asked.seconds // len(targets), 1)

        def run(target: str) -> Found:
            corpus = asked.keep / target if asked.keep else place / target
            corpus.mkdir(parents=True, exist_ok=True)
            own = place / f"{target}-files"
            own.mkdir()
            return fuzz(programs[target], target, seconds, asked.seed, own, corpus)

        with concurrent.futures.ThreadPoolExecutor() as pool:
            results = dict(zip(targets, pool.map(run, targets), strict=True))
        for target, found in results.items():
            print(
                f"{target}: {found.runs} inputs in {seconds} s; blocks covered: "
                f"{found.first[0]} -> {found.last[0]}, features: {found.first[1]} -> "
                f"{found.last[1]}; {len(found.failed)} failed"
            )
            for path in found.failed:
                print(found.text[-8000:])
                print(f'alone: make fuzz ARGS="--target {target} --input {path}"')
            sys.stdout.flush()
            failures += len(found.failed) or (found.runs == 0)
            figures[target] = {
                "inputs": found.runs,
                "blocks_before": found.first[0],
                "blocks": found.last[0],
                "features_before": found.first[1],
                "features": found.last[1],
                "failed": len(found.failed),
            }
    if asked.write:
        reliability.record("fuzz", figures)
    print(f"{len(targets) - failures} passed, {failures} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
