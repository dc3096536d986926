"""Widgets → values, headline, charts, tables, links. Imports Streamlit, `sizer.report` and `sizer.service`; never torch."""
