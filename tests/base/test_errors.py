from __future__ import annotations

import pickle
import re

import pytest

import sizer.base.errors as errors
from sizer.base.errors import ConfigError, Refusal, RequestError, SizerError, quote, suggest


def subclasses() -> list[type[SizerError]]:
    return [cls for cls in vars(errors).values() if isinstance(cls, type) and issubclass(cls, SizerError)]


def test_the_tree_drawn_at_the_top_is_the_tree():
    drawn = {}
    for line in errors.__doc__.splitlines():
        words = re.sub("[│├└─]", " ", line).split()
        if words and words[0].endswith("Error"):
            drawn[words[0]] = words[-1]
    statuses = {cls.__name__: str(cls.exit_status) for cls in subclasses()}
    assert drawn.pop("SizerError") == "status"
    assert statuses.pop("SizerError") == "1"
    assert drawn == statuses
    assert len(drawn) == 10


@pytest.mark.parametrize("cls", subclasses(), ids=lambda cls: cls.__name__)
def test_message_is_one_line_with_given_allowed_and_todo(cls: type[SizerError]):
    error = cls("size is\nodd", given="3", allowed="even sizes", todo="give 2 or 4")
    assert str(error) == "size is odd: given 3, allowed even sizes; give 2 or 4"
    assert (error.given, error.allowed, error.todo) == ("3", "even sizes", "give 2 or 4")


@pytest.mark.parametrize("cls", subclasses(), ids=lambda cls: cls.__name__)
def test_parts_without_text_are_left_out(cls: type[SizerError]):
    assert str(cls("size is odd")) == "size is odd"
    assert str(cls("size is odd", todo="give 2")) == "size is odd; give 2"


@pytest.mark.parametrize("cls", subclasses(), ids=lambda cls: cls.__name__)
def test_errors_survive_pickling(cls: type[SizerError]):
    error = cls("size is odd", given="3", allowed="even sizes", todo="give 2")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert (str(copy), copy.what, copy.todo) == (str(error), "size is odd", "give 2")


def test_request_error_joins_its_refusals():
    rows = [Refusal(key=key, given="'x'", allowed="1", todo="write 1") for key in ("v", "batch")]
    error = RequestError(refusals=rows)
    assert str(error) == "v: given 'x', allowed 1; write 1\nbatch: given 'x', allowed 1; write 1"
    assert error.refusals == tuple(rows)


def test_errors_are_caught_by_their_root():
    with pytest.raises(SizerError, match="too large"):
        raise ConfigError("config is too large")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("abc", "'abc'"),
        ("a\nb\x1b[31m", r"'a\nb\x1b[31m'"),
        ("\ud800", r"'\ud800'"),
        ("x" * 61, f"'{'x' * 60}'... (61 characters)"),
        (3, "3"),
        (None, "None"),
    ],
)
def test_quoted_text_is_safe_to_print(value: object, text: str):
    assert quote(value) == text


def test_suggestions():
    assert suggest("a100", ("a100-40gb", "cpu")) == "did you mean a100-40gb?"
    assert suggest("zzz", ("a100-40gb", "cpu")) is None


@pytest.mark.parametrize(
    ("word", "known", "found"),
    [
        ("RTX4090", ("rtx-4090", "rtx-4090-d"), "rtx-4090"),  # case and separators do not count
        ("qwen3-7b", ("qwen3-8b", "qwen2-7b"), "qwen3-8b, qwen2-7b"),
        ("fdsp", ("fsdp", "ddp"), "fsdp"),
        ("torchvison", ("torchvision",), "torchvision"),
        ("llama3", ("llama-3.1-8b",), "llama-3.1-8b"),  # a short form
        ("mimo", ("mimi",), None),  # another family
        ("svd", ("s3d",), None),
        ("bert-base", ("bart-base",), None),
        ("gamma-2b", ("gemma-2b",), None),
    ],
)
def test_suggestions_are_of_the_same_family(word: str, known: tuple[str, ...], found: str | None):
    assert suggest(word, known) == (None if found is None else f"did you mean {found}?")
