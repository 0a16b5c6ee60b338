"""Makes a scheduler fail, if the PYTHONPATH of the engine's processes includes this folder.

The file that MEMSAVER_TEST_FAILS names contains the kind of failure. "exception" raises an
exception in the next batch. "cuda" runs a failing kernel in the next batch. "killed" sends SIGKILL
in the next update, after the load, while the received tensors exist. The scheduler removes the file
before it fails.
"""

import os
import signal
from pathlib import Path

FLAG = os.environ.get("MEMSAVER_TEST_FAILS")

if FLAG:
    from memsaver.integrations.engine.weights import load_check
    from memsaver.integrations.sglang import hooks

    given, watched = hooks._hooks_of_requests, load_check.watched

    def removed(*kinds):
        """If the file contains one of these kinds of failure, remove the file and return the
        kind.
        """
        kind = Path(FLAG).read_text() if Path(FLAG).exists() else ""
        if kind not in kinds:
            return ""
        Path(FLAG).unlink()
        return kind

    def failing(original, scheduler, *args, **named):
        if kind := removed("exception", "cuda"):
            if kind == "exception":
                raise RuntimeError("the test makes this scheduler fail")
            import torch

            few = torch.zeros(4, device="cuda")
            few[torch.full((8,), 1 << 30, device="cuda")] = 1
            torch.cuda.synchronize()
        return original(scheduler, *args, **named)

    def with_failures():
        return {**given(), f"{hooks._SCHEDULER}.run_batch": ("AROUND", failing)}

    def and_killed(model, named, load):
        result = watched(model, named, load)
        if removed("killed"):
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    hooks._hooks_of_requests = with_failures
    load_check.watched = and_killed
