"""Tests a CUDA driver for undocumented behavior. Prints `question: answer` lines.

    python -m questions                  the real driver, libcuda.so.1
    python -m questions sim              the simulated driver
    python -m questions /path/to/lib.so  another driver

Run the program in tests/conformance. The program never fails. Each question that could break a
context or the process runs in a separate process.
"""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from ctypes import c_int

from driver_api import Driver, in_child, in_thread, simulator_path
from driver_values import GLOBAL, RELAXED

from questions.alone import ALONE, THE_GPU_TO_THEMSELVES
from questions.calls import CALLS, NEEDS
from questions.effects import (
    does_destroying_the_busy_stream_wait,
    does_it_break_a_capture,
    does_it_wait,
)


def answer(question, ask):
    try:
        text = ask()
    except BaseException as error:  # errors are answers too
        text = f"could not be asked: {type(error).__name__} {error}"
    print(f"{question}: {text}", flush=True)


def ask_here(drv):
    for name, make in CALLS.items():
        if make in NEEDS and not drv.has(NEEDS[make]):
            print(f"does {name} wait: the driver does not have it")
            continue
        answer(
            f"does {name} wait for a non-blocking stream",
            lambda make=make: in_thread(drv, lambda: does_it_wait(drv, make), timeout=10),
        )
    answer(
        "does cuStreamDestroy wait for the stream's own work",
        lambda: does_destroying_the_busy_stream_wait(drv),
    )
    for mode, mode_name in ((RELAXED, "relaxed"), (GLOBAL, "default")):
        for name, make in CALLS.items():
            if make not in NEEDS or drv.has(NEEDS[make]):
                answer(
                    f"{name} under a global capture, {mode_name} thread",
                    lambda make=make, mode=mode: does_it_break_a_capture(drv, make, mode),
                )


def main() -> None:
    named = sys.argv[1] if len(sys.argv) > 1 else "libcuda.so.1"
    path = simulator_path() if named == "sim" else named
    if path is None:
        print("driver: libmemsaver_sim.so is not built")
        return
    try:
        drv = Driver(path).start()
    except Exception as error:
        print(f"driver: {path} cannot be used: {error}")
        return
    print(f"driver: {path}, version {drv.get('cuDriverGetVersion', c_int)}")
    ask_here(drv)
    with ThreadPoolExecutor(4) as pool:  # each process mostly waits for GPU initialisation
        found = {
            name: pool.submit(in_child, path, ask, 12)
            for name, ask in ALONE.items()
            if name not in THE_GPU_TO_THEMSELVES
        }
        for name, future in found.items():
            answer(name, future.result)
    for name in sorted(THE_GPU_TO_THEMSELVES):
        answer(name, lambda name=name: in_child(path, ALONE[name], 12))


if __name__ == "__main__":
    main()
