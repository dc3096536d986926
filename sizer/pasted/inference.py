"""Python code that runs a model: a pipeline of diffusers, transformers' generation, or vLLM's class LLM. It is read, never run.

Sources: diffusers/pipelines/pipeline_utils.py (0.42), transformers/pipelines (5.24), vllm/entrypoints/llm.py (0.33).
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from sizer.catalogue.sources import arch_of
from sizer.pasted import lines
from sizer.pasted.code import ASSIGNED, MAX_CALLS, call_at, value_of
from sizer.pasted.plain_text import MAX_BYTES
from sizer.pasted.question import Draft, Question
from sizer.serving.launchers import python_command

# Names have bounded lengths, so that every text is searched quickly.
_NAME = r"\w{1,64}"
_PIPELINE = r"(?:\w{0,64}Pipeline\w{0,64}|AutoPipelineFor\w{1,64})\.from_(?:pretrained|single_file)"
# The usual model of a class, for a file without a repository.
_OF_FILES = {
    "StableDiffusionPipeline": "sd1.5",
    "StableDiffusionXLPipeline": "sdxl",
    "StableDiffusion3Pipeline": "sd3-medium",
    "FluxPipeline": "flux.1-dev",
}
_OF_PIPELINES = rf"{_NAME}(?:\.{_NAME})?\.(?:enable|set|load)_{_NAME}|apply_group_offloading"
_BITS = r"\w{0,64}BitsAndBytesConfig"  # libraries have one each, so that code renames them
_OF_MODELS = rf"{_NAME}\.from_pretrained|{_BITS}|{_NAME}\.generate|pipeline"
_CALL = r"(?<![\w.])(?:{})[ \t]*\("
_MADE = re.compile(rf"(?m)^[ \t]*({_NAME})[ \t]*=[ \t]*{_PIPELINE}[ \t]*\(")
_LLAMA = r"(?:llama_cpp\.)?Llama(?:\.from_pretrained)?"
_SERVER = rf"{_LLAMA}|(?:vllm\.)?(?:LLM|(?:Async)?EngineArgs)|(?:sglang|sgl)\.Engine|(?:llm\.)?LLMConfig"
_IMPORTS = re.compile(r"(?m)^[ \t]*(?:from|import)\s+(?:vllm|sglang|ray|llama_cpp)\b")
_IMPORTS_CTRANSFORMERS = re.compile(r"(?m)^[ \t]*(?:from|import)\s+ctransformers\b")
_SERVES = re.compile(r"(?m)^[ \t$]*(?:python3? -m )?transformers(?:-cli)?[ \t]+serve\b")
_GENERATES = ("text-generation", "image-text-to-text", "any-to-any")  # tasks of transformers' pipeline()
_HEADS = re.compile(r"(?:CausalLM|Seq2SeqLM|ImageTextToText|ConditionalGeneration|MultimodalLM|LMHeadModel)$")
_FRAMES = ("num_frames", "video_length", "frames")
_OF_CALLS = (*_FRAMES, "height", "width", "num_images_per_prompt", "guidance_scale", "max_sequence_length")
_ALIKE = ("enable_xformers", "enable_freeu", "set_progress", "set_adapters", "load_textual", "set_timesteps")


@dataclass(frozen=True, slots=True)
class Call:
    """A call in a text: the name of its function, and its arguments by name; a value that is not in the text is None."""

    name: str
    given: dict[str, Any]
    first: Any
    tree: ast.Call

    @property
    def unread(self) -> tuple[str, ...]:
        """Names of the arguments whose values are not in the text."""
        unread = tuple(name for name, value in self.given.items() if value is None and not _is_none(self.tree, name))
        return (*unread, *(f"**{ast.unparse(word.value)}" for word in self.tree.keywords if word.arg is None and not self.given))


def read_inference(text: str) -> Question | None:
    """Return the question of code that runs a pipeline or a model of transformers; None for another text."""
    if len(text) > MAX_BYTES:
        return None
    if (found := _SERVES.search(text)) is not None:
        return _transformers_serve(text[found.end() :])
    if pipelines := list(calls_in(text, _PIPELINE)):
        return _pipeline(text, pipelines[0])
    calls = list(calls_in(text, _OF_MODELS))
    return _model(calls) if any(_is_model(call) for call in calls) else None


def server_command(text: str) -> tuple[str, tuple[str, ...], bool] | None:
    """Return the command of a server with the arguments of its class in Python; None for other code.

    The classes are vLLM's LLM and EngineArgs, SGLang's Engine, llama_cpp's Llama, and Ray's LLMConfig, whose `engine_kwargs` are
    vLLM's. The names of arguments without a value in the text come second. The last value is True for LLM, which vLLM calls
    offline inference.
    """
    if len(text) > MAX_BYTES:
        return None
    if _IMPORTS_CTRANSFORMERS.search(text) is not None:
        call = next(calls_in(text, r"AutoModelForCausalLM\.from_pretrained"), None)
        return None if call is None else (_command_of_ctransformers(call), call.unread, False)
    if _IMPORTS.search(text) is None:
        return None
    if (call := next(calls_in(text, _SERVER), None)) is None:
        return None
    given = dict(call.given)
    if re.fullmatch(_LLAMA, call.name):
        return python_command(given if call.first is None else {"model_path": call.first, **given}), call.unread, False
    if call.name.endswith("LLMConfig"):
        loading, given = given.get("model_loading_config") or {}, given.get("engine_kwargs") or {}
        given = {**given, "model": loading.get("model_source") or loading.get("model_id")}
    of_sglang = call.name.endswith("Engine")
    model = given.pop("model_path" if of_sglang else "model", None) or call.first
    words = ["python", "-m", "sglang.launch_server"] if of_sglang else ["vllm", "serve"]
    words += ([*(["--model-path"] if of_sglang else []), model]) if isinstance(model, str) else []
    for name, value in given.items():
        if value is True:
            words.append(f"--{name.replace('_', '-')}")
        elif value is not None and value is not False:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words), call.unread, call.name.endswith("LLM")


def _command_of_ctransformers(call: Call) -> str:
    """Return the command of llama.cpp for a file that ctransformers (0.2) loads."""
    given = call.given
    file = given.get("model_file") or call.first
    tokens = {"n_ctx": given["context_length"]} if given.get("context_length") else {}
    return python_command({"model_path": file, "n_gpu_layers": given.get("gpu_layers") or 0, **tokens})


def calls_in(text: str, names: str) -> Iterator[Call]:
    """Yield the calls of functions whose names match a pattern."""
    assigned = {found[1]: found[2] for found in ASSIGNED.finditer(text)}
    for found in islice(re.finditer(_CALL.format(names), text), MAX_CALLS):
        if (tree := call_at(text, found.start(), found.end())) is None:
            continue
        given = {word.arg: value_of(word.value, assigned) for word in tree.keywords if word.arg}
        for word in tree.keywords:
            if word.arg is None and isinstance(word.value, ast.Name) and (found_dict := _named_dict(text, word.value.id, assigned)):
                given = found_dict | given
        first = value_of(tree.args[0], assigned) if tree.args else None
        yield Call(text[found.start() : found.end() - 1].strip(), given, first, tree)


def _named_dict(text: str, name: str, assigned: dict[str, str]) -> dict[str, Any]:
    """Return the arguments that a text gives a name, as `name = dict(model="…")` or `name = {"model": "…"}`; empty without."""
    made = r"(?:dict\(([^)]{0,2000})\)|(\{[^}]{0,2000}\}))"
    sign = re.search(rf"(?m)^[ \t]*{re.escape(name)}[ \t]*(?::[ \t]*\w{{1,20}}[ \t]*)?=[ \t]*{made}", text)
    if sign is None:
        return {}
    try:
        tree = ast.parse(f"dict({sign[1]})" if sign[2] is None else sign[2], mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return {}
    found = value_of(tree, assigned)
    return {key: value for key, value in found.items() if isinstance(key, str)} if isinstance(found, dict) else {}


# ------------------------------------------------------------------------------------------------------ pipelines of diffusers


def _pipeline(text: str, made: Call) -> Question:
    draft = Draft(title="a pipeline of diffusers", items={"mode": "inference"})
    repository = made.first or made.given.get("pretrained_model_name_or_path")
    cls, _, way = made.name.rpartition(".")
    if way == "from_single_file" and (preset := _OF_FILES.get(cls.rpartition(".")[2])) is not None:
        draft.assume(f"the file is taken to be {preset}, the usual model of {cls}", arch=f"diffusers:{preset}")
    else:
        _take_pipeline(draft, repository)
    _take_dtype(draft, made, "diffusers loads weights in float32 unless the code says otherwise", "float32")
    missing = [name for name in made.given if name.startswith(("text_encoder", "image_encoder")) and _is_none(made.tree, name)]
    if missing:
        draft.take(", ".join(f"{name}=None" for name in missing), without=",".join(missing))
    weights: dict[str, str] = {}
    for part, how in _quantized_parts(text):
        if how is None:
            draft.unmatched.append(f"quantization_config of {part or 'the pipeline'}: only bitsandbytes' nf4 and int8 are read")
        else:
            weights[part] = how
    pipes = list(dict.fromkeys(found[1] for found in _MADE.finditer(text)))
    for call in calls_in(text, _OF_PIPELINES):
        if call.name.partition(".")[0] in (*pipes, "apply_group_offloading"):
            _setting(draft, call, weights)
    if weights:
        draft.take("quantized parts", weights=",".join(f"{part}:{how}" if part else how for part, how in weights.items()))
    for name in pipes:
        for call in islice(calls_in(text, re.escape(name)), 1):
            _called(draft, call)
    if "offload" not in draft.items and not re.search(r"\.to\(\s*[\"']cuda|device_map|\.cuda\(", text):
        draft.assume("the code does not place the parts: all are assumed to be on the device")
    return draft.whole(kind="code")


def _take_pipeline(draft: Draft, repository: object) -> None:
    """Take the architecture of a pipeline's repository: its preset, or the repository itself."""
    if not isinstance(repository, str) or not lines.pipeline(draft, "from_pretrained", repository):
        draft.assume("the code names no repository: the model of the form is kept")


def _is_none(tree: ast.Call, name: str) -> bool:
    value = next((word.value for word in tree.keywords if word.arg == name), None)
    return isinstance(value, ast.Constant) and value.value is None


def _take_dtype(draft: Draft, call: Call, why: str, otherwise: str) -> None:
    given = next((call.given[name] for name in ("dtype", "torch_dtype") if call.given.get(name) is not None), None)
    if given is None or given == "auto" or not lines.dtype(draft, "dtype", given):
        draft.assume(why, dtype=otherwise)


def _quantized_parts(text: str) -> Iterator[tuple[str, str | None]]:
    """Yield the quantized parts of a pipeline with the layout of their weights; None for another layout than those of a query."""
    bits = list(calls_in(text, _BITS))
    for call in calls_in(text, "PipelineQuantizationConfig"):
        how = _layout({**call.given, **(call.given.get("quant_kwargs") or {})})
        parts = call.given.get("components_to_quantize")
        yield from ((part, how) for part in ([parts] if isinstance(parts, str) else parts or [""]))
    for call in calls_in(text, rf"{_NAME}\.from_pretrained"):
        part = call.given.get("subfolder")
        if "quantization_config" in call.given and isinstance(part, str):
            yield part, _layout(bits[0].given) if bits else None


def _layout(given: dict[str, Any]) -> str | None:
    """Return the layout of weights that bitsandbytes' arguments ask for."""
    if given.get("load_in_4bit"):
        if given.get("bnb_4bit_quant_type", "fp4") != "nf4":
            return None
        return "nf4-dq" if given.get("bnb_4bit_use_double_quant") else "nf4"
    return "int8" if given.get("load_in_8bit") else None


def _setting(draft: Draft, call: Call, weights: dict[str, str]) -> None:
    """Read a call that sets how a pipeline works."""
    owner, _, name = call.name.rpartition(".")
    part = owner.rpartition(".")[2] if "." in owner else ""
    if name == "enable_model_cpu_offload":
        draft.take(f"{name}()", offload="model")
    elif name == "enable_sequential_cpu_offload":
        draft.take(f"{name}()", offload="sequential")
    elif name in ("enable_group_offload", "apply_group_offloading"):
        blocks = call.given.get("num_blocks_per_group") or 1
        way = f"group-block:{blocks}" if call.given.get("offload_type") == "block_level" else "group-leaf"
        draft.take(name, offload=way, **({"stream": 1} if call.given.get("use_stream") else {}))
    elif name in ("enable_vae_tiling", "enable_vae_slicing") or (part == "vae" and name in ("enable_tiling", "enable_slicing")):
        ways = [*filter(None, draft.items.get("vae", "").split(",")), name.removeprefix("enable_").removeprefix("vae_")]
        draft.take(f"{name}()", vae=",".join(sorted({*ways}, reverse=True)))
    elif name == "enable_layerwise_casting":
        weights.setdefault(part, "fp8-cast")
    elif name.startswith(_ALIKE):
        draft.irrelevant += 1
    else:
        draft.unmatched.append(f"{call.name}()")


def _called(draft: Draft, call: Call) -> None:
    """Read the arguments of a pipeline's call."""
    given = call.given
    draft.unmatched += [f"{name}: its value is not in the text" for name in call.unread if name in _OF_CALLS]
    height, width = given.get("height"), given.get("width")
    if isinstance(height, int) and isinstance(width, int):
        draft.take(f"height={height}, width={width}", image=f"{height}x{width}")
    if isinstance(frames := next((given[name] for name in _FRAMES if name in given), None), int):
        draft.take(f"num_frames={frames}", frames=frames)
    prompts = given.get("prompt") or call.first
    count = (given.get("num_images_per_prompt") or 1) * (len(prompts) if isinstance(prompts, list) else 1)
    draft.take(f"{count} images", batch=count) if count > 1 else draft.assume("one prompt, one image", batch=1)
    if isinstance(scale := given.get("guidance_scale"), int | float) and scale <= 1:
        draft.take(f"guidance_scale={scale}", guidance=0)
    if isinstance(tokens := given.get("max_sequence_length"), int):
        draft.take(f"max_sequence_length={tokens}", seq=tokens)
    if given.get("output_type") == "latent":
        draft.take("output_type=latent", output="latent")


# ------------------------------------------------------------------------------------------------------ models of transformers


def _is_model(call: Call) -> bool:
    owner, _, name = call.name.rpartition(".")
    if call.name == "pipeline":
        return isinstance(call.given.get("model"), str)
    other = re.search(r"Tokenizer|Processor|Config|FeatureExtractor|Scheduler", owner)
    return name == "from_pretrained" and not other


def _model(calls: list[Call]) -> Question:
    """Return the question of code that loads a model of transformers, and maybe generates with it."""
    draft = Draft(title="code of transformers")
    made = next(call for call in calls if _is_model(call))
    generation = next((call for call in calls if call.name.endswith(".generate")), None)
    task = made.given.get("task") or made.first if made.name == "pipeline" else None
    generates = generation is not None or task in _GENERATES or bool(_HEADS.search(made.name.partition(".")[0]))
    draft.take("generate" if generates else made.name, mode="generate" if generates else "inference")
    repository = made.given.get("model") if made.name == "pipeline" else made.first
    repository = repository or made.given.get("pretrained_model_name_or_path")
    if isinstance(repository, str) and (arch := arch_of(repository)) is not None:
        draft.take(f"from_pretrained: {repository}", arch=arch)
    else:
        draft.assume("the code names no repository: the model of the form is kept")
    by_unsloth = made.name.startswith("Fast")  # FastLanguageModel, FastVisionModel, FastModel
    why = "transformers loads weights in the checkpoint's dtype, mostly this one for such models"
    if by_unsloth:
        draft.unmatched.append("unsloth: its own kernels")
        why = "Unsloth's default"
    _take_dtype(draft, made, why, "bfloat16" if generates or by_unsloth else "float32")
    named = next((call.given for call in calls if call.name.endswith("BitsAndBytesConfig")), None)
    bits = made.given if named is None else named
    if named is None and "quantization_config" in made.given:
        draft.unmatched.append("quantization_config: only that of bitsandbytes is read; weights are counted unquantized")
    if by_unsloth and "load_in_8bit" not in bits and bits.get("load_in_4bit", True):
        draft.take("load_in_4bit", weights="nf4")
    elif bits.get("load_in_4bit"):
        double = bits.get("bnb_4bit_use_double_quant")
        kind = ("nf4-dq" if double else "nf4") if bits.get("bnb_4bit_quant_type", "fp4") == "nf4" else "fp4"
        draft.take("load_in_4bit", weights=kind)
        found = bits.get("bnb_4bit_compute_dtype")
        if found is None:
            draft.assume("bitsandbytes' default", compute="float32")
        else:
            lines.compute(draft, "bnb_4bit_compute_dtype", found)
    elif bits.get("load_in_8bit"):
        draft.take("load_in_8bit", weights="int8")
    if (way := made.given.get("attn_implementation")) is not None:
        lines.attention(draft, "attn_implementation", way)
    if made.name != "pipeline":
        lines.head(draft, "class", made.name.partition(".")[0])
    piped = next((call.given.get("batch_size") for call in calls if call.name == "pipeline"), None)
    if isinstance(piped, int):
        draft.take(f"batch_size={piped}", batch=piped)
    if generation is not None and isinstance(new := generation.given.get("max_new_tokens"), int):
        draft.take(f"max_new_tokens={new}", new=new)
    draft.assume("one sequence", batch=1)
    if generates:
        draft.assume("the code does not give the length of prompts", seq=1024)
    return draft.whole(kind="code")


def _transformers_serve(text: str) -> Question:
    """Return the question of transformers' server, which answers one request at once by generate().

    Source: transformers/cli/serve.py, 5.24.
    """
    draft = Draft(title="transformers serve")
    draft.take("transformers serve", mode="generate")
    text = re.sub(r"[\\^`][ \t]*\r?\n", " ", text.strip()).partition("\n")[0]
    given = dict(re.findall(r"--([a-z][a-z_-]{1,40})(?:[ =]+(?!--)[\"']?([^\s\"']{1,200}))?", text))
    given = {name.replace("_", "-"): value for name, value in given.items()}
    first = re.match(r"[ \t]*(?!-)(\S{1,200})", text)
    repository = given.get("force-model") or (first[1] if first else "")
    if (arch := arch_of(repository)) is not None:
        draft.take(repository, arch=arch)
    else:
        draft.assume("the command names no repository, as the model is that of a request: the model of the form is kept")
    if not lines.dtype(draft, "--dtype", given.get("dtype", "auto")):
        draft.assume("the dtype of most checkpoints", dtype="bfloat16")
    if (bits := {"bnb-4bit": "nf4-dq", "bnb-8bit": "int8"}.get(given.get("quantization", ""))) is not None:
        draft.take(f"--quantization {given['quantization']}", weights=bits)
    if (way := given.get("attn-implementation")) is not None and not lines.attention(draft, "--attn-implementation", way):
        draft.unmatched.append(f"--attn-implementation {way}")
    if "continuous-batching" in given:
        draft.unmatched.append("--continuous-batching: its paged cache takes a share of the free memory; one request is counted")
    draft.assume("one request at once", batch=1)
    draft.assume("the command does not give the length of prompts", seq=1024)
    return draft.whole(kind="code")
