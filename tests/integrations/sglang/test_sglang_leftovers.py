"""Tests the memory that a scheduler still uses after a release, with fakes of SGLang and NCCL."""

import os
import sys
import types

import pytest
from fake_nccl import FakeNccl
from fake_nvml import Nvml
from scheduler_calls import ask, states

import memsaver
from memsaver.integrations.engine import held, nccl
from memsaver.integrations.engine.communicators import _SPARE
from memsaver.integrations.engine.messages import error_of
from memsaver.integrations.engine.reports import SleepReport, Step
from memsaver.integrations.sglang import leftovers

MIB = 1 << 20
GRAPH = ["cuda_graph"]
WORLD = {"pp_size": 1, "enable_dp_attention": False, "disaggregation_mode": "null"}


@pytest.fixture
def engine(engine):
    engine.server_args = types.SimpleNamespace(**WORLD)
    return engine


@pytest.fixture
def world(engine, monkeypatch, tmp_path):
    """Yield a function that reports whether the scheduler's communicator is usable."""
    fake = FakeNccl()
    one = fake.communicator(tmp_path, "world", (0,), 0, 512 * MIB)
    monkeypatch.setenv("MEMSAVER_SGLANG_SUSPEND_NCCL", "1")
    monkeypatch.setattr(leftovers, "communicators", lambda device: [one])
    yield lambda: fake.is_usable(one)
    fake.set_version(nccl.SINCE)


def test_a_release_of_everything_reports_what_is_left(engine, sim):
    answer = ask(engine, "release", ["weights"])
    assert answer.ranks[0].held == {}
    answer = ask(engine, "release")
    (rank,) = answer.ranks
    assert set(rank.held) == set(held.PARTS) - {"context"}  # NVML does not list this process
    assert rank.held["tags"] == 0 and rank.held["rest"] == sim.physical()
    report = SleepReport((Step("release", answer.tags, 0.1, answer.ranks),), ())
    assert report.held == dict(rank.held)
    assert ask(engine, "resume").ranks[0].held == {}


@pytest.mark.parametrize(
    ("rows", "context"),
    [
        ([("other", 300), ("own", 500)], 500),
        ([("other", 500)], None),  # a container where NVML reports the host's process ids
        ([("own", None)], None),
        ([("own", 1 << 30)], None),  # more than is in use: the id is that of another process
        ([], None),
    ],
)
def test_context_is_the_processs_memory_outside_the_other_parts(
    engine, sim, monkeypatch, rows, context
):
    pids = {"own": os.getpid(), "other": os.getpid() + 1}
    found = [(pids[who], "python3", size and size * MIB) for who, size in rows]
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(found))
    ask(engine, "release")
    total = memsaver.device_memory(0)[1]
    monkeypatch.setattr(memsaver, "device_memory", lambda device: (total - 900 * MIB, total))
    parts = held.measure(0)
    assert parts.get("context") == (context and context * MIB)
    assert parts["rest"] == (900 - (context or 0)) * MIB
    ask(engine, "resume")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml([(pids["own"], "python3", MIB)]))
    assert "context" not in held.measure(0)  # less than the tags' memory


def test_torchs_memory_is_divided_by_owner(engine):
    def segment(address, total, allocated, pool=(0, 0)):
        return {
            "address": address,
            "total_size": total * MIB,
            "allocated_size": allocated * MIB,
            "segment_pool_id": pool,
        }

    assert held.of_segments(
        [
            segment(engine.kv.address, 8, 8, (0, 1)),  # a tag's
            segment(1 << 20, 20, 5),
            segment(2 << 20, 7, 7),
            segment(3 << 20, 2, 1, (0, 3)),
        ]
    ) == {"graphs": 2 * MIB, "tensors": 12 * MIB, "cache": 15 * MIB}


class FakeTorch:
    """A fake of torch that has segments outside tags and records released memory."""

    def __init__(self, *pools):
        self.released = []
        self._segments = [
            {
                "device": 0,
                "address": 1 << 20,
                "total_size": 20 * MIB,
                "allocated_size": 5 * MIB,
                "segment_pool_id": pool,
            }
            for pool in pools
        ]
        self.cuda = types.SimpleNamespace(
            current_device=lambda: 0,
            memory_snapshot=lambda: self._segments,
            empty_cache=lambda: self.released.append("cache"),
        )
        self._C = types.SimpleNamespace(
            _cuda_clearCublasWorkspaces=lambda: self.released.append("workspaces")
        )


@pytest.mark.parametrize(
    ("pools", "settings", "has_graphs", "released"),
    [
        ([(0, 0)], {"disable_cuda_graph": True}, False, ["workspaces", "cache"]),
        ([(0, 0)], {"disable_cuda_graph": True}, True, ["cache"]),  # in a tag
        ([(0, 0), (0, 4)], {"disable_cuda_graph": True}, False, ["cache"]),
        ([(0, 0)], {"disable_cuda_graph": False}, False, ["cache"]),
        ([(0, 0)], {}, False, ["cache"]),
    ],
)
def test_workspaces_whose_addresses_graphs_contain_are_kept(
    engine, monkeypatch, pools, settings, has_graphs, released
):
    torch = FakeTorch(*pools)
    monkeypatch.setattr(held, "torch_with_cuda", lambda: torch)
    vars(engine.server_args).update(settings)
    known = leftovers.moves.are_memsavers
    monkeypatch.setattr(
        leftovers.moves, "are_memsavers", lambda tags: known(tags) and (has_graphs or tags != GRAPH)
    )
    answer = ask(engine, "release")
    assert answer.failure is None and torch.released == released
    assert answer.ranks[0].held["cache"] == 15 * MIB


def test_communicators_are_suspended_while_no_memory_is_mapped(engine, world, sim):
    usable = []
    handle = memsaver.on_resume(lambda tag: usable.append(world()), "weights")
    for has_room in (False, True):
        ask(engine, "release", ["kv_cache"])
        assert world()
        answer = ask(engine, "release")
        assert not world() and answer.ranks[0].held["nccl"] == MIB
        if not has_room:  # for the communicators and the weights at the same time
            sim.occupy(memsaver.device_memory(0)[0] - 512 * MIB - _SPARE)
        assert ask(engine, "resume", ["weights"]).failure is None
        sim.occupy(0)
        # With room for both, a callback runs while the communicators are resumed.
        assert world() and (usable.pop() or has_room) and not usable
        assert ask(engine, "resume").released == () and world()
    handle.remove()
    assert engine.model.is_intact()


@pytest.mark.parametrize("cause", ["no memory", "SGLang's own part", "NCCL"])
def test_a_resume_that_fails_leaves_everything_released(engine, world, sim, monkeypatch, cause):
    ask(engine, "release")
    with monkeypatch.context() as patch:
        if cause == "no memory":
            sim.occupy(memsaver.device_memory(0)[0] - 100 * MIB)
        elif cause == "NCCL":
            failing = nccl.Call("ncclCommResume", lambda: 3)
            patch.setattr(nccl.Nccl, "begin_resume", lambda *_: failing)
        else:
            shape = RuntimeError("another shape")
            patch.setattr(engine.weight_updater, "resume_errors", {"after weights": shape})
        error = error_of([ask(engine, "resume")])
    sim.occupy(0)
    if cause == "no memory":
        assert isinstance(error, memsaver.OutOfDeviceMemoryError) and error.free == 100 * MIB
    elif cause == "NCCL":
        assert "ncclCommResume failed with NCCL's error 3" in str(error)
        assert "free memory" not in str(error)
    else:
        assert "another shape" in str(error)
    assert not world() and set(states().values()) == {"paused"}
    assert ask(engine, "resume").failure is None and world() and engine.model.is_intact()


def of_another_rank(engine, patch):
    gather = leftovers.Group.gather

    def with_another_vote(group, fields):
        others = [{**fields, "suspends": False}] if "suspends" in fields else []
        return [*gather(group, fields), *others]

    patch.setattr(leftovers.Group, "gather", with_another_vote)


def without_a_guard(engine, patch):
    engine.init_request_dispatcher = None
    engine._request_dispatcher = engine._dispatch


def of(**setting):
    return lambda engine, patch: vars(engine.server_args).update(setting)


def of_decided_attention(engine, patch):
    """Set the option as SGLang does automatically: in SGLang's own state, not in the arguments."""
    engine.ps = types.SimpleNamespace(attn_dp_enabled=True)


REASONS = {
    "attention": of(enable_dp_attention=True),
    "attention in 0.5.23": of_decided_attention,
    "stages": of(pp_size=2),
    "disaggregation": of(disaggregation_mode="decode"),
    "elastic": of(elastic_ep_backend="mooncake"),
    "symmetric memory": of(enable_symm_mem=True),
    "recorder": of(expert_distribution_recorder_mode="stat"),
    "unknown settings": lambda engine, patch: delattr(engine, "server_args"),
    "no guard": without_a_guard,
    "not requested": lambda engine, patch: patch.delenv("MEMSAVER_SGLANG_SUSPEND_NCCL"),
    "another rank": of_another_rank,
}


@pytest.mark.parametrize("reason", REASONS)
def test_communicators_that_may_be_used_stay(engine, world, monkeypatch, reason):
    """With some settings, an idle engine's ranks communicate, so other ranks also keep their
    communicators.
    """
    REASONS[reason](engine, monkeypatch)
    assert ask(engine, "release").failure is None
    assert world()


def test_the_memory_of_the_current_device_is_measured(engine, monkeypatch):
    torch, devices = FakeTorch(), []
    torch.cuda.current_device = lambda: 1
    monkeypatch.setattr(held, "torch_with_cuda", lambda: torch)
    monkeypatch.setattr(held, "measure", lambda device, _: devices.append(device) or {})
    assert ask(engine, "release").failure is None and devices == [1]


def test_a_communicator_that_cannot_be_suspended_does_not_fail_the_release(
    engine, world, monkeypatch, caplog
):
    def fail(device):
        raise RuntimeError("torch has changed")

    monkeypatch.setattr(leftovers, "communicators", fail)
    answer = ask(engine, "release")
    assert answer.failure is None and answer.ranks[0].held == {}
    assert "could not suspend all of NCCL's communicators" in caplog.text
    assert "torch has changed" in caplog.text and set(states().values()) == {"paused"}
