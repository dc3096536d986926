"""Findings of the compiler in a step: regions, graph breaks with reasons, recompilations, and code that ran eagerly."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx

from sizer.tape.compiled_code import CompiledCode

_TEXT = 200  # characters of a reason
_OWN = (str(Path(torch.__file__).parent), str(Path(__file__).parents[2]))
_ASSUMED = (
    f"its decisions are those of the installed PyTorch {torch.__version__.partition('+')[0]}",
    "memory that compilation itself takes on the device is not counted",
)
_GRAPHS = "the pool of CUDA graphs stays reserved, and a replay allocates nothing: judge by reserved memory, not by allocated"
_GOT = re.compile(r"got \w+\(['\"](.+?)['\"]\)")


class Findings:
    """Collect compiled code since `start`. `timed` lists choices that a device makes by timing, such as padding.

    `compiled` is True from a compilation on until the step has ended, `has_graphs` once code is recorded in CUDA graphs.
    """

    def __init__(self) -> None:
        self.compiled = self.has_graphs = False
        self.timed: set[str] = set()
        self._forward_flops = self._recomputed_flops = 0
        self._recomputed: Counter[str] = Counter()

    def read(self) -> CompiledCode:
        """Return Dynamo's records."""
        from torch._dynamo import utils

        regions, again, eager = [], [], []
        for one in utils.get_compilation_metrics():
            if not one.is_forward or not one.co_name:
                continue
            where = _function(one.co_name, one.co_filename, one.co_firstlineno)
            if one.recompile_reason:
                again.append(f"{where}: {reason_of(one.recompile_reason)}")
            if one.fail_type and not one.has_guarded_code:
                eager.append(f"{where}: {reason_of(one.fail_reason or one.fail_type)}")
            elif one.graph_op_count:
                regions.append(f"{where}: {one.graph_op_count} operators")
        return CompiledCode(
            regions=_unique(regions),
            graph_breaks=_unique(_break(reason) for reason in utils.graph_break_reasons if reason.graph_break),
            recompilations=_unique(again),
            eager=_unique(eager),
            forward_flops=self._forward_flops,
            recomputed_flops=self._recomputed_flops,
            recomputed=tuple(f"{count} × {name}" for name, count in self._recomputed.most_common()),
            assumptions=(*_ASSUMED, *sorted(self.timed), *((_GRAPHS,) if self.has_graphs else ())),
        )

    def partitioned(self, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        """Note the recomputation in a region's backward pass: nodes that the partitioner has left in both graphs."""
        names = {node.name for node in forward.graph.nodes if node.op == "call_function"}
        again = [node for node in backward.graph.nodes if node.op == "call_function" and node.name in names]
        self._forward_flops += sum(map(_flops, forward.graph.nodes))
        self._recomputed_flops += sum(map(_flops, again))
        targets = (node.target for node in again if isinstance(node.target, torch._ops.OpOverload))
        self._recomputed.update(str(target) for target in targets if not target.is_view)

    @staticmethod
    def start() -> None:
        """Forget Dynamo's records of code that was compiled before."""
        from torch._dynamo import utils

        utils.graph_break_reasons.clear()
        utils.set_compilation_metrics_limit(10_000)
        utils.clear_compilation_metrics()


def _flops(node: fx.Node) -> int:
    """Return the floating-point operations of a node, by PyTorch's formulas for products, convolutions and attention."""
    from torch.fx.experimental.symbolic_shapes import optimization_hint
    from torch.utils.flop_counter import flop_registry

    def known(one: fx.Node) -> Any:
        # converting a symbol to a number would guard it: the code would be compiled again for the next size
        value = one.meta["val"]
        if isinstance(value, torch.SymInt):
            return optimization_hint(value)
        return torch.Size(map(optimization_hint, value.shape)) if isinstance(value, Tensor) and not raw else value

    formula = flop_registry.get(getattr(node.target, "overloadpacket", None)) if node.op == "call_function" else None
    if formula is None:
        return 0
    raw = not hasattr(formula, "__wrapped__")  # registered with get_raw: it reads the tensors
    args, kwargs = (fx.node.map_arg(given, known) for given in (node.args, node.kwargs))
    return optimization_hint(formula(*args, **kwargs, out_val=node.meta["val"] if raw else known(node)))


def line_of_stack(stack: Iterable[Any] | None) -> str | None:
    """Return the file and line of the innermost frame outside of PyTorch and Sizer, None if there is none."""
    theirs = [frame for frame in stack or () if not frame.filename.startswith((*_OWN, "<"))]
    return f"{Path(theirs[-1].filename).name}:{theirs[-1].lineno}" if theirs else None


def reason_of(message: str) -> str:
    """Return the first line of Dynamo's message; if an operator failed, with that operator's error."""
    lines = [line for line in message.splitlines() if line.strip()] or ["no reason given"]
    first = " ".join(lines[:2]) if lines[0].rstrip().endswith("raised:") else lines[0]
    failed = _GOT.search(message)
    return _line(f"{first}: {failed[1]}" if failed else first)


def _break(reason: Any) -> str:
    where = line_of_stack(reason.user_stack)
    return f"{reason_of(reason.reason)}{f' ({where})' if where else ''}"


def _function(name: str, file: str, line: int) -> str:
    """Return a function's name and position, without Dynamo's parts: code after a graph break is a separate function."""
    if file.startswith(_OWN[0]):
        return "a module of torch.nn"
    return f"{name.partition('torch_dynamo_resume_in_')[2].rpartition('_at_')[0] or name} ({Path(file).name}:{line})"


def _line(text: str) -> str:
    return " ".join(text.split())[:_TEXT]


def _unique(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(lines))
