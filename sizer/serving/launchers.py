"""Commands and files of other programs that start a server of vLLM or llama.cpp, as that server's own command.

Sources: koboldcpp.py of KoboldCpp 1.117, llama_cpp/server/settings.py of llama-cpp-python 0.3, llamafile's README, 0.9, and
ray/llm/_internal/serve/configs/server_models.py of Ray 2.50.
"""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping

_KOBOLD = re.compile(r"(?:^|[\s/\\])koboldcpp[\w.-]*(?=\s)")
_PYTHON_SERVER = re.compile(r"\bllama_cpp\.server\b")
_LLAMAFILE = re.compile(r"(?:^|\s)(\S+)\.llamafile(?:\.exe)?(?=\s|$)|(?:^|[\s/])llamafile(?:\.exe)?(?=\s+-)")
_RAY = re.compile(r"(?m)^[ \t-]*engine_kwargs[ \t]*:[ \t]*$")
_KOBOLD_FLAGS = {
    **dict.fromkeys(("model", "m"), "-m"),
    **dict.fromkeys(("contextsize", "ctx-size", "c"), "-c"),
    **dict.fromkeys(("gpulayers", "gpu-layers", "n-gpu-layers", "ngl"), "-ngl"),
    **dict.fromkeys(("batchsize", "blasbatchsize", "batch-size", "b"), "-ub"),
    **dict.fromkeys(("tensor-split", "tensorsplit", "ts"), "-ts"),
    **dict.fromkeys(("moecpu", "n-cpu-moe", "ncmoe"), "-ncmoe"),
    **dict.fromkeys(("overridetensors", "override-tensor", "ot"), "-ot"),
    **dict.fromkeys(("splitmode", "split-mode", "sm"), "-sm"),
    **dict.fromkeys(("device", "dev"), "-dev"),
    **dict.fromkeys(("draftmodel", "model-draft", "md"), "-md"),
    **dict.fromkeys(("lowvram", "no-kv-offload", "nkvo"), "-nkvo"),
    **dict.fromkeys(("noswa", "swa-full"), "--swa-full"),
    **dict.fromkeys(("usemtp", "enableguidance", "parallelrequests", "mmproj", "lora"), ""),  # named as they are
}
_KOBOLD_CACHE = {"0": "f16", "1": "q8_0", "2": "q4_0"}
_KOBOLD_TOKENS, _PYTHON_TOKENS, _SERVER_TOKENS = "8192", "512", "2048"  # contexts without a flag
_ALL_LAYERS = "99"
_PYTHON_FLAGS = {
    **dict.fromkeys(("model", "model_path"), "-m"),
    "n_ubatch": "-ub",
    "tensor_split": "-ts",
    "clip_model_path": "--mmproj",
    "lora_path": "--lora",
}
_PYTHON_IGNORED = """
    host port n_batch n_threads n_threads_batch verbose seed chat_format use_mmap use_mlock interrupt_requests n_ctx n_gpu_layers
    draft_model draft_model_num_pred_tokens split_mode logits_all last_n_tokens_size cache cache_type cache_size
    type_k type_v flash_attn offload_kqv repo_id filename vocab_only echo numa main_gpu api_key model_alias cache_dir local_dir
    hf_model_repo_id
"""
_GGML_TYPES = {"1": "f16", "2": "q4_0", "3": "q4_1", "6": "q5_0", "7": "q5_1", "8": "q8_0", "30": "bf16"}  # ggml.h, ggml_type


def as_command(text: str) -> tuple[str, str] | None:
    """Return the command of vLLM or llama.cpp that a text of another program means, and a remark; None for another text."""
    for sign, read, remark in _READERS:
        if (found := sign.search(text)) is not None and (command := read(text, found)):
            models = len(re.findall(sign, text)) if sign is _RAY else 1
            return command, f"the text configures {models} models: the first one is read" if models > 1 else remark
    return None


def python_command(given: Mapping[str, object], *, served: bool = False) -> str:
    """Return the command of llama.cpp that the arguments of llama_cpp.Llama mean, or of its server."""
    said = {name: _word(value) for name, value in given.items() if value is not None}
    repository, name = said.get("repo_id") or said.get("hf_model_repo_id"), said.get("filename") or said.get("model", "")
    file_type = re.search(r"(?i)((?:i?q[0-9]\w*|bf16|f16|f32|mxfp4))\W*(?:gguf)?\W*$", name) if repository else None
    words = ["-hf", f"{repository}:{file_type[1].upper()}" if file_type else repository] if repository else []
    words += ["-np", "1"]
    for key, flag in _PYTHON_FLAGS.items():
        if (value := said.get(key)) and not (repository and flag == "-m"):
            words += [flag, value]
    tokens = said.get("n_ctx", _SERVER_TOKENS if served else _PYTHON_TOKENS)
    words += ["-c", tokens] if tokens != "0" else []
    layers = said.get("n_gpu_layers", "0")
    words += ["-ngl", _ALL_LAYERS if layers.startswith("-") else layers]
    for key, flag in (("type_k", "-ctk"), ("type_v", "-ctv")):
        if key in said:
            words += [flag, _GGML_TYPES.get(said[key], said[key].rpartition(".")[2].removeprefix("GGML_TYPE_").lower())]
    words += [] if said.get("flash_attn", "").lower() in ("true", "1") else ["-fa", "off"]
    words += ["-nkvo"] if said.get("offload_kqv", "").lower() in ("false", "0") else []
    known = {*_PYTHON_FLAGS, *_PYTHON_IGNORED.split()}
    for key, value in said.items():
        words += [] if key in known or value.lower() == "false" else [f"--{key.replace('_', '-')}", value]
    return shlex.join(["llama-server", *words])


def _word(value: object) -> str:
    return ",".join(str(part) for part in value) if isinstance(value, list | tuple) else str(value)


def _kobold(text: str, sign: re.Match[str]) -> str:
    words, sized = ["-np", "1"], False
    for name, values in _flags(text[sign.end() :]):
        flag = _KOBOLD_FLAGS.get(name.replace("_", "-") or "model")
        sized = sized or flag == "-c"
        if name == "quantkv" and values:
            kind = _KOBOLD_CACHE.get(values[0], values[0])
            words += ["-ctk", kind, "-ctv", kind]
        elif name == "usecpu":
            words += ["-ngl", "0"]
        elif name in ("noflashattention", "no-flash-attn", "nofa"):
            words += ["-fa", "off"]
        elif flag == "-ncmoe" and not values:
            words.append("-cmoe")
        elif flag == "-ngl" and (not values or values[0].startswith("-")):
            continue  # as many as fit
        elif flag is not None:
            words += [flag or f"--{name}", *([",".join(values) if flag == "-ts" else values[0]] if values else [])]
    return shlex.join(["llama-server", *words, *([] if sized else ["-c", _KOBOLD_TOKENS])])


def _python_server(text: str, sign: re.Match[str]) -> str:
    given = {name: values[0] if values else "true" for name, values in _flags(text[sign.end() :]) if name}
    return python_command(given, served=True)


def _llamafile(text: str, sign: re.Match[str]) -> str:
    named = ["-m", f"{sign[1]}.gguf"] if sign[1] else []
    rest = re.sub(r"(?<!\S)--server(?!\S)", "", text[sign.end() :])
    return f"{shlex.join(['llama-server', *named])} {rest.strip()}"


def _ray(text: str, sign: re.Match[str]) -> str | None:
    """Return vLLM's command of the first model of Ray Serve's `llm_configs`."""
    source = re.search(r"\bmodel_source[ \t]*:[ \t]*[\"']?([^\s\"'#]+)", text)
    source = source or re.search(r"\bmodel_id[ \t]*:[ \t]*[\"']?([^\s\"'#]+)", text)
    if source is None:
        return None
    words, indent = ["vllm", "serve", source[1]], len(sign[0]) - len(sign[0].lstrip(" \t-"))
    lines = text[sign.end() :].splitlines()[1:]
    for line in itertools.takewhile(lambda line: not line.strip() or len(line) - len(line.lstrip()) > indent, lines):
        found = re.match(r"[ \t]*([a-z][a-z0-9_]{0,60})[ \t]*:[ \t]*(.+?)[ \t]*(?: #.*)?$", line)
        if found is None:
            continue
        value = found[2].strip("\"'")
        if value.lower() != "false":
            words += [f"--{found[1].replace('_', '-')}", *([] if value.lower() == "true" else [value])]
    return shlex.join(words)


def _flags(text: str) -> list[tuple[str, list[str]]]:
    """Return the flags of a command with the words up to the next flag; the words before the first flag have no name."""
    text = re.sub(r"[\\^`][ \t]*\r?\n", " ", text.strip()).splitlines()[0] if text.strip() else ""
    try:
        words = shlex.split(re.sub(r"\\(?=\w)", "/", text))
    except ValueError:  # a quote that is not closed
        words = text.split()
    return list(_grouped(words))


def _grouped(words: list[str]) -> Iterator[tuple[str, list[str]]]:
    name, values = "", list[str]()
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            if name or values:
                yield name, values
            name, sign, value = word.lstrip("-").partition("=")
            values = [value] if sign else []
        else:
            values.append(word)
    if name or values:
        yield name, values


_READERS = (
    (_KOBOLD, _kobold, "KoboldCpp runs a llama.cpp of its own: its buffers may differ"),
    (_PYTHON_SERVER, _python_server, ""),
    (_LLAMAFILE, _llamafile, "llamafile runs a llama.cpp of its own: its buffers may differ"),
    (_RAY, _ray, ""),
)
