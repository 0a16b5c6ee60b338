"""The soak test: random cycles in two processes that compete for a device's memory.

`walk` makes a process's calls. `model` checks the contents of its memory. `memory` allocates the
memory (from torch on a GPU or from the simulated driver). `worker` is the process. `race` runs two
processes and compares their results.
"""
