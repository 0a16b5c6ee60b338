"""One process of a soak test, which walks on request and answers with lines of JSON.

    python -m soak.worker gpu|sim SEED FOLDER [GIB]

Each line of the input is a request: "figures" (return the process's current use of resources),
"walk SECONDS STEPS" (walk for at most this time and this number of steps), "finish" (resume and
free everything; return the counts since the start), or "end". The process writes one line when it
has started, and one line as the answer to each request except "end". FOLDER contains the locks and
the disk backups.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path
from typing import Any

import memsaver
from soak.memory import MEMORIES
from soak.turnstile import Turnstile
from soak.walk import Walk


def main() -> None:
    driver, seed, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    gib = float(sys.argv[4]) if len(sys.argv) > 4 else None
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output of libraries must not look like an answer

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        memsaver.configure(disk_dir=folder)
        memory = MEMORIES[driver](seed, gib)
        walk = Walk(memory, seed, Turnstile(folder))
        walk.warm_up()
        memory.figures()
        walk.reset()
        answer(device=memory.device, limits=vars(memory.limits), version=memsaver.__version__)
        for line in sys.stdin:
            word, *rest = line.split()
            if word == "figures":
                answer(figures=memory.figures())
            elif word == "walk":
                walk.run(float(rest[0]), int(rest[1]))
                answer(steps=walk.operations.total())
            elif word == "finish":
                walk.finish()
                answer(
                    cycles=walk.cycles,
                    operations=dict(walk.operations),
                    device_bytes=walk.device_bytes,
                    copied_bytes=walk.copied_bytes,
                    fingerprinted_bytes=walk.fingerprinted_bytes,
                    errors_met=dict(walk.met),
                    errors_recovered=dict(walk.recovered),
                    warnings=dict(walk.warned.most_common(10)),
                )
            else:
                break
    except BaseException:
        answer(failed=traceback.format_exc())
        sys.exit(1)


if __name__ == "__main__":
    main()
