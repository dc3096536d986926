"""The table of sources: every row is whole, and one whose package is missing says so."""

from __future__ import annotations

import re
import sys

import pytest

from sizer.architecture import make_blueprint
from sizer.base.errors import BuildError, RequestError
from sizer.catalogue import sources
from sizer.catalogue.sources import SOURCES, import_function, offered_sources
from sizer.query.keys import KEYS
from sizer.query.text import parse_query
from sizer.service.settings import preloaded

WITHOUT_TIMM = [source for source in SOURCES.values() if source.required]


@pytest.mark.parametrize("source", WITHOUT_TIMM, ids=lambda source: source.key)
def test_what_a_row_names_is_there(source: sources.Source):
    assert callable(import_function(source.blueprint))
    assert source.names is None or len(import_function(source.names)()) > 50
    assert set(source.refuses) <= set(KEYS)


@pytest.mark.parametrize("name", ["hf-hub:org/name", "local-dir:/etc", "../x", "resnet50.", "NoSuchNet"])
def test_names_of_timm_that_point_elsewhere_are_refused(name: str):
    with pytest.raises(RequestError, match="allowed a timm model name"):
        parse_query(f"arch=timm:{name}")


def test_timm_takes_no_keys_of_transformers():
    refused = r"^head: given 'Foo' with a timm architecture, allowed head with hf:, hub: or config:"
    with pytest.raises(RequestError, match=refused):
        parse_query("arch=timm:resnet50&head=Foo")


def test_what_is_not_installed_is_neither_offered_nor_preloaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    assert list(offered_sources()) == WITHOUT_TIMM
    assert "timm" not in preloaded() and "torchvision" in preloaded()
    monkeypatch.setattr(sources, "find_spec", lambda name: object())
    assert list(offered_sources()) == list(SOURCES.values())
    assert {"timm", "sizer.architecture.timm_models"} <= set(preloaded())


def test_without_timm_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "sizer.architecture.timm_models", raising=False)
    monkeypatch.setitem(sys.modules, "timm", None)
    text = "timm is not installed: given arch=timm:; pip install timm"
    with pytest.raises(BuildError, match=f"^{re.escape(text)}$"):
        make_blueprint(parse_query("arch=timm:resnet50"))
