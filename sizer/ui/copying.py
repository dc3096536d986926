"""A button that copies the complete link in one click, and says that it did."""

from __future__ import annotations

from html import escape

import streamlit as st

KEY = "copy_link"  # of the button
# Copies within the event of the click: later, a browser may refuse it. Plain HTTP has no clipboard API, except on loopback.
# The policy of scripts (sizer/ui/surface.py) knows this text by its hash.
COPY = """(() => {
  if (window.sizerCopies) return;
  window.sizerCopies = true;
  const old = text => {
    const area = document.createElement("textarea");
    area.value = text;
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    if (!done) throw new Error("refused");
  };
  document.addEventListener("click", async event => {
    const button = event.target.closest(".st-key-copy_link button");
    if (!button) return;
    const link = document.querySelector("[data-sizer-link]");
    const said = document.querySelector("[data-sizer-said]");
    const text = location.origin + location.pathname + "?" + link.dataset.sizerLink;
    try {
      await (navigator.clipboard ? navigator.clipboard.writeText(text) : old(text));
      said.textContent = "Link copied.";
    } catch {
      said.textContent = "The browser refused: copy the link from the tab below.";
    }
    setTimeout(() => { said.textContent = ""; }, 5000);
  });
})()"""


def offer_link(query: str) -> None:
    """Show the button that copies the link of this page with a query; nothing if the query is empty."""
    if not query:
        return
    st.button("Copy the link", key=KEY, icon=":material/link:", type="tertiary")
    words = f'<span hidden data-sizer-link="{escape(query)}"></span><span role="status" data-sizer-said="1"></span>'
    st.html(f"{words}<script>{COPY}</script>", unsafe_allow_javascript=True, width="content")
