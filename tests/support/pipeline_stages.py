"""The loop of SGLang's schedulers in a two-stage pipeline; the stages form a torch group."""

from __future__ import annotations

import pickle
import types

from memsaver.integrations.engine import hooking
from memsaver.integrations.sglang import hooks

LOOP = ("process_input_requests", "_pp_send_pyobj_to_next_stage")


class StageLoop:
    """A pipeline stage that receives, handles and forwards requests, and then runs a batch.

    A subclass defines `process_input_requests`. Without `hook`, the loop runs without memsaver's
    hooks.
    """

    def start_loop(self) -> None:
        import torch.distributed as dist

        self.stage = dist.get_rank()
        self.ps = types.SimpleNamespace(pp_rank=self.stage)
        self.pp_group = types.SimpleNamespace(is_last_rank=self.stage == 1)
        self.server_args = types.SimpleNamespace(pp_size=2)
        self.world_group = types.SimpleNamespace(cpu_group=dist.group.WORLD)
        self.mbs, self.work = [None, None], []

    @classmethod
    def hook(cls) -> None:
        """Install memsaver's hooks in this class."""
        for target, (kind, hook) in hooks._hooks_of_requests().items():
            name = target.rsplit(".", 1)[1]
            if name in LOOP:
                setattr(cls, name, hooking.wrapped(kind, getattr(cls, name), hook))
        cls._memsaver_hooks = frozenset(LOOP)

    def _pp_send_pyobj_to_next_stage(self, data, async_send=False):
        import torch
        import torch.distributed as dist

        text = torch.frombuffer(bytearray(pickle.dumps(data)), dtype=torch.uint8)
        return [(dist.isend(part, 1), part) for part in (torch.tensor([len(text)]), text)]

    def receive(self):
        import torch
        import torch.distributed as dist

        size = torch.zeros(1, dtype=torch.long)
        dist.recv(size, 0)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, 0)
        return pickle.loads(text.numpy().tobytes())

    def step(self, requests, batch=None) -> None:
        """Run one round.

        `requests` are the requests that the first stage has received. If `batch` is not None, this
        batch begins.
        """
        self.process_input_requests(requests if self.stage == 0 else self.receive())
        if self.stage == 0:
            self.end_sends()
            self.work = self._pp_send_pyobj_to_next_stage(requests, async_send=True)
        self.mbs.append(batch)
        del self.mbs[0]

    def end_sends(self) -> None:
        for work, _ in self.work:
            work.wait()
