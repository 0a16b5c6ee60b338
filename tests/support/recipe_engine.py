"""The part of an SGLang engine that releases and resumes memory, on the simulated driver.

It uses SGLang's own code: its HTTP server, its tokenizer manager's control calls, its scheduler's
handlers, and its plugin system, which finds memsaver. The parts that need a GPU are missing: the
model's weights and the KV cache are blocks of simulated memory, and nothing is generated.
"""

from __future__ import annotations

import asyncio
import pickle
import queue
import threading
from types import SimpleNamespace

import torch
import uvicorn
from sglang.srt.entrypoints import http_server
from sglang.srt.managers.io_struct import (
    FlushCacheReqInput,
    FlushCacheReqOutput,
    GetInternalStateReq,
    GetInternalStateReqOutput,
    ReleaseMemoryOccupationReqInput,
    ResumeMemoryOccupationReqInput,
)
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang.utils import TypeBasedDispatcher
from simulated_driver import Block

from memsaver.integrations.sglang import scheduler as memsavers_hooks

try:
    from sglang.srt.managers.scheduler_components import weight_updater

    Mixin = object
except ImportError:  # older versions, whose handlers are a mixin
    from sglang.srt.managers.scheduler_update_weights_mixin import (
        SchedulerUpdateWeightsMixin as Mixin,
    )

    weight_updater = None

MIB = 1 << 20


class Scheduler(Mixin):
    """A scheduler's thread, which runs SGLang's handlers for one message at a time."""

    def __init__(self, sim) -> None:
        saver = TorchMemorySaverAdapter.create(enable=True)
        with saver.region(tag="weights", enable_cpu_backup=True):
            self.weights = Block(sim, 4 * MIB, 1)
        with saver.region(tag="kv_cache"):
            self.kv_cache = Block(sim, 8 * MIB, 2)
        self.disaggregation_mode = None
        self.flushes = 0
        self.running = 0  # the number of requests
        self.death: BaseException | None = None
        model = torch.nn.Module()
        model.register_buffer("cos_sin_cache", torch.arange(8.0))
        parts = {
            "tp_worker": SimpleNamespace(model_runner=SimpleNamespace(model=model)),
            "draft_worker": None,
            "tp_cpu_group": None,
            "memory_saver_adapter": saver,
        }
        if weight_updater is None:
            vars(self).update(parts, offload_tags=set())
            self.handlers = self
        else:
            self.weight_updater = self.handlers = weight_updater.SchedulerWeightUpdaterManager(
                flush_cache=self.flush_cache,
                is_fully_idle=self.is_fully_idle,
                scheduler=self,
                **parts,
            )
        self._inbox: queue.Queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def tell(self, message: bytes, answer) -> None:
        self._inbox.put((message, answer))

    def close(self) -> None:
        self._inbox.put(None)
        self._thread.join(10)

    def is_fully_idle(self) -> bool:
        return self.running == 0

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.flushes += self.is_fully_idle()
        return self.is_fully_idle()

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            message, answer = item
            try:
                answer(pickle.dumps(self._handle(pickle.loads(message))))
            except BaseException as error:  # it ends the engine, as in SGLang
                self.death = error
                return

    def _handle(self, request):
        if isinstance(request, ReleaseMemoryOccupationReqInput):
            return self.handlers.release_memory_occupation(request)
        if isinstance(request, ResumeMemoryOccupationReqInput):
            return self.handlers.resume_memory_occupation(request)
        if isinstance(request, FlushCacheReqInput):
            return FlushCacheReqOutput(success=self.flush_cache())
        if isinstance(request, GetInternalStateReq):
            state = GetInternalStateReqOutput(internal_state={})
            return memsavers_hooks.add_state(state, self)
        raise AssertionError(f"no handler for {request!r}")


class Tokenizer(TokenizerControlMixin):
    """SGLang's control calls, whose messages go to the scheduler's thread."""

    def __init__(self, server_args: ServerArgs, scheduler: Scheduler) -> None:
        self.server_args = server_args
        self._scheduler = scheduler
        self._result_dispatcher = TypeBasedDispatcher([])
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self._dispatch_to_scheduler)  # 0.5.12
        self.init_communicators(server_args)

    def auto_create_handle_loop(self) -> None:
        self.loop = asyncio.get_running_loop()

    def _dispatch_to_scheduler(self, message) -> None:
        def answer(data: bytes) -> None:
            self.loop.call_soon_threadsafe(self._result_dispatcher, pickle.loads(data))

        self._scheduler.tell(pickle.dumps(message), answer)


class Engine:
    """A scheduler, a tokenizer manager, and SGLang's server for them at `url`."""

    def __init__(self, sim) -> None:
        load_plugins()
        self.scheduler = Scheduler(sim)
        args = ServerArgs(model_path="none")
        self.tokenizer = Tokenizer(args, self.scheduler)
        http_server.set_global_state(
            http_server._GlobalState(
                tokenizer_manager=self.tokenizer, template_manager=None, scheduler_info={}
            )
        )
        # The server's startup and shutdown code only concerns generation, which is missing here.
        config = uvicorn.Config(http_server.app, port=0, lifespan="off", log_level="error")
        self._server = uvicorn.Server(config)
        self.loop = asyncio.new_event_loop()
        started = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(started,), daemon=True)
        self._thread.start()
        assert started.wait(30)
        self.host, self.port = self._server.servers[0].sockets[0].getsockname()[:2]
        self.url = f"http://{self.host}:{self.port}"

    def run(self, coroutine):
        """Run a coroutine on the server's event loop, and return its result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.loop.close()
        self.scheduler.close()
        http_server.set_global_state(None)

    def _serve(self, started: threading.Event) -> None:
        async def serve() -> None:
            task = asyncio.ensure_future(self._server.serve())
            while not self._server.started and not task.done():
                await asyncio.sleep(0.01)
            started.set()
            await task

        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(serve())
