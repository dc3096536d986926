"""A question in words, such as "can I fine-tune Qwen3 8B with LoRA on a 3090?", or a command of Ollama, as a question.

Models and devices are found by the catalogue's names, everything else by the words below. Each word is read, has no meaning for
memory (`_FILLERS`), or is named as not understood.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from sizer.base.errors import ConfigError, quote
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.catalogue.parallel import OTHER_NAMES
from sizer.catalogue.pipelines import VAES
from sizer.catalogue.presets import find_preset
from sizer.catalogue.serving import FILE_TYPES, LAYOUTS
from sizer.pasted.ollama import CONTEXT, SMALL_CONTEXT, USUAL_FILE, find_named, read_modelfile
from sizer.pasted.question import Draft, Question
from sizer.pasted.words import SIZED, Name, Words, find_device, find_model, find_size

MAX_CHARACTERS = 400
MOST_WORDS = 8  # after a model's name alone, which no word of a task follows
BFLOAT16_SINCE = (8, 0)  # compute capability of the first devices that multiply matrices in bfloat16
SERVED = {"nf4": "awq", "int8": "fp8"}  # layouts of servers with as many bits
FILES = {"nf4": "q4_k_m", "awq": "q4_k_m", "int8": "q8_0", "fp8": "q8_0"}
WHOLE_NAMES = {"q2": "q2_k", "q3": "q3_k_m", "q4": "q4_k_m", "q5": "q5_k_m", "q6": "q6_k", "q8": "q8_0", "fp16": "f16"}
ANSWERING = ("text", "multimodal")  # modalities of models that generate text
GENERATING = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration")
ALL_LAYERS = 1000  # more than a model has
_OLLAMA = re.compile(r"^\s*(?:\$ )?ollama\s+(?:run|pull)\s+(?=\S)", re.IGNORECASE)
_CODE = re.compile(  # texts of programs
    r"[{}=<>\n;|$]|https?:|--|Error:|Exception:|(?:^|\s)-[A-Za-z]{1,5}\s|^\s*(?:docker|podman|mlc_llm)\s"
)
_ASSIGNED = re.compile(r"\b(tp|bs|batch|batch_size|seq|seq_len|rank|r)=(?=[0-9])", re.IGNORECASE)  # "TP=4"
_NUMBERS = {"two": 2, "dual": 2, "three": 3, "four": 4, "eight": 8}
_LORA = {"mode": "training", "train": "adapter"}
_TASKS: tuple[tuple[str, dict[str, str]], ...] = (  # the first one that names a mode decides
    (r"\b(?:dpo|kto|orpo|grpo)\b", {"mode": "training", "objective": ""}),
    (r"\bqlora\b", _LORA | {"weights": "nf4"}),
    (r"\bdora\b", _LORA | {"adapter": "dora"}),
    (r"\blora\b", _LORA),
    (r"\bfull(?:y)? (?:parameters? )?fine ?tun\w+\b", {"mode": "training", "train": "all"}),
    (r"\b(?:dreambooth|fine ?tun\w+|sft|(?:continued )?pre ?train\w*|train\w*)\b", {"mode": "training"}),
    (r"\bsglang\b", {"mode": "serve", "engine": "sglang"}),
    (r"\b(?:llama\.cpp|llamacpp|gguf|ollama|lm studio)\b", {"mode": "serve", "engine": "llama.cpp"}),
    (r"\b(?:vllm|serv(?:e|ed|es|er|ers|ing))\b", {"mode": "serve"}),
)
_RUNS = r"\b(?:run\w*|inference|infer|generat\w+|chat\w*|use|host|load|fits?|needs?|v?ram|memory|requires?|which|how many)\b"
_QUANTIZED = sorted((name for name in FILE_TYPES if name.startswith(("q", "iq"))), key=len, reverse=True)
_FILES = rf"\b({'|'.join(_QUANTIZED)}|q[2-68](?:_k(?:_x?l)?)?)\b"  # also as people shorten them, and Unsloth's q4_k_xl
_WHOLE_FILES = r"\b(bf16|f16|fp16|mxfp4)\b"  # files of llama.cpp only if the text names it
_LAYOUTS = rf"\b(?:fp8 (?:weights|quantiz\w+|quantis\w+)|{'|'.join(LAYOUTS)})\b"
_QUANTIZED_WORD = r"\bquanti[sz]\w*\b"
_BITS = r"\b(4|8) ?bits?\b|\bint(4|8)\b"
_KV_NAMES = r"(fp8|q8(?:_0)?|q4(?:_0)?)"
_KV = rf"\b{_KV_NAMES} kv(?: cache)?\b|\bkv(?: cache)?(?: in| at| dtype)? {_KV_NAMES}\b"
_SIZE = r"[0-9]{1,4}k|[0-9]{3,7}"
_TOKENS = (
    r"\b([0-9]{1,2}m)(?: tokens?)? (?:context|ctx)(?: (?:length|window|size))?\b|"  # without it the tokens of a data set
    rf"\b({_SIZE}) ?(?:(?:input |prompt )?tokens?|context|ctx|sequences?)(?: (?:length|window|size))?\b|"
    rf"\b(?:context|ctx|seq(?:uence)?s?|max|block|length)(?: (?:length|len|size|window))?(?: of| is)? ({_SIZE})\b(?: tokens?)?"
)
_NEW = r"\bgenerat\w+ ([0-9]{1,5})(?: new)? tokens?\b|\b([0-9]{1,5}) (?:new|output) tokens?\b"
_BATCH = r"\b(?:micro ?)?batch(?:es)?(?: ?size)?(?: of| is)? ([0-9]{1,5})\b|\bbs ([0-9]{1,5})\b"
_USERS = r"\b([0-9]{1,5}) ?(?:concurrent |parallel |simultaneous )?(?:users?|requests?|people)\b"
_SIDE = (  # in pixels
    r"\b([0-9]{2,4}) ?(?:px|pixels?|resolution)\b|\b(?:resolution|size) ([0-9]{2,4})\b|"
    r"\bat ([0-9]{3,4})\b(?! (?:epochs?|steps?|images?|samples?|iterations?)\b)"
)
_IMAGE = r"\b([0-9]{2,4}) ?x ?([0-9]{2,4})\b"  # width x height, as people say it
_SIZES = {"users": _USERS, "new": _NEW, "tokens": _TOKENS, "batch": _BATCH, "image": _IMAGE}
_BEFORE = rf"\b([0-9]{{{{1,3}}}}|{'|'.join(_NUMBERS)}) (?={{}})"  # the number of devices, before a name
_COUNT = rf"\b([0-9]{{1,3}}|{'|'.join(_NUMBERS)}) (?:gpus?|cards?|devices?)\b"
_SPLIT = r"\b(?:tensor parallel\w*|tp)(?: size)?(?: of)? ?([0-9]{1,3})\b"
_MEMORY = r"\b([0-9]{1,3}) ?(?:gb|gib|g)\b(?: ?(?:of ?)?v?ram)?"
_MAC = r"\b(?:mac ?book|mac|imac)(?: (?:studio|mini|pro|air))*\b|\bapple silicon\b"
_EXPERTS = r"\b(?:moe |all )?experts? (?:on|in|to) (?:the )?(?:cpu|ram|host)\b"
_OFFLOAD = r"\b(sequential )?(?:cpu )?offload\w*(?: (?:to|on|in) (?:the )?(?:cpu|ram|host))?\b"
_NAMES = sorted((key.replace("-", " ") for key in OPTIMIZERS if key != "none"), key=len, reverse=True)
_OPTIMIZERS = rf"\b(?:{'|'.join(_NAMES)})\b"
_DTYPES = (
    ("bfloat16", r"\b(?:bf16|bfloat16)\b"),
    ("float16", r"\b(?:fp16|float16|half precision)\b"),
    ("float32", r"\b(?:fp32|float32)\b"),
)
_MIXED = r"\b(?:automatic )?mixed precision\b|\bamp\b|\bautocast\b"
_VIDEO = {"480p": "480x832", "720p": "720x1280"}  # height x width of a video, as its models are trained
# Of a question about memory.
_SIGNS = (_RUNS, _FILES, _LAYOUTS, _BITS, _COUNT, _MAC, _MEMORY, _MIXED, *_SIZES.values(), *(pattern for _, pattern in _DTYPES))
# Words of training: the keys of each. A number in the words is the value of an empty one.
_OPTIONS: tuple[tuple[str, dict[str, str]], ...] = (
    (r"\b(?:no|without|disabled?)(?: any)? (?:(?:gradient|activation|grad) )?checkpointing\b", {"checkpointing": "0"}),
    (r"\b(?:gradient|activation|grad) checkpoint\w*\b|\bcheckpointing\b", {"checkpointing": "1"}),
    (r"\b(?:rank|r)(?: of)? ([0-9]{1,4})\b", {"r": ""}),
    (r"\balpha(?: of)? ([0-9]{1,5})\b", {"alpha": ""}),
    (r"\b(?:all linear(?: layers?| modules?)?|all layers)\b", {"targets": "all-linear"}),
    (r"\b(?:grad\w* )?accum\w*(?: steps?)?(?: of)? ([0-9]{1,5})\b", {"accumulate": ""}),
    (r"\b([0-9]{1,5}) (?:grad\w* )?accum\w*(?: steps?)?\b", {"accumulate": ""}),
    (r"\bliger\b(?: kernels?)?", {"liger": "1", "loss": "liger"}),
    (r"\bfsdp2?\b", {"parallel": "fsdp"}),
    (r"\bddp\b|\bdata parallel\b", {"parallel": "ddp"}),
    (r"\b(?:deepspeed )?zero ?(?:stage )?1\b", {"parallel": "zero1"}),
    (r"\b([0-9]{1,7}) classes\b", {"classes": ""}),
)
_ANYWHERE: tuple[tuple[str, dict[str, str]], ...] = (
    (r"\btorch\.?compiled?\b|\bcompiled\b", {"compile": "default"}),
    (r"\beager attention\b", {"attention": "eager"}),
    (r"\bexpandable segments\b", {"expandable": "1"}),
)
# Words for a head that classifies, and its class.
_HEADS = (
    (r"\b(?:token classif\w+|ner)\b", "AutoModelForTokenClassification"),
    (r"\b(?:text |sequence )?classif\w+\b", "AutoModelForSequenceClassification"),
    (r"\b(?:question answering|squad)\b", "AutoModelForQuestionAnswering"),
)
# What other parts of the program answer, and what is not counted, by words.
_ELSEWHERE = (
    (r"\b(?:how many|number of)(?: (?:gpus?|cards?|devices?))?", "ask “On how many GPUs?” below the answer, or `sizer ranks`"),
    (r"\b(?:what|which|cheapest|best) (?:gpus?|cards?|devices?|hardware)\b", "ask “Which GPU?” below the answer, or `sizer which`"),
    (
        r"\b(?:max\w*|longest|largest|what|which|how (?:big|large|long)(?: a)?) (?:context|batch|sequence)(?: (?:size|length))?\b",
        "ask “How far it goes” below the answer, or `sizer limits`",
    ),
    (r"\b(?:ppo|rloo|gkd|rlhf)\b", "`sizer run` takes the trainer's script"),
    (r"\bunsloth\b", "its own kernels and offloading are not counted"),
    (r"\b(?:deepspeed )?zero ?(?:stage )?[23]\b|\bdeepspeed\b", OTHER_NAMES["deepspeed"]),
)
_WITHOUT_MEANING = """
a able about ada ampere an and any anyone are around as at attention base be been being blackwell but by can card cards chat
chatbot classification classifier classify cloud colab computer context continue could data dataset device devices did do
does doing edition embedding embeddings enough ever everything fit fits flash for free from full fully gb geforce generate
generation get getting gives go going good google got gpu gpus graphics had has have hello help hey hf hi hopper host how
huggingface i if imagenet in inference instruct into is it it's its just kaggle know language large like llm load local
locally long low many max maximum me memory min minimum model models more much my myself need needed needs new no not now
nvidia nvlink of on one only or our out parameter parameters params pc pcie per please possible precision pytorch qat question
ram require required requirement requirements requires rig run running runs same scratch sdpa server setup should single
size so some someone something squad sxm sxm4 sxm5 t take tesla text than thank thanks that the their them then there these
they think this to tokens total transcribe transcription transformers try trying up usage use used using v vram want was we
weights what when where which while who will with within without work works workstation would you your
"""  # for memory
_FILLERS = frozenset(_WITHOUT_MEANING.split())


def read_sentence(text: str) -> Question | None:
    """Return the question of a sentence that names a model of the catalogue, and a task or a device; None for another text.

    Raises ConfigError for a sentence that names a task or a device, but no known model.
    """
    if len(text) <= MAX_CHARACTERS and (found_file := read_modelfile(text)) is not None:
        return found_file
    ollama = _OLLAMA.match(text)
    text = _ASSIGNED.sub(r"\1 ", text)
    if len(text) > MAX_CHARACTERS or (ollama is None and _CODE.search(text.strip())):
        return None
    draft = Draft(title="a command of Ollama" if ollama else "a question in words")
    words = Words(text[ollama.end() :] if ollama else text)
    if ollama is None and len(words.text.split()) < 2:
        return None
    model = (find_named(text[ollama.end() :].split()[0]) if ollama else None) or find_model(words)
    before = ""  # a size that is the model, such as "a 70b model"
    if model is None and not ollama and (model := find_size(words)) is not None:
        before = words.text[: model.start].rpartition(" ")[0].rpartition(" ")[2]
    if model is not None:
        _take_model(draft, words, model)
    tasks = [("ollama", {"mode": "serve", "engine": "llama.cpp"})] if ollama else _tasks(words)
    if "diffusers:" in draft.items.get("arch", ""):
        draft.unmatched += [f"{given}: not counted for pipelines" for given, items in tasks if items["mode"] == "serve"]
        tasks = [(given, items) for given, items in tasks if items["mode"] != "serve"]
    on_host = words.take(_EXPERTS), words.take(_OFFLOAD)  # the host's processor is no device then
    device = find_device(words)
    signs = any(re.search(pattern, words.text) for pattern in _SIGNS)
    if model is None and not ollama and (tasks or device or signs or SIZED.search(words.text)):
        raise _without_model(text)
    elsewhere = [(asked[0], todo) for pattern, todo in _ELSEWHERE if (asked := words.take(pattern)) is not None]
    begins = model is not None and model.start == 0 and 0 < len(" ".join(words.rest()).split()) <= MOST_WORDS
    if model is None or not (tasks or device or elsewhere or signs or begins):
        return None
    draft.unmatched += [f"{asked}: {todo}" for asked, todo in elsewhere]
    for given, items in tasks:
        _take_task(draft, given, items)
    _take_optimizer(draft, words)
    _take_layout(draft, words, ollama=ollama is not None)
    sizes = {name: words.take(pattern) for name, pattern in _SIZES.items()}  # before numbers of devices
    _take_device(draft, words)
    _take_sizes(draft, words, sizes)
    _take_options(draft, words)
    _take_host(draft, *on_host)
    _take_dtype(draft, words)
    unknown = _unknown(words)
    if before and any(phrase.split()[-1] == before for phrase in unknown):
        raise _without_model(text)  # a model of this size that the catalogue lacks
    draft.unmatched += [f"{phrase}: not understood" for phrase in unknown]
    return draft.whole(kind="words")


def _without_model(text: str) -> ConfigError:
    todo = "name it as `sizer models` does, as org/name, or paste its config.json; `sizer run` takes a script of any model"
    given = quote(text.strip(), 80)
    return ConfigError("no known model is in this question", given=given, allowed="a model by its name", todo=todo)


def _take_model(draft: Draft, words: Words, model: Name) -> None:
    """Note the model, and which others have such a name."""
    given = words.take_name(model)
    draft.take(given, arch=model.means)
    if not model.whole:
        draft.assume(_taken(given, [arch.partition(":")[2] for arch in (model.means, *model.others)]))


def _taken(given: str, names: Sequence[str]) -> str:
    """Return which of several names was taken."""
    others = f"; there are {', '.join(names[1:])}" if names[1:] else ""
    return f"{given} is taken to be {names[0]}{others}"


def _tasks(words: Words) -> list[tuple[str, dict[str, str]]]:
    """Return what names a task, with its keys."""
    found = []
    for pattern, items in _TASKS:
        while (named := words.take(pattern)) is not None:
            found.append((named[0], items | {key: named[0] for key, value in items.items() if not value}))
    return found


def _take_task(draft: Draft, given: str, items: Mapping[str, str]) -> None:
    """Note the keys of a task, or that the question is already about another one."""
    mode = draft.items.get("mode", items["mode"])
    if mode != items["mode"]:
        draft.unmatched.append(f"{given}: the question is about {mode}")
    elif new := {key: value for key, value in items.items() if key not in draft.items}:
        draft.take(given, **new)


def _take_optimizer(draft: Draft, words: Words) -> None:
    """Note the optimizer of a training."""
    if draft.items.get("mode") != "training":
        return
    if (found := words.take(r"\b(paged )?(?:8 ?bit (?:paged )?adamw?|adamw? 8 ?bit)\b")) is not None:
        draft.take(found[0], optimizer="paged-adamw-8bit" if "paged" in found[0] else "adamw-8bit")
    elif (found := words.take(_OPTIMIZERS)) is not None:
        draft.take(found[0], optimizer=found[0].replace(" ", "-"))


def _take_layout(draft: Draft, words: Words, *, ollama: bool) -> None:
    """Note the layout of weights and cache, and the task if no word names it: what reads such a layout, else PyTorch."""
    arch, kv, file_type = draft.items["arch"], words.take(_KV), words.take(_FILES)
    layout, bits = words.take(_LAYOUTS), words.take(_BITS)
    if arch.startswith("diffusers:"):
        words.take(_QUANTIZED_WORD)
        return _take_parts_layout(draft, [found for found in (file_type, layout, kv) if found is not None], bits)
    kept = layout is not None and layout[0] == "mxfp4" and "gpt-oss" in arch  # the checkpoint is in MXFP4
    if "mode" not in draft.items:
        only_served = layout is not None and layout[0].split()[0] != "fp8" and not kept
        if file_type is not None:
            draft.take(file_type[0], mode="serve", engine="llama.cpp")
        elif (users := re.search(_USERS, words.text)) is not None:
            draft.take(users[0], mode="serve")
        elif kv is not None or only_served:
            draft.take((kv or layout or ("",))[0], mode="serve")
        else:
            preset = find_preset(arch[3:]) if arch.startswith("hf:") else None
            answers = "/" in arch or (preset is not None and preset.head.endswith(GENERATING) and preset.modality in ANSWERING)
            mode = "generate" if answers else "inference"
            draft.assume("the model runs in PyTorch, one input at once", mode=mode, batch=1)
    mode = draft.items["mode"]
    if kv is not None and mode == "serve":
        name = kv[1] or kv[2]
        if name == "fp8":
            draft.take(kv[0], kv=name)
        else:  # a type of llama.cpp's files
            draft.take(kv[0], kv=f"{name[:2]}_0", engine=draft.items.get("engine", "llama.cpp"))
    elif kv is not None:
        draft.unmatched.append(f"{kv[0]}: only a server's cache has another dtype")
    number = (bits[1] or bits[2]) if bits else ""
    if draft.items.get("engine") == "llama.cpp":
        file_type = file_type or words.take(_WHOLE_FILES) or (layout if kept else None)
        named, given = (file_type[0], file_type[0]) if file_type else (f"q{number}", bits[0] if bits else "")
        if given:
            known = named if named in FILE_TYPES else WHOLE_NAMES.get(named.partition("_")[0], named)
            draft.take(given, weights=known)
        elif "gpt-oss" not in arch:
            draft.assume(USUAL_FILE if ollama else "the file that most people take", weights="q4_k_m")
    elif file_type is not None:
        draft.unmatched.append(f"{file_type[0]}: only llama.cpp runs such a file")
    elif layout is not None:
        name = layout[0].split()[0]
        if kept:
            draft.take(layout[0], weights="checkpoint")
        elif mode == "serve" or (name == "fp8" and mode != "training"):
            draft.take(layout[0], weights=name)
        else:
            draft.unmatched.append(f"{layout[0]}: not a layout for training")
    elif bits is not None and "weights" not in draft.items:
        name = {"4": "nf4", "8": "int8"}[number]
        draft.take(bits[0], weights=SERVED[name] if mode == "serve" else name)
        if mode == "training":
            draft.take(bits[0], train="adapter")
    if "weights" in draft.items:
        words.take(_QUANTIZED_WORD)  # else it is named: the layout is not said
    if ollama:
        draft.assume(SMALL_CONTEXT, max_model_len=CONTEXT)


def _take_parts_layout(draft: Draft, layouts: Sequence[re.Match[str]], bits: re.Match[str] | None) -> None:
    """Note the layout of a pipeline's denoiser."""
    if "mode" not in draft.items:
        draft.assume("one call of the pipeline", mode="inference", batch=1)
    for layout in layouts:
        if layout[0].split()[0] == "fp8" and layout[0].count(" kv") == 0 and draft.items["mode"] == "inference":
            draft.take(layout[0], weights="fp8-cast")
        else:
            draft.unmatched.append(f"{layout[0]}: not counted for pipelines; nf4 and int8 are")
    if bits is not None and "weights" not in draft.items:
        draft.take(bits[0], weights={"4": "nf4", "8": "int8"}[bits[1] or bits[2]])


def _take_device(draft: Draft, words: Words) -> None:
    """Note the device, and how many of it. A device without a name is one of its memory."""
    split, counted, mac = words.take(_SPLIT), words.take(_COUNT), words.take(_MAC)
    laptop = words.take(r"\blaptop\b")
    words.take(r"\btensor parallel\w*\b")
    if (device := find_device(words)) is not None:
        before = words.take(_BEFORE.format(re.escape(words.text[device.start : device.end])))
        given = words.take_name(find_device(words) or device)
        size = words.take(_MEMORY)
        keys = [device.means, *device.others]
        if laptop is not None:
            keys = [key for key in GPUS if key.startswith(f"{device.means.removesuffix('-8gb')}-laptop")] or keys
        fitting = [key for key in keys if size is not None and f"{size[1]} GB" in GPUS[key].name]
        keys = fitting or keys
        draft.take(f"{laptop[0]} {given}" if laptop else given, gpu=keys[0])
        if len(keys) > 1:
            draft.assume(_taken(given, keys))
        if size is not None and not fitting:
            draft.unmatched.append(f"{size[0]}: the memory of {keys[0]} is counted")
    elif (size := re.search(_MEMORY, words.text)) is not None:
        given = size[0].strip()
        before = words.take(_BEFORE.format(re.escape(given)))
        words.take(_MEMORY)
        chips = sorted((key for key in GPUS if GPUS[key].backend == "mps" and key.endswith(f"-{size[1]}gb")), reverse=True)
        if mac is not None and chips:
            draft.assume(_taken(f"{mac[0]} {given}", chips), gpu=chips[0])
        else:
            draft.assume(f"a device of {given} with compute capability 8.9", gpu=f"custom:{size[1]}GiB@8.9")
    else:
        given, before = "devices", None
    found = counted or before
    number = 1 if found is None else _NUMBERS.get(found[1]) or int(found[1])
    key = draft.items.get("gpu", "")
    weights, mode = draft.items.get("weights"), draft.items["mode"]
    asks = mode == "serve" or (mode == "generate" and (weights in FILES or draft.items["arch"].startswith("hf:")))
    if key in GPUS and GPUS[key].backend == "mps" and asks and draft.items.get("engine") != "llama.cpp":
        draft.drop("mode", "batch", "weights", "engine")
        file_type = FILES.get(weights or "", "q4_k_m")
        draft.assume("llama.cpp, which runs on a Mac", mode="serve", engine="llama.cpp", weights=file_type)
    named = re.search(r"\b(?:ddp|data parallel|fsdp2?|zero ?(?:stage )?1)\b", words.text) is not None
    _take_number(draft, number if split is None else int(split[1]), given, split, named=named)


def _take_number(draft: Draft, number: int, given: str, split: re.Match[str] | None, *, named: bool) -> None:
    """Note several devices, and what splits the model over them, which may be `named` in the text."""
    mode = draft.items["mode"]
    if number < 2:
        return
    text = split[0] if split else f"{number} × {given}"
    if mode == "serve":
        draft.take(text, **{"pp" if draft.items.get("engine") == "llama.cpp" else "tp": number})
    elif mode == "training" and split is not None:
        draft.take(text, tp=number)
    elif mode == "training":
        draft.take(text, parallel="fsdp", ranks=number)
        if not named:
            _assume_parallel(draft)
    elif mode == "generate":
        weights = draft.items.get("weights")
        draft.drop("mode", "batch", "weights")
        if split is not None:
            draft.take(text, mode="serve", tp=number)
        else:
            draft.assume("several devices run a server of vLLM", mode="serve", tp=number)
        if weights in SERVED:
            draft.assume(f"a server's layout in place of {weights}", weights=SERVED[weights])
        elif weights in LAYOUTS:
            draft.assume("as asked", weights=weights)
    else:
        draft.unmatched.append(f"{text}: one device is counted")


def _assume_parallel(draft: Draft) -> None:
    """Assume how a training uses several devices."""
    items = draft.items
    if items["arch"].startswith(("torchvision:", "timm:")):
        why, parallel = "the usual way of models of images", "ddp"
    elif "weights" in items:
        why, parallel = "each device has all quantized weights", "ddp"
    else:
        why, parallel = "weights, gradients and states are split; DDP keeps all on each device", "fsdp"
    draft.drop("parallel")
    draft.assume(why, parallel=parallel)


def _take_sizes(draft: Draft, words: Words, sizes: Mapping[str, re.Match[str] | None]) -> None:
    """Note the tokens, the batch, the number of users and the image, or that the task has no such key."""
    mode, arch = draft.items["mode"], draft.items["arch"]
    serves = mode == "serve"
    users, new, batch, size = (sizes[name] for name in ("users", "new", "batch", "image"))
    tokens = sizes["tokens"] or words.take(r"\b()()([0-9]{1,3}k)\b")
    length = "" if tokens is None else f"{int(tokens[1][:-1]) * 1024}k" if tokens[1] else tokens[2] or tokens[3]
    if users is not None and not serves:
        draft.unmatched.append(f"{users[0]}: only a server has users")
    if users is not None and serves:
        draft.take(f"{users[0]}{f', {tokens[0]}' if tokens else ''}", want=f"{users[1]}x{length or '4k'}")
    elif tokens is not None:
        draft.take(tokens[0], **{"max_model_len" if serves else "seq": length})
    if new is not None and mode == "generate":
        draft.take(new[0], new=new[1] or new[2])
    elif new is not None:
        draft.unmatched.append(f"{new[0]}: the length of an answer changes the memory of a generation only")
    if batch is not None and serves:
        draft.unmatched.append(f"{batch[0]}: a server chooses its batches")
    elif batch is not None:
        draft.take(batch[0], batch=batch[1] or batch[2])
    pictures = arch.startswith(("diffusers:", "torchvision:", "timm:"))
    if size is not None and pictures:
        draft.take(size[0], image=f"{size[2]}x{size[1]}")
    elif size is not None:
        draft.unmatched.append(f"{size[0]}: the model's own size of images is taken")
    if pictures and (side := words.take(_SIDE)):
        draft.take(side[0], image=side[1] or side[2] or side[3])
    if arch.startswith("diffusers:") and (frames := words.take(r"\b([0-9]{1,4}) frames\b")):
        draft.take(frames[0], frames=frames[1])
    if arch.startswith("diffusers:") and size is None and (side := words.take(r"\b(512|768|1024|1280|1536|2048)\b")):
        draft.take(side[0], image=side[1])
    if arch.startswith("diffusers:") and mode == "inference":
        while (how := words.take(rf"\b(?:vae )?({'|'.join(VAES)})\b")) is not None:
            draft.take(how[0], vae=",".join(filter(None, (draft.items.get("vae"), how[1]))))
    if arch.startswith("diffusers:") and (lines := words.take(r"\b(?:480|720)p\b")):
        draft.take(lines[0], image=_VIDEO[lines[0]])
    if draft.items.get("objective") == "grpo" and (group := words.take(r"\b([0-9]{1,3}) (?:generations?|completions?)\b")):
        draft.take(group[0], group=group[1])


def _take_options(draft: Draft, words: Words) -> None:
    """Note further options of the task."""
    mode = draft.items["mode"]
    preset = find_preset(draft.items["arch"][3:]) if draft.items["arch"].startswith("hf:") else None
    for pattern, head in _HEADS if preset is not None and preset.modality == "text" and mode in ("training", "inference") else ():
        if (found := words.take(pattern)) is not None:
            draft.take(found[0], head=head)
    for pattern, items in (*(_OPTIONS if mode == "training" else ()), *(_ANYWHERE if mode != "serve" else ())):
        if (found := words.take(pattern)) is not None:
            draft.take(found[0], **{key: value or found[1] for key, value in items.items()})
    items = draft.items
    if items.get("train") == "adapter" and "weights" in items and not items["arch"].startswith("diffusers:"):
        draft.assume("prepare_model_for_kbit_training of PEFT switches it on", checkpointing=items.get("checkpointing", 1))


def _take_host(draft: Draft, experts: re.Match[str] | None, offload: re.Match[str] | None) -> None:
    """Note what stays on the host, or that the task has no such key."""
    if experts is not None:
        if draft.items.get("engine") == "llama.cpp":
            draft.take(experts[0], cpu_moe=ALL_LAYERS)
        else:
            draft.unmatched.append(f"{experts[0]}: only llama.cpp computes experts on the host")
    if offload is not None:
        if draft.items["arch"].startswith("diffusers:") and draft.items["mode"] == "inference":
            draft.take(offload[0], offload="sequential" if offload[1] else "model")
        elif draft.items.get("parallel") == "fsdp":
            draft.take(offload[0], offload=1)
        else:
            draft.unmatched.append(f"{offload[0]}: not counted for this task")


def _take_dtype(draft: Draft, words: Words) -> None:
    """Note the dtype, or take the usual one of the task and the device."""
    serves, mixed = draft.items["mode"] == "serve", words.take(_MIXED)
    named = next(((dtype, found[0]) for dtype, pattern in _DTYPES if (found := words.take(pattern)) is not None), None)
    gpu = GPUS.get(draft.items.get("gpu", ""))
    old = gpu is not None and gpu.capability is not None and gpu.capability < BFLOAT16_SINCE
    half = "float16" if old else "bfloat16"
    if named is not None and draft.items.get("engine") == "llama.cpp":
        draft.unmatched.append(f"{named[1]}: llama.cpp takes the type of the file")
    elif serves and (named or mixed):
        draft.unmatched.append(f"{named[1] if named else mixed[0] if mixed else ''}: a server takes the dtype of the config")
    elif mixed is not None:
        dtype = named[0] if named and named[0] != "float32" else half
        draft.take(f"{mixed[0]}{f', {named[1]}' if named else ''}", dtype=f"amp-{dtype}")
    elif named is not None:
        draft.take(named[1], dtype=named[0])
    elif not serves and not draft.items["arch"].startswith(("torchvision:", "timm:")):
        draft.assume(f"{gpu.name} computes no bfloat16" if gpu and old else "the usual dtype of such models", dtype=half)


def _unknown(words: Words) -> list[str]:
    """Return the phrases of a text that were neither read nor are without meaning for memory, at most eight."""
    phrases = []
    for part in words.rest():
        known = [word in _FILLERS or (word.endswith("s") and word[:-1] in _FILLERS) for word in part.split()]
        phrase: list[str] = []
        for word, filler in (*zip(part.split(), known, strict=True), ("", True)):
            if not filler and any(map(str.isalnum, word)):
                phrase.append(word)
            elif phrase:
                phrases.append(" ".join(phrase))
                phrase = []
    return phrases[:8]
