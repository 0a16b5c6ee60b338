"""`RolloutEngine`: an inference engine for the ranks of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from memsaver._runtime.interrupts import signals_deferred
from memsaver._runtime.timeouts import is_timeout
from memsaver.errors import ConfigError

from ..engine import placement as placing
from ..engine.interface import Backend, PauseMode, Sample
from ..engine.policies import WhenAsleep
from .kinds import connector_of, launcher_of, node_launcher_of
from .output import RolloutOutput, check_samples
from .prompts import Prompts, prompts_of
from .ranks import ALONE, Layout, layout_of
from .restarts import Restarts
from .start import EngineStart, Nodes

__all__ = ["RolloutEngine"]


class RolloutEngine(EngineStart):
    """An inference engine for the ranks of a trainer; each tensor-parallel group has one engine.

    The engine is a server, or it runs in the process of the group's first rank (the leader) and in
    processes that the leader starts. Every rank of the group makes the same calls in the same
    order:

        mesh = init_device_mesh("cuda", (dp, tp), mesh_dim_names=("dp", "tp"))
        with RolloutEngine.launch(mesh, model_path=path) as engine:
            output = engine.generate(my_prompts, {"max_new_tokens": 512, "n": 8})
            engine.sleep(wait_idle=True)
            train(output)
            with engine.staged_wake():
                engine.update_weights(model)

    All ranks of a group receive the leader's results and failures. If a call fails, every rank
    raises an error of the same class. The error's message names the rank and the cause, and its
    attribute `failures` maps ranks to causes. If a rank dies or hangs, the other ranks raise
    `GroupError`. Every wait is bounded: a call's `timeout`, in seconds, limits the engine's work.
    Before that, the ranks wait for each other for at most the engine's own `timeout`.

    The constructor is a collective call of all ranks of the mesh, and an invalid argument on one
    rank raises an error on all ranks immediately. A rank with an invalid mesh searches for ranks
    that are waiting for it, and raises `GroupError` if it finds none within `timeout`. If a rank's
    mesh is valid but differs from the mesh of other ranks, these ranks raise `GroupError` after
    `timeout`. A rank that is not in its own mesh raises `ConfigError` immediately, and ranks that
    are waiting for it raise `GroupError` after `timeout`.

    Threads: one thread may call `generate` while a second thread makes all other calls, such as
    `pause_generation` to end a generation. All ranks must divide their calls between the two
    threads in the same way. With `restarts`, `generate` can begin a restart at any time, and no
    other thread may make calls during the restart. Do not use an engine inside an event loop.

    Attributes:
        layout: the position of this rank.
        backend: the engine, on the leader; None on all other ranks.
        together: the connection between the ranks for all calls except `generate`.
        tp_size: the number of ranks in the engine, which for a server can differ from the layout's.
        timeout: the default timeout of calls, in seconds.
        pad_token_id: the token used for padding in the output of `generate`.

    Args:
        backend: the engine, on the leader; None on all other ranks.
        layout: this rank's `Layout`, or a mesh: see `launch`.
        timeout: see `launch`.
        pad_token_id: see `launch`.

    Raises:
        ConfigError: the leader has no valid engine, or an argument is invalid.
        GroupError: not all ranks made the call in time.
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

    @classmethod
    def launch(
        cls,
        mesh: Any = None,
        *,
        tp: str = "tp",
        dp: str | Sequence[str] = "dp",
        timeout: float = 600.0,
        pad_token_id: int = 0,
        restarts: Restarts | None = None,
        kind: str = "sglang",
        asleep: WhenAsleep | None = None,
        asleep_wait: float | None = None,
        asleep_requests: int | None = None,
        sleep_after: float | None = None,
        **server_args: Any,
    ) -> RolloutEngine:
        """Start an engine for each tensor-parallel group, on the GPUs of its ranks.

        Each rank must first select its GPU (`torch.cuda.set_device`). Each engine is started with
        the size and the GPUs of its group, with `skip_tokenizer_init=True`, and with
        `enable_memory_saver=True` for SGLang or `enable_sleep_mode=True` for vLLM.

        Args:
            mesh: the `DeviceMesh` of the ranks; None means this process alone, whose engine may
                have several GPUs (`tp_size=`).
            tp: the name of the mesh dimension whose ranks share an engine.
            dp: the name or names of the mesh's other dimensions.
            timeout: the time limit in seconds for the start of the engine's processes, and the
                default timeout of all calls. Download the model first, because downloads have no
                timeout.
            pad_token_id: the token used for padding in the output of `generate`.
            restarts: the limits on restarting an engine whose processes die during `generate`. If
                None, `generate` raises an error instead of restarting the engine. With this option,
                `generate` is a collective call of the whole mesh. The limits must be the same on
                all ranks.
            kind: "sglang" or "vllm".
            asleep: this engine's policy for requests that need released memory: "refuse" raises
                `EngineAsleepError`; "wait" holds a request until another caller has resumed the
                memory; "wake" resumes the memory for the request. If this argument, `asleep_wait`,
                `asleep_requests` or `sleep_after` is None, the engine uses the value of the
                matching environment variable, such as `MEMSAVER_SGLANG_ASLEEP` or
                `MEMSAVER_VLLM_SLEEP_AFTER`, at its start.
            asleep_wait: the maximum time in seconds that a request is held, and that a wake-up is
                retried if too little memory is free.
            asleep_requests: the maximum number of requests that are held at the same time.
            sleep_after: with "wake", the idle time in seconds after which the engine releases its
                memory automatically; 0 means never.
            server_args: arguments of `sglang.Engine`, such as `model_path`, or of vLLM's
                `AsyncEngineArgs`, such as `model`. With a mesh, the engine can have fewer ranks
                than the group, and uses the GPUs of the group's first ranks. The number of ranks in
                the engine is the product of `tp_size`, `pp_size` and `dp_size`, or, with vLLM,
                `tensor_parallel_size`. The engine's ranks are numbered by replica, then by pipeline
                stage, then by rank in the tensor-parallel group. With SGLang on several hosts,
                `dist_init_addr` is the address of the first host; the default is the host's name
                and a free port.

        Raises:
            NotLoadedError: the engine's package is not installed.
            ConfigError: the mesh, the GPUs and the arguments are inconsistent, or an argument is
                invalid. Examples are `sleep_after` with a policy other than "wake", and a policy
                with `MEMSAVER_SGLANG=0` or `MEMSAVER_VLLM=0`, which disable the engine's plugin.
            EngineError, EngineTimeoutError: the engine failed to start, or did not start in time.
        """
        policy = {
            "asleep": asleep,
            "asleep_wait": asleep_wait,
            "asleep_requests": asleep_requests,
            "sleep_after": sleep_after,
        }
        variables: dict[str, str] = {}

        def prepare() -> Any:
            variables.update(launcher_of(kind).policy_variables(policy))
            return placing.gpu_of_this_process()

        def launched(placement: Any, width: int | None) -> Backend:
            return launcher_of(kind).launch(placement, width, server_args, timeout, variables)

        def make(layout: Layout, gpus: list[Any]) -> Backend | Nodes:
            launcher = launcher_of(kind)
            sizes = launcher.sizes_of(server_args, None if mesh is None else layout.tp_size)
            width = None if mesh is None else sizes.width
            used = gpus if mesh is None else gpus[: sizes.ranks]
            placement = launcher.place(used, layout.dp_rank, sizes)
            if not placement.nodes:
                return launched(placement, width)
            others = tuple((node, width, variables) for node in placement.nodes)
            return Nodes(sizes.ranks, lambda: launched(placement, width), others)

        def join(node: Any) -> Any:
            placement, size, of_leader = node
            launch_node = node_launcher_of(kind).launch_node
            return launch_node(placement, size, server_args, timeout, of_leader)

        engine = cls.__new__(cls)
        engine._begin(
            lambda: layout_of(mesh, tp=tp, dp=dp),
            timeout,
            pad_token_id,
            make,
            prepare,
            restarts,
            join,
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
        kind: str | None = None,
    ) -> RolloutEngine:
        """Connect to an existing engine, which `close` does not stop.

        Args:
            engine: the URL of a server; or a list of URLs, one for each data-parallel rank; or an
                `sglang.Engine`, `vllm.LLM` or `AsyncLLM` in the leader's process, in which case all
                other ranks pass None.
            mesh: see `launch`.
            tp: see `launch`.
            dp: see `launch`.
            timeout: see `launch`.
            pad_token_id: see `launch`.
            api_key: the server's API key; for an SGLang server with an admin key, the admin key.
            kind: "sglang" or "vllm". If None, the engine's class determines the kind, and a server
                is assumed to be SGLang.

        Raises:
            ConfigError: `engine` is of another type, the engine's version is not supported, or the
                URL or the key is invalid. The message contains neither the URL nor the key.
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
            connector = connector_of(mine, kind)
            return connector.backend_of(mine, api_key=api_key, timeout=min(timeout, 60.0))

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
        """Generate samples for this rank's prompts, in one call with the other ranks of the group.

        This is a collective call; a rank without prompts passes `[]`. Tokens are not decoded.

        Args:
            input_ids: a list of prompts, each a list of tokens or a 1-D tensor; or a 2-D tensor; or
                a list of texts, for an engine with `skip_tokenizer_init=False`.
            sampling_params: the engine's sampling parameters, as one mapping for all prompts or a
                list with one mapping per prompt. "n" is the number of samples for a prompt, which
                are adjacent in the output. If the parameters contain a "sampling_seed" (for vLLM,
                "seed"), the k-th sample uses that seed plus k.
            attention_mask: for a padded tensor, 1 for tokens and 0 for padding; the padding can be
                on either side.
            multimodal: for each prompt, None or a mapping. With SGLang, the keys are "image_data",
                "video_data" and "audio_data", and each value is one item or a list of items in
                SGLang's format. With vLLM, the mapping has the fields of "multi_modal_data". The
                prompt must contain a placeholder for each item, in the format of the model's
                processor.
            timeout: the time limit for the generation in seconds, after which unfinished requests
                are aborted.

        Raises:
            ConfigError: a rank's arguments are invalid; the engine received no request.
            InvalidStateError: memory that generation needs is released.
            EngineError, EngineTimeoutError: the engine failed, or did not finish in time.
            EngineDiedError, RestartLimitError: the engine died, and a restart is not allowed.
            RankError: ranks failed in different ways, or made different calls.
            GroupError: a rank died, or was late.
        """
        limit = self._limit(timeout)
        mine: list[Prompts] = []

        def prepare() -> Prompts:
            self._check_call(limit)
            if not mine:  # a repeated attempt cannot read an iterator again
                mine.append(prompts_of(input_ids, sampling_params, attention_mask, multimodal))
            return mine[0]

        def work(everyones: list[Prompts]) -> list[list[Sample]]:
            requests = [request for prompts in everyones for request in prompts.requests]
            each = iter(check_samples(self._engine.generate(requests, limit), len(requests)))
            return [[next(each) for _ in prompts.requests] for prompts in everyones]

        def attempt() -> list[list[Sample]]:
            return self._generating.gathered("generate", prepare, work, limit)

        if self._restarter is None:
            samples = attempt()
        else:
            seconds = limit if is_timeout(limit) else self.timeout
            with signals_deferred():  # no handler may run between the collectives
                samples = self._restarter.answered("generate", attempt, seconds)
        place = self.layout.tp_rank
        return RolloutOutput.of(samples[place], mine[0].index, self.pad_token_id)

    @signals_deferred()  # no handler may run between the collectives
    def restart(self) -> None:
        """Restart the engines that died, and send the weights; `generate` does this automatically.

        This is a collective call of the whole mesh, for use after another call has raised
        `EngineDiedError`. Engines that are alive keep running, and also receive the weights.
        Restarted engines are awake.

        Raises:
            ConfigError: the engine was not launched with `restarts`.
            RestartLimitError: the limit on restarts is reached.
        """
        if self._restarter is None:
            raise ConfigError("the engine was not launched with the option `restarts`")
        self._restarter.restart()

    def pause_generation(self, mode: PauseMode = "abort", timeout: float | None = None) -> None:
        """Stop generation until `continue_generation` is called. New requests wait.

        Args:
            mode: the treatment of requests in flight. "abort" ends the requests with the tokens
                generated so far and the finish reason "abort". "retract" discards the requests' KV
                cache, and recomputes the cache with the engine's weights when generation continues.
                "in_place" keeps the requests' KV cache, which cannot be flushed, so the requests
                continue with values computed by the old weights. "wait" waits until the requests
                have finished (vLLM only).
            timeout: the time limit for the call, in seconds.
        """
        limit = self._limit(timeout)
        self._do("pause_generation", lambda: self._engine.pause_generation(mode, limit), limit)

    def continue_generation(self, timeout: float | None = None) -> None:
        """Resume a paused generation. Does nothing if generation is not paused."""
        limit = self._limit(timeout)
        self._do("continue_generation", lambda: self._engine.continue_generation(limit), limit)

    # --- weights ----------------------------------------------------------------------------------

    @signals_deferred()  # no handler may run between the collectives
    def update_weights(self, state: Any, **options: Any) -> Any:
        """Send a trainer's weights to the engine. A collective.

        See `memsaver.integrations.rollout.weights.update` for the arguments, result and errors.
        """
        from . import weights

        return weights.update(self, state, **options)

    def __enter__(self) -> RolloutEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        place = f"rank {self.layout.tp_rank} of {self.layout.tp_size}"
        state = "closed" if self._closed else self.status.value
        return f"<memsaver RolloutEngine: {state}, {place}, engine {self.layout.dp_rank}>"
