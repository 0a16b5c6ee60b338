"""Tests the comparison of two builds (benchmarks/paired.py) with fake child processes."""

import importlib
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

BEFORE_MS, AFTER_MS, LIMIT_MS = 20.0, 10.0, 5.0
COMMIT = "0123456789abcdef"


class Children:
    """A factory of fake child processes, whose builds differ in speed."""

    def __init__(self):
        self.asked = []  # (child, request, arguments), in order
        self.paths = {}  # PYTHONPATH by child
        self.ready, self.most = 0, math.inf  # children that have started, and that can start

    def __call__(self, worker, name, *, label, environment, **settings):
        self.paths[label] = environment["PYTHONPATH"].split(os.pathsep)
        return FakeChild(self, worker, name, label)

    def turns(self, do, **wanted):
        """Return, in order, the child processes that received this request."""
        return [
            child
            for child, request, arguments in self.asked
            if request == do and wanted.items() <= arguments.items()
        ]


class FakeChild:
    def __init__(self, children, worker, library, name):
        self.name, self._children, self._closed = name, children, False
        self._ms = {"before": BEFORE_MS, "after": AFTER_MS, "driver": LIMIT_MS}[name]
        assert library == ("driver" if name == "driver" else "memsaver")
        assert name != "driver" or worker == "parts.discarded:Discarding"

    def ready(self):
        self._children.ready += 1
        if self._children.ready > self._children.most:
            raise importlib.import_module("children").Failed("no memory is left")

    def ask(self, do, **arguments):
        assert not self._closed
        self._children.asked.append((self.name, do, arguments))
        calls = {"pause": self._ms, "resume": self._ms}
        plain = {"plain_out": LIMIT_MS, "plain_in": LIMIT_MS} if arguments.get("plain") else {}
        return {
            "setup": {"bytes": 100},
            "pause": {"pause_ms": self._ms, "freed": 100},
            "resume": {"resume_ms": self._ms},
            "at_once": {"pause_ms": self._ms, "resume_ms": self._ms},
            "first": calls,
            "prepare_plain": {},
            "cycle": calls | plain,
            "turn": {"swap": self._ms, "calls": 1.0, "plain": LIMIT_MS},
            "swap": {"swap": self._ms},
        }[do]

    def close(self):
        self._closed = True

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


WITHOUT_BACKUP = [
    f"{workload}_{call}{suffix}_ms"
    for workload in ("kv_2GiB", "discarded_16GB", "many_10k")
    for suffix in ("", "_at_once")
    for call in ("pause", "resume")
]
WITH_BACKUP = [
    "backed_first_pause_ms",
    *(f"{kind}_{call}_ms" for kind in ("backed_changed", "backed_unchanged", "lora") for call in
      ("pause", "resume")),
]  # fmt: skip
LIMITED = {*WITHOUT_BACKUP, "backed_changed_pause_ms", "backed_changed_resume_ms", "swap_16GB_ms"}


@pytest.fixture
def children(benchmark_module, monkeypatch):
    found = Children()
    monkeypatch.setattr(benchmark_module("parts.paired"), "Child", found)
    return found


@pytest.fixture
def measured(benchmark_module, children, monkeypatch, tmp_path, nvidia_smi):
    """Run the benchmark with fake child processes and return its rows by metric."""
    monkeypatch.setenv("PYTHONPATH", "/inherited")
    paired, output = benchmark_module("paired"), tmp_path / "rows.json"
    monkeypatch.setattr(paired.paired, "check", lambda options: None)
    command = f"paired.py --before {tmp_path}/old --before-commit {COMMIT} --after {tmp_path}/new"
    command += " --kv-gib 2 --swap-gib 2 --cycles 5 --backed-cycles 4 --gap 0 --touch-gib 0"
    monkeypatch.setattr("sys.argv", [*command.split(), "--output", str(output)])
    assert paired.main() == 0
    return {row["metric"]: row for row in json.loads(output.read_text())}


def test_rows_compare_the_current_build_with_the_earlier_one(measured):
    swaps = ["swap_16GB_ms", "swap_2GiB_ms", "swap_2GiB_spaced_ms"]
    assert list(measured) == [*WITHOUT_BACKUP, *WITH_BACKUP, *swaps]
    for metric, row in measured.items():
        assert (row["memsaver"], row["peer_value"], row["ratio"]) == (AFTER_MS, BEFORE_MS, 2.0)
        assert (row["bench"], row["peer"]) == ("paired", "memsaver at 0123456")
        assert row["limit"] == (LIMIT_MS if metric in LIMITED else None), metric
        detail = row["detail"]
        assert len(detail["memsaver"]) == len(detail["peer"]) >= 3
        assert (detail["average"], detail["standard_error"]) == ("trimmed mean", 0.0)


def test_rows_without_a_backup_survive_processes_that_do_not_start(benchmark_module, children):
    paired, failures = benchmark_module("parts.paired"), []
    children.most = 3  # the first set of processes
    options = SimpleNamespace(
        **{"before": Path("/old"), "after": Path("/new"), "before_commit": COMMIT},
        **{"only": ["many"], "cycles": 5, "processes": 3, "kv_gib": 1, "gap": 0},
    )
    found = {row["metric"]: row["detail"] for row in paired.discarded(options, failures)}
    assert list(found) == [metric for metric in WITHOUT_BACKUP if metric.startswith("many")]
    assert {len(detail["peer"]) for detail in found.values()} == {2}
    assert failures == ["no memory is left"] * 2


def test_trimmed_means_have_a_standard_error(benchmark_module):
    """One interrupted cycle of five determines neither the mean nor the error."""
    paired = benchmark_module("parts.paired")
    options = SimpleNamespace(before_commit=COMMIT)
    times = {"before": [9.0, 15.0, 9.0, 900.0, 9.0], "after": [10.0] * 5}
    (row,) = paired.rows(options, "many_10k_pause_ms", times)
    assert (row["peer_value"], row["memsaver"], row["ratio"]) == (11.0, 10.0, 1.1)
    spread = 10.8**0.5  # of 9, 9, 9, 15 and 15
    assert row["detail"]["standard_error"] == round(spread / 0.6 / 5**0.5 / 11, 4)


def test_each_build_runs_in_its_folder_and_the_driver_with_the_current_one(
    measured, children, tmp_path
):
    old, new = str(tmp_path / "old"), str(tmp_path / "new")
    assert children.paths == {
        "before": [old, "/inherited"],
        "after": [new, "/inherited"],
        "driver": [new, "/inherited"],
    }


def test_the_build_that_goes_first_alternates(measured, children):
    pairs = {
        "first pauses": children.turns("first"),
        "cycles": children.turns("cycle", kind="changed"),
        "swaps": children.turns("swap"),
        "backed swaps": children.turns("turn"),
    }
    for what, names in pairs.items():
        turns = list(zip(names[::2], names[1::2], strict=True))
        assert all(set(turn) == {"before", "after"} for turn in turns), what
        assert {turn[0] for turn in turns} == {"before", "after"}, what
    resumed = children.turns("resume", workload="kv")
    assert resumed[:6] == ["before", "after", "driver", "after", "driver", "before"]


def test_cycles_without_a_wait_take_turns_too(measured, children):
    names = children.turns("at_once", workload="kv")
    assert names[:6] == ["before", "after", "driver", "after", "driver", "before"]
    assert len(names) == 15


@pytest.mark.parametrize(
    ("ms", "earlier", "met"),
    [
        (102.0, 100.0, "yes"),
        (104.0, 100.0, "not met"),
        (10.9, 10.0, "yes"),
        (11.2, 10.0, "not met"),
    ],
)
def test_short_calls_may_differ_more_than_copies(benchmark_module, ms, earlier, met):
    rows = benchmark_module("results").measurement("kv_x_ms", [ms], "p", [earlier], bench="paired")
    assert benchmark_module("report").verdict(rows, [rows]) == met


def test_the_page_shows_both_builds(benchmark_module, measured):
    page = benchmark_module("measured_page")
    lines = page.before_and_after([measured["backed_changed_pause_ms"], measured["swap_2GiB_ms"]])
    later = measured["swap_2GiB_ms"]["commit"][:7]
    cells = f"0123456, {later} | 20.0 (20.0 to 20.0) | 10.0 (10.0 to 10.0) | 2.00 ± 0.00"
    words = "later pauses of 16 GB, all contents changed, ms"
    assert lines[-4:-1] == [
        f"| {words} | {cells} | 5.0 |",
        f"| `swap_2GiB_ms` | {cells} |  |",
        "",
    ]
    assert "0 of 2 measurements exceed this limit, none of them" in lines[-1]
    slow = dict(measured["swap_2GiB_ms"], ratio=0.5)
    unsure = dict(measured["backed_changed_pause_ms"], ratio=0.9)
    unsure["detail"] = {**unsure["detail"], "standard_error": 0.1}
    (sentence,) = page.slower([slow, unsure])
    assert "2 of 2 measurements exceed this limit (swap_2GiB_ms; later pauses" in sentence
    assert sentence.endswith("contents changed), 1 of them by more than two standard errors.")


def test_a_build_that_is_not_in_its_folder_is_rejected(benchmark_module, tmp_path):
    paired, folder = benchmark_module("parts.paired"), tmp_path / "old"
    arguments = ["--before", str(folder), "--before-commit", COMMIT]
    options = benchmark_module("paired").parser().parse_args(arguments)
    with pytest.raises(paired.Failed, match=f"imported from .*, not from {folder}"):
        paired.check(options)
    (folder / "memsaver").mkdir(parents=True)
    for name in ("__init__.py", "_C.py"):
        (folder / "memsaver" / name).touch()
    paired.check(options)
    options.after = options.before
    with pytest.raises(paired.Failed, match="both builds are imported from"):
        paired.check(options)
