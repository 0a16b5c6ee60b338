"""Runs an act under one fault and checks all invariants afterwards."""

from __future__ import annotations

import errno
import gc
import threading
from typing import Any

from faults.exceptions import allowed
from faults.injections import OS_TOLERATED, SHORT, Injection
from faults.machine import Machine
from faults.scenario import Scenario, require
from memsaver.errors import (
    BackupError,
    DriverError,
    MemsaverError,
    NotLoadedError,
    OutOfDeviceMemoryError,
    OutOfHostMemoryError,
)

PASSED, UNMET = "passed", "unmet"  # UNMET: the act made fewer of these calls than before

WARM_UPS = 2


def reference(scenario: Scenario) -> dict[str, Any]:
    """Build the scenario, run the act without a fault, and return the counters at rest."""
    machine: Machine = scenario.machine
    machine.start(scenario.devices)
    scenario.build()
    for _ in range(WARM_UPS):
        complete(scenario)
    gc.collect()
    gc.freeze()  # excludes existing objects: collecting would take half of an attempt
    return machine.totals()


def complete(scenario: Scenario) -> None:
    """Run the scenario once from rest to rest without a fault."""
    scenario.prepare()
    error = act(scenario)
    require(error is None, f"without a fault: {error!r}")
    finish(scenario)


def count(scenario: Scenario) -> dict[str, int]:
    """Return the number of calls that the act makes, by name."""
    scenario.prepare()
    before = scenario.machine.counts()
    error = act(scenario)
    require(error is None, f"without a fault: {error!r}")
    after = scenario.machine.counts()
    finish(scenario)
    return {name: after[name] - before[name] for name in after}


def attempt(scenario: Scenario, injection: Injection, reference: dict[str, Any]) -> str:
    """Return PASSED or UNMET. Raises an AssertionError that describes a violation."""
    machine = scenario.machine
    scenario.prepare()
    error, met = act_under(scenario, injection)
    if not met:
        require(error is None, f"without a fault: {error!r}")
        finish(scenario)
        return UNMET
    if error is not None:
        check_error(injection, error)
        scenario.check_unchanged(error)
        again = act(scenario)
        require(again is None, f"with the fault gone it fails again: {again!r}, after {error!r}")
    finish(scenario)
    check_leaks(machine, injection, scenario, reference)
    return PASSED


def act(scenario: Scenario) -> Exception | None:
    """Run the act on its own thread, because an act that fails to pop a context would affect other
    acts.
    """
    met: list[Exception] = []

    def body() -> None:
        try:
            scenario.act()
        except Exception as error:
            met.append(error)

    thread = threading.Thread(target=body)
    thread.start()
    thread.join()
    return met[0].with_traceback(None) if met else None


def act_under(scenario: Scenario, injection: Injection) -> tuple[Exception | None, bool]:
    machine = scenario.machine
    machine.arm(injection)
    try:
        error = act(scenario)
    finally:
        met = machine.disarm(injection)
    return error, met


def finish(scenario: Scenario) -> None:
    scenario.check_done()
    check_accounts(scenario.machine)
    scenario.rest()
    check_accounts(scenario.machine)
    deferred = scenario.machine.memsaver.stats().deferred
    require(deferred.objects == 0, f"releases are still deferred: {deferred}")
    gc.collect()


def check_error(injection: Injection, error: Exception) -> None:
    require(isinstance(error, MemsaverError), f"not one of memsaver's errors: {error!r}")
    assert isinstance(error, MemsaverError)
    require(bool(str(error)), f"an error without a message: {error!r}")
    if injection.of_driver:
        kinds: tuple[type, ...] = (DriverError, OutOfDeviceMemoryError, OutOfHostMemoryError)
        if injection.call in ("cuInit", "cuDriverGetVersion", "cuDeviceGetAttribute"):
            kinds += (NotLoadedError,)
        named = isinstance(error, NotLoadedError) or (
            (error.call, error.cuda_error) == (injection.call, injection.code)
        )
        require(named, f"the error names another call: {error.call} {error.cuda_error}: {error}")
    elif (injection.call, injection.code) == ("open", errno.EMFILE):
        kinds = (OutOfHostMemoryError,)  # without a descriptor the limits are unknown
    elif injection.call in OS_TOLERATED or injection.code == SHORT:
        require(False, f"an error of a call that is not needed: {error!r}")
    elif injection.call in ("malloc", "mmap"):
        kinds = (OutOfHostMemoryError,)
    else:
        kinds = (BackupError,)
        require(error.os_error == injection.code, f"errno {error.os_error}: {error!r}")
    require(type(error) in kinds, f"the wrong kind of error: {error!r}")


def check_accounts(machine: Machine) -> None:
    """Check rule 10: the reported bytes equal the driver's, except for memory that is not yet
    released.
    """
    if not machine.idle:
        return
    stats, actual = machine.memsaver.stats(), machine.tags_bytes()
    reported, deferred = stats.resident_bytes, stats.deferred
    require(
        reported <= actual <= reported + deferred.device_bytes,
        f"reported are {reported} bytes and {deferred}, the driver says {actual}",
    )


def check_leaks(
    machine: Machine, injection: Injection, scenario: Scenario, reference: dict[str, Any]
) -> None:
    totals = machine.totals()
    left = [
        f"{name}: {value}, not {reference[name]}"
        for name, value in totals.items()
        if value > reference[name] and name not in scenario.grows and not allowed(injection, name)
    ]
    violations = "; ".join(machine.sim.violations())
    require(not left, f"left over: {', '.join(left)} {violations}")
    # Leaks of an exempted fault do not count for the next fault.
    for name, value in totals.items():
        reference[name] = value if name in scenario.grows else max(value, reference[name])
