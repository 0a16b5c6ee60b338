"""Runs a scenario as one rank of a trainer with a rollout engine; exits with status 0 on success.

usage: rollout_child.py SCENARIO FOLDER

The environment variables RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT must be set.

SGLang's processes import this file again, so the file imports only modules that every process
needs.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

STUCK_SECONDS = 240
GIB = 1 << 30
TOKENS = 24
PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)))
RANK, SIZE = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def greedy(tokens: int = TOKENS, **others: Any) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True, **others}


def arguments(folder: Path) -> dict[str, Any]:
    """Save the model if this rank is the leader; return the engine's arguments."""
    import qwen_model
    import sglang_engines

    if RANK == 0:
        qwen_model.save(folder / "model", qwen_model.weights(seed=1))
    return {**sglang_engines.COMMON, **sglang_engines.KEPT, "model_path": str(folder / "model")}


def rows(output: Any) -> list[list[int]]:
    return [row[:n].tolist() for row, n in zip(output.token_ids, output.lengths, strict=True)]


def flushed(engine: Any) -> None:
    """Empty the engine's prefix cache, because cached prefixes change the arithmetic."""
    if engine.layout.is_leader:
        deadline = time.monotonic() + 30
        while not engine.backend.control._engine.flush(10):
            assert time.monotonic() < deadline, "the engine does not become idle"
            time.sleep(0.05)


def directly(engine: Any, prompt: list[int], params: dict[str, Any]) -> tuple[Any, ...]:
    """Return SGLang's own output for a prompt: tokens, log-probabilities and the finish reason."""
    made = engine.backend.control._engine.generate(
        input_ids=prompt, sampling_params=params, return_logprob=True
    )
    meta = made["meta_info"]
    logprobs = [entry[0] for entry in meta["output_token_logprobs"]]
    return made["output_ids"], logprobs, meta["finish_reason"]["type"]


def check_against_sglang(engine: Any) -> None:
    """Compare the output with SGLang's own, one prompt at a time because batches change the
    arithmetic.
    """
    import torch

    long = directly(engine, PROMPTS[0], greedy())[0]
    cases = [(prompt, greedy()) for prompt in PROMPTS]
    cases.append((PROMPTS[0], greedy(stop_token_ids=[long[9]], ignore_eos=False)))
    lengths = set()
    for prompt, params in cases:
        flushed(engine)
        directly(engine, prompt, params)  # compiles the kernels
        flushed(engine)
        tokens, logprobs, reason = directly(engine, prompt, params)
        flushed(engine)
        output = engine.generate([prompt], params)
        assert rows(output) == [tokens], (rows(output), tokens)
        assert output.lengths.tolist() == [len(tokens)] == output.attention_mask.sum(1).tolist()
        assert output.finish_reasons == (reason,)
        assert torch.allclose(output.logprobs[0], torch.tensor(logprobs), rtol=0, atol=1e-5)
        assert bool((output.logprobs <= 0).all())
        lengths.add(len(tokens))
    assert len(lengths) == 2, "the stop token did not stop it"
    batch = engine.generate([prompt for prompt, _ in cases], [params for _, params in cases])
    assert batch.lengths[-1] < batch.lengths[0] == TOKENS == batch.token_ids.shape[1]
    assert batch.finish_reasons[-1] == "stop"


def check_sampling(engine: Any) -> None:
    params = {"temperature": 1.0, "max_new_tokens": 16, "ignore_eos": True, "n": 4}
    output = engine.generate([PROMPTS[0], PROMPTS[1]], params)
    assert output.prompt_index.tolist() == [0] * 4 + [1] * 4
    assert len({tuple(row) for row in rows(output)}) > 4, "the samples are the same"


def check_sleep(engine: Any, devices: int = 1) -> None:
    import torch

    from memsaver.integrations.sglang import Status

    def free() -> list[int]:
        return [torch.cuda.mem_get_info(device)[0] for device in range(devices)]

    def outputs() -> list[list[int]]:
        found = []
        for prompt in PROMPTS:
            flushed(engine)
            found += rows(engine.generate([prompt], greedy()))
        return found

    before, awake = outputs(), free()
    with engine.asleep(wait_idle=True):
        assert engine.status is Status.ASLEEP
        gained = [now - then for now, then in zip(free(), awake, strict=True)]
        assert min(gained) > GIB, gained
    assert outputs() == before
    engine.sleep(wait_idle=True)
    with engine.staged_wake():
        assert engine.status is Status.WEIGHTS_ONLY
        engine.check("update_weights")
    assert engine.status is Status.AWAKE and outputs() == before


def in_background(
    engine: Any, tokens: int, prompts: Sequence[list[int]] = PROMPTS[:1]
) -> tuple[threading.Thread, list[Any]]:
    """Start a generation on another thread; return the thread and the list for the output."""
    results: list[Any] = []
    work = threading.Thread(
        target=lambda: results.append(engine.generate(prompts, greedy(tokens))), daemon=True
    )
    work.start()
    return work, results


def wait_until_generating(engine: Any, work: threading.Thread) -> None:
    """Wait until this process's engine has generated tokens for the request of `work`.

    SGLang's scheduler sends a report after every 50 tokens, even without streaming.
    """
    requests = engine.backend.link.engine.tokenizer_manager.rid_to_state
    deadline = time.monotonic() + 20
    while not any(request.output_ids for request in list(requests.values())):
        assert work.is_alive(), "the generation ended before it was seen"
        assert time.monotonic() < deadline, "the engine does not generate"
        time.sleep(0.005)
    assert work.is_alive(), "the generation is over"


def check_pause(engine: Any, *, is_seen: bool) -> None:
    """Check that a pause aborts another thread's generation, which returns the partial output.

    If `is_seen` is true, the engine belongs to this process, so this process sees the generated
    tokens.
    """
    work, results = in_background(engine, 4000)
    if is_seen:
        wait_until_generating(engine, work)
    else:
        time.sleep(1.0)
        assert work.is_alive(), "the generation is over"
    engine.pause_generation("abort")
    work.join(30)
    (output,) = results
    assert output.finish_reasons == ("abort",) and 0 < output.lengths[0] < 4000, output.lengths
    engine.continue_generation()
    flushed(engine)
    assert len(rows(engine.generate([PROMPTS[0]], greedy()))[0]) == TOKENS


def check_timeout(engine: Any) -> None:
    from memsaver.integrations.sglang import EngineTimeoutError

    start = time.monotonic()
    try:
        engine.generate([PROMPTS[0]], greedy(8000), timeout=0.5)
    except EngineTimeoutError:
        assert time.monotonic() - start < 10
    else:
        raise AssertionError("8000 tokens took no time")
    engine.sleep(wait_idle=True)  # no request is in flight
    engine.wake_up()


def check_death(engine: Any) -> None:
    """Check that the death of an engine process raises an error and does not terminate this
    process.
    """
    from memsaver.integrations.sglang import EngineError

    if engine.layout.is_leader:
        manager = engine.backend.link.engine.tokenizer_manager
        os.kill(manager._subprocess_watchdog._processes[0].pid, signal.SIGKILL)
    start = time.monotonic()
    try:
        engine.generate([PROMPTS[0]], greedy(8000), timeout=60)
    except EngineError as error:
        assert "process" in str(error), error
        assert time.monotonic() - start < 30
    else:
        raise AssertionError("a dead engine generated")
    time.sleep(3)  # SGLang's watchdog checks every second


def alone(folder: Path) -> None:
    """Run the checks in one process with its own engine."""
    import sglang  # sets environment variables, as `launch` documents
    import torch

    from memsaver.integrations.rollout import RolloutEngine

    assert sglang.__version__

    def environment() -> dict[str, str]:
        kept = ("SGLANG_", "PROMETHEUS_")
        return {name: text for name, text in os.environ.items() if not name.startswith(kept)}

    torch.cuda.set_device(0)
    named = arguments(folder)
    before = environment()
    handler = signal.getsignal(signal.SIGTERM)
    with RolloutEngine.launch(**named, timeout=240) as engine:
        assert environment() == before and signal.getsignal(signal.SIGTERM) == handler
        check_against_sglang(engine)
        check_sampling(engine)
        check_sleep(engine)
        check_pause(engine, is_seen=True)
        check_timeout(engine)
        check_death(engine)
    assert float(torch.ones(8, device="cuda").sum()) == 8


def served(folder: Path) -> None:
    """Run the checks against a server; the server must still work afterwards."""
    import sglang_engines

    from memsaver.integrations.rollout import RolloutEngine

    session = sglang_engines.start("server", folder)
    try:
        with RolloutEngine.connect(session.url, timeout=120) as engine:
            check_against_sglang(engine)
            check_sampling(engine)
            check_sleep(engine)
            check_pause(engine, is_seen=False)
            check_timeout(engine)
        assert session.outputs() == session.expected
    finally:
        session.close()


def joined(folder: Path) -> tuple[Any, dict[str, Any]]:
    """Join the process group; return the mesh of all ranks (one GPU each) and the engine
    arguments.
    """
    import datetime

    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    torch.cuda.set_device(RANK)
    dist.init_process_group("nccl", timeout=datetime.timedelta(seconds=240))
    mesh = init_device_mesh("cuda", (1, SIZE), mesh_dim_names=("dp", "tp"))
    named = {**arguments(folder), "timeout": 240}
    dist.barrier()
    return mesh, named


def two(folder: Path) -> None:
    """Run the checks on two ranks, with one GPU each, that share an engine."""
    import torch
    import torch.distributed as dist

    from memsaver.integrations.rollout import RolloutEngine

    mesh, named = joined(folder)
    with RolloutEngine.launch(mesh, **named) as engine:
        assert engine.tp_size == SIZE and engine.layout.tp_rank == RANK
        # One rank's prompts at a time, compared with SGLang's output, which the leader requests.
        for turn in range(SIZE):
            for prompt in PROMPTS:
                expected = None
                if engine.layout.is_leader:
                    directly(engine, prompt, greedy())
                    flushed(engine)
                    expected = directly(engine, prompt, greedy())
                    flushed(engine)
                shared = [expected]
                dist.broadcast_object_list(shared, src=0)
                output = engine.generate([prompt] if turn == RANK else [], greedy())
                if turn == RANK:
                    assert shared[0] and rows(output) == [shared[0][0]]
                    told = torch.tensor(shared[0][1])
                    assert torch.allclose(output.logprobs[0], told, rtol=0, atol=1e-5)
                else:
                    assert len(output) == 0
        # All ranks' prompts at once.
        mine = [list(PROMPTS[RANK]), list(PROMPTS[2])]
        output = engine.generate(mine, {**greedy(), "max_new_tokens": 8 + RANK})
        assert output.lengths.tolist() == [8 + RANK] * 2
        check_sleep(engine, devices=SIZE)
        check_pause(engine, is_seen=engine.layout.is_leader)
        check_timeout(engine)
        check_death(engine)
    total = torch.full((8,), RANK + 1.0, device="cuda")
    dist.all_reduce(total)  # the trainer's own group works
    assert float(total[0]) == sum(range(1, SIZE + 1))
    dist.destroy_process_group()


def play(scenes: Mapping[str, Callable[[Path], None]]) -> None:
    """Run the scenario named on the command line, then print "held"."""
    from sglang_child import check_installation

    check_installation()
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    scenes[sys.argv[1]](Path(sys.argv[2]))
    print("held", flush=True)


SCENES = {each.__name__: each for each in (alone, served, two)}


if __name__ == "__main__":
    play(SCENES)
