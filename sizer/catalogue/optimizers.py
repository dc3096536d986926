"""The optimizers that can be asked for: their class in torch.optim, and the implementations it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

IMPLEMENTATIONS = ("foreach", "fused", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer: `class_name` in torch.optim with the `options` it is made with; None where nothing steps.

    `implementations` are the `foreach` and `fused` arguments of its __init__ in torch/optim, the same in PyTorch 2.11 and
    2.15; "loop" is foreach=False, fused=False. `no_fused_on` names the backends that have no fused kernel of it.
    """

    key: str
    class_name: str | None
    implementations: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_fused_on: tuple[str, ...] = ()

    def implementations_on(self, backend: str) -> tuple[str, ...]:
        """The implementations that it has on a backend ("cuda", "mps", "cpu")."""
        return tuple(one for one in self.implementations if one != "fused" or backend not in self.no_fused_on)


def _row(key: str, class_name: str | None, *implementations: str, no_fused_on: tuple[str, ...] = (), **options: float):
    return Optimizer(
        key=key, class_name=class_name, implementations=implementations, options=options, no_fused_on=no_fused_on
    )


_ROWS = (
    _row("sgd", "SGD", "foreach", "fused", "loop", lr=1e-3),
    _row("sgd-momentum", "SGD", "foreach", "fused", "loop", lr=1e-3, momentum=0.9),
    _row("adam", "Adam", "foreach", "fused", "loop"),
    _row("adamw", "AdamW", "foreach", "fused", "loop"),
    _row("adafactor", "Adafactor", "foreach", "loop"),
    _row("rmsprop", "RMSprop", "foreach", "loop"),
    # torch/optim/adagrad.py: "fused (CPU and CUDA only)"; aten has no MPS kernel for _fused_adagrad_ up to 2.15.
    _row("adagrad", "Adagrad", "foreach", "fused", "loop", no_fused_on=("mps",)),
    _row("adadelta", "Adadelta", "foreach", "loop"),
    _row("adamax", "Adamax", "foreach", "loop"),
    _row("nadam", "NAdam", "foreach", "loop"),
    _row("radam", "RAdam", "foreach", "loop"),
    _row("muon", "Muon", "loop"),  # torch/optim/_muon.py
    _row("none", None),  # no step; gradients stay
)

OPTIMIZERS: dict[str, Optimizer] = {row.key: row for row in _ROWS}
