"""A fake strategy with the parts of LightRFT's interface that affect memory.

Names, arguments and the order of calls match LightRFT's `StrategyBase` and `FSDPV2Strategy` at
commits 006b2e2 and 02f6351. The fake omits the methods' other effects.
"""

from enum import Enum
from types import SimpleNamespace

import memsaver


class EngineStatus(Enum):
    SLEEPED = 0
    WAKEUP = 1


class Rollout:
    """The engine's handle on every rank; only the first rank of a group has the engine itself."""

    def __init__(self, engine, tp_rank: int = 0) -> None:
        self._engine = engine if tp_rank == 0 else None
        self._tp_rank = tp_rank


class Sender:
    """Sends the trainer's weights to an engine by writing bytes into the engine's model."""

    def __init__(self, strategy, scheduler=None) -> None:
        self.strategy, self.scheduler = strategy, scheduler
        self.seed = 1
        self.states: list[dict[str, str]] = []  # the tags' states at each send

    def broadcast_to_engine(self) -> None:
        if self.scheduler is None:
            return
        tags = ("weights", "kv_cache", "cuda_graph")
        self.states.append({tag: memsaver.state(tag) for tag in tags})
        self.scheduler.model.fill(self.seed)


class Strategy:
    """A strategy like LightRFT's, whose methods `adapt` replaces."""

    def __init__(self, **args) -> None:
        defaults = {"enable_engine_sleep": True, "adam_offload": True}
        self.args = SimpleNamespace(**{**defaults, **args})
        self.inference_engine = None
        self.inference_engine_status = EngineStatus.SLEEPED
        self.broadcast_manager = None
        self.calls: list[str] = []

    def setup_inference_engine(self, rollout, kind: str = "sglang", actor=None) -> None:
        self.inference_engine, self.inference_engine_type = rollout, kind
        self.inference_engine_status = EngineStatus.WAKEUP
        if actor is not None:
            self.update_engine_weights(actor)
        self.maybe_sleep_inference_engine()

    def maybe_sleep_inference_engine(self) -> None:
        self.calls.append("sleep")

    def wakeup_inference_engine(self) -> None:
        self.calls.append("wake up")

    def gather_and_generate(self, prompt: str, sleep_engine: bool = True):
        self.wakeup_inference_engine()
        text = None
        if self.inference_engine._engine is not None:
            text = self.inference_engine._engine.generate(prompt)["text"]
        if sleep_engine:
            self.maybe_sleep_inference_engine()
        return text

    def update_engine_weights(self, actor) -> None:
        self.wakeup_inference_engine()
        if self.broadcast_manager is None:
            self.broadcast_manager = actor
        self.broadcast_manager.broadcast_to_engine()
        self.sync_and_clear_cache()

    def sync_and_clear_cache(self) -> None:
        pass

    def maybe_offload_optimizer(self, optimizer):
        self.calls.append("offload")

    def maybe_load_optimizer(self, optimizer, device=0):
        self.calls.append("load")

    def save_ckpt(self, model, save_dir, optimizer=None):
        states = [] if optimizer is None else list(optimizer.state.values())
        return [{name: value.clone() for name, value in state.items()} for state in states]

    def load_ckpt(self, model, load_dir, optimizer=None, states=None):
        optimizer.load_state_dict(states)
        return load_dir, {}
