"""Choice of the transformers class for a config: the requested head, the config's own, or the usual one of its type.

Some classes have no step that could be traced, or none that trains them: `no_step` and `no_training` say why.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any, TypeGuard

import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto

from sizer.base.errors import BuildError, RequestError, quote, suggest
from sizer.catalogue.recipes import AUTO

# The tasks in order of preference for a type's usual one; each is a MODEL_FOR_<task>_MAPPING_NAMES of
# transformers.models.auto.modeling_auto. A type with several tasks (BERT: masked and causal language modelling, CLIP: zero-shot
# and plain classification) gets the first. A decoder (`is_decoder` in its config) skips masked language modelling.
USUAL_TASKS = (
    "SPEECH_SEQ_2_SEQ",
    "IMAGE_TEXT_TO_TEXT",
    "MULTIMODAL_LM",
    "SEQ_TO_SEQ_CAUSAL_LM",
    "TABLE_QUESTION_ANSWERING",
    "MASKED_LM",
    "CAUSAL_LM",
    "ZERO_SHOT_IMAGE_CLASSIFICATION",
    "IMAGE_CLASSIFICATION",
    "CTC",
    "RNNT",
    "TDT",
    "AUDIO_CLASSIFICATION",
    "ZERO_SHOT_OBJECT_DETECTION",
    "OBJECT_DETECTION",
    "UNIVERSAL_SEGMENTATION",
    "INSTANCE_SEGMENTATION",
    "DEPTH_ESTIMATION",
    "SEMANTIC_SEGMENTATION",
    "IMAGE_SEGMENTATION",
    "VIDEO_CLASSIFICATION",
    "POSE_ESTIMATION",
    "KEYPOINT_DETECTION",
    "KEYPOINT_MATCHING",
    "IMAGE_TO_IMAGE",
    "IMAGE_MATTING",
    "MASK_GENERATION",
    "TEXT_TO_SPECTROGRAM",
    "TEXT_TO_WAVEFORM",
    "TIME_SERIES_PREDICTION",
    "TIME_SERIES_CLASSIFICATION",
    "DECISION",
    "VISUAL_QUESTION_ANSWERING",
    "DOCUMENT_QUESTION_ANSWERING",
    "QUESTION_ANSWERING",
    "SEQUENCE_CLASSIFICATION",
    "TOKEN_CLASSIFICATION",
    "CAUSAL_IMAGE_MODELING",
    "PRETRAINING",
    "RETRIEVAL",
)
BASE_MAPPINGS = ("MODEL_MAPPING_NAMES", "MODEL_FOR_IMAGE_MAPPING_NAMES", "MODEL_FOR_BACKBONE_MAPPING_NAMES")


def fitting_heads(config: PreTrainedConfig) -> dict[str, type[PreTrainedModel]]:
    """Return the model classes of transformers that take this config, by name.

    A class of the config's own package fits under two conditions: its `config_class` is the config's class or a base of it, and
    transformers exports it or names it in an auto mapping. A package without classes (InternLM3 is built by Llama's) has those
    of another package that an auto mapping names for its type. Raises BuildError if the package needs a library that is not
    installed.
    """
    modules, missing = _modeling_modules(config)
    mapped = list(_names_in([name for name in vars(modeling_auto) if name.endswith("_MAPPING_NAMES")], config.model_type))
    heads = {}
    for module in modules:
        for name in dict.fromkeys([*getattr(module, "__all__", ()), *mapped]):
            if _is_model(cls := getattr(module, name, None)) and issubclass(type(config), cls.config_class):
                heads[name] = cls
    if not heads:  # a part of a larger model, with a class that the package does not export
        found = [cls for module in modules for cls in vars(module).values() if _is_model(cls)]
        heads = {cls.__name__: cls for cls in found if cls.config_class is type(config)}
    if heads:
        return heads
    if missing:
        raise BuildError(f"{config.model_type} needs a library that is not installed", given=quote(missing))
    return {name: cls for name in mapped if _is_model(cls := getattr(transformers, name, None))}


def parts_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return the configs of the parts of a model without its own forward (Bark's three transformers); empty for other models."""
    if not all(has_no_forward(cls) for cls in fitting_heads(config).values()):
        return []
    parts = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ()]
    return [part for part in parts if isinstance(part, PreTrainedConfig)]


def choose_part(config: PreTrainedConfig, head: str | None) -> PreTrainedConfig:
    """Return the config itself, or of the part with the class `head` if the model can only be run in parts."""
    if head is None or head in fitting_heads(config):
        return config
    return next((part for part in parts_of(config) if head in fitting_heads(part)), config)


def choose_head(config: PreTrainedConfig, head: str | None) -> tuple[type[PreTrainedModel], tuple[str, ...]]:
    """Return the class to build and the notes that explain the choice.

    `head` if given, else the first of the config's `architectures` that fits, else the usual head of the type.
    Raises RequestError if `head` does not fit, BuildError if transformers has no class for the config.
    """
    heads = fitting_heads(config)
    if not heads:
        raise BuildError(
            "transformers has no model class for this type",
            given=f"model_type {quote(config.model_type)}",
            todo="use the config of the whole model that contains it",
        )
    if head is not None:
        return _requested(config, heads, head), ()
    named = next(iter(config.architectures or ()), None)
    if named in heads:
        return heads[named], ()
    usual = _usual(config, heads)
    if named is None:
        return usual, (f"The config names no architecture; {usual.__name__} is the usual head of {config.model_type}.",)
    return usual, (f"The config names {quote(named)}, which this version of transformers does not build from a "
                   f"{config.model_type} config; {usual.__name__} was used.",)  # fmt: skip


def _requested(config: PreTrainedConfig, heads: dict[str, type[PreTrainedModel]], head: str) -> type[PreTrainedModel]:
    if head in heads:
        return heads[head]
    named = _names_in(BASE_MAPPINGS[:1], config.model_type) if head == AUTO else _names_of(head, config.model_type)
    if (found := next((name for name in named if name in heads), None)) is not None:
        return heads[found]
    names = sorted({*heads, *(name for part in parts_of(config) for name in fitting_heads(part))})
    raise RequestError(
        f"head does not fit a {config.model_type} config",
        given=quote(head),
        allowed=", ".join(names),
        todo=suggest(head, names),
    )


def _names_of(head: str, model_type: str) -> tuple[str, ...]:
    """Return the classes that an auto class such as AutoModelForSequenceClassification has for a type; empty for another name."""
    if not head.startswith("AutoModel") or head not in vars(modeling_auto):
        return ()
    names = getattr(modeling_auto, head)._model_mapping._model_mapping.get(model_type, ())
    return (names,) if isinstance(names, str) else tuple(names)


def _usual(config: PreTrainedConfig, heads: dict[str, type[PreTrainedModel]]) -> type[PreTrainedModel]:
    tasks = [f"MODEL_FOR_{task}_MAPPING_NAMES" for task in USUAL_TASKS]
    if getattr(config, "is_decoder", False) and not getattr(config, "is_encoder_decoder", False):
        tasks.remove("MODEL_FOR_MASKED_LM_MAPPING_NAMES")
    special = [name for name in heads if "For" in name]
    ranked = [*_names_in(tasks, config.model_type), *special, *_names_in(BASE_MAPPINGS, config.model_type), *heads]
    return next(heads[name] for name in ranked if name in heads)


def _modeling_modules(config: PreTrainedConfig) -> tuple[list[ModuleType], str | None]:
    """Return the modeling files of the config's package, and the first library that one of them lacks (None if none)."""
    package = importlib.import_module(type(config).__module__.rpartition(".")[0])
    modules, missing = [], None
    for found in pkgutil.iter_modules(package.__path__):
        if found.name.startswith("modeling_"):
            try:
                with warnings.catch_warnings():  # some files script functions as they are imported, which is deprecated
                    warnings.simplefilter("ignore")
                    modules.append(importlib.import_module(f"{package.__name__}.{found.name}"))
            except ImportError as error:
                missing = missing or error.name or str(error)
    return modules, missing


def _is_model(cls: Any) -> TypeGuard[type[PreTrainedModel]]:
    if not (isinstance(cls, type) and issubclass(cls, PreTrainedModel)):
        return False
    if getattr(cls, "config_class", None) in (None, PreTrainedConfig):
        return False
    return not (has_no_forward(cls) and "pretrained" in cls.__name__.lower())


def has_no_forward(cls: type[PreTrainedModel]) -> bool:
    """Return True for a class that only holds other models (BarkModel) or is abstract: it can be counted, but not run."""
    return cls.forward.__name__ == "_forward_unimplemented"


def _names_in(mappings: list[str] | tuple[str, ...], model_type: str) -> Iterator[str]:
    for mapping in mappings:
        names = getattr(modeling_auto, mapping, {}).get(model_type, ())
        yield from (names,) if isinstance(names, str) else names


# ------------------------------------------------------------------------------------------------------------ refusals


WITHOUT_GRADIENTS = re.compile(r"@torch\.(inference_mode|no_grad)\(\)")  # above a forward
# The memory of such a model depends on pixels and weights that are not available.
OPEN_ENDED = {
    "Sam3VideoModel": (
        "Sam3VideoModel tracks as many objects as it finds in a video, which depends on real images and weights; estimate "
        "model_type sam3 for detection and sam3_tracker_video for tracking, with one object for each sample of the batch"
    )
}


# transformers lays out positions (`col_shape` in modeling_tvp.py) for the samples of a batch, but from one sample's embeddings.
ONE_AT_A_TIME = frozenset({"TvpModel", "TvpForVideoGrounding"})


def no_batch(cls: type[PreTrainedModel], batch: int) -> str | None:
    """Return why the class does not accept a batch of this size; None if it does."""
    if batch == 1 or cls.__name__ not in ONE_AT_A_TIME:
        return None
    return f"{cls.__name__} fails on more than one sample in this version of transformers; batch=1 can be estimated"


def no_step(config: PreTrainedConfig, cls: type[PreTrainedModel]) -> str | None:
    """Return why no step of the class can be traced; None if it has a forward with known inputs."""
    if not has_no_forward(cls):
        return OPEN_ENDED.get(cls.__name__)
    heads = [choose_head(part, None)[0].__name__ for part in parts_of(config)]
    if heads:
        return f"{cls.__name__} has no forward; estimate one of its parts: head={' or '.join(heads)}"
    called = " and ".join(name for name in ("encode", "decode") if hasattr(cls, name))
    return f"{cls.__name__} has no forward: other models call its {called or 'parts'}; estimate the model that contains it"


def no_training(cls: type[PreTrainedModel]) -> str | None:
    """Return why the class cannot be trained: its forward computes no gradients; None if it computes them."""
    found = WITHOUT_GRADIENTS.search(inspect.getsource(cls.forward).partition("def forward")[0])
    if found is None:
        return None
    return f"{cls.__name__} runs under torch.{found[1]}, so it cannot be trained; mode=inference can be estimated"
