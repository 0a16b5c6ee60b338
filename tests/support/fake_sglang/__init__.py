"""A fake engine with SGLang's interface; errors that end SGLang's scheduler end it too.

The parts have the names, fields and message types of SGLang 0.5.16 and 0.5.23 that memsaver's
integration uses (and of 0.5.12, on request): a scheduler with its weight updater, a tokenizer
manager that queries the schedulers and waits for all of them, an `Engine` with an event loop, and a
server. A dead scheduler sends no answers, so a caller that waits for one waits forever.
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
