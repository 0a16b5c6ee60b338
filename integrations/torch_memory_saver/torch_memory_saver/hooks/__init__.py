"""The modes in which allocations are intercepted."""
