"""Tests weight updates of an engine with pipeline stages; all stages load before the first
replies.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import rank_processes

pytest.importorskip("torch")

from memsaver.errors import ConfigError
from memsaver.integrations.sglang import pipeline

STAGES = """
import contextlib, datetime, sys, types
import pytest, torch
import torch.distributed as dist
import weight_engine
from pipeline_stages import StageLoop
from rank_calls import gathered
from weight_engine import Model, Output, Request, checkpoint
from weight_requests import payload, verification, weights
from memsaver.integrations.sglang import pipeline, weight_loads
from memsaver.integrations.sglang.protocol import checks_in, text_of
from memsaver.integrations.sglang.scheduler import _update_ranks
torch.multiprocessing.set_sharing_strategy("file_system")
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
RANK = dist.get_rank()
patch = pytest.MonkeyPatch()
hooked = weight_engine.hooked(patch)
Manager = hooked.__enter__()
messages = sys.modules[weight_engine.MESSAGES]
messages.InitWeightsUpdateGroupReqOutput = Output

class StageModel(Model):
    "A stage with one of the two layers; the first one has the embedding."
    def copies(self, name, tensor):
        mine = name.startswith(f"layers.{RANK}.") or (RANK == 0 and name == "embed.weight")
        return super().copies(name, tensor) if mine else []

class Scheduler(StageLoop):
    def __init__(self):
        self.start_loop()
        self.sent = []
        self.waiting_queue, self._engine_paused = [], False
        self.model = StageModel()
        self.updater = Manager(self.model)
        self.updater.scheduler = self
        self.ipc_channels = types.SimpleNamespace(
            send_to_tokenizer=types.SimpleNamespace(send_output=self.reply))

    def reply(self, output, request):
        self.sent.append(output)

    def replies(self):
        "Return the replies since the last call."
        found, self.sent = self.sent, []
        return found

    def process_input_requests(self, requests):
        for name, request in requests:
            output = getattr(self.updater, name)(request)
            if output is not None:
                self.reply(output, request)

scheduler = Scheduler()
assert _update_ranks(scheduler.updater) == 1
Scheduler.hook()
assert _update_ranks(scheduler.updater) == 2
named = weights()

def update(named, damage=0.0, is_verified=True):
    # Each stage has its own payload: the stage's rank is the index.
    text = payload(named)
    update.kept = payload.kept
    rid = text_of(verification(named)) if is_verified else None
    request = Request(rid, gathered(text), load_format="flattened_bucket")
    if damage and RANK == 1:
        update.kept.view(-1)[0] += 1
    return [("update_weights_from_tensor", request)]

# All stages load their parts before the first one replies for all.
scheduler.step([])
scheduler.step(update(named))
(output,) = scheduler.replies()
checks = checks_in(output.message)
assert output.success and [check.rank for check in checks] == [0, 1]
assert all(check.received == len(named) for check in checks)
first, last = (set(check.unused) for check in checks)
assert not first & last and "embed.weight" in last and "layers.0.q.weight" in last
assert sum(check.held for check in checks) == len(named)
layer = getattr(scheduler.model, f"norm_{RANK}")
assert torch.equal(layer.data, checkpoint()[f"layers.{RANK}.norm.weight"])

# A later stage that received other contents fails the update for both.
scheduler.step(update(named, damage=1.0))
(output,) = scheduler.replies()
checks = checks_in(output.message)
assert not output.success and checks[0].damaged == () and checks[1].damaged, checks

# An update without verification fails, too, if a later stage fails.
scheduler.step(update(named, is_verified=False))
scheduler.step(update({**named, "layers.1.q.weight": torch.zeros(3, 3)}, is_verified=False))
good, bad = scheduler.replies()
assert good.success and not bad.success, (good, bad)
assert "exceeds dimension size" in bad.message, bad

# Names that no stage uses and partial tensors fail in all stages.
for extra, text in (
    ({"layer.1.q.weight": torch.zeros(8, 8)}, "the model does not use layer.1.q.weight;"),
    ({"layers.1.q.weight": torch.zeros(12, 8)}, "only a part of layers.1.q.weight was loaded"),
    ({}, "Success"),
):
    scheduler.step(update({**named, **extra}, is_verified=False))
    (output,) = scheduler.replies()
    assert output.success == (not extra) and text in output.message, output
# Only the last update is known to be good.
assert scheduler._memsaver_known_weights == {(name, (*t.shape,)) for name, t in named.items()}

# The stages join a group together, each with its own rank.
joined = []

def join(updater, request):
    joined.append(request.rank_offset)
    group = dist.new_group([0, 1])  # returns only if both stages join at the same time
    dist.barrier(group)
    if RANK == 0 or request.group_name == "good":
        return Output(True, "")
    if request.group_name == "bad":
        return Output(False, "no such host")
    raise RuntimeError("no route to the group")

hook = weight_loads.everywhere("InitWeightsUpdateGroupReqOutput")
scheduler.updater.init_weights_update_group = lambda request: hook(join, scheduler.updater, request)
for name in ("good", "bad", "raises"):
    request = types.SimpleNamespace(rank_offset=1, group_name=name, host=None)
    scheduler.step([("init_weights_update_group", request)])
assert joined == [1 + RANK] * 3
assert [(one.success, one.message) for one in scheduler.replies()] == [
    (True, ""), (False, "no such host"), (False, "RuntimeError: no route to the group")]

# An interrupt or an exit of one stage is the answer of the other one, at once.
for raised in (KeyboardInterrupt, SystemExit):
    def end(updater, request):
        if RANK == 1:
            raise raised
        return Output(True, "")
    scheduler.updater.init_weights_update_group = lambda request: hook(
        end, scheduler.updater, request)
    with pytest.raises(raised) if RANK == 1 else contextlib.nullcontext():
        scheduler.step([("init_weights_update_group", request)])
    replies = [] if RANK == 1 else [(False, f"{raised.__name__}: {raised.__name__}")]
    assert [(one.success, one.message) for one in scheduler.replies()] == replies

# An update waits for the batches in the pipeline.
scheduler.step([], batch="a batch")
scheduler.step(update(named))
for _ in range(2):
    assert scheduler.sent == []
    scheduler.step([])
(output,) = scheduler.replies()
assert output.success, output.message

# It does not wait forever.
patch.setattr(pipeline, "_ROUNDS", 3)
requests = update({**named, "embed.weight": named["embed.weight"] + 1})
for _ in range(2):
    scheduler.step([], batch="a batch")
scheduler.step(requests, batch="a batch")
for _ in range(2):
    assert scheduler.sent == []
    scheduler.step([], batch="a batch")
(output,) = scheduler.replies()
(check,) = checks_in(output.message)
assert not output.success and check.failure.kind == "EngineBusyError", check
assert 'pause="abort"' in check.failure.message
like = checkpoint()["embed.weight"].to(torch.bfloat16)
assert RANK == 1 or torch.equal(scheduler.model.embed.data[:14], like)

scheduler.end_sends()
dist.barrier()
dist.destroy_process_group()
print("fine")
"""


@pytest.mark.timeout(120)
def test_stages_handle_requests_about_weights_together(tmp_path):
    said = rank_processes.run(STAGES, 2, tmp_path, timeout=90)
    assert all("fine" in text for text in said)


@pytest.mark.parametrize("mode", ["prefill", "null"])
def test_stages_with_other_loops_refuse(mode):
    """Without disaggregation, a version of SGLang might lack the hooked methods."""
    scheduler = SimpleNamespace(server_args=SimpleNamespace(disaggregation_mode=mode))
    error = pipeline.defer(scheduler, object(), lambda refusal: refusal, "try again")
    assert isinstance(error, ConfigError) and f"disaggregation_mode={mode}" in str(error)
