"""Tests tensors in shareable regions in another process: contents, views and shared memory."""

from __future__ import annotations

import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
from importing_process import allocations, dumped, received
from looks import held, released_soon

import memsaver
from memsaver import simulator
from memsaver._memory.sharing import sending
from memsaver._runtime.native import _C

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.each_python

MIB = 1 << 20

VIEWS = {
    "whole": lambda t: t,
    "slice": lambda t: t[3:, 1],
    "transposed": lambda t: t.T,
    "offset": lambda t: t.flatten()[5:17:2],
    "bytes": lambda t: t.view(torch.uint8),
    "scalar": lambda t: t[2, 2],
    "empty": lambda t: t[:0],
    "expanded": lambda t: t[:1].expand(7, -1),
    "parameter": lambda t: torch.nn.Parameter(t, requires_grad=False),
    "trained": lambda t: torch.nn.Parameter(t.view(torch.float32)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_keep_shape_strides_offset_and_contents(importer, make, view):
    sent = view(make(8, 6))
    importer.load("x", sent)
    facts = "[list(x.shape), list(x.stride()), x.storage_offset(), str(x.dtype), x.requires_grad]"
    mine = eval(facts, {"x": sent})
    assert importer.ask(facts) == mine
    assert importer.ask("type(x).__name__") == type(sent).__name__
    assert (
        importer.ask("x.view(torch.int32).tolist()" if mine[4] else "x.tolist()")
        == (sent.view(torch.int32) if mine[4] else sent).tolist()
    )


def test_both_processes_see_writes(importer, make):
    mine = make(4, 4)
    importer.load("x", {"layers": [mine[1:]]})
    importer.do("x['layers'][0][0, 0] = -5")
    assert mine[1, 0] == -5
    mine[3, 3] = 77
    assert importer.ask("int(x['layers'][0][2, 3])") == 77


def test_a_storage_is_sent_once_for_all_its_views(importer, make):
    mine = make(8, 8)
    importer.load("x", [mine[2:], mine.T, mine[2:]])
    assert importer.ask("x[0].data_ptr() - x[1].data_ptr()") == 2 * 8 * 4
    importer.do("x[0].zero_()")
    assert importer.ask("int(x[1].sum())") == mine.sum() == sum(range(16))


def test_many_pieces_arrive_in_one_message(importer, name, options):
    """The message contains more pieces than fit, in several address spans."""
    options(slab_bytes=2 * MIB, share_bytes=2 * MIB)
    with memsaver.region(name, shareable=True):
        tensors = [simulator.empty(MIB // 2, dtype=torch.int32) for _ in range(300)]
    for number, tensor in enumerate(tensors):  # a byte of each, because 600 MiB take seconds
        tensor[-1] = number
    importer.load("x", tensors)
    assert importer.ask("[int(t[-1]) for t in x]") == list(range(300))
    assert importer.ask("sum(len(p.extents) for p in peers._peers.values())") == 300
    importer.do("del x; gc.collect()")


def test_memory_stays_mapped_for_the_next_message(importer, make, wait_until):
    mine = make(1000)
    importer.load("x", mine)
    first = importer.ask("x.data_ptr()")
    importer.do("del x; gc.collect()")
    assert _C.importers()
    mine.add_(1)
    importer.load("x", mine)
    assert importer.ask("x.data_ptr()") == first
    assert importer.ask("x[:3].tolist()") == [1, 2, 3]


def test_memory_is_sent_after_a_resume(importer, make, name):
    mine = make(5 * MIB)
    importer.load("x", mine)
    importer.do("del x; gc.collect()")
    memsaver.pause(name)
    assert not _C.importers()
    memsaver.resume(name)
    importer.load("x", mine[:8])
    assert importer.ask("x.tolist()") == list(range(8))


def test_a_tag_that_becomes_shareable_can_be_sent_after_a_resume(importer, make, name):
    with memsaver.region(name, backup="host"):
        before = simulator.empty(16, dtype=torch.int32)
    before.copy_(torch.arange(16))
    make(4)
    with pytest.raises(memsaver.SharingError, match="before the tag became shareable") as caught:
        ForkingPickler.dumps(before)
    assert caught.value.tag == name
    memsaver.pause(name)
    memsaver.resume(name)
    importer.load("x", before)
    assert importer.ask("x.tolist()") == list(range(16))


def test_a_deleted_tensor_is_kept_for_its_receiver(importer, make, name, wait_until):
    data = dumped(make(50))
    assert allocations(name) == 1
    importer.load_pickle("x", data)
    assert importer.ask("x[-2:].tolist()") == [48, 49]
    importer.do("del x; gc.collect()")
    wait_until(lambda: allocations(name) == 0)
    wait_until(lambda: not _C.importers())  # the memory is released in the other process too


def test_a_tensor_that_nobody_receives_is_freed(sim, make, name, options, wait_until):
    options(importer_seconds=0.05)
    ForkingPickler.dumps(make(50))
    wait_until(lambda: allocations(name) == 0)


def test_a_process_can_send_to_itself(sim, make, options, wait_until):
    mine = make(6, 6)
    again = received(mine[1:])
    again[0, 0] = 5
    assert mine[1, 0] == 5 and again.data_ptr() != mine[1:].data_ptr()
    again[:] = 1
    with pytest.raises(memsaver.SharingError, match="cannot be forwarded"):
        ForkingPickler.dumps(again)
    del again


@pytest.mark.parametrize("view", [torch.conj, lambda one: one.conj().imag])
def test_conjugated_and_negated_views_are_refused(sim, name, view):
    with memsaver.region(name, backup="host", shareable=True):
        tensor = simulator.empty(4, dtype=torch.complex64)
    with pytest.raises(memsaver.SharingError, match=r"send tensor\.resolve_conj"):
        ForkingPickler.dumps(view(tensor))


def test_plain_tensors_are_sent_by_torch(make):
    make(4)
    assert received(torch.arange(3)).tolist() == [0, 1, 2]
    assert received(torch.eye(2).to_sparse()).to_dense().tolist() == [[1, 0], [0, 1]]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_nested_tensors_are_sent_with_their_buffer(make):
    buffer = make(4, 4)
    sizes, strides = torch.tensor([[2, 3], [4, 2]]), torch.tensor([[3, 1], [2, 1]])
    strided = torch._nested_view_from_buffer(buffer.flatten(), sizes, strides, torch.tensor([0, 6]))
    jagged = torch.nested.nested_tensor_from_jagged(buffer, torch.tensor([0, 1, 4]))
    for sent in (strided, jagged):
        mine = [part.tolist() for part in sent.unbind()]
        assert [part.tolist() for part in received(sent).unbind()] == mine


def test_other_tags_stay_unexportable(sim, tag, make):
    make(4)
    other = tag("other")
    with memsaver.region(other, backup="host"):
        tensor = simulator.empty(4)
    with pytest.raises(memsaver.ConfigError, match="shareable=True"):
        ForkingPickler.dumps(tensor)
    with pytest.raises(memsaver.SharingError):
        _C.exportable(tensor.data_ptr(), 16)


def test_a_second_library_that_replaces_torchs_reduction(importer, make):
    """SGLang's patch calls torch's function, replaces item 6 of the result, and registers
    itself.
    """
    from torch.multiprocessing import reductions

    mine = make(9)
    original = reductions.reduce_tensor
    registered = ForkingPickler._extra_reducers.copy()

    def patched(tensor):
        function, arguments = original(tensor)
        changed = list(arguments)
        changed[6] = f"GPU-{changed[6]}"
        return function, tuple(changed)

    try:
        ForkingPickler.register(torch.Tensor, patched)
        importer.load("x", mine)
    finally:
        ForkingPickler._extra_reducers = registered
    assert importer.ask("x.tolist()") == list(range(9))


def test_a_swap_keeps_exportable_pages_apart(importer, make, name, tag):
    """Pages of a shareable tag are never mapped for other tags, and pages of other tags are never
    mapped for a shareable tag.
    """
    mine = make(3 * MIB)
    other = tag("other")
    with memsaver.region(other, backup="host"):
        theirs = simulator.empty(3 * MIB, dtype=torch.int32)
    theirs.fill_(3)
    memsaver.pause(other)
    memsaver.swap(out=name, into=other)
    with pytest.raises(memsaver.SharingError):
        _C.exportable(theirs.data_ptr(), 16)
    memsaver.swap(out=other, into=name)
    importer.load("x", mine)
    assert importer.ask("int(x[-1])") == 3 * MIB - 1
    memsaver.resume(other)
    assert int(theirs.sum()) == 9 * MIB


def test_messages_are_pickles_of_memsavers_functions_and_plain_values(make, importer):
    function, arguments = ForkingPickler._extra_reducers[torch.Tensor](make(3))
    assert function.__module__.startswith("memsaver.")
    pickle.dumps(arguments)


def test_a_receiver_for_which_an_exit_waits_gets_its_tensor(run_python):
    code = """
    import atexit
    from multiprocessing.reduction import ForkingPickler
    import memsaver
    from memsaver import simulator
    from memsaver._memory.sharing import sent_storages

    with memsaver.region("t", shareable=True):
        kept = simulator.empty(4)
    ForkingPickler.dumps(kept)
    atexit._run_exitfuncs()
    (token,) = sent_storages._in_flight
    assert sent_storages.find(token) is not None
    """
    run_python(code)


def test_tensors_with_parts_stay_in_their_tag_if_no_tag_is_shareable(run_python):
    code = """
    from multiprocessing.reduction import ForkingPickler
    import torch
    import torch.multiprocessing
    import memsaver
    from memsaver import simulator

    with memsaver.region("t", backup="host"):
        buffer = simulator.empty(16)
    sizes, strides = torch.tensor([[2, 3], [5, 2]]), torch.tensor([[3, 1], [2, 1]])
    nested = torch._nested_view_from_buffer(buffer, sizes, strides, torch.tensor([0, 6]))
    values, indices = buffer[:4], torch.tensor([0, 1, 2, 3])
    with memsaver.region("t", backup="host"):
        inside = simulator.empty(4, dtype=torch.int64).copy_(indices)
    kinds = [
        nested,
        torch.sparse_coo_tensor(inside[None], torch.ones(4)),
        torch.sparse_coo_tensor(indices[None], values),
        torch.sparse_csr_tensor(torch.tensor([0, 4]), indices, values, (1, 4)),
        torch.sparse_csc_tensor(torch.tensor([0, 4]), indices, values, (4, 1)),
    ]
    addresses = buffer.data_ptr(), inside.data_ptr()
    for tensor in kinds:
        try:
            ForkingPickler.dumps(tensor)
        except memsaver.ConfigError as error:
            assert "shareable=True" in str(error)
        else:
            raise AssertionError(f"sent: {tensor}")
    for outside in (torch.ones(3), torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr()):
        ForkingPickler.dumps(outside)
    assert (buffer.data_ptr(), inside.data_ptr()) == addresses
    assert [memsaver.explain(one).tag for one in (buffer, inside)] == ["t", "t"]
    """
    run_python(code)


class Subclass(torch.Tensor):
    pass


@pytest.mark.parametrize("part", ["storage", "typed storage", "subclass"])
def test_storages_stay_in_their_tag(importer, make, name, part):
    tensor = make(4)
    value = {
        "storage": tensor.untyped_storage,
        "typed storage": tensor._typed_storage,
        "subclass": lambda: tensor.as_subclass(Subclass),
    }[part]()
    with pytest.raises(memsaver.SharingError, match=r"send a tensor of type torch\.Tensor"):
        dumped(value)
    assert memsaver.explain(tensor).tag == name and tensor.tolist() == [0, 1, 2, 3]
    del value


def test_a_send_waits_for_a_transition_in_progress(sim, importer, make, name):
    tensor = make(4)
    memsaver.pause(name)
    with held(sim):
        coming = memsaver.resume(name, wait=False)
        assert not sending.can_send(tensor)  # without a wait
        with released_soon(sim):
            importer.load("x", tensor)
    coming.wait()
    assert importer.ask("x.tolist()") == [0, 1, 2, 3]


def test_an_exit_drops_torchs_weak_references(run_python):
    """Otherwise, their finalizers would print tracebacks after torch's modules have been
    unloaded.
    """
    code = """
    import atexit, gc
    from multiprocessing.reduction import ForkingPickler
    from torch.multiprocessing.reductions import StorageWeakRef
    import memsaver
    from memsaver import simulator
    from memsaver._memory.sharing import sent_storages

    def count():
        return sum(isinstance(one, StorageWeakRef) for one in gc.get_objects())

    with memsaver.region("t", shareable=True):
        kept = [simulator.empty(4) for _ in range(2)]
    ForkingPickler.dumps(kept)
    assert count() == 2
    sent_storages.forget_expired(float("inf"))
    atexit._run_exitfuncs()
    assert count() == 0
    """
    run_python(code)
