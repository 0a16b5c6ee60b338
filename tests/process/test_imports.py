"""Tests which modules are loaded when memsaver's modules are imported, in new processes."""

import pytest

pytestmark = pytest.mark.each_python

EXTRAS = {"torch", "numpy", "rich", "typer", "matplotlib", "prometheus_client", "httpx"}
# What only a writer of traces needs; every process would pay for it.
OF_TRACES = {"json", "secrets", "hmac", "random", "memsaver.traces.files"}
ROLLOUT = "memsaver.integrations.rollout"

LIGHT = {
    "import memsaver": EXTRAS | OF_TRACES,
    "import memsaver._memory.preload": EXTRAS,
    "import memsaver._transitions.progress": EXTRAS,
    "import memsaver.integrations.lightrft": {"torch", "lightrft", "sglang"},
    f"from {ROLLOUT} import Request, RolloutEngine, RolloutOutput": {"torch", "sglang"},
}


@pytest.mark.parametrize("statement", LIGHT)
def test_importing_it_imports_no_heavy_module(run_python, statement):
    done = run_python(f"{statement}\nimport sys\nprint({LIGHT[statement]} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


@pytest.mark.parametrize(
    "variables", [{}, {"DRIVER": "/nonexistent.so"}, {"SHARE_BYTES": "nonsense"}], ids=str
)
def test_importing_starts_nothing(run_python, variables):
    # Errors in the environment are reported by the first use.
    done = run_python(
        """
        import memsaver

        assert memsaver.__version__
        assert set(memsaver.__all__) <= set(dir(memsaver))
        maps = open("/proc/self/maps").read()
        assert "libmemsaver.so" in maps
        assert "libcuda" not in maps and "libmemsaver_sim" not in maps
        """,
        **{"MEMSAVER_DRIVER": None, **{f"MEMSAVER_{k}": v for k, v in variables.items()}},
    )
    assert (done.stdout, done.stderr) == ("", "")
