"""Clean an untrusted config: known keys only, no references to code, files or the network, numbers in range.

A config.json is an interface with side effects, even without remote code. The sandbox around the job is the first barrier; this
filter is the second one, which can say what was refused. No model is built here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from sizer.architecture.foreign_configs import as_transformers
from sizer.architecture.schema import (
    BACKBONE_KEYS,
    ConfigClass,
    check_value,
    class_of_part,
    class_of_type,
    field_rows,
    has_output_layer,
    keys_set,
    known_keys,
    reads,
    refuse_type,
    renamed_type,
    usual_part,
)
from sizer.base.config_json import FLOAT_TAG, TAGGED_FLOATS
from sizer.base.errors import ConfigError, quote

# Keys that are always removed, whatever their class declares: code, kernels and files to load, dtypes (the request chooses them),
# and switches that change the outputs' form. So are keys that begin with "_" or end as below.
_NEVER = frozenset(
    {
        *("auto_map", "attribute_map", "sub_configs", "trust_remote_code", "custom_pipelines", "name_or_path"),
        *("dtype", "torch_dtype", "return_dict", "use_return_dict", "output_attentions"),
        *("quantization_config", "compression_config", "use_pretrained_backbone", "pretrained_cfg"),
    }
)
_NEVER_ENDING = ("_implementation", "_path", "_file", "_dir", "_checkpoint")
_NOTES = {
    "auto_map": "The config names remote code; transformers' class for its model type is used instead.",
}

_NOT_TIED = "The output layer is not tied to the embeddings, as text_config says: release 4 of transformers read it there."

# Allowed arguments of a timm model in addition to its exact name; other arguments open files and choose devices.
_TIMM_ARGUMENTS = frozenset(
    {"out_indices", "in_chans", "num_channels", "output_stride", "features_only", "inference_mode"}
)
# Sizes and switches of timm's vision transformers (timm/models/vision_transformer.py, 1.0.31), as configs of GigaPath and
# H-optimus name them.
_TIMM_SIZES = frozenset(
    {
        *("img_size", "patch_size", "embed_dim", "depth", "num_heads", "mlp_ratio", "init_values", "reg_tokens", "num_classes"),
        *("dynamic_img_size", "dynamic_img_pad", "strict_img_size", "class_token", "no_embed_class", "global_pool", "qkv_bias"),
        *("pre_norm", "fc_norm", "drop_rate", "drop_path_rate"),
    }
)
_TIMM, _IMAGE_SIZE = "timm_wrapper", "image_size"
_TIMM_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(\.[a-z0-9_]{1,63})?", re.ASCII)
_LOADER = re.compile(r"\s*(hf[-_]hub|local[-_]dir|file|https?)\s*:", re.IGNORECASE)
_TYPE_NAME = re.compile(r"([A-Za-z0-9][\w.-]{0,63})?", re.ASCII)


# Keys for the width or depth of a model, in any of transformers' types.
SIZE_KEY = re.compile(
    r"(?:\w+_)?(?:hidden_sizes?|hidden_dim|embed(?:ding)?_dims?|embedding_size|intermediate_size|ffn_dim|d_model|d_ff|n_embd|n_layers?"
    r"|dims?|num_layers|hidden_layers|layers|depths?|channels|layer_sizes|width|filters)"
)
_FOREIGN_SIZE = re.compile(r"dim|layer|head|state|width|depth|hidden|embd|vocab|channels")  # in keys that are not read
MANY_SIZES = 6  # named in one message


@dataclass(frozen=True, slots=True, kw_only=True)
class CleanConfig:
    """A config that may be built: `config` (with its `model_type`), the removed keys, and notes."""

    config: dict
    dropped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def clean_config(raw: dict) -> CleanConfig:
    """Return the part of a config.json that describes an architecture that the installed transformers knows.

    Keys that its config class does not take (and, recursively, those of the configs inside it) are dropped and named in
    `dropped` by their path. `raw` is not changed. Raises ConfigError: an unknown or refused model_type, an address in place of
    a name, a value out of its domain.

    *Known limitations*: a key that is read only by a model's code, not by its config class, is dropped. Consistency of the
    values (heads that divide the hidden size) is checked later, when the config object is made.
    """
    raw, read = as_transformers(raw)
    raw, renamed = renamed_type(_name_timm_type(raw))
    work = _Cleaning(notes=[*read, *renamed])
    cls = class_of_type(raw.get("model_type"))
    config = work.clean(raw, cls, "", {_IMAGE_SIZE} if raw.get("model_type") == _TIMM else ())
    if has_output_layer(raw, cls):
        config["tie_word_embeddings"] = False
        work.notes.append(_NOT_TIED)
    _check_sizes(raw, config, cls, work.dropped)
    return CleanConfig(config=config, dropped=tuple(work.dropped), notes=tuple(dict.fromkeys(work.notes)))


@dataclass(slots=True)
class _Cleaning:
    """One pass over one config, with its removed keys and notes."""

    dropped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def clean(self, raw: dict, cls: ConfigClass, path: str, extra: Iterable[str] = ()) -> dict:
        """Return the keys of `raw` that `cls` (or `extra`) knows, each with its value cleaned."""
        known, rows, aliases = known_keys(cls).union(extra), field_rows(cls), cls.attribute_map
        _check_timm(raw, cls, path)
        result = {}
        for key, value in raw.items():
            where, name = f"{path}{key}", aliases.get(key, key)
            if key not in known or _is_never(key) or _is_never(name):
                self._drop(key, value, where)
                continue
            result[key] = self._value(key, value, cls, where)
            check_value(where, result[key], *rows.get(name, ()))
        return _inline_backbone(result, cls)

    def _drop(self, key: str, value: object, where: str) -> None:
        self.dropped.append(where)
        if key in _NOTES and value:
            self.notes.append(_NOTES[key])

    def _value(self, key: str, value: object, cls: ConfigClass, where: str) -> object:
        part = key.removesuffix("_dict")  # text_config_dict, vision_config_dict: former keys of CLIP
        if part in cls.sub_configs and value is not None:
            return self._part(part, value, cls, where)
        if key == "per_layer_config" and value is not None and not isinstance(value, dict):
            given = f"{where} = {quote(value)}"
            raise ConfigError("config has a part of the wrong kind", given=given, allowed="layers by number, each {...}")
        if key == "per_layer_config" and isinstance(value, dict):
            layers = {index: layer for index, layer in value.items() if isinstance(layer, dict)}
            return {index: self.clean(layer, cls, f"{where}.{index}.", {"skip"}) for index, layer in layers.items()}
        if key in ("id2label", "label2id"):
            return value
        return self._plain(key, value, where)

    def _part(self, part: str, value: object, cls: ConfigClass, where: str) -> dict:
        if not isinstance(value, dict):
            raise ConfigError("config has a part of the wrong kind", given=f"{where} = {quote(value)}", allowed="{...}")
        model_type = value.get("model_type")
        if model_type is not None and not (isinstance(model_type, str) and _TYPE_NAME.fullmatch(model_type)):
            raise ConfigError(f"{where}.model_type is malformed", given=quote(model_type), allowed="a model type")
        refuse_type(model_type or "", f"{where}.model_type")
        inner = class_of_part(cls, part, model_type, f"{where}.model_type")
        usual = usual_part(cls, part)
        return self.clean(value, inner, f"{where}.", keys_set(usual) if type(usual) is inner else ())

    def _plain(self, key: str, value: object, where: str) -> object:
        """Return a value that is not declared as a config, cleaned recursively."""
        if isinstance(value, list):
            return [self._plain(key, item, where) for item in value]
        if not isinstance(value, dict):
            _check_text(key, value, where)
            return value
        if set(value) == {FLOAT_TAG}:
            return _tagged(value[FLOAT_TAG], where)
        if "model_type" in value:
            return self.clean(value, class_of_type(value["model_type"], f"{where}.model_type"), f"{where}.")
        return self._mapping(value, where)

    def _mapping(self, value: dict, where: str) -> dict:
        result = {}
        for key, item in value.items():
            if _is_never(key):
                self._drop(key, item, f"{where}.{key}")
            else:
                result[key] = self._plain(key, item, f"{where}.{key}")
                check_value(f"{where}.{key}", result[key])
        return result


def _tagged(name: object, where: str) -> float:
    if isinstance(name, str) and name in TAGGED_FLOATS:
        return TAGGED_FLOATS[name]
    given = f"{where}.{FLOAT_TAG} = {quote(name)}"
    raise ConfigError("config has a number that is not known", given=given, allowed=", ".join(TAGGED_FLOATS))


def _is_never(key: str) -> bool:
    return key in _NEVER or key.startswith("_") or key.endswith(_NEVER_ENDING)


def _check_text(key: str, value: object, where: str) -> None:
    if not isinstance(value, str):
        return
    if _LOADER.match(value):
        raise ConfigError(
            "config points elsewhere", given=f"{where} = {quote(value)}", todo="put the value itself there"
        )
    if key == "backbone" and not _TIMM_NAME.fullmatch(value):
        given = f"{where} = {quote(value)}"
        raise ConfigError(
            "config points elsewhere", given=given, allowed="a timm name", todo="give backbone_config instead"
        )


def _check_timm(raw: dict, cls: ConfigClass, path: str) -> None:
    """Raise ConfigError for timm arguments that could open a file: only exact names and a few plain arguments are allowed."""
    for key in ("model_args", "backbone_kwargs"):
        arguments = raw.get(key) or {}
        known = _TIMM_ARGUMENTS | _TIMM_SIZES
        refused = sorted(set(arguments) - known) if isinstance(arguments, dict) else ["no object"]
        if refused:
            given = f"{path}{key}: {quote(', '.join(refused))}"
            allowed = f"{', '.join(sorted(_TIMM_ARGUMENTS))}, sizes such as img_size"
            raise ConfigError("arguments for timm are refused", given=given, allowed=allowed, todo="remove the others")
    if cls.model_type == "timm_backbone" or "model_args" in known_keys(cls):
        key = "backbone" if cls.model_type == "timm_backbone" else "architecture"
        name = raw.get(key)
        if name is not None and not (isinstance(name, str) and _TIMM_NAME.fullmatch(name)):
            given, allowed = f"{path}{key} = {quote(name)}", "an exact name such as resnet50"
            raise ConfigError("name of a timm model is malformed", given=given, allowed=allowed)


def _inline_backbone(config: dict, cls: ConfigClass) -> dict:
    """Return the config with a named backbone replaced by the backbone's config.

    transformers would look such a name up on the hub first (backbone_utils.py, 5.23), unless the class reads it itself.
    """
    name, arguments = config.get("backbone"), config.get("backbone_kwargs") or {}
    if "backbone_config" not in cls.sub_configs or name is None or config.get("backbone_config") is not None:
        return config
    if config.get("use_timm_backbone") is False:
        todo = "give its config as backbone_config"
        raise ConfigError("config names a backbone of the hub", given=f"backbone = {quote(name)}", todo=todo)
    if not arguments and reads(cls, {"backbone", "timm_default_kwargs"}):  # in 5.23; in 5.17
        return config
    rest = {key: value for key, value in config.items() if key not in BACKBONE_KEYS}
    return {**rest, "backbone_config": {"model_type": "timm_backbone", "backbone": name, **arguments}}


def _check_sizes(raw: dict, config: dict, cls: ConfigClass, dropped: Iterable[str]) -> None:
    """Raise ConfigError if sizes were given under other names, and none that the type reads: its defaults would answer."""
    unread = [key for key in dropped if type(raw.get(key)) is int and _FOREIGN_SIZE.search(key)]
    expected = [name for name in (*field_rows(cls), *cls.attribute_map) if SIZE_KEY.fullmatch(name)]
    parts = (config, *(part for part in config.values() if isinstance(part, dict)))
    if not unread or not expected or any(map(_has_size, parts)):
        return
    raise ConfigError(
        f"config has none of the sizes that transformers reads for the type {cls.model_type}",
        given=quote(", ".join(unread)),
        allowed=", ".join(expected[:MANY_SIZES]) or "the keys of a published config.json of this type",
        todo="paste the model's config.json from the hub, in transformers' own format",
    )


def _has_size(config: dict) -> bool:
    return any(SIZE_KEY.fullmatch(key) for key in config)


def _name_timm_type(raw: dict) -> dict:
    """Return timm's own config with the keys of transformers: it has no model_type, but an architecture and a pretrained_cfg.

    Without classes it is the model without a head. Its images have the size for which it was built.
    """
    held = raw.get("pretrained_cfg")
    if "model_type" in raw or not ("architecture" in raw and isinstance(held, dict)):
        return raw
    made = {"model_type": _TIMM, **{key: value for key, value in raw.items() if key != "num_classes"}}
    classes = raw.get("num_classes")
    if isinstance(arguments := raw.get("model_args"), dict):
        classes = arguments.get("num_classes", classes)
        made["model_args"] = {key: value for key, value in arguments.items() if key != "num_classes"}
    if classes == 0:
        made["architectures"] = ["TimmWrapperModel"]
    elif classes is not None:
        made["num_labels"] = classes
    shape, size = held.get("input_size"), (made.get("model_args") or {}).get("img_size")
    if size is None and isinstance(shape, list) and len(shape) == 3:
        size = shape[1:]
    return made if size is None else {**made, _IMAGE_SIZE: size}
