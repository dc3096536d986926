"""Tables of operators: what two of them name is refused, in the rules of a device, too."""

from __future__ import annotations

import pytest
import torch

from sizer.base.versions import installed_version
from sizer.tracing import device_rules
from sizer.tracing.device import KINDS, Device
from sizer.tracing.operator_tables import join

aten = torch.ops.aten


def test_tables_are_joined_in_their_order():
    assert list(join({"add": 1}, {"mul": 2}, {})) == ["add", "mul"]


def test_an_operator_in_two_tables_is_refused_by_name():
    with pytest.raises(ValueError, match=r"name index_put, mul twice"):
        join({"add": 1, "mul": 2, "index_put": 3}, {"mul": 2, "sub": 1, "index_put": 3})


def test_an_operator_in_two_families_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device_rules.copies, "RESULTS", {**device_rules.copies.RESULTS, aten.native_layer_norm.default: None})
    with pytest.raises(ValueError, match=r"name aten.native_layer_norm.default twice"):
        device_rules._rules.__wrapped__("cpu", installed_version())


@pytest.mark.parametrize("kind", KINDS)
def test_rules_have_every_kind_of_table(kind: str):
    found = device_rules.rules_for(Device(kind, (8, 0) if kind == "cuda" else None))
    assert found.kernels and found.handlers and found.checks and found.shortcuts
    assert bool(found.allocations) == bool(found.results) == (kind != "mps")
    assert (found.blas is not None) == (kind == "cuda")
