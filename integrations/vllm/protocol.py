"""The names of memsaver's calls through vLLM's collective_rpc, and the format of their messages.

The plugin adds the methods to vLLM's workers, and `core_calls` answers the calls in vLLM's engine
core. All arguments and results are JSON values, because vLLM sends other objects only if
VLLM_ALLOW_INSECURE_SERIALIZATION is set.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, get_args

from ..engine.errors import EngineError
from ..engine.fields import Fields, is_whole
from ..engine.interface import Broadcast, JoinRequest, Layout, SharedTensors, WeightLoad
from ..engine.weights.checks import RankCheck, VerificationRequest, raise_failure

__all__ = [
    "BEGIN",
    "CORE_CALLS",
    "END",
    "INFO",
    "JOIN",
    "LEAVE",
    "LOAD",
    "RANK_STATE",
    "RELEASE",
    "RELEASE_PART",
    "RESUME",
    "ROUTE",
    "STATE",
    "VERSION",
    "WAKE_REWRITTEN",
    "WORKER_CALLS",
    "Coming",
    "checks_of",
    "fields_of",
    "group_of",
]

# Answered in the engine core.
INFO, STATE = "memsaver_info", "memsaver_engine_state"
RELEASE, RESUME = "memsaver_release", "memsaver_resume"
CORE_CALLS = (INFO, STATE, RELEASE, RESUME)  # each core of an engine answers separately
VERSION = "memsaver_set_version"
# Answered by the workers.
RANK_STATE = "memsaver_state"
RELEASE_PART = "memsaver_release_part"
WAKE_REWRITTEN = "memsaver_wake_rewritten"
BEGIN, LOAD, END = "memsaver_begin_update", "memsaver_load_weights", "memsaver_end_update"
JOIN, LEAVE = "memsaver_join_group", "memsaver_leave_group"
WORKER_CALLS = frozenset({RANK_STATE, RELEASE_PART, WAKE_REWRITTEN, BEGIN, LOAD, END, JOIN, LEAVE})

ROUTE = "/memsaver"  # the route of a server whose engine has the plugin


class Coming:
    """A bucket of weights that a worker reads from the fields of a message.

    Attributes:
        tensors: the source of the tensors; a `SharedTensors` contains the payloads of all ranks.
        timeout: the time limit for the whole load, in seconds.
        verification: the verification request; None for no checks.

    Args:
        fields: see `fields_of`.

    Raises:
        EngineError: the fields do not describe a bucket.
    """

    def __init__(self, fields: Mapping[str, Any]) -> None:
        read = Fields(fields, "a bucket of weights")
        self.timeout = read.number("timeout")
        wanted = read.optional("verification")
        self.verification = None if wanted is None else VerificationRequest.from_fields(wanted)
        self.tensors: SharedTensors | Broadcast
        if read.optional("group_name") is None:
            layout = read.text("layout")
            if layout not in get_args(Layout):
                raise EngineError(f"a bucket of weights has the unknown layout {layout!r}")
            payloads = read.texts("payloads")
            self.tensors = SharedTensors(payloads, "whole" if layout == "whole" else "engine")
            return
        shapes = read.each("shapes")
        if not all(isinstance(one, list | tuple) and all(map(is_whole, one)) for one in shapes):
            raise EngineError("a bucket of weights: each shape must be a list of integers")
        names, dtypes = read.texts("names"), read.texts("dtypes")
        if not len(names) == len(dtypes) == len(shapes):
            raise EngineError("a bucket of weights must have as many names as types and shapes")
        self.tensors = Broadcast(read.text("group_name"), names, dtypes, tuple(map(tuple, shapes)))


def fields_of(load: WeightLoad) -> dict[str, Any]:
    """Return the fields of a bucket, for `Coming`."""
    wanted = load.verification
    return {
        **asdict(load.tensors),
        "timeout": load.timeout,
        "verification": None if wanted is None else asdict(wanted),
    }


def group_of(fields: Mapping[str, Any]) -> JoinRequest:
    """Return a request to join a group, built from the result of `asdict`. Raises `EngineError`."""
    read = Fields(fields, "a request to join a group")
    return JoinRequest(
        read.text("name"),
        read.text("address"),
        read.whole("port"),
        read.text("backend"),
        read.whole("world_size"),
        read.whole("rank_offset"),
    )


def checks_of(rows: Sequence[Any]) -> list[RankCheck]:
    """Return the results of the engine's ranks from the rows of a worker's answer.

    Raises:
        EngineError: a row is invalid. If a rank failed with a memsaver error, an error of the same
            class is raised.
    """
    checks = [RankCheck.from_fields(row) for row in rows]
    raise_failure(checks)
    return checks
