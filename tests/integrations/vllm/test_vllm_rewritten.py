"""Tests sleeps and wake-ups of a fake vLLM's weights that are about to be reloaded."""

import pytest

START = """
from memsaver.errors import OutOfDeviceMemoryError
from memsaver.integrations.engine.errors import EngineError
from memsaver.integrations.vllm import SleepController, Status
llm = LLM("tiny", enable_sleep_mode=True, tensor_parallel_size=RANKS)
control = SleepController(llm)

def rpc(function, *arguments):
    return llm.collective_rpc(function, args=arguments)

def restored():
    return rpc(vllm_calls.restored)

def hold(seed):
    return all(rpc(vllm_calls.holds, seed))

rpc(vllm_calls.load, 1)
first = llm.generate(PROMPTS)
nothing = restored()
"""


@pytest.fixture(params=[1, 2], ids=["one rank", "two ranks"])
def ranks(request):
    return request.param


@pytest.fixture
def run(run_vllm, ranks):
    """Run lines with an `llm`, which has the weights of `checkpoint(1)`, and its `control`."""

    def call(lines, **env):
        env.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
        code = START.replace("RANKS", str(ranks)) + lines + "\nllm.shutdown()\n"
        return run_vllm(code, **env)

    return call


@pytest.mark.parametrize("version", ["0.26.0", "0.33.0"])
def test_a_wake_up_need_not_restore_the_weights(run, version):
    run(
        """
control.sleep()
report = control.wake_up("weights", keep_weights=False)
assert report.bytes and control.status is Status.WEIGHTS_ONLY
assert restored() == nothing and not hold(1)
rpc(vllm_calls.load, 1)
control.wake_up(keep_weights=False)  # changes nothing for weights that are awake
assert llm.generate(PROMPTS) == first  # which depends on the model's buffers
for tags in (None, "weights"):
    control.sleep(tags)
    control.wake_up(keep_weights=False)
    assert control.status is Status.AWAKE and restored() == nothing
    rpc(vllm_calls.load, 2)
    assert hold(2) and llm.generate(PROMPTS) != first
    control.sleep(tags)
    control.wake_up()
    assert restored() != nothing and hold(2)
    nothing = restored()
rpc(vllm_calls.load, 1)
assert llm.generate(PROMPTS) == first
control.sleep("kv_cache", keep_weights=False)
control.wake_up(keep_weights=False)
assert llm.generate(PROMPTS) == first
""",
        VLLM_FAKE_VERSION=version,
    )


def test_weights_that_a_sleep_discarded_keep_their_buffers(run):
    run("""
control.sleep(keep_weights=False)
control.wake_up(keep_weights=False)
assert restored() == nothing and not hold(1)
rpc(vllm_calls.load, 1)
assert llm.generate(PROMPTS) == first
""")


def test_a_wake_up_without_memory_keeps_the_contents(run, ranks):
    run(
        f"""
control.sleep()
for rank in range({ranks}):
    rpc(vllm_calls.occupy, (1 << 40) - (2 << 20), rank)
error = refused(OutOfDeviceMemoryError, control.wake_up, keep_weights=False)
assert control.status is Status.ASLEEP and "lost" not in str(error)
for rank in range({ranks}):
    rpc(vllm_calls.occupy, 0, rank)
control.wake_up()
assert llm.generate(PROMPTS) == first
""",
        MEMSAVER_SIM_MEMORY=1 << 40,
    )


def test_a_wake_up_that_fails_after_the_mapping_reports_the_loss_and_keeps_the_buffers(run, ranks):
    run(f"""
control.sleep()
rpc(vllm_calls.break_next, "post_kv_cache_wake_up", {ranks} - 1)
error = refused(EngineError, control.wake_up, keep_weights=False)
assert "load weights: its contents are lost" in str(error), error
assert control.status is Status.ASLEEP
control.wake_up()
assert control.status is Status.AWAKE
assert not hold(1)
rpc(vllm_calls.load, 1)
assert llm.generate(PROMPTS) == first
""")


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_a_failed_wake_up_whose_memory_cannot_be_released_again_reports_the_loss(run):
    run("""
from memsaver import simulator
control.sleep()
rpc(vllm_calls.break_next, "post_kv_cache_wake_up")
with simulator.fault("cuMemUnmap", 1, times=0):
    error = refused(EngineError, control.wake_up, keep_weights=False)
assert "could not release their memory again" in str(error), error
assert "wake the engine again, and then load weights: its contents are lost" in str(error), error
assert control.status is Status.ASLEEP
control.wake_up()
assert control.status is Status.AWAKE
assert not hold(1)
rpc(vllm_calls.load, 1)
assert llm.generate(PROMPTS) == first
""")


def test_a_wake_up_that_lost_weights_is_not_repeated_for_a_generation(asleep):
    asleep(
        """
from memsaver.integrations.vllm import protocol
await engine.collective_rpc(vllm_calls.load, args=(1,))
before = await generate(engine)
await engine.sleep()
assert await generate(engine) == before
await engine.sleep()
await engine.collective_rpc(vllm_calls.break_next, args=("post_kv_cache_wake_up",))
[answer] = await engine.collective_rpc(protocol.RESUME, args=(["weights", "kv_cache"], False))
assert answer["failure"] and list(answer["lost"]) == ["weights"]
assert "weights" in str(await refusal(generate(engine)))
await engine.wake_up()
await engine.collective_rpc(vllm_calls.load, args=(1,))
assert await generate(engine) == before
""",
        engine='engine_of(model="tiny")',
        when="wake",
    )


def test_a_generation_does_not_wake_the_rest_before_an_update_is_complete(asleep):
    asleep(
        """
from memsaver.integrations.vllm import protocol
await engine.collective_rpc(vllm_calls.load, args=(1,))
before = await generate(engine)
await engine.sleep()
[answer] = await engine.collective_rpc(protocol.RESUME, args=(["weights"], False))
assert not answer["failure"]
await engine.collective_rpc(vllm_calls.load, args=(1,))
for complete in (False, True):
    assert (await refusal(generate(engine))).tags == ("kv_cache",)
    await engine.collective_rpc(protocol.END, args=(complete,))
assert await generate(engine) == before
""",
        engine='engine_of(model="tiny")',
        when="wake",
    )


def test_weights_beside_a_draft_model_are_kept(run):
    run("""
rpc(vllm_calls.add_draft)
control.sleep(keep_weights=False)
control.wake_up(keep_weights=False)
assert llm.generate(PROMPTS) == first
""")


@pytest.mark.parametrize("ranks", [1], indirect=True)
def test_parameters_that_vllm_preserves_are_kept(run):
    run(
        """
llm.llm_engine.vllm_config.model_config.sleep_preserve_parameter_names = ["*.weight"]
control.sleep()
control.wake_up(keep_weights=False)
assert llm.generate(PROMPTS) == first
""",
        VLLM_FAKE_VERSION="0.33.0",
    )


def test_weights_whose_buffers_cannot_be_read_are_restored(run, tmp_path):
    run(
        """
control.sleep()
control.wake_up(keep_weights=False)
assert hold(1) and llm.generate(PROMPTS) == first
""",
        MEMSAVER_VLLM_BACKUP="disk",
        MEMSAVER_DISK_DIR=tmp_path,
    )
