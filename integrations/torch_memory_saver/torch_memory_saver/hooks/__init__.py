"""How allocations are caught."""
