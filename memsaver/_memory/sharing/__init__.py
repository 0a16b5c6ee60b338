"""Send tensors of shareable regions to other processes, without a copy.

`sending` reduces a tensor to its place in the sender's memory, and keeps its memory for the
receiver. `exporter` is the sender's server: it sends the descriptors of the memory to processes of
the same user. `importing` maps the memory and makes tensors of it, and `peers` is the receiver's
connection to a sender. `wire` has the messages between the two.

A message refers to memory by its extents (pieces of physical memory), which have numbers that a
process never uses twice. A receiver maps each extent once, and keeps it mapped for later messages
until the sender requests its release: because a pause waits for it, or the memory was freed.
"""
