"""Tests `make mutation`, which measures how many code mutations the tests detect."""

import pytest
from mutation.judging import Judge, Limits, measure
from mutation.mutants import Mutant, draw, function_at, lines_of_code
from mutation.places import Place

CODE = '''"""A module."""
import os

def twice(number):
    """Return 2 times a number."""
    while number > 100:
        number -= 1
    return number * 2  # doubled

def unseen():
    return 1 + 1
'''
TEST = """
from memsaver.toy import twice

def test_twice():
    assert twice(101) == 200
"""
CONFIGURED = "[tool.pytest.ini_options]\ntimeout = 120\nmarkers = ['soak: x', 'long: x']\n"
# A changed line of the module, and the result.
JUDGED = {
    "detected": (8, "    return number + 2\n", "failed"),
    "not_detected": (11, "    return 1 - 1\n", "survived"),
    "endless": (7, "        number -= 0\n", "hung"),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    import subprocess

    source = tmp_path_factory.mktemp("toy")
    files = {
        "memsaver/__init__.py": "",
        "memsaver/toy.py": CODE,
        "tests/toys/test_toy.py": TEST,
        "pyproject.toml": CONFIGURED,
    }
    for name, text in files.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(text)
    archive = source.parent / "toy.tar"
    subprocess.run(["tar", "-cf", archive, "-C", source, "."], check=True)
    return Place.create(source.parent / "p" / "0", str(archive))


@pytest.fixture(scope="module")
def measured(place):
    return measure(place, "tests/toys/test_toy.py", Limits())


def test_a_test_file_is_measured_with_its_calls(measured):
    assert measured.usable and not measured.failed
    assert "twice" in measured.calls["memsaver/toy.py"]
    assert "unseen" not in measured.calls["memsaver/toy.py"]


@pytest.mark.parametrize("line, after, result", JUDGED.values(), ids=JUDGED)
def test_a_mutant_is_judged_by_the_tests_that_run_its_function(
    place, measured, line, after, result
):
    before = CODE.splitlines(keepends=True)[line - 1]
    limits = Limits(one_test=1 if result == "hung" else 60)
    judged = Judge([measured], limits).judge(place, Mutant("memsaver/toy.py", line, before, after))
    assert judged["result"] == result
    assert (place.tree / "memsaver" / "toy.py").read_text() == CODE


def test_mutants_are_of_code_alone():
    assert lines_of_code("toy.py", CODE) == [4, 6, 7, 8, 10, 11]
    native = '#include "a.h"\n// f(1)\n/* g(2)\n g(3) */\nint f() {\n  return 1;\n}\n'
    assert lines_of_code("toy.cpp", native) == [5, 6]
    assert [function_at(CODE, line) for line in (2, 4, 7, 11)] == [
        "<module>",
        "<module>",
        "twice",
        "unseen",
    ]


def test_the_same_seed_draws_the_same_mutants(place):
    pytest.importorskip("universalmutator")
    first, again, other = (list(draw(place.tree, "python", seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert {mutant.line for mutant in first} <= {6, 7, 8, 11}
    assert len({mutant.line for mutant in first}) == len(first) >= 3
