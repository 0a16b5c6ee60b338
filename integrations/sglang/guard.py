"""Refuses requests that need released memory, in SGLang's scheduler processes.

Without the guard, such a request causes an illegal memory access, which crashes the engine. The
guard runs after SGLang has broadcast the received requests and before their handlers run. All ranks
of a tensor-parallel group therefore handle the same requests in the same order, and base their
decisions on the same state: the set of tags that their release handlers have recorded. The guard
uses no clock. While no memory is released, the guard adds one check to each request and nothing to
a decoding step.

| request | while memory is released |
|---|---|
| generation, embedding, including health checks | aborted with SGLang's message and status 503 |
| weight update, LoRA load, read or check of the weights | refused if the weights are released |
| flush of the cache | succeeds: the release has flushed the cache (`flush`) |
| continuation of a paused generation | postponed until everything is resumed |
| release, resume, pause, abort, query, session, process group, profile | as usual |
| remote call, other known request | refused if it needs a released tag |
| unknown request | refused; only logged if its reply's type is unknown (see `unknown_requests`) |

SGLang's queues contain no requests while memory is released, because a release requires an idle
engine. The exception is a paused generation in an engine without a pipeline: the requests wait
until generation continues.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any

from ..engine import moves
from ..engine.policies import WhenAsleep
from ..engine.refusals import asleep_text
from ..engine.tags import GRAPH, KV_CACHE, RELEASE_ORDER, WEIGHTS
from . import image_cache, settings, unguarded
from .failed_replies import failed_reply
from .idle_sleep import remove, with_handler
from .places import effective_arguments
from .updaters import updater_of

__all__ = [
    "MOVED",
    "Guard",
    "dispatch_unread",
    "flush",
    "guard_of",
    "install",
    "is_known",
    "is_rust_served",
    "when_asleep",
]

_ALL = frozenset(RELEASE_ORDER)
_UPDATE = (frozenset({WEIGHTS}), "update its weights")

# The tags that each kind of request needs, and a description of its operation.
_NEEDS: dict[str, tuple[frozenset[str], str]] = {
    **dict.fromkeys(
        ("TokenizedGenerateReqInput", "BatchTokenizedGenerateReqInput"), (_ALL, "generate")
    ),
    **dict.fromkeys(
        ("TokenizedEmbeddingReqInput", "BatchTokenizedEmbeddingReqInput"),
        (_ALL, "compute embeddings"),
    ),
    **dict.fromkeys(
        (
            "BeginWeightUpdateReqInput",
            "EndWeightUpdateReqInput",
            "UpdateWeightFromDiskReqInput",
            "UpdateWeightsFromDistributedReqInput",
            "UpdateWeightsFromIPCReqInput",
            "UpdateWeightsFromTensorReqInput",
        ),
        _UPDATE,
    ),
    **dict.fromkeys(
        ("CheckWeightsReqInput", "GetWeightsByNameReqInput"), (_UPDATE[0], "read its weights")
    ),
    "SendWeightsToRemoteInstanceReqInput": (_UPDATE[0], "send its weights"),
    **dict.fromkeys(
        ("LoadLoRAAdapterReqInput", "LoadLoRAAdapterFromTensorsReqInput"),
        (_UPDATE[0], "load a LoRA adapter"),
    ),
    **dict.fromkeys(
        (
            "AttachHiCacheStorageReqInput",
            "ClearHiCacheReqInput",
            "DetachHiCacheStorageReqInput",
        ),
        (frozenset({KV_CACHE}), "change its cache's storage"),
    ),
    "ScaleElasticEPReqInput": (_ALL, "change its number of ranks"),
    "PdRoleSwitchReqInput": (_ALL, "change its role"),
}

_SAVES = (_UPDATE[0], "save its weights")
_SAVING_CALLS = ("save_remote_model", "save_sharded_model")

_RESUME, _CONTINUE, _PAUSE, _REMOTE_CALL = (
    "ResumeMemoryOccupationReqInput",
    "ContinueGenerationReqInput",
    "PauseGenerationReqInput",
    "RpcReqInput",
)
_PASSING = frozenset(
    {
        _PAUSE,
        _RESUME,
        "AbortReq",
        "ActiveRanksOutput",
        "AddExternalCorpusReqInput",
        "BlockReqInput",
        "CloseSessionReqInput",
        "ConfigureLoggingReq",
        "DestroyWeightsUpdateGroupReqInput",
        "DumperControlReqInput",
        "ElasticScaleUpdateReq",
        "EncoderDispatchErrorReq",
        "ExpertDistributionReq",
        "FlushCacheReqInput",
        "FreezeGCReq",
        "GetHiCacheL3LayoutReq",
        "GetInternalStateReq",
        "GetLoadsReqInput",
        "IdleRelease",
        "InitWeightsSendGroupForRemoteInstanceReqInput",
        "InitWeightsUpdateGroupReqInput",
        "ListExternalCorporaReqInput",
        "OpenSessionReqInput",
        "ProfileReq",
        "ReleaseMemoryOccupationReqInput",
        "RemoveExternalCorpusReqInput",
        "SetInternalStateReq",
        "ShutdownReq",
        "SlowDownReqInput",
        "UnloadLoRAAdapterReqInput",
        "UpdateWeightVersionReqInput",
    }
)
_DISPATCHER = "_request_dispatcher"  # an attribute of a scheduler
MOVED = "_memsaver_moved"  # an attribute of a scheduler: the tags that had memory on any rank
_logger = logging.getLogger("memsaver.sglang")


def install(result: Any, scheduler: Any) -> Any:
    """Install a guard that runs before a scheduler's handlers.

    Called after `Scheduler.init_request_dispatcher`. Does nothing if the scheduler has no memory
    saver. Logs an error if the scheduler does not have the expected interface.
    """
    try:
        if updater_of(scheduler).memory_saver_adapter.enabled:
            _check_server(scheduler)
            dispatch = with_handler(scheduler, getattr(scheduler, _DISPATCHER))
            setattr(scheduler, _DISPATCHER, Guard(scheduler, dispatch))
    except Exception as error:
        remove(scheduler)
        setattr(scheduler, unguarded.FAILED, reason := f"{type(error).__name__}: {error}")
        unguarded.log(reason)
    return result


def is_known(kind: str) -> bool:
    """Return whether memsaver knows which tags a kind of request needs."""
    return kind in _NEEDS or kind in _PASSING or kind in (_CONTINUE, _REMOTE_CALL)


def when_asleep(scheduler: Any) -> WhenAsleep:
    """Return the policy in effect, which is always "refuse" without a tokenizer manager."""
    return "refuse" if _other_server(scheduler) else settings.policy_of(scheduler).when_asleep


def is_rust_served(scheduler: Any) -> bool:
    """Return whether this process runs SGLang's Rust server instead of a tokenizer manager."""
    return getattr(scheduler, "rust_server", None) is not None


def _other_server(scheduler: Any) -> str:
    """Return the name of the server that replaces SGLang's tokenizer manager, or ""."""
    if is_rust_served(scheduler):
        return "Rust server (SGLANG_RUST_SERVER)"
    arguments = effective_arguments(scheduler)
    if any(getattr(arguments, name, False) for name in ("smg_grpc_mode", "grpc_mode")):
        return "gRPC server (--smg-grpc-mode)"
    return ""


def guard_of(scheduler: Any) -> Guard | None:
    """Return a scheduler's guard, or None if there is none."""
    found = getattr(scheduler, _DISPATCHER, None)
    return found if isinstance(found, Guard) else None


def _check_server(scheduler: Any) -> None:
    """Keep an idle engine awake if its server cannot wake it."""
    if when_asleep(scheduler) != settings.policy_of(scheduler).when_asleep:
        remove(scheduler)
        _logger.warning(
            "SGLang's %s neither holds requests nor wakes the engine: while memory is released, "
            "memsaver refuses requests, as with MEMSAVER_SGLANG_ASLEEP=refuse, and an idle engine "
            "keeps its memory",
            _other_server(scheduler),
        )


def flush(original: Callable[..., bool], scheduler: Any, *args: Any) -> bool:
    """Wrap `Scheduler.flush_cache`: succeed without a flush while the KV cache is released.

    The release has flushed the cache, but trainers flush it again between a resume of the weights
    and a resume of the cache. Some caches write to device memory during a flush. A flush also
    empties the cache of image embeddings.
    """
    image_cache.clear()
    if moves.are_memsavers([KV_CACHE]) and not moves.is_mapped([KV_CACHE]):
        _logger.debug("nothing to flush: the release has flushed the KV cache")
        return True
    return original(scheduler, *args)


def dispatch_unread(
    original: Callable[..., None], scheduler: Any, request: Any, errors: Any
) -> None:
    """Wrap `Scheduler._dispatch_tokenized_mm_requests`, which calls the handlers directly.

    SGLang 0.5.23 calls this method for requests with images that could not be read.
    """
    guard = guard_of(scheduler)
    if guard is not None and guard.refuses(request):
        guard(request)
    else:
        original(scheduler, request, errors)


class Guard:
    """A scheduler's request dispatcher that refuses requests for released memory.

    Args:
        scheduler: the scheduler.
        dispatch: the scheduler's own dispatcher, which calls a request's handler and returns the
            reply.

    Raises:
        AttributeError, ImportError: the scheduler does not have the expected interface.
    """

    def __init__(self, scheduler: Any, dispatch: Any) -> None:
        self._scheduler, self._updater = scheduler, updater_of(scheduler)
        self._released()
        self._dispatch = dispatch
        self._tokenizer = getattr(scheduler, "ipc_channels", scheduler).send_to_tokenizer
        self._messages = importlib.import_module("sglang.srt.managers.io_struct")
        self._continuation: Any = None  # a postponed request
        self._logged: set[str] = set()  # kinds of requests refused since the last resume
        self._aborted("")

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dispatch, name)

    def __call__(self, request: Any) -> Any:
        """Dispatch or refuse a request; return the reply for the tokenizer manager, or None."""
        if not self._updater.offload_tags:
            return self._dispatch(request)
        kind = type(request).__name__
        released = self._released()
        if kind == _CONTINUE and released and getattr(self._scheduler, "_engine_paused", False):
            return self._postpone(request, released)
        if kind == _CONTINUE or kind in _PASSING:
            return self._pass(kind, request)
        needs, what = self._needs(kind, request)
        if not needs & released:
            return self._dispatch(request)
        return self._refuse(kind, request, asleep_text(released, what))

    def refuses(self, request: Any) -> bool:
        """Return whether the guard would refuse a request now."""
        kind = type(request).__name__
        if kind == _CONTINUE or kind in _PASSING:
            return False
        return not self._needs(kind, request)[0].isdisjoint(self._released())

    def _released(self) -> frozenset[str]:
        """Return the released tags that have memory: without pausable graphs, GRAPH has none."""
        moved = getattr(self._scheduler, MOVED, ())
        return frozenset(t for t in self._updater.offload_tags if t in moved or _has_memory(t))

    def _needs(self, kind: str, request: Any) -> tuple[frozenset[str], str]:
        if kind == _REMOTE_CALL:
            known = getattr(request, "method", "") in _SAVING_CALLS
            return _SAVES if known else (_ALL, f"run {getattr(request, 'method', kind)}")
        needs, what = _NEEDS.get(kind, (_ALL, f"process {kind}"))
        if getattr(request, "recapture_cuda_graph", False):
            return _ALL, what
        return needs, what

    def _pass(self, kind: str, request: Any) -> Any:
        if kind == _PAUSE:
            self._continuation = None
        output = self._dispatch(request)
        if kind == _RESUME:
            self._logged.clear()
            self.after_resume()
        return output

    def after_resume(self) -> None:
        """Continue a paused generation once no memory is released."""
        if self._continuation is not None and not self._released():
            request, self._continuation = self._continuation, None
            self._dispatch(request)

    def _postpone(self, request: Any, released: frozenset[str]) -> None:
        self._continuation = request
        _logger.warning(
            "generation continues after a resume of %s, which are released",
            ", ".join(sorted(released)),
        )

    def _refuse(self, kind: str, request: Any, text: str) -> Any:
        if kind not in self._logged:
            self._logged.add(kind)
            _logger.warning(
                "%s is refused: %s; later refusals are not logged until a resume", kind, text
            )
        requests = _generations_in(kind, request)
        if requests is None:
            return self._reply(kind, text)
        for one in requests:
            self._abort(one, text)
        return None

    def _abort(self, request: Any, text: str) -> None:
        """End a generation or an embedding, and free its images in other processes' memory."""
        self._send_abort(request, self._aborted(text, getattr(request, "rid", None)))
        for item in getattr(getattr(request, "mm_inputs", None), "mm_items", None) or ():
            if hasattr(item, "release_transport_proxies"):
                try:
                    item.release_transport_proxies()
                except Exception:  # the request has its answer; the scheduler must go on
                    _logger.exception("an image of a refused request could not be released")

    def _send_abort(self, request: Any, message: Any) -> None:
        if not is_rust_served(self._scheduler):
            self._tokenizer.send_output(message, request)
            return
        # SGLang's Rust server does not read the socket, and needs the request's token counts.
        tokens = getattr(request, "input_ids", None)
        begun = SimpleNamespace(
            origin_input_ids=() if tokens is None else tokens, cached_tokens=0, reasoning_tokens=0
        )
        self._scheduler.send_abort_output(message, begun)

    def _aborted(self, text: str, rid: str | None = None) -> Any:
        """Return the message that SGLang uses for a request that the scheduler rejects."""
        reason = {
            "type": "abort",
            "status_code": int(HTTPStatus.SERVICE_UNAVAILABLE),
            "message": text,
        }
        return self._messages.AbortReq(rid=rid, finished_reason=reason)

    def _reply(self, kind: str, text: str) -> Any:
        """Return the reply to a failed control request.

        Returns None if memsaver cannot build a reply of the required type; the sender then receives
        no reply.
        """
        try:
            return failed_reply(self._messages, kind, text)
        except (AttributeError, TypeError, ValueError) as error:
            _logger.error(
                "%s was not processed, and its sender receives no reply: %s (%s)", kind, text, error
            )
            return None


def _has_memory(tag: str) -> bool:
    if moves.are_memsavers(RELEASE_ORDER):
        return moves.are_memsavers([tag])
    return tag != GRAPH or settings.graphs_are_pausable()


def _generations_in(kind: str, request: Any) -> Iterable[Any] | None:
    """Return the generations or embeddings in a request, or None."""
    if not kind.startswith(("Tokenized", "BatchTokenized")):
        return None
    return list(request) if kind.startswith("Batch") else [request]
