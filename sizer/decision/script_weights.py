"""The lines of a script that load a model of transformers with quantised weights, as `from_pretrained` does: weight by weight."""

from __future__ import annotations

from sizer.architecture.blueprint import Blueprint
from sizer.base.errors import BuildError
from sizer.catalogue.optimizers import BITSANDBYTES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.request import Request

QUANTIZED = """\
    with torch.device("meta"):
        whole = {model}(config)
    # Random values instead of a checkpoint's: each weight is quantised when it arrives on the device.
    weights = {{name: 0.02 * torch.randn(tensor.shape, dtype=dtype) for name, tensor in whole.named_parameters()}}
    model = {model}.from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        device_map={{"": device}},
        quantization_config=BitsAndBytesConfig({options}),
    )
"""


def is_quantized(blueprint: Blueprint) -> bool:
    """Return whether a blueprint's weights are quantised on its device."""
    return blueprint.replace_layers is not None


def quantized_lines(request: Request, model: str) -> str:
    """Return the lines that make `model`, by the name of its class, from its config.

    Raises BuildError if its weights are quantised by other means than bitsandbytes: by their checkpoint, or by kernels of the
    hub.
    """
    row = WEIGHTS[request.weights]
    if row.package != BITSANDBYTES:
        allowed = ", ".join(key for key, one in WEIGHTS.items() if one.package == BITSANDBYTES)
        given = f"weights={request.weights}"
        raise BuildError("no script can be written for weights that are quantised so", given=given, allowed=allowed)
    options = [f"{name}={value!r}" for name, value in row.config.items() if name != "quant_method"]
    if row.has_4_bits:
        options.append(f"bnb_4bit_compute_dtype=torch.{request.compute or request.dtypes[0].removeprefix('amp-')}")
    return QUANTIZED.format(model=model, options=", ".join(options))
