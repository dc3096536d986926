"""Whatever a config says, it is an architecture that the installed transformers reads, or a refusal with its reason."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sizer.architecture.guard import clean_config
from sizer.architecture.huggingface import read_architecture
from sizer.base.config_json import read_config
from sizer.base.errors import ConfigError
from tests.fuzzing.strategies import JSON, mutated_configs


@given(st.text() | st.binary() | JSON.map(json.dumps))
def test_a_text_is_a_config_or_a_refusal(text: str | bytes):
    try:
        assert isinstance(read_config(text), dict)
    except ConfigError as error:
        assert str(error).strip()


@pytest.mark.filterwarnings("ignore")  # transformers' words on what it was given
@given(mutated_configs())
def test_a_config_is_an_architecture_or_a_refusal(config: dict):
    try:
        read_architecture(clean_config(read_config(json.dumps(config))).config)
    except ConfigError as error:
        assert str(error).strip()
