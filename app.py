"""Sizer's pages. Run with `streamlit run app.py`."""

from __future__ import annotations

import streamlit as st

from sizer.ui import frame, hosting, preview, surface, turns

# Three bars under a line: memory under a capacity. Inline, so that the browser requests it from no other host.
ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><g fill="#0B63A8">'
    '<path d="M1 2h14v1.4H1z"/><path d="M2 10h3v5H2z"/><path d="M6.5 7.5h3V15h-3z"/><path d="M11 5h3v10h-3z"/></g></svg>'
)

# The app's name and logo, in a blue that is legible on white and on near-black.
NAME = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 66 16"><title>Sizer</title><g fill="#2878B8">'
    '<path d="M1 2h14v1.4H1z"/><path d="M2 10h3v5H2z"/><path d="M6.5 7.5h3V15h-3z"/><path d="M11 5h3v10h-3z"/>'
    '<text x="21" y="14" font-family="sans-serif" font-weight="600" font-size="16">Sizer</text></g></svg>'
)


def show() -> None:
    """Show the requested page, within the frame of every page."""
    # before the navigation: the browser would first fetch its page's icon, from fonts.gstatic.com, for the tab
    st.set_page_config(page_title="Sizer", page_icon=ICON, layout="wide")
    st.logo(NAME, size="large")
    page = st.navigation(
        [
            st.Page("pages/estimate.py", title="Size a model", icon=":material/straighten:", default=True),
            st.Page("pages/compare.py", title="Compare", icon=":material/compare_arrows:"),
            st.Page("pages/measure.py", title="Measure", icon=":material/speed:"),
            st.Page("pages/ledger.py", title="Ledger", visibility="hidden"),
            st.Page("pages/devices.py", title="Devices", icon=":material/memory:"),
            st.Page("pages/numbers.py", title="About the numbers", icon=":material/menu_book:"),
        ],
        position="top",
    )
    st.set_page_config(page_title=f"{page.title} · Sizer")
    frame.enter()
    with turns.drawing():
        page.run()


if __name__ == "__main__":  # as Streamlit runs this file, for each visitor
    show()
else:  # as its server imports this file, once
    app = st.App(
        __file__,
        routes=[*preview.routes(), *hosting.routes(), *hosting.endpoint_routes()],
        lifespan=hosting.lifespan,
        middleware=surface.middleware(),
    )
