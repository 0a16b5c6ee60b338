"""What trainers hold their memory in: shared storages, views, wrappers, groups, loaded states."""

import io

import pytest

import memsaver
from memsaver.integrations.trainer import offload

torch = pytest.importorskip("torch")

from trainers import Trainer, bytes_of, lies_in, plain_model, states_of  # noqa: E402


def assert_same_steps(trainer, expected, offloaded, steps=6):
    """Steps with pauses between them are those of the other trainer."""
    for step in range(steps):
        trainer.step()
        expected.step()
        with offloaded.paused():
            pass
        assert trainer.contents() == expected.contents(), step


# --- shared storages ------------------------------------------------------------------------------


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(32, 32)
        self.second = torch.nn.Linear(32, 32)
        self.second.weight = self.first.weight

    def forward(self, x):
        return self.second(self.first(x))


class Flat(torch.nn.Module):
    """All parameters are views of one buffer, as in flattened trainers."""

    def __init__(self):
        super().__init__()
        self.layers = plain_model()
        flat = torch.cat([p.detach().reshape(-1) for p in self.layers.parameters()])
        at = 0
        for parameter in self.layers.parameters():
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.flat = [flat]  # not a buffer: nothing tells of it

    def forward(self, x):
        return self.layers(x)


class Odd(torch.nn.Module):
    """Parameters that are not contiguous, empty, scalar, of other types; a buffer."""

    def __init__(self):
        super().__init__()
        self.strided = torch.nn.Parameter(torch.randn(32, 16).t())
        self.sliced = torch.nn.Parameter(torch.randn(16, 64)[:, ::2].detach())
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.wide = torch.nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))

    def forward(self, x):
        self.count += 1
        y = x @ self.strided.t() + x @ self.sliced.t() + self.empty.sum()
        return y * self.scalar + self.wide


@pytest.mark.parametrize("model", [Tied, Flat, Odd])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_models_of_every_layout(sim, tag, model, optimizer):
    trainer, expected = Trainer(optimizer, model), Trainer(optimizer, model)
    shapes = [(p.shape, p.stride(), p.dtype) for p in trainer.model.parameters()]
    parameters = list(trainer.model.parameters())
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    assert_same_steps(trainer, expected, offloaded)
    assert [(p.shape, p.stride(), p.dtype) for p in trainer.model.parameters()] == shapes
    assert all(a is b for a, b in zip(trainer.model.parameters(), parameters, strict=True))
    with offloaded.paused():
        assert sim.tag_bytes() == 0


def test_tied_parameters_count_once_and_stay_tied(sim, tag):
    model = Tied()
    nbytes = model.first.weight.nbytes + model.first.bias.nbytes + model.second.bias.nbytes
    offloaded = offload(model, tag=tag())
    assert offloaded.bytes == nbytes
    assert model.second.weight is model.first.weight


def test_views_that_nobody_told_of_go_along(sim, tag):
    model = Flat()
    flat = model.flat[0]
    offloaded = offload(model, tag=tag())
    assert lies_in(flat, offloaded.tag)
    with torch.no_grad():
        flat.fill_(3)
    assert all(bool((p == 3).all()) for p in model.parameters())
    with offloaded.paused():
        assert not sim.accessible(flat.data_ptr())
    assert bool((flat == 3).all())


def test_states_that_are_views_of_one_buffer(sim, tag):
    # As some optimizers keep them: flat, with a view for each parameter.
    trainer, expected = Trainer("sgd_momentum"), Trainer("sgd_momentum")
    for one in (trainer, expected):
        one.step()
        flat = torch.cat([s["momentum_buffer"].reshape(-1) for s in one.optimizer.state.values()])
        at = 0
        for parameter, state in one.optimizer.state.items():
            state["momentum_buffer"] = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
    offloaded = offload(trainer.optimizer, tag=tag())
    assert offloaded.bytes == flat.nbytes
    storages = {s.untyped_storage().data_ptr() for s in states_of(trainer.optimizer)}
    assert len(storages) == 1
    assert_same_steps(trainer, expected, offloaded)


# --- optimizers -----------------------------------------------------------------------------------


def moments_of(trainer):
    states = trainer.optimizer.state.values()
    return [state[name] for state in states for name in ("exp_avg", "exp_avg_sq")]


class MasterWeights:
    """A half-precision model whose optimizer has float masters."""

    def __init__(self):
        torch.manual_seed(7)
        self.model = plain_model().to(torch.bfloat16)
        self.masters = [p.detach().float() for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-2)
        self.done = 0

    def step(self):
        generator = torch.Generator().manual_seed(self.done)
        x = torch.randn(4, 32, generator=generator).to(torch.bfloat16)
        self.model(x).square().mean().backward()
        for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        self.optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(self.masters, self.model.parameters(), strict=True):
                parameter.copy_(master)
        self.done += 1

    def contents(self):
        tensors = [*self.model.parameters(), *self.masters, *states_of(self.optimizer)]
        return [bytes_of(tensor) for tensor in tensors]


@pytest.mark.parametrize("by", ["parameters", "tensors"])
def test_master_weights(sim, tag, by):
    trainer, expected = MasterWeights(), MasterWeights()
    if by == "parameters":
        offloaded = offload(trainer.optimizer, parameters=True, tag=tag())
    else:
        offloaded = offload(trainer.optimizer, trainer.masters, tag=tag())
    assert all(lies_in(master, offloaded.tag) for master in trainer.masters)
    assert_same_steps(trainer, expected, offloaded)
    with offloaded.paused():
        assert sim.tag_bytes() == 0
        trainer.model(torch.ones(1, 32, dtype=torch.bfloat16))  # its weights stay


def test_a_group_that_is_added_later(sim, tag):
    def make():
        trainer = Trainer()
        trainer.optimizer = torch.optim.AdamW(trainer.model[0].parameters(), lr=1e-2)
        return trainer

    trainer, expected = make(), make()
    offloaded = offload(trainer.optimizer, parameters=True, tag=tag())
    assert_same_steps(trainer, expected, offloaded, 2)
    for one in (trainer, expected):
        one.optimizer.add_param_group({"params": list(one.model[3].parameters()), "lr": 1e-3})
    trainer.step()
    expected.step()
    grouped = [*trainer.model[0].parameters(), *trainer.model[3].parameters()]
    assert all(lies_in(moment, offloaded.tag) for moment in moments_of(trainer))
    assert all(lies_in(p, offloaded.tag) for p in grouped)
    assert offloaded.bytes_elsewhere == sum(p.grad.nbytes for p in grouped)
    assert_same_steps(trainer, expected, offloaded, 3)


def test_several_optimizers_in_one_tag_or_in_two(sim, tag):
    trainers, expected = [Trainer(), Trainer("rmsprop")], [Trainer(), Trainer("rmsprop")]
    both = offload([trainer.optimizer for trainer in trainers], tag=tag("both"))
    for one, other in zip(trainers, expected, strict=True):
        assert_same_steps(one, other, both)
    first = Trainer("adam_amsgrad")
    second = Trainer("sgd_momentum")
    apart = [offload(first.optimizer, tag=tag("first")), offload(second.optimizer, tag=tag("b"))]
    first.step()
    second.step()
    with apart[0].paused():
        second.step()
        with pytest.raises(memsaver.InvalidStateError):
            first.step()


def test_two_handles_on_one_tag(sim, tag):
    trainer, expected = Trainer(), Trainer()
    name = tag()
    offload(trainer.model, tag=name)
    offloaded = offload(trainer.optimizer, tag=name)
    assert_same_steps(trainer, expected, offloaded)


def test_load_state_dict_after_offloading(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    assert_same_steps(trainer, expected, offloaded, 3)
    saved = io.BytesIO()
    torch.save([trainer.model.state_dict(), trainer.optimizer.state_dict()], saved)
    assert_same_steps(trainer, expected, offloaded, 2)
    for one in (trainer, expected):
        saved.seek(0)
        model, optimizer = torch.load(saved)
        one.model.load_state_dict(model)
        one.optimizer.load_state_dict(optimizer)
        one.optimizer.zero_grad()
        one.done = 3
    assert all(lies_in(moment, offloaded.tag) for moment in moments_of(trainer))
    assert_same_steps(trainer, expected, offloaded, 3)


def test_a_state_dict_that_shares_tensors_with_the_optimizer(sim, tag):
    # torch keeps tensors of the dict that are on the right device.
    trainer, expected = Trainer(), Trainer()
    for one in (trainer, expected):
        one.step()
    offloaded = offload(trainer.optimizer, tag=tag())
    kept = trainer.optimizer.state_dict()
    trainer.optimizer.load_state_dict(kept)
    assert_same_steps(trainer, expected, offloaded)


def test_steps_inside_the_backward(sim, tag):
    # Optimizers that step as soon as a gradient is there, on autograd's threads.
    def make():
        trainer = Trainer("sgd_momentum")
        trainer.optimizers = {
            p: torch.optim.AdamW([p], lr=1e-2) for p in trainer.model.parameters()
        }

        def step(parameter):
            trainer.optimizers[parameter].step()
            trainer.optimizers[parameter].zero_grad()

        for parameter in trainer.model.parameters():
            hooks.append(parameter.register_post_accumulate_grad_hook(step))
        return trainer

    hooks = []
    trainer, expected = make(), make()
    offloaded = offload(list(trainer.optimizers.values()), trainer.model, tag=tag())
    for number in range(4):
        trainer.backward(number)
        expected.backward(number)
        with offloaded.paused():
            assert sim.tag_bytes() == 0
        for one, other in zip(
            trainer.optimizers.values(), expected.optimizers.values(), strict=True
        ):
            ours, theirs = states_of(one), states_of(other)
            assert [*map(bytes_of, ours)] == [*map(bytes_of, theirs)]
        assert trainer.contents() == expected.contents()
    for hook in hooks:
        hook.remove()


def test_a_module_that_is_converted_afterwards(sim, tag):
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.model, tag=tag())
    for one in (trainer, expected):
        one.model.double().float()  # torch replaces what the parameters hold
    assert not lies_in(trainer.model[0].weight, offloaded.tag)
    assert_same_steps(trainer, expected, offloaded)
    assert lies_in(trainer.model[0].weight, offloaded.tag)


def test_an_optimizer_inside_another(sim, tag):
    class Accelerated(torch.optim.Optimizer):
        def __init__(self, optimizer):
            self.optimizer = optimizer

    trainer, expected = Trainer(), Trainer()
    offloaded = offload(Accelerated(trainer.optimizer), tag=tag())
    assert_same_steps(trainer, expected, offloaded)
    assert offloaded.bytes > 0


# --- wrappers -------------------------------------------------------------------------------------


def test_a_tensor_that_wraps_others(sim, tag):
    class Pair(torch.Tensor):
        @staticmethod
        def __new__(cls, codes, scale):
            return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

        def __init__(self, codes, scale):
            self.codes, self.scale = codes, scale

        def __tensor_flatten__(self):
            return ["codes", "scale"], None

        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            return cls(inner["codes"], inner["scale"])

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            raise AssertionError(f"nothing is to be computed: {function}")

    trainer = Trainer()
    codes, scale = torch.arange(64, dtype=torch.uint8), torch.ones(4)
    trainer.optimizer.state[next(trainer.model.parameters())]["quantized"] = Pair(codes, scale)
    offloaded = offload(trainer.optimizer, tag=tag())
    assert offloaded.bytes == codes.nbytes + scale.nbytes
    with offloaded.paused():
        assert not sim.accessible(codes.data_ptr())
    assert codes.tolist() == list(range(64))


class Sparse(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(32, 16, sparse=True)

    def forward(self, x):
        return self.table(x.abs().mul(10).long() % 32)


def test_sparse_gradients_stay(sim, tag):
    trainer, expected = Trainer(model=Sparse), Trainer(model=Sparse)
    for one in (trainer, expected):
        one.optimizer = torch.optim.SparseAdam(one.model.parameters(), lr=1e-2)
    offloaded = offload(trainer.optimizer, trainer.model, tag=tag())
    for _ in range(3):
        for one in (trainer, expected):
            one.optimizer.zero_grad()
            one.backward()
        with offloaded.paused():
            assert sim.tag_bytes() == 0
            assert trainer.model.table.weight.grad.to_dense().shape == (32, 16)  # can be read
        for one in (trainer, expected):
            one.optimizer.step()
            one.done += 1
        assert bytes_of(trainer.model.table.weight) == bytes_of(expected.model.table.weight)


def test_lazy_parameters_come_when_they_are_there(sim, tag):
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, 8))
    offloaded = offload(model, tag=tag())
    model(torch.ones(2, 32))
    assert not lies_in(model[0].weight, offloaded.tag)
    with offloaded.paused():
        assert lies_in(model[0].weight, offloaded.tag)
        assert sim.tag_bytes() == 0
