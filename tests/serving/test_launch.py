"""Commands that start a server, as people paste them."""

from __future__ import annotations

import pytest

from sizer.base.errors import RequestError
from sizer.query.text import parse_query
from sizer.serving.launch import is_launch, read_launch, with_command
from sizer.serving.startup import read_startup

LLAMA = "hf:llama-3.1-8b"
COMMANDS = {
    "vllm serve Qwen/Qwen3-8B": ("hf:qwen3-8b", ""),
    "$ vllm serve Qwen/Qwen3-8B --max-model-len 32K --max-num-batched-tokens 8k -tp 2": (
        "hf:qwen3-8b",
        "max_model_len=32768&max_num_batched_tokens=8000&tp=2",
    ),
    "CUDA_VISIBLE_DEVICES=0,1 VLLM_USE_V1=1 vllm serve /data/Qwen3-Next-80B-A3B-Instruct \\\n  --tensor-parallel-size=2 \\\n"
    "  --max-model-len auto --enable-prefix-caching 2>&1 | tee --append log": (
        "hf:qwen3-next-80b-a3b-instruct",
        "tp=2&max_model_len=auto&prefix_caching=1",
    ),
    "vllm serve Qwen/Qwen3-8B --max-model-len -1 --kv-cache-dtype fp8_e5m2 --enforce-eager": (
        "hf:qwen3-8b",
        "max_model_len=-1&kv=fp8&enforce_eager=1",
    ),
    "docker run --gpus all -p 8000:8000 --ipc=host vllm/vllm-openai:v0.11.0 --model Qwen/Qwen3-8B --max-num-seqs 64": (
        "hf:qwen3-8b",
        "engine_version=0.11.0&max_num_seqs=64",
    ),
    "docker run --gpus all lmsysorg/sglang:v0.5.3.post1-cu126 python3 -m sglang.launch_server --model-path "
    "meta-llama/Llama-3.1-8B-Instruct --host 0.0.0.0 --tp 2 --mem-fraction-static 0.8": (
        LLAMA,
        "engine=sglang&engine_version=0.5.3&tp=2&util=0.8",
    ),
    "python -m sglang.launch_server --model Qwen/Qwen3-8B --chunked-prefill-size -1 --ep-size 1 --disable-cuda-graph "
    "--disable-radix-cache &": (
        "hf:qwen3-8b",
        "engine=sglang&max_num_batched_tokens=16384&ep=0&enforce_eager=1&prefix_caching=0",
    ),
    "model: Qwen/Qwen3-8B\nhost: 0.0.0.0\ntensor-parallel-size: 2\nmax_model_len: 8192\nenforce-eager: true\n"
    "trust-remote-code: false": (
        "hf:qwen3-8b",
        "tp=2&max_model_len=8192&enforce_eager=1",
    ),
    "services:\n  vllm:\n    image: vllm/vllm-openai:v0.26.0-cu129\n    command: >\n      Qwen/Qwen3-8B\n"
    "      --kv-cache-dtype fp8\n      --tensor-parallel-size 4\n    ports:\n      - 8000:8000\n": (
        "hf:qwen3-8b",
        "engine_version=0.26.0&kv=fp8&tp=4",
    ),
    'command: ["vllm", "serve", "Qwen/Qwen3-8B", "--tensor-parallel-size", "4"]': ("hf:qwen3-8b", "tp=4"),
    'args: ["--model", "Qwen/Qwen3-8B", "--max-model-len", "8192"]\nimage: vllm/vllm-openai:latest': (
        "hf:qwen3-8b",
        "max_model_len=8192",
    ),
    "python3 -m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-8B-AWQ --quantization awq_marlin --dtype half": (
        "hub:Qwen/Qwen3-8B-AWQ",
        "weights=awq",
    ),
    'vllm serve "Qwen/Qwen3-8B --tensor_parallel_size 2': ("hf:qwen3-8b", "tp=2"),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --limit-mm-per-prompt '{\"image\": 0, \"video\": 0}'": ("hf:qwen3-vl-8b", "inputs=text"),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --limit-mm-per-prompt image=0,video=0": ("hf:qwen3-vl-8b", "inputs=text"),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --limit-mm-per-prompt.image 0 --limit-mm-per-prompt.video=0": (
        "hf:qwen3-vl-8b",
        "inputs=text",
    ),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --language-model-only": ("hf:qwen3-vl-8b", "inputs=text"),
    "vllm serve Qwen/Qwen3-VL-8B-Instruct --limit-mm-per-prompt '{\"image\": 2}'": ("hf:qwen3-vl-8b", ""),
    "vllm serve Qwen/Qwen3-8B -pp=2 --tensor-parallel 2 --gpu-memory-util=0.8 -q fp8": (
        "hf:qwen3-8b",
        "pp=2&tp=2&util=0.8&weights=fp8",
    ),
}


@pytest.mark.parametrize("text", COMMANDS, ids=range(len(COMMANDS)))
def test_a_command_is_read_with_its_flags(text: str):
    arch, keys = COMMANDS[text]
    assert is_launch(text)
    launch = read_launch(text)
    expected = {"mode": "serve"} | (dict(item.split("=") for item in keys.split("&")) if keys else {})
    assert (launch.arch, dict(launch.items)) == (arch, expected)
    parse_query("&".join(f"{key}={value}" for key, value in {"arch": LLAMA, **launch.items}.items()))


def test_flags_of_how_a_server_starts_change_no_memory():
    flags = "--config-format mistral --load-format runai_streamer --device cuda --disable-cascade-attn --max-logprobs 20 -n 2"
    others = "-ep -O3 -cc.mode=3 -sc '{\"method\": \"ngram\"}' --load-format bitsandbytes"
    launch = read_launch(f"vllm serve Qwen/Qwen3-8B {flags} {others}")
    assert (launch.items, launch.irrelevant) == ({"mode": "serve", "ep": "1"}, 6)
    assert launch.unmatched == (
        "--compilation-config",
        "--compilation-config.mode 3",
        "--load-format bitsandbytes",
        '--speculative-config {"method": "ngram"}: a draft model reduces the cache: fewer tokens than planned',
    )


def test_a_short_command_of_sglang_and_its_dp_attention():
    assert read_launch("sglang serve Qwen/Qwen3-8B --tp 2").arch == "hf:qwen3-8b"
    attention = read_launch("python -m sglang.launch_server --model deepseek-ai/DeepSeek-V3 --tp 8 --enable-dp-attention --dp 8")
    assert dict(attention.items) == {"mode": "serve", "engine": "sglang", "tp": "8", "attn_dp": "8"}  # on 8 GPUs
    assert (attention.read[-1], attention.unmatched) == (("--enable-dp-attention --dp-size 8", "attn_dp=8"), ())
    later = read_launch("sglang serve deepseek-ai/DeepSeek-V3 --tp 8 --attn-dp-size 4 --dp 2")
    assert {"attn_dp": "4", "dp": "2"}.items() <= later.items.items()
    log = "server_args=ServerArgs(model_path='a/b', tp_size=8, dp_size=8, enable_dp_attention=True)\nmax_total_num_tokens=5"
    assert read_startup(log).query() == "mode=serve&engine=sglang&tp=8&attn_dp=8"
    said = "{'model_path': 'a/b', 'tp_size': 8, 'dp_size': 1, 'attn_dp_size': 4, 'enable_dp_attention': True}"
    assert read_startup(f"server_args={said}\nmax_total_num_tokens=5").query() == "mode=serve&engine=sglang&tp=8&attn_dp=4"


def test_flags_of_sglangs_pool():
    command = "sglang serve Qwen/Qwen3.5-9B --max-total-tokens 32768 --mamba-ssm-dtype bfloat16 --swa-full-tokens-ratio 0.50"
    read = read_launch(f"{command} --page-size $PAGE --max-mamba-cache-size many")
    assert read.items["pool"] == "max_total_tokens:32768,mamba_ssm_dtype:bfloat16,swa_full_tokens_ratio:0.50"
    assert read.unmatched == ("--page-size $PAGE: its value is not in the text", "--max-mamba-cache-size many")
    request = parse_query(f"arch=hf:qwen3.5-9b&{'&'.join(f'{key}={value}' for key, value in read.items.items())}")
    assert request.pool == (("max_total_tokens", "32768"), ("swa_full_tokens_ratio", "0.50"), ("mamba_ssm_dtype", "bfloat16"))
    log = f"$ {command}\n[2026-04-14 16:08:49] KV Cache is allocated. #tokens: 327310, K size: 2.50 GB, V size: 2.50 GB"
    assert with_command(read_startup(log), log).query().endswith(f"pool={read.items['pool']}")


def test_a_cache_in_4_bits_says_how_much_smaller_it_is():
    (line,) = read_launch("sglang serve Qwen/Qwen3-8B --kv-cache-dtype fp4_e2m1").unmatched
    assert line.startswith("--kv-cache-dtype fp4_e2m1: the cache is planned in 16 bits") and line.endswith("more tokens")


REFUSED = {
    "vllm serve Qwen/Qwen3-8B --mem-fraction-static 0.8": "--gpu-memory-utilization",
    "vllm serve Qwen/Qwen3-8B --tp 2": "-tp or --tensor-parallel-size",
    "model: Qwen/Qwen3-8B\nmax-model-len: 8192\ndp: 2": "-dp or --data-parallel-size",
    "python -m sglang.launch_server --model Qwen/Qwen3-8B --gpu-memory-utilization 0.9": "--mem-fraction-static",
    "vllm serve Qwen/Qwen3-8B --max-model-len": "has no value",
}


@pytest.mark.parametrize("text", REFUSED)
def test_flags_of_another_server_are_refused_by_name(text: str):
    with pytest.raises(RequestError, match=REFUSED[text]):
        read_launch(text)


def test_flags_without_a_counterpart_are_named():
    text = "vllm serve /models --lora-extra-vocab-size 512 "
    text += "--max-model-leng 8 --config a.yaml --port 1 --quantization gguf --kv-cache-dtype int4"
    launch = read_launch(text)
    assert (launch.arch, launch.model, launch.irrelevant) == (None, "/models", 1)
    assert launch.unmatched == (
        "--lora-extra-vocab-size 512: the slots of adapters reduce the cache: fewer tokens than planned",
        "--max-model-leng 8: not known as a flag of vLLM; did you mean max-model-len?",
        "--config a.yaml: its lines are not read; paste them",
        "quantization=gguf: which layers are quantized is in the checkpoint's config.json alone; give it as arch",
        "--kv-cache-dtype int4",
    )


@pytest.mark.parametrize(
    ("text", "arch", "query", "unmatched"),
    [
        (
            "llama-server -hf ggml-org/gemma-3-4b-it-GGUF:Q4_K_M -c 32768 -ngl 99 --flash-attn",
            "hf:gemma-3-4b",
            "engine=llama.cpp&weights=q4_k_m&max_model_len=32768",
            ("the projector of images",),
        ),
        (
            "./build/bin/llama-server -m models/qwen3-8b-q4_k_m.gguf \\\n  --ctx-size 32768 -np 4 -ctk q8_0 -ngl 20",
            "hf:qwen3-8b",
            "engine=llama.cpp&weights=q4_k_m&max_num_seqs=4&gpu_layers=20&max_model_len=8192",
            ("-ctk q8_0: the cache is counted in 16 bits",),
        ),
        (
            "llama-server -hf unsloth/gpt-oss-20b-GGUF:F16 -ctk q8_0 -ctv q8_0 -fa on --n-cpu-moe 12 -ub 2048 -b 2048 -ngl all",
            "hf:gpt-oss-20b",
            "engine=llama.cpp&weights=f16&max_num_batched_tokens=2048&cpu_moe=12&kv=q8_0",
            (),
        ),
        (
            "llama-server -m Qwen3-30B-A3B-UD-Q4_K_XL.gguf --cpu-moe -ngl auto -ot exps=CPU",
            "hf:qwen3-30b-a3b",
            "engine=llama.cpp&weights=q4_k_m&cpu_moe=1000",
            ("-ot exps=CPU", "counted as Q4_K_M"),
        ),
        (
            "docker run ghcr.io/ggml-org/llama.cpp:server -m /models/own-q8_0.gguf -c 0",
            None,
            "engine=llama.cpp&weights=q8_0",
            (),
        ),
        (
            "llama-server -m qwen3-8b-q4_k_m.gguf -ts 3,1,0 -sm row",
            "hf:qwen3-8b",
            "engine=llama.cpp&weights=q4_k_m&pp=2",
            ("-sm row: whole layers", "-ts 3,1,0: layers are counted in equal shares"),
        ),
        ("llama-server -dev CUDA0,CUDA1", None, "engine=llama.cpp&pp=2", ()),
        ("llama-server -ts 1,1 -sm none -mg 1", None, "engine=llama.cpp", ()),
        ("llama-server -m own.gguf -ngl many", None, "engine=llama.cpp", ("in 16 bits", "-ngl many: not a number")),
        ("llama-cli -c 'unclosed", None, "engine=llama.cpp", ("-c 'unclosed: not a number",)),
        (
            "llama-server -m Qwen3-8B-Q4_K_M.gguf -md Qwen3-0.6B-Q8_0.gguf",
            "hf:qwen3-8b",
            "engine=llama.cpp&weights=q4_k_m",
            (
                "-md Qwen3-0.6B-Q8_0.gguf: a draft model is not counted; its weights, cells and buffer are about those of "
                "arch=hf:qwen3-0.6b",
            ),
        ),
        (
            "llama-server -fa off --swa-full --ctx-sze 8",
            None,
            "engine=llama.cpp&fa=0",
            ("--swa-full: ", "--ctx-sze 8: not known"),
        ),
        ("llama-server -fa on --jinja -t 8 --no-mmap -cram 0 --temp 0.7", None, "engine=llama.cpp", ()),
    ],
)
def test_a_command_of_llama_cpp_shares_its_context_among_slots(text, arch, query, unmatched):
    assert is_launch(text)
    launch = read_launch(text)
    assert launch.arch == arch
    assert "&".join(f"{key}={value}" for key, value in launch.items.items()) == f"mode=serve&{query}"
    assert len(launch.unmatched) == len(unmatched)
    assert all(words in line for words, line in zip(unmatched, launch.unmatched, strict=True))


def test_other_texts_are_no_commands():
    configs = ("base_model: a/b\nmax_model_len: 8", "gpu_memory_utilization: 0.5\nuse_vllm: true")
    for other in ("", *configs, "I serve vllm", "x" * 65_537):
        assert not is_launch(other)


def test_a_log_has_the_flags_of_the_command_before_it():
    text = (
        "vllm serve Qwen/Qwen3-30B-A3B \\\n  --tensor-parallel-size 2 --enable-expert-parallel --kv-cache-dtype fp8\n"
        "INFO [gpu_worker.py:298] Available KV cache memory: 25.91 GiB\nINFO GPU KV cache size: 566,016 tokens\n"
    )
    log = with_command(read_startup(text), text)
    assert (log.arch, log.query()) == ("hf:qwen3-30b-a3b", "mode=serve&tp=2&kv=fp8&ep=1")
    whole = read_startup(text + "INFO non-default args: {'model': 'Qwen/Qwen3-8B'}")
    assert with_command(whole, text) == whole


HELM = """servingEngineSpec:
  modelSpec:
  - name: "llama3"
    repository: "vllm/vllm-openai"
    tag: "v0.11.0"
    modelURL: "meta-llama/Llama-3.1-8B-Instruct"
    requestGPU: 1
    vllmConfig:
      v1: 1
      enablePrefixCaching: true
      maxModelLen: 16384
      extraArgs: ["--max-num-seqs", "32"]
    hf_token: x"""
KSERVE = """apiVersion: serving.kserve.io/v1beta1
kind: InferenceService
spec:
  predictor:
    model:
      modelFormat:
        name: huggingface
      args:
        - --model_name=llama3
        - --model_id=Qwen/Qwen3-8B
        - --max-model-len=8192"""
VARIABLES = """image: vllm/vllm-openai:v0.19.0
args: ["--model", "Qwen/Qwen3-8B"]
env:
  - name: VLLM_USE_FLASHINFER_SAMPLER
    value: "1"
  - name: VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS
    value: "0"
  - name: VLLM_LOGGING_LEVEL
    value: DEBUG"""
LLAMA_VARIABLES = """image: ghcr.io/ggml-org/llama.cpp:server-cuda
command: -ngl 20
environment:
  LLAMA_ARG_HF_REPO: unsloth/Qwen3-8B-GGUF:Q4_K_M
  LLAMA_ARG_CTX_SIZE: 16384
  LLAMA_ARG_N_PARALLEL: 4
  LLAMA_ARG_HOST: 0.0.0.0"""
RUN = """envs:
  MODEL_NAME: Qwen/Qwen3-8B
run: |
  vllm serve $MODEL_NAME --max-model-len ${LENGTH:-8192} -tp $GPUS"""
MODAL = """MODEL = "Qwen/Qwen3-8B"
cmd = ["vllm", "serve", MODEL, "--max-model-len", "8192", "--tensor-parallel-size", str(GPUS)]"""
QUADLET = """[Container]
Image=docker.io/vllm/vllm-openai:v0.21.0
AddDevice=nvidia.com/gpu=all
Exec=--model Qwen/Qwen3-8B --max-model-len 8192
PublishPort=8000:8000"""
TWO = """services:
  chat:
    image: vllm/vllm-openai:v0.11.0
    command: --model Qwen/Qwen3-8B --gpu-memory-utilization 0.5
  small:
    image: vllm/vllm-openai:v0.11.0
    command: --model Qwen/Qwen3-4B --gpu-memory-utilization 0.2"""
STRANGERS = {
    "helm": (HELM, "hf:llama-3.1-8b", "engine_version=0.11.0&prefix_caching=1&max_model_len=16384&max_num_seqs=32", ()),
    "kserve": (KSERVE, "hf:qwen3-8b", "max_model_len=8192", ()),
    "variables": (
        VARIABLES,
        "hf:qwen3-8b",
        "engine_version=0.19.0&sampler=flashinfer",
        ("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS=0: graphs are taken off",),
    ),
    "llama": (
        LLAMA_VARIABLES,
        "hf:qwen3-8b",
        "engine=llama.cpp&weights=q4_k_m&max_num_seqs=4&gpu_layers=20&max_model_len=4096",
        (),
    ),
    "run": (RUN, "hf:qwen3-8b", "max_model_len=8192", ("--tensor-parallel-size $GPUS: its value is not in the text",)),
    "modal": (MODAL, "hf:qwen3-8b", "max_model_len=8192", ("--tensor-parallel-size $GPUS: its value is not in the text",)),
    "quadlet": (QUADLET, "hf:qwen3-8b", "engine_version=0.21.0&max_model_len=8192", ()),
    "two": (TWO, "hf:qwen3-4b", "engine_version=0.11.0&util=0.2", ("the text starts 2 servers: the last one is read",)),
    "windows": (
        "llama-server.exe ^\n -m C:\\models\\gpt-oss-20b-mxfp4.gguf ^\n -ngl 99",
        "hf:gpt-oss-20b",
        "engine=llama.cpp&weights=mxfp4",
        (),
    ),
    "v0": ("VLLM_USE_V1=0 vllm serve Qwen/Qwen3-8B", "hf:qwen3-8b", "", ("VLLM_USE_V1=0: the engine before V1 is not planned",)),
}


@pytest.mark.parametrize("name", STRANGERS)
def test_servers_are_read_where_people_write_them(name: str):
    text, arch, query, unmatched = STRANGERS[name]
    assert is_launch(text)
    launch = read_launch(text)
    assert launch.arch == arch
    assert "&".join(f"{key}={value}" for key, value in launch.items.items()) == f"mode=serve&{query}".rstrip("&")
    assert len(launch.unmatched) == len(unmatched)
    assert all(line.startswith(said) for line, said in zip(launch.unmatched, unmatched, strict=True)), launch.unmatched
