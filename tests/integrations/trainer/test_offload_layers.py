"""Tests forward passes that begin before all parameters of a model have been mapped again."""

import copy

import pytest
import torch
from looks import held, held_memory, released_soon
from torch import nn
from trainers import Trainer

import memsaver
from memsaver.integrations.trainer import offload
from memsaver.integrations.trainer.layers import has_separate_layers, read_by_forward

MIB = 1 << 20
LAYER_BYTES = 64 * MIB  # the bytes between two events of a resume


class Heads(nn.MultiheadAttention):
    """A class that inherits torch's forward pass."""


class Attention(nn.Module):
    """A module with submodules, a shared parameter, and parameters in submodules that cannot be
    called.
    """

    def __init__(self):
        super().__init__()
        self.own = nn.Parameter(torch.ones(4))
        self.listed = nn.ParameterList([torch.ones(4)])
        self.holder = nn.ModuleDict({"scale": nn.ParameterDict({"s": torch.ones(4)})})
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.heads = Heads(4, 2)
        self.register_buffer("factors", torch.ones(4))

    def forward(self, x):
        return x


READ = {
    "": ["own", "factors", "listed.0", "holder.scale.s"],
    "first": ["first.weight"],
    "second": ["first.weight"],
    "heads": [
        "heads.in_proj_weight",
        "heads.in_proj_bias",
        "heads.out_proj.weight",
        "heads.out_proj.bias",
    ],
    "heads.out_proj": ["heads.out_proj.weight", "heads.out_proj.bias"],
}


@pytest.mark.parametrize("path", READ)
def test_a_module_reads_its_own_tensors_and_those_of_parts_that_are_not_called(path):
    model = Attention()
    names = {id(t): name for name, t in [*model.named_parameters(), *model.named_buffers()]}
    held = read_by_forward(model.get_submodule(path))
    assert [names[id(holding.tensor)] for holding in held] == READ[path]


@pytest.mark.filterwarnings("error:The .grad attribute")
def test_gradients_and_all_parts_of_a_compiled_module_are_read():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    assert not list(read_by_forward(model))
    model[0].register_buffer("doubled", model[0].weight * 2)  # torch warns of reads of its `grad`
    assert len(list(read_by_forward(model[0]))) == 3
    del model[0].doubled
    model(torch.ones(4)).sum().backward()
    assert len(list(read_by_forward(model[0]))) == 4
    model.compile(backend="eager")
    assert len(list(read_by_forward(model))) == 8


class Holder(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))


MODELS = {
    "a model": (Attention, True),
    "a list of layers": (lambda: nn.ModuleList([nn.Linear(4, 4)]), True),
    "parameters without a forward pass": (Holder, False),
    "a scripted part": (lambda: nn.Sequential(torch.jit.script(nn.Linear(4, 4))), False),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("model", MODELS)
def test_models_whose_layers_can_be_told_apart(model):
    make, separate = MODELS[model]
    assert has_separate_layers(make()) is separate


# --- forward passes -------------------------------------------------------------------------------


@pytest.fixture
def make_large(sim, tag):
    """Create a two-layer model, its handle, an input and the output."""

    def layer():
        made = nn.utils.skip_init(nn.Linear, 4096, 4096, bias=False)
        with torch.no_grad():
            made.weight.copy_(torch.randn(4096))  # all rows alike, which saves time
        return made

    def make(by_layer=True):
        torch.manual_seed(3)
        model = nn.Sequential(layer(), layer())
        x = torch.randn(1, 4096)
        with torch.no_grad():
            y = model(x)
        offloaded = offload(model, tag=tag(), by_layer=by_layer)
        offloaded.pause()
        return model, offloaded, x, y

    return make


def held_weight(sim, module):
    return held_memory(sim, module.weight.data_ptr(), module.weight.nbytes)


def test_the_first_layer_runs_before_the_last_has_arrived(sim, make_large, wait_until):
    model, offloaded, x, y = make_large()
    assert offloaded.may_overlap
    done = []
    with held_weight(sim, model[1]):
        arrival = offloaded.resume(wait=False)
        model[0].register_forward_hook(lambda *_: done.append(arrival.done()))
        model[0].register_forward_hook(lambda *_: sim.hold_memory(0, 0))
        with torch.no_grad():
            assert torch.equal(model(x), y)
    assert done == [False]
    wait_until(arrival.done)


USES = {
    "the end of the model's forward": lambda model, x: model(x),
    "state_dict": lambda model, x: model.state_dict(),
    "a part's state_dict": lambda model, x: model[0].state_dict(),
    "load_state_dict": lambda model, x: model.load_state_dict(model.state_dict()),
    "an optimizer's step": lambda model, x: torch.optim.SGD(model.parameters(), lr=0.0).step(),
}


def test_other_uses_wait_for_everything(sim, make_large):
    model, offloaded, x, y = make_large()
    for name, use in USES.items():
        offloaded.pause()
        with torch.no_grad(), held_weight(sim, model[1]):
            arrival = offloaded.resume(wait=False)
            model[0](x)
            assert not arrival.done(), name
            with released_soon(sim) as released:
                use(model, x)
                assert released.is_set(), name
            assert torch.equal(model(x), y)


def test_without_the_promise_the_first_layer_waits_for_everything(sim, make_large):
    model, offloaded, x, _ = make_large(by_layer=False)
    with torch.no_grad(), held_weight(sim, model[1]):
        arrival = offloaded.resume(wait=False)
        with released_soon(sim) as released:
            model[0](x)
            assert released.is_set()
        arrival.wait()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_steps_are_bit_equal(sim, tag, optimizer):
    trainer, expected = (Trainer(optimizer, accumulate=True) for _ in range(2))
    model = offload(trainer.model, tag=tag("model"), by_layer=True)
    states = offload(trainer.optimizer, tag=tag("states"))
    for step in range(8):  # half of the pauses find gradients, to which the next backward adds
        sim.stream_delay(0.001 * (step % 3))
        for one in (trainer, expected):
            one.step()
            if step % 2:
                one.optimizer.zero_grad()
        model.pause()  # first, so that it takes the gradients
        states.pause()
        arrivals = [model.resume(wait=False), states.resume(wait=False)]
    for arrival in arrivals:
        arrival.wait()
    assert trainer.contents() == expected.contents()


def test_the_copies_of_a_later_resume_run_after_those_of_the_model(
    sim, make_large, tag, wait_until
):
    model, offloaded, x, y = make_large()
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(LAYER_BYTES // 4))], momentum=0.9)
    optimizer.param_groups[0]["params"][0].grad = torch.ones(LAYER_BYTES // 4)
    states = offload(optimizer, tag=tag())
    optimizer.step()
    states.pause()
    momentum = next(iter(optimizer.state.values()))["momentum_buffer"]
    with held_memory(sim, momentum.data_ptr(), momentum.nbytes):
        arrivals = offloaded.resume(wait=False), states.resume(wait=False)
        with torch.no_grad():
            assert torch.equal(model(x), y)
        wait_until(arrivals[0].done)
        assert not arrivals[1].done()
    arrivals[1].wait()


# --- failures -------------------------------------------------------------------------------------


def test_a_failed_resume_is_an_error_of_the_call_and_loses_nothing(sim, make_large):
    model, offloaded, x, y = make_large()
    for call, nth in (("cuMemCreate", 1), ("cuMemcpyHtoDAsync", 2), ("cuEventRecord", 2)):
        offloaded.pause()
        with sim.fault(call, sim.OUT_OF_MEMORY, nth):
            with pytest.raises(memsaver.MemsaverError) as caught:
                offloaded.resume(wait=False)
        assert caught.value.tag == offloaded.tag and offloaded.state == "paused", call
        with pytest.raises(memsaver.InvalidStateError, match="the model's forward"):
            model(x)
        assert not model.state_dict()["0.weight"].requires_grad  # only refers to the tensor
        offloaded.resume(wait=False)
        with torch.no_grad():
            assert torch.equal(model(x), y), call


def test_a_wait_that_fails_is_an_error_of_the_forward_pass(sim, make_large):
    model, offloaded, x, y = make_large()
    with held(sim):
        arrival = offloaded.resume(wait=False)
        sim.fail("cuEventSynchronize", 1)
    with pytest.raises(memsaver.DriverError, match="cuEventSynchronize"):
        model(x)
    arrival.wait()
    with torch.no_grad():
        assert torch.equal(model(x), y)


def test_a_copy_of_a_model_has_no_hooks(sim, make_large):
    model, offloaded, x, y = make_large()
    offloaded.resume()
    other = copy.deepcopy(model)
    offloaded.pause()
    with torch.no_grad():
        assert torch.equal(other(x), y)
    offloaded.resume()
