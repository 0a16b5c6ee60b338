"""Tests that memsaver.fingerprint returns equal digests for equal bytes at any address."""

import hashlib

import pytest

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, InvalidStateError, UnknownTagError

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.each_python

MIB = 1 << 20
SIZES = [1, 7, 512, 4096, MIB - 1, MIB, MIB + 1, 3 * MIB + 77]


@pytest.fixture
def tensors(sim, tag):
    """Return a function `tensors(name, [sizes])` that creates tensors of random bytes in a tag."""

    def make(name, sizes, seed=0):
        generator = torch.Generator().manual_seed(seed)
        with memsaver.region(name, backup="host"):
            made = [simulator.empty(size, torch.uint8) for size in sizes]
        for tensor in made:
            tensor.copy_(torch.randint(0, 256, tensor.shape, generator=generator))
        return made

    return make


def test_equal_bytes_are_equal_and_others_are_not(tag, tensors):
    here, there = tensors(tag("here"), SIZES), tensors(tag("there"), [64, *SIZES])[1:]
    seen = set()
    for a, b in zip(here, there, strict=True):
        b.copy_(a)
        digest = memsaver.fingerprint(a)
        assert digest == memsaver.fingerprint(b) and len(digest) == 32 and int(digest, 16) >= 0
        b[-1] ^= 1
        assert memsaver.fingerprint(b) != digest
        seen |= {digest, memsaver.fingerprint(b)}
    assert len(seen) == 2 * len(SIZES)


def test_the_digest_is_over_lengths_and_native_digests(tag, tensors):
    made = tensors(tag(), [MIB + 5, 100])
    expected = hashlib.blake2b(digest_size=16, person=b"memsaver 1")
    for tensor in made:
        native = _C.fingerprint([(tensor.data_ptr(), tensor.numel())])
        assert len(native) == 32 * -(-tensor.numel() // MIB)
        expected.update(tensor.numel().to_bytes(8, "little") + native)
    assert memsaver.fingerprint(*made) == expected.hexdigest()


def test_order_and_lengths_count(tag, tensors):
    first, second = tensors(tag(), [100, 200])
    assert memsaver.fingerprint(first, second) != memsaver.fingerprint(second, first)
    assert memsaver.fingerprint(first, second) != memsaver.fingerprint(first)
    second.zero_()
    digests = {memsaver.fingerprint(second[:size]) for size in range(1, 200, 13)}
    assert len(digests) == len(range(1, 200, 13))
    empty = second[:0]
    assert memsaver.fingerprint(empty) != memsaver.fingerprint(second[:1])
    assert memsaver.fingerprint(first, empty) != memsaver.fingerprint(first)
    assert memsaver.fingerprint(empty) == memsaver.fingerprint(empty)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int64", "bool", "complex64"])
def test_tensors_of_any_type_and_layout_have_fingerprints(sim, tag, dtype):
    dtype = getattr(torch, dtype)
    with memsaver.region(tag()):
        whole, dense = simulator.empty((32, 40), dtype), simulator.empty((20, 8), dtype)
    whole.copy_(torch.randn(32, 40).to(dtype))
    views = [whole[3:23, 7:39:4], whole[:20, :8], whole.t()[5:25, 1:9]]
    if dtype.is_complex:
        views.append(whole[:20, :8].conj())
    for view in views:
        assert not view.is_contiguous() or view.is_conj()
        dense.copy_(view)
        assert memsaver.fingerprint(view) == memsaver.fingerprint(dense)
    # Only the bytes matter, not the type.
    assert memsaver.fingerprint(dense) == memsaver.fingerprint(dense.view(torch.uint8))


def test_the_copy_of_a_layout_is_not_kept(sim, tag):
    with memsaver.region(name := tag()):
        whole = simulator.empty((512, 1024), torch.float32)
    whole.zero_()
    before = sim.tag_bytes(), memsaver.ranges(name)
    memsaver.fingerprint(whole.t())
    assert (sim.tag_bytes(), memsaver.ranges(name)) == before


def test_a_tag_is_its_tensors_in_order(tag, tensors):
    name, other = tag("name"), tag("other")
    made = tensors(name, [512, 1024, 4 * MIB])
    before = memsaver.fingerprint(name)
    made.sort(key=torch.Tensor.data_ptr)
    assert before == memsaver.fingerprint(*made)
    with memsaver.paused(name):
        pass
    assert memsaver.fingerprint(name) == before
    copies = tensors(other, [512, 1024, 4 * MIB], seed=1)
    for copy, tensor in zip(copies, made, strict=True):
        copy.copy_(tensor)
    copies.sort(key=torch.Tensor.data_ptr)
    assert memsaver.fingerprint(*copies) == before
    assert memsaver.fingerprint(name, other) == memsaver.fingerprint(*made, *copies)
    made[1][5] ^= 1
    assert memsaver.fingerprint(name) != before
    del tensor, copy, made[1:]
    assert memsaver.fingerprint(name) == memsaver.fingerprint(made[0])
    made.clear()
    assert memsaver.fingerprint(name) == memsaver.fingerprint(name) != before


def test_arguments_without_a_fingerprint_are_rejected(tag, tensors):
    name = tag()
    (tensor,) = tensors(name, [4096])
    for bad in (None, 5, b"x", [tensor]):
        with pytest.raises(ConfigError, match="tags and torch tensors"):
            memsaver.fingerprint(bad)
    for bad in (torch.zeros(3), torch.zeros(3)[::2]):
        with pytest.raises(ConfigError, match="CUDA tensors"):
            memsaver.fingerprint(bad)
    with pytest.raises(ConfigError, match="dense"):
        memsaver.fingerprint(torch.zeros(3, 3).to_sparse())
    with pytest.raises(ConfigError):
        memsaver.fingerprint()
    with pytest.raises(ConfigError, match="empty"):
        memsaver.fingerprint("")
    with pytest.raises(UnknownTagError):
        memsaver.fingerprint(name + "x")
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="paused"):
        memsaver.fingerprint(name)
    with pytest.raises(InvalidStateError, match="paused"):
        memsaver.fingerprint(tensor)
    memsaver.resume(name)
    memsaver.fingerprint(name, tensor)


def test_a_fingerprint_waits_for_a_resume(sim, tag, tensors):
    made = tensors(name := tag(), [MIB])
    before = memsaver.fingerprint(name)
    memsaver.pause(name)
    sim.stream_delay(0.05)
    under_way = memsaver.resume(name, wait=False)
    assert memsaver.fingerprint(name) == before
    under_way.wait()
    assert made[0].numel() == MIB


@pytest.mark.gpu
def test_equal_tensors_are_equal_on_a_gpu():
    torch.manual_seed(0)
    plain = [torch.randn(n, device="cuda") for n in (1, 77, 300_000, 5_000_000)]
    with memsaver.region("fingerprint.gpu", backup="host"):
        tensors = [tensor.clone() for tensor in plain]
        junk = torch.ones(1 << 20, device="cuda")
    del junk
    assert [memsaver.fingerprint(t) for t in tensors] == [memsaver.fingerprint(t) for t in plain]
    by_address = sorted(tensors, key=torch.Tensor.data_ptr)
    before = memsaver.fingerprint("fingerprint.gpu")
    assert before == memsaver.fingerprint(*by_address)
    square = plain[2][:250_000].view(500, 500)
    assert memsaver.fingerprint(square.t()) == memsaver.fingerprint(square.t().contiguous())
    with memsaver.paused("fingerprint.gpu"):
        with pytest.raises(InvalidStateError):
            memsaver.fingerprint("fingerprint.gpu")
    assert memsaver.fingerprint("fingerprint.gpu") == before
    with pytest.raises(ConfigError, match="CUDA tensors"):
        memsaver.fingerprint(torch.zeros(3))
