"""Form of a question. It joins the values of its widgets into a query string, which `parse_query` checks as it checks a link.

A widget's key is the key of the query. `arch` has a widget for the source, and one for the name within each source.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

import streamlit as st

from sizer.base.config_json import canonical_config, encode_config
from sizer.base.errors import RefusedValueError, RequestError
from sizer.base.versions import OLDEST, format_version
from sizer.catalogue.adapters import ADAPTERS, ALL_LINEAR, ATTENTION, TRAINS, WITHOUT_TOWER
from sizer.catalogue.gpu_keys import CAPABILITIES, CUSTOM, EXAMPLE, find_gpu, format_capability, is_custom, split_custom
from sizer.catalogue.gpus import GPUS, Gpu
from sizer.catalogue.modes import ALL, INPUTS, MODES, OUTPUTS, TASKS, Mode, Task, task_of
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.catalogue.parallel import PARALLELS, SCHEDULES
from sizer.catalogue.pipelines import TRAINS_OF_DENOISERS
from sizer.catalogue.sources import SOURCES, Source
from sizer.catalogue.weights import WEIGHTS
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.query.text import format_query, join_query, parse_query, split_query
from sizer.query.values import ATTENTIONS, CACHES, DTYPES
from sizer.ui import defaults, fields, server_view
from sizer.ui.fields import OPTIONS, Places, device_title
from sizer.ui.focus import in_focus, look_at, title_formatter
from sizer.ui.form_model import KEEP, SIZES, Names, ask_model, forget, may_read_images_or_sound, sizes_of

MODELS_DEFAULT = "the model's default"
PYTORCHS_DEFAULT = "PyTorch's default"
EITHER = "either"
ATTENTION_TITLES = {"sdpa": "SDPA (fused)", "eager": "eager"}
PLAIN_KEYS = {key: row for key, row in KEYS.items() if row.label}
NEVER_EMPTY = ("dtype", "batch")  # other empty fields mean the default of the model or of PyTorch


def fill(request: Request) -> None:
    """Set the form's fields to a request's values. Call it before `ask`."""
    state = st.session_state
    state["source"] = request.source
    state[f"{request.source}_name"] = _name(request)
    texts = split_query(format_query(request, complete=True))
    state["mode"], state["dtype"] = task_of(request.mode, request.train), list(request.dtypes)
    state["batch"] = defaults.batch_text(request.batches)
    state["seq"], state["image"] = texts.get("seq", ""), texts.get("image", "")
    state["head"] = request.head or ""
    state["optimizer"], state["optimizer_impl"] = request.optimizer, request.optimizer_impl or PYTORCHS_DEFAULT
    state["train"], state["adapter"] = request.train, request.adapter
    state["r"], state["alpha"] = str(request.adapter_rank), str(request.adapter_alpha or "")
    state["targets"] = "" if KEYS["targets"].is_default(request) else ",".join(request.adapter_targets)
    state["adapter_dropout"], state["accumulate"] = f"{request.adapter_dropout:g}", str(request.accumulate)
    state["weights"], state["outputs"] = request.weights, request.outputs or EITHER
    state["inputs"] = request.inputs or ALL
    state["attention"], state["checkpointing"] = request.attention, request.checkpointing
    state["gpu"] = CUSTOM if is_custom(request.gpu) else request.gpu
    state["gpu_memory"], state["gpu_capability"] = split_custom(request.gpu if is_custom(request.gpu) else EXAMPLE)
    state["new"], state["cache"] = "" if KEYS["new"].is_default(request) else str(request.new), request.cache
    state["parallel"], state["ranks"] = request.parallel, str(request.ranks)
    state["replicate"], state["reshard"] = str(request.replicate), str(request.reshard)
    state["offload"] = request.offload
    state["cp"] = str(request.cp)
    state["sp"], state["lp"] = request.sp, request.lp
    state["tp"], state["rank"] = str(request.tp), "" if request.rank is None else str(request.rank)
    state["pp"], state["schedule"], state["microbatch"] = str(request.pp), request.schedule, str(request.microbatch)
    state["expandable"] = request.expandable_segments
    state["torch"] = request.torch or ""
    server_view.fill(request)
    fields.fill_call(request)
    for key, row in PLAIN_KEYS.items():
        text = row.write(request) or ""
        state[key] = text == "1" if row.toggles else text
    look_at(request.focus)
    defaults.forget()


def _name(request: Request) -> str:
    if request.config is not None:
        return json.dumps(json.loads(request.config), indent=2, ensure_ascii=False)
    return f"{request.name}@{request.revision}" if request.revision else request.name


def ask(names: Names, *, for_device: bool = True) -> Request | None:
    """Show the form in the order of a question: model, device and number of GPUs, task, then the other keys.

    Args:
        names: The names that packages build, by source.
        for_device: Whether to ask for the device. Otherwise the request keeps the device that the form had.

    Returns:
        The request; None until a model is named.

    Raises:
        SizerError: The request is refused.
    """
    places = Places()
    key = st.selectbox("Model source", list(SOURCES), format_func=_title, key="source", on_change=forget, **KEEP)
    source = SOURCES[key]
    name = ask_model(source, names)
    places.leave("arch", "Model")
    tasks = [task for task in TASKS.values() if task.mode not in source.refuses_modes]
    if not for_device:
        tasks = [task for task in tasks if not MODES[task.mode].serves]
    if st.session_state["mode"] not in {task.key for task in tasks}:
        st.session_state["mode"] = tasks[0].key
    values = _ask_device(source, MODES[TASKS[st.session_state["mode"]].mode], for_device, places)
    gpu = _gpu_or_none(values["gpu"])
    if gpu is not None and source.trace is None:
        defaults.follow_task(source, name, gpu)
    titles = {task.key: task.title for task in tasks}
    task = TASKS[_choose("Task", list(titles), key="mode", format_func=title_formatter(titles))]
    mode = MODES[task.mode]
    if mode.serves:
        return _parse({"arch": _arch(source, name)} | server_view.ask(source, values["gpu"])) if name.strip() else None
    if gpu is not None and source.trace is None:
        defaults.follow_sizes(defaults.sizes_for(source, name, gpu, task))
    values = {"mode": mode.key} | _ask_sizes(source, mode, places) | values
    values |= _ask_task(source, task, places)
    values |= _ask_more(source, mode, values, for_device, places)
    if not name.strip():
        return None
    items = {"arch": _arch(source, name)} | values
    try:
        request = _parse(items)
        return in_focus(_parse(items | more) if (more := _ask_plain(source, request, places)) else request)
    except RequestError as error:
        places.show(error.refusals)
        raise


def _gpu_or_none(key: str) -> Gpu | None:
    """Return the device of the form; None if the fields of a custom device are refused. `_parse` then raises the error."""
    try:
        return find_gpu(key)
    except RefusedValueError:
        return None


def _arch(source: Source, name: str) -> str:
    value = encode_config(canonical_config(name)) if source.entry == "config" else name.strip()
    return f"{source.key}:{value}"


def _parse(items: dict[str, str]) -> Request:
    given = {key: value for key, value in items.items() if value or key in NEVER_EMPTY}
    return parse_query(join_query(given))


def _ask_plain(source: Source, request: Request, places: Places) -> dict[str, str]:
    """Return the values of the plain keys that apply to the request. Each key has one field."""
    rows = {key: row for key, row in PLAIN_KEYS.items() if key not in source.refuses}
    if all(row.needs(request) for row in rows.values()):
        return {}
    values = {}
    with st.expander("Advanced options"):
        for key, row in rows.items():
            if row.needs(request) or (
                key == "new" and MODES[request.mode].generates
            ):  # its field is among the sizes
                continue
            if row.toggles:
                values[key] = "01"[st.toggle(row.label, key=key, help=row.allowed, **KEEP)]
            else:
                values[key] = _text(row.label, row.allowed, key=key, placeholder=row.otherwise, places=places)
            with suppress(RefusedValueError):  # further keys may need this one
                request = replace(request, **row.read(values[key])) if values[key] else request
    return values


def _title(source: str) -> str:
    return SOURCES[source].title


def _ask_sizes(source: Source, mode: Mode, places: Places) -> dict[str, str]:
    chosen = st.pills("Dtypes", DTYPES, selection_mode="multi", key="dtype", help=DTYPE_HELP, **KEEP)
    places.leave("dtype", "Dtypes")
    batches = _text(
        "Batch sizes", "Whole numbers, separated by commas.", key="batch", placeholder="1, 2, 4", places=places
    )
    values = {"dtype": ",".join(dtype for dtype in DTYPES if dtype in chosen), "batch": batches}
    for key in sizes_of(source):
        text = _text(*SIZES[key], key=key, places=places)
        values[key] = text
    if mode.generates:
        values["new"] = _text("New tokens", NEW_HELP, key="new", placeholder="512", places=places)
        values["cache"] = _choose("KV cache", CACHES, key="cache", help=CACHE_HELP)
    return values


def _ask_device(source: Source, mode: Mode, for_device: bool, places: Places) -> dict[str, str]:
    """Return the values of the device and of the parallelism keys."""
    values = {"gpu": _ask_gpu(places) if for_device else _gpu()}
    if mode.serves:
        return values
    # a page without a choice of devices keeps the ranks of its question
    asked = for_device or st.session_state["parallel"] != "none"
    if _on_cuda(values["gpu"]) and asked:
        values |= _ask_ranks(source, mode, places)
    return values


def _ask_task(source: Source, task: Task, places: Places) -> dict[str, str]:
    """Return the trained part, the optimizer and the layout of the weights."""
    mode = MODES[task.mode]
    values = _ask_trained_part(source, task, places) if mode.trains else {}
    if source.trace is not None:
        values |= fields.ask_frames()
    if source.trace is not None and not mode.trains:
        return values | fields.ask_call()
    if "weights" not in source.refuses and values.get("train", "adapter") == "adapter":
        titles = {key: row.title for key, row in WEIGHTS.items()}
        values["weights"] = st.selectbox("Weights", list(titles), format_func=title_formatter(titles), key="weights", **KEEP)
        places.leave("weights", "Weights")
    if "optimizer" not in mode.unused:
        values["optimizer"] = st.selectbox("Optimizer", list(OPTIMIZERS), key="optimizer", **KEEP)
        places.leave("optimizer", "Optimizer")
    if "checkpointing" not in mode.unused:
        st.toggle(
            "Activation checkpointing", key="checkpointing", help="Recompute activations in the backward pass.", **KEEP
        )
        values["checkpointing"] = "01"[st.session_state["checkpointing"]]
        places.leave("checkpointing", "Activation checkpointing")
    return values


def _ask_more(source: Source, mode: Mode, asked: Mapping[str, str], for_device: bool, places: Places) -> dict[str, str]:
    """Return the values of rarely changed options. `asked` holds the values of the fields above."""
    values: dict[str, str] = {}
    with st.expander("More options"):
        if "optimizer_impl" not in mode.unused:
            values["optimizer_impl"] = _ask_implementation(asked["optimizer"])
            places.leave("optimizer_impl", "Optimizer implementation")
        if mode.trains:
            values["accumulate"] = _text(
                "Accumulated passes", ACCUMULATE_HELP, key="accumulate", placeholder="1", places=places
            )
            chosen = _choose("Outputs in the backward pass", (EITHER, *OUTPUTS), key="outputs", help=OUTPUTS_HELP)
            values["outputs"] = "" if chosen == EITHER or asked.get("pp", "1") not in ("", "1") else chosen
        if "attention" not in source.refuses:
            values["attention"] = _choose("Attention", ATTENTIONS, key="attention", format_func=title_formatter(ATTENTION_TITLES))
        if "inputs" not in source.refuses and (may_read_images_or_sound(source) or st.session_state["inputs"] != ALL):
            values["inputs"] = _choose("Inputs", INPUTS, key="inputs", help=INPUTS_HELP)
        if "head" not in source.refuses:
            head_help = "A transformers class, for example LlamaForCausalLM."
            values["head"] = _text("Head", head_help, key="head", places=places)
        if for_device:
            values["torch"] = _text("PyTorch", TORCH_HELP, key="torch", placeholder="the installed one", places=places)
        if _on_cuda(asked["gpu"]):
            st.toggle("Expandable segments", key="expandable", help=EXPANDABLE_HELP, **KEEP)
            values["expandable"] = "01"[st.session_state["expandable"]]
        if not values.keys() & {"optimizer_impl", "attention", "torch", "expandable"}:
            st.caption(f"There are no more options for inference with a {source.title} model on this device.")
    return values


def _ask_trained_part(source: Source, task: Task, places: Places) -> dict[str, str]:
    """Return the trained part of the model, and the values of the adapter's fields."""
    may_have_tower = may_read_images_or_sound(source) or st.session_state["train"] == WITHOUT_TOWER
    left_out = () if may_have_tower else (WITHOUT_TOWER,)
    trains = tuple(
        part for part in task.trains if part not in left_out and (source.trace is None or part in TRAINS_OF_DENOISERS)
    )
    if st.session_state["train"] not in trains:
        language = source.package == "transformers"
        st.session_state["train"] = next(iter(trains if language else reversed(trains)))
    values = {"train": trains[0]}
    if len(trains) > 1:
        values = {"train": _choose("Train", trains, key="train", format_func=title_formatter(TRAINS))}
    if values["train"] != "adapter":
        return values
    titles = {key: row.title for key, row in ADAPTERS.items()}
    values["adapter"] = st.selectbox("Adapter", list(titles), format_func=title_formatter(titles), key="adapter", **KEEP)
    row = ADAPTERS[values["adapter"]]
    offered = {key: field for key, field in ADAPTER_FIELDS.items() if key in row.arguments}
    for key, (label, help_text, placeholder) in offered.items():
        label = "Virtual tokens" if key == "r" and row.learns_prompt else label
        values[key] = _text(label, help_text, key=key, placeholder=placeholder, places=places)
    return values


def _ask_ranks(source: Source, mode: Mode, places: Places) -> dict[str, str]:
    """Show the choice of parallelism and its fields, and return their values."""
    of_use = {
        key: mode.trains or key == "none" or (row.generates if mode.generates else row.infers)
        for key, row in PARALLELS.items()
    }
    titles = {key: row.title for key, row in PARALLELS.items() if of_use[key]}
    if st.session_state["parallel"] not in titles:
        st.session_state["parallel"] = "none"
    chosen = st.selectbox("GPUs", list(titles), format_func=title_formatter(titles), key="parallel", help=PARALLEL_HELP, **KEEP)
    values = {"parallel": chosen}
    for key in PARALLELS[chosen].keys:
        if not _is_asked(key, values, source, mode):
            continue
        if key == "schedule":
            values[key] = _choose("Schedule", list(SCHEDULES), key=key, format_func=lambda key: SCHEDULES[key].title)
        elif key in PARALLEL_SWITCHES:
            label, help_text = PARALLEL_SWITCHES[key]
            values[key] = "01"[st.toggle(label, help=help_text, key=key, **KEEP)]
        else:
            label, help_text, placeholder = PARALLEL_FIELDS[key]
            values[key] = _text(label, help_text, key=key, placeholder=placeholder, places=places)
    return values


def _is_asked(key: str, values: dict[str, str], source: Source, mode: Mode) -> bool:
    """Return True if the form shows this parallelism key, given the values of the fields above."""
    if key in OF_DEGREES and values.get(OF_DEGREES[key], "") in ("", "1"):
        return False
    of_steps = ("lp", "cp", "pp", "sp") if mode.generates else ("lp", "cp", "pp")
    return key not in source.refuses and (mode.trains or key not in of_steps)


def _on_cuda(gpu: str) -> bool:
    return is_custom(gpu) or GPUS[gpu].backend == "cuda"


def _ask_gpu(places: Places) -> str:
    """Show the choice of a device, with two fields for a custom one, and return its key."""
    chosen = st.selectbox("Device", OPTIONS, format_func=device_title, key="gpu", help=DEVICE_HELP, **KEEP)
    if chosen == CUSTOM:
        memory, capability = st.columns(2)
        memory.text_input("Memory", key="gpu_memory", help=MEMORY_HELP, **KEEP)
        capabilities = [format_capability(one) for one in CAPABILITIES]
        capability.selectbox("Compute capability", capabilities, key="gpu_capability", **KEEP)
    places.leave("gpu", "Device")
    return _gpu()


def _gpu() -> str:
    state = st.session_state
    return (
        f"{CUSTOM}:{state['gpu_memory'].strip()}@{state['gpu_capability']}" if state["gpu"] == CUSTOM else state["gpu"]
    )


def _ask_implementation(optimizer: str) -> str:
    options = (PYTORCHS_DEFAULT, *OPTIMIZERS[optimizer].implementations)
    if st.session_state["optimizer_impl"] not in options:
        st.session_state["optimizer_impl"] = PYTORCHS_DEFAULT
    chosen = st.selectbox("Optimizer implementation", options, key="optimizer_impl", **KEEP)
    return "" if chosen == PYTORCHS_DEFAULT else chosen


def _choose(label: str, options: Sequence[str], **arguments: object) -> str:
    return st.segmented_control(label, options, required=True, width="stretch", **arguments, **KEEP)


def _text(label: str, help_text: str, *, key: str, places: Places, placeholder: str = MODELS_DEFAULT) -> str:
    """Show a field with a place for its error below, and return its text."""
    text = st.text_input(label, key=key, placeholder=placeholder, help=help_text, **KEEP).strip()
    places.leave(key, label)
    return text


ADAPTER_FIELDS = {  # label, help and placeholder, by key of the query
    "r": ("Rank", "Rank of the adapter's matrices.", "16"),
    "alpha": ("Alpha", "The adapter's output is scaled by alpha / rank.", "2 × the rank"),
    "targets": (
        "Adapted layers",
        f"{ALL_LINEAR}, {ATTENTION}, or names of modules, separated by commas.",
        MODELS_DEFAULT,
    ),
    "adapter_dropout": ("Dropout", "Dropout of the adapter's input, from 0 to below 1.", "0"),
}
PARALLEL_FIELDS = {  # label, help and placeholder, by key of the query
    "ranks": ("Ranks", "Data-parallel size; with HSDP the size of a shard group.", "8"),
    "replicate": ("Groups", "Number of HSDP's replica groups. Each group holds a copy of the weights.", "1"),
    "reshard": ("Reshard", "FSDP2's reshard_after_forward: 1, 0, or the size of a smaller group.", "1"),
    "tp": ("Tensor parallel", "Number of GPUs that split each matrix and share a batch.", "1"),
    "cp": ("Context parallel", "Number of GPUs that split each sequence. The batch is that of all of them.", "1"),
    "pp": ("Pipeline parallel", "Number of pipeline stages. Each GPU holds the layers of one stage.", "1"),
    "microbatch": ("Microbatch", "Samples in each microbatch of the pipeline.", "1"),
    "rank": ("Rank", "Rank to report, from 0.", "the rank with the highest peak"),
}
# These fields are shown if the degree is more than 1.
OF_DEGREES = {"sp": "tp", "lp": "tp", "schedule": "pp", "microbatch": "pp"}
PARALLEL_SWITCHES = {  # label and help
    "offload": ("Offload to the host", "FSDP2's CPUOffloadPolicy: parameters, gradients and optimizer state."),
    "sp": ("Sequence parallel", "Shard activations outside tensor-parallel layers along the sequence."),
    "lp": ("Loss parallel", "Keep logits split along the vocabulary across the tensor-parallel ranks."),
}
PARALLEL_HELP = "How several GPUs share the work. Every figure is then that of one GPU."
ACCUMULATE_HELP = "Forward and backward passes for each optimizer step. Their gradients are summed."
OUTPUTS_HELP = (
    "freed: no variable keeps the model's outputs, as in transformers' Trainer. kept: out = model(**batch); out.loss.backward(). "
    "either: figures as freed, and a range that covers both."
)
INPUTS_HELP = "text: a model that also reads images or sound gets text only."
EXPANDABLE_HELP = "PYTORCH_ALLOC_CONF=expandable_segments:True. Segments can grow, which reduces fragmentation."
NEW_HELP = "Tokens generated for each sequence. The prompt has the sequence length."
CACHE_HELP = (
    "transformers' cache_implementation. dynamic grows with each token; static is allocated once for all tokens; offloaded keeps "
    "all layers on the host except the running one; quantized holds all but the last tokens in 4 bits, by optimum-quanto."
)
DEVICE_HELP = "Type a name, a memory such as 8 GB, or laptop. For a device that is not listed, choose the first entry."
MEMORY_HELP = "Memory as PyTorch reports it, such as 24GiB or 24084MiB: torch.cuda.get_device_properties(0).total_memory."
TORCH_HELP = f"PyTorch version of the allocator's and kernels' rules: {format_version(OLDEST)} or newer."
DTYPE_HELP = (
    "float32, bfloat16 and float16 cast the whole model. amp-bfloat16 and amp-float16 keep float32 weights and run the forward "
    "pass under autocast; amp-float16 adds a gradient scaler."
)
