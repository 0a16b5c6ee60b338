"""List the calls that RL frameworks make to their memory saver and to SGLang, in order.

Each framework's entry names the repository, the commit and the source files that its list follows.
Each list contains the calls of one training round and the calls before the first round.
`parts/frameworks_calls.py` runs the lists on a GPU, and a test runs the trainers' calls on the
simulated driver.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ENGINE, TRAINER, UPDATE = "engine", "trainer", "update"

# Sources of the weights that a trainer sends.
BACKUP = "backup"  # the saver's backup of a paused trainer: get_cpu_backup(x, zero_copy=True)
COPY = "copy"  # the framework's own copy in host memory
DEVICE = "device"  # the trainer's tensors on the GPU

# Kinds of the requests that send weights.
BUCKETS = "flattened_bucket"
SINGLE = ""  # one tensor per request


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        side: ENGINE, TRAINER, or UPDATE (a complete update of the engine's weights).
        call: the name of the call.
        arguments: the arguments of the call.
    """

    side: str
    call: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        given = ", ".join(f"{name}={value}" for name, value in self.arguments.items() if value)
        return f"{self.side}: {self.call}({given})"


@dataclass(frozen=True)
class Framework:
    """A framework's calls.

    Attributes:
        source: the repository and the commit.
        files: the source files that the lists follow.
        round: the calls of a round of training.
        start: the calls before the first round.
        graphs: whether SGLang's CUDA graphs are in the tag `cuda_graph`.
        trainer: the environment variables of a trainer whose memory is all in one region; None for
            a trainer without a memory saver.
        tagged: whether the parameters and the gradients are in separate tags without a backup.
    """

    source: str
    files: tuple[str, ...]
    round: tuple[Step, ...]
    start: tuple[Step, ...] = ()
    graphs: bool = False
    trainer: Mapping[str, str] | None = None
    tagged: bool = False


def engine(call: str, **arguments: Any) -> Step:
    """Return a call to the engine."""
    return Step(ENGINE, call, arguments)


def trainer(call: str, **arguments: Any) -> Step:
    """Return a call to the trainer's memory saver, or another operation of the trainer."""
    return Step(TRAINER, call, arguments)


def update(source: str, requests: str, *, disabled: bool = False, pause: str = "") -> Step:
    """Return an update of the engine's weights.

    Args:
        source: the source of the weights.
        requests: the kind of the requests.
        disabled: whether the trainer disables its memory saver during the update.
        pause: the mode in which generation is paused, or "".
    """
    arguments = {"source": source, "requests": requests, "disabled": disabled, "pause": pause}
    return Step(UPDATE, "update", arguments)


KV, WEIGHTS, GRAPHS = "kv_cache", "weights", "cuda_graph"
HOST = {"TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
DISK = {
    "TMS_INIT_ENABLE": "1",
    "TMS_INIT_ENABLE_CPU_BACKUP": "0",
    "TMS_INIT_ENABLE_DISK_BACKUP": "1",
    "TMS_DISK_BACKUP_CHUNK_MB": "64",
}

RELEASE = (engine("flush"), engine("release", tags=None))
SLIME_UPDATE = (
    engine("resume", tags=[WEIGHTS]),
    update(BACKUP, BUCKETS, disabled=True, pause="abort"),
    engine("resume", tags=[KV, GRAPHS]),
)
MILES_RELEASE = (engine("flush"), engine("release", tags=[GRAPHS, KV, WEIGHTS]))
MILES_FILES = (
    "train.py",
    "miles/backends/megatron_utils/actor.py",
    "miles/ray/train/actor_factory.py",
    "miles/backends/sglang_utils/sglang_engine.py",
    "miles/backends/megatron_utils/update_weight/update_weight_from_tensor.py",
)
MILES = "radixark/miles, 31f1ca9"


def miles(source: str) -> tuple[Step, ...]:
    """Return miles's update of the engine's weights, and the resumes before and after it."""
    return (
        engine("resume", tags=[WEIGHTS]),
        update(source, BUCKETS, disabled=True, pause="retract"),
        engine("resume", tags=[KV, GRAPHS]),
    )


MILES_ROUND = (
    *MILES_RELEASE,
    trainer("resume", tag=None),
    trainer("train"),
    trainer("pause", tag=None),
    *miles(COPY),
)

FRAMEWORKS: dict[str, Framework] = {
    "slime": Framework(
        source="THUDM/slime, 624b824",
        files=(
            "train.py",
            "slime/backends/megatron_utils/actor.py",
            "slime/backends/megatron_utils/update_weight/common.py",
            "slime/backends/megatron_utils/update_weight/update_weight_from_tensor.py",
            "slime/backends/sglang_utils/sglang_engine.py",
            "slime/ray/actor_group.py",
            "slime/ray/rollout.py",
        ),
        start=(*RELEASE, trainer("pause", tag=None), *SLIME_UPDATE),
        round=(
            *RELEASE,
            trainer("resume", tag=None),
            trainer("exclude"),
            trainer("train"),
            trainer("pause", tag=None),
            *SLIME_UPDATE,
        ),
        graphs=True,
        trainer=HOST,
    ),
    "miles": Framework(
        source=MILES,
        files=MILES_FILES,
        start=(*MILES_RELEASE, trainer("margin"), trainer("pause", tag=None), *miles(COPY)),
        round=MILES_ROUND,
        graphs=True,
        trainer=HOST,
    ),
    "miles_disk": Framework(
        source=MILES,
        files=MILES_FILES,
        start=(*MILES_RELEASE, trainer("pause", tag=None), *miles(COPY)),
        round=MILES_ROUND,
        graphs=True,
        trainer=DISK,
    ),
    "miles_rematerialize": Framework(
        source=MILES,
        files=(*MILES_FILES, "miles/backends/megatron_utils/rematerialize_utils.py"),
        start=(
            *MILES_RELEASE,
            trainer("pause", tag="grad_buffer"),
            trainer("pause", tag="default"),
            *miles(DEVICE)[:2],
            trainer("pause", tag="param_buffer"),
            *miles(DEVICE)[2:],
        ),
        round=(
            *MILES_RELEASE,
            trainer("resume", tag=None),
            trainer("rebuild"),
            trainer("train"),
            trainer("pause", tag="grad_buffer"),
            trainer("pause", tag="default"),
            *miles(DEVICE)[:2],
            trainer("pause", tag="param_buffer"),
            *miles(DEVICE)[2:],
        ),
        graphs=True,
        trainer=HOST,
        tagged=True,
    ),
    "xtuner": Framework(
        source="InternLM/xtuner, b934f46",
        files=(
            "xtuner/v1/train/rl_trainer.py",
            "xtuner/v1/rl/rollout/sglang.py",
            "xtuner/v1/rl/weight_update/transport.py",
        ),
        round=(
            *RELEASE,
            trainer("train"),
            engine("resume", tags=[WEIGHTS]),
            update(DEVICE, BUCKETS),
            engine("resume", tags=[KV]),
        ),
    ),
    "lightrft": Framework(
        source="opendilab/LightRFT, 49e62cb",
        files=(
            "lightrft/strategy/strategy_base.py",
            "lightrft/strategy/sglang_utils/sglang_engine.py",
            "lightrft/strategy/utils/broadcast_utils.py",
            "lightrft/trainer/spmd_ppo_trainer.py",
        ),
        start=(update(DEVICE, SINGLE),),
        round=(
            engine("release", tags=[KV, GRAPHS]),
            trainer("train"),
            engine("resume", tags=[KV, GRAPHS]),
            update(DEVICE, SINGLE),
        ),
    ),
}
