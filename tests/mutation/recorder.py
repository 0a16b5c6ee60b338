"""Record which of the measured functions a process enters.

Loaded at the start of each Python process of a place, so that child processes are recorded too.
Writes one line for each function into the file that MUTATION_CALLS names.
"""

import os
import sys
import threading

FILE = os.environ.get("MUTATION_CALLS")
FOLDERS = ("/memsaver/", "/integrations/", "/torch_memory_saver/")
seen = set()


def record(code):
    if code in seen:
        return
    seen.add(code)
    if any(folder in code.co_filename for folder in FOLDERS):
        # Opened each time: tests count open files, and close the files of children.
        with open(FILE, "a") as calls:
            calls.write(f"{code.co_filename}:{getattr(code, 'co_qualname', code.co_name)}\n")


def start():
    if hasattr(sys, "monitoring"):
        monitoring, tool = sys.monitoring, 4

        def entered(code, _offset):
            record(code)
            return monitoring.DISABLE

        monitoring.use_tool_id(tool, "mutation")
        monitoring.register_callback(tool, monitoring.events.PY_START, entered)
        monitoring.set_events(tool, monitoring.events.PY_START)
        return

    def profile(frame, event, _argument):
        if event == "call":
            record(frame.f_code)

    sys.setprofile(profile)
    threading.setprofile(profile)


if FILE:
    start()
