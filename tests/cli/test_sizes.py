"""Tests the formatting and parsing of sizes in a human-readable form."""

import pytest

from memsaver._runtime.text import size_text
from memsaver.cli.sizes import gibibytes, parse_bytes


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1023 bytes"),
        (1 << 20, "1 MiB"),
        (1280 << 20, "1.25 GiB"),
        (100 << 30, "100 GiB"),
        (25 << 29, "12.5 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_sizes_as_people_read_them(nbytes, text):
    assert size_text(nbytes) == text


def test_a_lower_bound_is_rounded_down():
    nearly = (80 << 30) - 1
    assert size_text(nearly) == "80 GiB" and size_text(nearly, down=True) == "79.9 GiB"
    assert size_text(80 << 30, down=True) == "80 GiB"


def test_sizes_as_people_write_them():
    assert [parse_bytes(text) for text in ("16GiB", "1 KiB", "77")] == [16 << 30, 1024, 77]
    for text in ("", "GiB", "-1", "1.5GiB", "3x", "1GB"):
        with pytest.raises(ValueError, match="is not a size"):
            parse_bytes(text)
    assert [gibibytes(rate << 20) for rate in (5632, 56320, 3539968)] == ["5.50", "55.0", "3,457"]
