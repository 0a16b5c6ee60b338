"""Basic modules for the native library, names and messages, locks, threads and interrupts."""
