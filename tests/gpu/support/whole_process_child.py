"""Updates an engine's server without buckets; the trainer's whole process is a region.

usage: whole_process_child.py URL, with the variables of `memsaver.preload_env`
"""

from __future__ import annotations

import os
import sys

from trainer_weights import outputs, state


def main(url: str) -> None:
    import memsaver
    from memsaver.integrations.rollout import RolloutEngine

    tag = os.environ["MEMSAVER_TAG"]
    with memsaver.region(tag, shareable=True):
        pass
    weights = state(1)
    with RolloutEngine.connect(url, timeout=120) as engine:
        first = outputs(engine)
        for seed in (2, 1):
            for name, tensor in state(seed).items():
                weights[name].copy_(tensor)
            report = engine.update_weights(weights, verify="full")
            print(report, flush=True)
            assert report.mapped == report.held == report.tensors and not report.buckets, report
            memsaver.pause(tag)  # the engine no longer reads the trainer's memory
            assert (outputs(engine) == first) == (seed == 1), seed
            memsaver.resume(tag)


if __name__ == "__main__":
    main(sys.argv[1])
    print("held", flush=True)
