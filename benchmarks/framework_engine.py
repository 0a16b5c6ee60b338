"""Perform a framework's calls on an SGLang engine."""

from __future__ import annotations

import time
from typing import Any

from sglang_engine import EngineWorker

PROMPTS = ([5, 6, 7, 8, 91, 44], [9, 10, 11], list(range(3, 103)))
TOKENS = 32


class CallsWorker(EngineWorker):
    """A worker that performs calls on the engine; see `EngineWorker` for the arguments."""

    def call(self, call: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Perform one call, and return its duration in seconds."""
        begin = time.perf_counter()
        getattr(self, f"_{call}")(**arguments)
        return {"seconds": round(time.perf_counter() - begin, 6)}

    def output(self) -> dict[str, Any]:
        """Return the tokens that the engine generates."""
        sampling = {"temperature": 0, "max_new_tokens": TOKENS, "ignore_eos": True}
        replies = self.engine.generate(input_ids=list(PROMPTS), sampling_params=sampling)
        return {"tokens": [list(reply["output_ids"]) for reply in replies]}

    def state(self) -> dict[str, Any]:
        """Return the engine's output and the checksum of its weights."""
        checksum, why = self.checksum()
        if not checksum:
            raise RuntimeError(f"the engine reported no checksum of its weights: {why}")
        return {"checksum": checksum, **self.output()}

    def load(self, names: list[str], data: str, requests: str, last: bool) -> dict[str, Any]:
        """Load the weights from a trainer's request, and return the duration in seconds."""
        begin = time.perf_counter()
        weights: list[Any] = [data]
        if not requests:
            from sglang.srt.model_executor.model_runner_components.weight_updater import (
                LocalSerializedTensor,
            )

            weights = [(names[0], LocalSerializedTensor(values=[data]))]
        done, message = self.engine.update_weights_from_tensor(
            weights, load_format=requests or None, flush_cache=last and not requests
        )
        if not done:
            raise RuntimeError(f"the weights {names} were not updated: {message}")
        return {"seconds": round(time.perf_counter() - begin, 6)}

    def _flush(self) -> None:
        self.engine.flush_cache()

    def _release(self, tags: list[str] | None) -> None:
        self.engine.release_memory_occupation(tags=tags)

    def _resume(self, tags: list[str] | None) -> None:
        self.engine.resume_memory_occupation(tags=tags)

    def _pause_generation(self, mode: str) -> None:
        from sglang.srt.managers.io_struct import PauseGenerationReqInput

        pause = self.engine.tokenizer_manager.pause_generation
        self.engine.loop.run_until_complete(pause(PauseGenerationReqInput(mode=mode)))

    def _continue_generation(self) -> None:
        from sglang.srt.managers.io_struct import ContinueGenerationReqInput

        resume = self.engine.tokenizer_manager.continue_generation
        self.engine.loop.run_until_complete(resume(ContinueGenerationReqInput()))
