"""Widgets → values, headline, charts, tables, links. Imports Streamlit, `sizer.memory` and `sizer.service`; never torch."""
