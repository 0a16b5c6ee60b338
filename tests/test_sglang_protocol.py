"""The messages between schedulers and callers, with any contents."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from memsaver.integrations.sglang.errors import EngineError
from memsaver.integrations.sglang.protocol import Answer, Failure, answers_of, error_of
from memsaver.integrations.sglang.status import status_of


def test_any_exception_can_be_sent_as_a_failure():
    class Odd(Exception):
        tag, needed, free = object(), "many", 1 << 70

    failure = Failure.of(Odd("\ud800"))
    assert (failure.kind, failure.tag, failure.needed, failure.free) == ("Odd", "", 0, 0)
    answer = Answer("one", "release", (), (), failure=failure)
    (told,) = answers_of([SimpleNamespace(rid=answer.text()), SimpleNamespace(rid="another")])
    assert isinstance(error_of([told]), EngineError) and str(error_of([told])) == "\\ud800"


@pytest.mark.parametrize("text", ["memsaver:", "memsaver:[", "memsaver:1", "memsaver:{}"])
def test_an_invalid_answer_is_an_engine_error(text):
    with pytest.raises(EngineError):
        answers_of([SimpleNamespace(rid=text)])


def test_an_unknown_tag_has_no_status():
    with pytest.raises(EngineError, match="of_another"):
        status_of(frozenset({"weights", "of_another"}))
