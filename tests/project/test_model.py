"""Test that the model test (`make model`) detects violations."""

import pytest

# Changes to the library that the model does not know, and a part of the reported violation.
SABOTAGE = {
    "a lost byte": (
        """
        def resume(*tags, **named):
            report = real.resume(*tags, **named)
            for tag in tags:
                for address, nbytes in memsaver.ranges(tag):
                    ctypes.memset(address + nbytes - 1, 77, 1)
            return report
        """,
        "is 77, not",
    ),
    "a leak": (
        """
        def resume(*tags, **named):
            with memsaver.region("e"):
                _C.malloc(512, 0)
            return real.resume(*tags, **named)
        """,
        "e has other addresses",
    ),
    "an error of no kind": (
        """
        def resume(*tags, **named):
            raise memsaver.DriverError("nothing", call="cuMemMap", cuda_error=1)
        """,
        "an error without a reason",
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("resume, said", SABOTAGE.values(), ids=SABOTAGE)
def test_a_violation_is_found_and_reduced(run_python, tmp_path, resume, said):
    done = run_python(
        f"""
        import ctypes
        from pathlib import Path
        from types import SimpleNamespace
        import memsaver
        from memsaver._runtime.native import _C
        from model import transition_rules
        from model.worker import prepare, run_round
{resume}
        real = SimpleNamespace(resume=memsaver.resume)
        machine, process = prepare(Path({str(tmp_path)!r}))
        beside = dict(vars(memsaver), resume=resume)
        transition_rules.memsaver = SimpleNamespace(**beside)
        try:
            run_round(machine, 1)
        except AssertionError as error:
            steps = [line for note in getattr(error, "__notes__", ()) for line in note.splitlines()]
            print(error, *steps, sep="\\n")
        """,
        timeout=110,
        MEMSAVER_SIM_DEVICES=2,
    )
    assert said in done.stdout
    steps = [line for line in done.stdout.splitlines() if line.startswith("state.")]
    assert 2 <= len([step for step in steps if "the_library_is" not in step]) <= 12, done.stdout
