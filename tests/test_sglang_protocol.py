"""The messages between schedulers and callers, with any contents."""

from __future__ import annotations

import functools
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest

from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.protocol import Answer, Failure, answers_of, error_of
from memsaver.integrations.sglang.status import status_of
from memsaver.integrations.sglang.weight_checks import Order, RankCheck, checks_of


def test_any_exception_can_be_sent_as_a_failure():
    class Odd(Exception):
        tag, needed, free = object(), "many", 1 << 70

    failure = Failure.of(Odd("\ud800"))
    assert (failure.kind, failure.tag, failure.needed, failure.free) == ("Odd", "", 0, 0)
    answer = Answer("one", "release", (), (), failure=failure)
    (told,) = answers_of([SimpleNamespace(rid=answer.text()), SimpleNamespace(rid="another")])
    assert isinstance(error_of([told]), EngineError) and str(error_of([told])) == "\\ud800"


def _check(**fields):
    check = asdict(RankCheck(0, "host", 1))
    return f"memsaver:{json.dumps([{**check, **fields}])}"


def _order(**fields):
    order = {"names": ["a", "b"], "looked_at": [1], "sent": [["digest"]]}
    return f"memsaver:{json.dumps({**order, **fields})}"


@pytest.mark.parametrize(
    "read",
    [
        lambda text: answers_of([SimpleNamespace(rid=text)]),
        lambda text: checks_of(True, text),
        Order.from_text,
    ],
    ids=["answer", "checks", "order"],
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
        (checks_of, _check(rank="first"), "'rank' must be a whole number, not 'first'"),
        (checks_of, _check(host=None), "no 'host'"),
        (checks_of, _check(pid=1 << 70), "'pid' must be a whole number"),
        (checks_of, _check(held=0.5), "'held' must be a whole number"),
        (checks_of, _check(damaged="abc"), "'damaged' must be a list"),
        (checks_of, _check(unused=[5]), "'unused' must be a list of strings"),
        (checks_of, _check(failure=[]), "a failure must be a JSON object, not list"),
        (checks_of, _check(failure={"kind": "E"}), "no 'message'"),
        (Order.from_text, _order(names="ab"), "'names' must be a list"),
        (Order.from_text, _order(names=["a", 5]), "'names' must be a list of strings"),
        (Order.from_text, _order(looked_at=[2]), "places in 'names'"),
        (Order.from_text, _order(looked_at=[-1]), "places in 'names'"),
        (Order.from_text, _order(looked_at=["b"]), "places in 'names'"),
        (Order.from_text, _order(sent=[[]]), "a digest for each place"),
        (Order.from_text, _order(sent=["d"]), "a digest for each place"),
        (Order.from_text, _order(sent=[[5]]), "a digest for each place"),
        (lambda text: Order.from_text(text).check_ranks(3), _order(sent=[["x"]] * 2), "2 ranks"),
    ],
    ids=lambda value: value[9:60] if isinstance(value, str) and value[:9] == "memsaver:" else "",
)
def test_a_field_that_is_wrong_is_named(read, text, what):
    read = functools.partial(checks_of, True) if read is checks_of else read
    with pytest.raises(EngineError, match=what):
        read(text)


def test_an_unknown_tag_has_no_status():
    with pytest.raises(EngineError, match="of_another"):
        status_of(frozenset({"weights", "of_another"}))
