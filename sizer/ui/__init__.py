"""Pages of the app: widgets, headline, charts, tables, links. Imports Streamlit, `sizer.report`, `sizer.service`; never torch."""
