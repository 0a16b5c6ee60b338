"""Tests that the model test (`make model`) detects violations."""

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
        "e has (Range(",
    ),
    "an error of no kind": (
        """
        def resume(*tags, **named):
            raise memsaver.DriverError("nothing", call="cuMemMap", cuda_error=1)
        """,
        "an error without a reason",
    ),
}
# Changes that are found, but whose sequences take minutes to reduce.
SHARING_SABOTAGE = {
    "a dead exporter's memory that is unmapped in use": (
        """
        from model import importers
        importers.PROGRAM = ("-c", '''
        from memsaver._memory.sharing.peers import Peer
        from model.importers import _Importer
        from forked_processes import serve
        def release(peer, extents, real=Peer._release):
            for extent in () if peer._is_connected else extents:
                extent.users = 0
            real(peer, extents)
        Peer._release = release
        serve(_Importer)
        ''')
        """,
        "a process ended instead of answering",
    ),
    "a dead exporter's memory that stays mapped": (
        """
        from model import importers
        importers.PROGRAM = ("-c", '''
        from memsaver._memory.sharing.peers import Peer
        from model.importers import _Importer
        from forked_processes import serve
        def release(peer, extents, real=Peer._release):
            if peer._is_connected:
                real(peer, extents)
        Peer._release = release
        serve(_Importer)
        ''')
        """,
        "memory of a dead exporter stays mapped, although nobody uses it",
    ),
    "a dead exporter's memory that is no longer the same": (
        """
        from model import importers
        importers.PROGRAM = ("-c", '''
        import ctypes
        from memsaver._memory.sharing.peers import Peer
        from model.importers import _Importer
        from forked_processes import serve
        def hear(peer, real=Peer._hear):
            is_there = real(peer)
            for extent in () if is_there else peer.extents.values():
                ctypes.memset(extent.span.native.address + extent.offset, 7, extent.nbytes)
            return is_there
        Peer._hear = hear
        serve(_Importer)
        ''')
        """,
        "an importer sees other contents of a dead exporter's block",
    ),
    "a dead exporter's error of no kind": (
        """
        from model import importers
        importers.PROGRAM = ("-c", '''
        from memsaver._memory.sharing import peers
        from model.importers import _Importer
        from forked_processes import serve
        peers._gone = lambda tag: ConnectionError(tag)
        serve(_Importer)
        ''')
        """,
        "a process ended instead of answering",
    ),
    "an importer that is not recorded": (
        """
        send = exporter._Importer._send_extents
        def forgetting(importer, rows):
            importer.record.released([row[4] for row in rows])
            return send(importer, rows)
        exporter._Importer._send_extents = forgetting
        """,
        "not refused",
    ),
}


PROGRAM = """
        import ctypes
        from pathlib import Path
        from types import SimpleNamespace
        from hypothesis.errors import Flaky
        import memsaver
        from memsaver._memory.sharing import exporter
        from memsaver._runtime.native import _C
        from model import transition_rules
        from model.worker import prepare, run_round
        resume = memsaver.resume
        real = SimpleNamespace(resume=resume)
{change}
        machine, process = prepare(Path({folder!r}))
        beside = dict(vars(memsaver), resume=resume)
        transition_rules.memsaver = SimpleNamespace(**beside)
        for seed in {seeds}:
            try:
                run_round(machine, seed, shrinks={shrinks})
            except (AssertionError, Flaky) as error:
                # Sequences with other processes may not be reproduced: see `model.worker`. The
                # journal has printed a violation in them.
                if not isinstance(error, AssertionError) and not process.journal.has_failed:
                    continue
                notes = getattr(error, "__notes__", ())
                print(error, *[line for note in notes for line in note.splitlines()], sep="\\n")
                break
"""


@pytest.mark.long
@pytest.mark.parametrize("change, said", SABOTAGE.values(), ids=SABOTAGE)
def test_a_violation_is_found_and_reduced(run_python, tmp_path, change, said):
    program = PROGRAM.format(change=change, folder=str(tmp_path), seeds=[1], shrinks=True)
    done = run_python(program, timeout=110, MEMSAVER_SIM_DEVICES=2)
    assert said in done.stdout
    steps = [line for line in done.stdout.splitlines() if line.startswith("state.")]
    assert 2 <= len([step for step in steps if "the_library_is" not in step]) <= 12, done.stdout


@pytest.mark.long
@pytest.mark.parametrize("change, said", SHARING_SABOTAGE.values(), ids=SHARING_SABOTAGE)
def test_a_violation_of_sharing_is_found(run_python, tmp_path, change, said):
    program = PROGRAM.format(change=change, folder=str(tmp_path), seeds=[2, 3, 4], shrinks=False)
    assert said in run_python(program, timeout=110, MEMSAVER_SIM_DEVICES=2).stdout
