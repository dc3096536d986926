"""Read configs in YAML: the values that JSON has, within its limits; anything else is refused in one line."""

from __future__ import annotations

import time

import pytest

from sizer.base.config_json import read_config
from sizer.base.errors import ConfigError

CONFIG = "model_type: llama\nhidden_size: 64\n"


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ("key: 1e-05", 1e-05),
        ("key: 1.0e+4", 1e4),
        ("key: .5", 0.5),
        ("key: .inf", {"__float__": "Infinity"}),
        ("key: 4.55.0", "4.55.0"),
        ("key: 2024-01-01", "2024-01-01"),
        ("key: '1e-05'", "1e-05"),
        ("key:", None),
        ("key: {0: cat, 1: dog}", {"0": "cat", "1": "dog"}),
        ("key:\n  part:\n  - [1, 2]\n  - null", {"part": [[1, 2], None]}),
    ],
)
def test_values_are_those_of_json(line: str, value: object):
    assert read_config(f"{CONFIG}{line}\n") == {"model_type": "llama", "hidden_size": 64, "key": value}


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (f"{CONFIG}a: &a 1\nb: *a\n", "anchors are not read at line 3, column 4"),
        ("a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\n", "anchors are not read"),
        (f"{CONFIG}a: !!python/object/apply:os.system [ls]\n", "could not determine a constructor for the tag"),
        (f"{CONFIG}a: !!binary aGVsbG8=\n", "not valid YAML: given 'Object of type bytes"),
        (f"{CONFIG}a: !!set {{b}}\n", "not valid YAML: given 'Object of type set"),
        (f"{CONFIG}[1]: 2\n", "not valid YAML"),
        (f"{CONFIG}true: 2\n", "a key is not text"),
        (f"{CONFIG}hidden_size: 65\n", "a key twice in one object: given 'hidden_size'"),
        (f"{CONFIG}a: {{1: x, '1': y}}\n", "a key twice in one object: given '1'"),
        (f"{CONFIG}a: 9007199254740993\n", "integer out of range"),
        (f"{CONFIG}a: {'9' * 5000}\n", "not valid YAML: given 'Exceeds the limit"),
        (f"{CONFIG}a: {'[' * 20}{']' * 20}\n", "nested too deeply"),
        (f"{CONFIG}a: {'[' * 60_000}", "too many values"),
        (CONFIG + "".join(f"{' ' * place}a:\n" for place in range(300)), "not valid YAML"),
        (f"{CONFIG}a: [{'1, ' * 10_001}]\n", "a list that is too long"),
        (f"{CONFIG}a: [{'[],' * 20_001}]\n", "too many values"),
        (f"{CONFIG}a: {'x' * 10_001}\n", "a string that is too long"),
        (f"{CONFIG}# {'x' * 65_536}\n", "too large: allowed at most 65,536 bytes of YAML"),
        (f"{CONFIG}  a: 1\n", "not valid YAML: given 'mapping values are not allowed here at line 3, column 4'"),
        (f"{CONFIG}---\na: 1\n", "another document at line 3"),
        (f"---\n{CONFIG}---\n# A model\n", r"this is a model card \(README\.md\)"),
        ("base_model: org/name\nlearning_rate: 2e-4\n", "this is a training config"),
        ("llama_model_loader: - kv   0:   general.architecture str = qwen3\n", "these are the settings of a GGUF file"),
    ],
)
def test_everything_else_is_refused_with_a_short_text(text: str, why: str):
    start = time.process_time()
    with pytest.raises(ConfigError, match=why) as caught:
        read_config(text)
    assert time.process_time() - start < 10  # seconds; a quadratic reader would take minutes
    assert str(caught.value).isprintable()
    assert len(str(caught.value)) < 300
