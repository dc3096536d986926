"""The question as text: one line above its answer, the title of the browser's tab, names of files.

It may hold a stranger's text, such as the name of a repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.util import find_spec

import streamlit as st

from sizer.base.units import pluralize
from sizer.catalogue.adapters import trained_part
from sizer.catalogue.gpu_keys import find_gpu
from sizer.catalogue.modes import MODES, TEXT
from sizer.catalogue.parallel import PARALLELS, SCHEDULES, ways_to_split
from sizer.catalogue.sources import SOURCES
from sizer.catalogue.weights import WEIGHTS
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.ui import fields, links, server_view
from sizer.ui.styling import WIDE

EXAMPLES_KEY = "examples"  # of the row of examples
EDIT = "edit_question"  # key of the button that opens the form
PRESSED = "edit_pressed"  # session state: how often the button was pressed
# Common questions, each a query of this page.
EXAMPLES = {
    "Train ResNet-50 on an RTX 4090": "arch=torchvision:resnet50&gpu=rtx-4090",
    "Fine-tune Llama 3.1 8B on 24 GB": "arch=hf:llama-3.1-8b&dtype=bfloat16&batch=1,2,4,8&seq=2048&gpu=rtx-4090",
    "QLoRA on 16 GB": "arch=hf:llama-3.1-8b&dtype=bfloat16&batch=1,2,4&seq=2048&optimizer=paged-adamw-8bit&checkpointing=1"
    "&gpu=rtx-4060-ti-16gb&train=adapter&weights=nf4-dq",
    "gpt-oss 20B, MXFP4, on 24 GB": "arch=hf:gpt-oss-20b&mode=generate&dtype=bfloat16&batch=1,2,4&seq=2048&gpu=rtx-4090",
    "Train Llama 3.1 70B on H100s": "arch=hf:llama-3.1-70b&dtype=bfloat16&batch=1&seq=4096&gpu=h100-80gb",
    "Serve Qwen3 8B on an H100": "arch=hf:qwen3-8b&mode=serve&gpu=h100-80gb&want=32x8192",
    "Generate with 32 users on an L40S": "arch=hf:llama-3.1-8b&mode=generate&dtype=bfloat16&batch=32&seq=2048&gpu=l40s",
    "How long a context on an H100": "arch=hf:llama-3.1-8b&mode=inference&dtype=bfloat16&batch=1&seq=32768&gpu=h100-80gb",
}
# Questions that need an optional package, by its name.
WITH_PACKAGES = {
    "diffusers": {
        "FLUX on 16 GB": "arch=diffusers:flux.1-dev&gpu=rtx-4060-ti-16gb&weights=transformer:nf4,text_encoder_2:nf4&offload=model",
        "LoRA of FLUX on 24 GB": "arch=diffusers:flux.1-dev&mode=training&batch=1,2&image=768x768&optimizer=adamw-8bit"
        "&checkpointing=1&gpu=rtx-4090&train=adapter&weights=nf4",
        "Wan 14B on 24 GB": "arch=diffusers:wan2.1-t2v-14b&gpu=rtx-4090&weights=nf4&offload=model",
    },
    "trl": {
        "DPO of an 8B with LoRA": "arch=hf:llama-3.1-8b&dtype=bfloat16&batch=1,2,4&seq=2048&checkpointing=1&gpu=l40s"
        "&train=adapter&objective=dpo",
        "GRPO of a 3B on 24 GB": "arch=hf:llama-3.2-3b&dtype=bfloat16&batch=8,16&seq=512&checkpointing=1&gpu=rtx-4090"
        "&train=adapter&objective=grpo",
    },
}
# The script policy (sizer/ui/surface.py) allows this text by its hash.
PRESS = "document.querySelector('[data-testid=stExpandSidebarButton]')?.click()"


def show_examples() -> None:
    """Show a button for each common question. Links to the current page would only last for one run (st.page_link, 1.67).

    In narrow windows the buttons are at the end of the page, after the answer.
    """
    with st.container(horizontal=True, gap="small", vertical_alignment="center", key=EXAMPLES_KEY):
        narrow = f"@media (max-width: {WIDE - 1}px) {{ div:has(> .st-key-{EXAMPLES_KEY}), .st-key-{EXAMPLES_KEY} {{ order: 9 }} }}"
        st.html(f"<style>{narrow}</style>")
        offered = dict(EXAMPLES)
        for package, examples in WITH_PACKAGES.items():
            offered |= examples if find_spec(package) else {}
        for title, query in offered.items():
            st.button(title, key=f"example {title}", on_click=links.replace_question, args=(query,))


def show_question(request: Request, *, for_device: bool = True) -> None:
    """Show the question in one line, and set the title of the browser's tab. Without `for_device` the line names no device."""
    st.set_page_config(page_title=tab_title(request) if for_device else f"Measure {model_name(request)} · Sizer")
    st.text(summary(request, for_device=for_device))


def offer_form() -> None:
    """Show a button that opens the form, in windows so narrow that Streamlit hides the sidebar."""
    with st.container(key=EDIT):
        st.html(f"<style>@media (min-width: {WIDE}px) {{ div:has(> .st-key-{EDIT}) {{ display: none }} }}</style>")
        if st.button("Edit the question", icon=":material/edit:"):
            _open_form()


def _open_form() -> None:
    """Press Streamlit's button for the sidebar. `st.set_page_config` has no effect after the sidebar was closed once."""
    times = st.session_state[PRESSED] = (
        st.session_state.get(PRESSED, 0) + 1
    )  # a new element each time, so that the script runs again
    st.html(f'<script data-times="{times}">{PRESS}</script>', unsafe_allow_javascript=True)


def tab_title(request: Request) -> str:
    """Return the title of the browser's tab ("resnet50 on A100 (80 GB) · Sizer")."""
    return f"{model_name(request)} on {find_gpu(request.gpu).name} · Sizer"


def model_name(request: Request) -> str:
    """Return the model as plain text: a known title, the given repository, or "config.json" for a config."""
    if title_of := SOURCES[request.source].title_of:
        return title_of(request.name)
    return request.name or "config.json"


def summary(request: Request, *, for_device: bool = True) -> str:
    """Return the question in one line, without defaults of the model or of PyTorch."""
    return " · ".join([*_facts(request), *([find_gpu(request.gpu).name] if for_device else [])])


def _facts(request: Request) -> Iterator[str]:
    mode = MODES[request.mode]
    yield model_name(request)
    yield mode.title
    if mode.serves:
        yield from server_view.facts(request)
        return
    yield ", ".join(request.dtypes)
    yield f"batch {', '.join(map(str, request.batches))}"
    if request.sequence_length is not None:
        yield pluralize(request.sequence_length, "token")
    if request.image_size is not None:
        yield f"{request.image_size[0]} × {request.image_size[1]} pixels"
    if request.inputs == TEXT:
        yield "text alone"
    if mode.generates:
        yield f"{pluralize(request.new, 'new token')}, {request.cache} cache"
    if "optimizer" not in mode.unused:
        yield f"{request.optimizer} {request.optimizer_impl or ''}".rstrip()
    if part := trained_part(request.train, request.adapter, request.adapter_rank):
        yield part
    if WEIGHTS[request.weights].quantizes:
        yield f"weights in {WEIGHTS[request.weights].title}"
    if request.accumulate > 1:
        yield f"{request.accumulate} accumulated passes"
    if request.outputs is not None:
        yield f"outputs {request.outputs}"
    if request.parallel != "none":
        data = (request.replicate, request.ranks) if request.data_ranks > 1 else ()
        ranks = [f"{number}" for number in (*data, request.cp, request.tp, request.pp) if number > 1] or ["1"]
        yield f"{PARALLELS[request.parallel].title} over {' × '.join(ranks)} ranks"
        if request.cp > 1:
            yield "context parallel"
        if request.sp or request.lp:
            yield ways_to_split(sp=request.sp, lp=request.lp)
    if request.pp > 1:
        yield f"{request.pp} stages, {SCHEDULES[request.schedule].title}, microbatch {request.microbatch}"
    if request.checkpointing and "checkpointing" not in mode.unused:
        yield "activation checkpointing"
    yield from fields.call_facts(request)
    for row in KEYS.values():
        if row.label and not row.is_default(request):
            value = row.write(request)
            on = row.toggles and value == "1"
            yield row.label[0].lower() + row.label[1:] if on and row.label[1:2].islower() else f"{row.label} {value}"


def file_stem(request: Request) -> str:
    """Return the beginning of a file's name for the question ("sizer-resnet50-training-rtx-4090")."""
    return slug(f"sizer-{request.name.rpartition('/')[2] or 'config'}-{request.mode}-{request.gpu}")


def slug(words: str) -> str:
    """Return words as a file name that every system allows."""
    return re.sub(r"[^a-z0-9.]+", "-", words.lower()).strip("-.")
