"""An engine with SGLang's interface and without its mercy: what ends SGLang's scheduler ends it.

The parts have the names, fields and message types of SGLang 0.5.16 and 0.5.23 that memsaver's
integration uses (and of 0.5.12, where asked for): a scheduler with its weight updater, a tokenizer
manager that asks the schedulers and waits for all of them, an `Engine` with an event loop, and a
server. A scheduler that died does not answer any more, so that whoever waits for it waits for ever.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import types
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TAGS = ("kv_cache", "weights", "cuda_graph")


# --- messages -------------------------------------------------------------------------------------


@dataclass
class ReleaseMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ResumeMemoryOccupationReqInput:
    tags: list[str] | None = None


@dataclass
class ReleaseMemoryOccupationReqOutput:
    rid: str | None = None


@dataclass
class ResumeMemoryOccupationReqOutput:
    rid: str | None = None


@dataclass
class GetInternalStateReqOutput:
    internal_state: dict = field(default_factory=dict)


@dataclass
class FlushCacheReqOutput:
    success: bool


# --- the saver ------------------------------------------------------------------------------------


class Saver:
    """Another saver than memsaver's. It cannot resume what it did not pause, nor without room."""

    def __init__(self) -> None:
        self.paused: set[str] = set()
        self.full = False

    def pause(self, tag: str) -> None:
        if tag in self.paused:
            raise RuntimeError(f"{tag} is paused already")
        self.paused.add(tag)

    def resume(self, tag: str) -> None:
        if self.full:
            raise MemoryError(tag)
        self.paused.remove(tag)


# --- the scheduler's process ----------------------------------------------------------------------


class Updater:
    """SGLang's handlers of release and resume, as trusting as they are."""

    def __init__(self, scheduler, saver, group=None) -> None:
        self.scheduler, self.memory_saver_adapter, self.tp_cpu_group = scheduler, saver, group
        self.offload_tags: set[str] = set()
        self.is_fully_idle = scheduler.is_fully_idle
        self.prepare_error: Exception | None = None  # of a release, before its barrier
        self.resume_errors: dict[str, Exception] = {}  # of a resume, by where it raises them
        self.queue_open = True  # of the KV cache

    def release_memory_occupation(self, recv_req):
        assert self.is_fully_idle(), "only when the server is idle"
        tags = recv_req.tags or TAGS
        self.offload_tags.update(tags)
        if "kv_cache" in tags:
            self.queue_open = False
            self.memory_saver_adapter.pause("kv_cache")
            self.scheduler.flush_cache()
        if "weights" in tags:
            if self.prepare_error is not None:
                raise self.prepare_error
            self.stashed_model_static_state = self.scheduler.buffers()
            self._barrier()
            self.memory_saver_adapter.pause("weights")
        if "cuda_graph" in tags:
            self.memory_saver_adapter.pause("cuda_graph")
        return ReleaseMemoryOccupationReqOutput()

    def resume_memory_occupation(self, recv_req):
        tags = recv_req.tags or TAGS
        for tag in tags:
            self.offload_tags.remove(tag)
        if "cuda_graph" in tags:
            self.memory_saver_adapter.resume("cuda_graph")
        if "weights" in tags:
            self._raise("before weights")
            self.memory_saver_adapter.resume("weights")
            self._barrier()
            self._raise("after weights")
            self.scheduler.restore_buffers(self.stashed_model_static_state)
            del self.stashed_model_static_state
        if "kv_cache" in tags:
            self.memory_saver_adapter.resume("kv_cache")
            self.queue_open = True
            self._raise("after kv_cache")
        return ResumeMemoryOccupationReqOutput()

    def _raise(self, where: str) -> None:
        if where in self.resume_errors:
            raise self.resume_errors[where]

    def _barrier(self) -> None:
        if self.tp_cpu_group is not None:
            import torch.distributed

            torch.distributed.barrier(self.tp_cpu_group)


class UpdateWeightsMixin:
    """The same of SGLang 0.5.12, where they are the scheduler's own."""

    def release_memory_occupation(self, recv_req):
        assert self.is_fully_idle(), "only when the server is idle"
        tags = recv_req.tags or TAGS
        self.offload_tags.update(tags)
        if "kv_cache" in tags:
            self.memory_saver_adapter.pause("kv_cache")
            self.flush_cache()
        if "weights" in tags:
            if self.prepare_error is not None:
                raise self.prepare_error
            self.stashed_model_static_state = self.buffers()
            self.memory_saver_adapter.pause("weights")
        if "cuda_graph" in tags:
            self.memory_saver_adapter.pause("cuda_graph")
        return ReleaseMemoryOccupationReqOutput()

    def resume_memory_occupation(self, recv_req):
        tags = recv_req.tags or TAGS
        for tag in tags:
            self.offload_tags.remove(tag)
        if "cuda_graph" in tags:
            self.memory_saver_adapter.resume("cuda_graph")
        if "weights" in tags:
            self.memory_saver_adapter.resume("weights")
            self.restore_buffers(self.stashed_model_static_state)
            del self.stashed_model_static_state
        if "kv_cache" in tags:
            self.memory_saver_adapter.resume("kv_cache")
        return ResumeMemoryOccupationReqOutput()


@dataclass(frozen=True)
class Tensor:
    """Bytes in the device's memory, or the host's."""

    data: bytes
    is_cuda: bool = True

    def cpu(self) -> Tensor:
        return Tensor(self.data, is_cuda=False)


class Scheduler:
    """A scheduler process: one message after the other, and dead after the first exception."""

    def __init__(self, make_updater=Updater, saver=None, group=None) -> None:
        self.running: set[str] = set()
        self.generated, self.flushed = 0, 0
        self.death: BaseException | None = None
        self.buffer: bytes | None = None  # what a model keeps beside its parameters
        self.model = None  # a simulated_driver.Block, whose first bytes are the buffer
        self._make_handlers(make_updater, saver or Saver(), group)

    def _make_handlers(self, make_updater, saver, group) -> None:
        self.weight_updater = self.handlers = make_updater(self, saver, group)

    def handle(self, name: str, message=None):
        """The answer to a message; None from a dead scheduler."""
        if self.death is not None:
            return None
        try:
            if name == "flush_cache":
                return FlushCacheReqOutput(self.flush_cache())
            if name == "get_internal_state":
                return self.get_internal_state(message)
            return getattr(self.handlers, name)(message)
        except Exception as error:
            self.death = error
            return None

    def begin(self, rid: str) -> None:
        if self.handlers.offload_tags:
            self.death = RuntimeError("an illegal memory access was encountered")
        self.running.add(rid)

    def end(self, rid: str) -> None:
        self.running.discard(rid)
        self.generated += 1

    def is_fully_idle(self) -> bool:
        return not self.running

    def flush_cache(self) -> bool:
        self.flushed += self.is_fully_idle()
        return self.is_fully_idle()

    def get_internal_state(self, recv_req):
        return GetInternalStateReqOutput({"last_gen_throughput": 0.0})

    def buffers(self):
        if self.model is None:
            return {"buffers": []}
        return {"buffers": [("rotary_emb.cos_sin_cache", Tensor(self.model.bytes()[:16]))]}

    def restore_buffers(self, saved) -> None:
        for _, tensor in saved["buffers"]:
            self.model.sim.write(self.model.address, tensor.data)


class OlderScheduler(Scheduler):
    """One that has the handlers itself, by a mixin of the classes below."""

    def _make_handlers(self, make_updater, saver, group) -> None:
        self.handlers, self.memory_saver_adapter, self.tp_cpu_group = self, saver, group
        self.offload_tags: set[str] = set()
        self.prepare_error: Exception | None = None


# --- the main process -----------------------------------------------------------------------------


class TokenizerManager:
    """Asks all schedulers, and goes on when all have answered."""

    def __init__(self, schedulers) -> None:
        self.schedulers = schedulers
        self.answer_seconds = 0.0
        self.generate_seconds = 0.0
        self.aborted = 0
        self.slow: dict[int, float] = {}  # seconds of further delay, by scheduler
        self._waiters: dict[str, tuple[list, asyncio.Event]] = {}  # by kind of message
        self._rids = 0

    def auto_create_handle_loop(self) -> None:
        asyncio.get_running_loop()

    async def _ask(self, name: str, message=None) -> list:
        """As SGLang: as many replies as there are schedulers, whoever they are from."""
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
        assert abort_all
        self.aborted += 1

    async def generate(self, prompt: str) -> dict:
        self._rids += 1
        rid, aborted = f"rid-{self._rids}", self.aborted
        for scheduler in self.schedulers:
            scheduler.begin(rid)
        if any(scheduler.death for scheduler in self.schedulers):
            await asyncio.Event().wait()
        end = asyncio.get_running_loop().time() + self.generate_seconds
        while asyncio.get_running_loop().time() < end and self.aborted == aborted:
            await asyncio.sleep(0.005)
        for scheduler in self.schedulers:
            scheduler.end(rid)
        return {"text": prompt + "!", "aborted": self.aborted != aborted}


class Engine:
    """As `sglang.Engine`: its methods drive its event loop."""

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


class Server:
    """SGLang's HTTP server, as far as a controller uses it."""

    def __init__(self, manager: TokenizerManager, api_key: str | None = None) -> None:
        self.manager, self.api_key, self.swallow_errors = manager, api_key, False
        self.failing_infos = 0  # how many of the next questions for /server_info fail
        self.loop = asyncio.new_event_loop()
        self._threads = [threading.Thread(target=self.loop.run_forever, daemon=True)]
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *_) -> None:
                pass

            def do_GET(self) -> None:
                outer._handle(self)

            do_POST = do_GET

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._threads.append(threading.Thread(target=self._http.serve_forever, args=(0.01,)))
        for thread in self._threads:
            thread.start()
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def shutdown(self) -> None:
        self._http.shutdown()
        self._http.server_close()

        def stop() -> None:
            for task in asyncio.all_tasks(self.loop):
                task.cancel()
            self.loop.call_soon(self.loop.stop)

        self.loop.call_soon_threadsafe(stop)
        for thread in self._threads:
            thread.join(10)
        self.loop.close()

    def _handle(self, http) -> None:
        key = http.headers.get("Authorization")
        if self.api_key is not None and key != f"Bearer {self.api_key}":
            return self._answer(http, 401, json.dumps({"error": "Unauthorized"}))
        body = http.rfile.read(int(http.headers.get("Content-Length", 0)))
        future = asyncio.run_coroutine_threadsafe(
            self._route(http.command, http.path, json.loads(body or b"null")), self.loop
        )
        try:
            status, text = future.result()
        except BaseException:  # the loop ends while the schedulers are dead
            return http.close_connection
        return self._answer(http, status, text)

    def _answer(self, http, status: int, text: str):
        try:
            http.send_response(status)
            http.send_header("Content-Length", str(len(text)))
            http.end_headers()
            http.wfile.write(text.encode())
        except OSError:
            pass

    async def _route(self, method: str, path: str, body) -> tuple[int, str]:
        manager = self.manager
        if method == "GET":
            if path == "/server_info" and self.failing_infos:
                self.failing_infos -= 1
                return 500, "Internal Server Error"
            if path == "/server_info":
                states = await manager.get_internal_state()
                return 200, json.dumps({"version": "0.5.23", "internal_states": states})
            return 404, "{}"
        if path in ("/release_memory_occupation", "/resume_memory_occupation"):
            release = path.startswith("/release")
            kind = ReleaseMemoryOccupationReqInput if release else ResumeMemoryOccupationReqInput
            try:
                await getattr(manager, path[1:])(kind(tags=body["tags"]), None)
            except Exception as error:
                if not self.swallow_errors:
                    return 400, json.dumps({"error": {"message": str(error)}})
            return 200, "null"
        if path == "/flush_cache":
            flushed = (await manager.flush_cache()).success
            return (200, "Cache flushed.") if flushed else (400, "Flush cache failed.")
        if path == "/abort_request":
            manager.abort_request(abort_all=body["abort_all"])
            return 200, ""
        if path == "/generate":
            return 200, json.dumps(await manager.generate(body["text"]))
        return 404, "{}"


# --- its modules ----------------------------------------------------------------------------------


@contextmanager
def modules(monkeypatch, older: bool = False):
    """SGLang's modules with these classes, which belong to the caller, for the block.

    With `older` they are those of SGLang 0.5.12, whose schedulers have the handlers themselves.
    """
    classes = types.SimpleNamespace(
        Updater=type("SchedulerWeightUpdaterManager", (Updater,), {}),
        Mixin=type("SchedulerUpdateWeightsMixin", (UpdateWeightsMixin,), {}),
        Scheduler=type("Scheduler", (Scheduler,), {}),
        Tokenizer=type("TokenizerControlMixin", (TokenizerManager,), {}),
    )
    if older:
        classes.Scheduler = type("Scheduler", (classes.Mixin, OlderScheduler), {})
    messages = {name: value for name, value in globals().items() if "Req" in name}
    contents = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.managers": {},
        "sglang.srt.managers.io_struct": messages,
        "sglang.srt.managers.scheduler": {"Scheduler": classes.Scheduler},
        "sglang.srt.managers.tokenizer_control_mixin": {"TokenizerControlMixin": classes.Tokenizer},
    }
    if older:
        contents["sglang.srt.managers.scheduler_update_weights_mixin"] = {
            "SchedulerUpdateWeightsMixin": classes.Mixin
        }
    else:
        contents["sglang.srt.managers.scheduler_components"] = {}
        contents["sglang.srt.managers.scheduler_components.weight_updater"] = {
            "SchedulerWeightUpdaterManager": classes.Updater
        }
    with monkeypatch.context() as patch:
        for name, values in contents.items():
            module = types.ModuleType(name)
            module.__path__ = []
            vars(module).update(values)
            patch.setitem(sys.modules, name, module)
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        yield classes
