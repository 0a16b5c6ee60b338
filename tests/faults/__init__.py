"""The fault sweep: every call to the driver and the operating system fails, one after the other.

`make faults` runs it. See `scenarios` for what is done under faults, `injections` for which faults,
`checks` for what must hold after each of them, `exceptions` for what cannot be made to hold.
"""
