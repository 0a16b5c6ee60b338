"""A fixture for the tests of `memsaver doctor`."""

import pytest


@pytest.fixture
def system(plain, tmp_path):
    """Create a fake system root that contains files: `system({"/proc/meminfo": "..."})`."""
    plain.setenv("MEMSAVER_TEST_SYSTEM_ROOT", str(tmp_path))

    def make(files):
        for name, text in files.items():
            file = tmp_path / name.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)

    return make
