"""Adapters of PEFT's, and heads that are trained alone: what is trained, in which dtype, and what is refused."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec

import pytest
import torch
from torch import nn

from sizer.architecture import make_blueprint
from sizer.architecture.peft_adapters import cast
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError
from sizer.catalogue.adapters import ADAPTERS
from sizer.estimating.estimator import estimate
from sizer.query.text import parse_query
from sizer.tracing.trace import build
from tests.architecture.tiny_configs import TINY
from tests.tracing.models import LLAMA, MIXTRAL, WHISPER
from tests.tracing.models import T5 as LARGE_T5

GPT2 = {
    "model_type": "gpt2",
    "architectures": ["GPT2LMHeadModel"],
    "n_layer": 2,
    "n_embd": 64,
    "n_head": 2,
    "vocab_size": 1000,
}
BERT = {"model_type": "bert", "architectures": ["BertForSequenceClassification"], "num_hidden_layers": 2, "hidden_size": 64,
        "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 1000}  # fmt: skip
T5 = LARGE_T5 | {"d_model": 64, "d_ff": 128, "d_kv": 16, "num_heads": 4, "vocab_size": 1000}

REFUSED_FOR_CONV1D = {"loha", "lokr", "delora", "glora", "miss", "peanut", "hra", "oft", "beft"}  # by PEFT

needs_peft = pytest.mark.skipif(find_spec("peft") is None, reason="peft is not installed")
needs_timm = pytest.mark.skipif(find_spec("timm") is None, reason="timm is not installed")


def arch(config: dict) -> str:
    return f"arch=config:{encode_config(json.dumps(config))}"


def made(query: str) -> nn.Module:
    """The module of a query on meta."""
    request = parse_query(query)
    return build(make_blueprint(request), checkpointing=request.checkpointing)


def facts(module: nn.Module) -> dict[str, tuple]:
    tensors = [*module.named_parameters(), *module.named_buffers()]
    return {name: (tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors}


@needs_peft
@pytest.mark.parametrize(
    ("adapter", "config"),
    [
        (adapter, config)
        for adapter in ADAPTERS
        for config in (LLAMA, GPT2, BERT)
        if not (config is GPT2 and adapter in REFUSED_FOR_CONV1D)
    ],
)
def test_it_is_what_peft_makes_of_a_model_in_half_precision(adapter: str, config: dict):
    query = f"{arch(config)}&train=adapter&adapter={adapter}"
    ours = cast(made(query), torch.bfloat16)
    # as everybody does it: the weights are in bfloat16 before PEFT sees them, on the CPU, with values
    request = parse_query(query)
    blueprint = make_blueprint(request)
    real = blueprint.build().to(torch.bfloat16)
    theirs = blueprint.limit(real)
    assert facts(ours) == facts(theirs)
    assert not any(p.is_meta for p in theirs.parameters())


@needs_peft
def test_lora_adds_two_matrices_to_each_linear_layer():
    module = made(f"{arch(LLAMA)}&train=adapter&r=8")
    # of each of 3 layers: q, o 256 to 256; k, v 256 to 64; gate, up 256 to 512; down 512 to 256
    layer = 2 * (256 + 256) + 2 * (256 + 64) + 2 * (256 + 512) + (512 + 256)
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == 3 * 8 * layer
    assert all("lora_" in name for name, p in module.named_parameters() if p.requires_grad)


@needs_peft
@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (LLAMA, ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (GPT2, ["c_attn", "c_proj"]),
        (T5, ["k", "o", "q", "v"]),
        (WHISPER, ["k_proj", "out_proj", "q_proj", "v_proj"]),
    ],
)
def test_attention_names_its_linear_layers(config: dict, layers: list[str]):
    module = made(f"{arch(config)}&train=adapter&targets=attention")
    adapted = {name.split(".lora_A")[0].rpartition(".")[2] for name, _ in module.named_parameters() if "lora_A" in name}
    assert sorted(adapted) == layers


@needs_peft
def test_attention_adapts_what_is_in_attention_alone():
    module = made(f"{arch(GPT2)}&train=adapter&targets=attention")
    assert {name for name, _ in module.named_parameters() if "lora_A" in name and ".mlp." in name} == set()


@needs_peft
def test_alpha_and_dropout_arrive():
    module = made(f"{arch(LLAMA)}&train=adapter&r=4&targets=q_proj&adapter_dropout=0.25")
    config = module.peft_config["default"]
    assert (config.r, config.lora_alpha, config.lora_dropout) == (4, 8, 0.25)
    assert made(f"{arch(LLAMA)}&train=adapter&r=4&alpha=4").peft_config["default"].lora_alpha == 4


@needs_peft
def test_checkpointing_is_on_before_and_peft_prepares_for_it():
    module = made(f"{arch(LLAMA)}&train=adapter&checkpointing=1")
    assert module.get_base_model().model.gradient_checkpointing
    assert module.get_input_embeddings()._forward_hooks
    assert not made(f"{arch(LLAMA)}&train=adapter").get_input_embeddings()._forward_hooks


def said(query: str) -> tuple[str, ...]:
    request = parse_query(query)
    blueprint = make_blueprint(request)
    return blueprint.describe(build(blueprint, checkpointing=request.checkpointing))


@needs_peft
def test_it_says_what_is_trained():
    (lora, prepared) = said(f"{arch(LLAMA)}&train=adapter&targets=q_proj,v_proj&checkpointing=1")
    assert lora.startswith("LoRA, rank 16, on 6 layers (q_proj, v_proj), in float32: 39,936 of ")  # 3*16*(512 + 320)
    assert prepared.startswith("Checkpointing is not reentrant")
    (lora,) = said(f"{arch(BERT)}&train=adapter&targets=query")
    assert lora.endswith("the rest are frozen. classifier trains whole, as PEFT has it for this task.")
    (prompt,) = said(f"{arch(LLAMA)}&train=adapter&adapter=prompt&r=8")
    assert prompt.startswith("Prompt tuning with 8 virtual tokens: 2,048 of ")
    assert (
        len(said("arch=torchvision:vit_b_32&train=adapter&targets=0&checkpointing=1")) == 1
    )  # no embeddings to prepare


@needs_peft
def test_copies_of_whole_modules_train_beside_an_adapter():
    query = f"{arch(LLAMA)}&train=adapter&targets=q_proj&modules_to_save=embed_tokens,lm_head"
    module = made(query)
    trained = [name for name, one in module.named_parameters() if one.requires_grad and "lora_" not in name]
    assert [name.rpartition(".modules_to_save.")[0].rpartition(".")[2] for name in trained] == ["embed_tokens", "lm_head"]
    (lora,) = said(query)
    assert lora.endswith(" A copy of embed_tokens, lm_head is fully trained, in addition to the frozen original.")
    (both,) = said(f"{arch(BERT)}&train=adapter&targets=query&modules_to_save=pooler")
    assert " A copy of pooler is fully trained" in both and " classifier trains whole, as PEFT has it" in both


@needs_peft
@pytest.mark.parametrize(
    ("query", "message"),
    [
        (
            f"{arch(LLAMA)}&train=adapter&modules_to_save=embed_tokens,lm_haed",
            r"modules_to_save: LlamaForCausalLM has no module of this name: given .lm_haed., .*lm_head",
        ),
        (f"{arch(LLAMA)}&train=adapter&targets=query", r"PEFT refuses LoRA for LlamaForCausalLM: .*query.* not found"),
        (
            "arch=torchvision:resnet18&train=adapter&adapter=prompt",
            r"Prompt tuning needs a model of a task that PEFT knows: given ResNet, allowed ForCausalLM",
        ),
        ("arch=torchvision:resnet18&train=adapter&adapter=ia3", r"PEFT refuses IA³ for ResNet"),
        (
            "arch=torchvision:resnet18&train=adapter&targets=attention",
            r"no linear layer stands in an attention of this model: given targets=attention with ResNet",
        ),
        (f"{arch(LLAMA)}&train=adapter&adapter=prefix&checkpointing=1", r"PEFT refuses Prefix tuning .*checkpointing"),
    ],
)
def test_what_peft_refuses_is_refused_with_its_reason(query: str, message: str):
    with pytest.raises(BuildError, match=message):
        made(query)


def test_an_encoder_of_sound_is_adapted_without_a_task():
    """PEFT's model of sequences hands input_ids on, which Whisper does not take."""
    query = f"arch=config:{encode_config(json.dumps(TINY['whisper']))}&train=adapter&dtype=bfloat16&batch=1"
    (row,) = estimate(parse_query(query)).estimates
    assert 0 < row.gradients_bytes < row.weights_bytes


def test_a_router_that_returns_several_tensors_is_not_adapted():
    text = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    text |= {"intermediate_size": 48, "intermediate_size_mlp": 48, "num_local_experts": 2, "vocab_size": 128}
    query = f"arch=config:{encode_config(json.dumps({'model_type': 'llama4_text', **text}))}&train=adapter"
    with pytest.raises(BuildError, match=r"more than a tensor: given targets=all-linear with .*router, a Llama4Router"):
        build(make_blueprint(parse_query(query), None))
    build(make_blueprint(parse_query(f"{query}&targets=attention"), None))


def test_a_layer_of_groups_of_features_is_not_adapted():
    query = "arch=hf:deepseek-v4-flash&train=adapter&dtype=bfloat16"
    with pytest.raises(BuildError, match=r"takes groups of features: given targets=all-linear with .*o_a_proj"):
        build(make_blueprint(parse_query(query), None))


def test_without_peft_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(BuildError, match=r"peft is not installed: given train=adapter; pip install peft"):
        made(f"{arch(LLAMA)}&train=adapter")


# ------------------------------------------------------------------------------------------------------------- heads


def trained(query: str) -> list[str]:
    return [name for name, p in made(query).named_parameters() if p.requires_grad]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        (arch(LLAMA), ["lm_head.weight"]),
        (arch(GPT2), ["transformer.wte.weight"]),  # tied
        (arch(BERT), ["classifier.weight", "classifier.bias"]),
        (arch(T5), ["shared.weight"]),  # tied
        (arch(MIXTRAL), ["lm_head.weight"]),
        ("arch=torchvision:resnet18", ["fc.weight", "fc.bias"]),
        ("arch=torchvision:vit_b_32", ["heads.head.weight", "heads.head.bias"]),
        ("arch=torchvision:swin_t", ["head.weight", "head.bias"]),
        ("arch=torchvision:densenet121", ["classifier.weight", "classifier.bias"]),
        pytest.param("arch=timm:vit_tiny_patch16_224", ["head.weight", "head.bias"], marks=needs_timm),
    ],
)
def test_the_head_alone_is_trained(query: str, names: list[str]):
    assert trained(f"{query}&train=head") == names


def test_a_detection_models_head_is_all_but_its_backbone():
    assert {name.split(".")[0] for name in trained("arch=torchvision:fasterrcnn_resnet50_fpn&train=head")} == {
        "rpn", "roi_heads"
    }  # fmt: skip


def test_all_but_the_towers_is_trained():
    query = f"{arch(TINY['llava'])}&train=without-tower"
    frozen = set(trained(arch(TINY["llava"]))) - set(trained(query))
    assert frozen and all(name.startswith("model.vision_tower.") for name in frozen)
    assert {name.split(".")[1] for name in trained(query)} >= {"multi_modal_projector", "language_model"}
    assert said(query)[0].startswith("All but model.vision_tower trains: ")


@pytest.mark.parametrize("config", [LLAMA, BERT, WHISPER], ids=lambda config: config["model_type"])
def test_a_model_without_a_tower_is_refused(config: dict):
    with pytest.raises(BuildError, match="has no vision or audio tower in addition to the trained part: given train=without-tower"):
        made(f"{arch(config)}&train=without-tower")


def test_a_tied_head_is_said():
    trained, tied = said(f"{arch(GPT2)}&train=head")
    assert tied == "The head is tied to transformer.wte.weight, which is also trained."
    assert "64,000 of" in trained  # 1,000 * 64


def test_a_model_without_a_head_is_refused():
    with pytest.raises(BuildError, match=r"LlamaModel has no separate head to train: given train=head"):
        made(f"{arch(LLAMA | {'architectures': ['LlamaModel']})}&head=LlamaModel&train=head")
