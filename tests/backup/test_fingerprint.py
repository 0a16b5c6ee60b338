"""Tests fingerprints of device memory: the hash, the kernel's source, and its launches."""

import ctypes
import json
import random
import re
import shlex
import struct
import subprocess
import sys

import pytest
from built_sources import built, sources_of_the_core
from fingerprint_memory import found
from fingerprint_reference import PIECE, digest, digests
from repository import ROOT

import memsaver
from memsaver._runtime.native import _C, LIBRARY_DIR
from memsaver.errors import (
    ConfigError,
    InvalidStateError,
)

sys.path.insert(0, str(ROOT))

from build_support import kernels, native

MIB = 1 << 20
KERNELS = ROOT / "csrc" / "kernels"
NATIVE = ROOT / "tests" / "native"


# --- the hash -------------------------------------------------------------------------------------


def test_pieces_of_a_range_are_those_of_the_reference(memory):
    assert found(memory.address, memory.nbytes) == digests(memory.data)


@pytest.mark.parametrize("nbytes", [0, 1, 3, 4, 7, 8, 9, 15, 16, 17, 31, 4095, 4097, PIECE - 1])
def test_pieces_of_any_length_have_the_reference_fingerprint(memory, nbytes):
    assert found(memory.address, nbytes) == (digest(memory.data[:nbytes]) if nbytes else b"")


@pytest.mark.parametrize("offset", [1, 2, 4, 8, 15, 512, 4096, PIECE - 3])
def test_the_same_bytes_have_the_same_fingerprint_at_any_address(sim, memory, offset):
    data = memory.data[: MIB + 1000]
    sim.write(memory.address + offset, data)
    assert found(memory.address + offset, len(data)) == digests(data)


def test_many_ranges_in_order_over_several_batches(memory):
    rng = random.Random(2)
    ranges = []
    for _ in range(2500):
        at = rng.randrange(memory.nbytes - 200)
        ranges.append((at, rng.randrange(1, 200)))
    expected = b"".join(digest(memory.data[at : at + n]) for at, n in ranges)
    assert _C.fingerprint([(memory.address + at, n) for at, n in ranges]) == expected


def test_every_bit_counts(sim, memory):
    rng = random.Random(3)
    before = digests(memory.data)
    places = [0, 1, PIECE - 1, PIECE, memory.nbytes - 1]
    for at in [*places, *(rng.randrange(memory.nbytes) for _ in range(15))]:
        changed = memory.data[at] ^ 1 << rng.randrange(8)
        sim.write(memory.address + at, bytes([changed]))
        after = found(memory.address, memory.nbytes)
        sim.write(memory.address + at, memory.data[at : at + 1])
        differ = [i for i in range(0, len(before), 32) if before[i : i + 32] != after[i : i + 32]]
        assert differ == [at // PIECE * 32]
        changed_lanes = [
            before[i : i + 8] != after[i : i + 8] for i in range(differ[0], differ[0] + 32, 8)
        ]
        assert all(changed_lanes)


def test_the_order_of_words_counts(sim, memory):
    whole = [struct.pack("<4I", 1, 2, 3, 4), struct.pack("<4I", 2, 1, 3, 4)]
    whole += [struct.pack("<4I", 3, 4, 1, 2), struct.pack("<4I", 1, 2, 4, 3)]
    seen = set()
    for words in whole:
        sim.write(memory.address, words)
        seen.add(found(memory.address, 16))
    assert len(seen) == len(whole)


def test_zeros_at_the_end_count(sim, memory):
    sim.write(memory.address, bytes(64))
    seen = {found(memory.address, n) for n in range(1, 65)}
    assert len(seen) == 64


# --- kinds of memory ------------------------------------------------------------------------------


def test_plain_memory_of_the_driver(sim, memory):
    address = ctypes.c_uint64()
    with sim.stream():
        assert sim.opened.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_size_t(MIB)) == 0
        try:
            sim.write(address.value, memory.data[:MIB])
            both = _C.fingerprint([(address.value, MIB), (memory.address, MIB)])
            assert both == 2 * digest(memory.data[:MIB])
            with pytest.raises(ConfigError, match=r"allocation ends 1 MiB"):
                found(address.value, 2 * MIB + 1)
        finally:
            assert sim.opened.cuMemFree_v2(address) == 0


def test_fingerprints_of_other_memory_are_rejected(sim):
    buffer = ctypes.create_string_buffer(64)
    for address in (ctypes.addressof(buffer), 1 << 40, 0):
        with pytest.raises(ConfigError, match="no device memory"):
            found(address, 8)
    with pytest.raises(ConfigError, match="beyond all addresses"):
        found((1 << 64) - 8, 16)


def test_memory_of_a_paused_tag_and_memory_without_a_tag(sim, tag, make_blocks):
    name = tag("weights")
    first, second = make_blocks(name, [MIB, MIB], backup="host")
    address = second.address
    with pytest.raises(InvalidStateError, match="no live allocation"):
        found(first.address, 4 * MIB)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError, match="is paused") as refused:
        found(first.address, MIB)
    assert refused.value.tag == name
    memsaver.resume(name)
    assert found(first.address, MIB) == digest(first.expected())
    del second
    with pytest.raises(InvalidStateError, match="no live allocation"):
        found(address, 1)


def test_two_devices_and_their_order(run_python):
    run_python(
        """
        import random
        import memsaver
        from memsaver import simulator
        from memsaver._runtime.native import _C
        from simulated_driver import Simulator
        from fingerprint_reference import digest
        sim = Simulator()
        with memsaver.region("tag"):
            buffers = [simulator.buffer(1 << 20, device) for device in (1, 0, 1)]
        data = [random.Random(i).randbytes(1 << 20) for i in range(3)]
        for buffer, contents in zip(buffers, data):
            sim.write(buffer.address, contents)
        found = _C.fingerprint([(buffer.address, 1 << 20) for buffer in buffers])
        assert found == b"".join(map(digest, data))
        assert sim.counts().modules == 2
        assert memsaver.trim(wait=True) > 0 and sim.counts().registered_bytes == 0
        assert not sim.violations()
        """,
        MEMSAVER_SIM_DEVICES=2,
    )


# --- other work -----------------------------------------------------------------------------------


def test_work_submitted_before_is_waited_for(sim, memory):
    with sim.stream() as stream:
        sim.stream_delay(0.05)
        sim.memset(memory.address, 9, memory.nbytes, stream)
        assert found(memory.address, memory.nbytes) == digests(b"\x09" * memory.nbytes)


def test_a_pause_waits_until_the_memory_was_read(sim, tag, make_blocks, in_thread, wait_until):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    sim.hold_streams(True)
    before = sim.calls("cuEventSynchronize")
    reading = in_thread(found, block.address, MIB)
    wait_until(lambda: sim.calls("cuEventSynchronize") > before)
    pausing = in_thread(memsaver.pause, name)
    pausing.join(0.1)
    assert pausing.is_alive() and memsaver.state(name) == "mapped"
    sim.hold_streams(False)
    assert reading.result() == digest(block.expected())
    pausing.result()
    memsaver.resume(name)
    assert block.is_intact()


def test_a_capture_stays_valid(sim, memory):
    graph = ctypes.c_void_p()
    with sim.stream() as stream:
        for mode in (0, 1, 2):
            assert sim.opened.cuStreamBeginCapture_v2(stream, mode) == 0
            assert found(memory.address, memory.nbytes) == digests(memory.data)
            memsaver.trim(wait=True)
            assert sim.opened.cuStreamEndCapture(stream, ctypes.byref(graph)) == 0
            sim.opened.cuGraphDestroy(graph)


def test_host_memory_is_kept_for_the_next_time_until_a_trim(sim, memory):
    memsaver.trim(wait=True)
    before = sim.counts().registered_bytes
    found(memory.address, memory.nbytes)
    kept = sim.counts().registered_bytes - before
    assert 0 < kept <= MIB
    calls = sim.calls("cuMemHostRegister")
    found(memory.address, memory.nbytes)
    assert sim.calls("cuMemHostRegister") == calls
    assert memsaver.trim(wait=True) == kept
    assert sim.counts().registered_bytes == before


# --- the unit, as higher layers use it ------------------------------------------------------------


def compiled(name, *options):
    return built(
        name,
        [NATIVE / f"{name}.cpp"],
        ["-std=c++17", "-pthread", f"-I{ROOT / 'csrc'}", *options],
        compiler=shlex.split(native.compiler()),
        libraries=["-ldl"],
        headers=sources_of_the_core(),
    )


def test_the_unit():
    program = compiled(
        "fingerprinter",
        "-O0",
        *(f"-isystem{folder}" for folder in native.include_folders()),
        f'-DMEMSAVER_EMBEDDED="{KERNELS / kernels.FATBIN}"',
    )
    done = subprocess.run(
        [program],
        env={
            "MEMSAVER_DRIVER": str(LIBRARY_DIR / "libmemsaver_sim.so"),
            "MEMSAVER_SIM_DEVICES": "2",
        },
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines() == [
        "available: 0",
        "available: 0",
        "available: 0",
        "modules: 0",
        "warnings: 1",
        "available: 1",
        "warnings: 0",
        "left after the first batch: 1",
        "left after the last: 0, equal: 1",
        "never asked for: 11",
        "left after the object: 0",
        "streams: 0, events: 0, violations: 0",
        "kept: 1",
        "trimmed: 1",
        "kept: 0",
        "available: 0",
        "available: 0",
        "refused: 7 209 cuModuleLoadData",
        "loads: 1",
        "warnings: 1",
    ]


# --- the kernel -----------------------------------------------------------------------------------


@pytest.mark.long
def test_the_kernels_source_on_threads_of_the_cpu():
    rng = random.Random(4)
    sizes = [(0, 20_000), (0, 12_288), (0, 8191), (0, 0)]  # different lengths, one of them 0
    sizes += [(0, 20_480)] * 4  # the common case
    sizes += [(0, 16_384), (4, 16_384), (1, 5000), (15, 9)]  # different alignments
    sizes += [(8, rng.randrange(1, 40)), (0, rng.randrange(1, 40))]  # a block with two pieces
    data = [rng.randbytes(nbytes) for _, nbytes in sizes]
    given = struct.pack("<Q", len(sizes)) + b"".join(struct.pack("<2Q", *size) for size in sizes)
    program = compiled("run_fingerprint_kernel", "-O1", "-Wno-unknown-pragmas")
    done = subprocess.run([program], input=given + b"".join(data), capture_output=True, check=True)
    found = [done.stdout[at : at + 32] for at in range(0, len(done.stdout), 32)]
    assert found == [digest(contents) for contents in data]


def test_the_binary_is_of_these_sources():
    record = json.loads((KERNELS / kernels.RECORD).read_text())
    now = kernels.described()
    advice = "run `make kernels`, and commit what it writes"
    assert {name: record[name] for name in now} == now, advice
    assert kernels._sha256(KERNELS / kernels.FATBIN) == record["fatbin"], advice


def test_the_library_has_the_binary_in_it():
    image = (KERNELS / kernels.FATBIN).read_bytes()
    assert image in (LIBRARY_DIR / "libmemsaver.so").read_bytes()


def entries(image):
    """Yield the kind, architecture and bytes of each entry in a fatbin."""
    at = 16
    assert struct.unpack_from("<IH", image) == (0xBA55ED50, 1)
    while at < len(image):
        kind, _, header, size = struct.unpack_from("<HHIQ", image, at)
        (machine,) = struct.unpack_from("<I", image, at + 28)
        yield kind, machine, image[at + header : at + header + size]
        at += header + size


def test_the_binary_is_for_old_drivers_too():
    ptx, elf = 1, 2
    images = {(kind, m): b for kind, m, b in entries((KERNELS / kernels.FATBIN).read_bytes())}
    assert set(images) == {(elf, m) for m in kernels.MACHINES} | {(ptx, kernels.PTX_TARGET)}
    text = images[ptx, kernels.PTX_TARGET].decode()
    assert re.search(r"^\.version 8\.0$", text, re.M) and re.search(r"^\.target sm_70$", text, re.M)
    for machine in kernels.MACHINES:
        cubin = images[elf, machine]
        assert cubin.startswith(b"\x7fELF") and b"ms_fingerprint" in cubin
        abi = cubin[8]  # 8 needs CUDA 12.8's driver, as those GPUs do
        assert abi == (7 if machine < 100 else 8)
