from __future__ import annotations

import json
import time

import pytest

from sizer.base import config_json
from sizer.base.config_json import canonical_config, decode_config, encode_config, read_config
from sizer.base.errors import ConfigError
from sizer.query.text import format_query, parse_query


def nested(depth: int) -> str:
    """An object that holds depth - 1 lists, one inside the other."""
    return '{"a": ' + "[" * (depth - 1) + "]" * (depth - 1) + "}"


def test_an_ordinary_config_is_read():
    text = """{"model_type": "gpt2", "n_embd": 768, "rope": {"theta": 1e4}, "layers": ["a", null], "é": -0.5}"""
    value = {"model_type": "gpt2", "n_embd": 768, "rope": {"theta": 1e4}, "layers": ["a", None], "é": -0.5}
    assert read_config(text) == value
    assert read_config(text.encode()) == value
    assert read_config("{}") == {}


def test_limits_are_inclusive():
    assert read_config(nested(16))
    assert read_config(f'{{"a": {2**53}, "b": {-(2**53)}}}') == {"a": 2**53, "b": -(2**53)}
    assert len(read_config(json.dumps({"a": "x" * 10_000}))["a"]) == 10_000
    assert len(read_config(json.dumps({"a": [0] * 10_000}))["a"]) == 10_000
    assert read_config(json.dumps({"k" * 256: 0}))
    # values: the object itself, two lists and 9,998 + 9,999 numbers = 1 + 2 + 19,997 = 20,000
    assert read_config(json.dumps({"a": [0] * 9_998, "b": [0] * 9_999}))
    text = json.dumps({"a": ["x" * 10_000] * 209})
    assert read_config(text + " " * (2**21 - len(text)))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\xff\xfe{}", "not valid UTF-8"),
        ('{"a": "\ud800"}', "not valid UTF-8"),
        ("", "config is empty"),
        ("<html>", "this is a web page"),
        ("Model(\n  (layer): Linear()\n)", "this is a printed model"),
        (b"\x40\0\0\0\0\0\0\0{", "this is a file of weights"),
        (b"PK\3\4", "this is a file of weights"),
        (b"\x08\x07\x12\x07pytorch", "this is a file of weights"),
        ("{", "not valid JSON"),
        ("{} {}", "not valid JSON: given Extra data at line 1, column 4"),
        ('{"a": "\n"}', "not valid JSON"),
        ('{"a": "\\', "not valid JSON"),
        ('{"a": "', "not valid JSON"),
        ('{"a": 01}', "not valid JSON"),
        ("[1]", "not a JSON object: given a list"),
        ('"text"', "not a JSON object: given a str"),
        ("null", "not a JSON object: given a NoneType"),
        ('{"a": 1e999}', "number out of range: given '1e999'"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "key twice in one object: given 'c'"),
        (f'{{"a": {2**53 + 1}}}', "integer out of range: given '9007199254740993', allowed at most 2"),
        (f'{{"a": {-(2**53) - 1}}}', "integer out of range"),
        ('{"a": 1' + "0" * 5000 + "}", r"integer out of range: given '10{59}'\.\.\. \(5001 characters\)"),
        ('{"a": "\\ud800"}', "a string that is not valid Unicode"),
        ('{"\\udfff": 1}', "a key that is not valid Unicode"),
        (json.dumps({"a": "x" * 10_001}), "a string that is too long"),
        (json.dumps({"k" * 257: 1}), "a key that is too long"),
        (json.dumps({"a": [0] * 10_001}), "a list that is too long: given 10,001 entries"),
        (json.dumps({"a": [0] * 9_999, "b": [0] * 9_999}), "too many values: allowed at most 20,000"),
        (nested(17), "nested too deeply: allowed at most 16 levels"),
        ("[" * 100_000, "too many values"),
        ('{"a":' * 100_000, "too many values"),
        (" " * (2**21 + 1), "too large: given 2,097,153 bytes, allowed at most 2,097,152 bytes"),
        ("\u00e9" * (2**20 + 1), "too large: given 2,097,154 bytes"),
    ],
)
def test_everything_else_is_refused_with_a_short_text(data: bytes | str, why: str):
    with pytest.raises(ConfigError, match=why) as caught:
        read_config(data)
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 250


def test_brackets_inside_strings_are_not_depth():
    text = json.dumps({"a": "[" * 100, 'b"{[': "\\" * 7 + '"' + "{" * 50})
    assert read_config(text) == json.loads(text)


def test_a_surrogate_pair_is_one_character():
    assert read_config('{"a": "\\ud83d\\ude00"}') == {"a": "\U0001f600"}


@pytest.mark.parametrize(
    ("hostile", "refusal"),
    [
        ('{"a": "' + '\\"' * (2**20 - 8), "Unterminated string"),  # a string that never ends, full of escaped quotes
        ('"' * (2**21 - 1), "Extra data"),
        ("\\" * (2**21 - 1), "Expecting value"),
        ('{"a": ' + "9" * (2**21 - 16) + "}", "an integer out of range"),
        ("[" + "[]," * 600_000 + "[]]", "too many values"),
        ("{" + '"a":1,' * 300_000 + '"a":1}', "too many values"),
    ],
    ids=["escapes", "quotes", "backslashes", "digits", "lists", "repeated-key"],
)
def test_hostile_text_is_refused_in_linear_time(hostile: str, refusal: str):
    start = time.process_time()
    with pytest.raises(ConfigError, match=refusal):
        read_config(hostile)
    assert time.process_time() - start < 5.0  # quadratic scanning would take hours


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_that_python_writes_are_read_as_transformers_writes_them(number):
    assert read_config(f'{{"a": [0.0, {number}]}}') == {"a": [0.0, {"__float__": number}]}
    assert canonical_config(f'{{"a": {number}}}') == f'{{"a":{{"__float__":"{number}"}}}}'


def test_far_too_many_values_are_refused_before_any_is_parsed(monkeypatch):
    monkeypatch.setattr(config_json.json, "loads", lambda *args, **kwargs: pytest.fail("it was parsed"))
    with pytest.raises(ConfigError, match="too many values"):
        read_config(f"[{','.join(['[1]'] * 400_000)}]")


def test_commas_in_texts_are_no_values():
    assert read_config(f'{{"a": "{"," * 9_000}", "b": "{"[" * 9_000}"}}')
    assert len(read_config("{" + ",".join(f'"k{n}": "{"," * 100}"' for n in range(9_000)) + "}")) == 9_000


def test_links_hold_no_name_of_a_model():
    private = {"model_type": "gpt2", "_name_or_path": "acme/secret", "text_config": {"_name_or_path": "/home/me/secret"}}
    canonical = canonical_config(json.dumps(private))
    assert "secret" not in canonical
    assert json.loads(canonical) == {"model_type": "gpt2", "text_config": {}}
    request = parse_query(f"arch=config:{encode_config(json.dumps(private))}")
    assert "secret" not in request.config
    assert "secret" not in decode_config(format_query(request).partition("config:")[2].partition("&")[0])
