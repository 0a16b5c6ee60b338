"""Tests that verification finds every wrong byte of a model on a GPU, including fp8 and bf16
weights.
"""

from __future__ import annotations

import sys

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, given, settings
from repository import TESTS

sys.path.append(str(TESTS / "integrations" / "engine"))

from test_held_weights_layouts import check_bytes, models

pytestmark = pytest.mark.gpu


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(model=models(), bit=st.integers(0, 7))
def test_a_flipped_byte_on_a_gpu_is_found_wherever_it_is_and_nothing_else(model, bit):
    model = model.cuda()
    for write in model.writes:
        write.source = write.source.cuda()
    check_bytes(model, bit)
