"""Tests that verification finds every wrong byte, for any views, types and overlapping writes."""

import math

import pytest

torch = pytest.importorskip("torch")

import hypothesis.strategies as st  # noqa: E402
from hypothesis import HealthCheck, given, settings  # noqa: E402

from memsaver.integrations.engine.weights import held as held_weights  # noqa: E402
from memsaver.integrations.engine.weights.held import differing, watched  # noqa: E402

REAL = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FLOATS = (*REAL, torch.float8_e4m3fn, torch.float8_e5m2)
OTHERS = (torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool, torch.complex64)
UNNEGATED = (torch.bool, torch.float8_e4m3fn, torch.float8_e5m2)  # not by torch on the CPU
WAYS = ("copy", "index", "foreach", "fill", "half of it twice", "conjugated", "negated")


class Write:
    """A write that a loader performs from its own tensor into a view of a parameter."""

    def __init__(self, name, parameter, dtype, size, stride, offset, way, source):
        self.name, self.parameter, self.way, self.source = name, parameter, way, source
        self.view = (dtype, size, stride, offset)

    def of(self, storage):
        dtype, size, stride, offset = self.view
        whole = torch.empty(0, dtype=dtype, device=storage.device).set_(storage.untyped_storage())
        return whole.as_strided(size, stride, offset)

    def covered(self):
        """Return the parameter's bytes that this write covers."""
        dtype, size, stride, offset = self.view
        wide = max(1 + offset + sum((n - 1) * s for n, s in zip(size, stride, strict=True)), 1)
        numbers = torch.arange(wide).as_strided(size, stride, offset).reshape(-1)
        each = torch.arange(dtype.itemsize)
        return set((numbers[:, None] * dtype.itemsize + each).reshape(-1).tolist())

    def run(self, storage):
        held = self.of(storage)
        if self.way == "index" and held.dim():
            order = torch.arange(held.size(0), device=held.device).flip(0)
            held[order] = self.source.flip(0).to(held.dtype)
        elif self.way == "foreach":
            torch._foreach_copy_([held], [self.source])
        elif self.way == "fill":
            held.zero_()
            held.copy_(self.source)
        elif self.way == "half of it twice" and held.dim():
            held.copy_(self.source.flip(0))
            held[: held.size(0) // 2 + 1].copy_(self.source[: held.size(0) // 2 + 1])
            held.copy_(self.source)
        elif self.way == "conjugated":
            held.conj().copy_(self.source)
        elif self.way == "negated" and held.dtype not in UNNEGATED:
            torch._neg_view(held).copy_(self.source)
        else:
            held.copy_(self.source)


class Model(torch.nn.Module):
    """A model whose parameters are raw bytes, and whose loader writes through the views of
    `writes`.
    """

    def __init__(self, sizes, writes):
        super().__init__()
        self.sizes, self.writes = sizes, writes
        for at, size in enumerate(sizes):
            made = torch.nn.Parameter(torch.zeros(size, dtype=torch.uint8), requires_grad=False)
            self.register_parameter(f"p{at}", made)

    def __repr__(self):
        writes = [(w.name, w.parameter, w.view, w.way, w.source) for w in self.writes]
        return f"Model({self.sizes}, {writes})"

    def load_weights(self, weights):
        for name, _ in weights:
            for write in self.writes:
                if write.name == name:
                    write.run(self.storage(write.parameter))

    def storage(self, at):
        return getattr(self, f"p{at}").data

    def named(self):
        return list({write.name: write.source for write in self.writes}.items())


@st.composite
def models(draw):
    sizes = draw(st.lists(st.integers(24, 40), min_size=1, max_size=2))
    writes = []
    for number in range(draw(st.integers(1, 4))):
        parameter = draw(st.integers(0, len(sizes) - 1))
        dtype = draw(st.sampled_from((*FLOATS, *OTHERS)))
        room = sizes[parameter] // dtype.itemsize
        size, stride, span = [], [], 1
        for _ in range(draw(st.integers(0, 3))):
            step = span * draw(st.integers(1, 2))
            length = draw(st.integers(1, 4))
            if (length - 1) * step + span > room:
                break
            size, stride, span = [*size, length], [*stride, step], (length - 1) * step + span
        order = draw(st.permutations(range(len(size))))
        size, stride = [size[at] for at in order], [stride[at] for at in order]
        offset = draw(st.integers(0, room - span))
        given_as = draw(st.sampled_from(REAL)) if dtype in FLOATS else dtype
        count = math.prod(size)
        raw = draw(
            st.binary(min_size=count * given_as.itemsize, max_size=count * given_as.itemsize)
        )
        if given_as == torch.bool:
            raw = bytes(byte & 1 for byte in raw)
        source = torch.frombuffer(bytearray(raw), dtype=given_as).reshape(size)
        name = f"t{draw(st.integers(0, number))}"
        way = draw(st.sampled_from(WAYS))
        writes.append(Write(name, parameter, dtype, size, stride, offset, way, source))
    return Model(sizes, writes)


def check_bytes(model, bit):
    """Change every third byte of the parameters, one at a time; check that errors name the writes.

    `bit` is the bit to change, and determines which bytes are changed.
    """
    named = model.named()
    assert watched(model, named, model.load_weights)[1] == ()
    assert differing(model, named, model.load_weights) == ()
    for at in range(len(model.sizes)):
        held = model.storage(at)
        covers = [(w.name, w.covered()) for w in model.writes if w.parameter == at]
        for byte in range(bit % 3, len(held), 3):
            held[byte] ^= 1 << bit
            changed = held.clone()
            wanted = {name for name, covered in covers if byte in covered}
            assert set(differing(model, named, model.load_weights)) == wanted, byte
            assert torch.equal(held, changed), "a comparison wrote something"
            held[byte] ^= 1 << bit


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(model=models(), bit=st.integers(0, 7), piece_bytes=st.sampled_from((1, 7, 1 << 20)))
def test_a_flipped_byte_is_found_wherever_it_is_and_nothing_else(model, bit, piece_bytes):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(held_weights, "_PIECE_BYTES", piece_bytes)
        check_bytes(model, bit)
