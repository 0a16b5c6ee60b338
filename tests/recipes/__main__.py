"""`make recipes`: run the tests of SGLang's own modules with several versions of SGLang.

Each version is installed without its dependencies into build/sglang, and so are the packages that
its modules import (requirements.txt), once. Two versions run at a time. Nothing is skipped: a
version that cannot be installed or a test that cannot run is a failure.
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
from importlib.metadata import version as version_of
from pathlib import Path

from repository import ROOT

FOLDER = ROOT / "build" / "sglang"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
RECORD = ROOT / "benchmarks" / "results" / "sglang_versions.json"
FILES = ("asleep", "draft", "graphs", "hooks", "kv_sizing", "requests", "updates")
CHILDREN = ("dropin",)  # starts processes that import SGLang anew, so only with DEFAULT
HOOKS = "test_the_hooks_attach"
SECONDS = 600  # for an installation, or for one version's tests
WORKERS = 2  # versions at a time; the tests of each use one core, and have time limits
INSTALLING = threading.Lock()  # the versions share a folder of packages

# The published versions from the first with plugins on.
VERSIONS = (
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
)
DEFAULT = ("0.5.11", "0.5.16", "0.5.23")  # the oldest, the one that has run on a GPU, the newest
ABSENT = "this version of SGLang has no "  # the start of a valid reason to skip a test


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="make recipes", description=__doc__)
    parser.add_argument("versions", nargs="*", metavar="VERSION", help=f"default: {DEFAULT}")
    parser.add_argument("--all", action="store_true", help="all published versions")
    parser.add_argument("--write", action="store_true", help=f"the results into {RECORD.name}")
    parser.add_argument("--install", action="store_true", help="install the versions only")
    return parser.parse_args()


def installed(name: str, *what: str) -> Path:
    """Return the folder of that name with packages, which pip installs if it does not exist."""
    target = FOLDER / name
    FOLDER.mkdir(parents=True, exist_ok=True)
    with INSTALLING:
        if target.exists():
            return target
        with tempfile.TemporaryDirectory(dir=FOLDER) as work:
            pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--no-deps"]
            options = ["--disable-pip-version-check", "--only-binary", ":all:", "--target"]
            command = [*pip, *options, f"{work}/made", *what]
            subprocess.run(command, check=True, timeout=SECONDS)
            shutil.rmtree(target, ignore_errors=True)
            os.rename(f"{work}/made", target)
        return target


def folders(version: str) -> list[Path]:
    """Install a version and the packages that it imports, and return their folders."""
    digest = hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:12]
    packages = installed(f"packages-{digest}", "--requirement", str(REQUIREMENTS))
    return [installed(version, f"sglang=={version}"), packages]


def run(version: str) -> dict[str, object]:
    """Run the tests with a version, print their output, and return their results."""
    paths = os.pathsep.join([*map(str, folders(version)), os.environ.get("PYTHONPATH", "")])
    files = (*FILES, *(CHILDREN if version in DEFAULT else ()))
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
                    env={**os.environ, "PYTHONPATH": paths},
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    timeout=SECONDS,
                    check=False,
                ).returncode
            finally:
                output.seek(0)
                print(f"SGLang {version}\n{output.read()}", flush=True)
        if status not in (0, 1, 2):  # 1 and 2: tests failed, or could not be collected
            raise OSError(f"pytest ended with status {status}")
        return results(ElementTree.parse(report).getroot())


def results(report: ElementTree.Element) -> dict[str, object]:
    """Return the results in pytest's report."""
    hooks: dict[str, bool] = {}
    passed, failed, absent = 0, set(), set()
    for case in report.iter("testcase"):
        name = case.get("name", "")
        skipped = case.find("skipped")
        reason = "" if skipped is None else skipped.get("message", "")
        is_bad = case.find("failure") is not None or case.find("error") is not None
        if is_bad or (skipped is not None and not reason.startswith(ABSENT)):
            failed.add(name)
        elif skipped is not None:
            absent.add(reason.removeprefix(ABSENT))
        else:
            passed += 1
        if name.startswith(HOOKS):
            hooks[name.removeprefix(HOOKS)[1:-1]] = not is_bad
    return {"hooks": hooks, "passed": passed, "failed": sorted(failed), "lacks": sorted(absent)}


def write(version: str, result: dict[str, object]) -> None:
    """Replace a version's results in the record."""
    versions = json.loads(RECORD.read_text()) if RECORD.exists() else {}
    made = {"python": platform.python_version(), "torch": version_of("torch")}
    versions[version] = {"date": time.strftime("%Y-%m-%d"), **made, **result}
    in_order = {name: versions[name] for name in VERSIONS if name in versions}
    RECORD.write_text(json.dumps(in_order, indent=2) + "\n")


def main() -> None:
    chosen = arguments()
    versions = VERSIONS if chosen.all else chosen.versions or DEFAULT
    if chosen.install:
        for version in versions:
            folders(version)
        return
    are_bad = False
    with concurrent.futures.ThreadPoolExecutor(WORKERS) as pool:
        for version, running in [(version, pool.submit(run, version)) for version in versions]:
            try:
                result = running.result()
            except (ElementTree.ParseError, OSError, subprocess.SubprocessError) as error:
                print(f"SGLang {version}: {error}", flush=True)
                are_bad = True
                continue
            lacks = f"; SGLang has no {', '.join(result['lacks'])}" if result["lacks"] else ""
            print(f"SGLang {version}: {result['passed']} passed, failed: {result['failed']}{lacks}")
            are_bad |= bool(result["failed"]) or not result["passed"]
            if chosen.write:
                write(version, result)
    if are_bad:
        sys.exit("some tests failed, or could not run")


if __name__ == "__main__":
    main()
