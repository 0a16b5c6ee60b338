"""The part of an SGLang engine that releases and resumes memory, on the simulated driver.

The engine uses these unmodified parts of SGLang: the HTTP server, the tokenizer manager's control
calls, the messages, the scheduler's handlers, and the plugin system. SGLang finds memsaver through
the plugin system. Parts that need a GPU are missing. The weights and the KV cache are blocks of
simulated memory, the model that receives new weights is on the CPU, and the engine generates no
output.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import pickle
import queue
import threading
from types import SimpleNamespace

import torch
import uvicorn
from recipe_updater import Mixin, published, updater_of, weight_updater
from sglang.srt.entrypoints import http_server
from sglang.srt.managers import io_struct
from sglang.srt.managers.tokenizer_control_mixin import TokenizerControlMixin
from sglang.srt.plugins import load_plugins
from sglang.srt.server_args import ServerArgs
from sglang.srt.utils.aio_rwlock import RWLock
from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter
from sglang.utils import TypeBasedDispatcher
from simulated_driver import Block

from memsaver.integrations.sglang import scheduler as memsavers_hooks

MIB = 1 << 20


def encode(message) -> bytes:
    """Encode a message as SGLang encodes messages to other processes."""
    with_msgpack = getattr(io_struct, "msgpack_encode", None)
    return pickle.dumps(message) if with_msgpack is None else bytes(with_msgpack(message))


def decode(data: bytes):
    """Decode a message from another process."""
    with_msgpack = getattr(io_struct, "msgpack_decode", None)
    return pickle.loads(data) if with_msgpack is None else with_msgpack(data)


class Model(torch.nn.Module):
    """A model with a weight, a buffer, and the interface of SGLang's weight loader."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.arange(8.0))
        self.weight = torch.nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, named_tensors) -> None:
        parameters = dict(self.named_parameters())
        for name, tensor in named_tensors:
            if name in parameters:  # a draft model ignores the other model's weights
                parameters[name].copy_(tensor)


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
        self._engine_paused = False
        self.versions: list[str | None] = []  # of the weights
        self.death: BaseException | None = None
        self.model = Model()
        # Versions before 0.5.20 read the arguments there.
        runner = SimpleNamespace(
            model=self.model, server_args=SimpleNamespace(weight_cache_mode="off")
        )
        parts = {
            "tp_worker": SimpleNamespace(model_runner=runner),
            "draft_worker": None,
            "memory_saver_adapter": saver,
        }
        if weight_updater is None:
            vars(self).update(parts, tp_cpu_group=None, offload_tags=set())
            self.handlers = self
        else:
            self.weight_updater = self.handlers = updater_of(
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

    def is_fully_idle(self, ignore_waiting: bool = False) -> bool:
        return self.running == 0

    def record_weight_version_change(self, *, new_version: str | None) -> None:
        self.versions.append(new_version)

    def flush_cache(self, empty_cache: bool = True) -> bool:
        self.flushes += self.is_fully_idle()
        return self.is_fully_idle()

    def _run(self) -> None:
        while (item := self._inbox.get()) is not None:
            message, answer = item
            try:
                answer(encode(self._handle(decode(message))))
            except BaseException as error:  # it crashes the engine, as in SGLang
                self.death = error
                return

    def _handle(self, request):
        kind = type(request).__name__
        if kind == "FlushCacheReqInput":
            return io_struct.FlushCacheReqOutput(success=self.flush_cache())
        if kind == "GetInternalStateReq":
            state = io_struct.GetInternalStateReqOutput(internal_state={})
            return memsavers_hooks.add_state(state, self)
        return getattr(self.handlers, HANDLERS[kind])(request)


# SGLang's handlers, by the requests that they serve.
HANDLERS = {
    "BeginWeightUpdateReqInput": "begin_weight_update",
    "EndWeightUpdateReqInput": "end_weight_update",
    "ReleaseMemoryOccupationReqInput": "release_memory_occupation",
    "ResumeMemoryOccupationReqInput": "resume_memory_occupation",
    "UpdateWeightsFromTensorReqInput": "update_weights_from_tensor",
}


class Tokenizer(TokenizerControlMixin):
    """SGLang's control calls, which send their messages to the scheduler's thread."""

    def __init__(self, server_args: ServerArgs, scheduler: Scheduler) -> None:
        self.server_args = server_args
        self._scheduler = scheduler
        self._result_dispatcher = TypeBasedDispatcher([])
        self.send_to_scheduler = SimpleNamespace(send_pyobj=self._dispatch_to_scheduler)  # 0.5.12
        takes_arguments = "server_args" in inspect.signature(self.init_communicators).parameters
        self.init_communicators(*([server_args] if takes_arguments else []))
        self.is_pause, self.is_pause_cond = False, asyncio.Condition()
        self.model_update_lock, self.mm_processor = RWLock(), None
        self.startup_time = 0.0

    def resolved_config_dict(self, arguments: dict) -> dict:  # 0.5.17
        return arguments

    def auto_create_handle_loop(self) -> None:
        self.loop = asyncio.get_running_loop()

    def _dispatch_to_scheduler(self, message) -> None:
        def answer(data: bytes) -> None:
            self.loop.call_soon_threadsafe(self._result_dispatcher, decode(data))

        self._scheduler.tell(encode(message), answer)


class Engine:
    """A scheduler, a tokenizer manager, and SGLang's server at `url`."""

    def __init__(self, sim) -> None:
        load_plugins()
        self._published = contextlib.ExitStack()
        self._published.enter_context(published())
        self.scheduler = Scheduler(sim)
        args = ServerArgs(model_path="none", enable_memory_saver=True)
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
        """Run a coroutine on the server's event loop and return the result."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(30)

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.loop.close()
        self.scheduler.close()
        http_server.set_global_state(None)
        self._published.close()

    def _serve(self, started: threading.Event) -> None:
        async def serve() -> None:
            task = asyncio.ensure_future(self._server.serve())
            while not self._server.started and not task.done():
                await asyncio.sleep(0.01)
            started.set()
            await task

        asyncio.set_event_loop(self.loop)
        self.loop.run_until_complete(serve())
