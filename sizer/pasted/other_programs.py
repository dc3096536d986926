"""Programs whose commands and messages are not read: what each lacks, and the query to ask in its place."""

from __future__ import annotations

import re

from sizer.base.errors import ConfigError, quote
from sizer.catalogue.sources import arch_of
from sizer.serving.launch import with_values

_FILE = "the command names a file that is not in the text"
_SERVE = "choose the model and the task Serving"
_VLLM, _LLAMA = f"{_SERVE} with the engine vllm", f"{_SERVE} with the engine llama.cpp"
_IN_WORDS = 'ask in words: "train a LoRA of FLUX.1-dev, rank 16, batch 1, 1024 px on a 4090"'
_BEGIN = r"^[ \t]*(?:\$ )?"  # of a command; \s would also pass over lines, each time anew
_PROGRAMS = (
    (_BEGIN + r"ollama\s", "a command of Ollama names no repository", f"{_LLAMA}, which Ollama runs"),
    (r"\btext-generation-launcher\b|text-generation-inference", "the scheduler of TGI is not planned", _SERVE),
    (
        r"\btrtllm-(?:serve|build|bench|eval)\b|\b(?:from|import)\s+tensorrt_llm\b|\btritonserver\b.{0,80}trtllm"
        r"|\bdynamo\.trtllm\b",
        "the scheduler of TensorRT-LLM is not planned",
        _SERVE,
    ),
    (
        r"\btritonserver\b|launch_triton_server",
        "the files of Triton's models are not in the text",
        "paste model.json of the backend vllm, or choose the model and the task Serving",
    ),
    (r"\bnvcr\.io/nim/", "the profile of a NIM, which its start chooses, is not in the text", f"paste its log, or {_SERVE}"),
    (r"\blmdeploy\s+(?:serve|chat)\b|\b(?:from|import)\s+lmdeploy\b", "the scheduler of LMDeploy is not planned", _SERVE),
    (
        r"\bvllm\s+bench\b|\bsglang\.bench_|\bllama-(?:batched-)?bench\b",
        "a benchmark is not planned",
        "paste the command that starts the server",
    ),
    (r"\bPROCESSOR\s+(?:CONTEXT\s+)?UNTIL\b", "this table names what Ollama has loaded", _LLAMA),
    (r"\bggml-cuda\b", "this error of llama.cpp names no buffer", "paste the log from its first line, or the command"),
    (r"\bmlc_llm\s+(?:serve|chat)\b|\b(?:from|import)\s+mlc_llm\b", "the scheduler of MLC LLM is not planned", _SERVE),
    (_BEGIN + r"lms\s", "the commands of LM Studio are not read", f"{_LLAMA}, which LM Studio runs"),
    (
        r"\btabbyAPI\b|\bexllamav[23]\b|^\s{0,8}(?:cache_mode|gpu_split_auto|gpu_split)\s*:|\bexl[23]\b",
        "ExLlama and TabbyAPI are not planned",
        f"{_LLAMA} and a file of as many bits, or with vllm",
    ),
    (r"\baphrodite\b", "this server is not planned", f"{_VLLM}, of which it is a copy"),
    (r"\bktransformers\b", "KTransformers is not planned", f"{_LLAMA} and cpu_moe, which keeps experts on the host, too"),
    (r"\bimport\s+mii\b|\bmii\.(?:serve|pipeline)\b", "DeepSpeed-MII is not planned", _VLLM),
    (r"\bxinference\s+launch\b|\bbentoml\s+serve\b", "the server behind this command is not known", "paste that server's log"),
    (
        r"\btext-embeddings-inference\b|\binfinity_emb\b",
        "servers of embeddings are not planned",
        "choose the model and the task Inference",
    ),
    (r"\bserver\.py\b.*--loader\b", "text-generation-webui is not read", "choose the model and the task Serving or Generation"),
    (
        r"\bmlx[_.](?:lm|vlm)\b",
        "MLX is not PyTorch: its memory is not counted",
        "choose the model, and the Mac as device, with the engine llama.cpp",
    ),
    (_BEGIN + r"(?:llamafactory-cli|axolotl)\s", _FILE, "paste the YAML file itself"),
    (_BEGIN + r"tune\s+run\s", _FILE, "paste the YAML file, which `tune cp` writes"),
    (r"\btype:[ \t]*['\"]?(?:sd_trainer|ui_trainer|diffusion_trainer)\b", "the config of ai-toolkit is not read", _IN_WORDS),
    (
        r"\bAllocation on device\b|\bOutOfMemoryError\b",
        "this message has no sizes",
        "paste the whole message of PyTorch; ComfyUI prints it with --disable-cuda-malloc",
    ),
    (
        r"\bSIGKILL\b|exitcode\s*:\s*-9\b|^Killed[ \t]*$",
        "the system killed the process, mostly because the host's memory was used up",
        "compare the host's memory in the report of `sizer run -- SCRIPT.py`",
    ),
    (r"ResourceExhaustedError|RESOURCE_EXHAUSTED", "this message is not PyTorch's", "choose the model for PyTorch's memory"),
    (
        r"out of resource: shared memory",
        "a kernel needs more shared memory than a multiprocessor has: the device's memory is not the cause",
        "choose smaller blocks for the kernel",
    ),
    (
        r"Some modules are dispatched on the CPU",
        "accelerate found less free memory than the weights take",
        "choose the model, its weights and the device: the answer says what they take",
    ),
)
_MODEL = re.compile(
    r"(?:--(?:model[-_]id|model[-_]path|model[-_]name|model)[ =]+|\bmodel(?:_name|_id)?[ \t]*[=:][ \t]*|(?:pipeline|serve|LLM)\(\s*"
    r"|(?:trtllm-serve(?:\s+serve)?|api_server|aphrodite\s+run|mlc_llm\s+serve|lms\s+load)\s+)"
    r"[\"']?(?:HF://)?([\w.-]{1,96}/[\w.-]{1,96})"
)
_SIZES = {
    "tp": re.compile(r"(?:--num-shard|\btp(?:[-_]size)?|\btensor[-_]parallel(?:[-_]size)?)[ =]+([0-9]{1,3})\b"),
    "max_model_len": re.compile(
        r"(?:--max-total-tokens|\bmax[-_]seq[-_]len|\bsession[-_]len|--max-model-len|--context-length)[ =:]+([0-9]{2,8})\b"
    ),
}


def refuse_other_program(text: str) -> None:
    """Raise ConfigError for the command, code or config of a program that is not read."""
    for sign, what, todo in _PROGRAMS:
        if re.search(sign, text, re.MULTILINE):
            query = _query_of(text, "llama.cpp" if _LLAMA in todo else "") if _SERVE in todo else ""
            asked = f"; for example, {query}" if query else ""
            raise ConfigError(what, given=quote(text.strip(), 60), todo=f"{todo}{asked}")


def _query_of(text: str, engine: str) -> str:
    """Return the query of a server with a text's model, devices and length; empty if the text names no repository."""
    text = with_values(text)
    found = _MODEL.search(text)
    arch = arch_of(found[1]) if found else None
    if arch is None:
        return ""
    sizes = {key: size[1] for key, pattern in _SIZES.items() if (size := pattern.search(text))}
    if engine and (devices := sizes.pop("tp", None)) is not None:
        sizes["pp"] = devices
    items = {"mode": "serve", **({"engine": engine} if engine else {}), "arch": arch, **sizes}
    return "&".join(f"{key}={value}" for key, value in items.items())
