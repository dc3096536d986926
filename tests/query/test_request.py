from __future__ import annotations

import json
import random
import re
import zlib
from base64 import urlsafe_b64encode
from dataclasses import asdict
from typing import get_type_hints

import pytest

from sizer.base.codec import decode, encode
from sizer.base.config_json import decode_config, encode_config
from sizer.base.errors import ConfigError, RequestError, letters
from sizer.catalogue.adapters import ADAPTERS, ALL_LINEAR, TRAINS
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.modes import MODES
from sizer.catalogue.optimizers import IMPLEMENTATIONS, OPTIMIZERS
from sizer.catalogue.parallel import OTHER_NAMES, PARALLELS
from sizer.catalogue.presets import PRESETS
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.hints import _SAME, _STAGES, _SWITCHES, HINTS
from sizer.query.keys import KEYS
from sizer.query.request import DEFAULT_BATCHES, Request, check_one_rank, gpu_of, scope_of
from sizer.query.text import MAX_KEYS, format_query, join_query, parse_query, split_query
from sizer.query.values import ATTENTIONS, CACHES, DTYPES
from sizer.report.report import Report

RESNET = "arch=torchvision:resnet50"
LLAMA = "arch=hub:meta-llama/Llama-3.1-8B"


def pack(data: bytes) -> str:
    return urlsafe_b64encode(zlib.compress(data)).decode().rstrip("=")


def refused_keys(query: str) -> list[str]:
    with pytest.raises(RequestError) as caught:
        parse_query(query)
    assert str(caught.value).split("\n") == list(map(str, caught.value.refusals))
    for refusal in caught.value.refusals:
        assert refusal.given and refusal.allowed and refusal.todo
        assert str(refusal) in str(caught.value)
    return [refusal.key for refusal in caught.value.refusals]


# ------------------------------------------------------------------------------------------------------------- reading


def test_defaults_are_those_of_the_contract():
    request = parse_query(RESNET)
    assert request == Request(
        source="torchvision",
        name="resnet50",
        mode="training",
        dtypes=("float32", "bfloat16", "float16", "amp-bfloat16", "amp-float16"),
        batches=(1, 2, 4, 8, 16, 32, 64, 128),
        optimizer="adamw",
        optimizer_impl=None,
        attention="sdpa",
        checkpointing=False,
        gpu="a100-80gb",
    )
    assert (request.revision, request.config, request.head) == (None, None, None)
    assert (request.sequence_length, request.image_size) == (None, None)


def test_every_key_is_read():
    request = parse_query(
        "?v=1&arch=hub:org/name@refs%2Fpr%2F1&head=LlamaForCausalLM&mode=inference&dtype=bfloat16,amp-float16&batch=3,1"
        "&seq=2048&image=224x320&optimizer=adam&optimizer_impl=fused&attention=eager&checkpointing=1&gpu=h200&torch=2.11"
    )
    assert request == Request(
        source="hub",
        name="org/name",
        revision="refs/pr/1",
        head="LlamaForCausalLM",
        mode="inference",
        dtypes=("bfloat16", "amp-float16"),
        batches=(3, 1),
        sequence_length=2048,
        image_size=(224, 320),
        optimizer="adam",
        optimizer_impl="fused",
        attention="eager",
        checkpointing=True,
        gpu="h200",
        torch="2.11",
    )


def test_presets_and_configs_are_architectures():
    preset = next(iter(PRESETS))
    assert parse_query(f"arch=hf:{preset}").name == preset
    text = '{ "vocab_size": 10, "model_type": "gpt2", "title": "\u00e9" }'
    request = parse_query(f"arch=config:{encode_config(text)}")
    assert (request.source, request.name) == ("config", "")
    assert request.config == '{"model_type":"gpt2","title":"\u00e9","vocab_size":10}'


def test_a_square_image_is_one_number():
    request = parse_query(f"{RESNET}&image=224")
    assert request.image_size == (224, 224)
    assert format_query(request) == f"{RESNET}&image=224"
    assert format_query(parse_query(f"{RESNET}&image=224x320")) == f"{RESNET}&image=224x320"


def test_lists_drop_repeats_and_keep_their_order():
    request = parse_query(f"{RESNET}&batch=8,2,8,+4,2&dtype=float16,float32,float16")
    assert request.batches == (8, 2, 4)
    assert request.dtypes == ("float16", "float32")


def test_bounds_are_inclusive():
    request = parse_query(f"{LLAMA}&batch=1,65536&seq=1048576&image=16x4096")
    assert request.batches == (1, 65536)
    assert request.sequence_length == 1_048_576
    assert request.image_size == (16, 4096)
    assert len(parse_query(f"{RESNET}&batch={','.join(map(str, range(1, 33)))}").batches) == 32


# ------------------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("v", "2", "allowed 1;"),
        ("arch", "ResNet 50", "torchvision:<name>"),
        ("arch", "torchvision:", "lower-case letters"),
        ("arch", "torchvision:ResNet 50!", "lower-case letters"),
        ("arch", "torchvision:../../etc/passwd", "lower-case letters"),
        ("arch", "hf:no-such-preset", "a key of the presets"),
        ("arch", "hub:gpt2", "org/name"),
        ("arch", "hub:../config", "org/name"),
        ("arch", "hub:org/a..b", "org/name"),
        ("arch", "hub:org/name/more", "org/name"),
        ("arch", "hub:org/na%20me", "org/name"),
        ("arch", "hub:org/name%0a", "org/name"),
        ("arch", "hub:org/name@", "branch, tag or commit"),
        ("arch", "hub:org/name@../../x", "branch, tag or commit"),
        ("arch", "hub:org/name@a?b", "branch, tag or commit"),
        ("arch", "hub:" + "a" * 2000, "at most 1000 characters"),
        ("arch", "config:", "base64url"),
        ("arch", "config:!!!!", "base64url"),
        ("head", "os.system", "a transformers class name"),
        ("head", "A" * 129, "a transformers class name"),
        ("mode", "train", "training, inference"),
        ("dtype", "int8", "float32, bfloat16, float16, amp-bfloat16, amp-float16"),
        ("dtype", "float32,", "float32, bfloat16"),
        ("batch", "0", "from 1 to 65,536"),
        ("batch", "65537", "from 1 to 65,536"),
        ("batch", "-5", "from 1 to 65,536"),
        ("batch", "nan", "from 1 to 65,536"),
        ("batch", "1e3", "from 1 to 65,536"),
        ("batch", "1_000", "from 1 to 65,536"),
        ("batch", "\u0663", "from 1 to 65,536"),
        ("batch", "1,,2", "from 1 to 65,536"),
        ("batch", "9" * 900, "from 1 to 65,536"),
        ("batch", ",".join(map(str, range(1, 34))), "at most 32 batch sizes"),
        ("seq", "0", "from 1 to 1,048,576"),
        ("seq", "1048577", "from 1 to 1,048,576"),
        ("image", "15", "from 16 to 4096"),
        ("image", "224x4097", "from 16 to 4096"),
        ("image", "224x", "from 16 to 4096"),
        ("image", "224x224x3", "from 16 to 4096"),
        ("optimizer", "nadamax", "sgd, sgd-momentum"),
        ("optimizer_impl", "for-loop", "foreach, fused, loop"),
        ("attention", "flash", "sdpa, eager"),
        ("checkpointing", "true", "0, 1"),
        ("gpu", "a100", "a100-40gb"),
        ("torch", "2.5", "versions from 2.6 on"),
        ("torch", "1.13.1", "versions from 2.6 on"),
        ("torch", "2", "versions from 2.6 on"),
        ("torch", "2.11+cu130", "versions from 2.6 on"),
        ("torch", "newest", "versions from 2.6 on"),
        ("batch", "", "a value"),
        ("batch", "%ff", "text in UTF-8"),
        ("mode", "x" * 1001, "at most 1000 characters"),
        ("foo", "1", "a key that"),
        ("ARCH", "1", "a key that"),
    ],
)
def test_values_out_of_range_are_refused_by_name(key: str, value: str, allowed: str):
    query = f"{key}={value}" if key == "arch" else f"{LLAMA}&{key}={value}"
    (name,) = refused_keys(query)
    assert name.strip("'") == key
    with pytest.raises(RequestError, match=re.escape(allowed)):
        parse_query(query)


def test_patch_releases_follow_the_rules_of_their_version():
    assert format_query(parse_query(f"{RESNET}&torch=2.11.1")) == f"{RESNET}&torch=2.11"


def test_every_refused_key_is_named_at_once():
    keys = refused_keys(
        "batch=-5&arch=torchvison:resnet50&foo=1&dtype=int8&gpu=a100&checkpointing=yes&seq=1&seq=2&image"
    )
    assert sorted(keys) == sorted(["batch", "arch", "'foo'", "dtype", "gpu", "checkpointing", "seq", "image"])


def test_a_missing_architecture_is_named():
    assert refused_keys("") == ["arch"]
    assert refused_keys("?batch=1") == ["arch"]
    assert refused_keys("arch=") == ["arch"]


def test_a_repeated_key_is_refused_even_with_equal_values():
    with pytest.raises(RequestError, match="batch: given the key more than once, allowed each key once"):
        parse_query(f"{RESNET}&batch=1&batch=1&batch=1")
    assert refused_keys(f"{RESNET}&batch=1&batch=1&batch=1") == ["batch"]


@pytest.mark.parametrize(
    ("item", "todo"),
    [
        ("batch_size=4", "write batch=4"),
        ("per_device_train_batch_size=4", "write batch=4"),
        ("max_length=2048", "write seq=2048"),
        ("gradient_checkpointing=True", "write checkpointing=1"),
        ("gradient_checkpointing=False", "leave it out"),
        ("load_in_4bit=1", "write weights=nf4"),
        ("qlora", "write train=adapter&weights=nf4"),
        ("num_gpus=8", "write ranks=8"),
        ("model=gpt2", "write arch=gpt2"),
        (f"model={'x' * 99}", "write arch=..."),
        ("zero_stage=1", "write parallel=zero1"),
        ("zero_stage=3", OTHER_NAMES["zero3"]),
        ("deepspeed=ds.json", OTHER_NAMES["deepspeed"]),
        ("nothing_like_it=1", "remove it"),
        ("mode=train", "did you mean training?"),
        ("checkpointing=true", "write 1"),
        ("compile=1", "write compile=default"),
        ("train=lora", "write train=adapter"),
        ("train=qlora", "write train=adapter&weights=nf4"),
        ("dtype=int8", "dtype is the compute dtype of the model: keep it, and ask for weights=int8"),
        ("dtype=tf32", "write dtype=float32: TF32 needs the same memory"),
        ("weights=4bit", "write weights=nf4, or weights=fp4"),
        ("attention=flash_attention_2", "write attention=sdpa, which uses PyTorch's flash attention if possible"),
        ("optimizer=adamw_torch_fused", "write optimizer=adamw&optimizer_impl=fused"),
        ("mode=finetune", "write mode=training, and train=adapter or train=all"),
    ],
)
def test_a_word_of_another_program_is_refused_with_what_to_write(item: str, todo: str):
    with pytest.raises(RequestError, match=re.escape(todo)) as refused:
        parse_query(f"{RESNET}&{item}")
    (refusal,) = refused.value.refusals
    assert refusal.todo == todo


@pytest.mark.parametrize("others", [*_SAME.values(), *_SWITCHES.values(), _STAGES])
def test_no_word_of_another_program_is_a_key(others: str):
    assert not {letters(word) for word in others.split()} & {letters(key) for key in KEYS}


@pytest.mark.parametrize("items", [*_SWITCHES, *(text for told in HINTS.values() for text in told.values() if "=" in text)])
def test_what_a_refusal_says_to_write_is_read(items: str):
    found = re.findall(r"\b(?:(\w+)=([\w.:@-]+))", items)
    assert found
    for key, value in found:
        KEYS[key].read(value)


@pytest.mark.parametrize(
    ("item", "same"),
    [
        ("dtype=torch.bfloat16", "dtype=bfloat16"),
        ("optimizer=adamw_bnb_8bit", "optimizer=adamw-8bit"),
        ("optimizer=adafactor", "optimizer=adafactor"),
        ("gpu=NVIDIA+A100-SXM4-80GB", "gpu=a100-80gb"),
    ],
)
def test_a_word_of_another_program_that_means_the_same_is_read(item: str, same: str):
    assert parse_query(f"{RESNET}&{item}") == parse_query(f"{RESNET}&{same}")


def test_close_matches_are_offered():
    with pytest.raises(RequestError, match="did you mean batch"):
        parse_query(f"{RESNET}&bach=1")
    with pytest.raises(RequestError, match="did you mean rtx-4090"):
        parse_query(f"{RESNET}&gpu=rtx4009")
    with pytest.raises(RequestError, match="did you mean sgd-momentum"):
        parse_query(f"{RESNET}&optimizer=sgd_momentu")


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("optimizer=AdamW", ""),
        ("optimizer=SGD_Momentum", "&optimizer=sgd-momentum"),
        ("dtype=FP32", "&dtype=float32"),
        ("dtype=fp16,BF16,amp-fp16", "&dtype=float16,bfloat16,amp-float16"),
    ],
)
def test_case_separators_and_short_names_do_not_count(written, canonical):
    assert format_query(parse_query(f"{RESNET}&{written}")) == f"{RESNET}{canonical}"


def test_messages_stay_short_and_printable():
    with pytest.raises(RequestError) as caught:
        parse_query("arch=%1b[31m%0a" + "x" * 900)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 400


def test_long_queries_are_refused_before_they_are_read():
    with pytest.raises(RequestError, match=r"too long: given 3,145,7\d\d characters, allowed at most 3,145,728"):
        parse_query(RESNET + "&" * 3 * 2**20)
    with pytest.raises(RequestError, match=f"too many keys: given {MAX_KEYS + 1}"):
        parse_query("&".join(f"k{i}=1" for i in range(MAX_KEYS + 1)))


@pytest.mark.parametrize(("key", "value"), [("head", "Foo"), ("seq", "128"), ("attention", "eager")])
def test_keys_that_torchvision_cannot_honour_are_refused(key: str, value: str):
    assert refused_keys(f"{RESNET}&{key}={value}") == [key]
    assert parse_query(f"{LLAMA}&{key}={value}")


# --------------------------------------------------------------------------------------------------------- optimizers


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("impl", IMPLEMENTATIONS)
def test_only_the_implementations_an_optimizer_has_are_taken(optimizer: str, impl: str):
    query = f"{RESNET}&optimizer={optimizer}&optimizer_impl={impl}"
    if impl in OPTIMIZERS[optimizer].implementations:
        assert parse_query(query).optimizer_impl == impl
    else:
        with pytest.raises(RequestError, match=f"optimizer_impl: given '{impl}' with optimizer={optimizer}"):
            parse_query(query)


def test_the_optimizers_of_bitsandbytes_are_for_cuda():
    for key in ("adamw-8bit", "paged-adamw-8bit", "paged-adamw", "lion", "lion-8bit", "sgd-8bit", "ademamix-8bit"):
        assert parse_query(f"{RESNET}&optimizer={key}").optimizer == key
        with pytest.raises(
            RequestError, match=f"optimizer: given '{key}' with gpu=cpu, allowed PyTorch's own; on a CUDA device also those of"
        ):
            parse_query(f"{RESNET}&optimizer={key}&gpu=cpu")


def test_fused_adagrad_is_not_there_on_mps():
    query = f"{RESNET}&optimizer=adagrad&optimizer_impl=fused&gpu="
    assert parse_query(query + "cpu").optimizer_impl == "fused"
    with pytest.raises(RequestError, match="gpu=m2-ultra-64gb, allowed foreach or loop for adagrad"):
        parse_query(query + "m2-ultra-64gb")


def test_the_table_of_implementations_is_that_of_torch():
    # In a fresh process, so that this file's own process stays free of torch.
    import subprocess
    import sys

    names = {
        "sgd": "SGD",
        "sgd-momentum": "SGD",
        "adam": "Adam",
        "adamw": "AdamW",
        "adafactor": "Adafactor",
        "rmsprop": "RMSprop",
        "adagrad": "Adagrad",
        "adadelta": "Adadelta",
        "adamax": "Adamax",
        "nadam": "NAdam",
        "radam": "RAdam",
        "muon": "Muon",
    }
    assert [*names, "none"] == [key for key, row in OPTIMIZERS.items() if row.package == "torch"]
    code = (
        "import inspect, json, sys, torch\n"
        "names = json.loads(sys.argv[1])\n"
        "rows = {key: list(inspect.signature(getattr(torch.optim, name)).parameters) for key, name in names.items()}\n"
        "print(json.dumps(rows))"
    )
    run = subprocess.run([sys.executable, "-c", code, json.dumps(names)], capture_output=True, text=True, check=True)
    for key, arguments in json.loads(run.stdout).items():
        has = tuple(impl for impl in ("foreach", "fused") if impl in arguments)
        assert OPTIMIZERS[key].implementations == (*has, "loop"), key


# ------------------------------------------------------------------------------------------------------------- writing


def test_the_canonical_form_leaves_defaults_out_and_orders_keys():
    query = (
        "gpu=h200&batch=1,2,4,8,16,32,64,128&mode=training&v=1&arch=torchvision:resnet50&checkpointing=1&dtype=float32"
    )
    assert format_query(parse_query(query)) == "arch=torchvision:resnet50&dtype=float32&checkpointing=1&gpu=h200"


def test_values_survive_the_address():
    items = {"arch": "hf:a/b@c", "targets": "x & y=+%20?#", "gpu": "custom:24GiB@8.9", "seq": ""}
    assert split_query(join_query(items)) == items
    assert split_query("?" + join_query(items)) == items


def test_the_complete_form_writes_defaults_too():
    assert format_query(parse_query(RESNET), complete=True) == (
        "v=1&arch=torchvision:resnet50&mode=training&dtype=float32,bfloat16,float16,amp-bfloat16,amp-float16"
        "&batch=1,2,4,8,16,32,64,128&optimizer=adamw&attention=sdpa&checkpointing=0&gpu=a100-80gb&expandable=0"
        "&train=all&weights=checkpoint&cudnn_benchmark=0&accumulate=1"
    )
    most = f"{LLAMA}&head=LlamaModel&seq=5&image=64&inputs=text&optimizer_impl=loop&torch=2.15&focus=float32:2"
    adapters = "train=adapter&alpha=8&outputs=kept&weights=nf4&compute=float32"
    asked = [f"{most}&{more}" for more in ("mode=generate", adapters, "parallel=hsdp&tp=2&rank=0", "pp=2")]
    asked.append(f"{RESNET}&classes=10&trainable_layers=3")
    asked.append(f"{LLAMA}&loss=torch&step=in_backward&evaluate=loss")
    asked.append(f"{LLAMA}&objective=dpo&reference=precomputed&activations=offload&optimizer_offload=1")
    asked.append(f"{LLAMA}&dtype=bfloat16&autocast=1&liger=1&fla=1")
    asked.append(f"{LLAMA}&objective=grpo&group=4&rollout=colocated:0.3")
    asked.append(f"{LLAMA}&train=adapter&modules_to_save=lm_head")
    asked.append(f"{LLAMA}&compile=default&compile_scope=model&budget=0.5")
    video = "frames=9&vae=tiling&guidance=0&output=latent&without=transformer_2"
    asked.append(f"arch=diffusers:mochi&seq=5&image=64&offload=group-leaf&stream=1&{video}")
    asked.append("arch=diffusers:sd1.5&mode=training&train=adapter&cached=none")
    server = "engine_version=0.11.2&util=0.5&max_model_len=auto&max_num_seqs=8&max_num_batched_tokens=1k&kv_bytes=1GiB"
    more = "used=1GiB&outside=1GiB&graphs=1GiB&want=2x1k&cpu_offload_gb=1&dcp=2&max_loras=1&max_lora_rank=8&speculative=mtp:1"
    asked.append(f"{LLAMA}&mode=serve&{server}&{more}")
    asked.append(f"{LLAMA}&mode=serve&engine=sglang&tp=2&attn_dp=2&pool=page_size:16")
    asked.append(f"{LLAMA}&mode=serve&engine=llama.cpp&weights=q4_k_m&gpu_layers=4&cpu_moe=2")
    written = [[field.partition("=")[0] for field in format_query(parse_query(one), complete=True).split("&")] for one in asked]
    assert set().union(*written) == set(KEYS)
    assert all(keys == [key for key in KEYS if key in keys] for keys in written)


def test_text_alone_is_a_key_that_its_default_leaves_out():
    assert parse_query(f"{LLAMA}&inputs=all") == parse_query(LLAMA)
    assert format_query(parse_query(f"{LLAMA}&inputs=text")).endswith("&inputs=text")
    with pytest.raises(RequestError, match=r"inputs"):
        parse_query(f"{RESNET}&inputs=text")
    with pytest.raises(RequestError, match=r"inputs: given 'image', allowed all, text"):
        parse_query(f"{LLAMA}&inputs=image")


def test_expandable_segments_are_asked_for_by_a_key_of_their_own():
    assert parse_query(f"{RESNET}&expandable=1").expandable_segments is True
    assert parse_query(RESNET).expandable_segments is False
    assert format_query(parse_query(f"{RESNET}&expandable=1")).endswith("&expandable=1")
    with pytest.raises(RequestError, match=r"^expandable: given 'True', allowed 0, 1"):
        parse_query(f"{RESNET}&expandable=True")


@pytest.mark.parametrize("gpu", ["m2-ultra-64gb", "cpu"])
def test_expandable_segments_are_cudas_alone(gpu):
    with pytest.raises(RequestError, match=rf"^expandable: given '1' with gpu={gpu}, allowed 1 only with a CUDA device"):
        parse_query(f"{RESNET}&gpu={gpu}&expandable=1")
    assert parse_query(f"{RESNET}&gpu={gpu}&expandable=0").gpu == gpu


def test_an_adapter_is_asked_for_by_its_keys():
    request = parse_query(f"{LLAMA}&train=adapter&adapter=dora&r=8&alpha=8&targets=q_proj,v_proj&adapter_dropout=0.05")
    assert (request.train, request.adapter, request.adapter_rank, request.adapter_alpha) == ("adapter", "dora", 8, 8)
    assert (request.adapter_targets, request.adapter_dropout) == (("q_proj", "v_proj"), 0.05)
    plain = parse_query(f"{LLAMA}&train=adapter")
    assert (plain.adapter, plain.adapter_rank, plain.adapter_alpha, plain.adapter_targets) == (
        *("lora", 16, None),
        (ALL_LINEAR,),
    )
    defaults = "&adapter=lora&r=16&targets=all-linear&adapter_dropout=0&weights=checkpoint&accumulate=1"
    assert format_query(parse_query(f"{LLAMA}&train=adapter{defaults}")) == f"{LLAMA}&train=adapter"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            "r=8",
            "r: given '8' without train=adapter, allowed r with train=adapter; remove it, or ask for train=adapter",
        ),
        ("train=head&targets=q_proj", "targets: given 'q_proj' without train=adapter"),
        ("train=adapter&adapter=ia3&r=8", "r: given '8' without adapter=lora or dora or rslora or"),
        ("train=adapter&adapter=prompt&alpha=8", "alpha: given '8' without adapter=lora or dora"),
        ("mode=inference&train=head", "train: given 'head' without mode=training"),
        ("mode=inference&accumulate=2", "accumulate: given '2' without mode=training"),
        (
            "weights=nf4",
            "weights: given 'nf4' without train=adapter or mode=inference, allowed weights with train=adapter",
        ),
        ("weights=int8&train=head", "weights: given 'int8' without train=adapter or mode=inference"),
        (
            "weights=nf4&mode=inference&gpu=m2-ultra-64gb",
            "weights: given 'nf4' with gpu=m2-ultra-64gb, allowed checkpoint",
        ),
        ("weights=nf5&mode=inference", "weights: given 'nf5', allowed checkpoint, full, nf4, nf4-dq, fp4, int8, fp8"),
        ("train=adapter&adapter=lorra", "adapter: given 'lorra', allowed lora, dora,"),
        (
            "train=adapter&targets=all-linear,q_proj",
            "targets: given 'all-linear,q_proj', allowed all-linear or attention, or",
        ),
        ("train=adapter&targets=.*", "targets: given '.*', allowed all-linear or attention, or names of modules"),
        ("modules_to_save=lm_head", "modules_to_save: given 'lm_head' without train=adapter"),
        ("train=adapter&adapter=prompt&modules_to_save=lm_head", "modules_to_save: given 'lm_head' without adapter=lora or"),
        (
            "parallel=zero1&dtype=bfloat16&train=adapter&modules_to_save=lm_head",
            "modules_to_save: given 'lm_head' with parallel=zero1",
        ),
        ("train=adapter&modules_to_save=none,lm_head", "modules_to_save: given 'none,lm_head', allowed none, or names"),
        ("train=adapter&adapter_dropout=1", "adapter_dropout: given '1', allowed numbers from 0 to below 1"),
        (
            "accumulate=0",
            "accumulate: given '0', allowed whole numbers from 1 to 65,536; write for example accumulate=4",
        ),
    ],
)
def test_keys_that_do_not_apply_are_refused_by_name(keys: str, said: str):
    with pytest.raises(RequestError, match=f"^{re.escape(said)}"):
        parse_query(f"{LLAMA}&{keys}")


def test_compiled_code_has_one_dtype_and_batch_unless_they_are_named():
    request = parse_query(f"{LLAMA}&compile=default&budget=0.50")
    assert (request.dtypes, request.batches, request.budget) == (("bfloat16",), (8,), 0.5)
    assert format_query(request) == f"{LLAMA}&compile=default&budget=0.5"
    assert parse_query(format_query(request)) == request
    named = parse_query(f"{LLAMA}&compile=default&dtype=float32,bfloat16,float16,amp-bfloat16,amp-float16&batch=8,16")
    assert (len(named.dtypes), named.batches) == (5, (8, 16))
    assert parse_query(format_query(named)) == named
    assert parse_query(f"{LLAMA}&compile=off") == parse_query(LLAMA)


def test_language_models_are_compiled_by_blocks():
    scopes = [scope_of(parse_query(f"{arch}&compile=default")) for arch in (LLAMA, RESNET)]
    assert scopes == ["blocks", "model"]
    assert scope_of(parse_query(f"{LLAMA}&compile=default&compile_scope=model")) == "model"
    assert scope_of(parse_query(LLAMA)) is None


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ("budget=0.5", "budget: given '0.5' without compile=default or compile=reduce-overhead, allowed budget with compile="),
        ("compile=default&mode=inference&budget=0.5", "budget: given '0.5' without mode=training"),
        ("compile=default&budget=1.1", "budget: given '1.1', allowed numbers from 0 to 1, with at most four decimals"),
        ("compile=default&budget=-1", "budget: given '-1', allowed numbers from 0 to 1"),
        ("compile_scope=model", "compile_scope: given 'model' without compile=default or compile=reduce-overhead"),
        ("compile=reduce-overhead&accumulate=2", "accumulate: given 2 with compile=reduce-overhead, allowed 1: gradients are"),
        (
            "compile=reduce-overhead&mode=inference&compile_scope=blocks",
            "compile_scope: given 'blocks' with compile=reduce-overhead and mode=inference, allowed model",
        ),
        ("compile=max-autotune", "compile: given 'max-autotune': it chooses kernels by timing"),
        ("compile=1", "compile: given '1', allowed off, default, reduce-overhead; write compile=default"),
        ("compile=default&mode=generate", "compile: given 'default' without mode=training or mode=inference"),
        ("compile=default&mode=serve", "compile: given 'default' without mode=training or mode=inference"),
        ("compile=default&gpu=cpu", "compile: given 'default' with gpu=cpu, allowed a CUDA device"),
        ("compile=default&gpu=m2-ultra-64gb", "compile: given 'default' with gpu=m2-ultra-64gb, allowed a CUDA device"),
        ("compile=default&parallel=pp&pp=2", "pp: given '2' with compile=default, allowed its default"),
        ("compile=default&mode=inference&weights=fp8", "weights: given 'fp8' with compile=default, allowed checkpoint, full, nf4"),
    ],
)
def test_what_is_not_compiled_is_refused_by_name(keys: str, said: str):
    with pytest.raises(RequestError, match=f"^{re.escape(said)}"):
        parse_query(f"{LLAMA}&{keys}")


def test_keys_of_a_generation_are_refused_elsewhere_by_name():
    assert parse_query(f"{LLAMA}&mode=generate&new=7&cache=static").new == 7
    assert format_query(parse_query(f"{LLAMA}&mode=generate&new=512")).endswith("&mode=generate")
    for mode in ("training", "inference"):
        with pytest.raises(
            RequestError, match=r"^new: given '7' without mode=generate or objective=grpo, allowed new with mode"
        ):
            parse_query(f"{LLAMA}&mode={mode}&new=7")
    with pytest.raises(
        RequestError, match=r"^mode: given 'generate' with a torchvision architecture, allowed training"
    ):
        parse_query(f"{RESNET}&mode=generate")


@pytest.mark.parametrize(
    ("keys", "reason"),
    [
        (
            "cache=quantized&gpu=m2-ultra-64gb",
            "'quantized' with gpu=m2-ultra-64gb, allowed another cache; a quantized one needs a",
        ),
        (
            "cache=offloaded&gpu=cpu",
            "'offloaded' with gpu=cpu, allowed dynamic, static, quantized; others need a CUDA device",
        ),
    ],
)
def test_a_cache_that_cannot_be_traced_is_refused_with_the_reason(keys, reason):
    with pytest.raises(RequestError, match=rf"^cache: given {reason}"):
        parse_query(f"{LLAMA}&mode=generate&{keys}")
    with pytest.raises(RequestError, match=r"^cache: given 'sliding', allowed dynamic, static"):
        parse_query(f"{LLAMA}&mode=generate&cache=sliding")


RANKS_REFUSED = [
    ("ranks=4", "ranks: given '4' without parallel=ddp or zero1 or fsdp or hsdp"),
    ("parallel=ddp&reshard=0", "reshard: given '0' without parallel=fsdp or hsdp"),
    ("parallel=ddp&offload=1", "offload: given '1' without parallel=fsdp or hsdp"),
    ("parallel=fsdp&offload=yes", "offload: given 'yes', allowed 0, 1"),
    ("parallel=fsdp&replicate=2", "replicate: given '2' without parallel=hsdp"),
    ("mode=inference&parallel=ddp", "parallel: given 'ddp' without mode=training"),
    ("mode=generate&parallel=fsdp", "parallel: given 'fsdp' without mode=training or mode=inference"),
    (
        "mode=generate&tp=2&sp=1",
        "sp: given '1' with mode=generate, allowed 0: one token cannot be sharded over several ranks",
    ),
    ("mode=generate&tp=2&cache=offloaded", "cache: given 'offloaded' with tp=2, allowed dynamic, static: other splits"),
    ("parallel=fdsp", "parallel: given 'fdsp', allowed none, ddp, zero1, fsdp, hsdp, tp, pp; did you mean"),
    (
        "parallel=fsdp1",
        "parallel: given 'fsdp1', allowed none, ddp, zero1, fsdp, hsdp, tp, pp; ask for fsdp, which is FSDP2; sizer.size_step",
    ),
    ("parallel=zero2", "The nearest is parallel=fsdp&reshard=0, which needs less"),
    ("parallel=zero2", "sizer run --gpu h100-80gb -- deepspeed --num_gpus 8 train.py"),
    ("parallel=zero3", "sizer run --gpu h100-80gb -- deepspeed --num_gpus 8 train.py"),
    ("parallel=ep", "the values of a token determine its rank; use tp or fsdp, or pass your code to sizer.size_step"),
    ("parallel=fsdp&ranks=0", "ranks: given '0', allowed whole numbers from 1 to 16,384; write for example ranks=8"),
    ("parallel=fsdp&train=adapter&weights=nf4", "weights: given 'nf4' with parallel=fsdp, allowed checkpoint, full"),
    ("parallel=ddp&optimizer=lion-8bit", "optimizer: given 'lion-8bit' with parallel=ddp, allowed PyTorch's own"),
    ("parallel=ddp&gpu=cpu", "parallel: given 'ddp' with gpu=cpu, allowed a CUDA device"),
    (
        "parallel=hsdp&ranks=4096&replicate=8",
        "replicate: given 8 groups of 4096 ranks, allowed at most 16,384 ranks; ask for replicate=4",
    ),
    (
        "parallel=fsdp&ranks=12&reshard=5",
        "reshard: given 5 with ranks=12, allowed 1, 0, or a divisor of ranks below it; ask for reshard=4",
    ),
    ("parallel=fsdp&ranks=4&reshard=4", "reshard: given 4 with ranks=4, allowed 1, 0, or a divisor of ranks"),
    ("rank=1", "rank: given '1' without parallel=ddp or zero1 or fsdp or hsdp or tp or pp"),
    ("parallel=fsdp&rank=8", "rank: given 8 with 8 ranks, allowed 0 to 7; ask for rank=7"),
    ("parallel=fsdp&rank=-1", "rank: given '-1', allowed whole numbers from 0 to 16,383; write for example rank=0"),
    ("tp=8", "optimizer_impl: given nothing with parallel=tp, allowed loop"),
    ("parallel=ddp&tp=8", "tp: given '8' without parallel=fsdp or hsdp or tp or pp"),
    ("parallel=tp&ranks=4&tp=2", "ranks: given '4' without parallel=ddp or zero1 or fsdp or hsdp"),
    ("parallel=tp&optimizer_impl=loop", "tp: given 1 with parallel=tp, allowed 2 or more; ask for tp=8"),
    ("parallel=tp&tp=8", "optimizer_impl: given nothing with parallel=tp, allowed loop"),
    ("parallel=tp&tp=8&optimizer_impl=fused", "optimizer_impl: given 'fused' with parallel=tp, allowed loop"),
    ("parallel=fsdp&sp=1", "sp: given '1' without tp=8"),
    ("parallel=ddp&lp=1", "lp: given '1' without parallel=fsdp or hsdp or tp"),
    ("tp=8&lp=1&mode=inference", "lp: given '1' without mode=training"),
    ("cp=4", "cp: given '4' without parallel=ddp or fsdp or hsdp"),
    ("parallel=fsdp&cp=2&mode=inference", "cp: given '2' without mode=training"),
    ("parallel=ddp&cp=2&attention=eager", "cp: given '2' without attention=sdpa"),
    ("parallel=fsdp&cp=2&tp=2&sp=1", "cp: given '2' without sp=0"),
    ("parallel=ddp&cp=2&train=adapter", "cp: given '2' without train=all or train=head"),
    (
        "parallel=hsdp&ranks=4&replicate=8192&cp=2",
        "given 8192 groups of 8 ranks, allowed at most 16,384 ranks; ask for replicate=2048",
    ),
    ("parallel=fsdp&tp=2&train=adapter", "train: given 'adapter' with tp=2, allowed all, head"),
    (
        "parallel=hsdp&ranks=1024&replicate=4&tp=8",
        "replicate: given 4 groups of 8192 ranks, allowed at most 16,384 ranks; ask for replicate=2",
    ),
    (
        "parallel=fsdp&ranks=16384&tp=8",
        "ranks: given 131,072 ranks, allowed at most 16,384 ranks; ask for ranks=2048",
    ),
    (
        "parallel=hsdp&ranks=16384&replicate=2&cp=4",
        "replicate: given 2 groups of 65536 ranks, allowed at most 16,384 ranks; ask for replicate=1 and ranks=4096",
    ),
    ("tp=256&pp=128&sp=1", "pp: given 32,768 ranks, allowed at most 16,384 ranks; ask for pp=64"),
    ("parallel=fsdp&reshard=yes", "reshard: given 'yes', allowed whole numbers from 0 to 16,384"),
]


def test_other_libraries_models_are_not_split():
    with pytest.raises(RequestError, match=r"^tp: given '2' with a torchvision architecture, allowed tp with hf:"):
        parse_query("arch=torchvision:resnet18&parallel=fsdp&tp=2")


@pytest.mark.parametrize(("keys", "said"), RANKS_REFUSED)
def test_worlds_that_cannot_be_are_refused_with_the_nearest_that_can(keys: str, said: str):
    with pytest.raises(RequestError, match=re.escape(said)):
        parse_query(f"{LLAMA}&{keys}")


def test_ranks_are_asked_for_with_how_they_work_together():
    plain, grouped = parse_query(LLAMA), parse_query(f"{LLAMA}&parallel=hsdp&ranks=4&replicate=2&reshard=2")
    assert (plain.parallel, plain.world) == ("none", 1)
    assert (grouped.parallel, grouped.world, grouped.reshard) == ("hsdp", 8, 2)
    assert parse_query(f"{LLAMA}&parallel=fsdp").world == 8
    assert parse_query(f"{LLAMA}&tp=8&optimizer_impl=loop") == parse_query(
        f"{LLAMA}&parallel=tp&tp=8&optimizer_impl=loop"
    )
    split = parse_query(f"{LLAMA}&parallel=hsdp&ranks=4&replicate=2&tp=8")
    assert (split.world, split.data_ranks) == (64, 8)
    shared = parse_query(f"{LLAMA}&parallel=hsdp&ranks=4&replicate=2&cp=2&tp=8")
    assert (shared.world, shared.data_ranks) == (128, 8)
    alone = parse_query(f"{LLAMA}&parallel=tp&tp=8&optimizer_impl=loop")
    assert (alone.world, alone.data_ranks) == (8, 1)
    assert format_query(parse_query(f"{LLAMA}&parallel=fsdp&ranks=8&reshard=1")) == f"{LLAMA}&parallel=fsdp"
    assert format_query(parse_query(f"{LLAMA}&parallel=none")) == LLAMA
    assert parse_query(f"{LLAMA}&tp=8&sp=1").optimizer_impl is None  # all parameters are split or told to be whole
    assert (
        parse_query(f"{LLAMA}&mode=inference&tp=8").world == 8
    )  # there is no optimizer that takes no split parameters


def test_what_nccl_holds_is_a_part_of_the_process():
    alone, two, many, grouped = (
        gpu_of(parse_query(f"{LLAMA}{keys}"))
        for keys in ("", "&parallel=ddp&ranks=2", "&parallel=fsdp", "&parallel=fsdp&tp=2")
    )
    assert gpu_of(parse_query(f"{LLAMA}&parallel=hsdp&replicate=2")) == grouped
    assert gpu_of(parse_query(f"{LLAMA}&parallel=fsdp&reshard=4")) == grouped  # which gathers in groups of four, too
    assert gpu_of(parse_query(f"{LLAMA}&parallel=tp&tp=8&optimizer_impl=loop")) == many
    assert alone == GPUS[parse_query(LLAMA).gpu]
    assert gpu_of(parse_query(f"{LLAMA}&parallel=fsdp&ranks=1")) == alone
    # bytes beside the context: 544 MB of two ranks, 688 of more; 1.06 and 2 GB for each communicator, of which
    # HSDP has two, as FSDP2 with tensor parallel has
    assert [gpu.context_low_bytes - alone.context_low_bytes for gpu in (two, many)] == [544 * 10**6, 688 * 10**6]
    assert [gpu.context_bytes - alone.context_bytes for gpu in (many, grouped)] == [1_060 * 10**6, 2_120 * 10**6]
    assert [gpu.context_high_bytes - alone.context_high_bytes for gpu in (many, grouped)] == [2 * 10**9, 4 * 10**9]


@pytest.mark.parametrize("what", ["a measurement", "a memory snapshot"])
def test_what_ranks_have_no_answer_for_is_refused_by_name(what: str):
    check_one_rank(parse_query(LLAMA), what)
    with pytest.raises(RequestError, match=f"^{what}: not for one rank of several: given parallel=fsdp"):
        check_one_rank(parse_query(f"{LLAMA}&parallel=fsdp"), what)


def random_server(rng: random.Random) -> dict[str, object]:
    """Fields of a request with mode=serve, those of vLLM."""
    return {
        "engine_version": rng.choice((None, "0.9.0", "0.9.2", "0.33.0")),
        "util": rng.choice((None, 0.0001, 0.92, 1.0)),
        "max_model_len": rng.choice((None, "auto", 1, 131_072)),
        "max_num_seqs": rng.choice((None, 1, 65_536)),
        "max_num_batched_tokens": rng.choice((None, 1, 8192)),
        "kv": rng.choice(("auto", "fp8")),
        "dp": rng.choice((1, 8)),
        "ep": rng.choice((False, True)),
        "server_weights": rng.choice((None, "awq", "gptq", "w8a8", "mxfp4")),
        "enforce_eager": rng.choice((False, True)),
        "api": rng.choice(("server", "offline")),
        "sampler": rng.choice(("auto", "sort", "triton", "flashinfer")),
        "prefix_caching": rng.choice(("auto", "0", "1")),
        "kv_bytes": rng.choice((None, 1, 3 * 2**20, 2**30)),
        "used": 0,
        "outside": rng.choice((None, 1, 2**30)),
        "graphs": rng.choice((None, 2**20)),
        "cpu_offload_gb": rng.choice((0, 0.125, 4096.0)),
        "dcp": rng.choice((1, 2)),
        "gpu_layers": None,
        "cpu_moe": 0,
        "fa": "auto",
        "attn_dp": 1,
        "pool": None,
        "speculative": rng.choice((None, ("mtp", 1), ("qwen3-0.6b", 128))),
        "max_loras": (slots := rng.choice((None, 1, 1024))),
        "max_lora_rank": rng.choice((None, 1, 512)),
        "fully_sharded_loras": rng.choice((False, slots is not None)),
        "want": rng.choice((None, (1, 1), (8, 32_768))),
        "tp": rng.choice((1, 2, 8)),
        "pp": rng.choice((1, 2)),
    }


def random_request(rng: random.Random) -> Request:
    source = rng.choice(("torchvision", "hf", "hub", "config"))
    gpu = rng.choice(list(GPUS))
    on_cuda = GPUS[gpu].backend == "cuda"
    optimizer = rng.choice([key for key, row in OPTIMIZERS.items() if row.package == "torch" or on_cuda])
    torchvision = source == "torchvision"
    refused = SOURCES[source].refuses_modes if on_cuda else ("serve", *SOURCES[source].refuses_modes)
    mode = rng.choice([mode for mode in MODES if mode not in refused])
    if MODES[mode].serves:
        config = canonical_json(random_json(rng, 3)) if source == "config" else None
        name = {"hf": rng.choice(list(PRESETS)), "hub": "Org_1/na-me.2", "config": ""}[source]
        return Request(source=source, name=name, config=config, mode=mode, gpu=gpu, **random_server(rng))
    generates = MODES[mode].generates
    return Request(
        source=source,
        name={"torchvision": "vit_b_16", "hf": rng.choice(list(PRESETS)), "hub": "Org_1/na-me.2", "config": ""}[source],
        revision=rng.choice((None, "main", "refs/pr/3", "0" * 40)) if source == "hub" else None,
        config=canonical_json(random_json(rng, 3)) if source == "config" else None,
        head=None if torchvision else rng.choice((None, "BertForMaskedLM")),
        mode=mode,
        new=rng.choice((512, rng.randint(1, 32_768))) if generates else 512,
        cache=rng.choice(CACHES if on_cuda else CACHES[:2]) if generates else "dynamic",
        dtypes=tuple(rng.sample(DTYPES, rng.randint(1, 5))),
        batches=rng.choice((DEFAULT_BATCHES, tuple(rng.sample(range(1, 65537), rng.randint(1, 32))))),
        sequence_length=None if torchvision else rng.choice((None, rng.randint(1, 2**20))),
        image_size=rng.choice((None, (rng.randint(16, 4096), rng.randint(16, 4096)), (224, 224))),
        optimizer=optimizer,
        optimizer_impl=rng.choice((None, *(set(OPTIMIZERS[optimizer].implementations) - {"fused"}))),
        attention="sdpa" if torchvision else rng.choice(ATTENTIONS),
        checkpointing=rng.choice((False, True)),
        gpu=gpu,
        expandable_segments=on_cuda and rng.choice((False, True)),
        torch=rng.choice((None, "2.11", "2.15", "3.0")),
        **(random_training(rng, gpu, torchvision=torchvision, optimizer=optimizer) if MODES[mode].trains else {}),
    )


def random_ranks(rng: random.Random) -> dict[str, object]:
    choices = {
        "ranks": (8, 2, 1, 64),
        "replicate": (1, 4),
        "reshard": (1, 0),
        "offload": (False, True),
        "tp": (1,),
        "sp": (False,),
        "lp": (False,),
        "cp": (1,),
        "pp": (1,),  # others ask for batch sizes: tests/distributed/test_pipeline_queries.py
        "schedule": ("1f1b",),
        "microbatch": (1,),
        "rank": (None, 0),
    }
    parallel = rng.choice(
        [key for key in PARALLELS if key not in ("tp", "pp")]
    )  # which need degrees, and an optimizer_impl
    return {"parallel": parallel} | {key: rng.choice(choices[key]) for key in PARALLELS[parallel].keys}


def random_training(rng: random.Random, gpu: str, *, torchvision: bool, optimizer: str) -> dict[str, object]:
    train = rng.choice(list(TRAINS))
    fields = {"train": train, "accumulate": rng.choice((1, 1, 4, 65_536))}
    on_cuda = GPUS[gpu].backend == "cuda"
    if on_cuda and OPTIMIZERS[optimizer].package == "torch":
        fields |= random_ranks(rng)
    if train != "adapter":
        return fields
    if on_cuda and not torchvision and fields.get("parallel", "none") == "none":
        fields["weights"] = rng.choice(list(WEIGHTS))
    adapter = rng.choice(list(ADAPTERS))
    choices = {
        "r": ("adapter_rank", (16, 1, 4096)),
        "alpha": ("adapter_alpha", (None, 8)),
        "targets": ("adapter_targets", ((ALL_LINEAR,), ("attention",), ("q_proj", "layers.0.mlp.up_proj"))),
        "adapter_dropout": ("adapter_dropout", (0.0, 0.05, 0.9999)),
    }
    taken = (choices[key] for key in ADAPTERS[adapter].arguments)
    return fields | {"adapter": adapter} | {name: rng.choice(values) for name, values in taken}


def random_json(rng: random.Random, depth: int) -> dict:
    def value(depth: int) -> object:
        leaves = (None, True, rng.randint(-(2**53), 2**53), rng.random(), 1e-12, "a&b=c+d%20 \u00e9\U0001f600\n\"\\'")
        if depth == 0 or rng.random() < 0.5:
            return rng.choice(leaves)
        if rng.random() < 0.5:
            return [value(depth - 1) for _ in range(rng.randint(0, 4))]
        return {f"k{i}\u00fc": value(depth - 1) for i in range(rng.randint(0, 4))}

    return {"model_type": "gpt2", "x": value(depth), "y": value(depth)}


def canonical_json(value: dict) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_written_is_read_back_as_it_was(seed: int):
    rng = random.Random(seed)
    for _ in range(25):
        request = random_request(rng)
        for complete in (False, True):
            text = format_query(request, complete=complete)
            assert parse_query(text) == request
            assert re.fullmatch(r"[A-Za-z0-9_.~/:@,=&%-]+", text)
            assert format_query(parse_query(text), complete=complete) == text
        assert as_a_job_tells_it(request) == asdict(request)


def as_a_job_tells_it(request: Request) -> dict[str, object]:
    """Return the fields of a request as they arrive with the report of a job."""
    return decode(get_type_hints(Report)["request"], json.loads(json.dumps(encode(asdict(request)))))


@pytest.mark.parametrize("seed", range(10))
def test_damaged_queries_raise_nothing_but_a_request_error(seed: int):
    rng = random.Random(seed)
    alphabet = "abzAZ019&=%+,:@x-._\x00\u00e9\ud800 /\\\"'[]{}"
    refused = 0
    for _ in range(100):
        text = list(format_query(random_request(rng), complete=True))
        for _ in range(rng.randint(1, 6)):
            text[rng.randrange(len(text))] = rng.choice(alphabet)
        try:
            request = parse_query("".join(text))
        except RequestError as error:
            refused += 1
            assert all(line.isprintable() for line in str(error).split("\n"))
        else:
            assert parse_query(format_query(request)) == request
    assert refused > 50


# ------------------------------------------------------------------------------------------------------ packed configs


def test_a_packed_config_is_the_same_text():
    text = '{"model_type": "gpt2", "name": "\u00e9"}'
    assert decode_config(encode_config(text)) == text
    assert re.fullmatch("[A-Za-z0-9_-]+", encode_config(text))


@pytest.mark.parametrize(
    ("value", "why"),
    [
        ("%%%", "cannot be unpacked"),
        ("YWJj", "cannot be unpacked"),  # base64 of "abc": not zlib
        ("a", "cannot be unpacked"),
        ("\u00e9", "cannot be unpacked"),
        (pack(b"\xff\xfe"), "cannot be unpacked"),
        (pack(b'{"a": 1}' * 20)[:-8], "cut short"),
        (urlsafe_b64encode(zlib.compress(b"{}") + b"tail").decode().rstrip("="), "goes on behind its end"),
        # 4 MiB of zeros pack into 4 KiB
        (pack(bytes(2**22)), "config is too large"),
    ],
)
def test_bad_packed_configs_are_refused(value: str, why: str):
    with pytest.raises(ConfigError, match=why):
        decode_config(value)
    with pytest.raises(RequestError, match=f"arch: given .*{why}"):
        parse_query(f"arch=config:{value.replace('%', '%25')}")


def test_unpacking_a_bomb_takes_little_memory():
    import tracemalloc

    bomb = pack(bytes(2**28))  # 256 MiB
    tracemalloc.start()
    with pytest.raises(ConfigError, match="too large"):
        decode_config(bomb)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 8 * 2**20


def test_large_configs_are_not_packed():
    with pytest.raises(ConfigError, match="too large: given 2,097,153 bytes, allowed at most 2,097,152"):
        encode_config("x" * (2**21 + 1))
    with pytest.raises(ConfigError, match="not valid Unicode"):
        encode_config("\ud800")


def test_the_largest_incompressible_config_still_fits_in_a_query():
    rng = random.Random(0)
    noise = {f"k{i}": "".join(chr(rng.randrange(0x4E00, 0x9FFF)) for _ in range(9000)) for i in range(75)}
    request = Request(source="config", config=canonical_json(noise))
    assert len(request.config.encode()) > 2_000_000
    assert parse_query(format_query(request)) == request


def test_bad_json_in_a_config_is_refused_under_arch():
    for text in ("[1]", "{", '{"a": 1, "a": 2}', "[" * 10**5):
        assert refused_keys(f"arch=config:{encode_config(text)}") == ["arch"]


@pytest.mark.parametrize(
    ("written", "canonical"),
    [
        ("gpt2", "hf:gpt2"),
        ("GPT 2", "hf:gpt2"),
        ("Qwen3-8B", "hf:qwen3-8b"),
        ("hf:Qwen3-8B", "hf:qwen3-8b"),
        ("llama-3.1-8b-instruct", "hf:llama-3.1-8b"),
        ("resnet-50", "torchvision:resnet50"),
        ("torchvision:ResNet-50", "torchvision:resnet50"),
        ("ViT_B_16", "torchvision:vit_b_16"),
        ("FLUX.1-dev", "diffusers:flux.1-dev"),
        ("sdxl", "diffusers:sdxl"),
        ("ResNet50", "torchvision:resnet50"),
        ("resnet50", "torchvision:resnet50"),
        ("resnet50.a1_in1k", "timm:resnet50.a1_in1k"),
        ("openai-community/gpt2@v1", "hub:openai-community/gpt2@v1"),
        ("https://huggingface.co/org/name", "hub:org/name"),
        ("https://huggingface.co/org/name/", "hub:org/name"),
        ("huggingface.co/org/name/tree/v1.0", "hub:org/name@v1.0"),
        ("https://huggingface.co/org/name/blob/main/config.json", "hub:org/name@main"),
        ("https://huggingface.co/org/name/blob/main/model_index.json", "hub:org/name@main"),
        ("hub:https://huggingface.co/org/name/tree/main", "hub:org/name@main"),
    ],
)
def test_an_architecture_as_people_write_it(written, canonical):
    assert format_query(parse_query(f"arch={written}")) == f"arch={canonical}"


@pytest.mark.parametrize(
    ("written", "told"),
    [
        ("https://huggingface.co/org/name/discussions", "the address of a repository, of a branch"),
        ("https://huggingface.co/org/name/blob/main/model.py", "write hub:org/name"),
        ("GPT!", "torchvision:<name>"),
        ("torchvison:resnet50", "did you mean torchvision"),
    ],
)
def test_what_no_source_can_mean_is_refused(written, told):
    with pytest.raises(RequestError, match=re.escape(told)):
        parse_query(f"arch={written}")


def test_image_sizes_with_the_sign_for_times():
    assert parse_query("arch=torchvision:resnet50&image=224×320").image_size == (224, 320)
    assert parse_query("arch=torchvision:resnet50&image=224 × 320").image_size == (224, 320)
