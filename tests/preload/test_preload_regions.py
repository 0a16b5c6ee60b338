"""Tests the preloaded library's memory: regions, pauses, streams and handles."""

import os

import pytest
from preloading import FIXTURES, PACKAGE, SIM, program_lines
from repository import IMPORT_PATH

pytestmark = pytest.mark.preloads

# A trainer without regions of its own.
TRAINER = {
    **SIM,
    "MEMSAVER_TAG": "trainer",
    "MEMSAVER_BACKUP": "host",
    "PYTHONPATH": os.pathsep.join([str(FIXTURES), str(PACKAGE.parent), IMPORT_PATH]),
}

# --- regions --------------------------------------------------------------------------------------


def test_a_region_is_served_by_the_core(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        before = caller.malloc(MIB)
        core.enter("weights", 1)
        small, large = caller.malloc(512), caller.malloc(4 * MIB)
        assert caller.status == 0 and core.owns(small) and core.owns(large)
        assert large % (2 * MIB) == 0 and small % 512 == 0
        runtime.calls()
        assert caller.free(before) == 0 and runtime.live == 0
        print(*runtime.calls())
        core.leave()
        after = caller.malloc(MIB)
        assert runtime_of(after) == 1 and not core.owns(after)
        assert caller.free(small) == 0 and caller.free(large) == 0
        assert caller.free(large) == 1, "a second free is the caller's mistake"
        assert caller.free(after) == 0
        print(*runtime.calls())
        """,
        SIM,
    )
    assert out == ["cudaFree", "cudaMalloc", "cudaFree"]


@pytest.mark.parametrize("capturing", [False, True])
def test_plain_memory_is_ours_on_the_callers_device_also_while_capturing(python, capturing):
    out = python(
        f"""
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        runtime.capture({capturing})
        pointer = caller.malloc(4 * MIB)
        print(caller.status, core.owns(pointer), *runtime.calls())
        """,
        SIM,
    )
    assert out == ["0", "True", "cudaGetDevice"]


def test_out_of_memory_is_an_error_code_and_passes(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("t")
        caller.malloc(1 << 45)
        print(caller.status)
        pointer = caller.malloc(MIB)
        print(caller.status, core.owns(pointer), caller.free(pointer))
        """,
        SIM,
    )
    assert out == ["2", "0", "True", "0"]


def test_an_invalid_option_is_not_reported_as_out_of_memory(python):
    # After an out-of-memory error, torch would free its cached memory and try again.
    out = python(
        """
        import ctypes

        caller, core = Caller("caller_1.so"), Core()
        caller.malloc(MIB)
        text = ctypes.create_string_buffer(4096)
        print(caller.status, core.lib.ms_next_warning(text, c_size_t(4096)))
        print(b"MEMSAVER_HOST_BYTES" in text.value)
        """,
        {**TRAINER, "MEMSAVER_HOST_BYTES": "64GB"},
    )
    assert out == ["999", "1", "True"]


def test_preloaded_memory_can_be_paused_and_resumed(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("kv")
        kept, dropped = caller.malloc(4 * MIB), caller.malloc(4 * MIB)
        core.leave()
        core.pause("kv")
        print(core.state("kv"), caller.free(dropped), caller.malloc(64) > 0, caller.status)
        core.resume("kv")
        print(core.state("kv"), core.owns(kept), caller.free(kept))
        """,
        SIM,
    )
    assert out == ["2", "0", "True", "0", "0", "True", "0"]


@pytest.mark.parametrize(
    ("backup", "policy"), [("none", "0"), ("host", "1"), ("pageable", "2"), ("disk", "3")]
)
def test_the_environment_makes_the_process_a_region(python, backup, policy):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        pointer = caller.malloc(4 * MIB)
        assert core.owns(pointer)
        print(core.lib.ms_region_tag().decode(), core.backup("trainer"))
        core.pause()
        foreign = caller.malloc(64)
        print(runtime_of(foreign), caller.free(foreign))
        core.resume()
        print(caller.free(pointer), core.owns(caller.malloc(64)))
        """,
        {**SIM, "MEMSAVER_TAG": "trainer", "MEMSAVER_BACKUP": backup},
    )
    assert out == ["trainer", policy, "1", "0", "0", "True"]


@pytest.mark.parametrize(("given", "policy"), [("1", "1"), ("-1", "3")])
def test_a_region_of_the_processs_tag_may_be_the_first_use(python, given, policy):
    out = python(
        f"""
        caller, core = Caller("caller_1.so"), Core()
        core.enter("trainer", {given})
        caller.malloc(4 * MIB)
        core.leave()
        print(core.backup("trainer"), core.owns(caller.malloc(64)), core.backup("trainer"))
        """,
        {**TRAINER, "MEMSAVER_BACKUP": "disk"},
    )
    assert out == [policy, "True", policy]


# These two import torch, whose own runtime of version 13 would get the calls of a caller of that
# version.


def test_the_tensors_of_a_whole_process_can_be_sent(python):
    """A trainer without regions of its own can allow an engine to map the trainer's weights."""
    out = python(
        """
        import ctypes, torch
        import memsaver
        from importing_process import ImportingProcess, dumped
        caller, core = Caller("caller_3.so"), Core()
        with memsaver.region("trainer", shareable=True):
            memsaver.simulator.empty(1)  # as torch's pools on a GPU: registers the sending
        pointer = caller.malloc(4 * MIB)
        memory = (ctypes.c_char * (4 * MIB)).from_address(pointer)
        weights = torch.frombuffer(memory, dtype=torch.int32)
        weights.copy_(torch.arange(len(weights), dtype=torch.int32))
        other = ImportingProcess(LD_PRELOAD="", MEMSAVER_TAG="")
        other.load("x", weights[5:].view(-1)[::3])
        print(other.ask("[x[1].item(), x.stride(0)]"))
        memsaver.configure(importer_seconds=0.1)
        try:
            memsaver.pause("trainer")
        except memsaver.TagSharedError as error:
            print(error.importers[0][0] == other.pid)
        other.do("x.add_(1)")
        other.kill()
        memsaver.pause("trainer")
        memsaver.resume("trainer")
        print(weights[5].item(), weights[6].item(), memsaver.stats().tags[0].tag)
        """,
        TRAINER,
    )
    assert out == ["[8,", "3]", "True", "6", "6", "trainer"]


def test_the_weights_of_a_whole_process_update_an_engine_without_a_bucket(python):
    out = python(
        """
        import ctypes, torch
        import memsaver, weight_engine
        from importing_process import ImportingProcess
        from memsaver.integrations.rollout.rollout_engine import RolloutEngine
        from memsaver.integrations.sglang.replies import Reply

        caller = Caller("caller_3.so")
        memsaver.configure(importer_seconds=10)
        with memsaver.region("trainer", shareable=True):
            pass

        def weight(like):
            memory = (ctypes.c_char * like.nbytes).from_address(caller.malloc(like.nbytes))
            return torch.frombuffer(memory, dtype=like.dtype).view(like.shape)

        other = ImportingProcess(LD_PRELOAD="", MEMSAVER_TAG="")
        other.do("import pytest, weight_engine")
        other.do("hooked = weight_engine.hooked(pytest.MonkeyPatch())")
        other.do("engine = weight_engine.Backend(hooked.__enter__())")

        def ask(name, fields, timeout):
            other.load("x", (name, fields, timeout))
            return Reply(*other.ask("[(y := engine.ask(*x)).success, y.message]"))

        backend = weight_engine.Backend()
        backend.has_plugin, backend.ask = True, ask
        engine = RolloutEngine(backend, timeout=30)
        weights = {name: weight(like) for name, like in weight_engine.checkpoint().items()}
        weights["lm_head.weight"] = weights["embed.weight"]
        for seed in (1, 2):
            for name, new in weight_engine.checkpoint(seed).items():
                weights[name].copy_(new)
            report = engine.update_weights(weights, verify="full")
            memsaver.pause("trainer")  # at once
            print(report.mapped, report.held, report.buckets, report.bucket_bytes)
            memsaver.resume("trainer")
            print(other.ask(f"engine.models[0].holds(weight_engine.checkpoint({seed}))"))
        other.kill()
        """,
        TRAINER,
    )
    assert out == ["13", "13", "0", "0", "True"] * 2


def test_a_linked_program_in_a_whole_process_region(run, built):
    done = run([built / "program", "leak"], {**SIM, "MEMSAVER_TAG": "all"})
    lines = program_lines("ours")
    assert done.stdout.splitlines() == [*lines[:3], "leak 0", *lines[3:]]
    assert (done.returncode, done.stderr) == (42, "")


def test_a_forked_child_is_inert(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        ours = caller.malloc(4 * MIB)
        child = os.fork()
        if child == 0:
            try:
                pointer = caller.malloc(MIB)
                foreign = caller.status == 0 and runtime_of(pointer) == 1
                foreign = foreign and caller.free(pointer) == 0
                caller.free(ours)
                os._exit(0 if foreign else 1)
            finally:
                os._exit(2)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        again = caller.malloc(4 * MIB)
        print(core.owns(again), caller.free(again), caller.free(ours))
        """,
        SIM,
    )
    assert out == ["0", "True", "0", "0"]


# --- streams and handles --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("suffix", "stream", "meant"), [("", 7, 7), ("", 0, 0), ("_ptsz", 7, 7), ("_ptsz", 0, 2)]
)
def test_a_free_on_a_stream_waits_for_it(python, suffix, stream, meant):
    out = python(
        f"""
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        pointer = caller.malloc_async{suffix}(MIB, {stream})
        assert caller.status == 0 and core.owns(pointer)
        runtime.calls()
        print(caller.free_async{suffix}(pointer, {stream}), *runtime.calls())
        print(caller.free(pointer))
        """,
        SIM,
    )
    relaxed = 2
    assert out == [
        "0",
        f"cudaStreamIsCapturing({meant})",
        f"cudaStreamSynchronize({meant},mode={relaxed})",
        "1",
    ]


def test_memory_may_cross_between_the_two_kinds(python):
    out = python(
        """
        caller, core = Caller("caller_1.so"), Core()
        core.enter("t")
        plain, ordered = caller.malloc(MIB), caller.malloc_async(MIB, 3)
        assert core.owns(plain) and core.owns(ordered)
        print(caller.free_async(plain, 3), caller.free(ordered))
        """,
        SIM,
    )
    assert out == ["0", "0"]


@pytest.mark.parametrize("suffix", ["", "_ptsz"])
def test_a_capture_keeps_its_own_nodes(python, suffix):
    out = python(
        f"""
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        ours = caller.malloc(MIB)
        runtime.capture(True)
        node = caller.malloc_async{suffix}(MIB, 3)
        print(runtime_of(node), caller.free_async{suffix}(node, 3))
        runtime.calls()
        print(caller.free_async{suffix}(ours, 3), *runtime.calls())
        runtime.capture(False)
        print(caller.free_async{suffix}(ours, 3), caller.free(ours))
        """,
        SIM,
    )
    assert out == ["1", "0", "900", "cudaStreamIsCapturing(3)", "0", "1"]


def test_an_ipc_handle_of_ours_never_reaches_the_runtime(python):
    out = python(
        """
        runtime, caller, core = Runtime("libcudart.so.13"), Caller("caller_1.so"), Core()
        core.enter("t")
        pointer = caller.malloc(4 * MIB)
        runtime.calls()
        print(caller.ipc(pointer), caller.ipc(pointer + MIB), len(runtime.calls()))
        """,
        SIM,
    )
    assert out == ["801", "801", "0"]
