"""Run the steps of GRPO on the same GPUs: generate answers, compute rewards, and train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from itertools import count
from typing import Any

import torch
import torch.distributed as dist
from advantages import group_advantages
from arithmetic import RIGHT, problems, reward
from batches import batch_of
from learner import Learner
from places import Place
from results import Results, Step, digest_of, digest_over_ranks, figures_of
from settings import Settings
from vocabulary import Vocabulary

import memsaver
from memsaver.integrations.rollout import ColocatedSession

# The parameters for the number of tokens and the seed, for engines that do not use SGLang's names.
SAMPLING_NAMES = {"vllm": ("max_tokens", "seed")}


def run(
    settings: Settings,
    vocabulary: Vocabulary,
    place: Place,
    engine: Any,
    model: Any,
    on_step: Callable[[int, Step], object] = lambda number, step: None,
) -> Results:
    """Run all steps and return the results. This is a collective operation.

    Args:
        settings: the run's settings.
        vocabulary: the model's vocabulary.
        place: this process's place among the ranks.
        engine: a `RolloutEngine`, or an object with the methods that this module uses.
        model: the policy; on several ranks, sharded by FSDP2.
        on_step: called after each step.

    Raises:
        SettingsError: a step's problems cannot be divided among the ranks.
    """
    settings.check(place.ranks)
    learner = Learner(model, settings, place.device)
    updates = count(1)
    session = ColocatedSession(
        engine,
        model,
        learner.optimizer,
        state=lambda: weights_for(engine_dtype(settings), model),
        sleep=settings.sleep,
        update_options=lambda: update_options(settings, next(updates)),
    )
    name = torch.cuda.get_device_name(place.device) if place.device.type == "cuda" else "CPU"
    results = Results(asdict(settings), name, place.ranks)
    for number in range(settings.steps):
        step = take_step(number, settings, vocabulary, place, session, learner)
        results.steps.append(step)
        on_step(number, step)
    with session.training():
        mine = digest_of(model.state_dict())
    results.weights = digest_over_ranks(mine)
    session.close()
    results.total_bytes = memsaver.device_memory(place.device.index or 0)[1]
    return results


def take_step(
    number: int,
    settings: Settings,
    vocabulary: Vocabulary,
    place: Place,
    session: ColocatedSession,
    learner: Learner,
) -> Step:
    """Run one rollout and train on its samples."""
    asked = problems(settings.prompts, settings.largest, settings.seed, number)
    mine = asked[place.rank :: place.ranks]
    each = [problem for problem in mine for _ in range(settings.samples)]
    prompts = [vocabulary.encode(problem.text) for problem in each]
    with session.rollout() as engine:
        output = engine.generate(prompts, sampling(number, settings, vocabulary, place, len(each)))
    answers = [
        vocabulary.decode(tokens[:length])
        for tokens, length in zip(output.token_ids, output.lengths, strict=True)
    ]
    rewards = torch.tensor([reward(p, a) for p, a in zip(each, answers, strict=True)])
    batch = batch_of(prompts, output, group_advantages(rewards, settings.samples))
    with session.training():
        learned = learner.learn(batch)
    means = mean_over_ranks(torch.stack([rewards, (rewards == RIGHT).float()]).double().mean(1))
    return Step(
        *means,
        learned.loss,
        learned.gradient,
        learned.gap,
        digest_over_ranks(digest_of([output.token_ids])),
        figures_of(session.stages),
    )


def sampling(
    number: int, settings: Settings, vocabulary: Vocabulary, place: Place, count: int
) -> list[dict[str, Any]]:
    """Return the sampling parameters, with a separate seed, for each of this rank's answers."""
    tokens, seed = SAMPLING_NAMES.get(settings.engine, ("max_new_tokens", "sampling_seed"))
    first = ((settings.seed * settings.steps + number) * place.ranks + place.rank) * count
    return [
        {
            "temperature": settings.temperature,
            tokens: settings.answer_tokens,
            "stop_token_ids": [vocabulary.end],
            seed: (first + row) % (1 << 31),
        }
        for row in range(count)
    ]


def engine_dtype(settings: Settings) -> torch.dtype:
    """Return the data type of the engine's weights."""
    return torch.float32 if settings.engine == "model" else torch.bfloat16


def weights_for(dtype: torch.dtype, model: Any) -> dict[str, Any]:
    """Return the weights to send; sharded weights stay sharded, tied weights remain one tensor."""
    state = model.state_dict(keep_vars=True)
    cast = {id(tensor): tensor.detach().to(dtype) for tensor in state.values()}
    return {name: cast[id(tensor)] for name, tensor in state.items()}


def update_options(settings: Settings, number: int) -> dict[str, Any]:
    """Return the options of `RolloutEngine.update_weights` for the update with this number."""
    return {
        "version": str(number),
        "bucket_bytes": settings.bucket_mib << 20,
        "verify": settings.verify,
    }


def mean_over_ranks(values: torch.Tensor) -> list[float]:
    """Return the mean of each value over the ranks. This is a collective operation on the CPU."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values = values / dist.get_world_size()
    return [float(value) for value in values]
