"""Tests the exports, dependencies and hardening of the shipped binaries from their ELF headers."""

import re
import subprocess
from importlib.util import find_spec
from pathlib import Path

import pytest
from built_sources import CC
from c_library import needs_a_c_library_before_2_38
from elftools.elf.dynamic import DynamicSection
from elftools.elf.elffile import ELFFile
from repository import ROOT

HEADERS = sorted((ROOT / "csrc").glob("*.h"))

LIBC = {"libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "librt.so.1"}
LOADER = re.compile(r"ld-linux.*\.so\.\d")
CXX_RUNTIME = {"libstdc++.so.6", "libgcc_s.so.1"}
CORE = {"libmemsaver.so"}

# name: (exported names, libraries it may need besides libc, libraries it must need)
ARTEFACTS = {
    "libmemsaver.so": (r"ms_\w+", set(), set()),
    "libmemsaver_preload.so": (r"cuda\w+", set(), CORE),
    "libmemsaver_sim.so": (r"(cu|sim_)\w+", set(), set()),
    "_C": (r"PyInit__C", CXX_RUNTIME, CORE),
}
LINKED_TO_CORE = [name for name, (_, _, must) in ARTEFACTS.items() if must]


def package_dir():
    spec = find_spec("memsaver")
    assert spec and spec.origin, "memsaver is not installed"
    return Path(spec.origin).parent


def path_of(name):
    if name != "_C":
        return package_dir() / name
    spec = find_spec("memsaver._C")
    assert spec and spec.origin, "memsaver._C is not installed"
    return Path(spec.origin)


@pytest.fixture(params=ARTEFACTS)
def name(request):
    return request.param


@pytest.fixture
def elf(name):
    with path_of(name).open("rb") as file:
        yield ELFFile(file)


def dynamic(elf):
    """Return the dynamic section as {tag: [value]}, with names resolved."""
    tags = {}
    section = elf.get_section_by_name(".dynamic")
    assert isinstance(section, DynamicSection)
    for tag in section.iter_tags():
        kind = tag.entry.d_tag
        text = {"DT_NEEDED": "needed", "DT_SONAME": "soname", "DT_RUNPATH": "runpath"}.get(kind)
        tags.setdefault(kind, []).append(getattr(tag, text) if text else tag.entry.d_val)
    return tags


def exports(elf):
    """Return the names of the symbols that the file exports."""
    return {
        symbol.name
        for symbol in elf.get_section_by_name(".dynsym").iter_symbols()
        if symbol.entry.st_shndx != "SHN_UNDEF" and symbol.entry.st_info.bind != "STB_LOCAL"
    }


def test_exports_only_its_interface(elf, name):
    exported = exports(elf)
    assert exported
    strangers = {symbol for symbol in exported if not re.fullmatch(ARTEFACTS[name][0], symbol)}
    assert not strangers


def test_needs_libc_and_its_own_siblings(elf, name):
    _, may, must = ARTEFACTS[name]
    needed = set(dynamic(elf).get("DT_NEEDED", []))
    assert must <= needed
    assert not {lib for lib in needed - may - must - LIBC if not LOADER.fullmatch(lib)}


def test_needs_no_newer_c_library_than_ubuntu_22_04_has(elf):
    needs_a_c_library_before_2_38()
    section = elf.get_section_by_name(".gnu.version_r")
    needed = {version.name for _, versions in section.iter_versions() for version in versions}
    glibc = [tuple(map(int, name[6:].split("."))) for name in needed if name.startswith("GLIBC_2")]
    assert glibc and max(glibc) <= (2, 35)


def test_soname_is_the_file_name(elf, name):
    assert dynamic(elf)["DT_SONAME"] == [path_of(name).name]


@pytest.mark.parametrize("name", LINKED_TO_CORE)
def test_finds_the_core_beside_itself(elf):
    assert dynamic(elf)["DT_RUNPATH"] == ["$ORIGIN"]


def test_has_no_other_search_path(elf, name):
    tags = dynamic(elf)
    assert "DT_RPATH" not in tags
    assert ("DT_RUNPATH" in tags) == (name in LINKED_TO_CORE)


def test_stack_is_not_executable(elf):
    flags = [s.header.p_flags for s in elf.iter_segments() if s.header.p_type == "PT_GNU_STACK"]
    assert flags and not any(flag & 1 for flag in flags)


def test_no_memory_is_both_writable_and_executable(elf):
    flags = [s.header.p_flags for s in elf.iter_segments() if s.header.p_type == "PT_LOAD"]
    assert flags and not any(flag & 1 and flag & 2 for flag in flags)
    df_textrel = 0x4
    tags = dynamic(elf)
    assert "DT_TEXTREL" not in tags and not tags.get("DT_FLAGS", [0])[0] & df_textrel


def test_stacks_and_buffers_are_checked(elf, name):
    # Hardened code calls check functions. The preloaded library has no buffer that a function of
    # libc fills.
    names = {symbol.name for symbol in elf.get_section_by_name(".dynsym").iter_symbols()}
    assert "__stack_chk_fail" in names
    checked = {symbol for symbol in names if re.fullmatch(r"__\w+_chk", symbol)}
    assert checked or name == "libmemsaver_preload.so"


def test_is_bound_at_load_and_read_only_afterwards(elf):
    tags = dynamic(elf)
    assert any(s.header.p_type == "PT_GNU_RELRO" for s in elf.iter_segments())
    df_bind_now, df_1_now = 0x8, 0x1
    assert (
        "DT_BIND_NOW" in tags
        or tags.get("DT_FLAGS", [0])[0] & df_bind_now
        or tags.get("DT_FLAGS_1", [0])[0] & df_1_now
    )


@pytest.mark.parametrize("header", HEADERS, ids=lambda path: path.name)
def test_ships_the_public_headers_which_are_c(header):
    shipped = package_dir() / "include" / header.name
    assert shipped.read_bytes() == header.read_bytes()
    flags = ["-std=c99", "-pedantic", "-Wall", "-Wextra", "-Werror", "-fsyntax-only"]
    subprocess.run([*CC, *flags, str(shipped)], check=True)


def test_the_core_exports_the_functions_of_the_public_headers():
    with path_of("libmemsaver.so").open("rb") as file:
        exported = exports(ELFFile(file))
    declared = "".join(header.read_text() for header in HEADERS)
    assert exported == set(re.findall(r"^MS_API [^(]*\b(ms_\w+)\(", declared, re.M))
