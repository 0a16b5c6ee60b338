"""A trainer's memory in tags: optimizer states, gradients and weights that can be paused.

    from memsaver.integrations.trainer import offload

    offloaded = offload(optimizer)  # in the tag "optimizer", with a backup on the host
    with offloaded.paused():  # or memsaver.pause("optimizer")
        generate()
    train()  # bit for bit as if nothing had been paused

For torch's optimizers and modules, those of FSDP2 included. How it is done, and why so:

- **What exists moves once**, storage by storage, into memory of the tag. The storage itself gets
  other memory, so whatever shares it goes along: views, flat buffers, tied parameters, what FSDP2
  keeps for itself. No more than a batch of storages exists twice, and what torch keeps of their
  old segments for tensors that stay in there.
- **What comes later is looked for**, not caught: after a step that made states, after
  `load_state_dict`, and before every pause of the tag, by whatever call. A region around each step
  would put the step's temporaries into the tag as well, with a new pool for each step, and would
  miss gradients (which autograd's threads make), states that were loaded, and lists that an
  optimizer replaces.
- **Gradients** that exist when the tag is paused are part of what must come back, so that pause
  moves them. After `zero_grad()` there are none, and the pause is shorter.
- **A step while the tag is paused** is an error, before anything touches the memory. So is the
  forward of a module and of each of its parts.

Importing this imports no torch.
"""

from memsaver.integrations.trainer.offloading import Offloaded, offload

__all__ = ["Offloaded", "offload"]
