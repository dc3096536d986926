"""Order of the nodes that a backward pass adds to autograd's graph (`create_graph=True`), as on a device.

The engine runs the ready node with the highest sequence number first (torch/csrc/autograd/engine.cpp, ReadyQueue). Each thread
counts the nodes that it creates (ATen/SequenceNumber.cpp). The engine's thread of a device begins at 0, so its nodes run after
those of the forward pass. Backward passes over meta tensors run in the caller's thread, so its later nodes are renumbered too.
Read in PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr

_NUMBERED = "numbered as on a device"  # of a node's metadata


@contextmanager
def nodes_numbered_as_on_device() -> Iterator[None]:
    """Assign nodes of backward passes the numbers of a separate thread within the context."""
    run = torch.autograd.graph._engine_run_backward
    created, mixes = 0, False  # nodes created by backward passes; whether a graph may mix them with the caller's
    counted: list[tuple[int, int]] = []  # by the first number after each such pass, `created`

    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal created, mixes
        if mixes:
            _number_anew(outputs, counted)
        first, before = _get_sequence_nr(), created
        results = run(outputs, *args, **kwargs)
        if len(args) > 2 and args[2]:  # create_graph, in the calls of torch.autograd
            mixes = True
            gradients = results if results and not kwargs.get("accumulate_grad") else _gradients_of(outputs)
            for node in _reachable((one.grad_fn for one in gradients if one is not None), first):
                node._set_sequence_nr(node._sequence_nr() - first + created)
                node.metadata[_NUMBERED] = True
        if (number := _get_sequence_nr()) > first:
            created = before + number - first  # including those of nested passes
            counted.append((number, created))
        return results

    with (
        mock.patch.object(torch.autograd.graph, "_engine_run_backward", run_backward),
        mock.patch.object(torch.autograd, "_engine_run_backward", run_backward),
    ):
        yield


def _number_anew(outputs: Iterable[Any], counted: Sequence[tuple[int, int]]) -> None:
    """Renumber the caller's nodes as if nodes of backward passes were not counted."""
    for node in _all_nodes(getattr(output, "grad_fn", None) or getattr(output, "node", None) for output in outputs):
        if hasattr(node, "variable") or _NUMBERED in node.metadata:
            continue
        number = node._sequence_nr()
        node._set_sequence_nr(number - max((more for first, more in counted if first <= number), default=0))
        node.metadata[_NUMBERED] = True


def _reachable(roots: Iterable[Any], first: int) -> list[Any]:
    """Return the nodes with numbers from `first` on that are connected to some nodes through such nodes; leaves have no number."""
    found: dict[Any, None] = {}
    left = [*roots]
    while left:
        node = left.pop()
        if node is None or node in found or hasattr(node, "variable") or node._sequence_nr() < first:
            continue
        found[node] = None
        left += [other for other, _ in node.next_functions]
    return [*found]


def _gradients_of(outputs: Iterable[Tensor]) -> list[Tensor | None]:
    """Return the gradients of the leaves from which tensors were computed."""
    return [node.variable.grad for node in _all_nodes(output.grad_fn for output in outputs) if hasattr(node, "variable")]


def _all_nodes(roots: Iterable[Any]) -> dict[Any, None]:
    found: dict[Any, None] = {}
    left = [*roots]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found[node] = None
            left += [other for other, _ in node.next_functions]
    return found
