"""Runs a program with the address of a local Ray cluster of two nodes with one GPU each.

usage: ray_nodes.py PROGRAM [ARGUMENT...]; the option --address is added
"""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any


def main() -> int:
    """Return the program's exit status."""
    from ray.cluster_utils import Cluster

    first, second = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")[:2]

    def node(gpu: str) -> dict[str, Any]:
        return {"num_cpus": 8, "num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": gpu}}

    cluster = Cluster(
        initialize_head=True, head_node_args={**node(first), "include_dashboard": False}
    )
    try:
        cluster.add_node(**node(second))
        words = [sys.executable, *sys.argv[1:], "--address", cluster.address]
        return subprocess.run(words).returncode
    finally:
        cluster.shutdown()


if __name__ == "__main__":
    sys.exit(main())
