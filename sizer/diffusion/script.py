"""A program that loads a pipeline with its weights, calls it once, and prints its memory and the estimate. It needs no Sizer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.pipelines import CAST
from sizer.diffusion.building import IMAGES, WORDS, build_pipeline, is_of_transformers
from sizer.diffusion.bundle import TOKENIZER, Bundle, preset_data
from sizer.diffusion.placing import BITSANDBYTES, BLOCKS, MODEL, NONE, SEQUENTIAL
from sizer.diffusion.work import bundle_of, call_of, weights_of
from sizer.query.text import format_query

if TYPE_CHECKING:
    from sizer.query.request import Request
    from sizer.report.estimate import Estimate

_SPECIAL = 2  # tokens that a tokenizer adds to a prompt
_SCRIPT = '''\
"""Call {pipeline} in {dtype} at batch {batch}, and print the memory that it takes.

Written by Sizer for {query}

    pip install diffusers transformers accelerate{packages}
    python this_file.py [repository or folder]
"""

import sys

{imports}

repository = sys.argv[1]{usual}
dtype = torch.{dtype}


def load():
    pipe = {pipeline}.from_pretrained(
        repository,
{arguments}    )
{placed}    return pipe


def call(pipe):
    prompt = {prompt}
    pipe({called})


def measure():
    pipe = load()
    found = {{
        "allocated after loading": torch.cuda.memory_allocated(),
        "allocated while loading": torch.cuda.max_memory_allocated(),
        "reserved": torch.cuda.max_memory_reserved(),
    }}
    torch.cuda.reset_peak_memory_stats()
    call(pipe)
    found["allocated during the call"] = torch.cuda.max_memory_allocated()
    found["allocated after the call"] = torch.cuda.memory_allocated()
    found["reserved"] = max(found["reserved"], torch.cuda.max_memory_reserved())
    return found


ESTIMATED = {{  # bytes on the {gpu}
{estimated}}}


if __name__ == "__main__":
    for name, size in measure().items():
        off = f" ({{100 * (ESTIMATED[name] - size) / size:+.2f}} %)" if size else ""
        print(f"{{name}}: {{size:,}} bytes ({{size / 2**30:.2f}} GiB), estimated {{ESTIMATED[name]:,}} bytes{{off}}")
'''
_GROUPS = """\
    for name, part in pipe.components.items():
        if isinstance(part, torch.nn.Module) and name.startswith("vae"):
            part.to("cuda")
        elif isinstance(part, torch.nn.Module):
            apply_group_offloading(part, onload_device=torch.device("cuda"), offload_device=torch.device("cpu"), {options})
"""
_OFFLOADS = {
    NONE: '    pipe.to("cuda")\n',
    MODEL: "    pipe.enable_model_cpu_offload()\n",
    SEQUENTIAL: "    pipe.enable_sequential_cpu_offload()\n",
}


def write_script(request: Request, config: dict | None, estimate: Estimate) -> str:
    """Return the program for the one dtype and batch size of a request.

    Raises:
        RequestError, ConfigError, BuildError: The pipeline cannot be built, or does not support the request.
    """
    (dtype,), (batch,) = request.dtypes, request.batches
    bundle = bundle_of(request, config)
    with torch.device("meta"):
        pipe = build_pipeline(
            bundle, getattr(torch, dtype), without=request.without or (), tokens=request.sequence_length
        )
        call = call_of(pipe, bundle, request, batch)
    parts = {name: part for name, part in pipe.components.items() if isinstance(part, nn.Module)}
    weights = weights_of(request, parts)
    quantized = {name: how for name, how in weights.items() if how != CAST}
    called = ", ".join(f"{name}={_code(name, value)}" for name, value in call.items())
    grouped = request.offloading.startswith("group")
    imports = ["import torch", f"from diffusers import {bundle.pipeline}"]
    if grouped:
        imports.append("from diffusers.hooks import apply_group_offloading")
    if quantized:
        imports += ["import diffusers", "import transformers", "from diffusers.quantizers import PipelineQuantizationConfig"]
    if any(how == CAST and not _casts_itself(parts[name]) for name, how in weights.items()):
        imports.append("from diffusers.hooks import apply_layerwise_casting")
    if "Image.new(" in called:
        imports.append("from PIL import Image")
    return _SCRIPT.format(
        pipeline=bundle.pipeline,
        dtype=dtype,
        batch=batch,
        query=_short(format_query(request)),
        packages=" bitsandbytes" if quantized else "",
        imports="\n".join(sorted(imports, key=lambda line: (line.startswith("from"), line))),
        usual=_usual(request),
        arguments="".join(f"        {line}\n" for line in _arguments(request, pipe, bundle, parts, quantized)),
        placed=_placed(request, parts, weights),
        prompt=_prompt(request, bundle),
        called=called,
        gpu=find_gpu(request.gpu).name,
        estimated="".join(f'    "{name}": {size:_},\n' for name, size in figures(estimate).items()),
    )


def figures(estimate: Estimate) -> dict[str, int]:
    """Return the estimates of the program's printed figures, in bytes."""
    load, *others = estimate.phases
    return {
        "allocated after loading": load.allocated_bytes,
        "allocated while loading": load.peak_allocated_bytes,
        "allocated during the call": max(use.peak_allocated_bytes for use in others),
        "allocated after the call": estimate.phases[-1].allocated_bytes,
        "reserved": estimate.peak_reserved_bytes,
    }


def _short(query: str) -> str:
    return query if len(query) <= 400 else f"{query[:400]}..."


def _usual(request: Request) -> str:
    """Return the code of the repository that the program loads without an argument; none for pasted files."""
    name = request.name if request.is_fetched else preset_data(request.name)["repository"] if request.config is None else ""
    return f' if len(sys.argv) > 1 else "{name}"' if name else "  # the folder of the pasted files, with weights"


def _arguments(
    request: Request, pipe: Any, bundle: Bundle, parts: dict[str, nn.Module], quantized: dict[str, str]
) -> list[str]:
    """Return the arguments of `from_pretrained`: dtypes, quantized parts, and None for the parts that are not counted."""
    (dtype,) = request.dtypes
    in_float32 = [name for name in bundle.float32 if name in parts] if dtype != "float32" else []
    dtypes = "".join(f', "{name}": torch.float32' for name in in_float32)
    lines = [f'torch_dtype={{"default": dtype{dtypes}}},' if in_float32 else "torch_dtype=dtype,"]
    if request.revision is not None:
        lines.append(f'revision="{request.revision}",')
    if quantized:
        lines.append("quantization_config=PipelineQuantizationConfig(quant_mapping={")
        for name, how in quantized.items():
            library = "transformers" if is_of_transformers(parts[name]) else "diffusers"
            lines.append(f'    "{name}": {library}.BitsAndBytesConfig({_options(how)}),')
        lines.append("}),")
    optional = getattr(type(pipe), "_optional_components", ())
    known = {part.name for part in bundle.parts}
    without = [*(request.without or ()), *(name.replace("text_encoder", TOKENIZER) for name in request.without or ())]
    nothing = [name for name in optional if name not in known] + [name for name in without if name in known]
    return lines + [f"{name}=None," for name in dict.fromkeys((*nothing, *bundle.left_out))]


def _options(how: str) -> str:
    options = BITSANDBYTES[how]
    texts = [f"{name}={json.dumps(value) if isinstance(value, str) else value}" for name, value in options.items()]
    return ", ".join([*texts, *(["bnb_4bit_compute_dtype=dtype"] if "load_in_4bit" in options else [])])


def _placed(request: Request, parts: dict[str, nn.Module], weights: dict[str, str]) -> str:
    """Return the lines that cast weights, offload, and have the VAE decode in tiles or slices, in this order."""
    lines = ""
    for name in (name for name, how in weights.items() if how == CAST):
        call = f"pipe.{name}.enable_layerwise_casting(" if _casts_itself(parts[name]) else f"apply_layerwise_casting(pipe.{name}, "
        lines += f"    {call}storage_dtype=torch.float8_e4m3fn, compute_dtype=dtype)\n"
    kind, _, blocks = request.offloading.partition(":")
    if kind in _OFFLOADS:
        lines += _OFFLOADS[kind]
    else:
        how = f'"block_level", num_blocks_per_group={int(blocks or 1)}' if kind == BLOCKS else '"leaf_level"'
        lines += _GROUPS.format(options=f"offload_type={how}, use_stream={request.stream}")
    return lines + "".join(f"    pipe.vae.enable_{how}()\n" for how in request.vae or ())


def _casts_itself(part: nn.Module) -> bool:
    return hasattr(part, "enable_layerwise_casting")


def _prompt(request: Request, bundle: Bundle) -> str:
    tokens = request.sequence_length or max(bundle.prompt_tokens.values(), default=WORDS)
    return f'" ".join(["a"] * {max(tokens - _SPECIAL, 1)})  # about {tokens} tokens, if the pipeline does not pad prompts'


def _code(name: str, value: Any) -> str:
    """Return the code of an argument of the call. Texts are the prompt, a list has it several times."""
    if isinstance(value, list):
        return f"[{_code(name, value[0])}] * {len(value)}"
    if name in IMAGES:
        return f'Image.new("RGB", ({value.width}, {value.height}))'
    if isinstance(value, str):
        return "prompt" if name == "prompt" else json.dumps(value)
    return repr(value)
