"""Tests that read-only views of backups reject writes, but otherwise behave like other tensors."""

import copy
import pickle

import numpy
import pytest

import memsaver
from memsaver import simulator
from memsaver.errors import InvalidStateError

torch = pytest.importorskip("torch")

from memsaver._memory.readonly import ReadOnlyTensor, read_only  # noqa: E402

pytestmark = pytest.mark.each_python


@pytest.fixture
def base():
    return torch.arange(24.0).reshape(4, 6)


WRITES = {
    "item": lambda v: v.__setitem__((0, 0), 1.0),
    "slice": lambda v: v.__setitem__(slice(0, 2), 0),
    "mask": lambda v: v.__setitem__(v > 3, 0),
    "index": lambda v: v.__setitem__(torch.tensor([0, 1]), 0),
    "+=": lambda v: v.__iadd__(1),
    "add_": lambda v: v.add_(1),
    "copy_": lambda v: v.copy_(torch.zeros(4, 6)),
    "fill_": lambda v: v.fill_(1),
    "zero_": lambda v: v.zero_(),
    "normal_": lambda v: v.normal_(),
    "set_": lambda v: v.set_(torch.zeros(3)),
    "resize_": lambda v: v.resize_(100),
    "t_": lambda v: v.t_(),
    "index_put_": lambda v: v.index_put_((torch.tensor([0]),), torch.zeros(6)),
    "scatter_": lambda v: v.scatter_(0, torch.zeros(1, 6, dtype=torch.int64), 1.0),
    "out=": lambda v: torch.add(torch.ones(4, 6), 1, out=v),
    "out= of two": lambda v: torch.max(
        torch.ones(4, 6), 0, out=(v[0], torch.zeros(6, dtype=torch.int64))
    ),
    "foreach": lambda v: torch._foreach_add_([torch.ones(2), v], 1),
    "nn.init": lambda v: torch.nn.init.ones_(v),
    "clamp_ of a view": lambda v: v.t()[1:].clamp_(0),
    "view of a view": lambda v: v.view(-1)[3:].view(3, 7).select(0, 1).mul_(2),
    "split": lambda v: v.split(2)[1].zero_(),
    "unbind": lambda v: v.unbind(0)[0].zero_(),
    "detach": lambda v: v.detach().zero_(),
    "data": lambda v: v.data.zero_(),
    "bits": lambda v: v.view(torch.int32).zero_(),
    "contiguous": lambda v: v.contiguous().zero_(),
    "to": lambda v: v.to("cpu").zero_(),
    "expand": lambda v: v[0].expand(3, 6).zero_(),
    "as_strided": lambda v: v.as_strided((2, 2), (1, 1)).zero_(),
    "reshape": lambda v: v.reshape(-1).zero_(),
    "storage": lambda v: v.untyped_storage().fill_(0),
    "dlpack": lambda v: torch.from_dlpack(v).zero_(),
    "share_memory_": lambda v: v.share_memory_(),
    "all_reduce": lambda v: collective("all_reduce", v),
    "broadcast": lambda v: collective("broadcast", v, 0),
    "reduce": lambda v: collective("reduce", v, 0),
}


def collective(name, *arguments):
    """Call one of torch.distributed's functions in a group of this process alone."""
    dist = torch.distributed
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        getattr(dist, name)(*arguments)
    finally:
        dist.destroy_process_group()


def test_collectives_may_read(base):
    parts = [torch.zeros(4, 6)]
    collective("all_gather", parts, read_only(base))
    assert torch.equal(parts[0], base)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_writing_operations_are_rejected(base, write):
    view, before = read_only(base), base.clone()
    with pytest.raises(InvalidStateError, match=r"clone\(\).*writable=True"):
        write(view)
    assert torch.equal(base, before)
    assert view.shape == (4, 6) and torch.equal(view, before)


RESULTS = {
    "clone": lambda v: v.clone(),
    "sum": lambda v: v.sum(),
    "add": lambda v: v + 1,
    "product": lambda v: v @ torch.ones(6, 2),
    "half": lambda v: v.to(torch.bfloat16),
    "cat": lambda v: torch.cat([v, v]),
    "where": lambda v: torch.where(v > 3, v, 0),
    "copy into": lambda v: torch.zeros(4, 6).copy_(v),
    "contiguous": lambda v: v.t().contiguous(),
    "index": lambda v: v[torch.tensor([3, 0])],
    "mask": lambda v: v[v > 3],
    "gather": lambda v: v.gather(0, torch.ones(1, 6, dtype=torch.int64)),
    "max": lambda v: v.max(dim=0).values,
    "empty_like": lambda v: torch.zeros_like(v),
    "linear": lambda v: torch.nn.functional.linear(torch.ones(2, 6), v),
}


@pytest.mark.parametrize("compute", RESULTS.values(), ids=RESULTS)
def test_results_are_ordinary_tensors(base, compute):
    result, expected = compute(read_only(base)), compute(base)
    assert type(result) is torch.Tensor and torch.equal(result, expected)
    before = base.clone()
    result.zero_()
    assert torch.equal(base, before)


def test_views_are_read_only_and_see_the_memory(base):
    view = read_only(base)
    parts = [view[1], view[:, 2], view.t(), view.view(torch.int32), view[::2, 1:3], view.flatten()]
    assert all(type(part) is ReadOnlyTensor for part in parts)
    assert [part.data_ptr() for part in parts[:2]] == [base[1].data_ptr(), base[:, 2].data_ptr()]
    base[1, 2] = 99
    assert view[1, 2].item() == parts[0][2] == parts[1][1] == 99
    assert float(view[1, 2]) == 99 and int(view[1, 2]) == 99 and bool(view[1, 2])
    assert parts[2].stride() == base.t().stride() and not parts[2].is_contiguous()


def test_reading_operations_work(base):
    view = read_only(base)
    assert torch.equal(view, base) and torch.equal(base, view) and torch.allclose(view, base)
    assert view.tolist() == base.tolist() and [row.tolist() for row in view] == base.tolist()
    assert len(view) == 4 and view.numel() == 24 and view.dtype == base.dtype
    assert "ReadOnlyTensor" in repr(view) and "23." in str(view)
    for array in (view.numpy(), numpy.asarray(view), view.t().numpy()):
        assert not array.flags.writeable
        with pytest.raises(ValueError):
            array[0, 0] = 1
    assert view.numpy().ctypes.data == base.data_ptr()
    for made in (numpy.array(view), numpy.copy(view), numpy.array(view, dtype=view.numpy().dtype)):
        assert not numpy.shares_memory(made, view.numpy()) and made.flags.writeable
    with pytest.raises(ValueError, match="without a copy"):
        view.__array__(numpy.float64, False)
    assert numpy.array_equal(view.numpy(), base.numpy())
    for restored in (pickle.loads(pickle.dumps(view)), copy.deepcopy(view[1:]), copy.copy(view)):
        expected = base[-len(restored) :]
        assert torch.equal(restored, expected)
    assert type(pickle.loads(pickle.dumps(view))) is torch.Tensor
    assert type(copy.deepcopy(view)) is torch.Tensor


def test_it_takes_part_in_a_gradient(base):
    weight = torch.ones(6, requires_grad=True)
    (read_only(base) @ weight).sum().backward()
    assert torch.equal(weight.grad, base.sum(0))


def test_the_view_of_a_backup(sim, tag):
    name = tag()
    with memsaver.region(name, backup="host"):
        tensor = simulator.empty((64, 100), torch.bfloat16)
        empty = simulator.empty((0, 3), torch.float32)
    tensor.copy_(torch.randn(64, 100))
    expected = tensor.clone()
    memsaver.pause(name)
    view = memsaver.backup_view(tensor.t())
    assert type(view) is ReadOnlyTensor and torch.equal(view, expected.t())
    with pytest.raises(InvalidStateError, match="writable=True"):
        view.zero_()
    with pytest.raises(InvalidStateError, match="writable=True"):
        memsaver.backup_view(empty).zero_()
    writable = memsaver.backup_view(tensor, writable=True)
    assert type(writable) is torch.Tensor
    writable[3] = 5
    assert (view[:, 3] == 5).all()
    memsaver.resume(name)
    expected[3] = 5
    assert torch.equal(tensor, expected)


def test_a_backup_on_disk_has_no_view(sim, tag, tmp_path):
    name = tag()
    with memsaver.region(name, backup="disk"):
        tensor = simulator.empty((64, 100), torch.int32)
    tensor.fill_(7)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="disk"):
        memsaver.backup_view(tensor)
    memsaver.resume(name)
    assert (tensor == 7).all()


@pytest.mark.gpu
@pytest.mark.parametrize("mib", [4, 300])
def test_a_view_can_be_copied_to_a_gpu(mib):
    with memsaver.region("readonly.gpu", backup="host"):
        beside = torch.ones(50 << 18, device="cuda")  # so that `tensor` has an arbitrary address
        tensor = torch.randn(mib << 18, device="cuda")
    before = tensor.clone()
    memsaver.pause("readonly.gpu")
    view = memsaver.backup_view(tensor)
    assert torch.equal(view.to("cuda"), before) and torch.equal(view.cuda(), before)
    other = torch.empty_like(before)
    other.copy_(view, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(other, before)
    memsaver.backup_view(tensor, writable=True).copy_(other.neg_())
    memsaver.resume("readonly.gpu")
    assert torch.equal(tensor, before.neg()) and beside.all()
