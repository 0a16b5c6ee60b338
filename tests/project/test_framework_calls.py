"""Tests the replay of frameworks' calls and the tables of results, with fake processes."""

import json

import pytest
from repository import ROOT

STAMP = {"gpu": "Some GPU", "versions": {"memsaver": "0.2.0"}, "commit": "0", "date": "2026-11-25"}


class Fake:
    """A fake child process that records requests; its state depends on the training requests."""

    def __init__(self, log, fault=""):
        self.log, self.fault, self.trained, self.loaded = log, fault, 0, None

    def ask(self, do, within=0, **arguments):
        self.log.append((do, arguments.get("call", do), arguments.get("arguments")))
        if arguments.get("call") == "train":
            self.trained += 1
        if do == "begin_update":
            return {"buckets": 2, "single": 3}
        if do == "request":
            return {"names": ["w"], "data": str(self.trained)}
        if do == "load" and self.fault != "loses":
            self.loaded = arguments["data"]
        return {"seconds": 0.001, "checksum": self.loaded, "tokens": []}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def run(benchmark_module, nvidia_smi, monkeypatch, tmp_path):
    """Replay a framework's calls; return the status, the rows and the engine's requests."""
    frameworks = benchmark_module("frameworks")
    calls = benchmark_module("parts.frameworks_calls")
    (tmp_path / calls.LIBRARY).touch()
    log = []
    monkeypatch.setattr(frameworks, "find_spec", lambda module: module)
    monkeypatch.setattr(calls, "used_mib", lambda: 1000.0)
    monkeypatch.setattr(calls, "wait_until_free", lambda idle: None)
    monkeypatch.setattr(calls.results, "stamp", lambda: STAMP)
    monkeypatch.setattr(calls, "why_no_peer", lambda: "")

    def go(only, *arguments, fault=""):
        monkeypatch.setattr(calls, "engine_process", lambda *_, **__: Fake(log, fault))
        monkeypatch.setattr(calls, "trainer_process", lambda *_: Fake([]))
        output = tmp_path / "out.json"
        chosen = [
            "--only=calls",
            f"--calls-only={only}",
            "--calls-rounds=2",
            f"--output={tmp_path}",
        ]
        given = [*chosen, f"--calls-dropin={tmp_path}", f"--calls-output={output}", *arguments]
        status = frameworks.run(frameworks.parser().parse_args(given))
        return status, json.loads(output.read_text()) if output.exists() else [], log

    return go


def test_the_calls_are_those_of_the_list_in_its_order(run, benchmark_module):
    steps = benchmark_module("framework_steps")
    status, rows, log = run("slime", "--no-peer")
    assert status == 0
    slime = steps.FRAMEWORKS["slime"]
    assert [each["step"] for each in rows[0]["steps"]] == [
        str(step) for step in (*slime.start, *slime.round, *slime.round)
    ]
    begin = [call for _, call, _ in log][: log.index(("load", "load", None)) + 3]
    paused = ["flush", "release", "resume", "pause_generation", "flush"]
    assert begin == ["start", *paused, "load", "load", "continue_generation"]
    assert (rows[0]["framework"], rows[0]["gpu"]) == ("slime", "Some GPU")


@pytest.mark.parametrize("framework", ["miles_rematerialize", "xtuner", "lightrft"])
def test_each_list_runs(run, framework):
    status, rows, _ = run(framework)
    assert status == 0
    assert [(row["framework"], row["saver"]) for row in rows] == [
        (framework, "memsaver"),
        (framework, "tms"),
    ]


def test_an_engine_that_keeps_old_weights_is_a_failure_without_a_row(run, capsys):
    status, rows, _ = run("xtuner", fault="loses")
    assert status == 1 and rows == []
    assert "left the engine's weights unchanged" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "reason", "message"),
    [
        (["--calls-dropin=/nowhere"], "", "hook_mode_preload_cu13.abi3.so does not exist"),
        ([], "torch_memory_saver is not installed", "torch_memory_saver is not installed"),
    ],
)
def test_a_missing_package_is_reported_before_an_engine_starts(
    run, benchmark_module, monkeypatch, capsys, arguments, reason, message
):
    monkeypatch.setattr(benchmark_module("parts.frameworks_calls"), "why_no_peer", lambda: reason)
    assert run("xtuner", *arguments) == (1, [], [])
    assert message in capsys.readouterr().err


def test_a_page_shows_the_medians_of_each_call_or_says_that_it_did_not_run(run, benchmark_module):
    pages = benchmark_module("framework_calls_page")
    _, rows, _ = run("xtuner", "--no-peer")
    text = pages.calls(rows, ("xtuner", "lightrft"))
    assert "| `engine: resume(tags=['weights'])` | 1.0 | 1,000 |" in text
    assert "| sum of all releases, pauses and resumes | 3.0 |  |" in text
    assert "medians of 2 rounds, on Some GPU, 2026-11-25 (memsaver 0.2.0)." in text
    assert text.count(pages.NOT_RUN) == text.count(pages.NOT_COMPARED) == 1


def test_a_page_compares_calls_only_on_the_same_kind_of_gpu(run, benchmark_module):
    pages = benchmark_module("framework_calls_page")
    _, (ours, theirs), _ = run("xtuner")
    for step in theirs["steps"]:
        step["seconds"], step["used_MiB"] = 2 * step["seconds"], 1500.0
    text = pages.calls([ours, theirs], ["xtuner"])
    assert "| `engine: resume(tags=['weights'])` | 1.0 | 2.0 | 2.00 | 1,000 | 1,500 |" in text
    assert "| sum of all releases, pauses and resumes | 3.0 | 6.0 | 2.00 |  |  |" in text
    assert pages.NOT_COMPARED not in text
    assert pages.NOT_COMPARED in pages.calls([ours, theirs | {"gpu": "Another"}], ["xtuner"])


README = """\
| [slime](slime.md) | old | 1 |
| [miles](miles.md) | | 2 |
| [verl](verl.md) | | |
| [TRL](trl.md) | old | 3 |
"""


def test_the_readme_lists_what_has_rows(benchmark_module):
    support = benchmark_module("framework_support")
    shown = {"slime": ("slime",), "miles": ("miles", "miles_disk")}
    assert support.rewritten(README, support.cells([], [], shown)).splitlines() == [
        "| [slime](slime.md) | | 1 |",
        "| [miles](miles.md) | | 2 |",
        "| [verl](verl.md) | | |",
        "| [TRL](trl.md) | | 3 |",
    ]
    replayed = [{"framework": name, "saver": "memsaver"} for name in ("slime", "miles_disk")]
    replayed.append({"framework": "miles", "saver": "tms"})
    versions = {"verl": "1", "sglang": "2", "trl": "3", "vllm": "4"}
    detail = {"memsaver_phases": {"step": [1.0] * 5}, "losses": [1.0] * 3}
    metrics = ("verl_step_seconds", "verl_tp2_step_seconds", "trl_step_seconds")
    rows = [{"metric": metric, "versions": versions, "detail": detail} for metric in metrics]
    assert support.rewritten(README, support.cells(rows, replayed, shown)).splitlines() == [
        "| [slime](slime.md) | (its calls, without slime) | 1 |",
        "| [miles](miles.md) | (its calls (`miles_disk`), without miles) | 2 |",
        "| [verl](verl.md) | 1 with SGLang 2: five steps on one GPU; five steps on two GPUs | |",
        "| [TRL](trl.md) | 3 with vLLM 4: 3 steps on one GPU | 3 |",
    ]


def test_the_pages_are_those_of_the_result_files(benchmark_module):
    pages = benchmark_module("framework_calls_page").pages()
    assert {path.name for path in pages} == {
        "README.md",
        "lightrft.md",
        "miles.md",
        "slime.md",
        "xtuner.md",
    }
    for path, text in pages.items():
        assert text == path.read_text(), "make pages"


def test_the_readme_names_the_commits_whose_calls_are_replayed(benchmark_module):
    steps = benchmark_module("framework_steps")
    lines = (ROOT / "README.md").read_text().splitlines()
    for framework in steps.FRAMEWORKS.values():
        repository, _, commit = framework.source.partition(", ")
        (line,) = (line for line in lines if line.startswith(f"| [{repository.split('/')[1]}]("))
        assert commit in line
