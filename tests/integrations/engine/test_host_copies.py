"""Tests copies of a model's buffers in host memory."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from memsaver.integrations.engine.host_copies import to_host  # noqa: E402

VALUES = torch.arange(12, dtype=torch.float32).reshape(3, 4)


@pytest.mark.parametrize(
    "tensor",
    [VALUES, VALUES.T, VALUES[:, ::2], VALUES[:1].expand(3, 4), torch.tensor(3), torch.empty(0)],
    ids=["whole", "transposed", "strided", "expanded", "scalar", "empty"],
)
def test_a_copy_has_its_own_memory_and_the_same_contents(tensor):
    before = tensor.clone()
    copy = to_host(tensor)
    assert torch.equal(copy, before) and copy.dtype == before.dtype
    copy.fill_(7)
    assert torch.equal(tensor, before)
