"""Tests views of backups, and how trim releases backups."""

import ctypes

import pytest
from looks import row_of

import memsaver
from memsaver import simulator
from memsaver._runtime.native import _C
from memsaver.errors import ConfigError, InvalidStateError

MIB = 1 << 20


@pytest.mark.parametrize("kind", ["none", "host", "disk"])
def test_an_empty_range_has_no_backup(sim, tag, make_blocks, kind):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup=kind)
    memsaver.pause(name)
    with pytest.raises(ConfigError, match="empty range"):
        _C.backup_view(block.address, 0)
    memsaver.resume(name)
    with pytest.raises(ConfigError, match="empty range"):
        _C.backup_view(block.address, 0, False, True)


@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_a_backup_can_be_copied_to_a_device_in_one_call(sim, tag, make_blocks, kind):
    name, elsewhere = tag(), tag("elsewhere")
    blocks = make_blocks(name, [3 * MIB, 66 * MIB, 100, 5000, 4 * MIB], backup=kind)
    (other,) = make_blocks(elsewhere, [66 * MIB])
    memsaver.pause(name)
    with sim.stream() as stream:
        for b in blocks:
            view = ctypes.c_char.from_buffer(_C.backup_view(b.address, b.nbytes, True))
            host = ctypes.addressof(view)
            assert bytes(_C.backup_view(b.address + 7, b.nbytes - 7)) == b.expected()[7:]
            assert sim.to_device(other.address, host, b.nbytes, stream) == 0
            assert sim.opened.cuStreamSynchronize(stream) == 0
            assert sim.read(other.address, b.nbytes) == b.expected()
            ctypes.memset(host, 0, b.nbytes)
            assert sim.to_host(host, other.address, b.nbytes, stream) == 0
            assert sim.opened.cuStreamSynchronize(stream) == 0
    memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


def test_a_backup_view_of_a_tensor(sim, tag):
    torch = pytest.importorskip("torch")
    name = tag()
    with memsaver.region(name, backup="host"):
        tensor = simulator.empty((64, 100), torch.int32)
        wide = simulator.empty((10, 10), torch.bfloat16)
        nothing = simulator.empty((0, 3), torch.float32)
    tensor.copy_(torch.randint(-(2**31), 2**31 - 1, (64, 100), dtype=torch.int32))
    wide.copy_(torch.randn(10, 10))
    expected, slice_, column = tensor.clone(), tensor[3:60:2, ::7], tensor[:, 5]
    expected_wide = wide.clone()
    memsaver.pause(name)
    view = memsaver.backup_view(tensor)
    assert view.shape == tensor.shape and view.dtype == tensor.dtype
    assert view.stride() == tensor.stride()
    assert torch.equal(view, expected)
    assert torch.equal(memsaver.backup_view(wide), expected_wide)
    assert torch.equal(memsaver.backup_view(slice_), expected[3:60:2, ::7])
    assert torch.equal(memsaver.backup_view(column), expected[:, 5])
    assert torch.equal(memsaver.backup_view(tensor.t()), expected.t())
    assert memsaver.backup_view(nothing).shape == (0, 3)
    with pytest.raises(InvalidStateError, match="writable=True"):
        view[7, 7] = 12345
    # The resume restores contents that were written to a writable view.
    memsaver.backup_view(tensor, writable=True)[7, 7] = 12345
    del view
    memsaver.resume(name)
    expected[7, 7] = 12345
    assert torch.equal(tensor, expected)
    for bad in (tensor, slice_):
        with pytest.raises(InvalidStateError, match="mapped"):
            memsaver.backup_view(bad)


def test_tensors_whose_values_differ_from_their_memory_have_no_backup_view(sim, tag):
    torch = pytest.importorskip("torch")
    with memsaver.region(name := tag(), backup="host"):
        pairs = simulator.empty(8, dtype=torch.complex64).fill_(1 + 2j)
    memsaver.pause(name)
    others = [
        pairs.conj(),
        pairs.conj().imag,
        torch.eye(2).to_sparse(),
        torch.eye(2).to_sparse_csr(),
    ]
    for tensor in others:
        with pytest.raises(memsaver.ConfigError, match="backup"):
            memsaver.backup_view(tensor)
    assert memsaver.backup_view(pairs).imag.tolist() == [2] * 8
    memsaver.resume(name)


def test_memory_that_was_not_saved_has_no_backup_view(sim, tag, make_blocks):
    torch = pytest.importorskip("torch")
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="none")
    with pytest.raises(InvalidStateError, match="only while it is paused"):
        _C.backup_view(block.address, 1)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="had no backup"):
        _C.backup_view(block.address, 1)
    memsaver.resume(name)
    memsaver.pause(name, backup="host")
    with pytest.raises(InvalidStateError):
        _C.backup_view(block.address, MIB + 1)  # extends beyond the block
    with pytest.raises(ConfigError, match="did not allocate") as caught:
        memsaver.backup_view(torch.zeros(3))
    assert caught.value.status == "NOT_OURS"
    for bad in (None, block, [1, 2], "x"):
        with pytest.raises(ConfigError, match="takes a torch tensor"):
            memsaver.backup_view(bad)


def test_trim_releases_backups_of_tags_that_are_not_paused(sim, tag, make_blocks):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [3 * MIB], backup="host")
    blocks += make_blocks(second, [5 * MIB], backup="host")
    memsaver.trim(wait=True)
    assert memsaver.trim(wait=True) == 0
    memsaver.pause(first, second)
    assert memsaver.trim(wait=True) < MIB  # memory for fingerprints
    assert memsaver.trim(wait=True) == 0
    memsaver.resume(first)
    kept = row_of(first).host_bytes
    assert kept >= 3 * MIB
    assert memsaver.trim(wait=True) == kept
    assert row_of(first).host_bytes == 0
    assert sim.counts().registered_bytes == row_of(second).host_bytes > 0
    memsaver.resume(second)
    assert all(b.is_intact() for b in blocks)
    with memsaver.paused(first, second):
        pass
    assert all(b.is_intact() for b in blocks)
    memsaver.trim(wait=True)
    assert sim.counts().registered_bytes == 0


def test_trim_does_not_wait_for_a_pause(sim, tag, make_blocks, in_thread, wait_until, slow):
    name = tag()
    blocks = make_blocks(name, [MIB], backup="host")
    slow(0.3)
    task = in_thread(memsaver.pause, name)
    wait_until(lambda: memsaver.state(name) == "saving")
    memsaver.trim(wait=True)
    assert memsaver.state(name) == "saving"
    task.result()
    sim.stream_delay(0)
    memsaver.resume(name)
    assert blocks[0].is_intact()


def test_host_memory_is_kept_across_cycles(sim, tag, make_blocks):
    name = tag()
    blocks = make_blocks(name, [3 * MIB, 66 * MIB], backup="host")
    memsaver.pause(name)
    held = row_of(name).host_bytes
    assert 69 * MIB <= held <= 73 * MIB
    memsaver.resume(name)
    # No more host memory is available, and none is needed.
    sim.host_limit(held)
    for _ in range(3):
        memsaver.pause(name)
        memsaver.resume(name)
    assert all(b.is_intact() for b in blocks)


# --- views of a mapped tag's retained copy --------------------------------------------------------


@pytest.mark.parametrize("kind", ["host", "pageable"])
def test_a_retained_copy_has_the_contents_of_the_last_pause(sim, tag, make_blocks, kind):
    name = tag()
    blocks = make_blocks(name, [100, MIB, 65 * MIB], backup=kind)
    memsaver.pause(name)
    hosts = [address_of(_C.backup_view(b.address, b.nbytes)) for b in blocks]
    memsaver.resume(name)
    for _ in range(2):
        saved = [b.expected() for b in blocks]
        for b in blocks:
            b.fill(b.seed + 1)
        for b, host, bytes_saved in zip(blocks, hosts, saved, strict=True):
            view = _C.backup_view(b.address, b.nbytes, False, True)
            assert (address_of(view), bytes(view)) == (host, bytes_saved)
        memsaver.pause(name)
        assert [address_of(_C.backup_view(b.address, b.nbytes)) for b in blocks] == hosts
        with pytest.raises(InvalidStateError, match="while it is mapped"):
            _C.backup_view(blocks[0].address, 100, False, True)
        memsaver.resume(name)
        assert all(b.is_intact() for b in blocks)


def test_writes_to_a_retained_copy_reach_no_tensor(sim, tag, make_blocks):
    name = tag()
    (b,) = make_blocks(name, [5 * MIB], backup="host")
    memsaver.pause(name), memsaver.resume(name)
    view = _C.backup_view(b.address, b.nbytes, True, True)
    view[:] = bytes(b.nbytes)
    memsaver.pause(name), memsaver.resume(name)
    assert b.is_intact()


def test_only_saved_ranges_of_live_allocations_are_retained(sim, tag, make_blocks):
    name = tag()
    first, second, third = make_blocks(name, [3 * MIB] * 3, backup="host")
    memsaver.pause(name), memsaver.resume(name)
    address, second = second.address, None
    with pytest.raises(InvalidStateError, match="live allocation"):
        _C.backup_view(address, MIB, False, True)
    (other,) = make_blocks(name, [3 * MIB], backup="host")
    assert other.address == address
    with pytest.raises(InvalidStateError, match="no retained copy"):
        _C.backup_view(address, MIB, False, True)
    for b in (first, third):
        assert bytes(_C.backup_view(b.address, b.nbytes, False, True)) == b.expected()


@pytest.mark.parametrize("end", ["trim", "pause without a backup", "failed pause"])
def test_a_retained_copy_ends_with_the_tags_next_change_or_trim(sim, tag, make_blocks, end):
    name = tag()
    (b,) = make_blocks(name, [3 * MIB], backup="host")
    memsaver.pause(name), memsaver.resume(name)
    if end == "trim":
        assert memsaver.trim(wait=True, tags=[name]) > 0
    elif end == "failed pause":
        with sim.fault("cuMemUnmap"), pytest.raises(memsaver.DriverError):
            memsaver.pause(name)
    else:
        memsaver.pause(name, backup="none"), memsaver.resume(name)
    with pytest.raises(InvalidStateError, match="no retained copy"):
        _C.backup_view(b.address, b.nbytes, False, True)


def test_a_trim_of_one_tag_leaves_the_others_backups(sim, tag, make_blocks):
    name, other = tag(), tag("other")
    blocks = [make_blocks(each, [3 * MIB], backup="host") for each in (name, other)]
    memsaver.pause(name, other), memsaver.resume(name, other)
    assert memsaver.trim(wait=False, tags=[name]).wait() > 0
    assert row_of(name).host_bytes == 0 and row_of(other).host_bytes > 0
    with pytest.raises(memsaver.UnknownTagError):
        memsaver.trim(wait=True, tags=[name + " unknown"])
    with pytest.raises(ConfigError):
        memsaver.trim(tags=[3])
    assert all(block.is_intact() for (block,) in blocks)


def address_of(view):
    return ctypes.addressof(ctypes.c_char.from_buffer(view))
