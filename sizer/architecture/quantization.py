"""Weights that are quantised as `from_pretrained(quantization_config=...)` quantises them, on modules without weights.

transformers' own quantizer replaces the layers, bitsandbytes' own code quantises each weight: scales and codes are those of the
library. What it leaves as it was (embeddings, the head, experts that are no `nn.Linear`) stays.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from math import prod

import torch
from torch import Tensor, nn

from sizer.architecture.adapters import is_adapted
from sizer.architecture.subclasses import parts_of
from sizer.catalogue.weights import BITSANDBYTES, WEIGHTS
from sizer.errors import BuildError, quote
from sizer.memory.caveats import UNQUANTISED_PART
from sizer.units import format_bytes

STANDARD_DEVIATION = 0.02  # of the random weights, where a device holds values
NO_OUTLIERS = "No activation is taken to be an outlier, so that no column is multiplied in 16 bits."
MANY = 8  # names in one sentence
_FP8 = "transformers.integrations.finegrained_fp8"
_CHATTY = "bitsandbytes.autograd._functions"  # says at each layer of each pass that LLM.int8() casts its input
_STATES = ("absmax", "code", "offset")  # the tensors of bitsandbytes' QuantState (bitsandbytes/functional.py, 0.50)


def replace_layers(module: nn.Module, weights: str, dtype: str) -> nn.Module:
    """A transformers model on meta with the layers that a quantizer puts in for a dtype of the contract: `module`, changed.

    What is not quantised is in that dtype (float32 under autocast), in which products are computed (the half, under autocast).
    Raises BuildError where a package is missing, and where no layer can be quantised.
    """
    half = dtype.removeprefix("amp-")
    loaded = torch.float32 if dtype != half else getattr(torch, half)
    module.to(loaded)
    module.config.dtype = loaded
    module.hf_quantizer = _quantizer(weights, getattr(torch, half))
    from transformers.modeling_utils import local_torch_dtype

    with local_torch_dtype(loaded):
        module.hf_quantizer.preprocess_model(module, device_map={"": 0})
    if not any(map(_is_replaced, module.modules())):
        raise BuildError(
            "this model has no layer that can be quantised",
            given=quote(f"weights={weights} with {type(module).__name__}"),
            todo="leave weights out",
        )
    return module


def load_quantized(module: nn.Module, device: str = "meta") -> nn.Module:
    """The model of `replace_layers` as `from_pretrained` loads it: weight by weight arrives on the device and is quantised."""
    _warm_up(module, device)
    if getattr(module.hf_quantizer.quantization_config, "bnb_4bit_use_double_quant", False):
        _make_table(device)
    arrived: dict[int, nn.Parameter] = {}
    for layer in module.modules():
        if type(layer).__module__.startswith(_FP8):
            _load_fp8(layer, module.hf_quantizer, module.config.dtype, device)
        else:
            _load(layer, device, arrived)
    module.hf_quantizer.postprocess_model(module)
    return module


def is_quantized(module: nn.Module) -> bool:
    """Whether `quantize` has made this module, or the one that an adapter is around."""
    return getattr(module, "hf_quantizer", None) is not None


def quantization_states(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors with which a module itself, not its children, restores its quantised weight: scales, codes, offsets.

    They are neither parameters nor buffers (bitsandbytes/nn/modules.py, 0.50: Linear4bit, Linear8bitLt).
    """
    weight = module._parameters.get("weight")
    if (state := getattr(weight, "quant_state", None)) is not None:
        yield from _tensors_of(state, "weight.")
    scales = getattr(weight, "SCB", None)
    if scales is None:
        scales = getattr(getattr(module, "state", None), "SCB", None)  # where the first forward pass leaves them
    if isinstance(scales, Tensor):
        yield "weight.SCB", scales


def quantization_objects(module: nn.Module) -> Iterator[object]:
    """What holds the tensors of `quantization_states`, and changes as bitsandbytes' layers run."""
    weight = module._parameters.get("weight")
    if hasattr(weight, "SCB"):
        yield weight
        yield module.state


def _tensors_of(state: object, path: str) -> Iterator[tuple[str, Tensor]]:
    for name in _STATES:
        if isinstance(tensor := getattr(state, name), Tensor):
            yield f"{path}{name}", tensor
    if state.state2 is not None:  # of scales that are themselves quantised
        yield from _tensors_of(state.state2, f"{path}state2.")


def elements_of(tensor: Tensor) -> int:
    """The elements that a tensor stands for: two to a byte where it holds 4-bit weights."""
    state = getattr(tensor, "quant_state", None)
    return tensor.numel() if state is None else prod(state.shape)


def weight_bytes(tensor: Tensor) -> int:
    """The bytes that a tensor itself holds; of a wrapper subclass those inside."""
    return sum(part.numel() * part.element_size() for part in parts_of(tensor))


def describe_weights(module: nn.Module, weights: str) -> tuple[str, ...]:
    """Sentences on a quantised module: how much of it is quantised, and what was left as it was, by name and bytes."""
    layers = [layer for layer in module.modules() if _is_replaced(layer)]
    held = elements = 0
    for layer in layers:
        tensors = [*layer.parameters(recurse=False), *(state for _, state in quantization_states(layer))]
        held += sum(map(weight_bytes, tensors))
        elements += sum(elements_of(tensor) for tensor in tensors if tensor.dtype.itemsize == 1 and tensor.dim() > 1)
    told = (
        f"{WEIGHTS[weights].title}: {elements:,} weights of {len(layers)} layers are quantised, to {format_bytes(held)}"
    )
    outliers = f" {NO_OUTLIERS}" if weights == "int8" else ""
    left = ", ".join(f"{name} ({format_bytes(size)})" for name, _, size in unquantized_part(module)[:MANY])
    return (f"{told} with their scales.{outliers}", *([f"{UNQUANTISED_PART}{left}."] if left else []))


def unquantized_part(module: nn.Module) -> list[tuple[str, int, int]]:
    """Where the frozen weights are that were not quantised: (name, elements, bytes) of each kind of module, the largest first."""
    found: dict[str, tuple[int, int]] = {}
    adapted = is_adapted(module)
    left = {id(parameter) for parameter in module.parameters()}
    for path, child in module.named_modules():
        for parameter in () if _is_replaced(child) else child.parameters(recurse=False):
            if parameter.dim() > 1 and id(parameter) in left and not (adapted and parameter.requires_grad):
                left.remove(id(parameter))
                name = path.rpartition(".")[2]
                elements, size = found.get(name, (0, 0))
                found[name] = (elements + parameter.numel(), size + weight_bytes(parameter))
    return sorted(((name, *sizes) for name, sizes in found.items()), key=lambda row: -row[2])


def _quantizer(weights: str, compute_dtype: torch.dtype):
    """transformers' quantizer of a row of WEIGHTS. Raises BuildError where a package is missing."""
    row = WEIGHTS[weights]
    try:
        if row.package == BITSANDBYTES:
            import bitsandbytes  # noqa: F401  Sizer runs without it, too
    except ModuleNotFoundError as error:
        if error.name != BITSANDBYTES:
            raise
        todo = f"install {BITSANDBYTES} as requirements.txt names it"
        raise BuildError(f"{BITSANDBYTES} is not installed", given=f"weights={weights}", todo=todo) from error
    logging.getLogger(_CHATTY).setLevel(logging.ERROR)
    import transformers
    from transformers.quantizers.auto import AutoHfQuantizer

    computed = {"bnb_4bit_compute_dtype": compute_dtype} if row.options.get("load_in_4bit") else {}
    config = getattr(transformers, row.config_class)(**row.options, **computed)
    return AutoHfQuantizer.from_config(config, pre_quantized=False)


def _is_replaced(layer: nn.Module) -> bool:
    """Whether a quantizer has put this layer in the place of another one."""
    return type(layer).__module__.startswith((f"{BITSANDBYTES}.", _FP8))


def _make_table(device: str) -> None:
    """Have bitsandbytes' map for scales made of values, before it is asked for among tensors that have none."""
    from bitsandbytes import functional

    with torch.device("cpu"):
        table = functional.create_dynamic_map()
    functional.name2qmap["dynamic"] = table.to(device)


def _warm_up(module: nn.Module, device: str) -> None:
    """Take and free what a model is going to need, as transformers does (caching_allocator_warmup in modeling_utils.py)."""
    from transformers.modeling_utils import get_total_byte_count

    names = [name for name, _ in module.named_parameters()]
    (needed,) = get_total_byte_count(module, dict.fromkeys(names, device), module.hf_quantizer).values()
    torch.empty(int(needed // 2), dtype=torch.float16, device=device)


def _load(layer: nn.Module, device: str, arrived: dict[int, nn.Parameter]) -> None:
    """Bring what a module itself holds to a device, and quantise it where it is to be. `arrived` are the parameters by their ids on
    meta, so that tied ones stay tied."""
    for name, old in layer._parameters.items():
        if old is not None and id(old) not in arrived:
            value = torch.empty(old.shape, dtype=old.dtype, device=device).normal_(std=STANDARD_DEVIATION)
            arrived[id(old)] = type(old)(value, requires_grad=old.requires_grad, **vars(old))
        layer._parameters[name] = None if old is None else arrived[id(old)]
    for name, buffer in layer._buffers.items():
        layer._buffers[name] = None if buffer is None else buffer.to(device)
    if hasattr(getattr(layer, "weight", None), "_quantize"):
        layer.weight._quantize(device)  # `.to("meta")` would not


def _load_fp8(layer: nn.Module, quantizer: object, loaded: torch.dtype, device: str) -> None:
    """Quantise the weights of a layer with FP8 weights in blocks: of each one that arrives a weight and its scales."""
    operation = quantizer.get_quantize_ops()
    for name, old in list(layer._parameters.items()):
        if old is None or old.dtype != torch.float8_e4m3fn:
            continue
        value = torch.empty(old.shape, dtype=loaded, device=device).normal_(std=STANDARD_DEVIATION)
        made = operation.convert({f".{name}": value})
        for key, tensor in made.items():
            layer._parameters[key.removeprefix(".")] = nn.Parameter(tensor, requires_grad=False)
