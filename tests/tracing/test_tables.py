"""Tables of operators: what two of them name is refused, and what handlers there are is known to one table alone."""

from __future__ import annotations

import pytest

from sizer.tracing.device import Device
from sizer.tracing.recorder import _HANDLERS
from sizer.tracing.tables import join


def test_tables_are_joined_in_their_order():
    assert list(join({"add": 1}, {"mul": 2}, {})) == ["add", "mul"]


def test_an_operator_in_two_tables_is_refused_by_name():
    with pytest.raises(ValueError, match=r"name index_put, mul twice"):
        join({"add": 1, "mul": 2, "index_put": 3}, {"mul": 2, "sub": 1, "index_put": 3})


def test_no_answer_of_a_device_is_hidden_by_a_handler():
    for device in (Device("cuda", (8, 0)), Device("mps"), Device("cpu")):
        assert not _HANDLERS.keys() & device.answers.keys()
