"""A fake engine that loads weights as SGLang does, on the CPU, for tests of weight updates.

The engine has a model with fused, sharded, transposed, padded, cast and tied weights. The ranks
have the classes that update weights in SGLang 0.5.16 and 0.5.23, with memsaver's hooks. The backend
calls ranks in this process. Without the hooks, an exception in a loader terminates a rank, as in
SGLang.
"""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import io
import pickle
import sys
import types
from dataclasses import dataclass, field, replace

import torch

from memsaver._memory.sharing.wire import domain
from memsaver.integrations.engine import hooking
from memsaver.integrations.engine.messages import SchedulerState
from memsaver.integrations.engine.status import Status, check_operation, status_of
from memsaver.integrations.engine.tags import RELEASE_ORDER
from memsaver.integrations.sglang import hooks, shared_tensors
from memsaver.integrations.sglang.protocol import text_of, verification_of
from memsaver.integrations.sglang.replies import Reply
from memsaver.integrations.sglang.weight_calls import WeightCalls

VOCAB, HIDDEN, HEADS, LAYERS = 14, 8, 4, 2
PADDED = 16

MANAGER = "sglang.srt.managers.scheduler_components.weight_updater"
RUNNER = "sglang.srt.model_executor.model_runner_components.weight_updater"
MESSAGES = "sglang.srt.managers.io_struct"


def checkpoint(seed: int = 0, dtype=torch.float32) -> dict[str, torch.Tensor]:
    """Return a trainer's unsharded weights, by their names in the checkpoint."""
    torch.manual_seed(seed)

    def made(*shape):
        return torch.randn(shape).to(dtype)

    weights = {"embed.weight": made(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        name = f"layers.{layer}."
        for part in "qkv":
            weights[f"{name}{part}.weight"] = made(HIDDEN, HIDDEN)
        weights[f"{name}o.weight"] = made(HIDDEN, HIDDEN)
        weights[f"{name}norm.weight"] = made(HIDDEN)
        weights[f"{name}scale"] = made(1)
    weights["lm_head.weight"] = weights["embed.weight"]
    return weights


def module_of(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    """Return a trainer's module whose parameters are these tensors."""
    module = torch.nn.Module()
    for name, tensor in weights.items():
        owner = module
        *path, last = name.split(".")
        for part in path:
            if not hasattr(owner, part):
                owner.add_module(part, torch.nn.Module())
            owner = getattr(owner, part)
        owner.register_parameter(last, torch.nn.Parameter(tensor))
    return module


def parameter(*shape, dtype=torch.bfloat16):
    return torch.nn.Parameter(torch.full(shape, torch.nan, dtype=dtype), requires_grad=False)


class Model(torch.nn.Module):
    """A rank's part of a model, with a weight loader."""

    def __init__(self, rank: int = 0, size: int = 1, pool: bool = False):
        super().__init__()
        self.rank, self.size, self.pool = rank, size, pool
        part = HIDDEN // size
        self.embed = parameter(PADDED, HIDDEN)
        for layer in range(LAYERS):
            self.register_parameter(f"qkv_{layer}", parameter(3 * part, HIDDEN))
            self.register_parameter(f"o_t_{layer}", parameter(part, HIDDEN))  # transposed
            self.register_parameter(f"norm_{layer}", parameter(HIDDEN, dtype=torch.float32))
            self.register_parameter(f"scale_{layer}", parameter(1, dtype=torch.float32))

    def load_weights(self, weights) -> None:
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            futures = []
            for name, tensor in weights:
                copies = self.copies(name, tensor)
                if self.pool:
                    futures += [threads.submit(to.copy_, piece) for to, piece in copies]
                else:
                    for to, piece in copies:
                        to.copy_(piece)
            for future in futures:
                future.result()

    def copies(self, name: str, tensor: torch.Tensor) -> list:
        """Return (target, source) pairs for copying a tensor into the model's memory."""
        part = HIDDEN // self.size
        begin = self.rank * part
        if name == "embed.weight":
            assert tensor.shape == (VOCAB, HIDDEN), f"a vocabulary of {len(tensor)}"
            self.embed.data[VOCAB:].fill_(0)
            return [(self.embed.data[:VOCAB], tensor)]
        if not name.startswith("layers."):
            return []  # as in SGLang, which logs it
        _, layer, kind = name.removesuffix(".weight").split(".")
        if kind in ("q", "k", "v"):
            held = getattr(self, f"qkv_{layer}").data
            at = "qkv".index(kind) * part
            return [(held.narrow(0, at, part), tensor.narrow(0, begin, part))]
        if kind == "o":
            held = getattr(self, f"o_t_{layer}").data
            return [(held, tensor.narrow(1, begin, part).t().to(torch.float32))]
        if kind == "norm":
            return [(getattr(self, f"norm_{layer}").data, tensor)]
        if kind == "scale":
            getattr(self, f"scale_{layer}").data.fill_(tensor.item())
        return []

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Return whether the model contains the whole checkpoint."""
        like = Model(self.rank, self.size)
        like.load_weights(weights.items())
        pairs = zip(self.parameters(), like.parameters(), strict=True)
        return all(torch.equal(mine, theirs) for mine, theirs in pairs)


class Eager(Model):
    """A loader that reads all weights before it writes the first weight."""

    def load_weights(self, weights):
        super().load_weights(sorted(weights, key=lambda one: one[0]))


@dataclass
class Request:
    rid: str | None = None
    serialized_named_tensors: list = field(default_factory=list)
    tensors: list = field(default_factory=list)  # received in a broadcast
    load_format: str | None = None
    flush_cache: bool = True
    weight_version: str | None = None
    selector: str | None = None


@dataclass
class Output:
    success: bool
    message: str


class _Unpickler(pickle.Unpickler):
    """An unpickler with the same restrictions as SGLang 0.5.23's."""

    ALLOWED = (
        ("torch.multiprocessing.reductions", "rebuild_tensor"),
        ("torch.multiprocessing.reductions", "rebuild_typed_storage"),
        ("torch.multiprocessing.reductions", "rebuild_storage_filename"),
        ("torch.storage", "UntypedStorage"),
        ("torch", "Tensor"),
        ("torch", "Size"),
        ("types", "SimpleNamespace"),
    )

    def find_class(self, module: str, name: str):
        known = (module, name) in self.ALLOWED
        if not known and not (module == "torch" and isinstance(getattr(torch, name), torch.dtype)):
            raise RuntimeError(f"unsafe class {module}.{name}")
        return super().find_class(module, name)


class WeightUpdater:
    """A fake of SGLang's class for a model runner, which loads named tensors into the model."""

    def __init__(self, model: Model) -> None:
        self.model = model

    def get_model(self) -> Model:
        return self.model

    def update_weights_from_tensor(self, named_tensors, load_format=None):
        if load_format == "flattened_bucket":
            flat, metadata = named_tensors["flattened_tensor"], named_tensors["metadata"]
            named_tensors = [
                (m.name, flat[m.start_idx : m.end_idx].view(m.dtype).reshape(m.shape))
                for m in metadata
            ]
            self.get_model().load_weights(named_tensors)
        elif load_format == "direct":
            _model_load_weights_direct(self.get_model(), list(named_tensors))
        else:
            self.get_model().load_weights(named_tensors)
        return True, "Success"

    def update_weights_from_ipc(self, recv_req):
        """Load tensors that another process sends, as checkpoint-engine does."""
        try:
            self.get_model().load_weights(recv_req.tensors)
        except Exception as error:
            return False, str(error)
        return True, "IPC weight update completed successfully"

    def load_weights_from_distributed(self, named_tensors):
        try:
            self.get_model().load_weights(named_tensors)
        except Exception as error:
            return False, f"Failed to update parameter online: {error}"
        return True, "Succeeded to update parameter online."


def _model_load_weights_direct(model, named_tensors) -> None:
    parameters = dict(model.named_parameters())
    for name, tensor in named_tensors:
        assert parameters[name].shape == tensor.shape, f"{name} is {tensor.shape}"
        parameters[name].data.copy_(tensor)


class SchedulerWeightUpdaterManager:
    """A fake of SGLang's per-rank updater class."""

    def __init__(self, model: Model, group=None) -> None:
        self.runner, self.tp_cpu_group, self.rank = WeightUpdater(model), group, model.rank
        self.can_flush, self.flushed = True, 0
        self.scheduler = types.SimpleNamespace(waiting_queue=[], _engine_paused=False)
        self.flush_cache = self._flush

    def is_fully_idle(self) -> bool:
        return self.can_flush and not self.scheduler.waiting_queue

    def _flush(self, empty_cache: bool) -> bool:
        self.flushed += self.is_fully_idle()
        return self.is_fully_idle()

    def update_weights_from_tensor(self, recv_req):
        data = base64.b64decode(recv_req.serialized_named_tensors[self.rank])
        named = _Unpickler(io.BytesIO(data)).load()
        success, message = self.runner.update_weights_from_tensor(named, recv_req.load_format)
        if success and recv_req.flush_cache:
            done = self.flush_cache(empty_cache=False)
            assert done, "Cache flush failed after updating weights"
        if self.tp_cpu_group is not None:
            torch.distributed.barrier(self.tp_cpu_group)
        return Output(success, message)

    def update_weights_from_ipc(self, recv_req):
        success, message = self.runner.update_weights_from_ipc(recv_req)
        if self.tp_cpu_group is not None:
            torch.distributed.barrier(self.tp_cpu_group)
        return Output(success, message)

    def update_weights_from_distributed(self, recv_req):
        return Output(*self.runner.load_weights_from_distributed(recv_req.tensors))


@contextlib.contextmanager
def hooked(patch):
    """Install the two classes as SGLang's, with memsaver's hooks, within the block."""
    classes = {}
    for module, kind in (
        (MANAGER, SchedulerWeightUpdaterManager),
        (RUNNER, WeightUpdater),
    ):
        classes[kind.__name__] = type(kind.__name__, (kind,), dict(vars(kind)))
        fake = types.ModuleType(module)
        setattr(fake, kind.__name__, classes[kind.__name__])
        classes[kind.__name__].__module__ = module
        fake._model_load_weights_direct = _model_load_weights_direct
        patch.setitem(sys.modules, module, fake)
    messages = types.ModuleType(MESSAGES)
    messages.UpdateWeightsFromTensorReqOutput = Output
    messages.UpdateWeightsFromDistributedReqOutput = Output
    messages.UpdateWeightsFromIPCReqOutput = Output
    for name in ("sglang", "sglang.srt", "sglang.srt.managers"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, MESSAGES, messages)
    sys.modules["sglang.srt.managers"].io_struct = messages
    for target, (kind, hook) in hooks._hooks_of_updates().items():
        _, owner, name = target.rsplit(".", 2)
        if hasattr(classes.get(owner), name):
            original = getattr(classes[owner], name)
            setattr(classes[owner], name, hooking.wrapped(kind, original, hook))
    patch.setitem(globals(), "WeightUpdater", classes["WeightUpdater"])
    unpickler = type("SafeUnpickler", (_Unpickler,), {"find_class": _Unpickler.find_class})
    shared_tensors.install(types.SimpleNamespace(SafeUnpickler=unpickler))
    patch.setitem(globals(), "_Unpickler", unpickler)
    yield classes["SchedulerWeightUpdaterManager"]


def _for_rank(request: Request, rank: int) -> Request:
    """Return one rank's request with its verification; here, each rank is its own group."""
    wanted = verification_of(request.rid)
    if wanted is None or len(wanted.sent) < 2:
        return request
    return replace(request, rid=text_of(replace(wanted, sent=(wanted.sent[rank],))))


class Control:
    """A fake of an engine's sleep, whose memory is only a set of released tags."""

    def __init__(self) -> None:
        self.released: frozenset[str] = frozenset()

    @property
    def status(self) -> Status:
        return status_of(self.released)

    def refresh(self) -> Status:
        return self.status

    def check(self, operation: str) -> None:
        check_operation(operation, self.released)

    @contextlib.contextmanager
    def request(self, operation: str):
        self.check(operation)
        yield

    def sleep(self, tags=None, **_):
        return self.become(self.released | self._named(tags))

    def wake_up(self, tags=None, **_):
        return self.become(self.released - self._named(tags))

    def become(self, released: frozenset[str]):
        changed = tuple(sorted(self.released ^ released))
        self.released = released
        return types.SimpleNamespace(changed=changed)

    @staticmethod
    def _named(tags) -> frozenset[str]:
        return frozenset([tags] if isinstance(tags, str) else tags or RELEASE_ORDER)


class Backend(WeightCalls):
    """An `engine.interface.Backend` for ranks in this process, which receive SGLang's requests."""

    other_ranks = ""

    def __init__(
        self, make_manager=SchedulerWeightUpdaterManager, size=1, replicas=1, **model
    ) -> None:
        assert size == 1 or replicas == 1
        self.tp_size, self.control, self.link = size * replicas, Control(), self
        self.models = [Model(rank, size, **model) for _ in range(replicas) for rank in range(size)]
        self.ranks = [make_manager(one) for one in self.models]
        for number, rank in enumerate(self.ranks if replicas > 1 else ()):
            rank.scheduler.server_args = types.SimpleNamespace(dp_size=replicas)
            rank.scheduler.ps = types.SimpleNamespace(pp_rank=0, dp_rank=number)
        self.calls: list[str] = []
        self.version: str | None = None
        self.requests: list[Request] = []
        self.damage = lambda number: None  # called before each load with its number
        self.domain = domain()
        self.has_plugin = make_manager is not SchedulerWeightUpdaterManager

    def holds(self, weights: dict[str, torch.Tensor]) -> bool:
        """Return whether all ranks contain the whole checkpoint."""
        return all(model.holds(weights) for model in self.models)

    def states(self, timeout: float) -> list[SchedulerState]:
        return [SchedulerState("one", (), True, domain=self.domain)] if self.has_plugin else []

    def pause_generation(self, mode: str, timeout: float) -> None:
        self.calls.append(f"pause {mode}")

    def continue_generation(self, timeout: float) -> None:
        self.calls.append("continue")

    def close(self) -> None:
        pass

    def ask(self, name: str, fields, timeout: float) -> Reply:
        if name == "check_weights":
            sums = [[float(p.float().nansum()) for p in m.parameters()] for m in self.models]
            return Reply(ranks=[{"per_gpu_checksum": repr(row)} for row in sums])
        if name in ("begin_weight_update", "end_weight_update"):
            self.calls.append(name.removesuffix("_weight_update"))
            return Reply()
        request = Request(**fields)
        self.damage(len(self.requests))
        self.requests.append(request)
        self.calls.append("load")
        replicated = hasattr(self.ranks[0].scheduler, "ps")
        outputs = [
            getattr(one, name)(request if replicated else _for_rank(request, one.rank))
            for one in self.ranks
        ]
        message = " | ".join(output.message for output in outputs)
        success = all(output.success for output in outputs)
        if success and request.weight_version is not None:
            self.version = request.weight_version
        return Reply(success, message)
