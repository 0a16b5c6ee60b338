"""What makes two runs with the same seeds the same, bit for bit.

Called before CUDA is used. In short: one seed for all of torch, kernels that always add in one
order, and the same on every rank. The engine's part is in `engines.py`: SGLang's batch-invariant
kernels, a seed for each sample, and no prefix cache, so that an answer depends neither on what was
asked beside it nor on what was asked before.
"""

from __future__ import annotations

import os

import torch

# SGLang sets the first for its deterministic inference, in the process that starts it: on all ranks
# or on none.
VARIABLES = {"NCCL_ALGO": "allreduce:tree", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}


def make_deterministic(seed: int) -> None:
    """Use deterministic algorithms in this process and its children."""
    os.environ.update(VARIABLES)
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.manual_seed(seed)
