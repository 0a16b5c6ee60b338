"""Start an engine of one kind, and release, resume and update it, one request at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import sglang_kind_models as models
from serve import Worker
from sglang_kind_table import KINDS, Kind

TOKENS = 48
KV_TOKENS = 16384
PROMPTS = ([5, 6, 7, 8, 91, 44], [9, 10, 11], list(range(3, 103)))
LONG_TOKENS = 1500  # of a request that is still running when generation is paused
LONG_PROMPT = 1500  # tokens; for the host tier of a cache
SETTLE_SECONDS = 30
PAUSED_SECONDS = 60
DRAFT_SEED = 9
MIB = 1 << 20

RELEASES = ("kv_cache", "weights", "cuda_graph")
RESUMES = ("weights", "cuda_graph", "kv_cache")


class KindWorker(Worker):
    """The operations on an engine of one kind.

    Args:
        name: the name of the memory saver.
        kind: the kind's name.
        backup: whether the weights have a backup.
        seed: the seed of the weights that the engine loads.
        folder: the folder for checkpoints and for the log of the engine's processes.
    """

    imports: ClassVar[tuple[str, ...]] = ("torch", "sglang")

    def __init__(self, name: str, kind: str, backup: bool, seed: int, folder: str) -> None:
        self._kind: Kind = next(each for each in KINDS if each.name == kind)
        self._backup, self._seed, self._folder = backup, seed, Path(folder)
        log = os.open(self._folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)

    def start(self) -> dict[str, Any]:
        """Start the engine; return its output with the loaded weights."""
        import sglang

        from memsaver.integrations.sglang import SleepController

        self._save_models()
        begin = time.perf_counter()
        self.engine = sglang.Engine(**self._arguments())
        seconds = round(time.perf_counter() - begin, 1)
        self.controller = SleepController(self.engine)
        if not self.controller.guarded:
            raise RuntimeError("memsaver is not this engine's memory saver")
        self._output()  # compiles kernels
        output = self._output()
        if self._output() != output:
            raise RuntimeError("the engine's output differs between two equal requests")
        if len({tuple(line) for line in output}) < len(output):
            raise RuntimeError("the engine's output does not depend on the prompt")
        return {"seconds": seconds, "output": output}

    def cycle(self) -> dict[str, Any]:
        """Release and resume each tag separately; return the times, the sizes and the output."""
        released = [self.controller.sleep(tag) for tag in RELEASES]
        resumed = [self.controller.wake_up(tag) for tag in RESUMES]
        return {
            "release_ms": round(sum(report.seconds for report in released) * 1e3, 1),
            "resume_ms": round(sum(report.seconds for report in resumed) * 1e3, 1),
            "released_MiB": {
                tag: report.bytes // MIB for tag, report in zip(RELEASES, released, strict=True)
            },
            "output": self._output(),
        }

    def reload(self, seed: int) -> dict[str, Any]:
        """Send the weights of `seed` to the awake engine; return the output."""
        self._load(seed)
        return {"output": self._output()}

    def update(self, seed: int) -> dict[str, Any]:
        """Release all memory, and send the weights of `seed` between the stages of the resume."""
        self.controller.sleep()
        with self.controller.staged_wake():
            self._load(seed)
        return {"output": self._output()}

    def pause(self, mode: str) -> dict[str, Any]:
        """Pause generation with a request in flight and then without one; release after each pause.

        Returns:
            The tokens of the request, the output after both releases, and the engine's refusal to
            release memory during the request; "" if the engine did not refuse.
        """
        from memsaver.integrations.engine.errors import EngineBusyError

        run, refused = self.engine.loop.run_until_complete, ""
        request = self.engine.loop.create_task(
            self.engine.async_generate(input_ids=PROMPTS[0], sampling_params=_greedy(LONG_TOKENS))
        )
        run(asyncio.sleep(0.5))
        with self._paused(mode):
            try:
                self.controller.sleep()
                self.controller.wake_up()
            except EngineBusyError as error:
                refused = str(error)
        reply = run(asyncio.wait_for(request, PAUSED_SECONDS))
        self._settle()
        with self._paused(mode):
            self.controller.sleep()
            self.controller.wake_up()
        return {
            "refused": refused,
            "tokens": len(reply["output_ids"]),
            "output": self._output(),
        }

    def tier(self) -> dict[str, Any]:
        """Release memory while the host tier contains a prompt's prefix, without flushing first.

        Raises RuntimeError if the output for the prompt differs after the release. If the prefix is
        still cached after the release, the reference output is one with a cached prefix. Otherwise,
        the reference is an output without a cached prefix.

        Returns:
            The number of the prompt's tokens that were read from the host tier after each of two
            releases (weights, all tags), and the output after these releases.
        """
        prompt = _long_prompt(0)
        self._settle()
        fresh, _, _ = self._cached(prompt)
        self._fill_cache()
        cached, _, host = self._cached(prompt)
        if not host:
            raise RuntimeError("the host tier does not hold the prompt before a release")
        found: dict[str, Any] = {}
        for tags in ("weights", None):
            self._fill_cache()
            self.controller.sleep(tags, wait_idle=True)
            self.controller.wake_up()
            output, hits, host = self._cached(prompt)
            expected = cached if hits else fresh
            if output != expected:
                raise RuntimeError(f"{output} after a release of {tags}, not {expected}")
            found[tags or "all"] = host
        if not found["weights"]:
            raise RuntimeError("the host tier does not hold the prompt after a release of weights")
        return {**found, "output": self._output()}

    def _cached(self, prompt: list[int]) -> tuple[list[int], int, int]:
        """Generate without a flush.

        Returns the tokens, the number of the prompt's tokens that were cached anywhere, and the
        number of those that were cached in the host tier.
        """
        reply = self.controller.generate(input_ids=prompt, sampling_params=_greedy(TOKENS))
        meta = reply["meta_info"]
        host = (meta.get("cached_tokens_details") or {}).get("host", 0)
        return reply["output_ids"], meta["cached_tokens"], host

    def _fill_cache(self) -> None:
        """Generate for enough other prompts that the GPU's cache drops all earlier prompts."""
        for number in range(1, 2 + KV_TOKENS // LONG_PROMPT):
            self._cached(_long_prompt(number))

    def stop(self) -> dict[str, Any]:
        """Shut the engine down."""
        self.engine.shutdown()
        return {}

    @contextlib.contextmanager
    def _paused(self, mode: str) -> Iterator[None]:
        from sglang.srt.managers.io_struct import (
            ContinueGenerationReqInput,
            PauseGenerationReqInput,
        )

        run, manager = self.engine.loop.run_until_complete, self.engine.tokenizer_manager
        run(manager.pause_generation(PauseGenerationReqInput(mode=mode)))
        try:
            yield
        finally:
            run(manager.continue_generation(ContinueGenerationReqInput()))

    def _model(self, seed: int) -> Path:
        return self._folder / f"weights{seed}"

    def _save_models(self) -> None:
        kind = self._kind
        for seed in (1, 2):
            models.save_model(
                kind.model,
                self._model(seed),
                seed,
                kind.quantization,
                predictable=kind.draft == "eagle",
            )
        if kind.draft.startswith("eagle"):
            models.save_draft(self._model(1), self._folder / "draft", kind.draft, DRAFT_SEED)
        if kind.adapter:
            models.save_adapter(self._model(1), self._folder / "adapter", DRAFT_SEED)

    def _arguments(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "model_path": str(self._model(self._seed)),
            "port": _free_port(),
            # Replicas must each choose a port of their own.
            "nccl_port": None if "dp_size" in self._kind.arguments else _free_port(),
            "skip_tokenizer_init": True,
            "attention_backend": "triton",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
            "mem_fraction_static": 0.5,  # of a GPU that other engines share
            "max_total_tokens": KV_TOKENS,
            "enable_memory_saver": True,
            "cuda_graph_bs_decode": [1, 2, 4],
            "disable_prefill_cuda_graph": True,
            "random_seed": 1,
            "log_level": "info",
            **self._kind.arguments,
        }
        if self._backup:
            found["enable_weights_cpu_backup"] = True
            if self._kind.draft:
                found["enable_draft_weights_cpu_backup"] = True
        if self._kind.draft:
            draft = self._model(1) if self._kind.draft == "target" else self._folder / "draft"
            found["speculative_draft_model_path"] = str(draft)
        if self._kind.adapter:
            found |= {"enable_lora": True, "lora_paths": {"one": str(self._folder / "adapter")}}
        return found

    def _load(self, seed: int) -> None:
        named = models.tensors(self._model(seed))
        answer = self._send({name: t.to(self._kind.update) for name, t in named.items()})
        if not answer[0]:
            raise RuntimeError(f"the weights were not updated: {answer[1]}")

    def _send(self, named: dict[str, Any]) -> Any:
        """Send tensors only to the target model; `Engine` has no argument for this."""
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqInput
        from sglang.srt.utils import MultiprocessingSerializer

        # Tensors on the CPU can be opened only once, so each process gets its own payload.
        parts = [
            MultiprocessingSerializer.serialize(list(named.items())) for _ in range(self._kind.gpus)
        ]
        request = UpdateWeightsFromTensorReqInput(
            serialized_named_tensors=parts, disable_draft_model=True
        )
        update = self.engine.tokenizer_manager.update_weights_from_tensor
        return self.engine.loop.run_until_complete(update(request, None))

    def _settle(self) -> None:
        """Wait until the engine is idle, and empty its prefix cache."""
        end = time.monotonic() + SETTLE_SECONDS
        while not self.engine.flush_cache().success:
            if time.monotonic() > end:
                raise RuntimeError("the engine does not become idle")
            time.sleep(0.05)

    def _output(self) -> list[list[Any]]:
        """Return greedy tokens; run one prompt at a time, because batching changes the arithmetic.

        With a draft model, each prompt's number of verifications precedes its tokens. With an
        adapter, the prompts also run with the adapter.
        """
        self._settle()
        adapters: tuple[dict[str, Any], ...] = ({}, {"lora_path": "one"})
        found = []
        for adapter in adapters if self._kind.adapter else adapters[:1]:
            for prompt in PROMPTS:
                reply = self.controller.generate(
                    input_ids=prompt, sampling_params=_greedy(TOKENS), **adapter
                )
                steps = [reply["meta_info"]["spec_verify_ct"]] if self._kind.draft else []
                found.append([*steps, *reply["output_ids"]])
        return found


def _greedy(tokens: int) -> dict[str, Any]:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}


def _long_prompt(number: int) -> list[int]:
    """Return a prompt of `LONG_PROMPT` tokens. Prompts with different numbers begin differently."""
    return [3 + (number + 7 * at) % 2000 for at in range(LONG_PROMPT)]


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port
