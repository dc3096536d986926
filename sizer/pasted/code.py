"""Commands and Python code that start a training, as the lines of a config. The code is read call by call, never run."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable, Iterator
from itertools import dropwhile, islice
from typing import Any

CALL = "call."  # the beginning of a line that names the arguments' class
PROCESSES = "launcher.processes"
MAX_EXPANDED = 64 * 1024  # characters of a command with the values of its variables
MAX_CALL, MAX_CALLS = 4_000, 64  # characters of a call, calls of a text; real ones have some hundred, and a dozen
_PROGRAMS = ("accelerate", "deepspeed", "llamafactory-cli", "python", "python3", "swift", "torchrun", "trl")
_SHELL = re.compile(rf"\s*(?:!|\$ )?\s*(?:[A-Z_][A-Z0-9_]*=[^\s\\]*[\s\\]+)*(?:uv run\s+)?(?:{'|'.join(_PROGRAMS)})\s")
_PREAMBLE = re.compile(r"(?:#.*|export\s.*|set\s+-.*|cd\s.*|[A-Za-z_]\w*=[^\s\\]*)?")  # a line before a shell script's command
_ASSIGNMENT = re.compile(r"(?m)^[ \t]*(?:export[ \t]+)?([A-Za-z_]\w{0,60})=[\"']?([^\s\"'$]{1,200})(?=[\s\"']|$)")
_TRAINERS = {"sft": "SFT", "dpo": "DPO", "kto": "KTO", "orpo": "ORPO", "grpo": "GRPO", "rloo": "RLOO", "reward": "Reward"}
# transformers' example scripts that load another class than the usual one of a model's type (examples/pytorch, 5.24).
_HEADS = {
    "run_glue.py": "AutoModelForSequenceClassification",
    "run_classification.py": "AutoModelForSequenceClassification",
    "run_xnli.py": "AutoModelForSequenceClassification",
    "run_ner.py": "AutoModelForTokenClassification",
    "run_qa.py": "AutoModelForQuestionAnswering",
    "run_swag.py": "AutoModelForMultipleChoice",
}
_CONFIGS = tuple(f"{name}Config" for name in _TRAINERS.values())
_ARGUMENTS = ("TrainingArguments", "Seq2SeqTrainingArguments", "SentenceTransformerTrainingArguments")
_KNOWN = re.compile(
    rf"\b(?:{'|'.join((*_CONFIGS, *_ARGUMENTS))}|LoraConfig|BitsAndBytesConfig|Fast\w{{0,16}}Model\.get_peft_model"
    r"|[A-Za-z]\w*\.from_pretrained)\s*\("
)
_OF_TRAININGS = ("model_name_or_path", "per_device_train_batch_size", "output_dir")  # one of these flags has each training
_OF_DIFFUSERS = "pretrained_model_name_or_path"  # a flag of all of diffusers' example scripts
# Scripts that train the denoiser of a pipeline. Others with that flag train something else, such as a ControlNet or an embedding.
_OF_PIPELINES = {r"^train_(?:text_to_image|dreambooth)": "diffusers", r"^(?:sdxl_)?train_network\.py$": "sd-scripts"}
SCRIPT = "launcher.script"
ASSIGNED = re.compile(r"^[ \t]*([A-Za-z_]\w*)\s*=\s*(\"[^\"\n]*\"|'[^'\n]*'|[\w.]+)\s*(?:#.*)?$", re.MULTILINE)


def is_command(text: str) -> bool:
    """Return True if a text begins as a command that starts a training."""
    return _SHELL.match(_without_preamble(text)) is not None


def _without_preamble(text: str) -> str:
    """Return a shell script from its first command on."""
    lines = text.splitlines(keepends=True)
    return "".join(dropwhile(lambda line: _PREAMBLE.fullmatch(line.strip()), lines))


def read_command(text: str) -> dict[str, Any]:
    """Return the flags of a command as lines of a config, with a line for the class that has them; empty if it trains nothing."""
    variables = _ASSIGNMENT.findall(text)[:MAX_CALLS]
    text = _without_preamble(text)
    for name, value in variables:
        whole = re.sub(rf"\$(?:{name}\b|\{{{name}\}})", value.replace("\\", r"\\"), text)
        text = whole if len(whole) <= MAX_EXPANDED else text
    try:
        words = shlex.split(re.sub(r"[\\^`]\r?\n", " ", text.lstrip(" !$")), comments=True)
    except ValueError:  # a quotation mark that is not closed
        words = re.sub(r"[\\^`]\r?\n", " ", text).split()
    lines: dict[str, Any] = {}
    trainer = next((_TRAINERS[name] for word in words if (name := _stem(word)) in _TRAINERS), None)
    factory = any(word.startswith("llamafactory") for word in words)
    if not factory:
        lines[f"{CALL}{trainer}Config" if trainer else f"{CALL}TrainingArguments"] = True
        if (known := next((_HEADS[name] for word in words if (name := word.rpartition("/")[2]) in _HEADS), None)) is not None:
            lines["model_class"] = known
    place = 0
    while place < len(words):
        word, place = words[place], place + 1
        if word in ("&&", "||", "|", ";", "&"):
            break
        if re.fullmatch(r"[a-z]\w*(?:\.\w+)*=.*", word) and place > 1:  # an override of llamafactory-cli
            name, _, value = word.partition("=")
            lines[name] = _plain(value)
        if not word.startswith("--"):
            continue
        name, has_value, value = word[2:].partition("=")
        values: list[str] = []
        while not has_value and place < len(words) and not re.match(r"--?[A-Za-z]|[&|;]", words[place]):
            if values and _is_script(words[place]):
                break
            values.append(words[place])
            place += 1
        name = name.replace("-", "_")
        found = [_plain(value)] if has_value else [_plain(text) for text in values] or [True]
        lines[name] = found if len(found) > 1 else found[0]
    if (swift := re.search(r"\bswift\s+(sft|pt|rlhf)\b", text)) is not None:
        if (each := re.search(r"\bNPROC_PER_NODE=([0-9]{1,3})\b", text)) is not None:
            lines[PROCESSES] = int(each[1])
        flags = {key: value for key, value in lines.items() if not key.startswith(CALL)}
        return {f"{CALL}swift": True, SCRIPT: swift[1]} | flags
    if _OF_DIFFUSERS in lines:
        script = next((word.rpartition("/")[2].lstrip(".") for word in words if _is_script(word)), "")  # ".\\" loses its backslash
        kind = next((name for sign, name in _OF_PIPELINES.items() if re.search(sign, script)), None)
        if kind is None:
            return {}
        flags = {key: value for key, value in lines.items() if not key.startswith(CALL)}
        lines = {f"{CALL}{kind}": True, SCRIPT: script} | flags
    elif lines.keys().isdisjoint(_OF_TRAININGS):
        return {}
    if (half := lines.get("mixed_precision")) in ("bf16", "fp16"):
        lines.setdefault(half, True)
    lines.pop("mixed_precision", None)
    for name in ("num_processes", "nproc_per_node", "num_gpus"):
        if isinstance(count := lines.pop(name, None), int) and not isinstance(count, bool):
            lines[PROCESSES] = count
    return lines


def _stem(word: str) -> str:
    """Return a word's hint at the trainer: `sft` of `trl/scripts/sft.py` and of `sft`."""
    name = word.rpartition("/")[2]
    return re.split(r"[_.]", name)[0] if _is_script(word) else name


def _is_script(word: str) -> bool:
    return word.endswith(".py")


def _plain(text: str) -> Any:
    """Return the plain value that a flag's text is."""
    if text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# ------------------------------------------------------------------------------------------------------------- Python code


_PREPARES = "prepare_model_for_kbit_training"


def read_calls(text: str) -> dict[str, Any]:
    """Return the arguments of known calls in Python code as lines of a config; empty if there is none.

    Known are the arguments of transformers' and TRL's trainers, LoraConfig, BitsAndBytesConfig and `from_pretrained`. A name is
    replaced by the text or number that the code assigns to it.
    """
    names = {found[1]: found[2] for found in ASSIGNED.finditer(text)}
    lines: dict[str, Any] = {}
    for found in islice(_KNOWN.finditer(text), MAX_CALLS):
        if (call := call_at(text, found.start(), found.end())) is None:
            continue
        name = text[found.start() : found.end() - 1].strip()
        read = next((reader for end, reader in _CALLS.items() if name.endswith(end)), None)
        given = {word.arg: value_of(word.value, names) for word in call.keywords if word.arg}
        if read is not None:
            lines |= {key: value for key, value in read(name, given, call, names) if value is not None and key not in lines}
    if (lines.get("load_in_4bit") or lines.get("load_in_8bit")) and _PREPARES not in text:
        lines[_PREPARES] = False
    return lines if any(line.startswith(CALL) or line == "use_peft" for line in lines) else {}


def call_at(text: str, start: int, opened: int) -> ast.Call | None:
    """Return the call that begins at a place, None if it is no whole call of a usual size."""
    depth, place, end = 1, opened, min(len(text), start + MAX_CALL)
    tokens = re.compile(r"\"\"\".*?\"\"\"|'''.*?'''|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|#[^\n]*|[()\[\]{}]", re.DOTALL)
    while depth and (found := tokens.search(text, place, end)):
        place = found.end()
        depth += found[0] in ("(", "[", "{")
        depth -= found[0] in (")", "]", "}")
    if depth:
        return None
    try:
        whole = ast.parse(text[start:place], mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return whole if isinstance(whole, ast.Call) else None


def value_of(node: ast.expr, names: dict[str, str]) -> Any:
    """Return the plain value of an argument, None if only running the code would tell it."""
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    if isinstance(node, ast.Dict):
        parts = zip(node.keys, node.values, strict=True)
        return {key.value: value_of(value, names) for key, value in parts if isinstance(key, ast.Constant)}
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.args:
        return {word.arg: value_of(word.value, names) for word in node.keywords if word.arg}
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):  # torch.bfloat16
        return f"{node.value.id}.{node.attr}"
    if isinstance(node, ast.Name) and node.id in names:
        text = names[node.id]
        return text[1:-1] if text[:1] in "\"'" else _plain(text)
    return None


_Read = Iterator[tuple[str, Any]]


def _arguments(name: str, given: dict[str, Any], call: ast.Call, names: dict[str, str]) -> _Read:
    plain = name.rpartition(".")[2]
    yield f"{CALL}{plain if plain in _CONFIGS else 'TrainingArguments'}", True
    yield from given.items()


def _lora(name: str, given: dict[str, Any], call: ast.Call, names: dict[str, str]) -> _Read:
    yield "use_peft", True
    for key in ("r", "target_modules", "modules_to_save"):
        yield f"lora_{key}", given.get(key)
    for key in ("lora_alpha", "lora_dropout", "use_dora", "use_rslora", "target_parameters"):
        yield key, given.get(key)


def _bits(name: str, given: dict[str, Any], call: ast.Call, names: dict[str, str]) -> _Read:
    for key in ("load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "bnb_4bit_compute_dtype"):
        yield key, given.get(key)
    yield "use_bnb_nested_quant", given.get("bnb_4bit_use_double_quant")


def _model(name: str, given: dict[str, Any], call: ast.Call, names: dict[str, str]) -> _Read:
    if re.search(r"Tokenizer|Processor|Config|FeatureExtractor|Scheduler|Pipeline", name):
        return
    repository = value_of(call.args[0], names) if call.args else None
    for key in ("pretrained_model_name_or_path", "model_name"):
        repository = repository or given.get(key)
    yield "model_name_or_path", repository
    yield "model_class", name.partition(".")[0]
    yield "num_labels", given.get("num_labels")
    yield "dtype", given.get("dtype") or given.get("torch_dtype")
    for key in ("attn_implementation", "load_in_4bit", "load_in_8bit"):
        yield key, given.get(key)
    if name.startswith("Fast"):
        yield "load_in_4bit", "load_in_8bit" not in given
        yield "max_length", given.get("max_seq_length")
        yield "unsloth", "its own kernels"


_CALLS: dict[str, Callable[[str, dict[str, Any], ast.Call, dict[str, str]], _Read]] = {
    **dict.fromkeys((*_ARGUMENTS, *_CONFIGS), _arguments),
    "LoraConfig": _lora,
    "get_peft_model": _lora,
    "BitsAndBytesConfig": _bits,
    "from_pretrained": _model,
}
