"""Questions in words and commands of Ollama."""

from __future__ import annotations

import pytest

from sizer.base.errors import ConfigError
from sizer.catalogue.presets import list_presets
from sizer.pasted.reading import read_question
from sizer.pasted.sentence import read_sentence
from sizer.query.text import parse_query

QUESTIONS = {
    "can I run qwen3 32b on a 3090": "arch=hf:qwen3-32b&mode=generate&batch=1&gpu=rtx-3090&dtype=bfloat16",
    "Can I fine-tune Llama 3.1 8B with QLoRA on a 4090 with 4k context and batch size 2?": (
        "arch=hf:llama-3.1-8b&mode=training&train=adapter&weights=nf4&gpu=rtx-4090&seq=4k&batch=2&checkpointing=1&dtype=bfloat16"
    ),
    "serve Qwen3-8B for 32 users with 8k tokens on 2x L40S": "arch=hf:qwen3-8b&mode=serve&gpu=l40s&tp=2&want=32x8k",
    "run deepseek r1 distill llama 70b in vllm on 4 a100 80gb": (
        "arch=hf:deepseek-r1-distill-llama-70b&mode=serve&gpu=a100-80gb&tp=4"
    ),
    "will gemma 3 27b q4_k_m fit in 24GB vram?": (
        "arch=hf:gemma-3-27b&mode=serve&engine=llama.cpp&weights=q4_k_m&gpu=custom:24GiB@8.9"
    ),
    "lora finetune mistral 7b v0.3 on t4 in 8-bit": (
        "arch=hf:mistral-7b-v0.3&mode=training&train=adapter&weights=int8&gpu=t4&checkpointing=1&dtype=float16"
    ),
    "train gpt2 on eight H100s in bf16": "arch=hf:gpt2&mode=training&gpu=h100-80gb&ranks=8&parallel=fsdp&dtype=bfloat16",
    "serve mixtral 8x7b in 4 bits on an a100 80gb": "arch=hf:mixtral-8x7b&mode=serve&weights=awq&gpu=a100-80gb",
    "resnet50 on a t4": "arch=torchvision:resnet50&mode=inference&batch=1&gpu=t4",
    "how much vram does bert-base-uncased need": "arch=hf:bert-base-uncased&mode=inference&batch=1&dtype=bfloat16",
    "Qwen/Qwen3-4B-Instruct-2507 on rtx 4060 laptop": (
        "arch=hub:qwen/qwen3-4b-instruct-2507&mode=generate&batch=1&gpu=rtx-4060-laptop&dtype=bfloat16"
    ),
    "can 8 h200 run deepseek r1": "arch=hf:deepseek-r1&gpu=h200&mode=serve&tp=8",
    "mixtral 8x7b 4bit on two 3090s": "arch=hf:mixtral-8x7b&gpu=rtx-3090&mode=serve&tp=2&weights=awq",
    "serve llama 3.3 70b in 4 bits on an m4 max 64gb": (
        "arch=hf:llama-3.3-70b&gpu=m4-max-64gb&mode=serve&engine=llama.cpp&weights=q4_k_m"
    ),
    "can I run qwen3 8b in bf16 on a 3090": "arch=hf:qwen3-8b&mode=generate&batch=1&gpu=rtx-3090&dtype=bfloat16",
    "run qwen3 8b gguf fp16 on a 3090": "arch=hf:qwen3-8b&mode=serve&engine=llama.cpp&weights=f16&gpu=rtx-3090",
    "whisper large v3 inference on t4": "arch=hf:whisper-large-v3&mode=inference&batch=1&gpu=t4&dtype=float16",
    "run sdxl at 1024x768 on 8gb": (
        "arch=diffusers:sdxl&mode=inference&batch=1&gpu=custom:8GiB@8.9&image=768x1024&dtype=bfloat16"
    ),
    "train a lora of FLUX.1-dev on a 4090": "arch=diffusers:flux.1-dev&mode=training&train=adapter&gpu=rtx-4090&dtype=bfloat16",
    "serve qwen3 8b q8_0 gguf to 4 users with 8k tokens on a 3090": (
        "arch=hf:qwen3-8b&mode=serve&engine=llama.cpp&weights=q8_0&gpu=rtx-3090&want=4x8k"
    ),
    "Full finetune of Mistral 7B v0.3 with AdamW on 8 H100s with FSDP": (
        "arch=hf:mistral-7b-v0.3&mode=training&train=all&optimizer=adamw&gpu=h100-80gb&parallel=fsdp&ranks=8&dtype=bfloat16"
    ),
    "mistral 7b v0.3 lora rank 64 batch size 4 seq len 4096 gradient checkpointing A6000": (
        "arch=hf:mistral-7b-v0.3&mode=training&train=adapter&gpu=rtx-a6000&seq=4096&batch=4&checkpointing=1&r=64&dtype=bfloat16"
    ),
    "bert base uncased text classification training batch 32 seq 512 on colab T4": (
        "arch=hf:bert-base-uncased&mode=training&gpu=t4&seq=512&batch=32&head=AutoModelForSequenceClassification&dtype=float16"
    ),
    "DPO llama 3 8b with paged 8-bit adamw on A100 80GB": (
        "arch=hf:llama-3-8b&mode=training&objective=dpo&optimizer=paged-adamw-8bit&gpu=a100-80gb&dtype=bfloat16"
    ),
    "train resnet50 batch 256 on 3060 12GB mixed precision": (
        "arch=torchvision:resnet50&mode=training&gpu=rtx-3060-12gb&batch=256&dtype=amp-bfloat16"
    ),
    "llama-3.1-8b 128k context fp8 kv cache vllm l40s 16 concurrent users": (
        "arch=hf:llama-3.1-8b&mode=serve&kv=fp8&gpu=l40s&want=16x128k"
    ),
    "dora of qwen3 8b quantized to 4 bit on a 4090": (
        "arch=hf:qwen3-8b&mode=training&train=adapter&adapter=dora&weights=nf4&gpu=rtx-4090&checkpointing=1&dtype=bfloat16"
    ),
    "AWQ llama 3 70b tensor parallel 2 a100 40gb": "arch=hf:llama-3-70b&mode=serve&weights=awq&gpu=a100-40gb&tp=2",
    "Qwen3-30B-A3B GGUF Q4_K_M on RTX 3060 12 GB with experts on the CPU": (
        "arch=hf:qwen3-30b-a3b&mode=serve&engine=llama.cpp&weights=q4_k_m&gpu=rtx-3060-12gb&cpu_moe=1000"
    ),
    "finetune t5-large batch size 16 adafactor 24gb": (
        "arch=hf:t5-large&mode=training&optimizer=adafactor&gpu=custom:24GiB@8.9&batch=16&dtype=bfloat16"
    ),
    "SD3.5 medium 1024px batch 8 a6000": (
        "arch=diffusers:sd3.5-medium&mode=inference&batch=8&gpu=rtx-a6000&image=1024&dtype=bfloat16"
    ),
    "bert-base-uncased training seq 512 a100 80gb": "arch=hf:bert-base-uncased&mode=training&gpu=a100-80gb&seq=512&dtype=bfloat16",
    "qwen3 coder 30b a3b instruct q4_k_xl on a 3090, 64k context": (
        "arch=hf:qwen3-coder-30b-a3b-instruct&mode=serve&engine=llama.cpp&weights=q4_k_m&gpu=rtx-3090&max_model_len=64k"
    ),
    "Serve Llama-3.1-70B-Instruct with TP=4 on A100-80GB": "arch=hf:llama-3.1-70b&mode=serve&gpu=a100-80gb&tp=4",
    "GLM 4.6 on mac studio 512gb": (
        "arch=hf:glm-4.6&gpu=m3-ultra-512gb&mode=serve&engine=llama.cpp&weights=q4_k_m"
    ),
    "kimi-k2-instruct on 8xH200": "arch=hf:kimi-k2-instruct&gpu=h200&mode=serve&tp=8",
    "vllm serve Qwen3-8B on 4060 Ti 16GB": "arch=hf:qwen3-8b&mode=serve&gpu=rtx-4060-ti-16gb",
    "ollama run deepseek-r1:32b on a 3090": (
        "arch=hf:deepseek-r1-distill-qwen-32b&mode=serve&engine=llama.cpp&weights=q4_k_m&max_model_len=4096&gpu=rtx-3090"
    ),
    "ollama run deepseek-r1": (
        "arch=hf:deepseek-r1-0528-qwen3-8b&mode=serve&engine=llama.cpp&weights=q4_k_m&max_model_len=4096"
    ),
    "ollama run llama3.1:8b": "arch=hf:llama-3.1-8b&mode=serve&engine=llama.cpp&weights=q4_k_m&max_model_len=4096",
    "$ ollama pull qwen3:30b-a3b-q8_0": "arch=hf:qwen3-30b-a3b&mode=serve&engine=llama.cpp&weights=q8_0&max_model_len=4096",
    "qlora of llama 3 8b without gradient checkpointing, seq 8192": (
        "arch=hf:llama-3-8b&mode=training&train=adapter&weights=nf4&seq=8192&checkpointing=0&dtype=bfloat16"
    ),
    "how much vram to run flux schnell at 768x512 in fp8": (
        "arch=diffusers:flux.1-schnell&mode=inference&batch=1&weights=fp8-cast&image=512x768&dtype=bfloat16"
    ),
    "flux dev in 4 bit on a 3060": (
        "arch=diffusers:flux.1-dev&mode=inference&batch=1&weights=nf4&gpu=rtx-3060-12gb&dtype=bfloat16"
    ),
    "train resnet50 on 8 V100 32gb": "arch=torchvision:resnet50&mode=training&gpu=v100-32gb&ranks=8&parallel=ddp",
    "qlora of llama 3 8b on 2x 3090": (
        "arch=hf:llama-3-8b&mode=training&train=adapter&weights=nf4&gpu=rtx-3090&ranks=2&parallel=ddp&checkpointing=1&dtype=bfloat16"
    ),
    "fine-tune llama 3 8b on 4 a100 80gb, ddp": (
        "arch=hf:llama-3-8b&mode=training&gpu=a100-80gb&parallel=ddp&ranks=4&dtype=bfloat16"
    ),
    "bert-base sequence classification batch 32 512 tokens fp16": (
        "arch=hf:bert-base-uncased&mode=inference&batch=32&seq=512&head=AutoModelForSequenceClassification&dtype=float16"
    ),
    "wan 2.2 14b 81 frames 720p on 4090": (
        "arch=diffusers:wan2.2-i2v-a14b&mode=inference&batch=1&gpu=rtx-4090&frames=81&image=720x1280&dtype=bfloat16"
    ),
    "sdxl lora training at 1024": "arch=diffusers:sdxl&mode=training&train=adapter&image=1024&dtype=bfloat16",
    "sd 1.5 dreambooth on 8gb": "arch=diffusers:sd1.5&mode=training&gpu=custom:8GiB@8.9&dtype=bfloat16",
    "grpo qwen2.5 3b lora on a 4090 with 4 generations": (
        "arch=hf:qwen2.5-3b&mode=training&objective=grpo&train=adapter&gpu=rtx-4090&group=4&dtype=bfloat16"
    ),
    "llama 3 8b lora rank 64 all linear layers": (
        "arch=hf:llama-3-8b&mode=training&train=adapter&r=64&targets=all-linear&dtype=bfloat16"
    ),
    "run gemma-3-27b-it-qat-q4_0-gguf": "arch=hf:gemma-3-27b&mode=serve&engine=llama.cpp&weights=q4_0",
    "gemma3 27b int4 on a 3090, 8k context, kv cache q8": (
        "arch=hf:gemma-3-27b&mode=serve&kv=q8_0&engine=llama.cpp&weights=q4_k_m&gpu=rtx-3090&max_model_len=8k"
    ),
    "qwen3-embedding-8b batch 32 length 8192 bf16": (
        "arch=hf:qwen3-embedding-8b&mode=inference&batch=32&seq=8192&dtype=bfloat16"
    ),
    "qwen2.5 7b with 1m context": "arch=hf:qwen2.5-7b&mode=generate&batch=1&seq=1024k&dtype=bfloat16",
    "sdxl inference batch 4 with vae tiling and slicing on a 3070": (
        "arch=diffusers:sdxl&mode=inference&batch=4&gpu=rtx-3070&vae=tiling,slicing&dtype=bfloat16"
    ),
    "SD3.5 medium lora 512 on a 3060": (
        "arch=diffusers:sd3.5-medium&mode=training&train=adapter&gpu=rtx-3060-12gb&image=512&dtype=bfloat16"
    ),
    "deepseek r1 671b q4": "arch=hf:deepseek-r1&mode=serve&engine=llama.cpp&weights=q4_k_m",
    "llama 4 scout 17b lora": "arch=hf:llama-4-scout&mode=training&train=adapter&dtype=bfloat16",
    "ollama run gpt-oss:20b": "arch=hf:gpt-oss-20b&mode=serve&engine=llama.cpp&max_model_len=4096",
}


@pytest.mark.parametrize("text", QUESTIONS)
def test_a_question_in_words_is_read(text):
    question = read_question(text, None)
    assert question.kind == "words"
    assert "&".join(f"{key}={value}" for key, value in question.items.items()) == QUESTIONS[text]
    parse_query(QUESTIONS[text])
    assert question.unmatched == ()
    shown = "&".join([*(line.means for line in question.read), *question.assumed])
    assert all(f"{key}={value}" in shown for key, value in question.items.items())  # nothing is taken in silence


@pytest.mark.parametrize("layout", [["q4_0"], ["awq"], ["gguf", "q8"]])
def test_a_layout_that_pipelines_do_not_have_is_named(layout):
    question = read_question(f"flux dev {' '.join(layout)} on a 3060", None)
    assert (question.items["mode"], question.items.get("weights")) == ("inference", None)
    assert [line.partition(":")[0] for line in question.unmatched] == layout


OTHERS = ["llava 1.6 34b on 2 a6000", "t5-xxl in fp16", "convnext-xlarge fp16", "gpt-j 6b fp16", "unet 512x512 batch 8"]
OTHERS += ["qwen2-vl 2b lora", "finetune olmoz 7b on a t4"]


@pytest.mark.parametrize("text", OTHERS)
def test_another_size_of_a_known_family_is_no_known_model(text):
    with pytest.raises(ConfigError, match="no known model is in this question"):
        read_question(text, None)


def test_a_cache_and_a_number_of_epochs_are_no_layout_and_no_size():
    question = read_question("flux dev quantized to 4 bit, fp8 kv cache", None)
    assert (question.items["weights"], [line.partition(":")[0] for line in question.unmatched]) == ("nf4", ["fp8 kv cache"])
    assert "image" not in read_question("train resnet50 at 100 epochs", None).items
    assert "seq" not in read_question("pretrain gpt2 on 10m tokens", None).items


def test_words_after_a_name_without_a_task_are_named():
    question = read_question("phi-4-mini on iphone", None)
    assert (question.items["arch"], question.unmatched) == ("hf:phi-4-mini-instruct", ("iphone: not understood",))


def test_every_preset_is_found_by_its_title():
    for preset in list_presets():
        question = read_sentence(f"train {preset.title} please")
        assert question is not None, preset.title
        found = next(one for one in list_presets() if one.key == question.items["arch"].removeprefix("hf:"))
        assert found.title == preset.title


def test_of_several_sizes_one_is_assumed_by_name():
    question = read_sentence("train gpt2 on an a100")
    assert question.items["gpu"].startswith("a100")
    assert any("a100 is taken to be" in line for line in question.assumed)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("serve qwen3 8b with batch size 8 on an l4", "batch size 8: a server chooses its batches"),
        ("serve qwen3 8b in bfloat16 on an l4", "bfloat16: a server takes the dtype of the config"),
        ("fine tune qwen3 8b for 10 users on an l4", "10 users: only a server has users"),
        ("train qwen3 8b q4_k_m on an l4", "q4_k_m: only llama.cpp runs such a file"),
        ("run qwen2.5-vl-7b with 1024x768 on an l4", "1024x768: the model's own size of images is taken"),
        ("run qwen2.5-vl-7b with 1080p videos on an l4", "1080p videos: not understood"),
        ("train llama-3.1-8b and serve it on an l4", "serve: the question is about training"),
        ("run llama-3.1-8b quantized on an l4", "quantized: not understood"),
    ],
)
def test_what_the_task_has_no_key_for_is_said(text, words):
    assert read_sentence(text).unmatched == (words,)


@pytest.mark.parametrize(
    ("text", "arch", "said"),
    [
        ("train mistral 7b on a t4", "hf:mistral-7b-v0.1", "mistral 7b is taken to be mistral-7b-v0.1; there are mistral-7b-v0.3"),
        ("flux dev on a 4070", "diffusers:flux.1-dev", "flux dev is taken to be flux.1-dev; there are flux.2-dev"),
        ("wan 2.2 5b on a 5090", "diffusers:wan2.2-ti2v-5b", "wan 2.2 5b is taken to be wan2.2-ti2v-5b"),
        ("qwen2.5-coder-7b q8_0 on a 3060", "hf:qwen2.5-7b", "qwen2.5 coder 7b is taken to be qwen2.5-7b"),
        ("70B QLoRA on 2 x 24GB GPUs", "hf:llama-3.1-70b", "70b is taken to be llama-3.1-70b; there are llama-3.3-70b"),
    ],
)
def test_a_part_of_a_name_is_a_model_and_the_others_are_named(text, arch, said):
    question = read_sentence(text)
    assert question.items["arch"] == arch
    assert any(line.startswith(said) for line in question.assumed)


@pytest.mark.parametrize(
    ("text", "arch"),
    [("resnet50", "torchvision:resnet50"), ("Llama 3.1 8B", "hf:llama-3.1-8b"), ("ResNet-50", "torchvision:resnet50")],
)
def test_a_name_alone_is_a_model(text, arch):
    question = read_question(text, None)
    assert (question.kind, question.items) == ("model", {"arch": arch})


def test_what_is_read_is_not_assumed_too():
    assert "mode=inference: the model runs in PyTorch, one input at once" in read_sentence("bge-m3 batch 64 on an l4").assumed


def test_an_unknown_model_is_named():
    with pytest.raises(ConfigError, match="no known model is in this question"):
        read_question("yolov8 training on a 3080", None)


def test_devices_that_are_not_counted_are_named():
    assert "2 × 3090" in read_sentence("run resnet50 on two 3090s").unmatched[0]
    assert read_sentence("can I run llama 3.3 70b on two 3090s").items["tp"] == "2"


@pytest.mark.parametrize(
    "text",
    [
        "what is the meaning of life",
        "llama 3.1 8b",  # no task and no device
        "a nice picture of gpt2",
        "train = gpt2 on a t4",
        "x" * 401,
        "run gpt2 " + "on a t4 " * 60,
    ],
)
def test_other_texts_are_not_read(text):
    assert read_sentence(text) is None


def test_a_command_of_ollama_with_an_unknown_model_is_refused():
    with pytest.raises(ConfigError, match="a command of Ollama names no repository"):
        read_question("ollama run my-own-model", None)


def test_long_words_take_no_time():
    with pytest.raises(ConfigError, match="no known model"):
        read_sentence("run " + "1-" * 190 + " on a t4")


MODELFILES = {
    "FROM qwen3:14b\nPARAMETER num_ctx 32768\nPARAMETER num_gpu 30": (
        "arch=hf:qwen3-14b&max_model_len=32768&gpu_layers=30&weights=q4_k_m"
    ),
    'FROM ./Qwen3-8B-Q5_K_M.gguf\nTEMPLATE """x"""': "arch=hf:qwen3-8b&weights=q5_k_m&max_model_len=4096",
    "OLLAMA_CONTEXT_LENGTH=16384 OLLAMA_NUM_PARALLEL=2 OLLAMA_KV_CACHE_TYPE=q8_0 ollama serve": (
        "max_model_len=16384&max_num_seqs=2&kv=q8_0"
    ),
}


@pytest.mark.parametrize("text", MODELFILES)
def test_modelfiles_and_variables_of_ollama_are_read(text: str):
    found = read_question(text, None)
    expected = dict(item.split("=") for item in MODELFILES[text].split("&"))
    assert found.items == {"mode": "serve", "engine": "llama.cpp"} | expected
    assert not found.unmatched
    assert "FROM" in text or any("no model is named" in line for line in found.assumed)
