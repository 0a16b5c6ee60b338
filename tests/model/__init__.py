"""The model test compares random sequences of calls, on several threads and under faults, with a
model.

`make model` runs it. `machine` and `calls` make the calls. `expected` is the model of the resulting
state. `checks` compares the library with the model. `place` represents the process's simulated
devices. `chances` chooses the calls for faults. `importers` are processes that import memory.
`worker` is a process that runs a given number of operations.
"""
