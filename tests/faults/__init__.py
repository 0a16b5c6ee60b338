"""The fault sweep: in each run, one call to the driver or the operating system fails.

`make faults` runs it. `scenarios` contains the operations under faults, and `injections` contains
the faults. `checks` contains the invariants that are checked after each fault, and `exceptions`
contains the exemptions.
"""
