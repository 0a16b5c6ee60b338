"""Tests messages with any contents between schedulers and callers."""

from __future__ import annotations

import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.engine.messages import Answer, Failure, error_of
from memsaver.integrations.engine.status import status_of
from memsaver.integrations.engine.weights.checks import RankCheck
from memsaver.integrations.sglang.protocol import answers_of, checks_in, text_of, verification_of


def test_any_exception_can_be_sent_as_a_failure():
    class Odd(Exception):
        tag, needed, free = object(), "many", 1 << 70

    failure = Failure.of(Odd("\ud800"))
    assert (failure.kind, failure.tag, failure.needed, failure.free) == ("Odd", "", 0, 0)
    answer = Answer("one", "release", (), (), failure=failure)
    (told,) = answers_of([SimpleNamespace(rid=text_of(answer)), SimpleNamespace(rid="another")])
    assert isinstance(error_of([told]), EngineError) and str(error_of([told])) == "\\ud800"


def _check(**fields):
    check = asdict(RankCheck(0, "host", 1))
    return f"memsaver:{json.dumps([{**check, **fields}])}"


def _request(**fields):
    request = {"names": ["a", "b"], "looked_at": [1], "sent": [["digest"]]}
    return f"memsaver:{json.dumps({**request, **fields})}"


@pytest.mark.parametrize(
    "read",
    [
        lambda text: answers_of([SimpleNamespace(rid=text)]),
        checks_in,
        verification_of,
    ],
    ids=["answer", "checks", "request"],
)
@pytest.mark.parametrize(
    "text",
    [
        "memsaver:",
        "memsaver:[",
        "memsaver:1",
        "memsaver:{",
        "memsaver:[5]",
        "memsaver:[[]]",
        "memsaver:" + "[" * 100_000,
        "memsaver:" + "9" * 10_000,
    ],
    ids=lambda text: text[:20],
)
def test_an_invalid_answer_is_an_engine_error(read, text):
    with pytest.raises(EngineError):
        read(text)


@pytest.mark.parametrize(
    "read, text, what",
    [
        (checks_in, _check(rank="first"), "'rank' must be an integer, not 'first'"),
        (checks_in, _check(host=None), "no 'host'"),
        (checks_in, _check(pid=1 << 70), "'pid' must be an integer"),
        (checks_in, _check(held=0.5), "'held' must be an integer"),
        (checks_in, _check(damaged="abc"), "'damaged' must be a list"),
        (checks_in, _check(unused=[5]), "'unused' must be a list of strings"),
        (checks_in, _check(failure=[]), "a failure must be a JSON object, not list"),
        (checks_in, _check(failure={"kind": "E"}), "no 'message'"),
        (verification_of, _request(names="ab"), "'names' must be a list"),
        (verification_of, _request(names=["a", 5]), "'names' must be a list of strings"),
        (verification_of, _request(looked_at=[2]), "places in 'names'"),
        (verification_of, _request(looked_at=[-1]), "places in 'names'"),
        (verification_of, _request(looked_at=["b"]), "places in 'names'"),
        (verification_of, _request(sent=[[]]), "one digest per place"),
        (verification_of, _request(sent=["d"]), "one digest per place"),
        (verification_of, _request(sent=[[5]]), "one digest per place"),
        (lambda text: verification_of(text).check_ranks(3), _request(sent=[["x"]] * 2), "2 ranks"),
    ],
    ids=lambda value: value[9:60] if isinstance(value, str) and value[:9] == "memsaver:" else "",
)
def test_a_field_that_is_wrong_is_named(read, text, what):
    with pytest.raises(EngineError, match=what):
        read(text)


def test_an_unknown_tag_has_no_status():
    with pytest.raises(EngineError, match="of_another"):
        status_of(frozenset({"weights", "of_another"}))
