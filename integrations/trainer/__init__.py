"""Pausable memory of a trainer: optimizer states, gradients and weights in tags.

    from memsaver.integrations.trainer import offload

    offloaded = offload(optimizer)  # in the tag "optimizer", with a backup on the host
    with offloaded.paused():  # or memsaver.pause("optimizer")
        generate()
    train()  # bit for bit as if nothing had been paused

This package supports torch's optimizers and modules, including those of FSDP2. Its approach:

- **Existing memory is moved into the tag once**, storage by storage. The storage itself is
  reallocated, so all tensors that share the storage also use the new memory: views, flat buffers,
  tied parameters, and FSDP2's own references. At any time, at most one batch of storages exists
  twice. Torch also keeps old segments in which other tensors remain.
- **New memory is found by searching, not by interception**: after a step that created states, after
  `load_state_dict`, and before every pause of the tag by any caller. A region around each step
  would also place the step's temporaries in the tag, and would need a new pool for each step. It
  would still miss gradients (which autograd's threads create), loaded states, and lists that an
  optimizer replaces.
- **Gradients** that exist when the tag is paused must be restored by the resume, so the pause moves
  them into the tag. After `zero_grad()`, no gradients exist, and the pause is shorter.
- **A step while the tag is paused** raises an error before anything accesses the memory. The
  forward pass of a module or of one of its submodules also raises this error.

Importing this package does not import torch.
"""

from .offloading import Offloaded, offload

__all__ = ["Offloaded", "offload"]
