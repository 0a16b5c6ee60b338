"""Test the replay of frameworks' calls, and the tables of its results, with fake processes."""

import json

import pytest

STAMP = {"gpu": "Some GPU", "versions": {"memsaver": "0.2.0"}, "commit": "0", "date": "2026-11-25"}


class Fake:
    """A child that records the requests; its state follows the trainings that it received."""

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
    _, rows, _ = run("xtuner")
    text = pages.calls(rows, ("xtuner", "lightrft"))
    assert "| `engine: resume(tags=['weights'])` | 1.0 | 1,000 |" in text
    assert "Run on: Some GPU, 2026-11-25, memsaver 0.2.0." in text
    assert text.count(pages.NOT_RUN) == 1


def test_the_pages_are_those_of_the_result_files(benchmark_module):
    pages = benchmark_module("framework_calls_page").pages()
    assert len(pages) == 3
    for path, text in pages.items():
        assert text == path.read_text(), "make pages"
