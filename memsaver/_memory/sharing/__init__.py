"""Send tensors in shareable regions to other processes, without a copy.

`sending` reduces a tensor to its place in the sender's memory, and `sent_storages` keeps the memory
for the receiver. `exporter` is the sender's server: it sends the descriptors of the memory to
processes of the same user. `importing` creates tensors in memory that `peers`, the receiver's
connection to a sender, maps; `uses` describes this memory. `wire` defines the messages between the
two.

A message refers to memory by its extents (pieces of physical memory), whose numbers a process never
reuses. A receiver maps each extent once, and keeps it mapped for later messages until the sender
requests its release, because a pause waits for it or the memory was freed.
"""
