"""Records which of the measured functions a process enters.

Each Python process of a place loads this module at its start, so child processes are also recorded.
The module writes one line for each function to the file that MUTATION_CALLS names.
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
