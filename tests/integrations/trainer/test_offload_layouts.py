"""Tests the layouts of trainers' memory: shared storages, views and wrappers."""

import pytest
import torch
from trainers import (
    Trainer,
    assert_same_steps,
    bytes_of,
    lies_in,
    plain_model,
    states_of,
)

from memsaver.integrations.trainer import offload

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
    """A model whose parameters are all views of one buffer, as in flattened trainers."""

    def __init__(self):
        super().__init__()
        self.layers = plain_model()
        flat = torch.cat([p.detach().reshape(-1) for p in self.layers.parameters()])
        at = 0
        for parameter in self.layers.parameters():
            parameter.data = flat[at : at + parameter.numel()].view_as(parameter)
            at += parameter.numel()
        self.flat = [flat]  # not registered as a buffer

    def forward(self, x):
        return self.layers(x)


class Odd(torch.nn.Module):
    """A model with buffers and with parameters that are strided, empty, scalar or of other
    types.
    """

    def __init__(self):
        super().__init__()
        self.strided = torch.nn.Parameter(torch.randn(32, 16).t())
        self.sliced = torch.nn.Parameter(torch.randn(16, 64)[:, ::2].detach())
        self.empty = torch.nn.Parameter(torch.empty(0, 4))
        self.scalar = torch.nn.Parameter(torch.tensor(0.5))
        self.wide = torch.nn.Parameter(torch.randn(16, dtype=torch.float64))
        self.register_buffer("count", torch.zeros(1, dtype=torch.int64))
        self.register_buffer("mask", torch.ones(64), persistent=False)

    def forward(self, x):
        self.count += 1
        y = x @ self.strided.t() + x @ self.sliced.t() + self.empty.sum()
        return y * self.scalar + self.wide


@pytest.mark.parametrize("model", [Tied, Flat, Odd])
@pytest.mark.parametrize("optimizer", ["adamw", "sgd_momentum"])
def test_models_of_every_layout_keep_their_parameters(sim, tag, model, optimizer):
    trainer, expected = Trainer(optimizer, model), Trainer(optimizer, model)
    shapes = [(p.shape, p.stride(), p.dtype) for p in trainer.model.parameters()]
    parameters = dict(trainer.model.named_parameters(remove_duplicate=False))
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    held = [t for t in (*trainer.model.parameters(), *trainer.model.buffers()) if t.numel()]
    assert all(lies_in(tensor, offloaded.tag) for tensor in held)
    storages = {t.data_ptr(): t.nbytes() for t in (tensor.untyped_storage() for tensor in held)}
    assert offloaded.bytes == sum(storages.values())  # shared ones count once
    assert_same_steps(trainer, expected, offloaded)
    assert [(p.shape, p.stride(), p.dtype) for p in trainer.model.parameters()] == shapes
    for name, parameter in trainer.model.named_parameters(remove_duplicate=False):
        assert parameter is parameters[name]
    with offloaded.paused():
        assert sim.tag_bytes() == 0


def test_unregistered_views_move_too(sim, tag):
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


@pytest.mark.filterwarnings("error")
def test_views_without_a_valid_graph_change_nothing(sim, tag):
    """Torch raises an error if a program queries whether such a view is a leaf."""
    trainer, expected = Trainer(), Trainer()
    other = torch.ones(4, 2, requires_grad=True) * 1
    views = [*other.unbind(), *other.chunk(2)]
    other.mul_(2)
    with torch.no_grad():
        views += trainer.model[0].weight.unbind()
    trainer.step()
    expected.step()
    for view in views:
        with pytest.raises(RuntimeError, match="modified inplace"):
            _ = view.is_leaf
    offloaded = offload(trainer.model, trainer.optimizer, tag=tag())
    assert lies_in(views[-1], offloaded.tag)
    assert_same_steps(trainer, expected, offloaded)


def test_states_that_are_views_of_one_buffer(sim, tag):
    # Some optimizers store states in a flat buffer, with a view for each parameter.
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


def test_a_broken_wrapper_elsewhere_in_the_process_changes_nothing(sim, tag):
    class Broken(torch.Tensor):
        @staticmethod
        def __new__(cls, kind):
            return torch.Tensor._make_wrapper_subclass(cls, (2,), dtype=torch.float32)

        def __init__(self, kind):
            self.kind = kind

        def __tensor_flatten__(self):
            raise self.kind("no memory")

        @classmethod
        def __tensor_unflatten__(cls, inner, context, size, stride):
            raise AssertionError("nothing is to be built")

        @classmethod
        def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
            return cls(args[0].kind)  # detach

    broken = [torch.nn.Parameter(Broken(kind)) for kind in (AttributeError, KeyError)]
    trainer, expected = Trainer(), Trainer()
    offloaded = offload(trainer.optimizer, tag=tag())
    assert_same_steps(trainer, expected, offloaded)
    assert len(broken) == 2


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
            assert trainer.model.table.weight.grad.to_dense().shape == (32, 16)  # is readable
        for one in (trainer, expected):
            one.optimizer.step()
            one.done += 1
        assert bytes_of(trainer.model.table.weight) == bytes_of(expected.model.table.weight)


def test_lazy_parameters_move_when_they_exist(sim, tag):
    model = torch.nn.Sequential(torch.nn.LazyLinear(8), torch.nn.Linear(8, 8))
    offloaded = offload(model, tag=tag())
    model(torch.ones(2, 32))
    assert not lies_in(model[0].weight, offloaded.tag)
    with offloaded.paused():
        assert lies_in(model[0].weight, offloaded.tag)
        assert sim.tag_bytes() == 0
