"""Buckets of tensors, as a trainer sends them to an engine in another process."""

from __future__ import annotations

import torch

from memsaver.integrations.rollout.weights.payloads import flattened, listed


def payload(named, as_list=False):
    """Return a bucket's text and its memory; the memory must exist until the text has been opened.

    Args:
        named: the tensors, by name.
        as_list: whether the text is a list of tensors instead of a flattened bucket.
    """
    memory = torch.zeros(sum(512 + t.nbytes for t in named.values()), dtype=torch.uint8)
    _share(memory)
    views, begin = [], 0
    for name, tensor in named.items():
        begin = -(-begin // 512) * 512
        view = memory[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        view.copy_(tensor)
        views.append((name, begin, view))
        begin += tensor.nbytes
    return (listed(views) if as_list else flattened(memory, views)), memory


def _share(memory, tries=10):
    """Move host memory to shared memory; retry if torch's manager process is too slow.

    On a loaded machine, an answer can take longer than the limit of 1 s.
    """
    for left in reversed(range(tries)):
        try:
            memory.share_memory_()
            return
        except RuntimeError as error:
            if "manager connection has timed out" not in str(error) or not left:
                raise
