"""The messages between SGLang's processes that memsaver's integration uses."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class Occupation:
    tags: list[str] | None = None
    rid: str | None = None


class ReleaseMemoryOccupationReqInput(Occupation):
    pass


class ResumeMemoryOccupationReqInput(Occupation):
    pass


@dataclass
class Output:
    rid: str | None = None


class ReleaseMemoryOccupationReqOutput(Output):
    pass


class ResumeMemoryOccupationReqOutput(Output):
    pass


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
    text: list[str] | None = None
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
    selector: str = "all"  # since 0.5.23


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


@dataclass
class TokenizedGenerateReqInput:
    rid: str
    http_worker_ipc: str | None = None


@dataclass
class BatchTokenizedGenerateReqInput:
    batch: list[TokenizedGenerateReqInput]

    def __iter__(self):
        return iter(self.batch)


@dataclass
class TokenizedEmbeddingReqInput:
    rid: str


@dataclass
class AbortReq:
    rid: str | None = None
    finished_reason: dict | None = None


@dataclass
class UpdateWeightFromDiskReqInput:
    model_path: str
    recapture_cuda_graph: bool = False


@dataclass
class Result:
    success: bool
    message: str


class UpdateWeightFromDiskReqOutput(Result):
    pass


class UpdateWeightsFromTensorReqOutput(Result):
    pass


class RpcReqOutput(Result):
    pass


@dataclass
class LoadLoRAAdapterReqInput:
    lora_name: str


@dataclass
class LoRAUpdateOutput:
    success: bool
    error_message: str | None = None


LoadLoRAAdapterReqOutput = LoRAUpdateOutput


@dataclass
class GetWeightsByNameReqInput:
    name: str


@dataclass
class GetWeightsByNameReqOutput:
    parameter: list | None


@dataclass
class RpcReqInput:
    method: str


@dataclass
class FlushCacheReqInput:
    timeout_s: float | None = None


@dataclass
class GetInternalStateReq:
    pass


@dataclass
class SlowDownReqInput:
    pass


@dataclass
class SlowDownReqOutput:
    pass
