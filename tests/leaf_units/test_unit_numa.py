"""Tests a device's NUMA node and the memory allocated on this node."""

import pytest

DEVICE = "/sys/bus/pci/devices/0000:1a:00.0/numa_node"
ONLINE = "/sys/devices/system/node/online"


@pytest.mark.parametrize(
    ("files", "node"),
    [
        ({ONLINE: "0-1\n", DEVICE: "1\n"}, 1),
        ({ONLINE: "0,2\n", DEVICE: "0\n"}, 0),
        ({ONLINE: "0\n", DEVICE: "0\n"}, -1),
        ({ONLINE: "0-1\n", DEVICE: "-1\n"}, -1),
        ({ONLINE: "0-1\n", DEVICE: "\n"}, -1),
        ({ONLINE: "0-1\n"}, -1),
        ({DEVICE: "1\n"}, -1),
    ],
)
def test_the_node_of_a_device(system, files, node):
    assert system(files)("node_of", "0000:1A:00.0") == [str(node)]


@pytest.mark.parametrize(
    ("node", "mode", "nodes"),
    [(0, 1, 1), (-1, 0, 0), (1023, 0, 0), (1 << 20, 0, 0)],
    ids=["there is", "unknown", "there is not", "there cannot be"],
)
def test_memory_prefers_the_given_node(leaf, node, mode, nodes):
    said = leaf("prefer", node)
    if said == ["the kernel does not say"]:
        pytest.skip("this kernel has no NUMA policies")
    assert said == [f"mode {mode} nodes {nodes} byte 7"]
