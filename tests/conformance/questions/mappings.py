"""Questions about reservations, handles and mappings.

Each question runs in a separate process, which receives only its source and imports driver_api.
"""

from __future__ import annotations

import ctypes
from ctypes import byref, c_void_p

from driver_values import HostFunction


def reserve_aligned(drv):
    drv.start()
    answers = []
    for alignment in (64 << 30, 1 << 40):
        out = ctypes.c_uint64()
        code = drv.cuMemAddressReserve(byref(out), 2 << 20, alignment, 0, 0)
        aligned = "aligned" if out.value % alignment == 0 else "NOT aligned"
        answers.append(f"{alignment >> 30} GiB {code} {aligned}")
    return ", ".join(answers)


def reserve_a_page_of_the_host(drv):
    drv.start()
    out = ctypes.c_uint64()
    return drv.cuMemAddressReserve(byref(out), 4096, 0, 0, 0)


def map_twice(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(page)
    codes = [drv.cuMemMap(address + i * page, page, 0, handle, 0) for i in (0, 1)]
    return [*codes, drv.set_access(address, 2 * page)]


def map_part_of_a_handle(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(2 * page), drv.create(2 * page)
    return drv.cuMemMap(address, page, 0, handle, 0)


def map_without_reservation(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(page), drv.create(page)
    drv.check("cuMemAddressFree", address, page)
    return drv.cuMemMap(address, page, 0, handle, 0)


def map_across_two_reservations(drv):
    drv.start()
    page = 2 << 20
    first = drv.reserve(4 * page)
    drv.check("cuMemAddressFree", first, 4 * page)
    low, high = drv.reserve(2 * page, 0, first), drv.reserve(2 * page, 0, first + 2 * page)
    if (low, high) != (first, first + 2 * page):
        return "hints were not taken"
    handle = drv.create(2 * page)
    code = drv.cuMemMap(low + page, 2 * page, 0, handle, 0)
    one, other = drv.create(page), drv.create(page)
    if code == 0:
        drv.check("cuMemUnmap", low + page, 2 * page)
    drv.map(low + page, page, one, access=False)
    drv.map(high, page, other, access=False)
    access = drv.set_access(low + page, 2 * page)
    return {"map": code, "set access": access, "unmap": drv.cuMemUnmap(low + page, 2 * page)}


def unmap_half(drv):
    drv.start()
    page = 2 << 20
    address, _ = drv.mapped(2 * page)
    codes = [drv.cuMemUnmap(address, page), drv.cuMemUnmap(address + page, page)]
    out = ctypes.create_string_buffer(4)
    codes.append(drv.cuMemcpyDtoH(ctypes.addressof(out), address, 4))
    return [*codes, drv.cuMemUnmap(address, 2 * page)]


def unmap_over_a_hole(drv):
    drv.start()
    page = 2 << 20
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page))
    code = drv.cuMemUnmap(address, 3 * page)
    return [code] + [drv.cuMemUnmap(address + i * page, page) for i in (0, 2)]


def left_after_unmapping_over_a_hole(drv):
    drv.start()
    page, out = 2 << 20, ctypes.c_uint64()
    address = drv.reserve(3 * page)
    for i in (0, 2):
        drv.map(address + i * page, page, drv.create(page))
    code = drv.cuMemUnmap(address, 3 * page)
    places = [address, address + 2 * page]
    found = [drv.cuMemRetainAllocationHandle(byref(out), place) for place in places]
    return {"unmap": code, "handle behind each": found}


def map_at_odd_places(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.reserve(4 * page), drv.create(2 * page)
    return {
        "4 KiB into a page": drv.cuMemMap(address + 4096, 2 * page, 0, handle, 0),
        "flags 1": drv.cuMemMap(address, 2 * page, 0, handle, 1),
        "more than the handle": drv.cuMemMap(address, 4 * page, 0, handle, 0),
        "0 bytes": drv.cuMemMap(address, 0, 0, handle, 0),
        "over the end": drv.cuMemMap(address + 3 * page, 2 * page, 0, handle, 0),
    }


def free_with_a_mapping(drv):
    drv.start()
    page = 2 << 20
    address, _ = drv.mapped(page)
    codes = [drv.cuMemAddressFree(address, page), drv.cuMemUnmap(address, page)]
    return [*codes, drv.cuMemAddressFree(address, page)]


def release_twice(drv):
    drv.start()
    handle = drv.create(2 << 20)
    return [drv.cuMemRelease(handle), drv.cuMemRelease(handle)]


def release_twice_while_mapped(drv):
    drv.start()
    address, handle = drv.mapped(2 << 20)
    codes = [drv.cuMemRelease(handle), drv.cuMemRelease(handle)]
    return [*codes, drv.cuMemUnmap(address, 2 << 20)]


def release_of_nonsense(drv):
    drv.start()
    return drv.cuMemRelease(0x12345678)


def unmap_under_queued_work(drv):
    drv.start()
    page = 2 << 20
    address, handle = drv.mapped(page)
    other, other_handle = drv.mapped(page)
    stream = drv.stream()
    sleep = ctypes.cast(ctypes.CDLL(None).usleep, HostFunction)
    drv.check("cuLaunchHostFunc", stream, sleep, c_void_p(300000))
    submitted = drv.cuMemsetD8Async(address, 1, page, stream)
    unmapped = drv.cuMemUnmap(address, page)
    out = ctypes.c_size_t()
    return {
        "submit": submitted,
        "unmap": unmapped,
        "synchronize": drv.cuStreamSynchronize(stream),
        "then cuMemGetInfo": drv.cuMemGetInfo(byref(out), byref(out)),
        "cuMemCreate": drv.cuMemCreate(byref(out), page, byref(drv.properties()), 0),
        "cuMemUnmap": drv.cuMemUnmap(other, page),
        "cuMemRelease": drv.cuMemRelease(other_handle),
        "cuMemAddressFree": drv.cuMemAddressFree(other, page),
        "cuMemRelease of the unmapped": drv.cuMemRelease(handle),
    }


def handle_size_and_device(drv):
    drv.start()
    out = ctypes.c_uint64()
    no_device = drv.cuMemCreate(byref(out), 2 << 20, byref(drv.properties(63)), 0)
    return {
        "0 bytes": drv.try_create(0),
        "2 MiB + 4 KiB": drv.try_create((2 << 20) + 4096),
        "unknown device": no_device,
        "1 PiB": drv.try_create(1 << 50),
    }


QUESTIONS = {
    "reservation aligned to": reserve_aligned,
    "reservation of 4 KiB": reserve_a_page_of_the_host,
    "one handle mapped at two addresses, access to both": map_twice,
    "map a part of a handle": map_part_of_a_handle,
    "map where nothing is reserved": map_without_reservation,
    "across two neighbouring reservations": map_across_two_reservations,
    "unmap first half, second half; read; unmap whole": unmap_half,
    "unmap over a hole; then the parts": unmap_over_a_hole,
    "what is left after unmapping over a hole": left_after_unmapping_over_a_hole,
    "map at odd places": map_at_odd_places,
    "free a reservation with a mapping; unmap; free": free_with_a_mapping,
    "release twice": release_twice,
    "release twice while mapped; unmap": release_twice_while_mapped,
    "release of a number that is no handle": release_of_nonsense,
    "unmap under a queued set": unmap_under_queued_work,
    "cuMemCreate of": handle_size_and_device,
}
