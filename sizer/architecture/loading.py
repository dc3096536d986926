"""Loading of a request's weights on a device: quantized as requested, as in the checkpoint, or not, and why."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from sizer.architecture.quantization_settings import UNNAMED, Quantization, quantization_of
from sizer.architecture.quark_settings import unknown_of
from sizer.base.errors import quote
from sizer.catalogue.gpus import Gpu
from sizer.catalogue.modes import MODES
from sizer.catalogue.parallel import takes_weights
from sizer.catalogue.weights import METHODS, WEIGHTS, title_of
from sizer.query.request import Request

NOT_TRACED = (
    "the weights have the checkpoint's format, {title}, and its kernels are not traced: a product only allocates its result; "
    "a kernel that dequantizes a layer first also needs that layer's 16-bit size"
)
# transformers/quantizers/auto.py, merge_quantization_configs, 5.23: another method raises, the same one keeps the checkpoint's
COPY = "this checkpoint is {title}, and transformers does not requantize it: the figures are for an unquantized copy"
DEQUANTIZED = (
    "the weights have the checkpoint's format, {title}: a product in training dequantizes its layer, as gptqmodel's code does; "
    "further memory of its kernels is not counted"
)
_KERNELS = "; without the package kernels transformers makes them 16 bits"  # quantizer_mxfp4.py, 5.23


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolvedWeights:
    """Weights as a device loads them: the request, its cautions, and the checkpoint's quantization.

    The request has the weights as loaded ("full" if the device does not quantize them). The quantization is None if the
    checkpoint has none, or if the request asks for other weights.
    """

    request: Request
    cautions: tuple[str, ...] = ()
    quantization: Quantization | None = None


def resolve_weights(request: Request, gpu: Gpu, config: dict | None = None) -> ResolvedWeights:
    """Return the weights of a request as `gpu` loads them.

    `config` is the parsed config.json for the sources "hub" and "config" (None: the request's own, or its preset's).
    Raises ConfigError if its `quantization_config` is malformed.
    """
    quantization = quantization_of(request, config) if request.weights != "full" else None
    if WEIGHTS[request.weights].quantizes:
        return _quantized_anew(request, gpu, quantization)
    if quantization is None:
        return ResolvedWeights(request=request)
    title = title_of(quantization.method)
    reason = next(_reasons(request, gpu, quantization), None)
    if reason is not None:
        named = f"are {title}" if quantization.method != UNNAMED else "are quantized by a method that its config does not name"
        caution = f"the weights of this checkpoint {named}; they are counted unquantized: {reason}"
        return ResolvedWeights(request=replace(request, weights="full"), cautions=(caution,), quantization=quantization)
    method = METHODS[quantization.method]  # without a row there is a reason
    if method.traced:
        return ResolvedWeights(request=request, quantization=quantization)
    if MODES[request.mode].trains:
        return ResolvedWeights(request=request, cautions=(DEQUANTIZED.format(title=title),), quantization=quantization)
    caution = NOT_TRACED.format(title=title) + (_KERNELS if method.key == "mxfp4" else "")
    return ResolvedWeights(request=request, cautions=(caution,), quantization=quantization)


def _quantized_anew(request: Request, gpu: Gpu, quantization: Quantization | None) -> ResolvedWeights:
    """Return the weights as loaded if the request quantizes them. The checkpoint may already be quantized."""
    row = WEIGHTS[request.weights]
    cautions = () if quantization is None else (COPY.format(title=title_of(quantization.method)),)
    if row.quantizes_on(gpu):
        return ResolvedWeights(request=request, cautions=cautions)
    caution = f"the {gpu.name} does not multiply weights in {row.title}: they are loaded unquantized"
    return ResolvedWeights(request=replace(request, weights="full"), cautions=(*cautions, caution))


def _reasons(request: Request, gpu: Gpu, quantization: Quantization) -> Iterator[str]:
    """Yield why a checkpoint's weights are not counted in its own format."""
    method = METHODS.get(quantization.method)
    if method is None:
        yield "no layout of this method is known"
        return
    if method.key == "quark" and (unknown := unknown_of(quantization.settings)) is not None:
        yield f"no layout of {unknown} is known"
    if method.key == "torchao" and isinstance(kind := quantization.settings.get("quant_type"), str):
        # transformers/utils/quantization_config.py, TorchAoConfig, 5.24
        yield f"transformers no longer loads torchao's {quote(kind)}, which older files name by a text"
    if method.key == "bitnet" and quantization.settings.get("linear_class", "bitlinear") != "bitlinear":
        yield "transformers makes them 16 bits as it loads them"  # integrations/bitnet.py, AutoBitLinear, 5.24
    if MODES[request.mode].trains and request.train != "adapter":
        yield "quantized weights are not trained"
    if MODES[request.mode].trains and not method.adapts:
        yield "adapters on such weights cannot be traced"
    if MODES[request.mode].trains and method.adapters and request.adapter not in method.adapters:
        yield f"on such weights only adapter={' and '.join(method.adapters)} are traced"
    if MODES[request.mode].trains and method.adapts and not method.traced and request.compile is not None:
        yield "compiled training with such weights is not traced"
    if not takes_weights(request.parallel, method.key):
        yield "how they are split among ranks was not compared with PyTorch's own"
    if gpu.backend not in method.backends:
        others = " and the CPU" if "cpu" in method.backends else ""
        yield f"their kernels are only known for CUDA devices{others}"
    if method.lowest is not None and (gpu.capability is None or gpu.capability < method.lowest):
        yield f"the {gpu.name} does not compute with them, and transformers makes them 16 bits as it loads them"
    if method.decompresses or quantization.settings.get("dequantize") is True:
        yield "transformers makes them 16 bits in the first forward pass"
