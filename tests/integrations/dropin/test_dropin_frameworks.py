"""Replays the calls of frameworks' trainers in preloaded processes, in the order of the frameworks'
sources.

The calls are listed in benchmarks/framework_steps.py, and a benchmark replays them on a GPU.
"""

import pytest
from repository import ROOT

# The trainers of a process have the same variables.
PROCESSES = {"host": ("slime", "miles", "miles_rematerialize"), "disk": ("miles_disk",)}
ROUNDS = 3
REPEATED = ("pause", "resume")  # in the last round, as if a step had begun again

# The trainer's steps are performed on blocks of the size of parameters, gradients and master
# weights; each training adds one to every byte.
TRAINER = """
import contextlib
import torch

def tensor(byte):
    array = filled(byte, 4 * MIB)  # the granularity of the driver divides it
    return torch.frombuffer(array, dtype=torch.uint8)

class Trainer:
    def __init__(self, tagged):
        self.tagged, self.value, self.others = tagged, 1, used()
        self.pause, self.resume = saver.pause, saver.resume
        self.masters = tensor(1)
        with saver.region("param_buffer") if tagged else contextlib.nullcontext():
            self.parameters = tensor(1)
        with saver.region("grad_buffer") if tagged else contextlib.nullcontext():
            self.gradients = tensor(0)
        self.copy = self.parameters.clone()

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
        with saver.disable() if disabled else contextlib.nullcontext():
            assert caller.malloc(MIB) >> 56 == 1  # a bucket, which can be sent
            sent = {
                "backup": lambda: saver.get_cpu_backup(self.parameters, zero_copy=True),
                "copy": lambda: self.copy,
                "device": lambda: self.parameters,
            }[source]()
            assert sent.eq(self.value).all()

def train(tagged, rounds):
    trainer = Trainer(tagged)
    for calls in rounds:
        for call, arguments in calls:
            getattr(trainer, call)(**arguments)
    assert trainer.value == len(rounds)
    saver.resume()
    assert trainer.masters.eq(trainer.value).all()
    assert trainer.parameters.eq(0 if trainer.tagged else trainer.value).all()

def train_in_fork(name, *arguments):
    child = os.fork()  # which need not import torch
    if child == 0:
        status = 1
        try:
            train(*arguments)
            status = 0
        finally:
            if status:
                sys.excepthook(*sys.exc_info())
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, name
"""


@pytest.mark.parametrize("names", PROCESSES.values(), ids=PROCESSES)
def test_a_trainer_keeps_its_contents_and_leaves_the_gpu_to_the_engine(
    preloaded, benchmark_module, tmp_path, names
):
    pytest.importorskip("torch")
    steps = benchmark_module("framework_steps")
    frameworks = [steps.FRAMEWORKS[name] for name in names]
    code = TRAINER
    for name, framework in zip(names, frameworks, strict=True):
        assert framework.trainer == frameworks[0].trainer
        rounds = [
            [(step.call, dict(step.arguments)) for step in group if step.side != steps.ENGINE]
            for group in (framework.start, *[framework.round] * ROUNDS)
        ]
        rounds.append([call for call in rounds[-1] for _ in range(1 + (call[0] in REPEATED))])
        code += f"train_in_fork({name!r}, {framework.tagged}, {rounds})\n"
    preloaded(code, TMS_DISK_BACKUP_DIR=str(tmp_path), **frameworks[0].trainer)


def test_each_framework_is_described_on_a_page_that_names_its_commit(benchmark_module):
    steps = benchmark_module("framework_steps")
    for name, framework in steps.FRAMEWORKS.items():
        text = (ROOT / "docs" / "how-to" / f"{name.partition('_')[0]}.md").read_text()
        commit = framework.source.rpartition(" ")[2]
        assert commit in text, (name, commit)
