"""Random walks through states that individual tests do not reach. See `__main__`."""
