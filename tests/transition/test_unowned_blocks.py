"""Tests that memory that no tensor owns is neither saved nor restored.

If allocations have changed since the unowned ranges were computed, the memory is saved and
restored.
"""

import pytest
from looks import row_of

import memsaver
from memsaver._runtime.native import _C
from memsaver.errors import InvalidStateError

MIB = 1 << 20
PAGE = 2 * MIB


def test_unowned_ranges_are_neither_saved_nor_restored(sim, tag, make_blocks):
    name = tag()
    live, free, part = make_blocks(name, [MIB, 2 * MIB, 4 * MIB], backup="host")
    contents = part.bytes()
    # In no order, and some overlap.
    holes = [(part.address + 3 * MIB, 512), (part.address + MIB, MIB - 100), (free.address, 9000)]
    holes += [(free.address + 100, 2 * MIB - 100), (part.address + 2 * MIB - 4096, 4096)]
    holes += [(part.address + MIB + 4096, 512)]
    rows = _C.begin([name], [], -1, holes).run()
    saved = MIB + 4 * MIB - MIB - 512
    assert rows == [(name, 0, True, rows[0][3], saved)]
    assert row_of(name).backup_bytes == saved
    assert bytes(_C.backup_view(live.address, MIB)) == live.expected()
    for address, nbytes in [(free.address, 1), (part.address, 4 * MIB), (part.address + MIB, 512)]:
        with pytest.raises(InvalidStateError, match="not all of the range was saved"):
            _C.backup_view(address, nbytes)
    assert memsaver.resume(name).copied_bytes == saved
    assert live.is_intact() and free.is_zero()
    expected = bytearray(contents)
    expected[MIB : 2 * MIB] = bytes(MIB)
    expected[3 * MIB : 3 * MIB + 512] = bytes(512)
    assert part.bytes() == bytes(expected)


def test_unowned_ranges_of_other_tags_and_other_memory_do_no_harm(sim, tag, make_blocks):
    name, other = tag("paused"), tag("other")
    (block,) = make_blocks(name, [MIB], backup="host")
    (foreign,) = make_blocks(other, [MIB])
    holes = [
        (foreign.address, MIB),
        (0, 4096),
        (0xDEAD000, 1 << 20),
        (block.address - 4096, 4096),
        (block.address + MIB, 4096),
        (block.address, 0),
    ]
    _C.begin([name], [], -1, holes).run()
    assert foreign.is_intact()
    memsaver.resume(name)
    assert block.is_intact()


def test_what_was_unowned_is_saved_if_memory_changed_since(sim, tag, make_blocks):
    name = tag()
    (block,) = make_blocks(name, [PAGE], backup="host")
    unowned = [(block.address, PAGE)]
    looked = _C.changes()
    (another,) = make_blocks(name, [PAGE], backup="host")
    _C.begin([name], [], -1, unowned, looked).run()
    memsaver.resume(name)
    assert block.is_intact() and another.is_intact()
    _C.begin([name], [], -1, unowned, _C.changes()).run()
    memsaver.resume(name)
    assert block.is_zero() and another.is_intact()
