"""Tests that a scheduler with released memory refuses requests and survives."""

from __future__ import annotations

import dataclasses
import logging
import sys
import types

import fake_sglang
import pytest
from fake_sglang import messages
from scheduler_calls import ask

import memsaver
from memsaver.integrations.engine import moves
from memsaver.integrations.engine.errors import EngineAsleepError
from memsaver.integrations.engine.refusals import asleep_in, asleep_text


@pytest.fixture(params=["0.5.23", "0.5.12"])
def version(request):
    return request.param


def send(engine, *requests):
    """Send requests in one batch; check that the scheduler survives, and return its messages."""
    before = len(engine.sent)
    engine.process_input_requests(requests)
    assert engine.death is None
    return engine.sent[before:]


def state_of(engine):
    """Return the internal state that a scheduler reports."""
    return engine.get_internal_state(None).internal_state


def refusal_in(message):
    """Return the error contained in a message."""
    text = {
        "AbortReq": lambda: message.finished_reason["message"],
        "LoRAUpdateOutput": lambda: message.error_message,
    }.get(type(message).__name__, lambda: message.message)()
    error = asleep_in(text)
    assert error is not None, message
    return error


GENERATIONS = [
    messages.TokenizedGenerateReqInput("a"),
    messages.TokenizedEmbeddingReqInput("a"),
    messages.TokenizedGenerateReqInput("HEALTH_CHECK_1"),
]
UPDATES = [
    messages.UpdateWeightsFromTensorReqInput([]),
    messages.UpdateWeightFromDiskReqInput("path"),
    messages.LoadLoRAAdapterReqInput("adapter"),
]


@pytest.mark.parametrize("request_", GENERATIONS, ids=lambda r: f"{type(r).__name__}-{r.rid}")
def test_a_generation_without_memory_is_refused_with_status_503(engine, request_):
    for tags in (["kv_cache"], ["weights"], ["cuda_graph"], None):
        ask(engine, "release", tags)
        (answer,) = send(engine, request_)
        assert (answer.rid, answer.finished_reason["type"]) == (request_.rid, "abort")
        assert answer.finished_reason["status_code"] == 503
        error = refusal_in(answer)
        assert type(error) is EngineAsleepError and set(error.tags) == set(tags or fake_sglang.TAGS)
        assert isinstance(error, memsaver.InvalidStateError) and error.status == "ENGINE_ASLEEP"
        ask(engine, "resume")
        assert send(engine, request_) == [] and engine.handled[-1] is request_


def test_a_scheduler_keeps_the_policy_of_its_start(engine, policy):
    policy("wake")
    assert state_of(engine)["memsaver"]["when_asleep"] == "refuse"


def test_each_generation_of_a_batch_is_refused(engine):
    ask(engine, "release")
    batch = messages.BatchTokenizedGenerateReqInput(
        [messages.TokenizedGenerateReqInput(rid) for rid in "abc"]
    )
    answers = send(engine, batch)
    assert [answer.rid for answer in answers] == ["a", "b", "c"]
    assert all(refusal_in(answer) for answer in answers)


def test_a_refusal_reaches_a_server_without_a_tokenizer_manager(engine):
    """SGLang 0.5.23's Rust server does not read the socket to the tokenizer manager."""
    frames = []
    engine.rust_server = object()
    engine.send_abort_output = lambda abort, of: frames.append((abort, of))
    ask(engine, "release")
    request = messages.TokenizedGenerateReqInput("a")
    request.input_ids = [5, 6]
    assert send(engine, request) == []
    ((abort, of),) = frames
    assert (abort.rid, set(refusal_in(abort).tags)) == ("a", set(fake_sglang.TAGS))
    assert (of.origin_input_ids, of.cached_tokens, of.reasoning_tokens) == ([5, 6], 0, 0)


@pytest.mark.parametrize("operation", ["release", "resume"])
@pytest.mark.parametrize("rust_server", [None, object()])
def test_only_a_scheduler_without_a_tokenizer_manager_logs_a_failure(
    engine, sim, caplog, operation, rust_server
):
    """Otherwise, the manager logs the failure. SGLang's Rust server has no tokenizer manager."""
    engine.rust_server = rust_server
    if operation == "resume":
        assert ask(engine, "release").failure is None
    with sim.fault("cuMemUnmap" if operation == "release" else "cuMemCreate"):
        failure = ask(engine, operation).failure
    logged = f"a {operation} of memory failed: {failure.message}"
    assert (logged in caplog.messages) == (rust_server is not None)
    assert ask(engine, operation).failure is None


@pytest.mark.parametrize("version", ["0.5.23"])
def test_a_request_whose_image_cannot_be_read_is_refused(engine):
    """SGLang calls the handlers for such requests directly, without its dispatcher."""
    request = messages.TokenizedGenerateReqInput("a")
    ask(engine, "release")
    engine._dispatch_tokenized_mm_requests(request, ["cannot be read"])
    assert request not in engine.handled
    assert refusal_in(engine.sent[-1]).tags
    ask(engine, "resume")
    engine._dispatch_tokenized_mm_requests(request, ["cannot be read"])
    assert engine.handled[-1] is request


def test_a_refused_request_frees_its_images(engine):
    """The images are in memory of the tokenizer manager, whose capacity is limited."""
    freed = []
    image = types.SimpleNamespace(release_transport_proxies=lambda: freed.append(True))
    request = messages.TokenizedGenerateReqInput("a")
    request.mm_inputs = types.SimpleNamespace(mm_items=[image, types.SimpleNamespace()])
    ask(engine, "release")
    send(engine, request)
    assert freed == [True]


def test_a_release_and_a_generation_that_arrive_together_are_handled_in_order(engine):
    release = messages.ReleaseMemoryOccupationReqInput()
    resume = messages.ResumeMemoryOccupationReqInput()
    generations = [messages.TokenizedGenerateReqInput(rid) for rid in "ab"]
    answers = send(engine, release, generations[0], resume, generations[1])
    assert [type(one).__name__ for one in answers] == [
        "ReleaseMemoryOccupationReqOutput",
        "AbortReq",
        "ResumeMemoryOccupationReqOutput",
    ]
    assert generations[0] not in engine.handled and generations[1] in engine.handled


@pytest.mark.parametrize("request_", UPDATES, ids=lambda r: type(r).__name__)
def test_an_update_needs_only_the_weights(engine, request_):
    ask(engine, "release", ["weights"])
    (answer,) = send(engine, request_)
    assert answer.success is False and refusal_in(answer).tags == ("weights",)
    ask(engine, "release", ["kv_cache"])
    ask(engine, "resume", ["weights"])
    if isinstance(request_, messages.LoadLoRAAdapterReqInput):
        return
    send(engine, request_)
    assert engine.handled[-1] is request_
    request = messages.UpdateWeightFromDiskReqInput("path", recapture_cuda_graph=True)
    (answer,) = send(engine, request)  # the new graphs need all memory
    assert answer.success is False and refusal_in(answer).tags == ("kv_cache",)


def test_reads_of_weights_and_remote_calls_are_refused(engine):
    ask(engine, "release", ["kv_cache"])
    (answer,) = send(engine, messages.RpcReqInput("anything"))
    assert answer.success is False and "run anything" in answer.message
    ask(engine, "release")
    (answer,) = send(engine, messages.GetWeightsByNameReqInput("model.norm.weight"))
    assert answer == messages.GetWeightsByNameReqOutput(None)
    ask(engine, "resume")
    (answer,) = send(engine, messages.RpcReqInput("anything"))
    assert answer.success is True


def test_requests_that_need_no_device_memory_pass(engine):
    ask(engine, "release")
    passing = [
        messages.AbortReq("a"),
        messages.GetInternalStateReq(),
        messages.SlowDownReqInput(),
        messages.PauseGenerationReqInput("retract"),
    ]
    send(engine, *passing)
    assert engine.handled[-len(passing) :] == passing


@dataclasses.dataclass
class DrainReqInput:
    """A request type that no known version of SGLang defines."""


@dataclasses.dataclass
class DrainReqOutput:
    success: bool
    message: str


def test_an_unknown_request_passes_only_while_nothing_is_released(engine, monkeypatch, caplog):
    send(engine, DrainReqInput())
    assert engine.handled == [DrainReqInput()]
    ask(engine, "release")
    before = len(engine.handled)
    with caplog.at_level(logging.ERROR, "memsaver.sglang"):
        assert send(engine, DrainReqInput()) == []  # it has no known reply
    assert "DrainReqInput was not processed" in caplog.text
    io_struct = __import__("sglang.srt.managers.io_struct", fromlist=["_"])
    monkeypatch.setattr(io_struct, "DrainReqOutput", DrainReqOutput, raising=False)
    (answer,) = send(engine, DrainReqInput())
    assert answer.success is False and refusal_in(answer)
    assert len(engine.handled) == before


def test_a_flush_succeeds_without_the_cache(engine):
    (answer,) = send(engine, messages.FlushCacheReqInput())
    assert answer.success and engine.flushed == 1
    ask(engine, "release", ["kv_cache"])
    assert engine.flushed == 2  # by the release
    (answer,) = send(engine, messages.FlushCacheReqInput())
    assert answer.success and engine.flushed == 2
    ask(engine, "resume")
    (answer,) = send(engine, messages.FlushCacheReqInput())
    assert answer.success and engine.flushed == 3


@pytest.mark.parametrize("module", ["mm_schedule", "mm_utils"])
def test_a_flush_empties_the_cache_of_image_embeddings(engine, monkeypatch, module):
    cache = {"an image": "its embedding"}
    name = f"sglang.srt.managers.{module}"
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(embedding_cache=cache))
    (answer,) = send(engine, messages.FlushCacheReqInput())
    assert answer.success and engine.flushed == 1 and not cache
    cache["another"] = "its embedding"
    ask(engine, "release", ["kv_cache"])
    assert not cache
    monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(embedding_cache=None))
    ask(engine, "resume")  # a model without images
    (answer,) = send(engine, messages.FlushCacheReqInput())
    assert answer.success


def test_a_continuation_is_postponed_until_the_last_resume(engine):
    send(engine, messages.PauseGenerationReqInput("retract"))
    ask(engine, "release")
    send(engine, messages.ContinueGenerationReqInput())
    assert engine._engine_paused
    send(engine, messages.ResumeMemoryOccupationReqInput(["weights"]))
    assert engine._engine_paused
    send(engine, messages.ResumeMemoryOccupationReqInput())
    assert not engine._engine_paused
    # Another pause replaces the postponed continuation.
    ask(engine, "release")
    send(engine, messages.ContinueGenerationReqInput(), messages.PauseGenerationReqInput("retract"))
    send(engine, messages.ResumeMemoryOccupationReqInput())
    assert engine._engine_paused
    send(engine, messages.ContinueGenerationReqInput())
    assert not engine._engine_paused


def test_requests_are_refused_after_a_failed_resume(engine, sim):
    ask(engine, "release")
    sim.occupy(memsaver.device_memory(0)[0])
    ask(engine, "resume")
    (answer,) = send(engine, messages.TokenizedGenerateReqInput("a"))
    assert set(refusal_in(answer).tags) == set(fake_sglang.TAGS)
    sim.occupy(0)
    ask(engine, "resume")
    assert send(engine, messages.TokenizedGenerateReqInput("a")) == []


def test_a_refusal_is_logged_once_per_kind_and_release(engine, caplog):
    with caplog.at_level(logging.WARNING, "memsaver.sglang"):
        for _ in range(2):
            ask(engine, "release")
            for rid in "abc":
                send(engine, messages.TokenizedGenerateReqInput(rid))
            send(engine, messages.ResumeMemoryOccupationReqInput())
    assert caplog.text.count("TokenizedGenerateReqInput is refused") == 2


@pytest.fixture
def without_graphs(engine, monkeypatch):
    """Capture no graphs with memsaver. A release of all tags names the graphs nevertheless."""
    engine.graph = None
    with monkeypatch.context() as patch:
        patch.setattr(moves, "are_memsavers", lambda tags: list(tags) != ["cuda_graph"])
        yield


def test_graphs_without_memory_do_not_block_requests(engine, without_graphs):
    ask(engine, "release")
    ask(engine, "resume", ["weights", "kv_cache"])
    request = messages.TokenizedGenerateReqInput("a")
    with pytest.raises(RuntimeError, match="illegal"):  # the fake's handler needs every tag
        engine.process_input_requests([request])
    assert engine.handled[-1] is request
    engine.death = None


@pytest.mark.parametrize("is_postponed", [False, True])
def test_graphs_without_memory_do_not_postpone_a_continuation(engine, without_graphs, is_postponed):
    send(engine, messages.PauseGenerationReqInput("retract"))
    ask(engine, "release")
    if is_postponed:
        send(engine, messages.ContinueGenerationReqInput())
        assert engine._engine_paused
    send(engine, messages.ResumeMemoryOccupationReqInput(["weights", "kv_cache"]))
    if not is_postponed:
        send(engine, messages.ContinueGenerationReqInput())
    assert not engine._engine_paused


def test_a_scheduler_without_a_memory_saver_has_no_guard(sglang):
    class Disabled(fake_sglang.Saver):
        enabled = False

    scheduler = sglang.Scheduler(sglang.Updater, saver=Disabled())
    assert scheduler._request_dispatcher == scheduler._dispatch


@pytest.mark.usefixtures("waking")
@pytest.mark.parametrize("server", ["rust", "smg_grpc_mode", "grpc_mode"])
def test_a_server_without_a_tokenizer_manager_neither_waits_nor_wakes(engine, server):
    assert state_of(engine)["memsaver"]["when_asleep"] == "wake"
    if server == "rust":
        engine.rust_server = object()
    else:
        setattr(engine.server_args, server, True)
    assert state_of(engine)["memsaver"]["when_asleep"] == "refuse"


@pytest.mark.parametrize("text", [None, "", "the engine is busy", "the engine is asleep"])
def test_other_texts_are_not_refusals(text):
    assert asleep_in(text) is None


def test_a_refusal_is_found_in_a_longer_text():
    text = asleep_text({"weights", "kv_cache"}, "generate", "or wait")
    error = asleep_in(f"Error: {text}\nmore")
    assert error.tags == ("kv_cache", "weights") and error.tag == "kv_cache"
    assert str(error) == text
