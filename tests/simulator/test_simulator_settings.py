"""Tests that an error names an invalid variable of the simulated driver and its valid values."""

INVALID = [
    ("MEMSAVER_SIM_MEMORY", "lots", "16GiB"),
    ("MEMSAVER_SIM_MEMORY", "1MiB", "at least 2 MiB"),
    ("MEMSAVER_SIM_MEMORY", "\x1b[31m" + "9" * 80, "?[31m9999"),
    ("MEMSAVER_SIM_DEVICES", "x", "a number of devices, up to 16"),
    ("MEMSAVER_SIM_DEVICES", "17", "a number of devices, up to 16"),
    ("MEMSAVER_SIM_FAULTS", "bogus", "call:nth:code[:times]"),
    ("MEMSAVER_SIM_FAULTS", "cuNone:1:2", "call:nth:code[:times]"),
    ("MEMSAVER_SIM_FAULTS", "cuMemCreate:0:2", "nth counts from 1"),
    ("MEMSAVER_SIM_DEVICES", "0", "set it to 1 or more"),  # read once, so the last
]


def test_an_invalid_variable_is_named(run_python):
    run_python(
        f"""
        import os
        import memsaver
        from refusals import raises
        from memsaver.cli.checks.driver import check_driver

        for name, value, takes in {INVALID!r}:
            os.environ[name] = value
            text = raises(memsaver.NotLoadedError, memsaver.device_memory)
            assert text.startswith(f"the simulated driver does not start: {{name}}="), text
            assert takes in text and "NVIDIA" not in text and text.isprintable(), text
            (found,) = check_driver()
            assert found.level == "bad" and found.text == text
            advice = f"correct {{name}}, or unset MEMSAVER_DRIVER to use a GPU"
            assert found.advice == advice, found
            del os.environ[name]
        """
    )


def test_a_variable_that_was_corrected_is_read_again(run_python):
    run_python(
        """
        import os, memsaver
        from refusals import raises
        raises(memsaver.NotLoadedError, memsaver.device_memory)
        os.environ["MEMSAVER_SIM_MEMORY"] = "1GiB"
        assert memsaver.device_memory()[1] == 1 << 30
        """,
        MEMSAVER_SIM_MEMORY="lots",
    )
