"""Tests swaps of tags: reports, backups, callbacks, errors and the C transition functions."""

import ctypes

import pytest
from looks import intact

import memsaver
from memsaver._runtime.native import LIBRARY_DIR
from memsaver.errors import ConfigError, UnknownTagError

MIB = 1 << 20
INVALID_ARGUMENT = 1
EVERY_TAG = (1 << 64) - 1  # MS_ALL_TAGS


def test_a_swap_is_a_pause_and_a_resume(sim, tag, make_blocks, make_paused, registered):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [4 * MIB], backup="host"), make_paused(second, [4 * MIB])
    events = []
    registered += [
        memsaver.on_pause(lambda t: events.append(("pause", t, str(memsaver.state(t))))),
        memsaver.on_resume(lambda t: events.append(("resume", t, str(memsaver.state(t))))),
    ]
    out, into, resident = first, second, sim.tag_bytes()
    for wait in (True, False, True):
        events.clear()
        for b in blocks[0 if out == first else 1]:
            b.fill(b.seed + 1000)  # unchanged memory is not copied again
        report = memsaver.swap(out=out, into=[into], wait=wait)
        report = report if wait else report.wait()
        assert memsaver.state(out) == "paused" and memsaver.state(into) == "mapped"
        assert events == [("pause", out, "mapped"), ("resume", into, "mapped")]
        assert report.changed == (out, into)
        assert report.copied_bytes == 8 * MIB and report.bytes == 8 * MIB
        assert [c.device_bytes for c in report.changes] == [4 * MIB] * 2
        assert sim.tag_bytes() == resident
        assert intact(blocks[0 if into == first else 1])
        out, into = into, out
    memsaver.resume(first, second)
    assert intact(blocks[0]) and intact(blocks[1])


def test_a_swap_overrides_the_backup_and_skips_tags_in_the_requested_state(
    sim, tag, make_blocks, make_paused
):
    first, second, third, fourth = (tag(str(i)) for i in range(4))
    gone = make_blocks(first, [MIB], backup="host")
    kept = make_paused(second) + make_blocks(third, [MIB], backup="host") + make_paused(fourth)
    report = memsaver.swap(out=[first, second], into=(third, fourth), backup="none")
    assert report.changed == (first, fourth)
    assert {c.tag for c in report.changes} == {first, second, third, fourth}
    states = [str(memsaver.state(name)) for name in (first, second, third, fourth)]
    assert states == ["paused", "paused", "mapped", "mapped"]
    memsaver.resume(first, second)
    assert gone[0].is_zero() and intact(kept)


def test_a_swap_that_fails_changes_nothing(sim, tag, make_blocks, make_paused, registered):
    first, second = tag("first"), tag("second")
    out, into = make_blocks(first, [4 * MIB], backup="host"), make_paused(second, [16 * MIB])
    events = []
    registered += [
        memsaver.on_pause(lambda t: events.append(("pause", t))),
        memsaver.on_resume(lambda t: events.append(("resume", t))),
    ]
    sim.occupy(80 << 30)
    for wait in (True, False):
        with pytest.raises(memsaver.OutOfDeviceMemoryError):
            result = memsaver.swap(out=first, into=second, wait=wait)
            result.wait()
        assert memsaver.state(first) == "mapped" and memsaver.state(second) == "paused"
        assert intact(out)
    sim.occupy(0)
    assert events == [("pause", first), ("resume", first)] * 2
    memsaver.resume(second)
    assert intact(into)


def test_invalid_swaps_are_rejected(sim, tag, make_blocks, registered):
    first, second = tag("first"), tag("second")
    make_blocks(first, [MIB]), make_blocks(second, [MIB])
    told = []
    registered.append(memsaver.on_pause(told.append))
    for out, into, error in (
        ([], second, ConfigError),
        (first, (), ConfigError),
        (first, [second, first], ConfigError),
        (first, second + "x", UnknownTagError),
        (first + "x", second, UnknownTagError),
        (first, 5, TypeError),
        (first, "", ConfigError),
    ):
        with pytest.raises(error):
            memsaver.swap(out=out, into=into)
    for wrong in ((), (second,)):
        with pytest.raises(ConfigError, match=r"out='weights', into='kv_cache'"):
            memsaver.swap(first, *wrong)
    with pytest.raises(ConfigError, match="`into`"):
        memsaver.swap(out=first)
    with pytest.raises(ConfigError, match="no backup"):
        memsaver.swap(out=first, into=second, backup="moon")
    assert told == [] and memsaver.state(first) == "mapped"


@pytest.fixture
def transit():
    """Return a function `transit(out, into)` that runs a transition with the C functions.

    The function returns their status code.
    """
    library = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver.so"))
    selection = [ctypes.POINTER(ctypes.c_char_p), ctypes.c_size_t]
    pointer = ctypes.c_void_p
    library.ms_transition_begin.argtypes = [
        *selection, *selection, ctypes.c_int, pointer, ctypes.c_size_t, pointer, pointer, pointer
    ]  # fmt: skip
    library.ms_transition_run.argtypes = [pointer] * 4
    library.ms_transition_free.argtypes = [pointer]

    def tags_of(names):
        if names == EVERY_TAG:
            return None, EVERY_TAG
        return (ctypes.c_char_p * len(names))(*(name.encode() for name in names)), len(names)

    def act(out, into):
        begun = pointer()
        status = library.ms_transition_begin(
            *tags_of(out), *tags_of(into), -1, None, 0, None, ctypes.byref(begun), None
        )
        if status == 0:
            status = library.ms_transition_run(begun, None, None, None)
            library.ms_transition_free(begun)
        return status

    return act


def test_one_c_function_pauses_resumes_and_swaps(sim, tag, make_blocks, transit):
    first, second = tag("first"), tag("second")
    blocks = make_blocks(first, [MIB], backup="host") + make_blocks(second, [MIB], backup="host")

    def states():
        return [str(memsaver.state(name)) for name in (first, second)]

    assert transit([first], []) == 0 and states() == ["paused", "mapped"]
    assert transit([second], [first]) == 0 and states() == ["mapped", "paused"]
    assert transit([], [second]) == 0 and states() == ["mapped", "mapped"]
    assert transit(EVERY_TAG, []) == 0 and states() == ["paused", "paused"]
    assert transit([], EVERY_TAG) == 0 and states() == ["mapped", "mapped"]
    assert intact(blocks)


def test_the_c_function_refuses_no_tag_and_a_tag_in_both(sim, tag, make_blocks, transit):
    name = tag()
    [block] = make_blocks(name, [MIB], backup="host")
    for out, into in (([], []), ([name], [name]), ([name], EVERY_TAG), (EVERY_TAG, EVERY_TAG)):
        assert transit(out, into) == INVALID_ARGUMENT
    assert memsaver.state(name) == "mapped" and block.is_intact()


MISSING_LISTS = {
    "out": "ms_transition_begin(None, 2, None, 0, -1, None, 0, None, result, None)",
    "into": "ms_transition_begin(None, 0, None, 2, -1, None, 0, None, result, None)",
    "unowned ranges": "ms_transition_begin(one, 1, None, 0, -1, None, 2, None, result, None)",
    "reserved tags": "ms_reserve(None, 2, result, None)",
    "reserved tags: all": "ms_reserve(one, EVERY_TAG, result, None)",
    "trimmed tags": "ms_trim_tags(None, 2, None, None)",
    "trimmed tags: all": "ms_trim_tags(one, EVERY_TAG, None, None)",
    "a swap: no tag to pause": "ms_swap_begin(None, 0, one, 1, -1, None, 0, None, result, None)",
    "a swap: no tag to resume": "ms_swap_begin(one, 1, None, 0, -1, None, 0, None, result, None)",
    "ranges": "ms_fingerprint(None, 2, result, result, None)",
}


@pytest.mark.parametrize("call", MISSING_LISTS.values(), ids=MISSING_LISTS.keys())
def test_a_missing_list_is_an_invalid_argument(sim, tag, make_blocks, call):
    name = tag()
    (block,) = make_blocks(name, [MIB], backup="host")
    library = ctypes.CDLL(str(LIBRARY_DIR / "libmemsaver.so"))
    result = ctypes.byref(ctypes.c_void_p())
    one = (ctypes.c_char_p * 1)(name.encode())
    function, arguments = call.split("(", 1)
    values = eval(f"[{arguments[:-1]}]", {"one": one, "result": result, "EVERY_TAG": EVERY_TAG})
    wide = [ctypes.c_size_t(v) if isinstance(v, int) and v >= 0 else v for v in values]
    assert getattr(library, function)(*wide) == 1  # MS_INVALID_ARGUMENT
    assert memsaver.state(name) == "mapped" and block.is_intact()
