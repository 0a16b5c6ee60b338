"""Tests shareable tensors in the real queues and pipes of torch.multiprocessing."""

from __future__ import annotations

import pytest
from process_code import code

pytest.importorskip("torch")

pytestmark = pytest.mark.each_python

WORK = """
def add_ten(queue, simple, pipe):
    for receive in (queue.get, simple.get, pipe.recv):
        tensors = receive()
        pipe.send([(t.tolist(), t.stride(), t.storage_offset()) for t in tensors])
        tensors[0].add_(10)
        pipe.send("written")
        pipe.send(pipe.recv() == "read" and tensors[0].tolist())
        del tensors
"""


def test_queues_and_pipes_send_tensors_without_a_copy(run_python, tmp_path):
    """A `Queue` pickles on its own thread; a `SimpleQueue` and a `Pipe` pickle on the caller's
    thread.
    """
    (tmp_path / "work_of_child.py").write_text(WORK)
    (tmp_path / "main.py").write_text(
        code(
            """
            import torch
            from work_of_child import add_ten

            def main():
                memsaver.configure(importer_seconds=20)
                with memsaver.region("weights", backup="host", shareable=True):
                    mine = simulator.empty((3, 4), dtype=torch.int32)
                mine.copy_(torch.arange(12).reshape(3, 4))
                context = torch.multiprocessing.get_context("spawn")
                queue, simple, (pipe, theirs) = (
                    context.Queue(), context.SimpleQueue(), context.Pipe()
                )
                child = context.Process(
                    target=add_ten, args=(queue, simple, theirs), daemon=True
                )
                child.start()
                physical = sim.physical()
                for send in (queue.put, simple.put, pipe.send):
                    sent = [mine[1:], mine.T]
                    facts = [(t.tolist(), t.stride(), t.storage_offset()) for t in sent]
                    send(sent)
                    assert pipe.poll(30) and pipe.recv() == facts
                    assert pipe.poll(30) and pipe.recv() == "written"
                    assert mine[0].tolist() == [0, 1, 2, 3]
                    assert mine[1:].tolist() == [[x + 10 for x in row] for row in facts[0][0]]
                    mine[1, 0] = -5
                    pipe.send("read")
                    assert pipe.poll(30) and pipe.recv() == mine[1:].tolist()
                    memsaver.pause("weights")  # at once
                    assert sim.physical() < physical
                    memsaver.resume("weights")
                    assert sim.physical() == physical
                child.join(30)
                assert child.exitcode == 0 and sim.violations() == []

            if __name__ == "__main__":
                main()
            """
        )
    )
    run_python(
        f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        f"runpy.run_path({str(tmp_path / 'main.py')!r}, None, '__main__')",
        with_torch=True,
    )
