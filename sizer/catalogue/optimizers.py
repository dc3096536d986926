"""The available optimizers: their class, in torch.optim or in another package, and its implementations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from types import MappingProxyType

from sizer.base.errors import BuildError

BITSANDBYTES, TORCHAO = "bitsandbytes", "torchao"
IMPLEMENTATIONS = ("foreach", "fused", "loop")


@dataclass(frozen=True, slots=True, kw_only=True)
class Optimizer:
    """One optimizer: `class_name` in `module`, constructed with `options`; None for no optimizer.

    - `implementations`: the `foreach` and `fused` arguments of its __init__ in torch/optim, the same in PyTorch 2.11 and 2.15;
      "loop" is foreach=False, fused=False. Empty if the optimizer has a single implementation.
    - `no_fused_on`: backends without a fused kernel.
    - `paged_bytes`: state bytes per element in managed memory, on the host, for parameters of at least PAGED_FROM elements.
    - `compiled`: the optimizer compiles its step.
    """

    key: str
    class_name: str | None
    implementations: tuple[str, ...]
    options: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    no_fused_on: tuple[str, ...] = ()
    module: str = "torch.optim"
    paged_bytes: int = 0
    compiled: bool = False

    @property
    def package(self) -> str:
        """The package of its class."""
        return self.module.partition(".")[0]

    @property
    def has_kernels(self) -> bool:
        """Return True if its step runs kernels of its package; other steps call PyTorch's operators, on any device."""
        return self.package in (BITSANDBYTES, TORCHAO)

    def implementations_on(self, backend: str) -> tuple[str, ...]:
        """Return the implementations on a backend ("cuda", "mps", "cpu")."""
        return tuple(one for one in self.implementations if one != "fused" or backend not in self.no_fused_on)


def _row(key: str, class_name: str | None, *implementations: str, no_fused_on: tuple[str, ...] = (), **options: float):
    return Optimizer(
        key=key, class_name=class_name, implementations=implementations, options=options, no_fused_on=no_fused_on
    )


def _of_bitsandbytes(key: str, class_name: str, *, paged_bytes: int = 0, **options: float) -> Optimizer:
    """Return an optimizer of bitsandbytes (bitsandbytes/optim, 0.50); Sizer models only its CUDA kernels."""
    return Optimizer(
        key=key,
        class_name=class_name,
        implementations=(),
        options=options,
        module=f"{BITSANDBYTES}.optim",
        paged_bytes=paged_bytes,
    )


def _of_torchao(key: str, class_name: str) -> Optimizer:
    """Return an optimizer of torchao (torchao/optim/adam.py, 0.18).

    torch.compile makes one kernel of its step for each parameter.
    """
    return Optimizer(key=key, class_name=class_name, implementations=(), module=f"{TORCHAO}.optim", compiled=True)


def _of_transformers(key: str, class_name: str, **options: float) -> Optimizer:
    """Return an optimizer of transformers (transformers/optimization.py, 5.24), with the options that its Trainer passes."""
    return Optimizer(key=key, class_name=class_name, implementations=(), options=options, module="transformers.optimization")


PAGED_FROM = 100_000  # bitsandbytes/optim/optimizer.py, 0.50: get_state_buffer

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
    _of_transformers("adafactor-transformers", "Adafactor", lr=1e-3, scale_parameter=False, relative_step=False),
    _of_bitsandbytes("adamw-8bit", "AdamW8bit"),
    _of_bitsandbytes("paged-adamw-8bit", "PagedAdamW8bit", paged_bytes=2),
    _of_bitsandbytes("paged-adamw", "PagedAdamW32bit", paged_bytes=8),
    _of_bitsandbytes("lion", "Lion32bit"),
    _of_bitsandbytes("lion-8bit", "Lion8bit"),
    _of_bitsandbytes("sgd-8bit", "SGD8bit", lr=1e-3, momentum=0.9),
    _of_bitsandbytes("ademamix-8bit", "AdEMAMix8bit"),
    _of_torchao("adamw-ao-8bit", "AdamW8bit"),
    _of_torchao("adamw-ao-4bit", "AdamW4bit"),
    _of_torchao("adamw-ao-fp8", "AdamWFp8"),
    _row("none", None),  # no step; gradients stay
)

OPTIMIZERS: dict[str, Optimizer] = {row.key: row for row in _ROWS}
_OF_TRAINERS = {  # names in trainers' configs, and the corresponding items of a query
    "adamw": {"optimizer": "adamw"}, "adamw_torch": {"optimizer": "adamw"}, "adamw_hf": {"optimizer": "adamw"},
    "adamw_torch_fused": {"optimizer": "adamw", "optimizer_impl": "fused"}, "adam": {"optimizer": "adam"},
    "adamw_8bit": {"optimizer": "adamw-8bit"}, "adamw_bnb_8bit": {"optimizer": "adamw-8bit"},
    "adamw8bit": {"optimizer": "adamw-8bit"}, "pagedadamw": {"optimizer": "paged-adamw"},
    "paged_adamw": {"optimizer": "paged-adamw"}, "paged_adamw_32bit": {"optimizer": "paged-adamw"},
    "paged_adamw_8bit": {"optimizer": "paged-adamw-8bit"}, "pagedadamw8bit": {"optimizer": "paged-adamw-8bit"},
    "adafactor": {"optimizer": "adafactor-transformers"}, "torch.optim.adafactor": {"optimizer": "adafactor"},
    "sgd": {"optimizer": "sgd"}, "rmsprop": {"optimizer": "rmsprop"},
    "adagrad": {"optimizer": "adagrad"}, "lion": {"optimizer": "lion"}, "lion_32bit": {"optimizer": "lion"},
    "lion_8bit": {"optimizer": "lion-8bit"}, "ademamix_8bit": {"optimizer": "ademamix-8bit"},
    "adamw_torch_8bit": {"optimizer": "adamw-ao-8bit"}, "adamw_torch_4bit": {"optimizer": "adamw-ao-4bit"},
}  # fmt: skip


def items_of_optimizer(name: str) -> dict[str, str] | None:
    """Return the items of a query for an optimizer's name in the config of a trainer, None for an unknown one."""
    whole = name.lower()
    last = whole.rpartition(".")[2]
    return _OF_TRAINERS.get(whole) or _OF_TRAINERS.get(last) or _OF_TRAINERS.get(last.replace("_", ""))


def check_installed(name: str) -> None:
    """Raise BuildError if an optimizer's package is not installed; `name` is a key of OPTIMIZERS."""
    package = OPTIMIZERS[name].package
    if find_spec(package) is None:
        raise BuildError(f"{package} is not installed", given=f"optimizer={name}", todo=f"pip install {package}")
