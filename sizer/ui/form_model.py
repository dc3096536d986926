"""Model of the form: a widget for each kind of source, and the changes to other fields if another model is chosen."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import streamlit as st

from sizer.base.config_json import MAX_CONFIG_BYTES, query_of_adapter
from sizer.base.errors import ConfigError, RequestError, SizerError
from sizer.base.units import MIB
from sizer.catalogue.modes import task_of
from sizer.catalogue.pipelines import makes_images
from sizer.catalogue.presets import PRESETS, find_preset
from sizer.catalogue.sources import Source
from sizer.query.text import parse_query
from sizer.ui.focus import look_at, title_formatter
from sizer.ui.remarks import show_error

Names = Mapping[str, Sequence[str]]

EXAMPLE_NAME = "resnet50"  # torchvision and timm both build it
UPLOAD_REFUSED = "upload_refused"  # session state: the fault of the last file
UNKNOWN = "unknown_preset"  # session state: the error for the last typed name
SIZES = {
    "seq": ("Sequence length", "Tokens of each sample, or frames for audio models."),
    "image": ("Image size", "Pixels: 224, or height x width as in 224x320."),
}
SIZES_OF_MODALITY = {"text": ("seq",), "seq2seq": ("seq",), "audio": ("seq",), "image": ("image",), "series": ()}
KEEP = {"persist_state": "session"}  # widgets that are hidden or on another page keep their values


def ask_model(source: Source, names: Names) -> str:
    """Show the field of a source's model, and return a name or a config's text; empty until one is given.

    `names` are the names that packages build, by source.
    """
    return _ASK[source.entry](source, names)


def sizes_of(source: Source) -> list[str]:
    """Return the sizes of a sample that have a field: those of the architecture, and those that a link has set."""
    known = _sizes_of_preset() if source.entry == "presets" else SIZES
    return [key for key in SIZES if key not in source.refuses and (key in known or st.session_state.get(key))]


def may_read_images_or_sound(source: Source) -> bool:
    """Return True if the chosen model may have a vision or audio tower. For presets it is known; other transformers models may."""
    if source.entry == "presets":
        return PRESETS[st.session_state["hf_name"]].modality not in SIZES_OF_MODALITY
    return source.package == "transformers"


def _sizes_of_preset() -> Collection[str]:
    return SIZES_OF_MODALITY.get(PRESETS[st.session_state["hf_name"]].modality, SIZES)


def forget(keys: Iterable[str] = ("seq", "image", "head", "classes", "trainable_layers")) -> None:
    """Reset the choices that depend on the architecture, and the selected cell."""
    for key in keys:
        st.session_state[key] = ""
    look_at(None)


def _forget_what_does_not_fit() -> None:
    forget(["head", *(key for key in SIZES if key not in _sizes_of_preset())])


def _forget_frames() -> None:
    forget(["pipe_frames"] if makes_images(st.session_state.get("diffusers_name", "")) else [])


def _ask_name(source: Source, names: Names) -> str:
    key = f"{source.key}_name"
    st.session_state.setdefault(key, EXAMPLE_NAME)
    options = sorted({*names.get(source.key, ()), st.session_state[key]})
    return st.selectbox("Model", options, key=key, on_change=_forget_frames, accept_new_options=True, **KEEP)


def _ask_preset(source: Source, names: Names) -> str:
    state = st.session_state
    state.setdefault("hf_name", next(iter(PRESETS)))
    titles = {key: preset.title for key, preset in PRESETS.items()}
    chosen = st.selectbox(
        "Model",
        list(titles),
        format_func=title_formatter(titles),
        key="hf_name",
        on_change=_take_preset,
        args=(state["hf_name"],),
        accept_new_options=True,
        placeholder="a title, or a name on the hub",
        **KEEP,
    )
    if (error := state.get(UNKNOWN)) is not None:
        show_error(error)
    return chosen


def _take_preset(before: str) -> None:
    """Read a typed name as a preset or as a repository of the hub. Keep the model `before` if it is neither."""
    state = st.session_state
    state.pop(UNKNOWN, None)
    typed, state["hf_name"] = (state["hf_name"] or before).strip(), before
    owner, _, name = typed.rpartition("/")
    try:
        preset = find_preset(name)
    except RequestError as error:
        preset, state[UNKNOWN] = None, error
    if owner and (preset is None or preset.hub_id.lower() != typed.lower()):
        state.pop(UNKNOWN, None)
        state["source"], state["hub_name"] = "hub", typed
    elif preset is not None and preset.key != before:
        state["hf_name"] = preset.key
        _forget_what_does_not_fit()


def _ask_repository(source: Source, names: Names) -> str:
    where = "Its config.json is fetched, nothing else. A revision is a branch, a tag or a commit."
    return st.text_input(
        "Repository",
        key="hub_name",
        placeholder="org/name, org/name@revision or its address",
        help=where,
        on_change=look_at,
        args=(None,),
        **KEEP,
    )


def _ask_config(source: Source, names: Names) -> str:
    limit = MAX_CONFIG_BYTES // MIB
    st.file_uploader(
        "Upload config.json", type=["json", "yaml", "yml"], key="config_file", max_upload_size=limit, on_change=_take_upload
    )
    text = st.text_area(
        "or paste it",
        key="config_name",
        height=180,
        placeholder='{"model_type": "llama", "hidden_size": 4096, …}',
        on_change=_take_text,
        **KEEP,
    )
    if given := st.session_state.get(UPLOAD_REFUSED):
        show_error(ConfigError("the uploaded file was not read", given=given, allowed="JSON or YAML in UTF-8, at most 2 MiB"))
    return text


def _take_upload() -> None:
    """Move an uploaded file's text into the text area, for the reader to see and change."""
    _forget_upload()
    upload = st.session_state["config_file"]
    if upload is None:
        return
    st.session_state["config_name"] = ""
    try:
        if upload.size > MAX_CONFIG_BYTES:
            st.session_state[UPLOAD_REFUSED] = f"{upload.size:,} bytes"
        else:
            st.session_state["config_name"] = upload.getvalue().decode("utf-8-sig")
            _take_adapter()
    except UnicodeDecodeError:
        st.session_state[UPLOAD_REFUSED] = "bytes that are not UTF-8"


def _take_text() -> None:
    _forget_upload()
    _take_adapter()


def _take_adapter() -> None:
    """Fill the form with the base model and the adapter if the text is an adapter_config.json that names a repository."""
    state = st.session_state
    try:
        query = query_of_adapter(state["config_name"])
        request = parse_query(query) if query else None
    except SizerError:  # the form then shows the error
        return
    if request is None:
        return
    state["source"], state["hub_name"], state["mode"] = request.source, request.name, task_of(request.mode, request.train)
    state["train"], state["adapter"] = request.train, request.adapter
    state["r"], state["alpha"] = str(request.adapter_rank), str(request.adapter_alpha or "")
    state["targets"], state["adapter_dropout"] = ",".join(request.adapter_targets), f"{request.adapter_dropout:g}"


def _forget_upload() -> None:
    look_at(None)
    st.session_state.pop(UPLOAD_REFUSED, None)


_ASK = {"names": _ask_name, "presets": _ask_preset, "repository": _ask_repository, "config": _ask_config}
