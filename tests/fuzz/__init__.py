"""The C ABI and the environment's options under a fuzzer: `make fuzz`."""
