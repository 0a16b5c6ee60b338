"""Tests that tags of a million characters, and in any script, have the same name everywhere."""

import os
import unicodedata

import pytest
from region_memory import buffer_in, owned

import memsaver
from memsaver._runtime.native import _C

MIB = 1 << 20

NAMES = {
    "long": "w" * 1_000_000,
    "long in four bytes": "\U0001f9e0" * 1_000_000,
    "decomposed": unicodedata.normalize("NFD", "für größere"),
    "Arabic": "أوزان",
    "Thai": "น้ำหนัก",
    "Chinese": "权重",
    "cuneiform": "\U00012000\U00012001",
    "emoji": "🏋\u200d♀\ufe0f🧠",
    "right to left mark": "a\u202eb",
    "blanks": " \t\n ",
    "controls": "\x01\x1b[31m\x7f\x80",
    "quotes": "'\"\\%s%n{}",
    "a path": "../../../etc/passwd",
    "not a character": "\uffff\ufdd0\U0010ffff",
    "one byte": "a",
    "None": "None",
    "blanks around it": " leading and trailing ",
    "marks without width": "\ufeff\u200b",
    "of a shell": "weights/0 [x] {y} ` $HOME",
}


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES.keys())
def test_a_name(sim, tag, make_blocks, tmp_path, options, registered, name):
    tag.names += [name, name + "2"]
    options(disk_dir=tmp_path)
    first = make_blocks(name, [5000], backup="host")
    second = make_blocks(name + "2", [700], backup="disk")
    assert {row.tag for row in memsaver.stats().tags} >= {name, name + "2"}
    assert len(memsaver.ranges(name)) == 1
    shown = name.encode()[:127].decode(errors="ignore")
    with memsaver.paused(name, name + "2"), sim.fault("cuMemCreate", sim.OUT_OF_MEMORY):
        with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            memsaver.resume(name)
        assert caught.value.tag == shown and len(str(caught.value)) < 1100
    told = []
    registered += [memsaver.on_pause(told.append), memsaver.on_resume(told.append, tag=name)]
    report = memsaver.pause(name)
    assert report.changed == (name,) and memsaver.state(name) == "paused"
    assert memsaver.state(name + "2") == "mapped"
    with pytest.raises(memsaver.InvalidStateError) as caught, memsaver.region(name):
        pass
    assert caught.value.tag == shown and len(str(caught.value)) < 1024
    report = memsaver.swap(out=name + "2", into=name)
    assert {change.tag for change in report.changes} == {name, name + "2"}
    memsaver.resume(name + "2", wait=False).wait()
    assert told == [name, name + "2", name]
    assert first[0].is_intact() and second[0].is_intact()
    with memsaver.region(name):
        assert _C.region_tag() == name
        with pytest.raises(memsaver.InvalidStateError) as caught:
            memsaver.pause(name)
        assert caught.value.tag == shown and len(str(caught.value)) < 1024
        with pytest.raises(memsaver.OutOfDeviceMemoryError) as caught:
            make_blocks(name, [1 << 50])
        assert caught.value.tag == shown
    for call in (memsaver.state, memsaver.resume):
        with pytest.raises(memsaver.UnknownTagError) as caught:
            call(name + "3")
        assert caught.value.tag == (name + "3").encode()[:127].decode(errors="ignore")
        assert str(caught.value).encode() and len(str(caught.value)) < 3000


def test_similar_names_are_different_tags(sim, tag, make_blocks):
    composed, decomposed = (unicodedata.normalize(form, "é") for form in ("NFC", "NFD"))
    names = [composed, decomposed, "é ", "É", "e", "k" * 1_000_000, "k" * 999_999]
    tag.names += names
    blocks = {name: make_blocks(name, [MIB])[0] for name in names}
    for name in names:
        memsaver.pause(name)
        assert [other for other in names if memsaver.state(other) == "paused"] == [name]
        memsaver.resume(name)
    assert all(block.is_zero() for block in blocks.values())


@pytest.mark.each_python
def test_a_subclass_of_str_is_a_name(sim, tag):
    class Name(str):
        pass

    name = tag()
    block = buffer_in(Name(name))
    assert owned(name) == [block.address]
    assert memsaver.state(Name(name)) == "mapped"


@pytest.mark.each_python
def test_what_is_no_name(sim):
    before = memsaver.stats()
    for name in ("", "\0", "a\0b", "\ud800", b"bytes", None, 1, ["list"], object):
        with pytest.raises(memsaver.ConfigError, match="tag"):
            with memsaver.region(name):
                pytest.fail(f"entered {name!r}")
        for call in (memsaver.pause, memsaver.resume, memsaver.state, memsaver.ranges):
            with pytest.raises(memsaver.ConfigError, match="tag"):
                call(name)
        assert memsaver.stats() == before and _C.region_depth() == 0


NO_TEXT = [b"\xff", b"a\xc3", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x9f\xbf"]
INVALID = [*((name, "is not valid UTF-8") for name in NO_TEXT), (b"a\x1fb", "contains U+001F")]


@pytest.mark.each_python
@pytest.mark.parametrize(("name", "why"), INVALID)
def test_an_invalid_process_tag_has_no_effect(run_python, name, why):
    # The variable has no effect, and memsaver warns about it.
    done = run_python(
        f"""
        import warnings
        import memsaver
        from memsaver._runtime.native import _C, emit_warnings

        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert _C.region_tag() is None
            emit_warnings()
        (text,) = [str(warning.message) for warning in caught]
        assert "MEMSAVER_TAG {why}" in text, text
        assert memsaver.stats().tags == ()
        """,
        MEMSAVER_TAG=os.fsdecode(name),
    )
    assert (done.stdout, done.stderr) == ("", "")


def test_long_names_that_differ_at_the_end_differ_in_messages(sim, tag, make_blocks):
    names = [f"{'layer.' * 30}{end} of these tensors" for end in ("first", "second")]
    tag.names += names
    for name in names:
        make_blocks(name, [MIB])
        memsaver.pause(name)
        with pytest.raises(memsaver.InvalidStateError) as caught, memsaver.region(name):
            pass
        assert f"{name[-20:]}'" in str(caught.value)
