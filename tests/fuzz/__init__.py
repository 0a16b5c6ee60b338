"""Fuzzing of the C ABI and of the environment's options: `make fuzz`."""
