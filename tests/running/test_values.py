"""How values are followed on the null device."""

from __future__ import annotations

import torch

from sizer.running import small_values
from sizer.tracing.values.host_draws import LARGEST_DRAW, LEFT_OUT, HostDraws
from tests.null_driver import values as known


def test_following_a_tensor_leaves_its_storage_with_one_owner():
    """Autograd adds to a gradient in place if nobody else holds its storage; a Python object of the storage would hold it."""
    tensor = torch.ones(8)
    before = torch._C._storage_Use_Count(torch._C._storage_address(tensor))
    assert small_values._key(tensor) == torch._C._storage_address(tensor)
    assert known._address(tensor[2:]) == tensor.data_ptr()
    assert torch._C._storage_Use_Count(torch._C._storage_address(tensor)) == before


def test_bounds_of_slices_are_followed():
    rows, start, stop = torch.ones(8, 2), torch.tensor(1), torch.tensor(3)
    found = small_values._tensors(((rows, (slice(start, stop), 0)), {}))
    assert [id(one) for one in found] == [id(rows), id(start), id(stop)]


def test_draws_that_are_left_out_are_noted_once():
    notes: list[str] = []
    draws = HostDraws(lambda tensor: True, notes.append)
    for elements in (8, LARGEST_DRAW + 1, LARGEST_DRAW + 1):
        tensor = torch.empty(elements, device="meta")
        draws.follow(torch.ops.aten.uniform_.default, (tensor,), {})
    assert notes == [LEFT_OUT]
