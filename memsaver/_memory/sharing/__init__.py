"""Send tensors in shareable regions to other processes, without a copy.

The module `sending` reduces a tensor to its place in the sender's memory, and `sent_storages` keeps
the memory for the receiver. The module `exporter` is the sender's server, which sends the
descriptors of the memory to processes of the same user. In the receiver, `peers` connects to
senders and maps their memory, `uses` describes this memory, and `importing` creates tensors in it.
The module `wire` defines the messages between senders and receivers.

A message refers to memory by its extents, which are pieces of physical memory. A process never
reuses an extent's number. A receiver maps each extent only once, and keeps it mapped for later
messages until the sender requests its release. The sender requests the release if a pause is
waiting for the extent or if the memory was freed.
"""
