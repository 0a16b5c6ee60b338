"""The model test: random sequences of calls, on several threads and under faults, against a model.

`make model` runs it. `machine` and `calls` make the calls, `expected` is the model of the state
that must follow, `checks` compares the two, `place` is the process's simulated devices, `chances`
chooses the calls for faults, `importers` are processes that import memory, and `worker` is a
process that runs a number of operations.
"""
