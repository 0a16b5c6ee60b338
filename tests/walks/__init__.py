"""Random walks over situations that single tests do not reach: see `__main__`."""
