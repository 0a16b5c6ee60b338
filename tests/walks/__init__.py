"""Random walks through states that single tests do not reach. See `__main__`."""
