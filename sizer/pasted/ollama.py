"""Ollama's Modelfile and environment variables as a question."""

from __future__ import annotations

import re

from sizer.pasted.question import Draft, Question
from sizer.pasted.words import Name, Words, find_model
from sizer.serving.llama_log import arch_of_file, file_type_of

MANY_LAYERS = 99  # what people write for all layers
CONTEXT = 4096  # tokens, by default on devices with less than 24 GB
SMALL_CONTEXT, USUAL_FILE = "Ollama's context on a small device", "the file that Ollama takes by default"

# Presets of names without a tag, whose first file is not the one that the name alone finds (ollama.com/library, 2025).
WITHOUT_TAG = {
    "deepseek-r1": "deepseek-r1-0528-qwen3-8b",
    "gemma2": "gemma-2-9b",
    "gemma3": "gemma-3-4b",
    "llama3.2": "llama-3.2-3b",
    "qwen2.5": "qwen2.5-7b",
    "qwen3": "qwen3-8b",
}


def find_named(name: str) -> Name | None:
    """Return the model of a name such as qwen3:14b or gemma3, None for an unknown one."""
    words = Words(name)
    if (key := WITHOUT_TAG.get(name.lower().removesuffix(":latest"))) is not None:
        return Name(start=0, end=len(words.text), means=f"hf:{key}", whole=False)
    return find_model(words)


def read_modelfile(text: str) -> Question | None:
    """Return the question of Ollama's Modelfile, or of its environment variables; None for another text.

    Source: ollama's docs/modelfile.md and envconfig/config.go, 2025.
    """
    base = re.search(r"(?m)^[ \t]*FROM[ \t]+(\S{1,200})", text)
    parameters = dict(re.findall(r"(?mi)^[ \t]*PARAMETER[ \t]+(num_ctx|num_gpu|num_batch)[ \t]+([0-9]{1,8})\b", text))
    variables = dict(re.findall(r"\bOLLAMA_([A-Z_]{1,40})[\"']?\s{0,3}[=:]\s{0,3}[\"']?([\w.]{1,40})", text))
    if not variables and (base is None or not re.search(r"(?mi)^[ \t]*(?:PARAMETER|TEMPLATE|SYSTEM|ADAPTER)\s", text)):
        return None
    draft = Draft(title="a Modelfile of Ollama" if base else "variables of Ollama")
    draft.take("Ollama", mode="serve", engine="llama.cpp")
    if base is None:
        draft.assume("no model is named: the model of the form is kept")
    else:
        of_file = arch_of_file(base[1]) if "/" in base[1] or base[1].endswith(".gguf") else None
        found = find_named(base[1])
        arch = of_file or (found.means if found else None)
        if found is not None and not found.whole and not of_file:
            draft.assume(f"{base[1]} is taken to be {found.means.partition(':')[2]}")
        if arch is None:
            draft.unmatched.append(f"FROM {base[1]}: not a model of the catalogue; the model of the form is kept")
        else:
            draft.take(f"FROM {base[1]}", arch=arch)
        file_type, _ = file_type_of(base[1])
        if file_type is not None:
            draft.take(f"FROM {base[1]}", weights=file_type)
        elif "gpt-oss" not in str(arch):
            draft.assume(USUAL_FILE, weights="q4_k_m")
    context = parameters.get("num_ctx") or variables.get("CONTEXT_LENGTH")
    if context and context.isdecimal() and int(context):
        draft.take(f"context {context}", max_model_len=int(context))
    else:
        draft.assume(SMALL_CONTEXT, max_model_len=CONTEXT)
    if (layers := parameters.get("num_gpu")) and int(layers) < MANY_LAYERS:
        draft.take(f"num_gpu {layers}", gpu_layers=int(layers))
    if batch := parameters.get("num_batch"):
        draft.take(f"num_batch {batch}", max_num_batched_tokens=int(batch))
    if (slots := variables.get("NUM_PARALLEL", "")).isdecimal() and int(slots):
        draft.take(f"OLLAMA_NUM_PARALLEL={slots}", max_num_seqs=int(slots))
    if (kv := variables.get("KV_CACHE_TYPE", "f16")) in ("q8_0", "q4_0"):
        draft.take(f"OLLAMA_KV_CACHE_TYPE={kv}", kv=kv)
    return draft.whole(kind="words")
