"""The fault sweep: every call to the driver and the operating system fails once per run, in turn.

`make faults` runs it. `scenarios` contains the operations under faults, and `injections` contains
the faults. `checks` contains the invariants that are checked after each fault, and `exceptions`
contains the exemptions.
"""
