"""Tests TRL's own GRPOTrainer with vLLM's own engine core, whose memory memsaver manages.

The trainer, its calls to the engine and the engine's sleep mode are unmodified and run on the
simulated driver. The engine's model and generation are fakes.
"""

from __future__ import annotations

import signal
from types import SimpleNamespace
from typing import ClassVar

import pytest
import trl_calls
from installed import needs
from looks import paused_tags

pytestmark = pytest.mark.recipes

STEPS, SAMPLES, TOKENS = 2, 4, 6
WORDS = 32
ALL = {"weights", "kv_cache", "runtime"}


class FakeModel:
    """Accepts weights and uses the memory of the engine's model."""

    def __init__(self, llm) -> None:
        self._llm = llm

    def load_weights(self, weights) -> None:
        self._llm.record("load_weights")
        for _, tensor in weights:
            self._llm.engine.runner.model.weight.fill_(float(tensor.flatten()[0]))


class FakeLLM:
    """vLLM's engine core with the interface of vLLM's `LLM`. The class records the calls."""

    made: ClassVar[list[FakeLLM]] = []

    def __init__(self, model, **arguments) -> None:
        from vllm_recipe import Engine

        assert arguments["enable_sleep_mode"]
        assert arguments["distributed_executor_backend"] == "external_launcher"
        self.engine = Engine(arguments.pop("patch"))
        self.calls: list[str] = []
        runner = SimpleNamespace(model=FakeModel(self))
        executor = SimpleNamespace(driver_worker=SimpleNamespace(model_runner=runner))
        config = SimpleNamespace(max_model_len=64)
        self.llm_engine = SimpleNamespace(model_executor=executor, model_config=config)
        self.made.append(self)

    def record(self, call: str) -> None:
        if self.calls[-1:] != [call]:  # TRL loads one tensor at a time
            self.calls.append(call)

    def sleep(self, level=1) -> None:
        self.record(f"sleep {level}")
        self.engine.core.sleep(level=level)

    def wake_up(self, tags=None) -> None:
        self.record(" ".join(("wake_up", *(tags or ()))))
        self.engine.core.wake_up(tags)

    def reset_prefix_cache(self) -> None:
        self.record("reset_prefix_cache")

    def generate(self, prompts, sampling_params, use_tqdm):
        self.record("generate")
        self.engine.runner.kv_cache.fill_(1)
        logprobs = [{5: SimpleNamespace(rank=1, logprob=-1.0)}] * TOKENS
        answers = [
            SimpleNamespace(token_ids=[5 + number % 2] * TOKENS, logprobs=logprobs)
            for number in range(len(prompts))
        ]
        return [
            SimpleNamespace(prompt_token_ids=prompt["prompt_token_ids"], outputs=[answer])
            for prompt, answer in zip(prompts, answers, strict=True)
        ]


@pytest.fixture
def trainer(sim, tag, monkeypatch, tmp_path):
    """Return TRL's trainer with a one-layer model."""
    needs("trl.generation.vllm_generation", "pip install trl")
    pytest.importorskip("vllm.device_allocator.sleep_mode_backend", reason="vLLM is not installed")
    for name in ("HF_HUB_OFFLINE", "HF_HUB_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "1")
    from datasets import Dataset
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer
    from trl.generation import vllm_generation

    tag.names.extend(("weights", "kv_cache", "runtime"))
    vocabulary = {word: number for number, word in enumerate(["<pad>", *map(str, range(1, WORDS))])}
    plain = Tokenizer(models.WordLevel(vocabulary, unk_token="1"))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    words = PreTrainedTokenizerFast(tokenizer_object=plain, pad_token="<pad>", eos_token="2")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": WORDS}
    model = Qwen3ForCausalLM(Qwen3Config(**shape, **heads, pad_token_id=0, eos_token_id=2))
    monkeypatch.setattr(FakeLLM, "made", [])
    monkeypatch.setattr(
        vllm_generation, "LLM", lambda model, **named: FakeLLM(model, patch=monkeypatch, **named)
    )
    arguments = GRPOConfig(
        output_dir=str(tmp_path),
        max_steps=STEPS,
        per_device_train_batch_size=SAMPLES,
        num_generations=SAMPLES,
        max_completion_length=TOKENS,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=True,
        bf16=False,
        use_vllm=True,
        vllm_mode="colocate",
        vllm_enable_sleep_mode=True,
    )
    made = GRPOTrainer(
        model,
        args=arguments,
        processing_class=words,
        reward_funcs=lambda completion_ids, **_: [float(sum(ids)) for ids in completion_ids],
        train_dataset=Dataset.from_dict({"prompt": ["3 4", "4 3"] * STEPS}),
    )
    yield made
    for llm in FakeLLM.made:
        llm.engine.close()


def test_the_trainer_makes_the_calls_that_other_tests_replay(trainer):
    (llm,) = FakeLLM.made
    assert llm.calls == trl_calls.START and paused_tags() == ALL
    trainer.train()
    assert llm.calls == trl_calls.START + STEPS * trl_calls.STEP
    assert paused_tags() == ALL


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["generate", "wake_up", "compute_loss"])
def test_a_step_that_raises_can_be_followed_by_others(trainer, monkeypatch, where, error):
    """A KeyboardInterrupt is raised by a signal."""
    (llm,) = FakeLLM.made

    def broken(*_, **__):
        patch.undo()
        if error is KeyboardInterrupt:
            signal.raise_signal(signal.SIGINT)
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(trainer if where == "compute_loss" else llm, where, broken)
        with pytest.raises(error):
            trainer.train()
    # TRL sleeps after a generation.
    assert paused_tags() == (set() if where == "generate" else ALL)
    trainer.train()
    assert paused_tags() == ALL and llm.calls[-1] == "sleep 2"
