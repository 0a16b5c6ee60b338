"""The fault sweep: every call to the driver and the operating system fails, one after the other.

`make faults` runs it. `scenarios` contains the operations under faults, `injections` the faults,
`checks` the invariants that are checked after each fault, and `exceptions` the exemptions.
"""
