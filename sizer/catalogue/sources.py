"""Sources of architectures: one row for each way to write `arch=<source>:<value>`, and the names of models by source.

A row names functions that import torch as text, MODULE:FUNCTION, which is imported when it is called.

Names are known without importing the packages that build them. `vision_names.csv` has those of torchvision 0.29 and timm 1.0.31:
it only resolves and suggests names; the packages themselves decide which models they build.
"""

from __future__ import annotations

import contextlib
import csv
import importlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from sizer.base.config_json import canonical_config, decode_config
from sizer.base.errors import (
    GIVEN_LIMIT,
    ConfigError,
    HubError,
    PipelineError,
    RefusedValueError,
    RequestError,
    close_words,
    did_you_mean,
    letters,
)
from sizer.catalogue.adapters import SCRIPT
from sizer.catalogue.pipelines import pipeline_preset_of, preset_names
from sizer.catalogue.presets import find_preset, list_presets

DATA = Path(__file__).with_name("vision_names.csv")
_WRITTEN = re.compile(r"[\w.-]+", re.ASCII)
_COUNT = 3  # names of a suggestion
HF, DIFFUSERS, TORCHVISION, TIMM = "hf", "diffusers", "torchvision", "timm"


def resolve(source: str, text: str) -> str | None:
    """Return the source's name that equals a text except for case and separators; None if the source has no such name.

    A name of timm may have a tag after a dot, which does not change.
    """
    if source == HF:
        try:
            return find_preset(text).key
        except RequestError:
            return None
    if _WRITTEN.fullmatch(text) is None:
        return None
    name, dot, tag = text.partition(".") if source == TIMM else (text, "", "")
    known = _by_letters().get(source, {}).get(letters(name[:GIVEN_LIMIT]), ())
    found = name if name in known else known[0] if len(known) == 1 else None  # regnet_x_16gf is not regnet_x_1_6gf
    return None if found is None else f"{found}{dot}{tag}"


def close_name(source: str, text: str) -> str | None:
    """Return a suggestion for a name that a source does not have, such as "did you mean torchvision:resnet50?".

    None without any.

    Names that differ only in case and separators come first, in the source itself or in other sources. Similar names follow,
    from the source, or from other sources if it has none.
    """
    if own := _by_letters().get(source, {}).get(letters(text[:GIVEN_LIMIT])):
        return did_you_mean(own)
    others = [one for one in _by_letters() if one != source]
    same = [f"{other}:{name}" for other in others if (name := resolve(other, text)) is not None]
    near = _near(source, text)
    if not same:
        return did_you_mean(near) or next((did_you_mean(found) for one in others if (found := _near(one, text, f"{one}:"))), None)
    return did_you_mean([*same, *(f"{source}:{name}" for name in near)][:_COUNT])


def _near(source: str, text: str, prefix: str = "") -> list[str]:
    """Return the names of a source that are close to a text, behind a prefix."""
    return [f"{prefix}{name}" for name in close_words(text, chain.from_iterable(_by_letters().get(source, {}).values()), _COUNT)]


@cache
def _by_letters() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the names of each source by their letters and digits, in the order in which sources are searched."""
    with DATA.open(encoding="utf-8", newline="") as file:
        rows = [(row["source"], row["name"]) for row in csv.DictReader(file)]
    names = {
        HF: [preset.key for preset in list_presets()],
        TORCHVISION: [name for source, name in rows if source == TORCHVISION],
        DIFFUSERS: preset_names(),
        TIMM: [name for source, name in rows if source == TIMM],
    }
    found: dict[str, dict[str, list[str]]] = {source: {} for source in names}
    for source, known in names.items():
        for name in known:
            found[source].setdefault(letters(name), []).append(name)
    return found


Entry = Literal["names", "presets", "repository", "config"]

TORCHVISION_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}", re.ASCII)
TIMM_NAME = re.compile(r"[a-z][a-z0-9_]{0,63}(?:\.[a-z0-9_]{1,63})?", re.ASCII)
# A repository of the hub always has an owner here; no part begins or ends with "-" or ".", none holds "--" or "..".
REPO_ID = re.compile(r"(?!.*(?:--|\.\.))(?:\w(?:[\w.-]{0,94}\w)?/)\w(?:[\w.-]{0,94}\w)?", re.ASCII)
REVISION = re.compile(r"(?!.*(?:\.\.|//))\w(?:[\w./-]{0,126}[\w-])?", re.ASCII)
# The address of a repository's page, of a branch of it, or of its config.json or model_index.json.
HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([^/?#]+/[^/?#]+)/?(.*)", re.ASCII | re.IGNORECASE
)
_FILE = r"/(?:config|model_index)\.json"
_OF_REVISION = re.compile(rf"(?:tree|(?:blob|resolve|raw)(?=/.+{_FILE}$))/(.+?)(?:{_FILE})?/?", re.ASCII)
_TUNED = re.compile(r"-(?:instruct|chat|it|base)$")
_QUANTIZED = re.compile(r"[-_](?:fp8(?:-dynamic)?|awq|gptq(?:-int[48])?|w8a8)$")
EXAMPLE = "write for example arch=torchvision:resnet50"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """One source of architectures.

    - `usage`: syntax after `arch=`. `title`: name in the form. `entry`: how the form asks for a name.
    - `read`: returns the Request's `name`, `revision` and `config` of a value; raises RefusedValueError.
    - `title_of`: returns a name's title for the headline; None if names are untrusted input.
    - `blueprint`: the function (request, config) -> Blueprint.
    - `names`: the function that lists the models of `package` by "name" and "family"; None if no package lists them.
    - `preload`: modules that the job server imports ahead, in addition to `package` and the blueprint's module.
    - `count`, `trace`: functions for a source that names several modules, except for training, which uses one of them.
      `script`: the function (request, config, estimate) -> str that writes a program of that work. None for other sources.
    - `defaults`: fields of Request with other defaults for this source.
    - `refuses`: query keys that its models do not support. `refuses_modes`: unsupported values of `mode`.
    - `fetch`: the function (repository, revision) -> bytes that gets a config from the hub, if a name is a repository.
    - `required`: the package is installed wherever Sizer is.
    """

    key: str
    usage: str
    title: str
    entry: Entry
    read: Callable[[str], dict[str, str | None]]
    package: str
    blueprint: str
    names: str | None = None
    title_of: Callable[[str], str] | None = None
    preload: tuple[str, ...] = ()
    count: str | None = None
    trace: str | None = None
    script: str | None = None
    defaults: Mapping[str, Any] = field(default_factory=dict)
    refuses: tuple[str, ...] = ()
    refuses_modes: tuple[str, ...] = ()
    fetch: str | None = None
    required: bool = True


def offered_sources() -> tuple[Source, ...]:
    """Return the sources that can be built here: their package is required, or installed."""
    return tuple(row for row in SOURCES.values() if row.required or find_spec(row.package))


# Further packages whose versions answers depend on: the module of each, and its distribution.
_ALSO_CALLED = {
    **{name: name for name in ("peft", "bitsandbytes", "torchao", "trl")},
    "liger_kernel": "liger-kernel",
    "cut_cross_entropy": "cut-cross-entropy",
    "sentence_transformers": "sentence-transformers",
    "fla": "fla-core",
}


def called_packages() -> tuple[str, ...]:
    """Return the distributions of the installed packages that answers depend on."""
    also = (distribution for module, distribution in _ALSO_CALLED.items() if find_spec(module))
    return ("torch", *(source.package for source in offered_sources()), *also)


def import_function(path: str) -> Callable[..., Any]:
    """Return the function that MODULE:FUNCTION names. Raises ImportError."""
    module, function = path.split(":")
    return getattr(importlib.import_module(module), function)


def is_fetched(source: str, name: str) -> bool:
    """Return True if the config of a source's name comes from the hub."""
    return SOURCES[source].fetch is not None and REPO_ID.fullmatch(name) is not None


def fetch(source: str, name: str, revision: str | None) -> bytes:
    """Return the config of a repository of the hub as a source reads it. Raises HubError, which names a preset of that model."""
    try:
        return import_function(SOURCES[source].fetch or "")(name, revision)
    except PipelineError:
        raise
    except HubError as error:
        if (pipeline := pipeline_preset_of(name)) is not None:
            preset = f"ask for the preset arch=diffusers:{pipeline}"
        else:
            try:
                preset = f"ask for the preset arch=hf:{find_preset(name.rpartition('/')[2]).key}"
            except RequestError:
                raise error from None
        todo = f"{error.todo}, or {preset}" if error.todo else preset
        raise HubError(error.what, given=error.given, allowed=error.allowed, todo=todo) from error


def find_source(text: str) -> tuple[str, str] | None:
    """Return source and value of an architecture that is written without its source; None if it is not an architecture.

    - An address of the hub, or <org/name>, is a repository.
    - A preset's key or hub name is that preset, in any case. The same holds for a diffusion pipeline.
    - A name that only timm has, or with a tag, is timm's; any other name is torchvision's.

    *Known limitations*: packages are not queried for their names, because this runs where none of them is imported. A name that
    is newer than `vision_names.csv` is taken as torchvision's.
    """
    if HUB_ADDRESS.fullmatch(text) or REPO_ID.fullmatch(text.partition("@")[0]):
        return "hub", text
    with contextlib.suppress(RequestError):
        return "hf", find_preset(text).key
    for source in ("torchvision", "diffusers", "timm"):
        if (name := resolve(source, text)) is not None:
            return source, name
    if TORCHVISION_NAME.fullmatch(plain := _plain(text)):
        return "torchvision", plain
    return ("timm", text) if TIMM_NAME.fullmatch(text) else None


# Owners of repositories that had none until 2023 (huggingface.co/docs/hub/repositories-settings), by the beginning of the name.
_OWNERS = {
    **dict.fromkeys(("bert-base-", "bert-large-"), "google-bert"),
    **dict.fromkeys(("albert-base-", "albert-large-", "albert-xlarge-", "albert-xxlarge-"), "albert"),
    **dict.fromkeys(("distilbert-base-", "distilroberta-base"), "distilbert"),
    **dict.fromkeys(("roberta-base-", "roberta-large-", "xlm-roberta-", "xlm-mlm-"), "FacebookAI"),
    **dict.fromkeys(("t5-3b", "t5-11b"), "google-t5"),
    **dict.fromkeys(("xlnet-base-", "xlnet-large-"), "xlnet"),
    "camembert-base": "almanach",
}


def arch_of(repository: str) -> str | None:
    """Return the architecture of a repository as a query names it, a preset if it has one; None for another text.

    A folder is a preset if its name is the name of the preset's repository, also with a quantization layout at its end.
    """
    known = {preset.hub_id.lower(): preset.key for preset in list_presets()}
    if (cached := re.search(r"models--([\w.-]{1,96}?)--([\w.-]{1,96})(?:/|$)", repository)) is not None:
        repository = f"{cached[1]}/{cached[2]}"
    text = repository.strip().lower().rstrip("/")
    tuned = _TUNED.sub("", text)
    if (key := known.get(text) or known.get(tuned)) is not None:
        return f"hf:{key}"
    if REPO_ID.fullmatch(repository):
        return f"hub:{repository}"
    folder = text.rpartition("/")[2]
    names = {name.rpartition("/")[2]: key for name, key in known.items()}
    plain = _QUANTIZED.sub("", folder)
    found = next((names[one] for one in (folder, plain, _TUNED.sub("", plain)) if one in names), None)
    if found:
        return f"hf:{found}"
    owner = next((owner for begin, owner in _OWNERS.items() if text.startswith(begin)), None)
    return f"hub:{owner}/{text}" if owner and REPO_ID.fullmatch(f"{owner}/{text}") else None


def _plain(name: str) -> str:
    """Return the name of torchvision's function that people write otherwise, such as ResNet-50 or ViT-B-16."""
    return resolve("torchvision", name) or name.lower().replace("-", "")


def _read_torchvision(value: str) -> dict[str, str | None]:
    if not TORCHVISION_NAME.fullmatch(plain := _plain(value)):
        todo = close_name("torchvision", value) or EXAMPLE
        raise RefusedValueError("a torchvision model name: lower-case letters, digits and _", todo)
    return {"name": plain}


def _read_timm(value: str) -> dict[str, str | None]:
    name = resolve("timm", value) or value
    if not TIMM_NAME.fullmatch(name):
        allowed = "a timm model name: lower-case letters, digits and _, with a tag behind a dot or none"
        raise RefusedValueError(allowed, close_name("timm", value) or "write for example arch=timm:resnet50.a1_in1k")
    return {"name": name}


def _read_preset(value: str) -> dict[str, str | None]:
    try:
        return {"name": find_preset(value).key}
    except RequestError as error:
        raise RefusedValueError(error.allowed or "", close_name("hf", value) or error.todo or "") from None


def _read_hub(value: str, example: str = "hub:openai-community/gpt2") -> dict[str, str | None]:
    name, at, revision = _repository(value).partition("@")
    if not REPO_ID.fullmatch(name):
        todo = close_name("hub", name) or f"write for example arch={example}"
        raise RefusedValueError("<org/name> of letters, digits, . _ -", todo)
    if at and not REVISION.fullmatch(revision):
        raise RefusedValueError("<org/name>@<branch, tag or commit>", f"write arch={example}@main")
    return {"name": name, "revision": revision if at else None}


def _repository(value: str) -> str:
    """Return <org/name>[@revision] for an address of the hub; any other value unchanged."""
    address = HUB_ADDRESS.fullmatch(value)
    if address is None:
        return value
    name, path = address.groups()
    revision = _OF_REVISION.fullmatch(path.partition("?")[0])
    if path and revision is None:
        raise RefusedValueError(
            "the address of a repository, of a branch (/tree/<revision>) or of its config.json (/blob/<revision>/config.json)",
            f"write hub:{name}",
        )
    return f"{name}@{revision[1]}" if revision else name


def _read_config(value: str) -> dict[str, str | None]:
    try:
        text = canonical_config(decode_config(value))
        return {"source": "diffusers", "config": text} if _INDEX in text else {"config": text}
    except ConfigError as error:
        given = f"{error.what}, {error.given}" if error.given else error.what
        raise RefusedValueError(error.allowed or "base64url(zlib(JSON))", error.todo or EXAMPLE, given) from error


def _read_pipeline(value: str) -> dict[str, str | None]:
    if len(value) <= _LONGEST_PRESET and "ip-adapter" in value.lower().replace("_", "-"):
        raise RefusedValueError("pipelines without IP-Adapter, which is not built", "ask for its pipeline: arch=diffusers:sdxl")
    if "/" in value:  # base64url has none
        return _read_hub(value, "diffusers:stabilityai/stable-diffusion-xl-base-1.0")
    if len(value) > _LONGEST_PRESET:
        return _read_config(value)
    return {"name": import_function("sizer.diffusion.bundle:find_preset")(value)}


_OF_TRANSFORMERS = ("tp", "cp", "pp", "head", "seq", "inputs", "attention", "weights")
_INDEX = '"model_index.json":'  # in the files of a pipeline, by their paths
_LONGEST_PRESET = 64  # characters
_OF_A_MODULE = (
    *("head", "inputs", "attention", "parallel", "tp", "cp", "pp", "classes"),
    *("compile", "compile_scope", "budget"),
)
_OF_TORCHVISION = ("trainable_layers",)
_GENERATES = ("generate", "serve")

_ROWS = (
    Source(
        key="torchvision",
        usage="torchvision:<name>",
        title="torchvision",
        entry="names",
        read=_read_torchvision,
        title_of=str,
        package="torchvision",
        blueprint="sizer.architecture.torchvision_models:from_request",
        names="sizer.architecture.torchvision_models:list_names",
        refuses=_OF_TRANSFORMERS,
        refuses_modes=_GENERATES,
    ),
    Source(
        key="timm",
        usage="timm:<name>[.tag]",
        title="timm",
        entry="names",
        read=_read_timm,
        title_of=str,
        package="timm",
        blueprint="sizer.architecture.timm_models:from_request",
        names="sizer.architecture.timm_models:list_names",
        refuses=(*_OF_TRANSFORMERS, *_OF_TORCHVISION),
        refuses_modes=_GENERATES,
        required=False,
    ),
    Source(
        key="hf",
        usage="hf:<preset>",
        title="Preset (Hugging Face)",
        entry="presets",
        read=_read_preset,
        title_of=lambda name: find_preset(name).title,
        refuses=_OF_TORCHVISION,
        package="transformers",
        blueprint="sizer.architecture.huggingface:from_preset",
        preload=(
            "transformers.modeling_utils",
            "transformers.models.auto.modeling_auto",
            # imports modules that most language models share: caches, masks, generation
            "transformers.models.llama.modeling_llama",
        ),
    ),
    Source(
        key="hub",
        usage="hub:<org/name>[@revision]",
        title="Hub repository",
        entry="repository",
        read=_read_hub,
        refuses=_OF_TORCHVISION,
        package="transformers",
        blueprint="sizer.architecture.huggingface:from_config",
        fetch="sizer.architecture.hub_files:fetch_config",
    ),
    Source(
        key="config",
        usage="config:<base64url(zlib(JSON))>",
        title="Your config.json",
        entry="config",
        read=_read_config,
        refuses=_OF_TORCHVISION,
        package="transformers",
        blueprint="sizer.architecture.huggingface:from_config",
    ),
    Source(
        key="diffusers",
        usage="diffusers:<preset>, <org/name>[@revision] or <base64url(zlib(JSON of its files))>",
        title="Diffusion pipeline",
        entry="names",
        read=_read_pipeline,
        title_of=str,
        package="diffusers",
        blueprint="sizer.diffusion.training:training_blueprint",
        names="sizer.diffusion.work:list_names",
        count="sizer.diffusion.work:count",
        trace="sizer.diffusion.work:trace",
        script="sizer.diffusion.script:write_script",
        fetch="sizer.diffusion.hub:fetch_bundle",
        defaults={
            "mode": "inference",
            "dtypes": ("bfloat16",),
            "batches": (1,),
            "adapter_targets": (SCRIPT,),
        },
        refuses=(*_OF_A_MODULE, *_OF_TORCHVISION),
        refuses_modes=_GENERATES,
        required=False,
    ),
)

SOURCES: dict[str, Source] = {row.key: row for row in _ROWS}
