"""The model test: random sequences of calls, on several threads and under faults, against a model.

`make model` runs it. `machine` and `calls` are what is done, `expected` is what must be true
afterwards (the model), `checks` compares the two, `place` is the process's simulated devices,
`chances` which calls faults meet, `worker` a process that goes on until it has done so many
operations.
"""
