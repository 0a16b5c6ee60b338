"""Tests that units of csrc/ use only units below themselves, and that packages use only allowed
packages.
"""

import ast
import functools
import graphlib
import re

import pytest
from repository import ROOT

CSRC = ROOT / "csrc"

# The folders of csrc/core, lowest first: the rows of a table in the design. A unit (NAME.h and
# NAME.cpp) may include the folders below its own, and others in its folder without a cycle.
FOLDERS = re.findall(r"^\| `core/(\w+)/` \|", (CSRC / "DESIGN.md").read_text(), re.M)

PUBLIC = "memsaver.h"
TRANSITIONS = "memsaver_transitions.h"
INSPECTION = "memsaver_inspection.h"
SHARING = "memsaver_sharing.h"
# The arithmetic shared by the kernel, its launcher and its simulation.
HASH = "kernels/fingerprint_hash.h"
HOST_HASH = "kernels/fingerprint_host.h"
# The headers from outside the core that its units may include.
INTO_THE_CORE = {
    "backup/fingerprint": {HOST_HASH},
    "observe/stats": {INSPECTION},
    "abi/marshal": {PUBLIC, TRANSITIONS},
    "abi/abi": {PUBLIC},
    "abi/abi_inspection": {INSPECTION},
    "abi/abi_sharing": {SHARING},
    "abi/abi_transitions": {TRANSITIONS},
}
# Outside the core: memsaver's headers that a folder may include in addition to its own.
OUTSIDE_THE_CORE = {
    "hooks": {PUBLIC},
    "python": {PUBLIC, TRANSITIONS, INSPECTION, SHARING},
    "sim": {HOST_HASH},
    "kernels": {HASH},
}


def sources(folder):
    return sorted(
        path for path in (CSRC / folder).rglob("*") if path.suffix in {".h", ".cpp", ".cu"}
    )


def includes(path):
    """Yield the quoted includes of a file, as paths relative to csrc/."""
    for name in re.findall(r'^\s*#\s*include\s*"([^"]+)"', path.read_text(), re.M):
        beside = (path.parent / name).resolve()
        from_csrc = (CSRC / name).resolve()
        found = next((p for p in (beside, from_csrc) if p.is_file()), None)
        assert found, f'{path.relative_to(CSRC)} includes "{name}", which is not in csrc/'
        yield found.relative_to(CSRC.resolve()).as_posix()


def unit_of(path):
    """Return the core unit of a path relative to csrc/, as FOLDER/NAME, or None."""
    top, _, rest = path.partition("/")
    return rest.rpartition(".")[0] if top == "core" else None


def label(path):
    return path.relative_to(CSRC).as_posix()


def test_the_design_lists_the_folders_of_the_core():
    assert len(FOLDERS) == len(set(FOLDERS))
    assert set(FOLDERS) == {path.name for path in (CSRC / "core").iterdir()}
    assert {path.parent.parent for path in sources("core")} == {CSRC / "core"}


@pytest.mark.parametrize("folder", FOLDERS)
def test_core_units_include_only_lower_units(folder):
    below = FOLDERS[: FOLDERS.index(folder) + 1]
    refused = []
    for path in (path for path in sources("core") if path.parent.name == folder):
        for header in includes(path):
            unit = unit_of(header)
            if unit is None:
                allowed = header in INTO_THE_CORE.get(unit_of(label(path)), ())
            else:
                allowed = unit.partition("/")[0] in below
            if not allowed:
                refused.append(f"{label(path)} may not include {header}")
    assert refused == []


def test_core_has_no_cycle():
    known = {}
    for path in sources("core"):
        own = unit_of(label(path))
        known.setdefault(own, set()).update(
            unit for header in includes(path) if (unit := unit_of(header)) and unit != own
        )
    assert any(known.values()), "no includes were found"
    graphlib.TopologicalSorter(known).prepare()  # raises for a cycle


@pytest.mark.parametrize("folder", OUTSIDE_THE_CORE)
def test_the_rest_knows_only_public_headers(folder):
    allowed = OUTSIDE_THE_CORE[folder]
    assert [
        f"{label(path)} may not include {header}"
        for path in sources(folder)
        for header in includes(path)
        if header not in allowed and not header.startswith(f"{folder}/")
    ] == []


@pytest.mark.parametrize(
    ("header", "needed"),
    [
        (PUBLIC, ["<stddef.h>", "<stdint.h>"]),
        (TRANSITIONS, ['"memsaver.h"']),
        (INSPECTION, ['"memsaver.h"']),
        (SHARING, ['"memsaver.h"']),
    ],
)
def test_a_public_header_needs_no_other_files(header, needed):
    assert re.findall(r"^\s*#\s*include\s*(\S+)", (CSRC / header).read_text(), re.M) == needed


def test_a_file_has_fewer_than_400_lines():
    files = [path for path in CSRC.rglob("*") if path.suffix in {".h", ".c", ".cpp", ".cu"}]
    files += [
        path for folder in ("memsaver", "integrations") for path in (ROOT / folder).rglob("*")
    ]
    long = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if path.suffix in {".h", ".c", ".cpp", ".cu", ".py"}
        and len(path.read_text().splitlines()) >= 400
    }
    assert long == set()


# --- Python ---------------------------------------------------------------------------------------


def rows_of(header):
    """Return the cells of each row in a table of csrc/DESIGN.md."""
    text = (CSRC / "DESIGN.md").read_text()
    table = text[text.index(f"| {header} |") :].split("\n\n")[0]
    return [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines()[2:]]


def named(text):
    return set(re.findall(r"`((?:memsaver|torch_memory_saver)[\w.]*)`", text))


# The table of packages: those that a package imports with its modules, and those that it imports
# later, in a function.
PACKAGES, LATER = {}, {}
for _name, _, _imported in rows_of("package | one concept | imports"):
    _at_once, _, _later = _imported.partition(";")
    PACKAGES[_name.strip("`")], LATER[_name.strip("`")] = named(_at_once), named(_later)
# Optional packages: imported when they are needed, never when a module of memsaver is imported.
OPTIONAL = {
    "fastapi",
    "httpcore",
    "httpx",
    "numpy",
    "prometheus_client",
    "pynvml",
    "sglang",
    "torch",
    "vllm",
}
TOGETHER = {  # imported only if the optional package is loaded or needed
    "memsaver/_memory/readonly.py",
    "integrations/engine/asleep_error.py",
    "integrations/engine/http/sockets.py",
}


def folder_of(package):
    if package == "torch_memory_saver":
        return ROOT / "integrations" / package / package
    return ROOT / package.replace("memsaver.integrations", "integrations").replace(".", "/")


def test_packages_import_packages_above_them_in_the_table():
    known = set()
    for package, others in PACKAGES.items():
        assert others | LATER[package] <= known, package
        known.add(package)


def modules():
    for package in PACKAGES:
        for path in sorted(folder_of(package).rglob("*.py")):
            if package == package_of(name_of(path)):
                yield package, path


def name_of(path):
    """Return the name under which a module of memsaver is imported."""
    if path == ROOT / "memsaver" / "__main__.py":
        return "memsaver.cli.__main__"  # `python -m memsaver` is the command line
    homes = (package for package in PACKAGES if path.is_relative_to(folder_of(package)))
    package = max(homes, key=lambda package: len(folder_of(package).parts))
    return ".".join([package, *path.relative_to(folder_of(package)).with_suffix("").parts])


def package_of(name):
    """Return the package of PACKAGES that a name belongs to, or None."""
    found = [known for known in PACKAGES if f"{name}.".startswith(f"{known}.")]
    return max(found, key=len, default=None)


def is_for_types(node):
    """Return whether the node is `if TYPE_CHECKING:`, whose body never runs."""
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def module_of(node, path):
    """Return the absolute name of the module in a `from ... import` statement."""
    if not node.level:
        return node.module
    # In integrations/, mypy and Python use different module names, except for relative imports.
    assert path.is_relative_to(ROOT / "integrations"), f"{path}:{node.lineno}: a relative import"
    parts = name_of(path).split(".")
    return ".".join([*parts[: len(parts) - node.level], *filter(None, [node.module])])


@functools.cache
def imports(path, for_types=True):
    """Return the names that a module imports, and whether importing the module imports them.

    `for_types` includes imports that only a type checker executes.
    """
    found = []

    def visit(node, at_once):
        if isinstance(node, ast.Import):
            found.extend((alias.name, at_once) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            found.extend((f"{module_of(node, path)}.{alias.name}", at_once) for alias in node.names)
        elif is_for_types(node):
            for statement in node.body if for_types else ():
                visit(statement, False)
            for statement in node.orelse:
                visit(statement, at_once)
        elif not isinstance(node, ast.expr):  # which contains no statement
            now = at_once and not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            for child in ast.iter_child_nodes(node):
                visit(child, now)

    visit(ast.parse(path.read_text()), True)
    return tuple(found)


def rows_of_the_package():
    """Return the row number of each module in csrc/DESIGN.md's table of memsaver's modules."""
    cells = [row[0] for row in rows_of("modules | one concept")]
    return {name: row for row, cell in enumerate(cells) for name in re.findall(r"`(\w+)`", cell)}


def test_modules_import_only_modules_above_them_in_the_table():
    rows = rows_of_the_package()
    checked = set()
    for package, path in modules():
        own = name_of(path).split(".")[1]
        if package != "memsaver" or own == "__init__":
            continue
        assert own in rows, f"give {own} its row in csrc/DESIGN.md"
        checked.add(own)
        for name, _ in imports(path, for_types=False):
            other = name.split(".")[1] if package_of(name) == "memsaver" else None
            assert rows.get(other, 0) <= rows[own], f"{path} imports {name}"
    assert checked == set(rows)


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_the_packages_of_its_row(package):
    found, refused = {True: set(), False: set()}, []
    for path in (path for owner, path in modules() if owner == package):
        label = path.relative_to(ROOT).as_posix()
        for name, at_once in imports(path):
            theirs = package_of(name)
            if theirs in PACKAGES[package]:
                found[True].add(theirs)
            elif theirs in LATER[package] and not at_once:
                found[False].add(theirs)
            elif theirs not in {None, package}:
                refused.append(f"{label} imports {name}")
            if at_once and name.split(".")[0] in OPTIONAL and label not in TOGETHER:
                refused.append(f"{label} imports {name} at once")
    assert refused == []
    assert found == {True: PACKAGES[package], False: LATER[package]}, "the row lists others"


def test_python_modules_have_no_cycle():
    """The test includes imports in functions, but not imports that only a type checker executes."""
    names = {name_of(path).removesuffix(".__init__"): path for _, path in modules()}

    def module_named(name):
        while name not in names and name:
            name = name.rpartition(".")[0]
        return name

    imported = {
        own: {
            other
            for name, _ in imports(path, for_types=False)
            if (other := module_named(name)) and not f"{own}.".startswith(f"{other}.")
        }
        for own, path in names.items()
    }
    assert sum(map(len, imported.values())) > len(imported)
    graphlib.TopologicalSorter(imported).prepare()  # raises for a cycle
