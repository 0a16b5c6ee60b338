"""Tests `offload` with transformers, FSDP2 and DeepSpeed. Each case runs in one process per rank:

python tests/gpu/support/transformers_cases.py trainer

The cases run on a GPU or, with MEMSAVER_DRIVER=sim, on the simulated driver, where CPU tensors
replace CUDA tensors.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import Qwen3Config, Qwen3ForCausalLM, Trainer, TrainerCallback, TrainingArguments

import memsaver
from memsaver import simulator
from memsaver.integrations.trainer import offload

STEPS, BATCH, LENGTH, VOCABULARY = 5, 4, 16, 128
REFERENCE, TRAINER = "reference", "trainer"
DEVICE = "cpu" if simulator.active() else f"cuda:{os.environ.get('RANK', 0)}"


def models() -> tuple[Any, Any]:
    """Return a model and its frozen reference model; the weights are the same in every call."""
    torch.manual_seed(3)
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": VOCABULARY}
    config = Qwen3Config(**shape, **heads, use_cache=False)
    model = Qwen3ForCausalLM(config).to(DEVICE)
    return model, Qwen3ForCausalLM(config).to(DEVICE).requires_grad_(False).eval()


def tokens() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randint(VOCABULARY, (STEPS * BATCH, LENGTH), generator=generator)


def divergence(logits: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    found, other = (one.float().log_softmax(-1) for one in (logits, expected))
    return (found.exp() * (found - other)).sum(-1).mean()


def resident(*tags: str) -> int:
    """Return the tags' mapped bytes."""
    return sum(row.resident_bytes for row in memsaver.stats().tags if row.tag in tags)


class Awake:
    """A policy that keeps everything mapped."""

    def begin(self, model: Any, optimizer: Any, reference: Any) -> None:
        pass

    def log_probabilities(self, forward: Callable[[], Any]) -> Any:
        return forward()

    def after_step(self) -> None:
        pass

    def end(self) -> None:
        pass


class Asleep(Awake):
    """A policy that pauses the reference except during its forward pass, and the trainer after each
    step.
    """

    reference: Any = None

    def begin(self, model: Any, optimizer: Any, reference: Any) -> None:
        self.trainer = offload(optimizer, model, tag=TRAINER)  # again in a second training
        if self.reference is None:
            self.reference = offload(reference, tag=REFERENCE)
            self.reference.pause()

    def log_probabilities(self, forward: Callable[[], Any]) -> Any:
        assert not resident(REFERENCE)
        self.reference.resume()
        try:
            return forward()
        finally:
            report = self.reference.pause()
            assert not report.copied_bytes  # it has not changed since its first pause

    def after_step(self) -> None:
        size = self.trainer.bytes
        with self.trainer.paused():
            assert not resident(TRAINER, REFERENCE)
        assert self.trainer.bytes == size and not self.trainer.bytes_elsewhere

    def end(self) -> None:
        self.reference.resume()  # other models use its tag


def trained(memory: Awake, where: str = "", error: type[BaseException] = ValueError) -> list[float]:
    """Return the losses and gradient norms of transformers' Trainer.

    Args:
        memory: the policy that determines which memory sleeps.
        where: the model whose third forward pass raises an error; training then restarts.
        error: the class of the error; a KeyboardInterrupt is raised by a signal.
    """
    model, reference = models()
    found: list[float] = []
    if where:
        fail_at({"reference": reference, "model": model}[where], 3, error)

    class Regularised(Trainer):
        def compute_loss(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                expected = memory.log_probabilities(lambda: reference(inputs["input_ids"]).logits)
            outputs = model(**inputs)
            return outputs.loss + divergence(outputs.logits, expected)

    class Sleeper(TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **__: Any) -> None:
            memory.begin(model, optimizer, reference)

        def on_step_end(self, *_: Any, **__: Any) -> None:
            memory.after_step()

        def on_log(self, *_: Any, logs: dict[str, float], **__: Any) -> None:
            found.extend(logs[key] for key in ("loss", "grad_norm") if key in logs)

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            use_cpu=DEVICE == "cpu",
        )
        rows = [{"input_ids": row, "labels": row} for row in tokens()]
        trainer = Regularised(model, arguments, train_dataset=rows, callbacks=[Sleeper()])
        if where:
            with contextlib.suppress(error):
                trainer.train()
            assert len(found) == 2 * 2
        trainer.train()
    memory.end()
    assert len(found) == 2 * (STEPS + 2 * bool(where))
    return found


def fail_at(module: torch.nn.Module, count: int, error: type[BaseException]) -> None:
    """Make one forward pass of a module fail."""
    passes = itertools.count(1)

    def fail(*_: Any) -> None:
        if next(passes) == count:
            if error is KeyboardInterrupt:
                signal.raise_signal(signal.SIGINT)
            raise error

    module.model.layers[1].register_forward_hook(fail)  # type: ignore[union-attr, index]


def case_trainer() -> None:
    assert trained(Asleep()) == trained(Awake())


def case_trainer_again() -> None:
    """After a step that raises an error or is interrupted by Ctrl-C, another training succeeds."""
    for error in (ValueError, KeyboardInterrupt):
        for where in ("reference", "model"):
            assert trained(Asleep(), where, error) == trained(Awake(), where, error)


def looped(memory: Awake) -> list[float]:
    """Return the losses of an FSDP2 training loop whose reference model is also sharded."""
    model, reference = models()
    mesh = init_device_mesh(DEVICE.split(":")[0], (dist.get_world_size(),))
    for one in (model, reference):
        for layer in one.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(one, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    memory.begin(model, optimizer, reference)
    losses = []
    for batch in tokens().to(DEVICE).split(BATCH):
        with torch.no_grad():
            expected = memory.log_probabilities(lambda batch=batch: reference(batch).logits)
        outputs = model(input_ids=batch, labels=batch)
        loss = outputs.loss + divergence(outputs.logits, expected)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        memory.after_step()
        losses.append(loss.item())
    return losses


def case_fsdp2() -> None:
    start_group()
    assert looped(Asleep()) == looped(Awake())


def zero(sleeps: bool) -> list[float]:
    """Return the losses of DeepSpeed's ZeRO-3 with float32 master weights."""
    import deepspeed

    if DEVICE == "cpu":  # its communication through shared memory is compiled
        sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # type: ignore[attr-defined]
    model, _ = models()
    engine, optimizer, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        config={
            "train_micro_batch_size_per_gpu": BATCH,
            "bf16": {"enabled": True},
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "zero_optimization": {"stage": 3},
        },
    )
    masters = optimizer.fp32_partitioned_groups_flat
    tag = "zero"
    offloaded = offload(optimizer, masters, tag=tag) if sleeps else None
    losses = []
    for batch in tokens().to(DEVICE).split(BATCH):
        loss = engine(input_ids=batch, labels=batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        if offloaded is not None:
            nbytes = sum(master.nbytes for master in masters)
            assert offloaded.bytes == 3 * nbytes, (offloaded.bytes, nbytes)  # with both moments
            with offloaded.paused():
                assert not resident(tag)
                engine(input_ids=batch)  # the weights in bfloat16 stay
    return losses


def case_deepspeed_zero3() -> None:
    assert zero(sleeps=True) == zero(sleeps=False)


def start_group() -> None:
    if DEVICE != "cpu":
        torch.cuda.set_device(int(os.environ["RANK"]))
    dist.init_process_group("gloo" if DEVICE == "cpu" else "cpu:gloo,cuda:nccl")


if __name__ == "__main__":
    globals()[f"case_{sys.argv[1]}"]()
    if dist.is_initialized():
        dist.destroy_process_group()
    print("held")
