"""The main process: an `Engine` and a tokenizer manager that sends requests to schedulers."""

from __future__ import annotations

import asyncio
import types

from fake_sglang.messages import (
    ContinueGenerationReqInput,
    GenerateReqInput,
    InitWeightsUpdateGroupReqInput,
    PauseGenerationReqInput,
)


class TokenizerManager:
    """Sends requests to all schedulers and continues when all have answered."""

    def __init__(self, schedulers) -> None:
        self.schedulers = schedulers
        self.answer_seconds = 0.0
        self.generate_seconds = 0.0
        self.finishes = False  # ends generations in progress normally
        self.aborted = 0
        self.server_args = types.SimpleNamespace(
            tp_size=1, skip_tokenizer_init=True, weight_version="default"
        )
        self.version = "0.5.23"
        self.groups: dict[str, InitWeightsUpdateGroupReqInput] = {}  # by name
        self.loaded: list = []  # requests with weights
        self.aborted_rids: set[str] = set()
        self.paused = asyncio.Condition()
        self.pause_mode = ""
        self.slow: dict[int, float] = {}  # seconds of further delay, by scheduler
        self._waiters: dict[str, tuple[list, asyncio.Event]] = {}  # by kind of message
        self._rids = 0

    def auto_create_handle_loop(self) -> None:
        asyncio.get_running_loop()

    async def _ask(self, name: str, message=None) -> list:
        """Return as many replies as there are schedulers, from any scheduler, as SGLang does."""
        replies, enough = self._waiters[name] = [], asyncio.Event()
        loop = asyncio.get_running_loop()
        for number, scheduler in enumerate(self.schedulers):
            delay = self.answer_seconds + self.slow.get(number, 0.0)
            loop.call_later(delay, self._reply, name, scheduler, message)
        await enough.wait()
        return replies

    def _reply(self, name: str, scheduler, message) -> None:
        answer = scheduler.handle(name, message)
        replies, enough = self._waiters[name]
        if answer is not None and not enough.is_set():
            replies.append(answer)
            if len(replies) == len(self.schedulers):
                enough.set()

    async def release_memory_occupation_communicator(self, obj):
        return await self._ask("release_memory_occupation", obj)

    async def resume_memory_occupation_communicator(self, obj):
        return await self._ask("resume_memory_occupation", obj)

    async def release_memory_occupation(self, obj, request=None):
        await self.release_memory_occupation_communicator(obj)

    async def resume_memory_occupation(self, obj, request=None):
        await self.resume_memory_occupation_communicator(obj)

    async def flush_cache(self, timeout_s=None):
        return (await self._ask("flush_cache"))[0]

    async def get_internal_state(self):
        return [answer.internal_state for answer in await self._ask("get_internal_state")]

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        assert abort_all or rid
        self.aborted += abort_all
        self.aborted_rids |= {rid} - {""}

    async def generate_request(self, obj: GenerateReqInput, request=None):
        """Generate outputs for a batch of token ids, as SGLang does.

        Each output depends only on its own prompt.
        """
        assert obj.text is None or not self.server_args.skip_tokenizer_init
        tokens = obj.input_ids or [list(text.encode()) for text in obj.text]
        lists = (obj.rid, tokens, obj.sampling_params)
        images = obj.image_data or [[]] * len(obj.rid)
        assert len(set(obj.rid)) == len(obj.rid) and {len(one) for one in lists} == {len(images)}
        assert all(isinstance(one, list) for one in images)
        async with self.paused:
            await self.paused.wait_for(lambda: not self.pause_mode)
        # The scheduler continues even if nobody waits for it.
        samples = [
            asyncio.ensure_future(self._sample(*one)) for one in zip(*lists, images, strict=True)
        ]
        yield await asyncio.gather(*map(asyncio.shield, samples))

    async def _sample(self, rid: str, tokens: list[int], params: dict, images: list) -> dict:
        if not tokens or "n" in params:
            raise ValueError("SGLang would not take it like this")
        if params.get("max_new_tokens", 128) > 8192:
            raise ValueError("the requested tokens exceed the context length")
        is_aborted = await self._run(rid)
        made = generated(tokens, params, images)
        if is_aborted:
            made = made[: len(made) // 2]
        reason = {"type": "abort"} if is_aborted else {"type": "length", "length": len(made)}
        logprobs = [(-token / 1000, token, None) for token in made]
        version = self.server_args.weight_version
        meta = {"id": rid, "finish_reason": reason, "weight_version": version}
        meta["output_token_logprobs"] = logprobs
        return {"output_ids": made, "meta_info": meta}

    async def _run(self, rid: str) -> bool:
        """Let the schedulers process a request until its end; return whether the request was
        aborted.
        """
        for scheduler in self.schedulers:
            scheduler.begin(rid)
        if any(scheduler.death for scheduler in self.schedulers):
            await asyncio.Event().wait()
        before, is_aborted = self.aborted, False
        end = asyncio.get_running_loop().time() + self.generate_seconds
        while asyncio.get_running_loop().time() < end and not (self.finishes or is_aborted):
            await asyncio.sleep(0.005)
            is_aborted = self.aborted != before or rid in self.aborted_rids
        for scheduler in self.schedulers:
            scheduler.end(rid)
        return is_aborted

    async def pause_generation(self, obj: PauseGenerationReqInput) -> None:
        assert obj.mode in ("abort", "retract", "in_place")
        self.pause_mode = obj.mode
        if obj.mode == "abort":
            self.abort_request(abort_all=True)
            while not all(scheduler.is_fully_idle() for scheduler in self.schedulers):
                await asyncio.sleep(0.005)

    async def continue_generation(self, obj: ContinueGenerationReqInput) -> None:
        async with self.paused:
            self.pause_mode = ""
            self.paused.notify_all()

    async def update_weights_from_tensor(self, obj, request=None) -> tuple[bool, str]:
        if obj.serialized_named_tensors and "bad" in obj.serialized_named_tensors[0]:
            return False, "a tensor that the model does not have"
        return self._load(obj)

    async def update_weights_from_distributed(self, obj, request=None) -> tuple[bool, str]:
        if obj.group_name not in self.groups:
            return False, f"group {obj.group_name} is not known"
        return self._load(obj)

    def _load(self, obj) -> tuple[bool, str]:
        if any("weights" in s.weight_updater.offload_tags for s in self.schedulers):
            for scheduler in self.schedulers:
                scheduler.death = RuntimeError("an illegal memory access was encountered")
        self.loaded.append(obj)
        if obj.weight_version is not None:
            self.server_args.weight_version = obj.weight_version
        return True, "Succeeded."

    async def init_weights_update_group(self, obj, request=None) -> tuple[bool, str]:
        self.groups[obj.group_name] = obj
        return True, "Succeeded."

    async def destroy_weights_update_group(self, obj, request=None) -> tuple[bool, str]:
        known = self.groups.pop(obj.group_name, None) is not None
        return known, "Succeeded." if known else f"group {obj.group_name} is not known"

    async def generate(self, prompt: str) -> dict:
        self._rids += 1
        return {"text": prompt + "!", "aborted": await self._run(f"rid-{self._rids}")}


def generated(tokens: list[int], params: dict, images: list = ()) -> list[int]:
    """Return the engine's output tokens, which depend on the prompt and the weights."""
    first = sum(tokens) + 7 * params.get("sampling_seed", 0) + 100 * len(images)
    return [first + number for number in range(params.get("max_new_tokens", 128))]


def dies_in_a_release(manager: TokenizerManager) -> None:
    """Make the first scheduler exit during the next release of weights."""
    manager.schedulers[0].weight_updater.prepare_error = RuntimeError("killed")


class Engine:
    """A fake `sglang.Engine`, whose methods run its event loop."""

    def __init__(self, manager: TokenizerManager) -> None:
        self.tokenizer_manager = manager
        self.loop = asyncio.new_event_loop()

    def generate(self, prompt=None, sampling_params=None, stream=False):
        if stream:
            return iter([self.loop.run_until_complete(self.tokenizer_manager.generate(prompt))])
        return self.loop.run_until_complete(self.tokenizer_manager.generate(prompt))

    def shutdown(self) -> None:
        for task in asyncio.all_tasks(self.loop):
            task.cancel()
        self.loop.run_until_complete(asyncio.sleep(0))
        self.loop.close()
