"""The census of a module: its tensors before it runs, including tensors that are not registered."""

from __future__ import annotations

from collections import Counter, UserDict, defaultdict
from collections.abc import Iterable, Iterator
from types import FunctionType, MethodType, ModuleType

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from sizer.architecture.frozen_parts import trained_part
from sizer.architecture.peft_adapters import base_of
from sizer.architecture.quantization import elements_of, quantization_objects, quantization_states, weight_bytes
from sizer.base.errors import BuildError
from sizer.report.census import Census, DtypeRow, ModuleRow, TensorRow

DEEPEST_NESTING = 4  # lists in dicts in lists ... beyond this are not opened

_OWN_ATTRIBUTES = frozenset(vars(nn.Module()))
_NOT_OPENED = (str, bytes, int, float, complex, type, FunctionType, MethodType, ModuleType, torch.dtype, torch.device)

_WHY_ATTRIBUTE = (
    "a plain attribute, not a buffer: .to(device) leaves it where it is, so its use on a device raises RuntimeError or "
    "copies it there every time"
)
_WHY_PARAMETER = (
    "a parameter that no module has registered: .to(device) leaves it where it is and model.parameters() does not give "
    "it to the optimizer"
)
_WHY_REAL = (
    'made on {device} although the model was built under torch.device("meta"): it takes real memory while counting'
)


def take_census(module: nn.Module, *, name: str) -> Census:
    """Return the elements and bytes (at each tensor's current dtype) of a module, in total, by dtype and by submodule.

    Parameters and buffers, persistent or not, count once for all their names, at the first module that registered them;
    `tied_parameters` groups the names of each shared parameter. `unregistered_tensors` are tensors among the modules'
    attributes that are neither: plain, inside lists, tuples, sets and dicts, one level deep inside other objects, or in modules
    that are themselves unregistered. `real_tensors` are tensors of all kinds that are not on the meta device, for a module that
    was built under `torch.device("meta")`. Neither is part of the totals.

    Raises BuildError if a lazy parameter has no shape yet.

    *Known limitations*: two Parameter objects over one storage count twice (`.to(device)` separates them, too); tensors in
    closures, in slots, or more than one object deep are not found. A tensor subclass or a quantized weight counts the elements
    that it represents, and the bytes of its inner tensors; the tensors that restore quantized weights count as bytes of
    parameters.
    """
    modules = list(module.named_modules())
    owned = _owned_tensors(modules)
    states = [state for _, child in modules for _, state in quantization_states(child)]
    tensors = [tensor for tensor, _ in owned.values()]
    parameters = [tensor for tensor in tensors if isinstance(tensor, nn.Parameter)]
    buffers = [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]
    names = {key: path for key, (_, path) in owned.items()}
    unregistered = _unregistered_tensors(modules, known=_known(modules))
    return Census(
        name=name,
        class_name=type(base_of(trained_part(module))).__name__,
        **_sums(parameters, buffers, states),
        by_dtype=_rows_by_dtype(parameters, buffers, states),
        tied_parameters=_tied_names(module),
        unregistered_tensors=tuple(_row(path, tensor, _why_unregistered(tensor)) for path, tensor in unregistered),
        real_tensors=tuple(
            _row(path, tensor, _WHY_REAL.format(device=tensor.device))
            for path, tensor in [*((names[id(t)], t) for t in tensors), *unregistered]
            if tensor.device.type != "meta"
        ),
        modules=tuple(_module_rows(modules)),
    )


def unregistered_tensors(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Return paths and tensors that are neither parameters nor buffers of a module, each tensor once: see `take_census`."""
    modules = list(module.named_modules())
    return _unregistered_tensors(modules, known=_known(modules))


def _known(modules: list[tuple[str, nn.Module]]) -> set[int]:
    """Return the identities of tensors that belong to modules: registered ones, and those that restore quantized weights."""
    states = {id(state) for _, child in modules for _, state in quantization_states(child)}
    held = {id(value) for _, child in modules for one in quantization_objects(child) for value in vars(one).values()}
    return set(_owned_tensors(modules)) | states | held


def _registered(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors that this module itself has registered; names registered as None are skipped."""
    for name, tensor in [*module._parameters.items(), *module._buffers.items()]:
        if tensor is not None:
            yield name, tensor


def _owned_tensors(modules: Iterable[tuple[str, nn.Module]]) -> dict[int, tuple[Tensor, str]]:
    """Return every registered tensor once, by identity, with its first path."""
    owned: dict[int, tuple[Tensor, str]] = {}
    for path, module in modules:
        for name, tensor in _registered(module):
            if is_lazy(tensor):
                raise BuildError(
                    f"{_join(path, name)} is a lazy parameter without a shape",
                    given=type(module).__name__,
                    allowed="parameters with a known shape when the model is built",
                    todo="use the layer that is not lazy, or run the model once before it is counted",
                )
            owned.setdefault(id(tensor), (tensor, _join(path, name)))
    return owned


def _tied_names(module: nn.Module) -> tuple[tuple[str, ...], ...]:
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        names[id(parameter)].append(name)
    return tuple(tuple(group) for group in names.values() if len(group) > 1)


def _module_rows(modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ModuleRow]:
    """Yield one row per module with the tensors that it registered first; the rows sum to the totals."""
    counted: set[int] = set()
    for path, module in modules:
        own = {id(tensor): tensor for _, tensor in _registered(module) if id(tensor) not in counted}
        counted |= own.keys()
        parameters = [tensor for tensor in own.values() if isinstance(tensor, nn.Parameter)]
        buffers = [tensor for tensor in own.values() if not isinstance(tensor, nn.Parameter)]
        yield ModuleRow(
            path=path,
            class_name=type(module).__name__,
            **_sums(parameters, buffers, [state for _, state in quantization_states(module)]),
        )


def _sums(parameters: list[Tensor], buffers: list[Tensor], states: list[Tensor]) -> dict[str, int]:
    """Return the elements and bytes of a Census or a ModuleRow; `states` restore quantized parameters, and only count as bytes."""
    return {
        "parameters": _elements(parameters), "trainable_parameters": _elements(p for p in parameters if p.requires_grad),
        "buffers": _elements(buffers), "parameter_bytes": _bytes([*parameters, *states]), "buffer_bytes": _bytes(buffers),
    }  # fmt: skip


def _rows_by_dtype(parameters: list[Tensor], buffers: list[Tensor], states: list[Tensor]) -> tuple[DtypeRow, ...]:
    """Return one row per dtype, the dtype with most bytes first."""
    of_parameters: Counter[torch.dtype] = Counter()
    of_buffers: Counter[torch.dtype] = Counter()
    sizes: Counter[torch.dtype] = Counter()
    for counts, tensors in ((of_parameters, parameters), (of_buffers, buffers)):
        for tensor in tensors:
            counts[tensor.dtype] += elements_of(tensor)
            sizes[tensor.dtype] += weight_bytes(tensor)
    for state in states:
        sizes[state.dtype] += weight_bytes(state)
    return tuple(
        DtypeRow(dtype=_dtype(dtype), parameters=of_parameters[dtype], buffers=of_buffers[dtype], bytes=size)
        for dtype, size in sizes.most_common()
    )


def _unregistered_tensors(modules: list[tuple[str, nn.Module]], known: set[int]) -> list[tuple[str, Tensor]]:
    """Return paths and tensors that are reachable by attributes and not registered; each tensor once."""
    seen = known | {id(module) for _, module in modules}
    found: list[tuple[str, Tensor]] = []
    for path, module in modules:
        attributes = {key: value for key, value in vars(module).items() if key not in _OWN_ATTRIBUTES}
        for key, value in attributes.items():
            found += _search(_join(path, key), value, seen, nesting=DEEPEST_NESTING, objects=1)
    return found


def _search(path: str, value: object, seen: set[int], *, nesting: int, objects: int) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors inside a value: `nesting` containers and `objects` plain objects deep."""
    if value is None or isinstance(value, _NOT_OPENED) or id(value) in seen:
        return
    if isinstance(value, Tensor):
        seen.add(id(value))
        yield path, value
        return
    if isinstance(value, nn.Module):
        yield from _search_module(path, value, seen)
        return
    if isinstance(value, (dict, UserDict, list, tuple, set, frozenset)):  # other mappings may read files
        if nesting:
            for key, item in value.items() if isinstance(value, (dict, UserDict)) else enumerate(value):
                yield from _search(f"{path}[{key!r}]", item, seen, nesting=nesting - 1, objects=objects)
        return
    if objects and hasattr(value, "__dict__"):
        seen.add(id(value))
        for key, item in vars(value).items():
            yield from _search(f"{path}.{key}", item, seen, nesting=nesting, objects=objects - 1)


def _search_module(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, Tensor]]:
    """Yield everything that an unregistered module has registered: for example a module in a plain list."""
    for inner_path, inner in module.named_modules():
        if id(inner) in seen:
            continue
        seen.add(id(inner))
        for name, tensor in _registered(inner):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield _join(path, inner_path, name), tensor


def _why_unregistered(tensor: Tensor) -> str:
    return _WHY_PARAMETER if isinstance(tensor, nn.Parameter) else _WHY_ATTRIBUTE


def _row(path: str, tensor: Tensor, why: str) -> TensorRow:
    return TensorRow(
        name=path,
        shape=tuple(tensor.shape),
        dtype=_dtype(tensor.dtype),
        device=str(tensor.device),
        bytes=weight_bytes(tensor),
        why=why,
    )


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _elements(tensors: Iterable[Tensor]) -> int:
    return sum(map(elements_of, tensors))


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(map(weight_bytes, tensors))
