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


@dataclass
class GenerateReqInput:
    rid: list[str] | None = None
    input_ids: list[list[int]] | None = None
    sampling_params: list[dict] | None = None
    return_logprob: bool = False
    image_data: list | None = None
    video_data: list | None = None
    audio_data: list | None = None


@dataclass
class PauseGenerationReqInput:
    mode: str = "abort"


@dataclass
class ContinueGenerationReqInput:
    torch_empty_cache: bool = True


@dataclass
class UpdateWeightsFromTensorReqInput:
    serialized_named_tensors: list
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None
    rid: str | None = None


@dataclass
class UpdateWeightsFromDistributedReqInput:
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weight_update_group"
    flush_cache: bool = True
    weight_version: str | None = None
    load_format: str | None = None
    rid: str | None = None


@dataclass
class InitWeightsUpdateGroupReqInput:
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


@dataclass
class DestroyWeightsUpdateGroupReqInput:
    group_name: str = "weight_update_group"


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
        self.finishes = False  # what is being generated, whatever its time
        self.aborted = 0
        self.server_args = types.SimpleNamespace(
            tp_size=1, skip_tokenizer_init=True, weight_version="default"
        )
        self.version = "0.5.23"
        self.groups: dict[str, InitWeightsUpdateGroupReqInput] = {}  # that were joined, by name
        self.loaded: list = []  # requests that brought weights
        self.aborted_rids: set[str] = set()
        self.paused = asyncio.Condition()
        self.pause_mode = ""
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
        assert abort_all or rid
        self.aborted += abort_all
        self.aborted_rids |= {rid} - {""}

    async def generate_request(self, obj: GenerateReqInput, request=None):
        """As SGLang for a batch of token ids: what a prompt gives depends on its tokens alone."""
        lists = (obj.rid, obj.input_ids, obj.sampling_params)
        images = obj.image_data or [[]] * len(obj.rid)
        assert len(set(obj.rid)) == len(obj.rid) and {len(one) for one in lists} == {len(images)}
        assert all(isinstance(one, list) for one in images)
        async with self.paused:
            await self.paused.wait_for(lambda: not self.pause_mode)
        # The scheduler goes on whether somebody waits for it or not.
        samples = [
            asyncio.ensure_future(self._sample(*one)) for one in zip(*lists, images, strict=True)
        ]
        yield await asyncio.gather(*map(asyncio.shield, samples))

    async def _sample(self, rid: str, tokens: list[int], params: dict, images: list) -> dict:
        if not tokens or "n" in params:
            raise ValueError("SGLang would not take it like this")
        if params.get("max_new_tokens", 128) > 8192:
            raise ValueError("the requested tokens exceed the context length")
        for scheduler in self.schedulers:
            scheduler.begin(rid)
        if any(scheduler.death for scheduler in self.schedulers):
            await asyncio.Event().wait()
        aborted = self.aborted
        end = asyncio.get_running_loop().time() + self.generate_seconds
        while asyncio.get_running_loop().time() < end and not self.finishes:
            if self.aborted != aborted or rid in self.aborted_rids:
                break
            await asyncio.sleep(0.005)
        else:
            aborted = None
        for scheduler in self.schedulers:
            scheduler.end(rid)
        made = generated(tokens, params, images)
        if aborted is not None:
            made = made[: len(made) // 2]
        reason = {"type": "abort"} if aborted is not None else finish_of(params, made)
        logprobs = [(-token / 1000, token, None) for token in made]
        version = self.server_args.weight_version
        meta = {"id": rid, "finish_reason": reason, "weight_version": version}
        meta["output_token_logprobs"] = logprobs
        return {"output_ids": made, "meta_info": meta}

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


def generated(tokens: list[int], params: dict, images: list = ()) -> list[int]:
    """What the engine generates: tokens that tell what they were generated from."""
    first = sum(tokens) + 7 * params.get("sampling_seed", 0) + 100 * len(images)
    return [first + number for number in range(params.get("max_new_tokens", 128))]


def dies_in_a_release(manager: TokenizerManager) -> None:
    """Its first scheduler ends at the next release of weights, which it has begun."""
    manager.schedulers[0].weight_updater.prepare_error = RuntimeError("killed")


def finish_of(params: dict, made: list[int]) -> dict:
    """SGLang's reason of a request that ended by itself."""
    return {"type": "length", "length": len(made)}


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
                info = {**vars(manager.server_args), "version": manager.version}
                return 200, json.dumps({**info, "internal_states": states})
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
            manager.abort_request(**body)
            return 200, ""
        if path == "/generate" and "input_ids" in body:
            try:
                return 200, json.dumps(
                    await manager.generate_request(GenerateReqInput(**body)).__anext__()
                )
            except ValueError as error:
                return 400, json.dumps({"error": {"message": str(error)}})
        if path == CHECKER:
            success, message, ranks, _ = await manager.check_weights(types.SimpleNamespace(**body))
            answer = {"success": success, "message": message, "ranks": ranks}
            return 200, json.dumps(answer)
        if path in CALLS:
            answer = await getattr(manager, path[1:])(CALLS[path](**body))
            success, message = answer or (True, "")
            answer = {"success": success, "message": message}
            return (200 if success else 400), json.dumps(answer)
        if path == "/generate":
            return 200, json.dumps(await manager.generate(body["text"]))
        return 404, "{}"


CHECKER = ""  # where checksums are asked for; no path of older versions
CALLS = {
    "/pause_generation": PauseGenerationReqInput,
    "/continue_generation": ContinueGenerationReqInput,
    "/update_weights_from_tensor": UpdateWeightsFromTensorReqInput,
    "/update_weights_from_distributed": UpdateWeightsFromDistributedReqInput,
    "/init_weights_update_group": InitWeightsUpdateGroupReqInput,
    "/destroy_weights_update_group": DestroyWeightsUpdateGroupReqInput,
}


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
