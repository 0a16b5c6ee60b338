"""Engines in separate processes, which join weight process groups as SGLang's engines do.

The trainer's leader sends requests to the engines through torch's store.
"""

import os
import time

import torch
import torch.distributed as dist
import weight_engine
from torch.distributed import distributed_c10d as c10d

from memsaver.integrations.engine.errors import EngineDiedError, EngineError
from memsaver.integrations.sglang.replies import Reply

__all__ = ["Remote", "serve"]


def joined(address, port, rank, size, name, kind):
    """Join a process group the way SGLang's `init_custom_process_group` does."""
    url = f"tcp://{address}:{port}"
    made, rank, size = next(c10d.rendezvous(url, rank, size, timeout=c10d.default_pg_timeout))
    made.set_timeout(c10d.default_pg_timeout)
    group, _ = c10d._new_process_group_helper(
        size,
        rank,
        [],
        c10d.Backend(kind),
        c10d.PrefixStore(name, made),
        group_name=name,
        timeout=c10d.default_pg_timeout,
    )
    c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
    return group


def serve(engine, make_manager, rank=0, size=1, group=None):
    """Handle an engine's requests as one of its ranks until the requests end.

    Args:
        engine: the engine's name in the store.
        make_manager: a function that creates a rank's weight updater from the rank's model and
            group.
        rank: this process's rank in the engine.
        size: the number of ranks of the engine.
        group: the engine's process group.
    """
    store, groups, number = c10d._get_default_store(), {}, 0
    model = weight_engine.Model(rank, size)
    manager = make_manager(model, group)
    while True:
        number += 1
        todo, *given = eval(store.get(f"{engine}/todo{number}").decode())
        if todo == "end":
            return
        if todo == "die":
            print("fine", flush=True)  # as the ranks that survive
            os._exit(0)
        if todo == "join":
            address, port, offset, world, name, kind = given
            groups[name] = joined(address, port, offset + rank, world, name, kind)
            answer = (True, "joined")
        elif todo == "leave":
            dist.destroy_process_group(groups.pop(given[0]))
            answer = (True, "left")
        elif todo == "load":
            answer = _load(manager, groups, *given)
        else:
            answer = (model.holds(weight_engine.checkpoint(given[0])), "")
        if rank == 0:
            store.set(f"{engine}/done{number}", repr(answer))


def _load(manager, groups, names, dtypes, shapes, name, text):
    tensors = [torch.empty(s, dtype=getattr(torch, d)) for s, d in zip(shapes, dtypes, strict=True)]
    try:
        for tensor in tensors:
            dist.broadcast(tensor, 0, group=groups[name])
    except (RuntimeError, ValueError) as error:  # torch reports some failures wrongly
        return False, f"the broadcast failed: {error}"
    pairs = list(zip(names, tensors, strict=True))
    output = manager.update_weights_from_distributed(weight_engine.Request(text, tensors=pairs))
    return output.success, output.message


class Remote(weight_engine.Backend):
    """The trainer's handle to an engine in separate processes.

    Attributes:
        refuses: whether loads fail before the engine receives them.
        dies: whether the engine's processes exit during the next load.
    """

    def __init__(self, engine, make_manager, size=1):
        super().__init__(make_manager, 0)
        self.tp_size, self.engine, self.number = size, engine, 0
        self.refuses, self.dies = False, False

    def order(self, *todo):
        """Send a request; return the answer of the engine's first rank."""
        self.number += 1
        store = c10d._get_default_store()
        store.set(f"{self.engine}/todo{self.number}", repr(todo))
        if todo[0] not in ("end", "die"):
            done = f"{self.engine}/done{self.number}"
            while not store.check([done]):  # `get` would block other threads' calls
                time.sleep(0.005)
            return eval(store.get(done).decode())
        return None

    def join_group(self, group, timeout):
        place = group.address, group.port, group.rank_offset, group.world_size
        self.order("join", *place, group.name, group.backend)

    def leave_group(self, group_name, timeout):
        if self.dies:
            raise EngineDiedError("its process ended")
        self.order("leave", group_name)

    def ask(self, name, fields, timeout):
        if name != "update_weights_from_distributed":
            return super().ask(name, fields, timeout)
        if self.refuses:
            raise EngineError("the engine refused")
        if self.dies:
            self.order("die")
            raise EngineDiedError("its process ended")
        self.calls.append("load")
        names = ("names", "dtypes", "shapes", "group_name", "rid")
        answer = self.order("load", *(fields[one] for one in names))
        if answer[0]:
            self.version = fields["weight_version"] or self.version
        return Reply(*answer)
