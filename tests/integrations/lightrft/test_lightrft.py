"""Tests LightRFT's strategy interface with memsaver, using a fake strategy and engine."""

import copy
from types import SimpleNamespace

import fake_sglang as engines
import pytest
import scheduler_calls
from fake_lightrft import EngineStatus, Rollout, Sender, Strategy
from scheduler_calls import states

import memsaver
from memsaver.integrations.engine.messages import Answer, SchedulerState
from memsaver.integrations.lightrft import adapt
from memsaver.integrations.sglang import EngineBusyError, Status, hooks

torch = pytest.importorskip("torch")

from trainers import Trainer, lies_in, states_of  # noqa: E402

MIB = 1 << 20


@pytest.fixture
def make_strategy(monkeypatch, sim, tag, make_blocks):
    """Return a function that creates a strategy and its engine: `make_strategy(backup="host",
    weights="keep")`.
    """
    tag.names.extend(engines.TAGS)
    made = []
    with engines.modules(monkeypatch) as classes:
        hooks.install()

        def make(backup="host", args=(), **options):
            scheduler = classes.Scheduler(classes.Updater)
            scheduler_calls.hold(scheduler, make_blocks, backup)
            engine = engines.Engine(classes.Tokenizer([scheduler]))
            engine.server_args = SimpleNamespace(enable_weights_cpu_backup=backup == "host")
            made.append((engine, scheduler))
            strategy = Strategy(**dict(args))
            strategy.rollout, strategy.scheduler = Rollout(engine), scheduler
            strategy.memory = adapt(strategy, **options)
            return strategy

        yield make
        for engine, scheduler in made:
            assert scheduler.death is None, repr(scheduler.death)
            engine.shutdown()
            del scheduler.model, scheduler.kv, scheduler.graph


def all_of(state, **others):
    return {"weights": state, "kv_cache": state, "cuda_graph": state, **others}


# --- the engine -----------------------------------------------------------------------------------


def test_a_loop_as_lightrft_runs_it(make_strategy, sim):
    strategy = make_strategy()
    sender = Sender(strategy, strategy.scheduler)
    full = sim.tag_bytes()
    strategy.setup_inference_engine(strategy.rollout, actor=sender)
    assert states() == all_of("paused", weights="mapped") and sim.tag_bytes() < full
    for step in range(3):
        assert strategy.inference_engine_status is EngineStatus.SLEEPED
        assert strategy.gather_and_generate("a", sleep_engine=False) == "a!"
        assert strategy.inference_engine_status is EngineStatus.WAKEUP
        assert states() == all_of("mapped") and strategy.memory.status is Status.AWAKE
        strategy.maybe_sleep_inference_engine()
        assert strategy.memory.status is Status.WEIGHTS_ONLY
        sender.seed = 10 + step
        strategy.update_engine_weights(sender)
        # The cache and the graphs stay paused while the weights are sent, and after that.
        assert sender.states[-1] == states() == all_of("paused", weights="mapped")
    assert strategy.gather_and_generate("b") == "b!"
    assert strategy.scheduler.model.seed == 12 and strategy.scheduler.model.is_intact()


def test_the_engine_sleeps_only_if_lightrft_enables_it(make_strategy):
    strategy = make_strategy(args={"enable_engine_sleep": False})
    strategy.setup_inference_engine(strategy.rollout)
    assert states() == all_of("mapped")
    assert strategy.inference_engine_status is EngineStatus.WAKEUP


def test_weights_with_a_backup_sleep_too(make_strategy, sim):
    strategy = make_strategy(weights="backup")
    strategy.setup_inference_engine(strategy.rollout)
    assert states() == all_of("paused") and sim.tag_bytes() == 0
    assert strategy.memory.status is Status.ASLEEP
    assert strategy.gather_and_generate("a") == "a!"
    assert states() == all_of("paused")
    strategy.wakeup_inference_engine()
    assert strategy.scheduler.model.is_intact()


def test_weights_without_a_backup_are_not_lost_by_mistake(make_strategy):
    strategy = make_strategy(backup="none", weights="backup")
    with pytest.raises(memsaver.ConfigError, match="enable_weights_cpu_backup"):
        strategy.setup_inference_engine(strategy.rollout)
    assert states() == all_of("mapped") and strategy.scheduler.model.is_intact()
    strategy.wakeup_inference_engine()
    assert strategy.gather_and_generate("a", sleep_engine=False) == "a!"


def test_weights_without_a_backup_are_sent_again(make_strategy):
    strategy = make_strategy(backup="none", weights="resend")
    sender = Sender(strategy, strategy.scheduler)
    strategy.setup_inference_engine(strategy.rollout)
    assert states() == all_of("paused")
    with pytest.raises(memsaver.InvalidStateError, match="update_engine_weights"):
        strategy.wakeup_inference_engine()  # nothing can send the weights
    assert states() == all_of("paused")

    sender.seed = 5
    strategy.update_engine_weights(sender)
    assert states() == all_of("paused", weights="mapped")
    assert strategy.gather_and_generate("a") == "a!"  # not sent twice
    assert len(sender.states) == 1 and states() == all_of("paused")
    assert strategy.gather_and_generate("b", sleep_engine=False) == "b!"
    assert sender.states[1:] == [all_of("paused", weights="mapped")]
    assert strategy.scheduler.model.is_intact()


@pytest.mark.parametrize("with_sender", [False, True])
def test_a_refused_sleep_keeps_the_weights_that_would_be_sent_again(make_strategy, with_sender):
    strategy = make_strategy(backup="none", weights="resend", timeout=30)
    sender = Sender(strategy, strategy.scheduler)
    strategy.broadcast_manager = sender if with_sender else None
    strategy.inference_engine, strategy.inference_engine_type = strategy.rollout, "sglang"
    strategy.scheduler.begin("somebody else's")
    for _ in range(2):
        strategy.memory._engine._timeout = 0.3
        with pytest.raises(EngineBusyError):
            strategy.maybe_sleep_inference_engine()
        strategy.memory._engine._timeout = 30
        strategy.wakeup_inference_engine()
        assert strategy.inference_engine_status is EngineStatus.WAKEUP
    assert sender.states == [] and states() == all_of("mapped")
    assert strategy.scheduler.model.is_intact()
    strategy.scheduler.end("somebody else's")
    strategy.maybe_sleep_inference_engine()  # loses the weights
    if with_sender:
        strategy.wakeup_inference_engine()
        assert len(sender.states) == 1 and strategy.scheduler.model.is_intact()
    else:
        with pytest.raises(memsaver.InvalidStateError, match="update_engine_weights"):
            strategy.wakeup_inference_engine()


@pytest.mark.parametrize("nth", [1, 2, 3])
def test_a_sleep_that_fails_half_way_keeps_the_weights(make_strategy, sim, nth):
    strategy = make_strategy(backup="none", weights="resend", timeout=30)
    strategy.inference_engine, strategy.inference_engine_type = strategy.rollout, "sglang"
    with sim.fault("cuMemUnmap", nth=nth), pytest.raises(memsaver.DriverError):
        strategy.maybe_sleep_inference_engine()
    strategy.wakeup_inference_engine()
    assert states() == all_of("mapped") and strategy.scheduler.model.is_intact()


def test_weights_that_a_failed_sleep_lost_on_a_rank_are_sent_again(make_strategy):
    # As if one rank of a group had released the weights when another rank failed.
    strategy = make_strategy(backup="none", weights="resend", timeout=30)
    strategy.broadcast_manager = sender = Sender(strategy, strategy.scheduler)
    strategy.inference_engine, strategy.inference_engine_type = strategy.rollout, "sglang"
    controller = strategy.memory._engine.controller()

    def sleep(*_, **__):
        state = SchedulerState("one", (), True, Answer("one", "release", (), (), lost=("weights",)))
        controller._knowledge.learn([state])
        raise memsaver.DriverError("a rank failed")

    controller.sleep = sleep
    with pytest.raises(memsaver.DriverError):
        strategy.maybe_sleep_inference_engine()
    assert controller.lost == {"weights"} and controller.status is Status.AWAKE
    strategy.wakeup_inference_engine()
    assert len(sender.states) == 1


def test_a_wake_up_without_room_can_be_repeated(make_strategy, sim):
    strategy = make_strategy()
    strategy.setup_inference_engine(strategy.rollout)
    sim.occupy(memsaver.device_memory(0)[0] - 5 * MIB)
    with pytest.raises(memsaver.OutOfDeviceMemoryError):
        strategy.gather_and_generate("a")
    assert strategy.inference_engine_status is EngineStatus.SLEEPED
    strategy.update_engine_weights(Sender(strategy, strategy.scheduler))  # needs no memory
    sim.occupy(0)
    assert strategy.gather_and_generate("a") == "a!"


def test_other_engines_are_left_to_lightrft(make_strategy):
    strategy = make_strategy()
    strategy.setup_inference_engine(strategy.rollout, "vllm", actor=Sender(strategy))
    strategy.wakeup_inference_engine()
    assert strategy.calls == ["wake up", "sleep", "wake up"] and states() == all_of("mapped")
    assert strategy.memory.status is None


# --- the optimizer --------------------------------------------------------------------------------


@pytest.fixture
def adapted(sim, tag):
    """Return an adapted strategy and the tag of its first optimizer."""
    strategy, name = Strategy(), tag("optimizer")
    adapt(strategy, tag=name)
    return strategy, name


def test_steps_between_offloads_are_bit_equal(sim, adapted):
    strategy, name = adapted
    trainer, expected = Trainer("adamw"), Trainer("adamw")
    for _ in range(6):
        assert strategy.maybe_load_optimizer(trainer.optimizer) is trainer.optimizer
        trainer.step(), expected.step()
        trainer.optimizer.zero_grad(), expected.optimizer.zero_grad()
        assert strategy.maybe_offload_optimizer(trainer.optimizer) is trainer.optimizer
        assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
        with pytest.raises(memsaver.InvalidStateError, match=name[:10]):
            trainer.optimizer.step()
    strategy.maybe_load_optimizer(trainer.optimizer, device=0)
    assert trainer.contents() == expected.contents()
    assert strategy.calls == []


def test_two_optimizers_have_tags_of_their_own(tag, adapted):
    strategy, name = adapted
    tag.names.append(f"{name} 2")
    actor, critic = Trainer("adamw"), Trainer("sgd_momentum")
    for trainer in (actor, critic):
        trainer.step()
    strategy.maybe_offload_optimizer(actor.optimizer)
    strategy.maybe_offload_optimizer(critic.optimizer)
    strategy.maybe_offload_optimizer(actor.optimizer)
    strategy.maybe_load_optimizer(critic.optimizer)
    assert memsaver.state(name) == "paused" and memsaver.state(f"{name} 2") == "mapped"
    critic.step()
    strategy.maybe_load_optimizer(actor.optimizer)
    actor.step()


def test_a_wrapper_with_master_weights(adapted):
    """LightRFT's mixed-precision wrapper is an Optimizer subclass that contains the real
    optimizer.
    """

    class Wrapper(torch.optim.Optimizer):
        def __init__(self, optim) -> None:
            self.optim = optim
            masters = [p.detach().float().clone() for p in optim.param_groups[0]["params"]]
            optim.param_groups[0]["params"] = masters

        def step(self):
            for master in self.optim.param_groups[0]["params"]:
                master.grad = torch.ones_like(master)
            self.optim.step()

    strategy, name = adapted
    trainer = Trainer("adamw")
    wrapper = Wrapper(trainer.optimizer)
    wrapper.step()
    masters = wrapper.optim.param_groups[0]["params"]
    before = [master.clone() for master in masters]
    strategy.maybe_offload_optimizer(wrapper)
    assert all(lies_in(tensor, name) for tensor in masters)
    assert not any(lies_in(tensor, name) for tensor in trainer.model.parameters())
    with pytest.raises(memsaver.InvalidStateError):
        wrapper.step()
    strategy.maybe_load_optimizer(wrapper)
    assert all(torch.equal(*pair) for pair in zip(masters, before, strict=True))
    wrapper.step()


def test_checkpoints_are_written_and_read_with_the_memory_mapped(sim, adapted):
    strategy, name = adapted
    trainer = Trainer("adamw")
    trainer.step()
    expected = [state.clone() for state in states_of(trainer.optimizer)]
    saved_by_torch = copy.deepcopy(trainer.optimizer.state_dict())
    strategy.maybe_offload_optimizer(trainer.optimizer)
    saved = strategy.save_ckpt(trainer.model, "folder", optimizer=trainer.optimizer)
    found = [value for state in saved for value in state.values()]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    assert memsaver.state(name) == "paused"
    assert strategy.load_ckpt(
        trainer.model, "folder", optimizer=trainer.optimizer, states=saved_by_torch
    ) == ("folder", {})
    assert memsaver.state(name) == "paused" and sim.tag_bytes() == 0
    with pytest.raises(TypeError):  # LightRFT's own errors pass through
        strategy.save_ckpt()
    assert memsaver.state(name) == "paused"
    strategy.maybe_load_optimizer(trainer.optimizer)
    found = states_of(trainer.optimizer)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("flag, asked", [(False, None), (True, False)])
def test_nothing_is_offloaded_unless_requested(sim, flag, asked):
    strategy = Strategy(adam_offload=flag)
    adapt(strategy, offload_optimizer=asked)
    trainer = Trainer("adamw")
    trainer.step()
    strategy.maybe_offload_optimizer(trainer.optimizer)
    trainer.step()
    assert not any(lies_in(state, "optimizer") for state in states_of(trainer.optimizer))


# --- adapt ----------------------------------------------------------------------------------------


def test_close_restores_the_strategys_own_methods(sim, tag):
    strategy, name = Strategy(), tag("optimizer")
    memory = adapt(strategy, tag=name)
    trainer = Trainer("adamw")
    trainer.step()
    strategy.maybe_offload_optimizer(trainer.optimizer)
    memory.close()
    assert memsaver.state(name) == "mapped"
    trainer.step()
    strategy.maybe_sleep_inference_engine()
    strategy.maybe_offload_optimizer(trainer.optimizer)
    assert strategy.calls == ["sleep", "offload"] and memsaver.state(name) == "mapped"
    adapt(strategy, tag=name).close()


def test_invalid_strategies_and_options_are_rejected():
    with pytest.raises(memsaver.ConfigError, match="maybe_sleep_inference_engine"):
        adapt(object())
    strategy = Strategy()
    for options in ({"weights": "drop"}, {"tag": ""}):
        with pytest.raises(memsaver.ConfigError):
            adapt(strategy, **options)
    memory = adapt(strategy)
    with pytest.raises(memsaver.ConfigError, match="already"):
        adapt(strategy)
    memory.close()
