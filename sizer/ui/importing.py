"""What another machine measured, brought into the ledger from a file."""

from __future__ import annotations

import streamlit as st

from sizer.base.errors import JobError, RequestError, SizerError
from sizer.base.units import MIB
from sizer.device.ledger.ledger import ImportResult
from sizer.ui import machine, remarks
from sizer.ui.measuring import compare, working

LIMIT_MIB = 16  # some three hundred comparisons; the server lets no larger file in (.streamlit/config.toml)
# Session state, each with the page's name behind it:
WAITING = "import_waiting"  # the text of a file, from its arrival to the run that reads it
DONE = "import_done"  # what became of the last file: ImportResult, or the error that refused it
EDITION = "import_edition"  # how many files there were; each gets a widget of its own, so that it is read once
SWITCHED_OFF = "Importing is disabled in this deployment, which strangers use: its ledger holds what was measured here."
TITLES = remarks.TITLES | {RequestError: "This file was not imported", JobError: "The file was not imported whole"}


def ask_import(page: str) -> ImportResult | None:
    """What became of a file that has just arrived; None where there is none. What was refused is shown until the next one."""
    if not machine.may_import():
        st.info(SWITCHED_OFF)
        return None
    edition = st.session_state.setdefault(f"{EDITION}_{page}", 0)
    key = f"import_{page}_{edition}"
    st.file_uploader(
        "Import a measurement (JSON)",
        type=["json", "jsonl"],
        key=key,
        on_change=_take,
        args=(page, key),
        max_upload_size=LIMIT_MIB,
        help="What `python -m sizer measure … --json` or the suite wrote, or another ledger's export.",
    )
    imported = _read(page) if f"{WAITING}_{page}" in st.session_state else None
    _show_outcome(page)
    return imported


def _take(page: str, key: str) -> None:
    """Put an uploaded file's text aside for this run, and the widget with it."""
    upload = st.session_state[key]
    if upload is None:
        return
    st.session_state[f"{EDITION}_{page}"] += 1
    st.session_state.pop(f"{DONE}_{page}", None)
    try:
        if upload.size > LIMIT_MIB * MIB:
            raise RequestError("the file is too large", given=f"{upload.size:,} bytes", allowed=f"{LIMIT_MIB} MiB")
        st.session_state[f"{WAITING}_{page}"] = upload.getvalue().decode("utf-8-sig")
    except UnicodeDecodeError:
        st.session_state[f"{DONE}_{page}"] = RequestError(
            "the file was not read", given="bytes that are not UTF-8", allowed="JSON"
        )
    except RequestError as error:
        st.session_state[f"{DONE}_{page}"] = error


def _read(page: str) -> ImportResult | None:
    text = st.session_state.pop(f"{WAITING}_{page}")
    try:
        with working(st.empty(), "Reading the file") as line:
            imported = machine.get_ledger().import_json(text, compare=lambda measured: compare(measured, line))
    except SizerError as error:
        st.session_state[f"{DONE}_{page}"] = error
        return None
    st.session_state[f"{DONE}_{page}"] = imported
    return imported


def _show_outcome(page: str) -> None:
    match st.session_state.get(f"{DONE}_{page}"):
        case SizerError() as error:
            remarks.show_error(error, TITLES)
        case ImportResult(added=added, known=known, refused=refused):
            st.success(f"{_count(len(added))} added to the ledger, {known:,} known already.")
            if refused:
                st.warning(f"{_count(len(refused))} refused.")
                remarks.show_lines(refused)


def _count(number: int) -> str:
    return "1 comparison was" if number == 1 else f"{number:,} comparisons were"
