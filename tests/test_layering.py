"""Who knows whom: units of csrc/ only those below them, integrations nobody but memsaver."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CSRC = ROOT / "csrc"

# The units of csrc/core (a unit is NAME.h and NAME.cpp), lowest layer first. A unit may include
# the layers below its own, and its siblings in the same layer as long as no cycle comes of it.
LAYERS = [
    ["status"],
    ["options", "text", "log", "system_files", "range", "kernel_image", "quiet_start"],
    ["runtime_folder"],
    ["host_budget", "numa", "workers", "profile", "backup_file"],
    ["lifecycle"],
    ["driver"],
    ["device"],
    ["handles"],
    ["fingerprint"],
    ["heap", "staging", "backup_medium"],
    ["host_medium", "file_medium"],
    ["backup"],
    ["registry", "transfer"],
    ["timeline"],
    ["reservation"],
    ["allocation"],
    ["contents"],
    ["transition"],
    ["step"],
    ["handover", "pause", "resume"],
    ["swap", "backups"],
    ["region"],
    ["stats", "location", "paused_touch"],
    ["stats_json"],
    ["stats_server"],
    ["marshal"],
    ["abi"],  # implements memsaver.h
]
RANK = {unit: rank for rank, layer in enumerate(LAYERS) for unit in layer}

PUBLIC = "memsaver.h"
# The arithmetic that the kernel, its launcher and its simulation have in common.
HASH = "kernels/fingerprint_hash.h"
HOST_HASH = "kernels/fingerprint_host.h"
# Outside the core: the headers of our own that a folder may include besides those in it.
OUTSIDE_THE_CORE = {
    "hooks": {PUBLIC},
    "python": {PUBLIC},
    "sim": {HOST_HASH},
    "kernels": {HASH},
}


def sources(folder):
    return sorted(
        path for path in (CSRC / folder).rglob("*") if path.suffix in {".h", ".cpp", ".cu"}
    )


def includes(path):
    """The quoted includes of a file, as paths from csrc/."""
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
        beside = (path.parent / name).resolve()
        from_csrc = (CSRC / name).resolve()
        in_core = (CSRC / "core" / name).resolve()
        found = next((p for p in (beside, from_csrc, in_core) if p.is_file()), None)
        assert found, f'{path.relative_to(CSRC)} includes "{name}", which is not in csrc/'
        yield found.relative_to(CSRC.resolve()).as_posix()


def unit_of(header):
    """The core unit that a header belongs to, or None."""
    folder, _, name = header.rpartition("/")
    return Path(name).stem if folder == "core" else None


def label(path):
    return path.relative_to(CSRC).as_posix()


@pytest.mark.parametrize("path", sources("core"), ids=label)
def test_core_includes_only_what_lies_below(path):
    assert path.stem in RANK, f"give {path.stem} its place in LAYERS"
    for header in includes(path):
        unit = unit_of(header)
        if unit is None:
            allowed = {
                (PUBLIC, "abi"),
                (PUBLIC, "marshal"),
                (PUBLIC, "stats"),
                (HOST_HASH, "fingerprint"),
            }
            assert (header, path.stem) in allowed, f"{path.name} may not include {header}"
        else:
            assert unit in RANK, f"give {unit} its place in LAYERS"
            assert RANK[unit] <= RANK[path.stem], f"{path.name} may not include {header}, above it"


def test_layers_name_only_units_that_exist():
    assert set(RANK) == {path.stem for path in sources("core")}


def test_core_has_no_cycle():
    known = {}
    for path in sources("core"):
        known.setdefault(path.stem, set()).update(
            unit for header in includes(path) if (unit := unit_of(header)) and unit != path.stem
        )

    def walk(unit, trail):
        assert unit not in trail, " -> ".join([*trail, unit])
        for other in sorted(known.get(unit, ())):
            walk(other, [*trail, unit])

    for unit in known:
        walk(unit, [])


@pytest.mark.parametrize(
    ("folder", "path"),
    [
        pytest.param(folder, path, id=label(path))
        for folder in OUTSIDE_THE_CORE
        for path in sources(folder)
    ],
)
def test_the_rest_knows_only_the_public_header(folder, path):
    allowed = OUTSIDE_THE_CORE[folder]
    for header in includes(path):
        assert header in allowed or header.startswith(f"{folder}/"), (
            f"{label(path)} may not include {header}"
        )


def test_public_header_needs_nothing():
    text = (CSRC / PUBLIC).read_text()
    assert set(re.findall(r"^\s*#\s*include\s*(\S+)", text, re.M)) <= {"<stddef.h>", "<stdint.h>"}


# --- Python ---------------------------------------------------------------------------------------

# Packages of ours: where they lie, and which of ours a module of theirs may import beside them.
PACKAGES = {
    "memsaver": ("memsaver", set()),
    "memsaver.cli": ("memsaver/cli", {"memsaver", "memsaver.integrations.sglang"}),
    "memsaver.distributed": ("memsaver/distributed", {"memsaver"}),
    "memsaver.integrations.sglang": (
        "integrations/sglang",
        {"memsaver", "memsaver.distributed"},
    ),
    "memsaver.integrations.rollout": (
        "integrations/rollout",
        {
            "memsaver",
            "memsaver.distributed",
            "memsaver.integrations.sglang",
            "memsaver.integrations.trainer",
        },
    ),
    "memsaver.integrations.lightrft": (
        "integrations/lightrft",
        {
            "memsaver",
            "memsaver.distributed",
            "memsaver.integrations.sglang",
            "memsaver.integrations.trainer",
        },
    ),
    "memsaver.integrations.trainer": ("integrations/trainer", {"memsaver"}),
    "torch_memory_saver": (
        "integrations/torch_memory_saver/torch_memory_saver",
        {"memsaver"},
    ),
}
# What may be missing: imported where it is needed, never when a module of ours is.
OPTIONAL = {"numpy", "prometheus_client", "pynvml", "sglang", "torch", "vllm"}
WITH_TORCH = {"memsaver/readonly.py"}  # which is imported where torch is there only


def test_no_packages_of_ours_need_each_other():
    left = {name: set(others) for name, (_, others) in PACKAGES.items()}
    while left:
        ready = [name for name, needs in left.items() if not needs & set(left)]
        assert ready, f"a cycle among {sorted(left)}"
        for name in ready:
            del left[name]


def modules():
    for package, (folder, _) in PACKAGES.items():
        for path in sorted((ROOT / folder).rglob("*.py")):
            if package == package_of(name_of(path)):
                yield pytest.param(package, path, id=path.relative_to(ROOT).as_posix())


def name_of(path):
    """The name that a module of ours is imported by."""
    if path == ROOT / "memsaver" / "__main__.py":
        return "memsaver.cli.__main__"  # `python -m memsaver` is the command line
    for package, (folder, _) in sorted(PACKAGES.items(), key=lambda row: -len(row[1][0])):
        if path.is_relative_to(ROOT / folder):
            return ".".join([package, *path.relative_to(ROOT / folder).with_suffix("").parts])
    raise AssertionError(f"{path} is in no package of PACKAGES")


def package_of(name):
    """The package of ours that a name belongs to, or None."""
    found = [known for known in PACKAGES if f"{name}.".startswith(f"{known}.")]
    return max(found, key=len, default=None)


def is_for_types(node):
    """Whether it is `if TYPE_CHECKING:`, which no program enters."""
    return isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"


def imports(path):
    """The names that a module imports, and whether it does when it is imported itself."""
    tree = ast.parse(path.read_text())
    late = {
        id(inner)
        for outer in ast.walk(tree)
        if isinstance(outer, ast.FunctionDef | ast.AsyncFunctionDef) or is_for_types(outer)
        for inner in ast.walk(outer)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{path}:{node.lineno}: a relative import"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from ((name, id(node) not in late) for name in names)


@pytest.mark.parametrize(("package", "path"), list(modules()))
def test_a_package_knows_only_what_it_is_built_on(package, path):
    for name, at_once in imports(path):
        theirs = package_of(name)
        assert theirs in {None, package, *PACKAGES[package][1]}, f"{path} imports {name}"
        optional = name.split(".")[0] in OPTIONAL
        if path.relative_to(ROOT).as_posix() not in WITH_TORCH:
            assert not (at_once and optional), f"{path} imports {name} at once"
