"""How every chart is drawn: its words in a colour that stands out from the theme's background, 4.5 to 1 and better."""

from __future__ import annotations

import altair as alt
import streamlit as st

WORDS = {"light": "#565E67", "dark": "#B4BCC5"}  # Streamlit's own axis labels have 3.7 to 1 on white


def draw(chart: alt.Chart | alt.LayerChart, key: str) -> None:
    """Show a chart with its axes' labels, legends and texts in the colour for words. The chart is changed."""
    colour = WORDS.get(st.context.theme.type or "", WORDS["light"])
    named = {"labelColor": colour, "titleColor": colour}
    if chart.config is alt.Undefined:
        chart.config = alt.Config()
    # In place: each method of Altair that configures a chart copies it, and all layers of it.
    chart.config.axis, chart.config.legend = alt.AxisConfig(**named), alt.LegendConfig(**named)
    chart.config.text = alt.MarkConfig(color=colour)
    st.altair_chart(chart, key=key)
