"""Deep models, traced with fewer layers: lists of layers that are alike, and the tapes that are unfolded from a few of them.

Which layers are alike is read off the module: the same classes, parameters and attributes, and the same entry in what the config
says of each layer. That the tapes of such layers repeat each other is not taken for granted: three depths are traced
(sizer.tape.unfold), and the forward pass of the whole model. Where these do not agree, the whole model is traced.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import Enum
from functools import cache, partial
from typing import Any

import torch
from torch import nn

from sizer.base.errors import TraceError
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.tape.affine import LIMIT_BYTES
from sizer.tape.stretches import LayersDifferError
from sizer.tape.tape import Tape
from sizer.tape.unfold import Unfolded, unfold
from sizer.tracing.device import Device

LONGEST_PERIOD = 6  # layers, of which a period is made where those of several kinds take turns
FEWEST = 2  # layers that are left at least: one that is the first, one that is the last
# How a tape is unfolded, one after the other: from models so many periods deeper than the shallowest, and so much `earlier`.
ATTEMPTS = (0, 0), (1, 0), (1, 1)
WORTH = 0.8  # of the whole model, what the three depths may have in all: its forward pass comes on top
# What of a module's attributes no step reads: its tensors, told by themselves, and what is called as a state dict is read or made
# (torch/nn/modules/module.py, 2.15).
_UNREAD = frozenset(
    {
        *("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Lists of layers in a module that are equally long, in each of which, from some layer on, each is as the one a period before.

    `stacks` are their dotted paths, `layers` how many each has, `alike_from` the first of those that are alike, `fewest` how many
    are left of them in the shallowest model.
    """

    stacks: tuple[str, ...]
    layers: int
    period: int
    alike_from: int
    fewest: int

    @property
    def periods(self) -> int:
        """Return how many periods the whole model has more than the shallowest one."""
        return (self.layers - self.fewest) // self.period

    def like(self, path: str) -> Iterator[str]:
        """The dotted paths in the whole model of the modules that are as the one with this path."""
        for stack in self.stacks:
            if (match := re.match(rf"{re.escape(stack)}\.(\d+)(?=\.|$)", path)) and int(match[1]) >= self.alike_from:
                first = self.alike_from + (int(match[1]) - self.alike_from) % self.period
                for number in range(first, self.layers, self.period):
                    yield f"{stack}.{number}{path[match.end() :]}"

    @contextmanager
    def shortened(self, module: nn.Module, more: int) -> Iterator[None]:
        """Within the context the module's lists have so many periods `more` than in the shallowest model."""
        layers = self.fewest + more * self.period
        whole = {path: module.get_submodule(path) for path in self.stacks}
        for path, stack in whole.items():
            _put(module, path, stack[:layers])
        try:
            yield
        finally:
            for path, stack in whole.items():
                _put(module, path, stack)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """The tapes of two depths of a model that tell those of all others: a third depth and the forward pass of the whole model have
    shown it. `stacks` are the lists of layers, of a Repeated; `attempt` is one of ATTEMPTS."""

    first: Tape
    second: Tape
    stacks: tuple[str, ...]
    attempt: tuple[int, int]


class DeepTraces:
    """The tapes of a model, from traces of it with fewer layers.

    Its module may be another for each dtype, as quantised ones are. Which layers repeat each other does not hang on what the
    first of these traces was of: what three depths and the forward pass of the whole model have shown for it, two depths show for
    other dtypes, devices, optimizers and batch sizes, and one depth where nothing but sizes differs. `shown` is what was shown
    before, `show` is told what is shown here.
    """

    def __init__(
        self,
        candidates: Sequence[Repeated],
        *,
        shown: Depths | None = None,
        show: Callable[[Depths], None] = lambda depths: None,
    ) -> None:
        self._candidates, self._show = list(candidates), show
        self._known: list[Unfolded] = []
        self._attempt = ATTEMPTS[0]  # the one that led to what is known
        stacks = [one.stacks for one in self._candidates]
        if shown is not None and shown.stacks in stacks:
            del self._candidates[: stacks.index(shown.stacks)]
            self._attempt = shown.attempt
            self._known.append(self._unfolded(self._candidates[0], shown.first, shown.second))

    def trace(self, module: nn.Module, at: Callable[..., Tape], device: Device) -> Tape:
        """The tape that `at()` gives, which traces the `module` as it is then; `at(forward_alone=True)` gives its beginning.

        It is the tape of a trace of the whole module where layers do not repeat each other. The device, which it is traced for,
        knows the choices that were made for the whole module then. Raises what `at` raises.
        """
        while self._candidates:
            try:
                tape = self._trace(module, at, self._candidates[0])
            except LayersDifferError:
                if self._known:
                    break  # of this work alone
                del self._candidates[0]
            except TraceError:
                break
            else:
                device.repeat_choices(self._candidates[0].like)
                return tape
        return at()

    def _trace(self, module: nn.Module, at: Callable[..., Tape], repeated: Repeated) -> Tape:
        @cache
        def shortened(more: int) -> Tape:
            with repeated.shortened(module, more):
                return at()

        for known in reversed(self._known):
            with suppress(LayersDifferError):
                return known.of(shortened(self._attempt[0] + 1))
        if self._known:
            found = self._unfold(shortened, repeated, checked=True)
        else:
            found = self._find(shortened, repeated)
            found.check(at(forward_alone=True))
            first, second = (shortened(self._attempt[0] + more) for more in range(2))
            self._show(Depths(first=first, second=second, stacks=repeated.stacks, attempt=self._attempt))
        if sum(found.tape.sizes) >= LIMIT_BYTES:
            raise LayersDifferError("more bytes than replays add up")
        self._known.append(found)
        return found.tape

    def _find(self, shortened: Callable[[int], Tape], repeated: Repeated) -> Unfolded:
        """Return what three depths show, at the first attempt that shows it."""
        for self._attempt in ATTEMPTS[:-1]:
            with suppress(LayersDifferError):
                return self._unfold(shortened, repeated, checked=False)
        self._attempt = ATTEMPTS[-1]
        return self._unfold(shortened, repeated, checked=False)

    def _unfold(self, shortened: Callable[[int], Tape], repeated: Repeated, *, checked: bool) -> Unfolded:
        deeper = self._attempt[0]
        first, second = shortened(deeper), shortened(deeper + 1)
        return self._unfolded(repeated, first, second, None if checked else shortened(deeper + 2))

    def _unfolded(self, repeated: Repeated, first: Tape, second: Tape, third: Tape | None = None) -> Unfolded:
        deeper, earlier = self._attempt
        periods, stacks, alike_from = repeated.periods - deeper, repeated.stacks, repeated.alike_from
        return unfold(first, second, periods, stacks=stacks, alike_from=alike_from, earlier=earlier, third=third)


def find_repeated(module: nn.Module) -> tuple[Repeated, ...]:
    """The lists of layers of a module that are worth being traced with fewer, the longest first; equally long ones together."""
    found: dict[tuple[int, int, int, int], list[str]] = {}
    for path, stack in module.named_modules():
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and len(stack) > FEWEST:
            outer = any(path.startswith(f"{other}.") for paths in found.values() for other in paths)
            if not outer and (period := _period(module, stack)) is not None:
                found.setdefault((len(stack), *period), []).append(path)
    together = (
        Repeated(stacks=tuple(stacks), layers=layers, period=period, alike_from=first, fewest=fewest)
        for (layers, period, first, fewest), stacks in found.items()
    )
    worth = {one: _share(module, one) for one in together}
    return tuple(sorted((one for one, share in worth.items() if share <= WORTH), key=worth.__getitem__))


def _share(module: nn.Module, repeated: Repeated) -> float:
    """Return the share of the whole model that three depths trace, by the number of its parts."""
    whole = sum(1 for _ in module.modules())
    layers = sum(1 for path in repeated.stacks for _ in module.get_submodule(path).modules()) / repeated.layers
    depths = (repeated.fewest + more * repeated.period for more in range(3))
    return sum(1 - (repeated.layers - depth) * layers / whole for depth in depths)


def _put(module: nn.Module, path: str, stack: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = stack


def _period(module: nn.Module, stack: nn.Module) -> tuple[int, int, int] | None:
    """Return the layers of a period, the first of those that are alike, and what the shallowest model keeps; None without any."""
    described = _described(module, stack)
    if described is None:
        return None
    for period in range(1, LONGEST_PERIOD + 1):
        kept = len(described)
        while kept > period and described[kept - 1] == described[kept - 1 - period]:
            kept -= 1
        first = kept - period  # layers before the first of those that come again
        fewest = first + (FEWEST if period == 1 else 1) * period + (len(described) - first) % period
        if fewest + 3 * period <= len(described):
            return period, first, fewest
    return None


def _described(module: nn.Module, stack: nn.Module) -> list[dict[str, Any]] | None:
    """Return what each layer is: equal for two that are alike. None where layers share parameters."""
    layers = list(stack)
    own = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    if sum(map(len, own)) != len(set().union(*own)):
        return None
    described: list[dict[str, Any]] = [dict(_facts(layer, number)) for number, layer in enumerate(layers)]
    for name in set().union(*described):
        having: list[tuple[int, Any]] = [(at, facts[name]) for at, facts in enumerate(described) if name in facts]
        if all(type(value) is int for _, value in having) and len({value - at for at, value in having}) == 1:
            for at, _ in having:
                del described[at][name]  # the layer's own number
    for name, values in _said_by_layer(module, len(layers)):
        for facts, value in zip(described, values, strict=True):
            facts[f"config.{name}"] = _plain(value, "")
    return described


def _facts(layer: nn.Module, number: int) -> Iterator[tuple[str, object]]:
    """Everything that decides what a layer does: its parts, their parameters, buffers and attributes."""
    for path, part in layer.named_modules():
        yield f"{path}:", type(part)
        for kind, tensors in (("parameter", part._parameters), ("buffer", part._buffers)):
            for name, tensor in tensors.items():
                yield f"{path}:{kind} {name}", None if tensor is None else _told(tensor)
        for name, value in vars(part).items():
            if name not in _UNREAD:
                yield f"{path}:{name}", _plain(value, f".{number}.")


def _told(tensor: torch.Tensor) -> tuple[object, ...]:
    return type(tensor), tensor.shape, tensor.dtype, tensor.requires_grad


def _plain(value: object, own: str) -> object:
    """A value that is equal for two that do the same; of what is not known to, the object itself counts.

    A path in which the layer's own number stands is equal to that of another layer.
    """
    if isinstance(value, str):
        return value.replace(own, ".*.") if own else value
    if value is None or isinstance(value, (bool, int, float, bytes, Enum, torch.dtype, torch.device, type)):
        return value
    if isinstance(value, dict):
        return tuple((key, _plain(one, own)) for key, one in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(_plain(one, own) for one in value)
    if isinstance(value, partial):  # GELUTanh's function
        return partial, _plain(value.func, own), _plain(value.args, own), _plain(value.keywords, own)
    if isinstance(value, (set, frozenset)):
        return frozenset(_plain(one, own) for one in value)
    if type(value).__module__.startswith(
        f"{BITSANDBYTES}."
    ):  # what restores a quantised weight, its tensors by what they are
        held = vars(value).items()
        return type(value), *(
            (key, _told(one) if isinstance(one, torch.Tensor) else _plain(one, own)) for key, one in held
        )
    return type(value), id(value)


def _said_by_layer(module: nn.Module, layers: int) -> Iterator[tuple[str, list]]:
    """Yield what the configs of a module's parts say of each layer in lists that are as long as that of the layers."""
    configs = {id(config): config for part in module.modules() if (config := getattr(part, "config", None)) is not None}
    for number, config in enumerate(configs.values()):
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            if isinstance(value, (list, tuple)) and len(value) == layers:
                yield f"{number}.{name}", list(value)
