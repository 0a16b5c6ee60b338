"""A fake engine with SGLang's interface; errors that are fatal to SGLang are fatal to the fake.

The fake has the names, fields and message types of SGLang 0.5.16 and 0.5.23 (and, on request,
0.5.12) that memsaver's integration uses. The fake consists of a scheduler with a weight updater, a
tokenizer manager, an `Engine` with an event loop, and a server. The tokenizer manager queries the
schedulers and waits for all of them. A dead scheduler sends no answers, so a caller that waits for
an answer waits forever.
"""

from fake_sglang.main_process import Engine, dies_in_a_release, generated
from fake_sglang.messages import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from fake_sglang.scheduler import TAGS, Saver, Scheduler, Tensor
from fake_sglang.server import CALLS, Server
from fake_sglang.sys_modules import HANDLERS, modules

__all__ = [
    "CALLS",
    "HANDLERS",
    "TAGS",
    "Engine",
    "ReleaseMemoryOccupationReqInput",
    "ResumeMemoryOccupationReqInput",
    "Saver",
    "Scheduler",
    "Server",
    "Tensor",
    "dies_in_a_release",
    "generated",
    "modules",
]
