"""`RolloutEngine`: one interface over an inference engine, called alike on every rank."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from memsaver.errors import ConfigError, InvalidStateError
from memsaver.integrations.rollout.backend import Backend, PauseMode, Sample
from memsaver.integrations.rollout.fence import Fence, connections_of
from memsaver.integrations.rollout.launch import gpu_of_this_process, launch, place
from memsaver.integrations.rollout.output import RolloutOutput, check_samples
from memsaver.integrations.rollout.prompts import Prompts, prompts_of
from memsaver.integrations.rollout.ranks import ALONE, Layout, NotInMeshError, layout_of
from memsaver.integrations.rollout.sglang.backend import backend_of
from memsaver.integrations.rollout.shared_sleep import SharedSleep, known_released
from memsaver.integrations.rollout.together import Together, refuse
from memsaver.integrations.sglang.fields import is_whole
from memsaver.interrupts import signals_deferred

__all__ = ["RolloutEngine"]

_LANE = "rollout"


class RolloutEngine(SharedSleep):  # type: ignore[misc]  # its base is Any to mypy
    """An inference engine for the ranks of a trainer, one for each tensor-parallel group.

    The engine lives in the process of each group's first rank, its leader, and in processes that it
    started; or it is a server. Every rank of the group makes the same calls in the same order:

        mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        with RolloutEngine.launch(mesh, model_path=path) as engine:
            output = engine.generate(my_prompts, {"max_new_tokens": 512, "n": 8})
            engine.sleep(wait_idle=True)
            train(output)
            with engine.staged_wake():
                engine.update_weights(model)

    What the leader is told comes to all ranks of its group, and so does what fails: every rank
    raises an error of the same kind, whose message names the cause and the rank, and whose
    `failures` has it by rank. A rank that died or hangs is a `GroupError` on the others. No wait is
    without a bound: a call's `timeout`, in seconds, is for the engine's work, and before that the
    ranks wait for each other at most as long as the engine's own `timeout`.

    Making an engine is a collective of the whole mesh, and an invalid argument on one rank is an
    error on all of its ranks at once. A rank whose mesh is invalid looks for the ranks that wait
    for it at most for `timeout`, and raises `GroupError` if there are none. A valid mesh that is
    another one than on the other ranks ends in a `GroupError` after `timeout`; so do those who wait
    for a rank that is not in its mesh, which raises `ConfigError` at once.

    Threads: `generate` in one, and beside it all other calls in another, as where
    `pause_generation` ends a generation; each rank with the same two. None inside an event loop.

    Attributes:
        layout: where this rank stands.
        backend: the engine as its leader has it; None on all other ranks.
        together: for calls of the group's ranks beside `generate`.
        tp_size: ranks of the engine. A server's may differ from the layout's.
        timeout: seconds that a call may take unless it says otherwise.
        pad_token_id: what `generate` pads with.

    Args:
        backend: the engine, on the leader; None elsewhere.
        layout: this rank's `Layout`, or the ranks, as the mesh of `launch`.
        timeout: see `launch`.
        pad_token_id: see `launch`.

    Raises:
        ConfigError: the leader has no engine, or what it has is none; an argument is not as above.
        GroupError: not all ranks came in time.
    """

    def __init__(
        self,
        backend: Backend | None,
        layout: Layout | Any = ALONE,
        *,
        timeout: float = 600.0,
        pad_token_id: int = 0,
    ) -> None:
        self._begin(
            lambda: layout if isinstance(layout, Layout) else layout_of(layout),
            timeout,
            pad_token_id,
            lambda *_: backend,
        )

    @signals_deferred()  # between its many collectives
    def _begin(
        self,
        find: Callable[[], Layout],
        timeout: float,
        pad_token_id: int,
        make: Callable[[Layout, list[Any]], Backend | None],
        prepare: Callable[[], Any] = lambda: None,
    ) -> None:
        """Have the backend that the leader makes, or fail on all ranks.

        Args:
            find: returns where this rank stands.
            timeout: see `launch`.
            pad_token_id: see `launch`.
            make: makes the backend, on the leader, from what `prepare` returned on each rank.
            prepare: called on each rank of the group.
        """
        self.timeout, self.pad_token_id = timeout, pad_token_id
        self.backend: Backend | None = None
        self._closed = False
        self._connections = contextlib.ExitStack()  # what `close` ends, with that of updates
        try:
            layout = find()
        except NotInMeshError:
            raise
        except Exception as error:
            refuse(error, timeout, (_LANE, Fence.LANE))
        self.layout = layout

        def check() -> Any:
            if not is_whole(pad_token_id):
                raise ConfigError(f"pad_token_id is a number, not {pad_token_id!r}")
            return prepare()

        def begin(prepared: list[Any]) -> tuple[int, frozenset[str] | None]:
            made = make(layout, prepared)
            if made is None:
                raise ConfigError("the leader of the group has no engine")
            if not all(hasattr(made, name) for name in ("tp_size", "control", "close")):
                raise ConfigError(
                    f"a {type(made).__name__} is not a `Backend`: pass a server's URL or an "
                    "sglang.Engine to RolloutEngine.connect"
                )
            self.backend = made
            return made.tp_size, known_released(made)

        try:
            self._connect()
            self.tp_size, self._released = self.together.gathered(
                "the start of the engine", check, begin, timeout
            )
        except BaseException:
            self.close()
            raise

    def _connect(self) -> None:
        """Connect this rank with those of its engine and of all others. A collective of them."""
        layout, timeout, refused = self.layout, self.timeout, None
        try:
            following = connections_of(layout)
            self.together = Together(layout.tp_group, timeout, _LANE, following=following)
            self._connections.callback(self.together.close)
            self._generating = Together(layout.tp_group, timeout, "rollout/generate")
            self._connections.callback(self._generating.close)
        except BaseException as error:  # the ranks of other engines wait
            refused = error
        self._fence = Fence(layout, timeout, refused)
        self._connections.callback(self._fence.close)

    @classmethod
    def launch(
        cls,
        mesh: Any = None,
        *,
        tp: str = "tp",
        dp: str | Sequence[str] = "dp",
        timeout: float = 600.0,
        pad_token_id: int = 0,
        **server_args: Any,
    ) -> RolloutEngine:
        """Start an `sglang.Engine` for each tensor-parallel group, on the GPUs of its ranks.

        Each rank has chosen its GPU before (`torch.cuda.set_device`). The engines get
        `skip_tokenizer_init=True`, `enable_memory_saver=True`, and the group's size and GPUs.

        Args:
            mesh: the ranks, as a `DeviceMesh`; None is this process alone, whose engine may have
                several GPUs (`tp_size=`).
            tp: the mesh's dimension whose ranks share an engine.
            dp: its other dimensions, one name or several.
            timeout: seconds that the start of the engine's processes may take, and any call that
                does not say otherwise. Download the model before: that has no bound.
            pad_token_id: what `generate` pads with.
            server_args: of `sglang.Engine`, such as `model_path`.

        Raises:
            NotLoadedError: SGLang is not installed.
            ConfigError: the mesh, the GPUs or the arguments do not fit together.
            EngineError, EngineTimeoutError: the engine did not start, or not in time.
        """

        def make(layout: Layout, gpus: list[Any]) -> Backend:
            tp_size = None if mesh is None else layout.tp_size
            return launch(place(gpus, layout.dp_rank), tp_size, server_args, timeout)

        engine = cls.__new__(cls)
        engine._begin(
            lambda: layout_of(mesh, tp=tp, dp=dp), timeout, pad_token_id, make, gpu_of_this_process
        )
        return engine

    @classmethod
    def connect(
        cls,
        engine: Any,
        mesh: Any = None,
        *,
        tp: str = "tp",
        dp: str | Sequence[str] = "dp",
        timeout: float = 600.0,
        pad_token_id: int = 0,
        api_key: str | None = None,
    ) -> RolloutEngine:
        """Use an existing engine, which `close` does not end.

        Args:
            engine: a server's URL; or a list of URLs, one for each data-parallel rank; or an
                `sglang.Engine` of the leader's process, for which other ranks pass None.
            mesh: see `launch`.
            tp: see `launch`.
            dp: see `launch`.
            timeout: see `launch`.
            pad_token_id: see `launch`.
            api_key: the server's API key (its admin key, if it has one).

        Raises:
            ConfigError: `engine` is none of these, its version is not supported, or the URL or the
                key is invalid. The message contains neither the URL nor the key.
            NotLoadedError: `engine` is a URL, and httpx is not installed on the leader
                (`pip install "memsaver[http]"`).
            EngineError, EngineTimeoutError: the engine cannot be reached in time.
        """

        def make(layout: Layout, _: object) -> Backend:
            mine = engine
            if isinstance(engine, list | tuple):
                if len(engine) != layout.dp_size:
                    raise ConfigError(
                        f"{len(engine)} servers for {layout.dp_size} data-parallel ranks"
                    )
                mine = engine[layout.dp_rank]
            return backend_of(mine, api_key=api_key, timeout=min(timeout, 60.0))

        made = cls.__new__(cls)
        made._begin(lambda: layout_of(mesh, tp=tp, dp=dp), timeout, pad_token_id, make)
        return made

    # --- generating -------------------------------------------------------------------------------

    def generate(
        self,
        input_ids: Any,
        sampling_params: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        *,
        attention_mask: Any = None,
        multimodal: Sequence[Mapping[str, Any] | None] | None = None,
        timeout: float | None = None,
    ) -> RolloutOutput:
        """Generate for this rank's prompts, together with those of the group's other ranks.

        A collective; a rank may have no prompts (`[]`). Nothing is turned into text.

        Args:
            input_ids: a list of prompts, each a list of tokens or a 1-D tensor; or a 2-D tensor.
            sampling_params: as SGLang names them, one mapping for all or one for each prompt. With
                "n", so many samples of a prompt, which stand together in the output; the k-th has
                the "sampling_seed" plus k, where there is one.
            attention_mask: of a padded tensor, 0 where there is padding, on whatever side.
            multimodal: for each prompt None, or a mapping of "image_data", "video_data" and
                "audio_data", as SGLang takes them.
            timeout: seconds for the generation. What is not finished then is aborted.

        Raises:
            ConfigError: a rank's arguments are not as above; the engine was not asked.
            InvalidStateError: what it needs is released.
            EngineError, EngineTimeoutError: the engine failed, or did not finish in time.
            RankError: ranks failed in different ways, or made different calls.
            GroupError: a rank died, or did not come in time.
        """
        limit = self._limit(timeout)
        mine: list[Prompts] = []

        def prepare() -> Prompts:
            self._check_call(limit)
            prompts = prompts_of(input_ids, sampling_params, attention_mask, multimodal)
            mine.append(prompts)
            return prompts

        def work(everyones: list[Prompts]) -> list[list[Sample]]:
            requests = [request for prompts in everyones for request in prompts.requests]
            each = iter(check_samples(self._engine.generate(requests, limit), len(requests)))
            return [[next(each) for _ in prompts.requests] for prompts in everyones]

        samples = self._generating.gathered("generate", prepare, work, limit)
        place = self.layout.tp_rank
        return RolloutOutput.of(samples[place], mine[0].index, self.pad_token_id)

    def pause_generation(self, mode: PauseMode = "abort", timeout: float | None = None) -> None:
        """Stop generating until `continue_generation`. Requests that come meanwhile wait.

        Args:
            mode: what becomes of requests in flight. "abort" ends them with the tokens that they
                have and the finish reason "abort"; "retract" takes their KV cache away and computes
                it again when they go on, with the weights of then; "in_place" keeps the cache, so
                that they go on with what the old weights computed, and it cannot be flushed.
            timeout: seconds.
        """
        limit = self._limit(timeout)
        self._do("pause_generation", lambda: self._engine.pause_generation(mode, limit), limit)

    def continue_generation(self, timeout: float | None = None) -> None:
        """End a pause of the generation. Nothing happens where there is none."""
        limit = self._limit(timeout)
        self._do("continue_generation", lambda: self._engine.continue_generation(limit), limit)

    # --- weights, and the end ---------------------------------------------------------------------

    @signals_deferred()  # no handler may run between the collectives
    def update_weights(self, state: Any, **options: Any) -> Any:
        """Send a trainer's weights to the engine: `memsaver.integrations.rollout.weights.update`.

        A collective. Its arguments, result and errors are described there.
        """
        from memsaver.integrations.rollout import weights

        return weights.update(self, state, **options)

    def close(self) -> None:
        """End the engine if this object started it. Idempotent; waits for no other rank.

        Also closes the connections with other ranks and drops the process groups of `layout`, so
        that torch.distributed can be shut down and initialised again. No other call may follow.
        """
        self._closed = True
        try:
            if self.backend is not None:
                self.backend.close()
        finally:
            self._connections.close()
            self.layout = self.layout.without_groups()

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.layout.tp_rank} of {self.layout.tp_size}"
        state = "closed" if self._closed else self.status.value
        return f"<memsaver RolloutEngine: {state}, {place}, engine {self.layout.dp_rank}>"

    # --- on all ranks -----------------------------------------------------------------------------

    @property
    def _engine(self) -> Backend:
        """The leader's. Only what the leader does for all asks for it."""
        self._check_open()
        assert self.backend is not None
        return self.backend

    def _check_open(self) -> None:
        if self._closed:
            raise InvalidStateError("the rollout engine is closed")
