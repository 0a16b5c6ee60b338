"""A trainer's memory in tags: optimizer states, gradients and weights that can be paused.

    from memsaver.integrations.trainer import offload

    offloaded = offload(optimizer)  # in the tag "optimizer", with a backup on the host
    with offloaded.paused():  # or memsaver.pause("optimizer")
        generate()
    train()  # bit for bit as if nothing had been paused

Supports torch's optimizers and modules, including those of FSDP2. The approach and its reasons:

- **Existing memory moves once**, storage by storage, into the tag. The storage itself is
  reallocated, so everything that shares it moves too: views, flat buffers, tied parameters,
  FSDP2's own references. At most one batch of storages exists twice, plus the old segments that
  torch keeps for other tensors in them.
- **New memory is found by searching, not by interception**: after a step that created states,
  after `load_state_dict`, and before every pause of the tag, however it is requested. A region
  around each step would put the step's temporaries into the tag as well, with a new pool for each
  step, and would miss gradients (which autograd's threads create), loaded states, and lists that
  an optimizer replaces.
- **Gradients** that exist when the tag is paused must be restored by the resume, so the pause
  moves them into the tag. After `zero_grad()` there are none, and the pause is shorter.
- **A step while the tag is paused** raises an error before anything accesses the memory. So does
  the forward pass of a module and of each of its parts.

Importing this package does not import torch.
"""

from .offloading import Offloaded, offload

__all__ = ["Offloaded", "offload"]
