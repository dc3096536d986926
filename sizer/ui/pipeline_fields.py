"""Fields of the form for a diffusion pipeline's call: offloading, quantised parts and outputs."""

from __future__ import annotations

from collections.abc import Iterator

import streamlit as st

from sizer.catalogue.pipelines import OFFLOADS, OPTIONAL_PARTS, PIPELINE_OUTPUTS, VAES, makes_images
from sizer.query.keys import KEYS
from sizer.query.request import Request
from sizer.ui.focus import titled
from sizer.ui.form_model import KEEP

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


def fill(request: Request) -> None:
    """Set the fields to a request's values."""
    state = st.session_state
    for key in _FIELDS:
        row = KEYS[key]
        state[f"pipe_{key}"] = "" if row.is_default(request) else row.write(request) or ""
    state["pipe_offload"] = request.offloading
    state["pipe_output"] = request.output or USUAL
    state["pipe_vae"], state["pipe_without"] = list(request.vae or ()), list(request.without or ())
    state["pipe_stream"] = request.stream


def facts(request: Request) -> Iterator[str]:
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


def ask() -> dict[str, str]:
    """Show the fields of a call, and return their values by key; empty values are defaults."""
    options = list(dict.fromkeys((*OFFLOADS, "group-block:1", st.session_state["pipe_offload"])))
    offload = st.selectbox(
        "Offloading", options, key="pipe_offload", help=OFFLOAD_HELP, format_func=titled(OFFLOAD_TITLES), **KEEP
    )
    values = {"offload": "" if offload == OFFLOADS[0] else offload}
    if offload.startswith("group"):
        values["stream"] = "01"[st.toggle("Separate stream", key="pipe_stream", help=STREAM_HELP, **KEEP)]
    values["weights"] = st.text_input(
        "Quantised parts", key="pipe_weights", placeholder="none", help=WEIGHTS_HELP, **KEEP
    ).strip()
    values["vae"] = ",".join(st.pills("VAE", VAES, selection_mode="multi", key="pipe_vae", help=KEYS["vae"].allowed, **KEEP))
    with st.expander("More options of the call"):
        told = {"format_func": titled(GUIDANCES), "help": KEYS["guidance"].allowed, "required": True}
        values["guidance"] = st.segmented_control("Guidance", GUIDANCES, key="pipe_guidance", **told, **KEEP)
        output = st.selectbox("Output", (USUAL, *PIPELINE_OUTPUTS), key="pipe_output", help=KEYS["output"].allowed, **KEEP)
        values["output"] = "" if output == USUAL else output
        values["without"] = ",".join(
            st.multiselect("Without", OPTIONAL_PARTS, key="pipe_without", help=KEYS["without"].allowed, **KEEP)
        )
    return values
