"""Make two runs with the same seeds bit-identical.

Call `make_deterministic` on every rank before CUDA is used. The function sets torch's random seed
and selects kernels that always add numbers in the same order. The engine's settings are in
`engines.py`. These settings enable SGLang's batch-invariant kernels and a seed for each sample, and
disable the prefix cache. Therefore, an answer depends neither on other prompts in the batch nor on
earlier prompts.
"""

from __future__ import annotations

import os

import torch

# SGLang sets the first variable for deterministic inference, but only in the process that starts
# the engine. All ranks need the same value.
VARIABLES = {"NCCL_ALGO": "allreduce:tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def make_deterministic(seed: int) -> None:
    """Use deterministic algorithms in this process and its children."""
    os.environ.update(VARIABLES)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(seed)
