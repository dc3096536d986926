"""Fields of the form: names of devices, places for refused values below their fields, and the arguments of a pipeline's call.

Streamlit's select box sorts matches by the score of fzy, which prefers matches that begin a word. The memory is a word of its own:
"8 GB" finds "RTX 4060 · 8 GB" before "L40S · 48 GB".
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import streamlit as st
from streamlit.delta_generator import DeltaGenerator

from sizer.base.errors import Refusal
from sizer.catalogue.gpu_keys import CUSTOM
from sizer.catalogue.gpus import GPUS
from sizer.catalogue.pipelines import OFFLOADS, OPTIONAL_PARTS, PIPELINE_OUTPUTS, VAES, makes_images
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.ui.focus import title_formatter
from sizer.ui.form_model import KEEP

# -------------------------------------------------------------------------------------------------------- device choice


CUSTOM_TITLE = "Other: my custom device (memory, compute capability)"
OPTIONS = (CUSTOM, *GPUS)
_MEMORY = re.compile(r" \((?:a host with )?(\d+ Gi?B)\)$")


def device_title(key: str) -> str:
    """Return the title of a device in the form ("GeForce RTX 4060 · 8 GB")."""
    return CUSTOM_TITLE if key == CUSTOM else _MEMORY.sub(r" · \1", GPUS[key].name)


# --------------------------------------------------------------------------------------------------------- field errors


MARK = "not understood"


class Places:
    """Places for errors below the form's fields, by key of the query. Make one for each run of the form."""

    def __init__(self) -> None:
        self._places: dict[str, tuple[str, DeltaGenerator]] = {}

    def leave(self, key: str, label: str) -> None:
        """Reserve a place for the error of a key, below the field that was shown last and has this label."""
        self._places[key] = (label, st.empty())

    def show(self, refusals: Iterable[Refusal]) -> None:
        """Show each refusal below its field. A stranger's text is never rendered as markdown."""
        for refusal in refusals:
            label, place = self._places.get(refusal.key, ("", None))
            if place is not None:
                with place.container(border=True, gap=None):
                    st.badge(f"{label}: {MARK}", icon=":material/error:", color="red")
                    todo = refusal.todo.replace(f"{refusal.key}=", "")  # a field holds the value alone
                    st.text(f"{refusal.given} is not understood. Allowed: {refusal.allowed}. {todo[:1].upper()}{todo[1:]}.")


USUAL = "the pipeline's own"
GUIDANCES = {"": USUAL, "1": "on", "0": "off"}
OFFLOAD_TITLES = {
    "none": "All parts on the device",
    "model": "Model offload",
    "sequential": "Sequential offload",
    "group-leaf": "Group offload, layer by layer",
    "group-block:1": "Group offload, block by block",
}
WEIGHTS_HELP = "nf4, nf4-dq, int8 or fp8-cast of the denoiser, or by part: transformer:nf4,text_encoder_2:nf4."
OFFLOAD_HELP = "diffusers' own offloading to the host's memory."
STREAM_HELP = "Group offload copies weights ahead of their use, on a separate CUDA stream."
_FIELDS = ("offload", "weights", "frames", "guidance", "output")


def fill_call(request: Request) -> None:
    """Set the fields to a request's values."""
    state = st.session_state
    for key in _FIELDS:
        row = KEYS[key]
        state[f"pipe_{key}"] = "" if row.is_default(request) else row.write(request) or ""
    state["pipe_offload"] = request.offloading
    state["pipe_output"] = request.output or USUAL
    state["pipe_vae"], state["pipe_without"] = list(request.vae or ()), list(request.without or ())
    state["pipe_stream"] = request.stream


def call_facts(request: Request) -> Iterator[str]:
    """Yield the facts of a pipeline's call for the one-line question."""
    if request.frames is not None:
        yield f"{request.frames:,} frames"
    if request.part_weights:
        yield f"weights {KEYS['weights'].write(request)}"
    if request.offloading != OFFLOADS[0]:
        yield OFFLOAD_TITLES.get(request.offloading, request.offloading).lower()
    if request.stream:
        yield "separate stream"
    yield from (f"VAE {how}" for how in request.vae or ())
    if request.guidance is not None:
        yield f"guidance {GUIDANCES[str(int(request.guidance))]}"
    if request.output is not None:
        yield f"returns {request.output}"
    yield from (f"without {part}" for part in request.without or ())


def ask_frames() -> dict[str, str]:
    """Return the number of frames. Presets that make images have no field, unless a link has set the value."""
    if makes_images(st.session_state.get("diffusers_name", "")) and not st.session_state["pipe_frames"]:
        return {}
    return {"frames": st.text_input("Frames", key="pipe_frames", placeholder=USUAL, help=KEYS["frames"].allowed, **KEEP)}


def ask_call() -> dict[str, str]:
    """Show the fields of a call, and return their values by key; empty values are defaults."""
    options = list(dict.fromkeys((*OFFLOADS, "group-block:1", st.session_state["pipe_offload"])))
    offload = st.selectbox(
        "Offloading", options, key="pipe_offload", help=OFFLOAD_HELP, format_func=title_formatter(OFFLOAD_TITLES), **KEEP
    )
    values = {"offload": "" if offload == OFFLOADS[0] else offload}
    if offload.startswith("group"):
        values["stream"] = "01"[st.toggle("Separate stream", key="pipe_stream", help=STREAM_HELP, **KEEP)]
    values["weights"] = st.text_input(
        "Quantized parts", key="pipe_weights", placeholder="none", help=WEIGHTS_HELP, **KEEP
    ).strip()
    values["vae"] = ",".join(st.pills("VAE", VAES, selection_mode="multi", key="pipe_vae", help=KEYS["vae"].allowed, **KEEP))
    with st.expander("More options of the call"):
        choices = {"format_func": title_formatter(GUIDANCES), "help": KEYS["guidance"].allowed, "required": True}
        values["guidance"] = st.segmented_control("Guidance", GUIDANCES, key="pipe_guidance", **choices, **KEEP)
        output = st.selectbox("Output", (USUAL, *PIPELINE_OUTPUTS), key="pipe_output", help=KEYS["output"].allowed, **KEEP)
        values["output"] = "" if output == USUAL else output
        values["without"] = ",".join(
            st.multiselect("Without", OPTIONAL_PARTS, key="pipe_without", help=KEYS["without"].allowed, **KEEP)
        )
    return values
