"""Tests how the benchmarks of SGLang engines check answers and create rows, without an engine."""

import argparse
import contextlib
import json
from pathlib import Path

import pytest


class FakeServer:
    """A server whose generated number is the length of the prompt. The answer to a path can be
    replaced.

    If the weights are not the initial weights, the generated number is larger by 1000.
    """

    def __init__(self):
        self.answers = {}
        self.received = []
        self.weights = "first"
        self.skips_updates = False

    def is_alive(self):
        return True

    def request(self, path, payload=None, within=60):
        self.received.append(path)
        for key in (path, "stream" if payload and payload.get("stream") else None):
            if self.answers.get(key):
                answer = self.answers[key].pop(0)
                if answer is not None:
                    return answer
        if path == "/generate" and not payload.get("input_ids"):
            return 400, "no prompt"
        if path == "/generate":
            return 200, self._generated(payload)
        if path == "/update_weights_from_disk" and not self.skips_updates:
            self.weights = payload["model_path"]
        statuses = {"/load_lora_adapter": 400, "/no_such_request": 404, "/encode": 400}
        return statuses.get(path, 200), "{}"

    def disconnect(self, path, payload, after):
        self.received.append(f"disconnect {path}")

    def _generated(self, payload):
        prompts = payload["input_ids"]
        more = 1000 if Path(self.weights).name in ("second", "storm-other") else 0
        if isinstance(prompts[0], list):
            return json.dumps([{"output_ids": [len(ids) + more]} for ids in prompts])
        reply = json.dumps({"output_ids": [len(prompts) + more]})
        return f"data: {reply}\n\ndata: [DONE]\n\n" if payload.get("stream") else reply


@pytest.fixture
def server():
    return FakeServer()


@pytest.fixture
def storm(benchmark_module, server):
    made = benchmark_module("parts.sglang_storm").Storm(server, ("first", "second"))
    made.learn()
    return made


def test_right_answers_to_all_kinds_of_requests(storm, server):
    outcomes = {kind: {storm.send(kind, number) for number in range(4)} for kind in storm.kinds}
    assert outcomes.pop("disconnect") == {"disconnected"}
    assert set.union(*outcomes.values()) == {"answered"}
    assert "disconnect /generate" in server.received
    storm.check_end()


@pytest.mark.parametrize(
    ("kind", "path", "answer", "verdict"),
    [
        ("generation", "/generate", (503, "the engine is asleep"), "lost"),
        ("generation", "/generate", (0, "ConnectionResetError"), "lost"),
        ("generation", "/generate", (200, '{"output_ids": [99]}'), "wrong"),
        ("generation", "/generate", (200, "{}"), "wrong"),
        ("generation", "/generate", (500, "an error"), "wrong"),
        ("batch", "/generate", (200, '[{"output_ids": [6]}]'), "wrong"),
        ("stream", "stream", (200, 'data: {"output_ids": [6]}\n\n'), "lost"),
        ("stream", "stream", (200, 'data: {"error": 1}\n\ndata: [DONE]\n\n'), "lost"),
        ("health", "/health", (503, "asleep"), "lost"),
        ("update", "/update_weights_from_disk", (400, "no such file"), "wrong"),
        ("adapter", "/load_lora_adapter", (200, "{}"), "wrong"),
        ("completion", "/v1/completions", (400, "{}"), "wrong"),
        ("embedding", "/encode", (200, "{}"), "wrong"),
        ("flush", "/flush_cache", (400, "no such cache"), "wrong"),
        ("flush", "/flush_cache", (400, "Flush cache failed."), "answered"),  # the server is busy
    ],
)
def test_a_lost_or_a_wrong_answer_is_found(storm, server, kind, path, answer, verdict):
    server.answers[path] = [answer]
    assert storm.send(kind, 0).partition(":")[0] == verdict
    assert storm.send(kind, 0) == "answered"


def test_an_update_is_repeated_while_the_cache_is_in_use(storm, server):
    busy = (400, "the update failed on rank 0 of 1: Cache flush failed after updating weights")
    server.answers["/update_weights_from_disk"] = [busy, busy]
    before = server.received.count("/update_weights_from_disk")
    assert storm.send("update", 0) == "answered"
    assert server.received.count("/update_weights_from_disk") == before + 3


@pytest.mark.parametrize("kind", ["generation", "batch", "stream"])
def test_a_skipped_update_is_found(benchmark_module, storm, server, kind):
    assert storm.send("update", 0) == storm.send(kind, 0) == "answered"
    server.skips_updates = True
    assert storm.send("update", 0) == "answered"
    assert storm.send(kind, 0).startswith("wrong")
    with pytest.raises(benchmark_module("children").Failed, match="after the storm"):
        storm.check_end()


def test_a_generation_during_an_update_may_have_either_weights(storm, server):
    """The server begins the generation either before or after it loads the weights."""
    ask = server.request
    for is_late in (False, True):

        def request(path, payload=None, within=60, is_late=is_late):
            if path != "/generate":
                return ask(path, payload)
            server.request = ask
            early = ask(path, payload)
            assert storm.send("update", 0) == "answered"
            return ask(path, payload) if is_late else early

        server.request = request
        assert storm.send("generation", 0) == "answered"
    assert storm.certain == 0


def test_a_server_with_similar_outputs_cannot_be_measured(benchmark_module, server):
    storm = benchmark_module("parts.sglang_storm").Storm(server, ("first", "second"))
    server.answers["/generate"] = [(200, '{"output_ids": [1]}')] * 20
    with pytest.raises(benchmark_module("children").Failed, match="not usable"):
        storm.learn()


def test_the_rows_of_a_switch(benchmark_module):
    switch, report = benchmark_module("parts.sglang_switch"), benchmark_module("report")
    ours = {
        "switch": [400.0, 500.0, 450.0],
        "new": [24000.0, 25000.0],
        "asleep_MiB": [996.0],
        "held": [{"rest": 1}],
        "lost": [],
    }
    theirs = {"switch": [7000.0], "new": [24000.0], "asleep_MiB": [1016.0], "lost": [3]}
    new = switch.row(ours, switch.NEW, ours, "new")
    peer = switch.row(ours, "torch_memory_saver", theirs, "switch")
    assert (new["memsaver"], new["peer_value"]) == (450.0, 24500.0)
    assert peer["detail"]["memsaver"] == ours["switch"] and peer["ratio"] == pytest.approx(15.5556)
    assert peer["detail"]["peer_changed_outputs"] == [3]
    assert (report.verdict(new, []), report.verdict(peer, [])) == ("", "yes")
    slow = switch.row(ours, "torch_memory_saver", {**theirs, "switch": [1700.0]}, "switch")
    assert report.verdict(slow, []) == "not met"


def test_the_row_of_a_storm_counts_the_answers_of_clients_that_wait(
    benchmark_module, server, tmp_path, monkeypatch
):
    module = benchmark_module("parts.sglang_storm")
    for name in ("wait_until_free", "write_config", "save_checkpoint"):
        monkeypatch.setattr(module, name, lambda *_, **__: None)

    monkeypatch.setattr(module, "serving", lambda *_: contextlib.nullcontext(server))

    def nap(url, send, catch_up, before_waking, naps, requests, seconds):
        send(requests)
        before_waking()
        return naps

    monkeypatch.setattr(module, "nap", nap)
    server.url = ""
    options = argparse.Namespace(
        idle_mib=0, model=tmp_path, output=tmp_path / "out.json", naps=1, requests=60
    )
    options.storm_seconds = 9
    failures = []
    (row,) = module.measure(options, failures)
    detail = row["detail"]
    assert not failures and detail["disconnected"] == detail["kinds"]["disconnect"] > 0
    assert row["memsaver"] == row["peer_value"] == 60 - detail["disconnected"]
    assert detail["held"] >= 0 and detail["without_an_update_meanwhile"] > 0
    assert row["ratio"] == 1.0 and detail["lost"] == detail["wrong"] == 0
