"""A question in words, such as "can I fine-tune Qwen3 8B with LoRA on a 3090?", or a command of Ollama, as a question.

Models and devices are found by the catalogue's names, everything else by the words below. What is not understood is left out; the
question says what was read and what was assumed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache

from sizer.base.errors import letters
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.pipelines import pipeline_names
from sizer.catalogue.presets import find_preset, list_presets
from sizer.catalogue.serving import FILE_TYPES
from sizer.catalogue.sources import arch_of, resolve
from sizer.pasted.question import Draft, Question
from sizer.serving.llama_log import arch_of_file, file_type_of

MAX_CHARACTERS = 400
LONGEST_NAME, LONGEST_VISION = 7, 3  # words of a model's or a device's name, of torchvision's models
SERVED = {"nf4": "awq", "int8": "fp8"}  # layouts of servers with as many bits
FILES = {"nf4": "q4_k_m", "awq": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}
WHOLE_NAMES = {"q4": "q4_k_m", "q5": "q5_k_m", "q8": "q8_0", "fp16": "f16"}
ANSWERING = ("text", "multimodal")  # modalities of models that generate text
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
_WORD = re.compile(r"[a-z0-9][a-z0-9.+/_-]*[a-z0-9+]|[a-z0-9]")
_OLLAMA = re.compile(r"^\s*(?:\$ )?ollama\s+(?:run|pull)\s+(\S+)", re.IGNORECASE)
_CODE = re.compile(r"[{}=<>\n;|$]|https?:|--")  # texts of programs
_NUMBERS = {"two": 2, "three": 3, "four": 4, "eight": 8}
_USES: tuple[tuple[str, dict[str, str]], ...] = (  # the first that matches is the task
    (r"\bqlora\b", {"mode": "training", "train": "adapter", "weights": "nf4"}),
    (r"\blora\b", {"mode": "training", "train": "adapter"}),
    (r"\b(?:fine\s?tun\w+|pre\s?train\w*|train\w*)\b", {"mode": "training"}),
    (r"\bsglang\b", {"mode": "serve", "engine": "sglang"}),
    (r"\b(?:llama\.cpp|llamacpp|gguf|ollama|lm studio)\b", {"mode": "serve", "engine": "llama.cpp"}),
    (r"\b(?:vllm|serv\w+|users?|concurrent)\b", {"mode": "serve"}),
    (r"\b(?:run\w*|inference|infer|generat\w+|chat\w*|use|host|load|fits?|needs?|v?ram|memory|requires?)\b", {}),
)
_QUANTIZED = sorted((name for name in FILE_TYPES if name.startswith(("q", "iq"))), key=len, reverse=True)
_FILES = re.compile(rf"\b({'|'.join(_QUANTIZED)}|q[458])\b")
_WHOLE_FILES = re.compile(r"\b(bf16|f16|fp16|mxfp4)\b")  # files of llama.cpp only if the text names it
_TOKENS = re.compile(
    r"\b([0-9]{1,4}k|[0-9]{3,7})\s*(?:tokens?|context|ctx)\b|"
    r"\b(?:context|ctx|seq(?:uence)?|max)(?:[\s-]?(?:length|len|size|window))?\s*(?:of|is|:)?\s*([0-9]{1,4}k|[0-9]{3,7})\b"
)
_BATCH = re.compile(r"\bbatch(?:es)?(?:[\s-]?size)?\s*(?:of|is|:)?\s*([0-9]{1,5})\b")
_USERS = re.compile(r"\b([0-9]{1,5})\s*(?:concurrent\s*)?(?:users?|requests?|people)\b")
MANY_LAYERS = 99  # what people write for all layers
_IMAGE = re.compile(r"\b([0-9]{2,4})\s?x\s?([0-9]{2,4})\b")  # width x height, as people say it
_MEMORY = re.compile(r"\b([0-9]{1,3})\s*(?:gb|gib|g)\b(?:\s*(?:of\s*)?v?ram)?")


def read_sentence(text: str) -> Question | None:
    """Return the question of a sentence that names a model of the catalogue; None for another text."""
    if len(text) <= MAX_CHARACTERS and (found_file := _read_modelfile(text)) is not None:
        return found_file
    ollama = _OLLAMA.match(text)
    if len(text) > MAX_CHARACTERS or (ollama is None and _CODE.search(text.strip())):
        return None
    draft = Draft(title="a command of Ollama" if ollama else "a question in words")
    words = _words((ollama[1] if ollama else text).lower().replace(":", " ").replace("×", "x").replace(",", " "))
    if (found := _model_in(words)) is None or (ollama is None and len(words) < 2):
        return None
    start, count, arch = found
    draft.take(" ".join(words[start : start + count]), arch=arch)
    rest = words[:start] + words[start + count :]
    task = {"mode": "serve", "engine": "llama.cpp"} if ollama else _task(" ".join(rest))
    named = _longest(rest, _devices())
    if task is None and named is None:
        return None
    _take_task(draft, task, " ".join(rest), ollama=ollama is not None)
    if named is not None:
        _take_device(draft, rest, named)
        rest = rest[: named[0]] + rest[sum(named) :]
    elif (memory := _MEMORY.search(" ".join(rest))) is not None:
        draft.assume(f"a device of {memory[0].strip()} with compute capability 8.9", gpu=f"custom:{memory[1]}GiB@8.9")
    _take_sizes(draft, " ".join(rest))
    return draft.whole(kind="words")


def _read_modelfile(text: str) -> Question | None:
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
        found = _model_in(_words(base[1].lower().replace(":", " ")))
        arch = of_file or (found[2] if found else None)
        if arch is None:
            draft.unmatched.append(f"FROM {base[1]}: not a model of the catalogue; the model of the form is kept")
        else:
            draft.take(f"FROM {base[1]}", arch=arch)
        file_type, _ = file_type_of(base[1])
        if file_type is not None:
            draft.take(f"FROM {base[1]}", weights=file_type)
        elif "gpt-oss" not in str(arch):
            draft.assume("the file that Ollama takes by default", weights="q4_k_m")
    context = parameters.get("num_ctx") or variables.get("CONTEXT_LENGTH")
    if context and context.isdecimal() and int(context):
        draft.take(f"context {context}", max_model_len=int(context))
    else:
        draft.assume("Ollama's context on a small device", max_model_len=4096)
    if (layers := parameters.get("num_gpu")) and int(layers) < MANY_LAYERS:
        draft.take(f"num_gpu {layers}", gpu_layers=int(layers))
    if batch := parameters.get("num_batch"):
        draft.take(f"num_batch {batch}", max_num_batched_tokens=int(batch))
    if (slots := variables.get("NUM_PARALLEL", "")).isdecimal() and int(slots):
        draft.take(f"OLLAMA_NUM_PARALLEL={slots}", max_num_seqs=int(slots))
    if (kv := variables.get("KV_CACHE_TYPE", "f16")) in ("q8_0", "q4_0"):
        draft.take(f"OLLAMA_KV_CACHE_TYPE={kv}", kv=kv)
    return draft.whole(kind="words")


def _words(text: str) -> list[str]:
    """Return the words of a text; parts of names with hyphens are words, except those of a repository."""
    found = [part for word in _WORD.findall(text) for part in ([word] if "/" in word else re.findall(r"[^-]+", word))]
    return [word[:-1] if re.fullmatch(r"[a-z]{0,3}[0-9]{1,4}s", word) and word not in _devices() else word for word in found]


def _model_in(words: list[str]) -> tuple[int, int, str] | None:
    """Return the first word and the number of words of a model's name, and the architecture; None without one."""
    if (found := _longest(words, _models())) is not None:
        return (*found, _models()[_plain("".join(words[found[0] : sum(found)]))])
    for start, word in enumerate(words):
        if "/" in word and (arch := arch_of(word)) is not None:
            return start, 1, arch
    for count in range(min(LONGEST_VISION, len(words)), 0, -1):
        for start in range(len(words) - count + 1):
            name = "".join(words[start : start + count])
            if any(char.isdecimal() for char in name) and (known := resolve("torchvision", name)) is not None:
                return start, count, f"torchvision:{known}"
    return None


def _longest(words: list[str], names: Mapping[str, object]) -> tuple[int, int] | None:
    """Return the first word and the number of words of the longest known name, None without one."""
    found = [
        (len(name), start, count)
        for start in range(len(words))
        for count in range(1, min(LONGEST_NAME, len(words) - start) + 1)
        if (name := _plain("".join(words[start : start + count]))) in names
    ]
    if not found:
        return None
    _, start, count = max(found, key=lambda one: (one[0], -one[1], -one[2]))
    return start, count


@cache
def _models() -> Mapping[str, str]:
    """Return the architectures of presets by the letters of their keys, titles and repositories."""
    found: dict[str, str] = {}
    for preset in list_presets():
        for name in (preset.key, preset.title, preset.hub_id.rpartition("/")[2]):
            found.setdefault(_plain(name), f"hf:{preset.key}")
    for key, (title, repository) in sorted(pipeline_names().items(), key=lambda item: len(item[0])):
        for name in (key, title, repository.rpartition("/")[2]):
            found.setdefault(_plain(name), f"diffusers:{key}")
    return found


@cache
def _devices() -> Mapping[str, list[str]]:
    """Return the devices by the letters of their keys: whole, without their series, and without their memory."""
    found: dict[str, list[str]] = {}
    for key in GPUS:
        bare = re.sub(r"-[0-9]+gb$", "", key)
        for name in {key, bare, *(one.removeprefix("rtx-") for one in (key, bare))}:
            if not name.isdecimal() or len(name) > 3:
                found.setdefault(_plain(name), []).append(key)
    return found


def _plain(name: str) -> str:
    """Return the letters and digits of a name; a plus tells models apart."""
    return letters(name.replace("+", "plus"))


def _task(text: str) -> dict[str, str] | None:
    """Return the keys of the task that a text names, empty to run the model, None without one."""
    return next((dict(keys) for pattern, keys in _USES if re.search(pattern, text)), {} if _FILES.search(text) else None)


def _take_task(draft: Draft, task: dict[str, str] | None, text: str, *, ollama: bool) -> None:
    """Note the task, and the layout of the weights."""
    file_type = _FILES.search(text)
    bits = re.search(r"\b(4|8)[\s-]?bits?\b|\bint(4|8)\b", text)
    if not task and (file_type is not None or (bits is None and task is not None and "gguf" in text)):
        task = {"mode": "serve", "engine": "llama.cpp"}
    if not task:
        arch = draft.items["arch"]
        preset = find_preset(arch[3:]) if arch.startswith("hf:") else None
        answers = "/" in arch or (preset is not None and preset.head.endswith(GENERATING) and preset.modality in ANSWERING)
        task = {"mode": "generate" if answers else "inference"}
        draft.assume("the model runs in PyTorch, one input at once", mode=task["mode"], batch=1)
    else:
        named = next((found[0] for pattern, _ in _USES if (found := re.search(pattern, text))), draft.title)
        draft.take(named, **task)
    number = (bits[1] or bits[2]) if bits else ""
    if task.get("engine") == "llama.cpp":
        file_type = file_type or _WHOLE_FILES.search(text)
        named, given = (file_type[1], file_type[0]) if file_type else (f"q{number}", bits[0] if bits else "")
        if given:
            draft.take(given, weights=WHOLE_NAMES.get(named, named))
        elif "gpt-oss" not in draft.items["arch"]:
            draft.assume("the file that Ollama takes by default" if ollama else "the file that most people take", weights="q4_k_m")
    elif file_type is not None:
        draft.unmatched.append(f"{file_type[0]}: only llama.cpp runs such a file")
    elif bits is not None and task.get("weights") is None:
        layout = {"4": "nf4", "8": "int8"}[number]
        draft.take(bits[0], weights=SERVED[layout] if task["mode"] == "serve" else layout)
        if task["mode"] == "training":
            draft.take(bits[0], train="adapter")
    if ollama:
        draft.assume("Ollama's context on a small device", max_model_len=4096)


def _take_device(draft: Draft, words: list[str], named: tuple[int, int]) -> None:
    """Note the device, and how many of it."""
    start, count = named
    given = " ".join(words[start : start + count])
    keys = _devices()[_plain(given)]
    draft.take(given, gpu=keys[0])
    if len(keys) > 1:
        draft.assume(f"{given} is taken to be {keys[0]}; there are {', '.join(keys[1:])}")
    weights, mode = draft.items.get("weights"), draft.items["mode"]
    asks = mode == "serve" or (mode == "generate" and weights in FILES)
    if GPUS[keys[0]].backend == "mps" and asks and draft.items.get("engine") != "llama.cpp":
        draft.drop("mode", "batch", "weights", "engine")
        file_type = FILES.get(weights or "", "q4_k_m")
        draft.assume("llama.cpp, which runs on a Mac", mode="serve", engine="llama.cpp", weights=file_type)
    before = words[start - 1].rstrip("x") if start else ""
    number = _NUMBERS.get(before) or (int(before) if before.isdecimal() and len(before) < 4 else 1)
    if number < 2:
        return
    engine = draft.items.get("engine", "vllm")
    if draft.items.get("mode") == "serve" and engine != "llama.cpp":
        draft.take(f"{number} × {given}", tp=number)
    elif draft.items.get("mode") == "training":
        draft.take(f"{number} × {given}", parallel="fsdp", ranks=number)
    elif draft.items.get("mode") == "generate":
        weights = draft.items.get("weights")
        draft.drop("mode", "batch", "weights")
        draft.assume("several devices run a server of vLLM", mode="serve", tp=number)
        if weights in SERVED:
            draft.assume(f"a server's layout in place of {weights}", weights=SERVED[weights])
    else:
        draft.unmatched.append(f"{number} × {given}: one device is counted")


def _take_sizes(draft: Draft, text: str) -> None:
    """Note the tokens, the batch, the number of users, the image and the dtype, or that the task has no such key."""
    serves = draft.items.get("mode") == "serve"
    tokens = next(((found[0], found[1] or found[2]) for found in _TOKENS.finditer(text)), None)
    users = _USERS.search(text)
    if users is not None and not serves:
        draft.unmatched.append(f"{users[0]}: only a server has users")
    if users is not None and serves:
        draft.take(f"{users[0]}{f', {tokens[0]}' if tokens else ''}", want=f"{users[1]}x{tokens[1] if tokens else '4k'}")
    elif tokens is not None:
        draft.take(tokens[0], **{"max_model_len" if serves else "seq": tokens[1]})
    if (batch := _BATCH.search(text)) is not None and serves:
        draft.unmatched.append(f"{batch[0]}: a server chooses its batches")
    elif batch is not None:
        draft.take(batch[0], batch=batch[1])
    if (size := _IMAGE.search(text)) is not None and draft.items["arch"].startswith(("diffusers:", "torchvision:")):
        draft.take(size[0], image=f"{size[2]}x{size[1]}")
    elif size is not None:
        draft.unmatched.append(f"{size[0]}: the model's own size of images is taken")
    for dtype, names in (("bfloat16", r"bf16|bfloat16"), ("float16", r"fp16|float16"), ("float32", r"fp32|float32")):
        found = re.search(rf"\b(?:{names})\b", text)
        if found is not None and draft.items.get("engine") == "llama.cpp":
            continue  # the type of the file
        if found is not None and serves:
            draft.unmatched.append(f"{found[0]}: a server takes the dtype of the config")
        elif found is not None and not serves:
            draft.take(found[0], dtype=dtype)
    if not serves and not draft.items["arch"].startswith("torchvision:"):
        draft.assume("the usual dtype of such models", dtype="bfloat16")


