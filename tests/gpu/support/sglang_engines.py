"""Starts engines for the scenarios and provides the operations that the scenarios need.

An SGLang engine or server runs in its own processes. This process is the engine's client and also
acts as the trainer that uses the released memory. The module requires torch, SGLang and memsaver.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import qwen_model
import torch
from gpu_trainer import GIB, MIB
from program_runs import free_port

from memsaver.integrations.engine.status import Status
from memsaver.integrations.sglang.sleep import SleepController

# Between two readings of free memory, SGLang clones the model's buffers and torch maps a segment.
SLACK = 32 * MIB

SERVER_SECONDS = 150
SETTLE_SECONDS = 30

PROMPTS = ([5, 6, 7, 8, 901, 44], [9, 10, 11], list(range(3000, 3100)))
TOKENS = 24

# Every batch is padded to one of the captured sizes, even a single request.
COMMON: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "attention_backend": "triton",
    "sampling_backend": "pytorch",
    "mem_fraction_static": 0.3,
    "enable_memory_saver": True,
    "cuda_graph_bs_decode": [2, 4, 8],
    "disable_prefill_cuda_graph": True,
    "random_seed": 1,
    "log_level": "info",
}
KEPT = {"enable_weights_cpu_backup": True}
TOGETHER = 2  # `max_running_requests` of the engine on which the order of requests is tested
PARALLEL_SIZES: dict[str, dict[str, Any]] = {
    "tp2": {"tp_size": 2},
    "pp2": {"pp_size": 2},
    "dp2": {"dp_size": 2},
    "dp_attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "backup": KEPT,
    "no_backup": {},
    "no_backup_tp2": PARALLEL_SIZES["tp2"],
    "server": KEPT,
    "backup_wait": {**KEPT, "max_running_requests": TOGETHER},
    "backup_wake": KEPT,
    "backup_pageable": KEPT,
    "backup_disk": KEPT,
    "server_wait": KEPT,
    "server_wake": KEPT,
    "server_turns": {**KEPT, "mem_fraction_static": 0.6},  # for each of two servers on one GPU
    "embedding": {**KEPT, "is_embedding": True},
    "lora": {
        **KEPT,
        "enable_lora": True,
        "lora_backend": "triton",
        "max_lora_rank": 8,
        "lora_target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
    },
    **{
        f"{kind}_{parallel}": {**KEPT, **sizes}
        for kind in ("backup", "backup_wait", "backup_wake", "server", "server_wait", "server_wake")
        for parallel, sizes in PARALLEL_SIZES.items()
    },
}

_WAKE = {
    "MEMSAVER_SGLANG_ASLEEP": "wake",
    "MEMSAVER_SGLANG_ASLEEP_WAIT": "6",
    "MEMSAVER_SGLANG_SLEEP_AFTER": "4",
}
# By the first words of a group's name.
ENVIRONMENTS = {
    "backup_wait": {"MEMSAVER_SGLANG_ASLEEP": "wait", "MEMSAVER_SGLANG_ASLEEP_WAIT": "6"},
    "server_wait": {"MEMSAVER_SGLANG_ASLEEP": "wait", "MEMSAVER_SGLANG_ASLEEP_WAIT": "6"},
    "backup_wake": _WAKE,
    "server_wake": {
        **_WAKE,
        "MEMSAVER_SGLANG_ASLEEP_WAIT": "20",
    },  # concurrent releases delay a wake-up
    "server_turns": {
        **_WAKE,
        "MEMSAVER_SGLANG_ASLEEP_WAIT": "20",
        "MEMSAVER_SGLANG_SLEEP_AFTER": "2",
    },
    "backup_pageable": {"MEMSAVER_SGLANG_BACKUP": "pageable"},
    "backup_disk": {"MEMSAVER_SGLANG_BACKUP": "disk"},
    "backup_tp2": {"MEMSAVER_SGLANG_SUSPEND_NCCL": "1"},  # without effect before NCCL 2.29.7
}


@dataclass
class Session:
    """An engine with its configuration and its expected output.

    Attributes:
        controller: an object that puts the engine to sleep and wakes it.
        flush: a function that empties the prefix cache, or returns False if the engine is busy.
        close: a function that shuts the engine down.
        log: the file with the output of all processes.
        weights: the initial weights; see `qwen_model.weights`.
        engine: the `sglang.Engine`; None for a server.
        url: the server's URL, or "".
        gpus: the number of GPUs; the engine uses the GPUs with the lowest indices.
        ranks: the number of processes that use a GPU, one or more on each GPU.
        replicas: the data-parallel ranks, each of which receives requests; (None,) for a single
            replica.
        stages: the number of pipeline stages.
        embeds: whether the engine computes embeddings instead of generating tokens.
        expected: the tokens or embeddings that the engine returns after its start.
        other: a second server with other weights on the same GPU, or None.
    """

    controller: SleepController
    flush: Callable[[], bool]
    close: Callable[[], object]
    log: Path
    weights: list[dict[str, Any]]
    engine: Any = None
    url: str = ""
    gpus: int = 1
    ranks: int = 1
    replicas: tuple[int | None, ...] = (None,)
    stages: int = 1
    embeds: bool = False
    expected: list[list[Any]] = field(default_factory=list)
    other: Session | None = None

    @property
    def sends_no_tensors(self) -> bool:
        """Whether `Engine.update_weights_from_tensor` fails to reach some ranks.

        SGLang does not send tensors to replicas. Pipeline stages share a payload, and only one
        process can receive a payload's tensors in host memory.
        """
        return len(self.replicas) > 1 or self.stages > 1

    def outputs(self, **more: Any) -> list[list[Any]]:
        """Return greedy tokens for one prompt at a time, because batches change the arithmetic.

        Args:
            more: further arguments for each generation.
        """
        if self.embeds:
            return [self.embedding(prompt) for prompt in PROMPTS]
        options = [{} if rank is None else {"routed_dp_rank": rank} for rank in self.replicas]
        return [
            self.controller.generate(
                input_ids=prompt, sampling_params=greedy(TOKENS), **option, **more
            )["output_ids"]
            for option in options
            for prompt in PROMPTS
        ]

    def embedding(self, prompt: list[int]) -> list[float]:
        """Return a prompt's embedding. `sglang.Engine.encode` accepts the prompt only as text."""
        from sglang.srt.managers.io_struct import EmbeddingReqInput

        manager = self.engine.tokenizer_manager

        async def compute() -> Any:
            request = EmbeddingReqInput(input_ids=prompt)
            return await manager.generate_request(request, None).__anext__()

        return self.run(compute)["embedding"]  # type: ignore[no-any-return]

    def run(self, work: Callable[[], Any]) -> Any:
        """Call `work` and run the returned coroutine on this engine's event loop.

        Any thread can call this method.
        """
        return self.controller._engine.run("a request", work, SETTLE_SECONDS)

    def settle(self) -> None:
        """Wait until the engine is idle, then empty its prefix cache."""
        deadline = time.monotonic() + SETTLE_SECONDS
        time.sleep(0.2)  # another replica may still run its last batch
        while not self.flush():
            assert time.monotonic() < deadline, "the engine does not become idle"
            time.sleep(0.05)

    def wait_until_asleep(self) -> None:
        """Wait until the engine, without any requests, has released its memory on all GPUs."""
        awake, gained = self.free(), [0] * self.gpus
        deadline = time.monotonic() + SETTLE_SECONDS
        # Replicas release their memory one after the other.
        while self.controller.refresh() is not Status.ASLEEP or min(gained) < GIB:
            assert time.monotonic() < deadline, (self.controller.status, gained)
            time.sleep(0.2)
            gained = [now - then for now, then in zip(self.free(), awake, strict=True)]

    def free(self) -> list[int]:
        """Return the number of free bytes that the driver reports for each GPU."""
        readings = []
        for gpu in range(self.gpus):
            torch.cuda.synchronize(gpu)
            readings.append(torch.cuda.mem_get_info(gpu)[0])
        return readings


def greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def start(group: str, folder: Path) -> Session:
    """Start the engine for a group of scenarios and record its expected output."""
    session = _start(group, folder, seed=1)
    if group == "server_turns":
        close = session.close
        try:
            session.wait_until_asleep()  # SGLang measures free memory while it starts
            session.other = other = _start(group, folder / "other", seed=2)
        except BaseException:
            close()
            raise
        session.close = lambda: (other.close(), close())
    return session


def _start(group: str, folder: Path, seed: int) -> Session:
    parts = qwen_model.weights(seed)
    qwen_model.save(folder / "model", parts)
    arguments = {
        "model_path": str(folder / "model"),
        "host": "127.0.0.1",
        "port": free_port(),
        **COMMON,
        **ARGUMENTS[group],
    }
    sizes = ["tp_size", "pp_size"]
    if not arguments.get("enable_dp_attention"):
        sizes.append("dp_size")
    ranks = math.prod(arguments.get(name, 1) for name in sizes)
    for name, variables in ENVIRONMENTS.items():
        if f"{group}_".startswith(f"{name}_"):
            os.environ.update(variables)
    begin = _serve if group.startswith("server") else _engine
    session = begin(arguments, folder / "log", parts)
    try:
        session.ranks, session.gpus = ranks, min(ranks, torch.cuda.device_count())
        session.stages = arguments.get("pp_size", 1)
        session.embeds = arguments.get("is_embedding", False)
        session.free()  # creates this process's context on each GPU
        if arguments.get("dp_size", 1) > 1:
            session.replicas = tuple(range(arguments["dp_size"]))
        _learn(session)
    except BaseException:
        session.close()
        raise
    return session


def _learn(session: Session) -> None:
    """Record the expected output; check that the output is deterministic and not degenerate."""
    readings = []
    for _ in range(3):  # the first reading compiles kernels
        session.settle()
        readings.append(session.outputs())
    assert readings[1] == readings[2], f"the engine is not deterministic: {readings[1:]}"
    session.expected = readings[2]
    for tokens in session.expected if not session.embeds else ():
        assert len(tokens) == TOKENS and len(set(tokens)) > TOKENS // 4, f"degenerate: {tokens}"
    one = session.expected[: len(PROMPTS)]
    assert len({tuple(tokens) for tokens in one}) == len(PROMPTS), "prompts have no effect"
    assert session.expected == one * len(session.replicas), "the replicas differ"


def _engine(arguments: dict[str, Any], log: Path, parts: list[dict[str, Any]]) -> Session:
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        controller = SleepController(engine)
    except BaseException:
        engine.shutdown()
        raise

    def flush() -> bool:
        return bool(engine.flush_cache().success)

    return Session(controller, flush, engine.shutdown, log, parts, engine)


def _serve(arguments: dict[str, Any], log: Path, parts: list[dict[str, Any]]) -> Session:
    url = f"http://127.0.0.1:{arguments['port']}"
    command = [sys.executable, "-m", "sglang.launch_server", *_flags(arguments)]
    # The server's warm-up would use the proxies.
    env = {**os.environ, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
    server = subprocess.Popen(command, env=env, stdin=subprocess.DEVNULL)

    def close() -> None:
        server.terminate()
        try:
            server.wait(30)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()

    try:
        deadline = time.monotonic() + SERVER_SECONDS
        while request(url, "/health")[0] != 200:
            assert server.poll() is None, f"the server ended with status {server.returncode}"
            assert time.monotonic() < deadline, f"the server is not up after {SERVER_SECONDS} s"
            time.sleep(0.5)
        controller = SleepController(url)
    except BaseException:
        close()
        raise

    def flush() -> bool:
        return request(url, "/flush_cache", {})[0] == 200

    return Session(controller, flush, close, log, parts, url=url)


def _flags(arguments: dict[str, Any]) -> list[str]:
    """Convert engine arguments to flags for the server's command line."""
    flags: list[str] = []
    for name, value in arguments.items():
        values = value if isinstance(value, list) else [] if value is True else [value]
        flags += [f"--{name.replace('_', '-')}", *map(str, values)]
    return flags


def request(url: str, path: str, payload: Any = None, seconds: float = 60) -> tuple[int, str]:
    """Send a request (a POST if it has a payload); return the response's status and body.

    The status is 0 if the server cannot be reached.
    """
    body = None if payload is None else json.dumps(payload).encode()
    asked = urllib.request.Request(url + path, body, {"Content-Type": "application/json"})
    past_proxies = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with past_proxies.open(asked, timeout=seconds) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""
