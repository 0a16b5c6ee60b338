"""The soak: random cycles in two processes that compete for a device's memory, contents checked.

`walk` is what a process does, `model` what must be true of its memory, `memory` where that lies
(torch's on a GPU, or the simulated driver's), `worker` the process, `race` the two of them and the
figures.
"""
