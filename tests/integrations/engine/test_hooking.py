"""Tests hooks around individual functions of an engine's classes and modules."""

from memsaver.integrations.engine import hooking


class Engine:
    def scaled(self, value, by=2):
        return value * by

    @staticmethod
    def joined(first, second="b"):
        return first + second


def test_methods_and_static_methods_are_hooked_once():
    def twice(original, *args):
        return original(*args) * 2

    for name in ("scaled", "joined"):
        for _ in range(2):
            hooking.around(Engine, name, twice)
    engine = Engine()
    assert engine.scaled(value=3) == 12 and engine.scaled(3, by=1) == 6
    assert engine.joined("a") == Engine.joined(first="a") == "abab"
