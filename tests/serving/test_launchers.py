"""Commands and files of programs that start another server, and texts as strangers write them."""

from __future__ import annotations

import pytest

from sizer.pasted.reading import read_question
from sizer.query.text import parse_query
from sizer.serving.launch import is_launch, read_launch
from sizer.serving.launchers import as_command, python_command

MODAL = """FAST_BOOT = CHOSEN
MODEL_NAME = "Qwen/Qwen3-8B"
N_GPU = 2
cmd = [
    "vllm",
    "serve",
    "--uvicorn-log-level=info",
    MODEL_NAME,
    "--served-model-name",
    MODEL_NAME,
]
cmd += ["--enforce-eager" if FAST_BOOT else "--no-enforce-eager"]
cmd += ["--tensor-parallel-size", str(N_GPU)]
cmd.extend(["--max-model-len", "8192"])
cmd.append("--trust-remote-code")
"""
RAY = """kind: RayService
spec:
  serveConfigV2: |
    applications:
    - import_path: ray.serve.llm:build_openai_app
      args:
        llm_configs:
        - model_loading_config:
            model_id: qwen
            model_source: Qwen/Qwen3-8B
          engine_kwargs:
            max_model_len: 1024
            enforce_eager: true
            enable_prefix_caching: false  # a comment
            gpu_memory_utilization: 0.75
          deployment_config:
            min_replicas: 1
"""
SWAP = """models:
  a:
    cmd: llama-server --port ${PORT} -m /models/Qwen3-8B-Q8_0.gguf -c 8192
  b:
    cmd: |
      llama-server --port ${PORT}
      -m /models/gemma-3-27b-it-Q4_K_M.gguf -c 16384
"""
HELM = """image:
  repository: lmsysorg/sglang
  tag: v0.5.5
args:
  - python3
  - -m
  - sglang.launch_server
  - --model-path=Qwen/Qwen3-8B
"""
VARIABLES = "MODEL_NAME=Qwen/Qwen3-8B\nMAX_MODEL_LEN=16384\nexport GPU_MEMORY_UTILIZATION=0.95\n"
LLAMA_CPP = "engine=llama.cpp&"
KOBOLD = "KoboldCpp runs a llama.cpp of its own: its buffers may differ"
TEXTS: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "dynamo": ("python -m dynamo.vllm --model Qwen/Qwen3-0.6B --max-model-len 8192", "hf:qwen3-0.6b", "max_model_len=8192", ()),
    "dynamo of sglang": ("python3 -m dynamo.sglang --model-path Qwen/Qwen3-8B --tp 2", "hf:qwen3-8b", "engine=sglang&tp=2", ()),
    "router": (
        "python -m sglang_router.launch_server --model-path Qwen/Qwen3-8B --dp-size 4 --router-policy random",
        "hf:qwen3-8b",
        "engine=sglang&dp=4",
        (),
    ),
    "trl": ("trl vllm-serve --model Qwen/Qwen3-8B --tensor_parallel_size 2 --enforce_eager False", "hf:qwen3-8b", "tp=2", ()),
    "trl eager": (
        "trl vllm-serve --model Qwen/Qwen3-8B --enforce_eager true --max_num_seqs 8",
        "hf:qwen3-8b",
        "enforce_eager=1&max_num_seqs=8",
        (),
    ),
    "modal": (
        MODAL,
        "hf:qwen3-8b",
        "tp=2&max_model_len=8192",
        ("--enforce-eager $FAST_BOOT: its value is not in the text",),
    ),
    "modal, fast": (MODAL.replace("CHOSEN", "True"), "hf:qwen3-8b", "enforce_eager=1&tp=2&max_model_len=8192", ()),
    "modal, slow": (MODAL.replace("CHOSEN", "False"), "hf:qwen3-8b", "enforce_eager=0&tp=2&max_model_len=8192", ()),
    "ray": (RAY, "hf:qwen3-8b", "max_model_len=1024&enforce_eager=1&util=0.75", ()),
    "two of ray": (
        RAY + RAY.partition("llm_configs:\n")[2],
        "hf:qwen3-8b",
        "max_model_len=1024&enforce_eager=1&util=0.75",
        ("the text configures 2 models: the first one is read",),
    ),
    "helm": (HELM, "hf:qwen3-8b", "engine=sglang&engine_version=0.5.5", ()),
    "variables": (VARIABLES, "hf:qwen3-8b", "max_model_len=16384&util=0.95", ()),
    "triton's model.json": (
        '{"model": "Qwen/Qwen3-8B", "disable_log_requests": true, "gpu_memory_utilization": 0.5, "enforce_eager": true}',
        "hf:qwen3-8b",
        "util=0.5&enforce_eager=1",
        (),
    ),
    "config of sglang": (
        "model-path: Qwen/Qwen3-8B\nhost: 0.0.0.0\nmem-fraction-static: 0.85\ncontext-length: 65536",
        "hf:qwen3-8b",
        "engine=sglang&util=0.85&max_model_len=65536",
        (),
    ),
    "small names": (
        "model=Qwen/Qwen3-8B\nlen=8192\nvllm serve $model --max-model-len ${len}",
        "hf:qwen3-8b",
        "max_model_len=8192",
        (),
    ),
    "folder of a quantized model": ("vllm serve /srv/models/Qwen3-32B-AWQ", "hf:qwen3-32b", "weights=awq", ()),
    "model behind flags": (
        "vllm serve --port=8000 --dtype half /srv/Qwen3-8B --max-num-seqs 4",
        "hf:qwen3-8b",
        "max_num_seqs=4",
        (),
    ),
    "ktransformers in sglang": (
        "python -m sglang.launch_server --model Qwen/Qwen3-30B-A3B --kt-num-gpu-experts 32 --kt-cpuinfer 56",
        "hf:qwen3-30b-a3b",
        "engine=sglang",
        ("--kt-num-gpu-experts 32: experts leave the devices: more tokens than planned",),
    ),
    "llama-swap": (
        SWAP,
        "hf:gemma-3-27b",
        f"{LLAMA_CPP}weights=q4_k_m&max_model_len=16384",
        ("the text starts 2 servers: the last one is read; paste one of them",),
    ),
    "a repository without a type": (
        "llama-server -hf ggml-org/gemma-3-12b-it-GGUF -c 8192",
        "hf:gemma-3-12b",
        f"{LLAMA_CPP}weights=q4_k_m&max_model_len=8192",
        (
            "-hf ggml-org/gemma-3-12b-it-GGUF: without a file's type llama.cpp takes Q4_K_M, or the first file of the repository",
            "-hf ggml-org/gemma-3-12b-it-GGUF: the projector of images, which -hf loads without --no-mmproj, is not counted",
        ),
    ),
    "a repository and its file": (
        "llama-server --hf-repo ggml-org/gemma-3-12b-it-GGUF --hf-file gemma-3-12b-it-Q8_0.gguf --no-mmproj -c 8192",
        "hf:gemma-3-12b",
        f"{LLAMA_CPP}weights=q8_0&max_model_len=8192",
        (),
    ),
    "gpt-oss": (
        "llama-server -hf ggml-org/gpt-oss-20b-GGUF -c 8192",
        "hf:gpt-oss-20b",
        f"{LLAMA_CPP}weights=mxfp4&max_model_len=8192",
        ("-hf ggml-org/gpt-oss-20b-GGUF: without a file's type llama.cpp takes Q4_K_M, or the first file of the repository",),
    ),
    "a file of llama.cpp in vllm": (
        "vllm serve ./Qwen3-8B-Q4_K_M.gguf --tokenizer Qwen/Qwen3-8B --max-model-len 8192",
        "hf:qwen3-8b",
        "max_model_len=8192",
        ("model ./Qwen3-8B-Q4_K_M.gguf: weights of a GGUF file are counted in 16 bits with vLLM",),
    ),
    "flags of sglang": (
        "python -m sglang.launch_server --model-path Qwen/Qwen3-8B --torchao-config int4wo-128 --disaggregation-mode prefill",
        "hf:qwen3-8b",
        "engine=sglang",
        ("--torchao-config int4wo-128: weights are smaller: more tokens than planned", "--disaggregation-mode prefill"),
    ),
    "ik_llama.cpp": (
        "./llama-server -m Qwen3-8B-Q8_0.gguf -fmoe -c 4096",
        "hf:qwen3-8b",
        f"{LLAMA_CPP}weights=q8_0&max_model_len=4096",
        ("-fmoe: a flag of ik_llama.cpp, whose buffers are not counted",),
    ),
    "a repository without a preset": (
        "llama-server -hf unsloth/Qwen3-30B-A3B-Instruct-2507-GGUF:Q4_K_M -c 4096",
        "hub:Qwen/Qwen3-30B-A3B-Instruct-2507",
        f"{LLAMA_CPP}weights=q4_k_m&max_model_len=4096",
        (),
    ),
    "koboldcpp": (
        "koboldcpp.exe --usecublas --gpulayers 33 --contextsize 16384 --quantkv 1 --batchsize 1024 "
        "--model C:\\m\\Qwen3-8B-Q4_K_M.gguf",
        "hf:qwen3-8b",
        f"{LLAMA_CPP}weights=q4_k_m&max_num_seqs=1&max_num_batched_tokens=1024&gpu_layers=33&kv=q8_0&max_model_len=16384",
        (KOBOLD,),
    ),
    "koboldcpp's defaults": (
        "python koboldcpp.py Qwen3-30B-A3B-Q4_K_M.gguf 5001 --gpulayers -1 --moecpu --noflashattention --usemtp",
        "hf:qwen3-30b-a3b",
        f"{LLAMA_CPP}weights=q4_k_m&max_num_seqs=1&fa=0&cpu_moe=1000&max_model_len=8192",
        (KOBOLD, "--usemtp: not known as a flag of llama.cpp"),
    ),
    "koboldcpp on two devices": (
        "./koboldcpp-linux-x64 --model Qwen3-8B-Q8_0.gguf --tensor_split 1 1 --usecpu --lowvram",
        "hf:qwen3-8b",
        f"{LLAMA_CPP}weights=q8_0&max_num_seqs=1&gpu_layers=0&pp=2&max_model_len=8192",
        (KOBOLD, "-nkvo: the cache is counted on the device"),
    ),
    "llama-cpp-python": (
        "python3 -m llama_cpp.server --model models/Qwen3-8B-Q4_K_M.gguf --n_gpu_layers 20 --type_k 8 --type_v 8 --flash_attn true",
        "hf:qwen3-8b",
        f"{LLAMA_CPP}weights=q4_k_m&max_num_seqs=1&gpu_layers=20&kv=q8_0&max_model_len=2048",
        (),
    ),
    "llamafile": (
        "./Llama-3.2-3B-Instruct.Q6_K.llamafile --server -ngl 99 -c 8192",
        "hf:llama-3.2-3b",
        f"{LLAMA_CPP}weights=q6_k&max_model_len=8192",
        ("llamafile runs a llama.cpp of its own: its buffers may differ",),
    ),
}


@pytest.mark.parametrize("name", TEXTS)
def test_other_programs_start_a_server(name: str):
    text, arch, query, unmatched = TEXTS[name]
    assert is_launch(text)
    launch = read_launch(text)
    assert launch.arch == arch
    assert dict(launch.items) == dict(part.split("=") for part in f"mode=serve&{query}".split("&"))
    assert [line.partition("; did")[0] for line in launch.unmatched] == list(unmatched)
    items = {"arch": "hf:qwen3-8b", **launch.items}
    parse_query("&".join(f"{key}={value}" for key, value in items.items() if key != "cpu_moe"))


def test_classes_in_python_are_commands():
    llama = 'from llama_cpp import Llama\nllm = Llama("models/Qwen3-8B-Q4_K_M.gguf", n_gpu_layers=-1, n_ctx=8192, flash_attn=True)'
    assert read_question(llama, None).items == {
        **{"arch": "hf:qwen3-8b", "mode": "serve", "engine": "llama.cpp", "weights": "q4_k_m", "max_num_seqs": "1"},
        "max_model_len": "8192",
    }
    arguments = 'repo_id="Qwen/Qwen3-8B-GGUF", filename="*Q8_0.gguf", offload_kqv=False'
    of_hub = f"import llama_cpp\nllm = llama_cpp.Llama.from_pretrained({arguments})"
    found = read_question(of_hub, None)
    assert (found.items["arch"], found.items["weights"], found.items["max_model_len"]) == ("hf:qwen3-8b", "q8_0", "512")
    assert found.items["gpu_layers"] == "0"  # without n_gpu_layers the CPU computes
    assert found.unmatched == ("-nkvo: the cache is counted on the device",)
    assert found.items["fa"] == "0"  # without flash_attn
    arguments = "from vllm import AsyncEngineArgs\nargs = AsyncEngineArgs(model='Qwen/Qwen3-8B', tensor_parallel_size=2)"
    assert read_question(arguments, None).items == {"arch": "hf:qwen3-8b", "mode": "serve", "tp": "2"}
    for made in ('dict(model="Qwen/Qwen3-8B", max_model_len=4096)', '{"model": "Qwen/Qwen3-8B", "max_model_len": 4096}'):
        found = read_question(f"from vllm import LLM\nkwargs = {made}\nllm = LLM(**kwargs)", None)
        assert found.items == {"arch": "hf:qwen3-8b", "mode": "serve", "max_model_len": "4096", "api": "offline"}
    found = read_question("from vllm import LLM\nllm = LLM(**vars(args))", None)
    assert found.unmatched == ("**vars(args): its value is not in the text",)
    assert python_command({"model_path": "m.gguf", "n_ctx": 0, "embedding": True}) == (
        "llama-server -np 1 -m m.gguf -ngl 0 -fa off --embedding True"
    )


def test_other_texts_start_no_server():
    for text in ("the koboldcpp", "engine_kwargs:\n  max_model_len: 8", "a llamafile is a file", 'koboldcpp --model "open', ""):
        assert as_command(text) is None or as_command(text)[0].startswith("llama-server")
    assert not is_launch("engine_kwargs:\n  max_model_len: 8")
    assert not is_launch('{"model": "Qwen/Qwen3-8B"')
    assert not is_launch('{"model": "Qwen/Qwen3-8B", "temperature": 0}')
    assert not is_launch("MODEL_NAME=x\nPORT=80")
