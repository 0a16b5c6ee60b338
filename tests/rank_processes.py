"""The same Python code in several processes, as the ranks of one `torch.distributed` group."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from memsaver.native import LIBRARY_DIR


def run(
    code: str,
    size: int,
    folder: Path,
    *,
    statuses: Mapping[int, int] | None = None,
    timeout: float = 60,
) -> list[str]:
    """Run `code` as ranks 0 to `size` - 1, on the simulated driver; what each of them printed.

    Every one of them must end with the status 0, but those whose status is given. `timeout` is in
    seconds, for each.
    """
    environment = {k: v for k, v in os.environ.items() if not k.startswith("MEMSAVER_")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        environment["MASTER_PORT"] = str(free.getsockname()[1])
    environment.update(
        MASTER_ADDR="127.0.0.1",
        WORLD_SIZE=str(size),
        MEMSAVER_DRIVER="sim",
        OMP_NUM_THREADS="1",
        PYTHONPATH=os.pathsep.join([str(Path(__file__).parent), str(LIBRARY_DIR.parent)]),
    )
    script = folder / "ranks.py"
    script.write_text(code)
    ranks, outputs = [], [(folder / str(rank)).open("w+") for rank in range(size)]
    try:
        for rank, output in enumerate(outputs):
            ranks.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env={**environment, "RANK": str(rank)},
                    cwd=folder,
                    stdout=output,
                    stderr=output,
                )
            )
        ended = [rank.wait(timeout) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
        said = []
        for output in outputs:
            output.seek(0)
            said.append(output.read())
            output.close()
        report = "\n".join(f"--- rank {rank}\n{text}" for rank, text in enumerate(said))
        print(report)
    assert ended == [(statuses or {}).get(rank, 0) for rank in range(size)], report
    return said
