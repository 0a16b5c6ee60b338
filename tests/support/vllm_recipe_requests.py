"""Requests to the engine of `vllm_recipe`, through vLLM's own loop and `AsyncLLM`.

The scheduler and the input processor are missing, and a request ends after one token. vLLM's own
code encodes and decodes every message between the engine core and its client.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
import threading
import time
from types import SimpleNamespace

import vllm_recipe
from vllm import SamplingParams
from vllm.v1.engine import (
    EngineCoreOutput,
    EngineCoreOutputs,
    EngineCoreRequest,
    EngineCoreRequestType,
    FinishReason,
)
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

TOKEN = 7
_SECONDS = 30


class Scheduler(vllm_recipe.Scheduler):
    """A scheduler whose requests end after one token."""

    kv_connector = connector = None

    def add_request(self, request) -> None:
        self.requests[request.request_id] = request

    def finish_requests(self, ids, status) -> list:
        names = list(self.requests) if ids is None else [i for i in ids if i in self.requests]
        return [self.requests.pop(name) for name in names]

    def has_request(self, request_id) -> bool:
        return request_id in self.requests

    def has_requests(self) -> bool:
        return self.pause_state.name == "UNPAUSED" and bool(self.requests)

    has_unfinished_requests = has_requests


@contextlib.contextmanager
def served(core):
    """Run the loop of a recipe's engine core in a thread for the duration of the block."""
    core.__class__ = EngineCoreProc
    vars(core).update(
        vllm_config=core.model_executor.driver_worker.worker.vllm_config,
        scheduler=Scheduler(),
        input_queue=queue.Queue(),
        output_queue=queue.Queue(),
        aborts_queue=queue.Queue(),
        batch_queue=None,
        engine_index=0,
        engines_running=False,
        process_input_queue_block=True,
        publish_dp_lb_stats=False,
        reject_new_requests=False,
        shutdown_state=EngineShutdownState.RUNNING,
        mm_receiver_cache=None,
        request_block_hasher=None,
        check_for_draft_tokens=False,
        _idle_state_callbacks=[],
    )

    def step():
        outputs = [
            EngineCoreOutput(
                request_id=name, new_token_ids=[TOKEN], finish_reason=FinishReason.LENGTH
            )
            for name in core.scheduler.requests
        ]
        core.scheduler.requests.clear()
        return {0: EngineCoreOutputs(outputs=outputs)} if outputs else {}, bool(outputs)

    core.step_fn = step

    def run() -> None:
        with contextlib.suppress(SystemExit):
            core.run_busy_loop()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        core.shutdown_state = EngineShutdownState.SHUTTING_DOWN
        core.input_queue.put((EngineCoreRequestType.WAKEUP, None))
        core.output_queue.put(None)
        thread.join(_SECONDS)
        assert not thread.is_alive()


class Client:
    """A client of an engine core that runs in a thread of this process."""

    core_engines = (b"\x00\x00",)

    def __init__(self, core) -> None:
        self.core = core
        self.resources = SimpleNamespace(engine_dead=False)
        self._numbers = itertools.count()
        self._results: dict[int, asyncio.Future] = {}
        self._outputs: asyncio.Queue = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        encoder, decoder = MsgpackEncoder(), MsgpackDecoder(EngineCoreOutputs)
        while (item := self.core.output_queue.get()) is not None:
            outputs = decoder.decode(encoder.encode(item[1]))
            self._loop.call_soon_threadsafe(self._received, outputs)

    def _received(self, outputs) -> None:
        answer = outputs.utility_output
        if answer is None:
            self._outputs.put_nowait(outputs)
        elif answer.failure_message is not None:
            self._results.pop(answer.call_id).set_exception(Exception(answer.failure_message))
        else:
            self._results.pop(answer.call_id).set_result(answer.result.result)

    async def get_output_async(self):
        return await self._outputs.get()

    async def call_utility_async(self, method, *args):
        return await self._call_utility_async(method, *args, engine=self.core_engines[0])

    async def _call_utility_async(self, method, *args, engine):
        number = next(self._numbers)
        self._results[number] = future = asyncio.get_running_loop().create_future()
        request = (0, number, method, args)
        self.core.input_queue.put((EngineCoreRequestType.UTILITY, request))
        return await asyncio.wait_for(future, _SECONDS)

    async def add_request_async(self, request) -> None:
        made = self.core.preprocess_add_request(request)
        self.core.input_queue.put((EngineCoreRequestType.ADD, made))

    async def abort_requests_async(self, ids) -> None:
        self.core.input_queue.put((EngineCoreRequestType.ABORT, ids))

    async def sleep_async(self, level, mode) -> None:
        await self.call_utility_async("sleep", level, mode)

    async def wake_up_async(self, tags=None):
        return await self.call_utility_async("wake_up", tags)

    async def is_sleeping_async(self):
        return await self.call_utility_async("is_sleeping")

    async def resume_scheduler_async(self) -> None:
        await self.call_utility_async("resume_scheduler")

    async def collective_rpc_async(self, *args):
        return await self.call_utility_async("collective_rpc", *args)

    async def add_lora_async(self, request):
        return await self.call_utility_async("add_lora", request)


class Processor(InputProcessor):
    """An input processor for requests that need no processing."""

    def __init__(self) -> None:
        pass

    def resolve_watermarking(self, params) -> None:
        return None

    def apply_watermarking(self, params, config) -> None:
        pass


async def _nothing() -> None:
    pass


def async_llm(core) -> AsyncLLM:
    """Return vLLM's `AsyncLLM` with an engine core that `serve` runs."""
    engine = AsyncLLM.__new__(AsyncLLM)
    renderer = SimpleNamespace(
        clear_mm_cache_async=_nothing,
        mm_processor_cache=None,
        shutdown=lambda: None,
        stat_mm_cache=lambda: None,
    )
    config = core.vllm_config
    config.cache_config = SimpleNamespace(kv_sharing_fast_prefill=False)
    vars(engine).update(
        vllm_config=config,
        model_config=config.model_config,
        scheduler_config=SimpleNamespace(max_num_queued_reqs=None, max_num_queued_tokens=None),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        renderer=renderer,
        input_processor=Processor(),
        output_processor=OutputProcessor(None, log_stats=False),
        engine_core=Client(core),
        admission_stats=None,
        logger_manager=None,
        log_stats=False,
        log_requests=False,
        output_handler=None,
        shutdown=lambda timeout=None: None,
        _client_count=1,
    )
    return engine


def request(name: str, **params) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        mm_features=None,
        sampling_params=SamplingParams(max_tokens=1, **params),
        pooling_params=None,
        arrival_time=time.time(),
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )


async def generate(engine, name: str = "a", **params) -> list[int]:
    """Return the tokens of one generation."""
    made, tokens = request(name, **params), []
    async for output in engine.generate(made, made.sampling_params, name):
        tokens += output.outputs[0].token_ids
    return tokens
