"""Tests reservations, handles, mappings and access on both drivers."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int

import pytest
from driver_values import (
    GIB,
    INVALID_DEVICE,
    INVALID_VALUE,
    MIB,
    NOT_SUPPORTED,
    OUT_OF_MEMORY,
    PAGE,
    READ_WRITE,
    SUCCESS,
    TIB,
)


@pytest.mark.parametrize("alignment", [0, PAGE, 512 * MIB, 64 * GIB, TIB])
def test_reservation_is_aligned(drv, alignment):
    address = drv.reserve(PAGE, alignment)
    assert address % (alignment or PAGE) == 0
    drv.check("cuMemAddressFree", address, PAGE)


def test_reservations_cost_no_memory(drv):
    free = drv.free_bytes()
    address = drv.reserve(16 * TIB)
    assert drv.free_bytes() == free
    drv.check("cuMemAddressFree", address, 16 * TIB)


def test_reservations_of_64_gib_side_by_side(drv):
    size = 64 * GIB
    addresses = [drv.reserve(size, size) for _ in range(100)]
    assert len({address // size for address in addresses}) == 100
    for address in addresses:
        drv.check("cuMemAddressFree", address, size)


def test_reservation_arguments(drv):
    out = ctypes.c_uint64()
    assert drv.cuMemAddressReserve(byref(out), 0, 0, 0, 0) == INVALID_VALUE
    assert drv.cuMemAddressReserve(byref(out), PAGE, 3 * MIB, 0, 0) == INVALID_VALUE
    assert drv.cuMemAddressReserve(byref(out), PAGE, 0, 0, 1) == INVALID_VALUE


def test_reservation_takes_a_free_hint_and_avoids_a_taken_one(drv):
    first = drv.reserve(GIB)
    drv.check("cuMemAddressFree", first, GIB)
    again = drv.reserve(GIB, 0, first)
    assert again == first
    other = drv.reserve(GIB, 0, first)
    assert other + GIB <= first or first + GIB <= other
    drv.check("cuMemAddressFree", other, GIB)
    drv.check("cuMemAddressFree", again, GIB)


def test_reservation_is_freed_whole_and_once(drv):
    address = drv.reserve(4 * PAGE)
    assert drv.cuMemAddressFree(address, 2 * PAGE) == INVALID_VALUE
    assert drv.cuMemAddressFree(address + PAGE, PAGE) == INVALID_VALUE
    drv.check("cuMemAddressFree", address, 4 * PAGE)
    assert drv.cuMemAddressFree(address, 4 * PAGE) == INVALID_VALUE


def test_reservation_with_a_mapping_is_not_freed(drv, mapped):
    address, _ = mapped
    drv.write(address, b"kept")
    assert drv.cuMemAddressFree(address, PAGE) == INVALID_VALUE
    assert drv.read(address, 4) == b"kept"


def test_handle_sizes_are_whole_pages(drv):
    assert drv.try_create(0) == INVALID_VALUE
    assert drv.try_create(PAGE + 4096) == INVALID_VALUE
    assert drv.try_create(PAGE) == SUCCESS


def test_handle_of_an_unknown_device(drv):
    out = ctypes.c_uint64()
    properties = drv.properties(drv.get("cuDeviceGetCount", c_int))
    assert drv.cuMemCreate(byref(out), PAGE, byref(properties), 0) == INVALID_DEVICE


def test_handle_allocates_and_frees_memory_at_once(drv):
    free = drv.free_bytes()
    handle = drv.create(64 * MIB)
    assert drv.free_bytes() == free - 64 * MIB
    drv.check("cuMemRelease", handle)
    assert drv.free_bytes() == free


def test_released_handle_keeps_its_memory_while_mapped(drv):
    free = drv.free_bytes()
    address, handle = drv.mapped(PAGE)
    drv.write(address, b"alive")
    drv.check("cuMemRelease", handle)
    assert drv.free_bytes() == free - PAGE
    assert drv.read(address, 5) == b"alive"
    drv.check("cuMemUnmap", address, PAGE)
    assert drv.free_bytes() == free
    drv.check("cuMemAddressFree", address, PAGE)


def test_a_retained_handle_keeps_the_memory(drv):
    free = drv.free_bytes()
    address, handle = drv.mapped(2 * PAGE)
    drv.write(address, b"held")
    retained = drv.get("cuMemRetainAllocationHandle", ctypes.c_uint64, address + PAGE)
    drv.check("cuMemRelease", handle)
    drv.check("cuMemUnmap", address, 2 * PAGE)
    assert drv.free_bytes() == free - 2 * PAGE
    drv.map(address, 2 * PAGE, retained)
    assert drv.read(address, 4) == b"held"
    drv.discard(address, 2 * PAGE, retained)
    assert drv.free_bytes() == free


def test_handle_of_memory_that_was_released_but_is_mapped(drv):
    address, handle = drv.mapped(PAGE)
    drv.check("cuMemRelease", handle)
    retained = drv.get("cuMemRetainAllocationHandle", ctypes.c_uint64, address)
    drv.discard(address, PAGE, retained)


def test_no_handle_of_unmapped_memory(drv):
    address = drv.reserve(PAGE)
    out = ctypes.c_uint64()
    assert drv.cuMemRetainAllocationHandle(byref(out), address) == INVALID_VALUE
    drv.check("cuMemAddressFree", address, PAGE)


def test_properties_of_a_handle(drv, mapped):
    properties = drv.properties(0)
    properties.location.id = 99
    drv.check("cuMemGetAllocationPropertiesFromHandle", byref(properties), mapped[1])
    assert (properties.type, properties.location.type) == (1, 1)
    assert properties.location.id == drv.device


def test_fresh_memory_is_zero(drv):
    size = 64 * MIB
    for _ in range(2):
        address, handle = drv.mapped(size)
        assert drv.read(address, size) == bytes(size)
        drv.check("cuMemsetD8", address, 0xAB, size)
        drv.check("cuCtxSynchronize")
        drv.discard(address, size, handle)


def test_device_full_then_not(drv):
    free = drv.free_bytes() // PAGE * PAGE  # the free bytes need not be a multiple
    most = free // 10 * 9 // PAGE * PAGE
    handle = drv.create(most)
    too_much = drv.try_create(free - most + GIB)
    a_page = drv.try_create(PAGE)
    drv.check("cuMemRelease", handle)
    assert (too_much, a_page) == (OUT_OF_MEMORY, SUCCESS)
    assert drv.try_create(most) == SUCCESS


def test_map_arguments(drv):
    address, handle = drv.reserve(4 * PAGE), drv.create(2 * PAGE)
    assert drv.cuMemMap(address, 2 * PAGE, PAGE, handle, 0) == NOT_SUPPORTED  # offset
    assert drv.cuMemMap(address, PAGE, 0, handle, 0) == NOT_SUPPORTED  # a part of the handle
    assert drv.cuMemMap(address, 4 * PAGE, 0, handle, 0) == NOT_SUPPORTED  # more than the handle
    assert drv.cuMemMap(address, 0, 0, handle, 0) == INVALID_VALUE
    if drv.simulated:  # the driver maps beyond a reservation's end if the addresses are free
        assert drv.cuMemMap(address + 3 * PAGE, 2 * PAGE, 0, handle, 0) == INVALID_VALUE
    drv.check("cuMemMap", address, 2 * PAGE, 0, handle, 0)
    drv.check("cuMemUnmap", address, 2 * PAGE)
    drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 4 * PAGE)


def test_mappings_do_not_overlap(drv):
    address, first, second = drv.reserve(4 * PAGE), drv.create(2 * PAGE), drv.create(2 * PAGE)
    drv.map(address, 2 * PAGE, first)
    drv.write(address, b"first")
    assert drv.cuMemMap(address, 2 * PAGE, 0, second, 0) == INVALID_VALUE
    assert drv.cuMemMap(address + PAGE, 2 * PAGE, 0, second, 0) == INVALID_VALUE
    assert drv.read(address, 5) == b"first"
    drv.check("cuMemUnmap", address, 2 * PAGE)
    drv.check("cuMemRelease", first)
    drv.check("cuMemRelease", second)
    drv.check("cuMemAddressFree", address, 4 * PAGE)


def test_two_mappings_of_one_handle_alias(drv):
    address, handle = drv.reserve(2 * PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle)
    drv.map(address + PAGE, PAGE, handle)
    drv.write(address + 100, b"seen twice")
    assert drv.read(address + PAGE + 100, 10) == b"seen twice"
    drv.discard(address, 2 * PAGE, handle)


def test_contents_go_with_the_handle(drv):
    first, second, handle = drv.reserve(PAGE), drv.reserve(PAGE), drv.create(PAGE)
    drv.map(first, PAGE, handle)
    drv.write(first, b"moves")
    drv.check("cuMemUnmap", first, PAGE)
    drv.map(second, PAGE, handle)
    assert drv.read(second, 5) == b"moves"
    drv.discard(second, PAGE, handle)
    drv.check("cuMemAddressFree", first, PAGE)


def test_unmap_takes_whole_mappings(drv):
    address, handles = drv.reserve(6 * PAGE), [drv.create(2 * PAGE) for _ in range(3)]
    for i, handle in enumerate(handles):
        drv.map(address + 2 * i * PAGE, 2 * PAGE, handle)
    drv.write(address, b"whole")
    assert drv.cuMemUnmap(address, PAGE) == INVALID_VALUE
    assert drv.cuMemUnmap(address + PAGE, PAGE) == INVALID_VALUE
    assert drv.cuMemUnmap(address, 3 * PAGE) == INVALID_VALUE
    assert drv.read(address, 5) == b"whole"
    drv.check("cuMemUnmap", address, 4 * PAGE)  # two mappings at once
    assert drv.cuMemUnmap(address, 2 * PAGE) == SUCCESS  # again: nothing is mapped now
    drv.check("cuMemUnmap", address + 4 * PAGE, 2 * PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 6 * PAGE)


def test_unmap_over_a_hole(drv):
    address, handles = drv.reserve(3 * PAGE), [drv.create(PAGE) for _ in range(2)]
    drv.map(address, PAGE, handles[0])
    drv.map(address + 2 * PAGE, PAGE, handles[1])
    assert drv.cuMemUnmap(address, 3 * PAGE) == SUCCESS
    drv.check("cuMemUnmap", address, PAGE)  # whether or not the previous call unmapped it
    drv.check("cuMemUnmap", address + 2 * PAGE, PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 3 * PAGE)


def test_unmap_of_memory_that_was_never_mapped(drv):
    address = drv.reserve(PAGE)
    assert drv.cuMemUnmap(address, PAGE) == SUCCESS
    drv.check("cuMemAddressFree", address, PAGE)


def test_access_is_for_mapped_ranges(drv):
    address = drv.reserve(3 * PAGE)
    assert drv.set_access(address, PAGE) == INVALID_VALUE
    handles = [drv.create(PAGE) for _ in range(2)]
    drv.map(address, PAGE, handles[0], access=False)
    drv.map(address + 2 * PAGE, PAGE, handles[1], access=False)
    assert drv.set_access(address, 3 * PAGE) == SUCCESS  # it stops at the unmapped page
    assert drv.get_access(address) == READ_WRITE
    assert drv.get_access(address + 2 * PAGE) == 0
    drv.check("cuMemUnmap", address, PAGE)
    drv.check("cuMemUnmap", address + 2 * PAGE, PAGE)
    for handle in handles:
        drv.check("cuMemRelease", handle)
    drv.check("cuMemAddressFree", address, 3 * PAGE)


def test_access_over_many_handles_at_once(drv):
    count = 64
    address, handles = drv.reserve(count * PAGE), [drv.create(PAGE) for _ in range(count)]
    for i, handle in enumerate(handles):
        drv.map(address + i * PAGE, PAGE, handle, access=False)
    assert drv.set_access(address, count * PAGE) == SUCCESS
    drv.check("cuMemsetD8", address, 7, count * PAGE)
    assert drv.read(address + count * PAGE - 4, 4) == b"\7\7\7\7"
    drv.discard(address, count * PAGE, *handles)


def test_access_can_be_queried(drv):
    address, handle = drv.reserve(PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle, access=False)
    assert drv.get_access(address) == 0
    assert drv.set_access(address, PAGE) == SUCCESS
    assert drv.get_access(address) == READ_WRITE
    drv.check("cuMemUnmap", address, PAGE)
    drv.map(address, PAGE, handle, access=False)
    assert drv.get_access(address) == 0  # unmapping removed the access
    drv.discard(address, PAGE, handle)


def test_access_of_an_unknown_device(drv, mapped):
    assert drv.set_access(mapped[0], PAGE, device=63) == INVALID_VALUE
    assert drv.read(mapped[0], 1) == b"\0"


def test_memory_without_access_is_refused_at_once_and_nothing_breaks(drv):
    address, handle = drv.reserve(2 * PAGE), drv.create(PAGE)
    drv.map(address, PAGE, handle, access=False)
    buffer = ctypes.create_string_buffer(64)
    for place in (address, address + PAGE):  # mapped, reserved
        assert drv.cuMemsetD8(place, 1, 64) == INVALID_VALUE
        assert drv.cuMemcpyDtoH(ctypes.addressof(buffer), place, 64) == INVALID_VALUE
    drv.check("cuCtxSynchronize")
    drv.set_access(address, PAGE)
    assert drv.read(address, 4) == bytes(4)
    drv.discard(address, 2 * PAGE, handle)
