"""Replay the calls of frameworks' trainers, in their sources' order, in preloaded processes.

The lists are those of benchmarks/framework_steps.py, which a benchmark replays on a GPU.
"""

from __future__ import annotations

import pytest
from repository import ROOT

NAMES = ("slime", "miles", "miles_disk", "miles_rematerialize")
ROUNDS = 3

# The trainer's steps are performed on blocks of the size of parameters, gradients and master
# weights; each training adds one to every byte.
TRAINER = """
import torch

def tensor(byte):
    array = filled(byte, 4 * MIB)  # the granularity of the driver divides it
    return torch.frombuffer(array, dtype=torch.uint8)

class Trainer:
    def __init__(self, tagged):
        self.tagged, self.value, self.others = tagged, 1, used()
        self.masters = tensor(1)
        with saver.region("param_buffer", enable_cpu_backup=False) if tagged else _nothing():
            self.parameters = tensor(1)
        with saver.region("grad_buffer", enable_cpu_backup=False) if tagged else _nothing():
            self.gradients = tensor(0)
        self.copy = self.parameters.clone()

    def pause(self, tag):
        saver.pause(tag)

    def resume(self, tag):
        saver.resume(tag)

    def train(self):
        for kept in (self.masters, self.parameters):
            assert kept.eq(self.value).all()
            kept += 1
        self.gradients.fill_(1)
        self.value += 1
        self.copy = self.parameters.clone()

    def rebuild(self):
        assert not self.parameters.any()  # had no backup
        self.parameters.copy_(self.masters)

    def margin(self):
        saver.memory_margin_bytes = 1 << 30
        assert saver.memory_margin_bytes == 1 << 30

    def exclude(self):
        cdll = saver._impl._binary_wrapper.cdll
        before = cdll.tms_get_interesting_region()
        cdll.tms_set_interesting_region(False)
        assert caller.malloc(MIB) >> 56 == 1  # from the runtime
        cdll.tms_set_interesting_region(before)

    def update(self, source, requests, disabled, pause):
        held = used() - self.others
        assert held == (self.parameters.nbytes if self.tagged else 0), held
        with saver.disable() if disabled else _nothing():
            assert caller.malloc(MIB) >> 56 == 1  # a bucket, which can be sent
            sent = {
                "backup": lambda: saver.get_cpu_backup(self.parameters, zero_copy=True),
                "copy": lambda: self.copy,
                "device": lambda: self.parameters,
            }[source]()
            assert sent.eq(self.value).all()

def _nothing():
    import contextlib
    return contextlib.nullcontext()
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_keeps_its_contents_and_leaves_the_gpu_to_the_engine(
    preloaded, benchmark_module, tmp_path, name
):
    pytest.importorskip("torch")
    steps = benchmark_module("framework_steps")
    framework = steps.FRAMEWORKS[name]
    rounds = [
        [(step.call, dict(step.arguments)) for step in group if step.side != steps.ENGINE]
        for group in (framework.start, *[framework.round] * ROUNDS)
    ]
    preloaded(
        TRAINER
        + f"""
trainer = Trainer({framework.tagged})
for calls in {rounds}:
    for call, arguments in calls:
        getattr(trainer, call)(**arguments)
assert trainer.value == 1 + {ROUNDS}
saver.resume()
assert trainer.masters.eq(trainer.value).all()
assert trainer.parameters.eq(0 if trainer.tagged else trainer.value).all()
""",
        TMS_DISK_BACKUP_DIR=str(tmp_path),
        **framework.trainer,
    )


def test_each_framework_is_described_on_a_page_that_names_its_commit(benchmark_module):
    steps = benchmark_module("framework_steps")
    for name, framework in steps.FRAMEWORKS.items():
        page = {"miles": "slime"}.get(name.partition("_")[0], name)
        text = (ROOT / "docs" / "how-to" / f"{page}.md").read_text()
        commit = framework.source.rpartition(" ")[2]
        assert commit in text, (name, commit)
