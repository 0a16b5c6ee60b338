"""Make a scheduler fail in its next batch; PYTHONPATH of the engine's processes includes this.

The file that MEMSAVER_TEST_FAILS names contains the kind of the failure: "exception", or "cuda" for
a kernel that fails. The scheduler removes the file first.
"""

import os
from pathlib import Path

FLAG = os.environ.get("MEMSAVER_TEST_FAILS")

if FLAG:
    from memsaver.integrations.sglang import hooks

    given = hooks._hooks_of_requests

    def failing(original, scheduler, *args, **named):
        if Path(FLAG).exists():
            kind = Path(FLAG).read_text()
            Path(FLAG).unlink()
            if kind == "exception":
                raise RuntimeError("the test makes this scheduler fail")
            import torch

            few = torch.zeros(4, device="cuda")
            few[torch.full((8,), 1 << 30, device="cuda")] = 1
            torch.cuda.synchronize()
        return original(scheduler, *args, **named)

    def with_failures():
        return {**given(), f"{hooks._SCHEDULER}.run_batch": ("AROUND", failing)}

    hooks._hooks_of_requests = with_failures
