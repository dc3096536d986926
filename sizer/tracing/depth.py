"""Deep models, traced with fewer layers: lists of repeated layers, and the tapes that are unfolded from a few of them.

Repeated layers have the same classes, parameters and attributes, and the same entry in lists of the config. Their tapes need
not repeat each other, so this is checked: three depths are traced (sizer.tape.unfold), and the forward pass of the whole model.
If these disagree, the whole model is traced.

Layers that differ in a setting only, such as the window of their attention, may allocate the same, for instance if the sequence
is shorter than the window. Each trace of a few layers has some of each kind, and shows whether that holds.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import cache, partial
from itertools import pairwise, product
from typing import Any

import torch
from torch import nn

from sizer.base.errors import TraceError
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.tape.affine import LIMIT_BYTES
from sizer.tape.shallower import Shallower
from sizer.tape.stretches import LayersDifferError, check_layers
from sizer.tape.tape import Tape
from sizer.tape.unfold import Stacks, Unfolded, same_tapes, unfold
from sizer.tracing.device import Device

LONGEST_PERIOD = 6  # layers; a period is formed if layers of several kinds alternate
LONGEST_TAIL = 2  # layers at the end that may differ from those before them, such as layers whose keys others use
FEWEST = 2  # remaining layers at least: the first and the last one
# Ways to unfold a tape, tried in turn: from models this number of periods deeper than the shallowest, and this much `earlier`.
# The last is for models with first layers that do more, such as adding the output of a vision tower.
ATTEMPTS = (0, 0), (1, 0), (1, 1), (3, 0)
WORTH = 0.8  # largest cost of traces with fewer layers, relative to traces of the whole model
PERHAPS_WORTH = 1.2  # the same while only the number of parts is known
FORWARD = 1 / 3  # cost of the forward pass of the whole model, relative to its trace
BACKWARD = 2  # blocks of a backward pass for each of the forward pass
PARTS = 3  # parts of a model that cost each trace as much as one block of the first step
FIXED = 40  # parts of a model that cost about as much as the fixed part of each trace
TRACES = 3  # usual number: two for a line over the batch size, and one at batch 1
_OF_LAYERS = re.compile("layer|block|ind|idx|attn|attention")  # in the names of config values that refer to layers by number
_STATELESS = "diffusers."  # modules with classes whose objects behave alike if they have no attributes
# Attributes of a module that no step reads: its tensors, which are compared separately, and hooks for reading or writing a state
# dict (torch/nn/modules/module.py, 2.15).
_UNREAD = frozenset(
    {
        *("_parameters", "_buffers", "_modules", "_state_dict_hooks", "_state_dict_pre_hooks"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Repeated:
    """Lists of layers in a module with equal length, in which, from some layer on, each layer equals the one a period before.

    `stacks` are their dotted paths, `layers` the length of each. `alike_from` is the first repeated layer, `fewest` the number
    of layers in the shallowest model. `kinds` is the period of layers that differ in a setting only, 0 if layers are equal in
    all respects. The last `tail` layers differ.
    """

    stacks: tuple[str, ...]
    layers: int
    period: int
    alike_from: int
    fewest: int
    kinds: int = 0
    tail: int = 0

    @property
    def periods(self) -> int:
        """Return the number of periods that the whole model has more than the shallowest one."""
        return (self.layers - self.fewest) // self.period

    def like(self, path: str) -> Iterator[str]:
        """Yield the dotted paths in the whole model of the modules that equal the one with this path."""
        for stack in self.stacks:
            match = re.match(rf"{re.escape(stack)}\.(\d+)(?=\.|$)", path)
            alike = range(self.alike_from, self.layers - self.tail)
            if match and int(match[1]) in alike:
                for number in alike[(int(match[1]) - self.alike_from) % self.period :: self.period]:
                    yield f"{stack}.{number}{path[match.end() :]}"


@contextmanager
def shortened(module: nn.Module, candidate: Sequence[Repeated], more: Sequence[int]) -> Iterator[None]:
    """Shorten the module's lists to `more` periods above the shallowest model within the context.

    The config's counts of layers are changed too: transformers selects hidden states from the last layer back.
    """
    whole, numbers = list[tuple[str, nn.Module]](), list[tuple[Any, str, int]]()

    def number(owner: Any, name: str, value: int) -> None:
        numbers.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    try:
        for repeated, periods in zip(candidate, more, strict=True):
            layers = repeated.fewest + periods * repeated.period
            for path in repeated.stacks:
                whole.append((path, stack := module.get_submodule(path)))
                if (config := _counting_config(module, path, repeated.layers)) is not None:
                    number(config, "num_hidden_layers", layers)
                kept = stack[: layers - repeated.tail]
                for at, layer in enumerate(stack[repeated.layers - repeated.tail :], len(kept)):
                    kept.append(layer)
                    for part in layer.modules():
                        if type(getattr(part, "layer_idx", None)) is int:
                            number(part, "layer_idx", at)
                _put(module, path, kept)
        with _unhooked(module):
            yield
    finally:
        for path, stack in whole:
            _put(module, path, stack)
        for owner, name, value in numbers:
            setattr(owner, name, value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Depths:
    """Tapes of a few depths of a model that determine all other depths.

    A deeper model and the forward pass of the whole model have confirmed it. `candidate` are the shortened lists of layers;
    `attempt` is one of ATTEMPTS.
    """

    tapes: tuple[Tape, ...]
    candidate: tuple[Repeated, ...]
    attempt: tuple[int, int]


class DeepTraces:
    """Tapes of a model, from traces of it with fewer layers.

    Each dtype may have its own module, as quantised models do. Repetition of layers does not depend on the details of the first
    of these traces. Three depths and the forward pass of the whole model are traced for it. For other dtypes, devices,
    optimizers and batch sizes, two depths are enough, and one depth if only sizes differ. `candidates` are the result of
    `find_repeated`; `one_by_one` means that layers have events for each sample; `shown` are earlier findings, and `show` is
    called with new ones.
    """

    def __init__(
        self,
        candidates: Sequence[tuple[Repeated, ...]],
        *,
        one_by_one: bool = False,
        shown: Depths | None = None,
        show: Callable[[Depths], None] = lambda depths: None,
    ) -> None:
        self._candidates, self._show, self._apart = tuple(candidates), show, one_by_one
        self._known: list[Unfolded] = []
        self._shallower: list[Shallower] = []  # shallower models of the known ones, if events around the layers may differ
        self._attempt = ATTEMPTS[0]  # the attempt that succeeded
        if shown is not None and shown.candidate in self._candidates:
            self._candidates = self._candidates[self._candidates.index(shown.candidate) :]
            self._attempt = shown.attempt
            candidate, last = shown.candidate, len(shown.tapes) - 1
            self._known.append(self._unfolded(candidate, shown.tapes))
            with suppress(LayersDifferError):
                apart = [shown.tapes[last - (1 << later)] for later in range(len(candidate) - 1, 0, -1)]
                self._shallower.append(self._shallower_of(candidate, shown.tapes[0], shown.tapes[last], apart))

    def trace(
        self,
        module: nn.Module,
        at: Callable[..., Tape],
        device: Device,
        *,
        traces: int = TRACES,
        whole: Callable[..., Tape] | None = None,
    ) -> Tape:
        """Return the tape of `at()`, which traces the current `module`.

        It is the tape of a trace of the whole module if layers do not repeat each other, or if that is less work. The device
        then notes the choices made for the whole module. Raises what `at` raises.

        Args:
            module: The module.
            at: Traces the module; `at(forward_alone=True)` and, in training, `at(first_step=True)` return the beginning of its
                tape.
            device: The device.
            traces: Probable number of traces, including this one.
            whole: Called instead of `at` for the whole module. If it calls its argument `forward_alone` and gets False, it
                continues to the whole tape.
        """
        forward, whole = None, whole or at
        if self._candidates and not self._known:
            costs = _cost_in_parts(module, self._candidates)
            if traces < TRACES and FORWARD + costs.of(self._candidates[0], traces, apart=self._apart) > WORTH * traces:
                return whole()
            found: list[tuple[tuple[Repeated, ...], ...]] = []

            def is_worthwhile(begun: Tape) -> bool:
                costs = _cost_in_blocks(module, self._candidates, begun)
                found.append(_worthwhile(self._candidates, costs, apart=self._apart, most=WORTH))
                return bool(found[-1])

            try:
                forward = whole(forward_alone=is_worthwhile)
            except TraceError:
                if found:  # it continued
                    raise
                return whole()
            if not found:
                is_worthwhile(forward)
            elif not found[-1]:
                self._candidates = ()
                return forward
            self._candidates = found[-1]
        while self._candidates:
            try:
                tape = self._trace(module, at, self._candidates[0], forward)
            except LayersDifferError:
                if self._known:
                    break  # of this work alone
                self._candidates = self._candidates[1:]
                self._shallower.clear()
            except TraceError:
                break
            else:
                for repeated in self._candidates[0]:
                    device.repeat_choices(repeated.like)
                return tape
        return whole()

    def _trace(
        self, module: nn.Module, at: Callable[..., Tape], candidate: tuple[Repeated, ...], forward: Tape | None
    ) -> Tape:
        @cache
        def at_depth(*more: int, first_step: bool = False) -> Tape:
            with shortened(module, candidate, more):
                tape = at(first_step=True) if first_step else at()
            for repeated, periods in zip(candidate, more, strict=True):
                if repeated.kinds and periods:  # layers of all kinds are between the first and the last
                    check_layers(tape, repeated.stacks, repeated.alike_from)
            return tape

        deepest = [self._attempt[0] + 1] * len(candidate)
        for known in reversed(self._known):
            with suppress(LayersDifferError):
                return known.of(at_depth(*deepest))
        for shallower in reversed(self._shallower):
            with suppress(LayersDifferError):
                found = self._unfolded(candidate, shallower.tapes(at_depth(*deepest)))
                break
        else:
            found = self._unfold(at_depth, candidate)[0] if forward is None else self._find(at_depth, candidate, forward)
        if sum(found.tape.sizes) >= LIMIT_BYTES:
            raise LayersDifferError("more bytes than replays add up")
        self._known.append(found)
        return found.tape

    def _find(self, at_depth: Callable[..., Tape], candidate: tuple[Repeated, ...], forward: Tape) -> Unfolded:
        """Return the unfolded tapes of the first attempt that a third depth and the whole `forward` pass confirm."""
        if any(one.kinds for one in candidate):
            at_depth(*[1] * len(candidate))  # first, since it shows whether all kinds of layers behave the same
        cheap = all(one.period == 1 and one.periods >= ATTEMPTS[-1][0] + 2 for one in candidate)
        attempts = ATTEMPTS[ATTEMPTS.index(_first_attempt(candidate)) : None if cheap else -1]
        for self._attempt in attempts:
            try:
                found, tapes = self._unfold(at_depth, candidate, checked=False)
                break
            except LayersDifferError:
                if self._attempt == attempts[-1]:
                    raise
        found.check(forward)
        self._show(Depths(tapes=tapes, candidate=candidate, attempt=self._attempt))
        return found

    def _unfold(
        self, at_depth: Callable[..., Tape], candidate: tuple[Repeated, ...], *, checked: bool = True
    ) -> tuple[Unfolded, tuple[Tape, ...]]:
        """Return the unfolded tapes of an attempt's depths, and the tapes; with two or more lists, some depths are not traced."""
        lists, (deeper, _) = range(len(candidate)), self._attempt
        first, second = (at_depth(*[more for _ in lists]) for more in (deeper, deeper + 1))
        tapes, shallower = tuple[Tape, ...](), list[Shallower]()
        with suppress(LayersDifferError):
            apart = [at_depth(*[deeper + (one != other) for other in lists]) for one in lists[:-1]]
            told = self._shallower_of(candidate, first, second, apart)
            if same_tapes((made := told.tapes())[0], first):
                tapes, shallower = made, [told]
        tapes = tapes or tuple(at_depth(*more) for more in product((deeper, deeper + 1), repeat=len(candidate)))
        found = self._unfolded(candidate, tapes, None if checked else at_depth(*[deeper + 2 for _ in lists], first_step=True))
        self._shallower += shallower
        return found, tapes

    def _shallower_of(
        self, candidate: tuple[Repeated, ...], first: Tape, second: Tape, apart: Sequence[Tape]
    ) -> Shallower:
        return Shallower(first, second, apart, self._stacks(candidate), earlier=self._attempt[1])

    def _unfolded(self, candidate: tuple[Repeated, ...], tapes: Sequence[Tape], third: Tape | None = None) -> Unfolded:
        return unfold(tapes, self._stacks(candidate), earlier=self._attempt[1], third=third)

    def _stacks(self, candidate: tuple[Repeated, ...]) -> list[Stacks]:
        deeper, _ = self._attempt
        return [Stacks(paths=one.stacks, periods=one.periods - deeper, alike_from=one.alike_from) for one in candidate]


def find_repeated(module: nn.Module) -> tuple[tuple[Repeated, ...], ...]:
    """Return the lists of layers of a module that are worth shortening, equally long ones together.

    Each item is a choice of such lists to shorten: all of them, or equally long ones only. The least work comes first.
    """
    strictly: list[Repeated] = []
    loosely: list[Repeated] = []
    for path, stack in module.named_modules():
        if isinstance(stack, (nn.ModuleList, nn.Sequential)) and len(stack) > FEWEST:
            outer = any(path.startswith(f"{other.stacks[0]}.") for other in strictly)
            if not outer and (found := _repeated(module, path, stack)) is not None:
                strictly.append(found)
                loosely.append((found.period > 1 and _repeated(module, path, stack, kinds=found.period)) or found)
    candidates = tuple(dict.fromkeys([*_choices(loosely), *_choices(strictly)]))
    return _worthwhile(candidates, _cost_in_parts(module, candidates), apart=False, most=PERHAPS_WORTH)


def _worthwhile(
    candidates: Sequence[tuple[Repeated, ...]], costs: _Costs, *, apart: bool, most: float
) -> tuple[tuple[Repeated, ...], ...]:
    """Return the choices of lists with traces that cost at most this share of traces of the whole model, the cheapest first."""
    cost = {one: costs.of(one, TRACES, apart=apart) for one in candidates}
    return tuple(sorted((one for one in cost if cost[one] <= most * TRACES), key=cost.__getitem__))


def _first_attempt(candidate: tuple[Repeated, ...]) -> tuple[int, int]:
    """Return the first of ATTEMPTS that may succeed: the first period of a model differs from others, as does the last."""
    return ATTEMPTS[any(one.period > 1 and not one.alike_from for one in candidate)]


def _choices(found: Sequence[Repeated]) -> Iterator[tuple[Repeated, ...]]:
    """Yield lists of layers that may be shortened together.

    They are all lists, those with a period of 1, and equally long ones with equal periods.
    """
    alike: dict[Repeated, list[str]] = {}
    for one in found:
        alike.setdefault(replace(one, stacks=()), []).extend(one.stacks)
    together = [replace(one, stacks=tuple(stacks)) for one, stacks in alike.items()]
    for some in (together, [one for one in together if one.period == 1]):
        if len(some) > 1:
            yield tuple(some)
    for one in together:
        yield (one,)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Costs:
    """Costs of traces of a module, in parts or in blocks: of the whole, and of one layer of each list."""

    whole: float
    of_layer: dict[str, float]
    fixed: float = 0.0  # of each trace, for any number of layers

    def of(self, candidate: tuple[Repeated, ...], traces: int, *, apart: bool) -> float:
        """Return the cost of this number of traces, in traces of the whole model.

        The first trace needs several depths, and for each list but one a depth without its additional layers. A further trace
        needs one depth. With `apart` it needs one for each combination of the lists.
        """
        lists, beginning = range(len(candidate)), _first_attempt(candidate)[0]
        deepest = beginning + 2  # the depth used for the check
        if any(one.period > 1 for one in candidate) and not beginning:
            deepest += 1  # if kinds of layers alternate, the first attempt usually fails
        depths = [[more] * len(candidate) for more in range(beginning, deepest + 1)]
        depths += ([deepest - 2 + (one != other) for other in lists] for one in lists[:-1])
        each = [[deepest - 1] * len(candidate)]
        if apart and len(candidate) > 1:
            each = [[*more] for more in product((deepest - 2, deepest - 1), repeat=len(candidate))]
        return sum(self._share(candidate, more) for more in (*depths, *(traces - 1) * each))

    def _share(self, candidate: tuple[Repeated, ...], more: Sequence[int]) -> float:
        left_out = (
            (one.layers - one.fewest - periods * one.period) * self.of_layer[path]
            for one, periods in zip(candidate, more, strict=True)
            for path in one.stacks
        )
        return 1 - (sum(left_out) - self.fixed) / self.whole


def _cost_in_parts(module: nn.Module, candidates: Sequence[tuple[Repeated, ...]]) -> _Costs:
    """Return the costs by the number of parts, which is known before any trace."""
    of_layer = {
        path: sum(1 for _ in module.get_submodule(path).modules()) / one.layers
        for candidate in candidates
        for one in candidate
        for path in one.stacks
    }
    return _Costs(whole=sum(1 for _ in module.modules()), of_layer=of_layer, fixed=FIXED)


def _cost_in_blocks(module: nn.Module, candidates: Sequence[tuple[Repeated, ...]], forward: Tape) -> _Costs:
    """Return the costs by the blocks of a forward pass. Trained lists also have a backward pass, with BACKWARD times as many."""
    paths = {path: one.layers for candidate in candidates for one in candidate for path in one.stacks}
    numbered = re.compile(rf"({'|'.join(map(re.escape, paths))})\.\d+(?=\.|$)")
    lists = [match and match[1] for match in map(numbered.match, forward.module_names)]
    trained = {
        path: any(parameter.requires_grad for parameter in module.get_submodule(path).parameters()) for path in paths
    }
    loaded = max(forward.order[: forward.marks[0][0]], default=-1) + 1
    blocks = Counter(lists[module] for module in forward.modules[loaded:])
    cost = {path: blocks[path] * (1 + BACKWARD * (path is None or trained[path])) for path in (None, *paths)}
    of_layer = {path: cost[path] / layers for path, layers in paths.items()}
    parts = sum(1 for _ in module.modules())
    return _Costs(whole=sum(cost.values()), of_layer=of_layer, fixed=parts / PARTS)


@contextmanager
def _unhooked(module: nn.Module) -> Iterator[None]:
    """Remove hooks, and notes about them, that the remaining layers get within the context: other layers need them too."""
    before = [(part, set(vars(part)), dict(part._forward_hooks)) for part in module.modules()]
    try:
        yield
    finally:
        for part, names, hooks in before:
            for added in part._forward_hooks.keys() - hooks.keys():
                del part._forward_hooks[added]
            for added in vars(part).keys() - names:
                delattr(part, added)


def _counting_config(module: nn.Module, path: str, layers: int) -> Any:
    """Return the config by which the code around a list of layers counts them; None if there is none."""
    while path:
        path = path.rpartition(".")[0]
        config = getattr(module.get_submodule(path), "config", None)
        if config is not None:
            return config if getattr(config, "num_hidden_layers", None) == layers else None
    return None


def _put(module: nn.Module, path: str, stack: nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    module.get_submodule(parent)._modules[name] = stack


def _repeated(module: nn.Module, path: str, stack: nn.Module, *, kinds: int = 0) -> Repeated | None:
    """Return the repetition of the layers of one list, None if they do not repeat. With `kinds` their settings do not count."""
    described = _described(module, path, stack, settings=not kinds)
    if described is None:
        return None
    layers = len(described)
    tails, periods = (range(1), range(1, 2)) if kinds else (range(LONGEST_TAIL + 1), range(1, LONGEST_PERIOD + 1))
    for tail, period in product(tails, periods):
        kept = layers - tail
        while kept > period and described[kept - 1] == described[kept - 1 - period]:
            kept -= 1
        first = kept - period  # layers before the first repeated one
        rest = (layers - tail - first) % period  # part of a period before the tail
        is_period = rest > 0 and rest + tail >= period  # with the tail
        fewest = first + rest + tail + (FEWEST if period == 1 else not is_period) * period
        if kinds:  # one of each kind, between the first and the last layer
            fewest = first + kinds + 1
        if fewest + 3 * period <= layers:
            return Repeated(
                stacks=(path,), layers=layers, period=period, alike_from=first, fewest=fewest, kinds=kinds, tail=tail
            )
    return None


def described_layers(module: nn.Module, path: str, stack: nn.Module) -> list[dict[str, Any]] | None:
    """Return a description of each layer of a list in a module, equal for repeated layers. None if layers share parameters."""
    return _described(module, path, stack, settings=True)


def _described(module: nn.Module, path: str, stack: nn.Module, *, settings: bool) -> list[dict[str, Any]] | None:
    """Return a description of each layer, equal for repeated layers. None if layers share parameters.

    Without `settings`, plain attributes and configs' entries for each layer are left out.
    """
    layers = list(stack)
    own = [{id(parameter) for parameter in layer.parameters()} for layer in layers]
    if sum(map(len, own)) != len(set().union(*own)):
        return None
    described: list[dict[str, Any]] = [
        {name: fact for name, fact in _facts(layer, number) if settings or not _is_setting(fact)}
        for number, layer in enumerate(layers)
    ]
    if not settings:
        return described
    for name in set().union(*described):
        having: list[tuple[int, Any]] = [(at, facts[name]) for at, facts in enumerate(described) if name in facts]
        if all(type(value) is int for _, value in having) and len({value - at for at, value in having}) == 1:
            for at, _ in having:
                del described[at][name]  # the layer's own number
    for name, values in _said_by_layer(module, path, len(layers)):
        for facts, value in zip(described, values, strict=True):
            facts[f"config.{name}"] = _plain(value, "")
    return described


def _is_setting(fact: object) -> bool:
    return fact is None or isinstance(fact, (bool, int, float, str))


def _facts(layer: nn.Module, number: int) -> Iterator[tuple[str, object]]:
    """Yield all facts that determine a layer's behaviour: its parts, their parameters, buffers and attributes."""
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
    """Return a value that is equal for two objects of the same behaviour; an unknown object represents itself.

    A path that contains the layer's own number is equal to that of another layer.
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
    ):  # restores a quantised weight; its tensors are compared by their descriptions
        held = vars(value).items()
        return type(value), *(
            (key, _told(one) if isinstance(one, torch.Tensor) else _plain(one, own)) for key, one in held
        )
    if type(value).__module__.startswith(_STATELESS) and not vars(value):
        return type(value)  # such as an attention processor
    return type(value), id(value)


def _said_by_layer(module: nn.Module, path: str, layers: int) -> Iterator[tuple[str, list]]:
    """Yield configs' entries for each layer of a list: from lists of the same length, or of numbers of special layers.

    The configs are those of the list's parents and of its own parts, not of another tower.
    """
    parts = path.split(".")
    around = [module.get_submodule(".".join(parts[:depth])) for depth in range(len(parts))]
    inside = module.get_submodule(path).modules()
    configs = {id(config): config for part in (*around, *inside) if (config := getattr(part, "config", None)) is not None}
    for number, config in enumerate(configs.values()):
        for name, value in vars(config).items() if hasattr(config, "__dict__") else ():
            if not isinstance(value, (list, tuple)) or not value or isinstance(value[0], (list, tuple)):
                continue
            if all(type(one) is int and 0 <= one < layers for one in value) and _increases(value):
                if not _OF_LAYERS.search(name):
                    continue  # such as the durations that a decoder may give its tokens
                yield f"{number}.{name}", [layer in value for layer in range(layers)]
            elif len(value) == layers:
                yield f"{number}.{name}", list(value)


def _increases(numbers: Sequence[int]) -> bool:
    return all(before < after for before, after in pairwise(numbers))
