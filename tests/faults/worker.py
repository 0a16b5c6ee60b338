"""Runs faults of one scenario in a process, with line-based requests on stdin and answers on
stdout.

The answer to `count` lists the calls that the act makes. The answer to an injection is its result.
After a failed injection, the worker's state is unknown, and the caller starts another worker.
"""

from __future__ import annotations

import faulthandler
import functools
import gc
import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from typing import Any

from faults import checks
from faults.injections import Injection
from faults.machine import Machine
from faults.scenarios import SCENARIOS, Scenario


def build(name: str) -> Scenario:
    machine = Machine()
    scenario = SCENARIOS[name](machine, name)
    machine.sim.granularity(scenario.granule)
    for option, value in scenario.options.items():
        machine.memsaver.configure(**{option: value})
    for call, code in scenario.standing.items():
        machine.stand(call, code)
    return scenario


def answered(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return action()
    except AssertionError as error:
        return {"result": "failed", "why": str(error) or traceback.format_exc(limit=-4)}
    except Exception:
        return {"result": "failed", "why": traceback.format_exc(limit=-6)}


def answer(scenario: Scenario, line: str, reference: dict[str, Any]) -> dict[str, Any]:
    if line == "count":
        return answered(lambda: {"counts": checks.count(scenario)})
    injection = Injection.parse(line)
    return answered(lambda: {"result": checks.attempt(scenario, injection, reference)})


def in_child(action: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """Return the action's result from a forked process, or report the process's death."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(writing, json.dumps(answered(action)).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    return json.loads(text) if text else {"result": "died", "why": f"the process ended: {status}"}


def first_count(scenario: Scenario) -> dict[str, Any]:
    """Return the first act's calls and the resulting counters, from a separate process."""
    machine = scenario.machine
    if scenario.name != "first_device":
        machine.start(1)
    scenario.build()
    counts = checks.count(scenario)
    return {"counts": counts, "reference": machine.totals()}


def first_attempt(scenario: Scenario, line: str, reference: dict[str, Any]) -> dict[str, Any]:
    if scenario.name != "first_device":
        scenario.machine.start(1)
    scenario.build()
    return answer(scenario, line, reference)


def main() -> None:
    name = sys.argv[1]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # other output must not look like an answer
    faulthandler.enable()
    warnings.simplefilter("ignore")
    scenario = build(name)
    if scenario.fresh:
        gc.freeze()  # a collection in each child would copy the pages of all objects
        counted = in_child(lambda: first_count(scenario))
        reference = counted.get("reference", {})
    else:
        reference = checks.reference(scenario)
    for line in map(str.strip, sys.stdin):
        if not scenario.fresh:
            said = answer(scenario, line, reference)
        elif line == "count":
            said = counted
        else:
            said = in_child(functools.partial(first_attempt, scenario, line, reference))
        print(json.dumps(said), file=answers, flush=True)


if __name__ == "__main__":
    main()
