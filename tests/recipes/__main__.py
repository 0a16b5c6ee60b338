"""`make recipes`: runs the tests of SGLang's and vLLM's own modules with several versions of each.

Each version is installed without dependencies into build/sglang or build/vllm. The packages that
the version's modules import (the engine's requirements) are installed once. Three versions run at a
time. A version that cannot be installed is a failure. A skipped test is also a failure, unless the
version lacks the tested feature.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from importlib.metadata import version as version_of
from pathlib import Path

from repository import ROOT

HOOKS = "test_the_hooks_attach"
SECONDS = 600  # for an installation, or for one version's tests
WORKERS = 3  # versions at a time; the tests of each use at most one core, and have time limits
INSTALLING = threading.Lock()  # the versions share a folder of packages


@dataclass(frozen=True)
class Engine:
    """An engine whose versions are tested.

    Attributes:
        title: the engine's name in text.
        package: the engine's package name, which is also the name of its folder and files.
        versions: the published versions, from the first version that memsaver supports.
        default: the versions that are tested unless others are requested.
        files: the test files.
        children: test files that run only with the default versions, because they start processes
            that import the engine again, or because they test the fake engine, which simulates
            these versions.
        without: the files of a version to delete, as a pattern for `Path.glob`.
        needs: another engine whose required packages this engine also uses.
    """

    title: str
    package: str
    versions: tuple[str, ...]
    default: tuple[str, ...]
    files: tuple[str, ...]
    children: tuple[str, ...] = ()
    without: str = ""
    needs: Engine | None = None

    @property
    def absent(self) -> str:
        """The beginning of a valid reason for a skipped test."""
        return f"this version of {self.title} has no "

    @property
    def record(self) -> Path:
        """The file with the results."""
        return ROOT / "benchmarks" / "results" / f"{self.package}_versions.json"

    def packages(self) -> list[Path]:
        """Return the folders of the required packages."""
        requirements = Path(__file__).with_name(f"requirements_{self.package}.txt")
        digest = hashlib.sha256(requirements.read_bytes()).hexdigest()[:12]
        target = ROOT / "build" / self.package / f"packages-{digest}"
        found = [installed(target, "--requirement", str(requirements))]
        return [*found, *(self.needs.packages() if self.needs is not None else ())]

    def installed(self, version: str) -> Path:
        """Return the folder of an installed version."""
        target = ROOT / "build" / self.package / version
        return installed(target, f"{self.package}=={version}", without=self.without)


SGLANG = Engine(
    "SGLang",
    "sglang",
    (
        "0.5.11",
        "0.5.12",
        "0.5.12.post1",
        "0.5.13",
        "0.5.13.post1",
        "0.5.14",
        "0.5.15",
        "0.5.15.post1",
        "0.5.16",
        "0.5.17",
        "0.5.18",
        "0.5.19",
        "0.5.20",
        "0.5.21",
        "0.5.22",
        "0.5.23",
    ),
    ("0.5.11", "0.5.16", "0.5.23"),  # the oldest, the one that has run on a GPU, the newest
    (
        "asleep",
        "draft",
        "graphs",
        "hooks",
        "hybrid_pools",
        "kv_sizing",
        "loaders",
        "requests",
        "updates",
    ),
    ("dropin",),
)
VLLM = Engine(
    "vLLM",
    "vllm",
    ("0.26.0", "0.27.0", "0.27.1", "0.28.0", "0.29.0", "0.30.0", "0.31.0", "0.32.0", "0.33.0"),
    ("0.26.0", "0.33.0"),  # the one that has run on a GPU, the newest
    ("vllm", "vllm_asleep", "vllm_clients", "vllm_kept", "vllm_rollout"),
    ("vllm_fake", "vllm_ray"),
    without="vllm/**/*.so",  # they need CUDA's libraries, and vLLM works without them
    needs=SGLANG,
)
ENGINES = {engine.package: engine for engine in (SGLANG, VLLM)}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make recipes", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="versions of the engine")
    parser.add_argument("--engine", choices=ENGINES, help="the engine (default: all engines)")
    parser.add_argument("--all", action="store_true", help="test all published versions")
    parser.add_argument(
        "--write", action="store_true", help="write the results to benchmarks/results"
    )
    parser.add_argument("--install", action="store_true", help="only install the versions")
    chosen = parser.parse_args()
    if chosen.versions and chosen.engine is None:
        parser.error("pass --engine with the versions")
    return chosen


def installed(target: Path, *what: str, without: str = "") -> Path:
    """Return the folder of installed packages; pip creates the folder if it does not exist.

    Args:
        target: the folder.
        what: the packages to install, as arguments of pip.
        without: the files to delete, as a pattern for `Path.glob`; "" deletes no files.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with INSTALLING:
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=target.parent) as work:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            options = ["--disable-pip-version-check", "--only-binary", ":all:", "--target"]
            command = [*pip, *options, f"{work}/made", *what]
            subprocess.run(command, check=True, timeout=SECONDS)
            for path in Path(work, "made").glob(without) if without else ():
                path.unlink()
            shutil.rmtree(target, ignore_errors=True)
            os.rename(f"{work}/made", target)
        return target


def folders(engine: Engine, version: str) -> list[Path]:
    """Install a version and the packages that it imports; return their folders."""
    return [engine.installed(version), *engine.packages()]


def run(engine: Engine, version: str) -> dict[str, object]:
    """Run the tests with a version, print the output, and return the results."""
    paths = [*map(str, folders(engine, version)), os.environ.get("PYTHONPATH", "")]
    files = (*engine.files, *(engine.children if version in engine.default else ()))
    tests = [str(Path(__file__).with_name(f"test_recipe_{name}.py")) for name in files]
    with tempfile.TemporaryDirectory() as work:
        report = Path(work) / "report.xml"
        options = ["-q", "-m", "recipes", "-W", "ignore", f"--junitxml={report}"]
        options += [f"--timeout={SECONDS}"]  # the first test imports, and so compiles, all modules
        with (Path(work) / "output").open("w+") as output:
            try:
                status = subprocess.run(
                    [sys.executable, "-m", "pytest", *options, *tests],
                    cwd=ROOT,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=SECONDS,
                    check=False,
                ).returncode
            finally:
                output.seek(0)
                print(f"{engine.title} {version}\n{output.read()}", flush=True)
        if status not in (0, 1, 2):  # 1 and 2: tests failed, or could not be collected
            raise OSError(f"pytest ended with status {status}")
        return results(ElementTree.parse(report).getroot(), engine.absent)


def results(report: ElementTree.Element, absence: str) -> dict[str, object]:
    """Return the results from pytest's report."""
    hooks: dict[str, bool] = {}
    passed, failed, absent = 0, set(), set()
    for case in report.iter("testcase"):
        name = case.get("name", "")
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "")
        is_bad = case.find("failure") is not None or case.find("error") is not None
        if is_bad or (skipped is not None and not reason.startswith(absence)):
            failed.add(name)
        elif skipped is not None:
            absent.add(reason.removeprefix(absence))
        else:
            passed += 1
        if name.startswith(HOOKS):
            hooks[name.removeprefix(HOOKS)[1:-1]] = not is_bad
    return {"hooks": hooks, "passed": passed, "failed": sorted(failed), "lacks": sorted(absent)}


def write(engine: Engine, version: str, result: dict[str, object]) -> None:
    """Replace a version's results in the engine's record."""
    versions = json.loads(engine.record.read_text()) if engine.record.exists() else {}
    made = {"python": platform.python_version(), "torch": version_of("torch")}
    versions[version] = {"date": time.strftime("%Y-%m-%d"), **made, **result}
    in_order = {name: versions[name] for name in engine.versions if name in versions}
    engine.record.write_text(json.dumps(in_order, indent=2) + "\n")


def main() -> None:
    chosen = arguments()
    engines = list(ENGINES.values()) if chosen.engine is None else [ENGINES[chosen.engine]]
    work = [
        (engine, version)
        for engine in engines
        for version in (engine.versions if chosen.all else chosen.versions or engine.default)
    ]
    if chosen.install:
        for engine, version in work:
            folders(engine, version)
        return
    are_bad = False
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for engine, version, running in [(*one, pool.submit(run, *one)) for one in work]:
            name = f"{engine.title} {version}"
            try:
                result = running.result()
            except (ElementTree.ParseError, OSError, subprocess.SubprocessError) as error:
                print(f"{name}: {error}", flush=True)
                are_bad = True
                continue
            lacks = f"; it has no {', '.join(result['lacks'])}" if result["lacks"] else ""
            print(f"{name}: {result['passed']} passed, failed: {result['failed']}{lacks}")
            are_bad |= bool(result["failed"]) or not result["passed"]
            if chosen.write:
                write(engine, version, result)
    if are_bad:
        sys.exit("some tests failed, or could not run")


if __name__ == "__main__":
    main()
