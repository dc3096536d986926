"""Whatever a link says, it is a request or a refusal that names what is wrong; a request comes back from its own link."""

from __future__ import annotations

import json

from hypothesis import example, given
from hypothesis import strategies as st

from sizer.base.config_json import decode_config, encode_config
from sizer.base.errors import ConfigError, RequestError
from sizer.query.text import format_query, parse_query
from sizer.ui.links import read_link
from tests.fuzzing.strategies import queries

LONGEST_REFUSAL = 20_000  # characters: a page shows it


@given(queries() | st.text())
def test_a_link_is_a_request_or_a_refusal(text: str):
    try:
        request = parse_query(text)
    except RequestError as error:
        assert error.refusals or str(error).strip()
        assert all(refusal.allowed for refusal in error.refusals)
        assert len(str(error)) < LONGEST_REFUSAL
        return
    for complete in (False, True):
        query = format_query(request, complete=complete)
        assert parse_query(query) == request
        assert format_query(parse_query(query), complete=complete) == query


@example("tp=2&arch=hf:llama-3.1-8b")  # refused by optimizer_impl, which it does not have
@given(queries() | st.text())
def test_a_page_opens_at_any_link(text: str):
    link = read_link(text)
    assert parse_query(format_query(link.request)) == link.request


@given(st.text() | st.binary().map(lambda data: data.decode("latin-1")))
def test_a_config_in_a_link_is_a_config_or_a_refusal(text: str):
    try:
        decode_config(text)
    except ConfigError as error:
        assert str(error).strip()


@given(
    st.dictionaries(
        st.text(max_size=20, alphabet=st.characters(codec="utf-8")), st.integers(-(2**53), 2**53), max_size=8
    )
)
def test_a_config_comes_back_from_its_link(config: dict):
    text = json.dumps(config)
    assert decode_config(encode_config(text)) == text
