"""Parts of a model to train: all of it, only its head, or a PEFT adapter on frozen weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

HEAD, WITHOUT_TOWER = "head", "without-tower"
# the values of `train=` with their titles
TRAINS = {"all": "All of it", WITHOUT_TOWER: "All but its tower", HEAD: "Its head", "adapter": "An adapter"}
_PARTS = {HEAD: "the head", WITHOUT_TOWER: "all but the tower"}
PACKAGE = "peft"  # the package that makes adapters; optional
IMPORT = "sizer.architecture.peft_adapters:import_peft"  # imports it without the compiler
ALL_LINEAR = "all-linear"  # PEFT's word: every linear layer but the output embeddings (peft/utils/constants.py, 0.21)
ATTENTION = "attention"
SCRIPT = "script"  # the layers that diffusers' example script for a pipeline adapts

# Those layers by the class of the denoiser, and of a denoiser without a script. Sources: train_*_lora*.py in examples/dreambooth,
# examples/text_to_image, examples/cogvideo and examples/cosmos (diffusers' main branch, 2026-08-23).
_OF_DENOISERS = ("to_k", "to_q", "to_v", "to_out.0")
_OF_BOTH_STREAMS = (
    *("attn.to_k", "attn.to_q", "attn.to_v", "attn.to_out.0"),
    *("attn.add_k_proj", "attn.add_q_proj", "attn.add_v_proj", "attn.to_add_out"),
)
_OF_SCRIPTS = {
    "SD3Transformer2DModel": _OF_BOTH_STREAMS,
    "FluxTransformer2DModel": (
        *_OF_BOTH_STREAMS,
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    ),
    "Flux2Transformer2DModel": (
        *_OF_DENOISERS,
        "to_qkv_mlp_proj",
        *(f"single_transformer_blocks.{block}.attn.to_out" for block in range(48)),  # all blocks of each FLUX.2
    ),
    "SanaTransformer2DModel": ("to_k", "to_q", "to_v"),
    "HiDreamImageTransformer2DModel": ("to_k", "to_q", "to_v", "to_out"),
    "CosmosTransformer3DModel": (*_OF_DENOISERS, "ff.net.0.proj", "ff.net.2"),
    "Ideogram4Transformer2DModel": (*_OF_DENOISERS, "w1", "w2", "w3"),
    "Krea2Transformer2DModel": (
        *(*_OF_DENOISERS, "to_gate", "img_in", "final_layer.linear", "ff.up", "ff.down", "text_fusion.projector"),
        *("txt_in.linear_1", "txt_in.linear_2", "time_embed.linear_1", "time_embed.linear_2", "time_mod_proj"),
    ),
}
# The script that trains FLUX.1 on quantized weights is another: examples/research_projects/flux_lora_quantization.
_OF_QUANTIZED = {"FluxTransformer2DModel": _OF_DENOISERS}


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """One value of `adapter=`: `config_class` in peft, made with `options`.

    `arguments` maps the query keys of the adapter to arguments of its config. Adapters that learn virtual tokens
    (`learns_prompt`) count them with `r`, and need a task that PEFT knows. `on_quantized` says whether the adapter can be
    traced on quantized weights.
    """

    key: str
    title: str
    config_class: str
    arguments: Mapping[str, str]
    options: Mapping[str, object] = field(default_factory=lambda: MappingProxyType({}))
    learns_prompt: bool = False
    on_quantized: bool = True


# PEFT's own code for these fails on weights that are no plain matrix, on some kinds of them at least, or (RandLora) takes less than
# estimated.
_ON_WHOLE_WEIGHTS = {
    *("pissa", "loha", "lokr", "randlora", "tinylora", "delora"),
    *("gralora", "glora", "deft", "peanut", "hra"),
}


def _row(key: str, title: str, config_class: str, arguments: Mapping[str, str], **options: object) -> Adapter:
    learns_prompt = arguments.get("r") == "num_virtual_tokens"
    return Adapter(
        key=key,
        title=title,
        config_class=config_class,
        arguments=arguments,
        options=options,
        learns_prompt=learns_prompt,
        on_quantized=key not in _ON_WHOLE_WEIGHTS,
    )


# Arguments of the config classes of PEFT 0.21 (peft/tuners/*/config.py).
_TARGETS = {"targets": "target_modules"}
_RANK = {"r": "r", **_TARGETS}
_LORA = {**_RANK, "alpha": "lora_alpha", "adapter_dropout": "lora_dropout"}
_LYCORIS = {**_RANK, "alpha": "alpha", "adapter_dropout": "module_dropout"}
_TOKENS = {"r": "num_virtual_tokens"}

_ROWS = (
    _row("lora", "LoRA", "LoraConfig", _LORA),
    _row("dora", "DoRA", "LoraConfig", _LORA, use_dora=True),
    _row("rslora", "rsLoRA", "LoraConfig", _LORA, use_rslora=True),
    _row("pissa", "PiSSA", "LoraConfig", _LORA, init_lora_weights="pissa"),
    _row("olora", "OLoRA", "LoraConfig", _LORA, init_lora_weights="olora"),
    _row("loha", "LoHa", "LoHaConfig", _LYCORIS),
    _row("lokr", "LoKr", "LoKrConfig", _LYCORIS),
    _row("vera", "VeRA", "VeraConfig", _RANK | {"adapter_dropout": "vera_dropout"}),
    _row("pvera", "PVeRA", "PveraConfig", _RANK | {"adapter_dropout": "pvera_dropout"}),
    _row("randlora", "RandLora", "RandLoraConfig", _RANK | {"adapter_dropout": "randlora_dropout"}),
    _row("tinylora", "TinyLoRA", "TinyLoraConfig", _RANK | {"adapter_dropout": "tinylora_dropout"}),
    _row("unilora", "Uni-LoRA", "UniLoraConfig", _RANK | {"adapter_dropout": "unilora_dropout"}),
    _row("delora", "DeLoRA", "DeloraConfig", _RANK | {"adapter_dropout": "module_dropout"}),
    _row("hira", "HiRA", "HiraConfig", _RANK | {"adapter_dropout": "hira_dropout"}),
    _row("gralora", "GraLoRA", "GraloraConfig", _RANK | {"alpha": "alpha", "adapter_dropout": "gralora_dropout"}),
    _row("glora", "GLoRA", "GloraConfig", _RANK),
    _row("miss", "MiSS", "MissConfig", _RANK | {"adapter_dropout": "miss_dropout"}),
    _row("deft", "DEFT", "DeftConfig", _RANK | {"alpha": "alpha", "adapter_dropout": "deft_dropout"}),
    _row("peanut", "PEANuT", "PeanutConfig", _RANK),
    _row("hra", "HRA", "HRAConfig", _RANK),
    _row("oft", "OFT", "OFTConfig", _TARGETS | {"adapter_dropout": "module_dropout"}),  # in blocks of 32
    _row("beft", "BEFT", "BeftConfig", _TARGETS),
    _row("ia3", "IA³", "IA3Config", {}),  # on the layers that PEFT lists for the model's type
    _row("prompt", "Prompt tuning", "PromptTuningConfig", _TOKENS),
    _row("p-tuning", "P-tuning", "PromptEncoderConfig", _TOKENS),
    _row("prefix", "Prefix tuning", "PrefixTuningConfig", _TOKENS),
)

ADAPTERS: dict[str, Adapter] = {row.key: row for row in _ROWS}
# Adapters with a test of their compiled steps against PyTorch's own (tests/null_driver/compiled_queries.py).
COMPILED_ADAPTERS = (
    *("lora", "rslora", "dora", "pissa", "olora", "loha", "lokr", "miss", "oft", "beft", "ia3", "prompt", "p-tuning"),
)


def trained_part(train: str, adapter: str, rank: int) -> str:
    """Return the headline's name for the trained part of a model; empty if the whole model is trained."""
    if train == "all":
        return ""
    if train in _PARTS:
        return _PARTS[train]
    row = ADAPTERS[adapter]
    if row.learns_prompt:
        return f"{row.title[0].lower()}{row.title[1:]} ({rank} tokens)"
    return f"{row.title} (r {rank})" if "r" in row.arguments else row.title


def targets_of_script(denoiser: str, *, quantized: bool) -> tuple[str, ...]:
    """Return the ends of the names of the layers that diffusers' example script adapts.

    Args:
        denoiser: Class of the denoiser, such as "FluxTransformer2DModel".
        quantized: True if its weights are quantized.
    """
    of_scripts = _OF_SCRIPTS | _OF_QUANTIZED if quantized else _OF_SCRIPTS
    return of_scripts.get(denoiser, _OF_DENOISERS)
