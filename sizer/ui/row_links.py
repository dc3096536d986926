"""Tables whose rows are questions: each with its link, and the table as CSV."""

from __future__ import annotations

import pandas as pd
import streamlit as st

from sizer.report.table import write_csv
from sizer.ui.links import LONGEST_ADDRESS

LINK = "Link"  # the column's name
LINK_COLUMN = st.column_config.LinkColumn(display_text="open", width="small")


def link_of(query: str) -> str:
    """Return the address of the page that answers a query; empty if it is too long to pass on."""
    return f"{(st.context.url or '').rstrip('/')}/?{query}" if len(query) <= LONGEST_ADDRESS else ""


def frame_csv(frame: pd.DataFrame) -> str:
    """Return a table as CSV, without spaces in the names of columns; sizes are in GiB as in the table."""
    rows = frame.astype(object).where(frame.notna(), None)
    names = [str(name).lower().replace(" ", "_").replace(",", "") for name in rows.columns]
    return write_csv(names, (dict(zip(names, row, strict=True)) for row in rows.itertuples(index=False)))
