"""Tests warnings and errors about large contents without a backup and tags without memory."""

import warnings
from typing import get_args

import pytest

import memsaver
from memsaver import simulator
from memsaver._memory import choices
from memsaver._runtime.native import policy_of
from memsaver._transitions import parts
from memsaver.errors import InvalidStateError, UnknownTagError, UsageWarning

MIB = 1 << 20
LARGE_BYTES = 8 * MIB


@pytest.fixture(autouse=True)
def small_machine(monkeypatch):
    assert choices.LARGE_BYTES == 256 * MIB
    monkeypatch.setattr(choices, "LARGE_BYTES", LARGE_BYTES)


def filled(name, nbytes=LARGE_BYTES, **choice):
    with memsaver.region(name, **choice):
        return simulator.buffer(nbytes)


def pause(name):
    return memsaver.pause(name)


def pause_all(name):
    return memsaver.pause()


def swap_out(name):
    return memsaver.swap(out=name, into=f"{name} other")


def paused(name):
    with memsaver.paused(name):
        pass


@pytest.mark.parametrize("call", [pause, pause_all, swap_out, paused])
def test_large_contents_are_not_discarded_without_a_choice(sim, tag, call):
    name = tag()
    tag.names.append(f"{name} other")
    other = filled(f"{name} other", MIB, backup="host")
    memsaver.pause(f"{name} other")
    kept = filled(name)
    sim.write(kept.address, b"weights")
    with pytest.raises(
        InvalidStateError, match=r"discard 8 MiB of tag .*backup='host'.*backup='none'"
    ) as caught:
        call(name)
    assert caught.value.tag == name
    assert memsaver.state(name) == "mapped" and memsaver.state(f"{name} other") == "paused"
    assert sim.read(kept.address, 7) == b"weights" and other


def test_the_error_names_the_largest_of_many_tags(sim, tag):
    names = [tag() for _ in range(choices.NAMED + 4)]
    kept = [filled(name, (2 if name == names[-1] else 1) * LARGE_BYTES) for name in names]
    with pytest.raises(InvalidStateError, match=f"tags '{names[-1]}', .* and 4 others, and no"):
        memsaver.pause()
    assert kept


@pytest.mark.parametrize("backup", get_args(memsaver.Backup))
@pytest.mark.parametrize("where", ["region", "later region", "pause", "swap"])
def test_any_choice_of_a_backup_allows_the_pause(sim, tag, where, backup):
    name = tag()
    first = filled(name, **({"backup": backup} if where == "region" else {}))
    second = filled(name, MIB, backup=backup) if where == "later region" else None
    if where == "swap":
        tag.names.append(f"{name} other")
        third = filled(f"{name} other", MIB)
        memsaver.pause(f"{name} other")
        memsaver.swap(out=name, into=f"{name} other", backup=backup)
        assert third
    else:
        memsaver.pause(name, **({"backup": backup} if where == "pause" else {}))
    memsaver.resume(name)
    if "region" in where:
        assert memsaver.pause(name).changed == (name,)
        memsaver.resume(name)
    else:  # the choice applied only to that call
        with pytest.raises(InvalidStateError, match="no backup was chosen"):
            memsaver.pause(name)
    assert first and (second or where != "later region")


def test_a_failed_pause_with_a_backup_chooses_nothing(sim, tag, options):
    name = tag()
    kept = filled(name)
    options(host_bytes=1 << 20)
    with pytest.raises(memsaver.OutOfHostMemoryError):
        memsaver.pause(name, backup="host")
    with pytest.raises(InvalidStateError, match="no backup was chosen"):
        memsaver.pause(name)
    assert kept


def test_tags_are_counted_together(sim, tag):
    names = [tag() for _ in range(4)]
    blocks = [filled(name, LARGE_BYTES // 4) for name in names]
    memsaver.pause(*names[1:])
    memsaver.resume()
    with pytest.raises(InvalidStateError, match=r"tags '.*', '.*', '.*', '"):
        memsaver.pause(*names)
    assert blocks and {memsaver.state(name) for name in names} == {"mapped"}


@pytest.mark.parametrize(("backup", "word"), [("", "discard"), ("none", "paused")])
def test_the_tag_of_a_process_needs_a_choice(run_python, backup, word):
    done = run_python(
        """
        import memsaver
        from memsaver import simulator

        with memsaver.region("own"):
            block = simulator.buffer(256 << 20)
        try:
            memsaver.pause()
            print("paused")
        except memsaver.InvalidStateError as error:
            print(error)
        """,
        MEMSAVER_TAG="own",
        MEMSAVER_BACKUP=backup,
    )
    assert word in done.stdout


def test_small_and_paused_tags_need_no_choice(sim, tag):
    name = tag()
    small = filled(name, LARGE_BYTES - 2 * MIB)
    memsaver.pause(name)
    memsaver.pause(name)
    memsaver.resume(name)
    more = filled(name, 2 * MIB)
    with pytest.raises(InvalidStateError, match="no backup was chosen"):
        memsaver.pause(name)
    del more, small
    memsaver.pause(name)


def pause_in_the_background(name):
    return memsaver.pause(name, wait=False).wait()


@pytest.mark.parametrize("call", [pause, paused, pause_in_the_background])
def test_a_first_pause_without_memory_warns_once(sim, tag, call):
    empty, full = tag(), tag()
    block = filled(full, MIB)
    with memsaver.region(empty, backup="host"):
        pass
    with pytest.warns(UsageWarning, match="has no device memory") as caught:
        call(empty)
        memsaver.resume()
        call(empty)
        memsaver.resume()
    (warning,) = caught
    assert repr(empty) in str(warning.message) and warning.filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        call(full)
        memsaver.resume()
    assert block


@pytest.mark.parametrize(
    ("is_loaded", "says"),
    [(False, "memsaver's library is not preloaded"), (True, "linked dynamically")],
)
def test_a_processs_own_tag_without_memory_warns_of_the_cause(
    sim, tag, monkeypatch, is_loaded, says
):
    name = tag()
    monkeypatch.setattr(choices, "_process_tag", name)
    monkeypatch.setattr(choices, "is_preloaded", lambda: is_loaded)
    with memsaver.region(name, backup="host"):
        pass
    with pytest.warns(UsageWarning, match=says):
        memsaver.pause(name)


def test_a_pause_of_a_processs_own_tag_names_the_commands_option(sim, tag, monkeypatch):
    name = tag()
    monkeypatch.setattr(choices, "_process_tag", name)
    large = filled(name, LARGE_BYTES)
    with pytest.raises(InvalidStateError, match="`memsaver run --backup host`"):
        memsaver.pause(name)
    assert large


def test_a_refused_region_chooses_nothing(sim, tag):
    name = tag()
    kept = filled(name, MIB)
    memsaver.pause(name)
    with pytest.raises(InvalidStateError):
        filled(name, MIB, backup="none")
    memsaver.resume(name)
    more = filled(name)
    with pytest.raises(InvalidStateError, match="no backup was chosen"):
        memsaver.pause(name)
    assert kept and more


def test_an_unknown_tag_has_no_policy(sim, tag):
    name = tag()
    assert policy_of(name) is None and parts.names_of(name) == ()
    with pytest.raises(UnknownTagError):
        parts.split(name)
    with memsaver.region(name, backup="disk"):
        pass
    assert policy_of(name) == "disk" and parts.split(name) == (name, "disk")


def test_a_region_that_withdraws_a_backup_warns(sim, tag):
    name, empty = tag(), tag()
    kept = filled(name, MIB, backup="host")
    with memsaver.region(empty, backup="host"):
        pass
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled(name, MIB)
        filled(name, MIB, backup="pageable")
        filled(empty, MIB, backup="none")
        memsaver.pause(name, backup="none")
        memsaver.resume(name)
    with pytest.warns(UsageWarning, match=f"withdraws the backup .*'{name}'.* MiB") as caught:
        filled(name, MIB, backup="none")
    assert len(caught) == 1 and kept
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        filled(name, MIB, backup="none")


@pytest.mark.parametrize(
    ("name", "advice"),
    [
        ("vllm", "it is in memsaver.integrations.vllm, which has to be imported"),
        ("vLLM", "it is in memsaver.integrations.vllm, which has to be imported"),
        ("sglang", "memsaver.integrations.sglang"),
        ("SleepController", "in memsaver.integrations.sglang or memsaver.integrations.vllm, which"),
        ("RolloutEngine", "it is in memsaver.integrations.rollout"),
        ("offload", "memsaver.integrations.trainer"),
        ("wake_up", "use memsaver.resume"),
        ("regoin", "did you mean 'region'"),
        ("nothing_of_the_kind", "has no attribute"),
    ],
)
def test_a_name_that_memsaver_lacks(name, advice):
    with pytest.raises(AttributeError, match=advice) as caught:
        getattr(memsaver, name)
    assert repr(name) in str(caught.value)
    with pytest.raises(ImportError) as caught:
        exec(f"from memsaver import {name}")
    assert repr(name) in str(caught.value) and advice in f"{caught.value} has no attribute"


@pytest.mark.each_python
def test_modules_are_imported_from_memsaver(run_python):
    run_python("from memsaver import distributed, integrations, simulator")


def test_advice_uses_existing_names():
    from memsaver._runtime import guesses

    for name, modules in guesses._MODULES.items():
        for module in modules.split(" or "):
            found = pytest.importorskip(module)
            public = [one.lower() for one in (*dir(found), module.rpartition(".")[2], "sim")]
            assert name in public, (name, module)
    assert all(name == name.lower() for name in (*guesses._MODULES, *guesses._CALLED))
    assert set(guesses._CALLED.values()) <= set(memsaver.__all__)
