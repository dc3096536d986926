"""A pipeline of diffusers from its files: parts on meta, cast as `from_pretrained(torch_dtype=...)` leaves them."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from sizer.architecture.compile_later import compiled_when_called
from sizer.base.errors import BuildError, ConfigError, quote, suggest
from sizer.base.versions import installed
from sizer.catalogue.pipelines import DENOISERS
from sizer.diffusion.bundle import GUIDER, INDEX, SCHEDULER, TOKENIZER, Bundle, Part, needs_inputs
from sizer.diffusion.tokens import UnknownImages, UnknownWords, UnknownWordsAndImages

WORDS = 60  # default number of tokens of a prompt
LONGEST = 4096  # tokenizers without a limit name 10^30
IMAGES = ("image", "mask_image", "control_image", "control_mask")  # arguments of a call that are given images
_GIVEN = ("self", "prompt", *IMAGES)
_TEXT = "text_encoder"
GUARDRAIL = "CosmosSafetyChecker"
_NOT_NULL = (*DENOISERS, "vae", "controlnet", SCHEDULER)  # parts that a pipeline needs unless its class marks them as optional


def build_pipeline(
    bundle: Bundle, dtype: torch.dtype, *, without: Collection[str] = (), tokens: int | None = None
) -> Any:
    """Return a DiffusionPipeline with parts on the current default device; `without` are parts that are None.

    `tokens` is the number of tokens of a prompt, None for the usual number.

    Raises:
        BuildError: diffusers is missing or has no such pipeline, or a part or its config is refused by its class.
        ConfigError: The pipeline's call needs inputs that are not made here, or a part that is null in its index.
    """
    kind = pipeline_class(bundle)
    _check_parts(kind, bundle)
    required = [name for name in _required(kind) if name not in _GIVEN]
    if required:
        raise needs_inputs(bundle.pipeline, f"{', '.join(required)}, which are not made here")
    _do_without_ftfy(kind)
    absent = (*getattr(kind, "_optional_components", ()), *bundle.absent, *bundle.left_out)  # as in `from_pretrained`
    made: dict[str, Any] = dict.fromkeys(absent) | dict(bundle.options)
    for part in bundle.parts:
        if part.name in without:
            made[part.name] = None
        elif part.has_weights:
            made[part.name] = build_part(part, torch.float32 if part.name in bundle.float32 else dtype)
        elif part.name == SCHEDULER or "Scheduler" in part.kind or GUIDER in part.kind:
            made[part.name] = _scheduler(part)
        elif "Tokenizer" in part.kind or TOKENIZER in part.name:
            made[part.name] = _tokenizer(bundle, part, tokens)
        else:
            made[part.name] = _processor(bundle, part, tokens)
    accepted = inspect.signature(kind.__init__).parameters
    try:
        with _without_guardrail(kind):
            pipe = kind(**{name: value for name, value in made.items() if name in accepted})
    except (TypeError, ValueError, AttributeError, ImportError) as error:
        raise BuildError(
            f"{bundle.pipeline} refuses these parts",
            given=quote(" ".join(str(error).split()), 300),
            todo="install it" if isinstance(error, ImportError) else f"check {INDEX}, and the parts of `without`",
        ) from error
    template = getattr(pipe, "prompt_template_encode_start_idx", 0)  # tokens that are cut off once they are encoded
    for words in (one for one in made.values() if isinstance(one, UnknownWords)):
        if isinstance(template, int) and (tokens is not None or words.words <= template):
            words.words += template
    return pipe


def pipeline_class(bundle: Bundle) -> Any:
    """Return the class of a pipeline.

    Raises:
        BuildError: diffusers is missing or has no such class, or it is no pipeline that can be called.
    """
    diffusers = diffusers_installed()
    kind = _class(diffusers, bundle.pipeline, "pipeline")
    lacks_package = hasattr(kind, "_backends")  # diffusers' placeholder of a class, which names the package when it is made
    if not lacks_package and (not _is_class(kind, diffusers.DiffusionPipeline) or kind is diffusers.DiffusionPipeline):
        raise BuildError(
            f"{bundle.pipeline} is not a pipeline with parts",
            given=quote(bundle.pipeline),
            todo=f"write the _class_name of the pipeline's repository into {INDEX}, such as FluxPipeline",
        )
    return kind


def _is_class(kind: object, base: type) -> bool:
    return isinstance(kind, type) and issubclass(kind, base)


def _check_parts(kind: Any, bundle: Bundle) -> None:
    """Raise ConfigError if the index lacks a part that the pipeline needs, or if the part is null."""
    accepted, optional = inspect.signature(kind.__init__).parameters, getattr(kind, "_optional_components", ())
    needed = [name for name, one in accepted.items() if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
    for name in (one for one in needed if one != "self"):
        encoder = name.replace(TOKENIZER, _TEXT)
        if TOKENIZER in name and encoder in bundle.with_weights:
            needs = name not in bundle.named or name in bundle.absent
        else:
            needs = name not in optional and (name not in bundle.named or (name in bundle.absent and name in _NOT_NULL))
        if not needs:
            continue
        given, what = f'{INDEX} with "{name}": [null, null]', "is null"
        if name not in bundle.named:
            given, what = f"{INDEX} without {name}", "is missing"
        raise ConfigError(
            f"part {name!r} {what}, which {bundle.pipeline} needs",
            given=given,
            allowed="a library, diffusers or transformers, and a class of it",
            todo=f"copy {INDEX} again from the pipeline's repository",
        )


def reads_images(bundle: Bundle) -> bool:
    """Return True if a pipeline's call starts from images: it requires one, or the name of its class says so."""
    return bundle.reads_images or any(name in IMAGES for name in _required(pipeline_class(bundle)))


def _required(kind: Any) -> list[str]:
    """Return the arguments that a pipeline's call cannot do without."""
    parameters = inspect.signature(kind.__call__).parameters.values()
    return [one.name for one in parameters if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]


def diffusers_installed() -> Any:
    """Return the package diffusers.

    Raises:
        BuildError: It is not installed.
    """
    try:
        import diffusers
    except ImportError as error:
        raise BuildError("diffusers is not installed", given="arch=diffusers:", todo="pip install diffusers") from error
    return diffusers


def _do_without_ftfy(kind: type) -> None:
    """Have a pipeline clean no prompts if ftfy is not installed, which some call all the same (wan/pipeline_wan_i2v.py, 0.42)."""
    module = sys.modules[kind.__module__]
    if find_spec("ftfy") is None and hasattr(module, "is_ftfy_available") and not hasattr(module, "ftfy"):
        vars(module)["ftfy"] = SimpleNamespace(fix_text=lambda text: text)


class _NoChecker:
    """A safety checker of Cosmos without weights, which finds nothing: its pipelines make no call without one."""

    def to(self, device: Any) -> _NoChecker:
        """Return it."""
        return self

    def check_text_safety(self, prompt: str) -> bool:
        """Return True: the prompt is safe."""
        return True

    def check_video_safety(self, frames: Any) -> Any:
        """Return the frames of a video as they are."""
        return frames


@contextmanager
def _without_guardrail(kind: type) -> Iterator[None]:
    """Have pipelines of Cosmos make no safety checker of cosmos_guardrail, which fetches weights (pipelines/cosmos, 0.42)."""
    names = vars(sys.modules[kind.__module__])
    own = names.get(GUARDRAIL)
    if own is not None:
        names[GUARDRAIL] = _NoChecker
    try:
        yield
    finally:
        if own is not None:
            names[GUARDRAIL] = own


def has_guardrail(pipe: Any) -> bool:
    """Return True for a pipeline of Cosmos: its safety checker is left out here."""
    return hasattr(sys.modules[type(pipe).__module__], GUARDRAIL)


def _class(library: Any, name: str, what: str) -> Any:
    with compiled_when_called():  # diffusers' quantizers import bitsandbytes
        kind = getattr(library, name, None)
    if kind is None:
        raise BuildError(
            f"the installed {library.__name__} {installed(library.__name__)} has no such {what}",
            given=quote(name),
            todo=suggest(name, dir(library)) or f"upgrade {library.__name__}, or check {INDEX}",
        )
    return kind


def _refusals() -> tuple[type[Exception], ...]:
    """Return the errors that classes of diffusers and transformers raise for an invalid config."""
    from huggingface_hub.errors import StrictDataclassError

    return (
        *(TypeError, ValueError, LookupError, AttributeError, RuntimeError, AssertionError, ArithmeticError),
        *(ImportError, OSError, StrictDataclassError),
    )


def _refused(part: Part, error: Exception) -> BuildError:
    return BuildError(
        f"{part.kind} refuses the config of {part.name}",
        given=quote(" ".join(f"{type(error).__name__}: {error}".split()), 300),
        todo="copy the file again from the pipeline's repository",
    )


def _scheduler(part: Part) -> Any:
    """Return a scheduler, or a guider. Raises BuildError."""
    kind = _class(diffusers_installed(), part.kind, SCHEDULER)
    try:
        with torch.device("cpu"):  # its tables go through numpy
            return kind.from_config(dict(part.config))
    except _refusals() as error:
        raise _refused(part, error) from error


def build_part(part: Part, dtype: torch.dtype) -> nn.Module:
    """Return a part that has weights, on the current default device, with frozen weights as loaded in `dtype`.

    Raises:
        BuildError: diffusers or transformers has no such class, or the class refuses the config.
    """
    import transformers

    kind = _class(_library(part.library), part.kind, f"class for {part.name}")
    if not _is_class(kind, nn.Module) and not hasattr(kind, "_backends"):
        raise BuildError(
            f"{part.kind} of {part.name} is not a model",
            given=quote(part.kind),
            todo=f"write the class of {part.name} from the pipeline's repository into {INDEX}",
        )
    try:
        if _is_class(kind, transformers.PreTrainedModel):
            module = kind(kind.config_class.from_dict(dict(part.config)))
        else:
            module = kind.from_config(dict(part.config))
    except _refusals() as error:
        raise _refused(part, error) from error
    return as_loaded(module.eval().requires_grad_(False), dtype)


def _whole_config(part: Part) -> dict[str, Any]:
    """Return the config of a part with the defaults of its class, which files may leave out."""
    import transformers

    kind = getattr(_library(part.library), part.kind, None)
    if not _is_class(kind, transformers.PreTrainedModel):
        return dict(part.config)
    model: Any = kind
    try:
        return model.config_class.from_dict(dict(part.config)).to_dict()
    except _refusals():  # `build_part` refuses it, by name
        return dict(part.config)


def _library(name: str) -> Any:
    """Return the module that has a part's class: a package, or a folder of diffusers' pipelines."""
    import transformers

    diffusers = diffusers_installed()
    if name in ("diffusers", "transformers"):
        return diffusers if name == "diffusers" else transformers
    old = getattr(diffusers.pipelines, "deprecated", None)
    return getattr(diffusers.pipelines, name, None) or getattr(old, name, None) or diffusers


def _tokenizer(bundle: Bundle, part: Part, tokens: int | None) -> UnknownWords:
    encoder = next((one for one in bundle.parts if one.name == part.name.replace(TOKENIZER, _TEXT)), None)
    config = {} if encoder is None else _whole_config(encoder)
    config = {**config, **dict(config.get("text_config") or {})}
    longest = part.config.get("model_max_length") or config.get("max_position_embeddings")  # CLIP reads no longer prompt
    return UnknownWords(
        model_max_length=min(longest if isinstance(longest, int) else LONGEST, LONGEST),
        words=tokens or bundle.prompt_tokens.get(part.name, WORDS),
        vocabulary=config.get("vocab_size", 32_000),
    )


def _processor(bundle: Bundle, part: Part, tokens: int | None) -> UnknownWords | UnknownImages | UnknownWordsAndImages | None:
    """Return the processor of a prompt or of an image encoder; None if the call reads no image and this reads nothing else."""
    if not reads_images(bundle):
        return None if part.kind.endswith(("ImageProcessor", "ImageProcessorFast")) else _tokenizer(bundle, part, tokens)
    if part.kind.startswith("Qwen2VL"):
        config = next((one.config for one in bundle.parts if one.name == "text_encoder"), {})
        return UnknownWordsAndImages(
            words=tokens or bundle.prompt_tokens.get(part.name, WORDS), image_token=config.get("image_token_id", 151_655)
        )
    sees = [
        config
        for name in ("image_encoder", "text_encoder")
        for one in bundle.parts
        if one.name == name and (config := one.config.get("vision_config", one.config if name == "image_encoder" else None))
    ]
    return UnknownImages(side=sees[0].get("image_size", 224)) if sees else None


def is_of_transformers(module: nn.Module) -> bool:
    """Return True for a model that transformers loads, also one of a class that diffusers defines."""
    import transformers

    return isinstance(module, transformers.PreTrainedModel)


def as_loaded(module: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Cast a module in place as `from_pretrained(torch_dtype=dtype)` does, and return it; tied weights stay tied.

    Both libraries keep some weights in float32: diffusers in any dtype, transformers only in float16. transformers does not
    cast buffers that no checkpoint holds (diffusers 0.42 and transformers 5.24, modeling_utils.py).
    """
    from_diffusers = not is_of_transformers(module)
    kept = set(getattr(module, "_keep_in_fp32_modules", None) or ())
    if not from_diffusers and dtype != torch.float16:
        kept = set()
    cast: dict[int, nn.Parameter] = {}
    for path, child in module.named_modules():
        for name, parameter in child._parameters.items():
            if parameter is None or not parameter.is_floating_point() or kept & set(f"{path}.{name}".split(".")):
                continue
            if id(parameter) not in cast:
                cast[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
            child._parameters[name] = cast[id(parameter)]
        for name, buffer in child._buffers.items():
            if buffer is None or not buffer.is_floating_point() or kept & set(f"{path}.{name}".split(".")):
                continue
            if from_diffusers or name not in child._non_persistent_buffers_set:
                child._buffers[name] = buffer.to(dtype)
    return module
