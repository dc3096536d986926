from __future__ import annotations

import pytest

from sizer.base import errors
from sizer.base.errors import JobError, Refusal, RequestError
from sizer.processes.wire import (
    LIMIT_PROGRESS,
    LIMIT_TEXT,
    clip_progress,
    error_from_wire,
    error_to_wire,
    from_line,
    to_line,
)

KINDS = ("RequestError", "ConfigError", "HubError", "BuildError", "TraceError", "DeviceError", "JobError")


def test_message_is_one_line_of_ascii_and_comes_back():
    message = {"text": "a\nb ü \ud800 \u2028", "number": 2**63, "none": None}
    line = to_line(message)
    assert line.isascii()
    assert line.count(b"\n") == 1
    assert from_line(line) == message


@pytest.mark.parametrize(
    ("line", "why"),
    [
        (b"{", "Expecting"),
        (b'{"a": NaN}', "NaN is not JSON"),
        (b'{"a": -Infinity}', "-Infinity is not JSON"),
        (b"7", "not int"),
        ('{"a": "ü"}'.encode(), "ascii"),
        ('{"a": 1}'.encode("utf-16"), "ascii"),
        (b"[" * 300_000, "nested too deeply|Expecting value"),
    ],
)
def test_line_that_is_no_message_is_refused(line, why):
    with pytest.raises(ValueError, match=why):
        from_line(line)


def test_message_that_is_not_json_is_refused():
    with pytest.raises(ValueError, match="not JSON compliant"):
        to_line({"a": float("inf")})


@pytest.mark.parametrize("kind", KINDS)
def test_error_comes_back_as_the_same_class_with_the_same_text(kind):
    error = getattr(errors, kind)("what", given="a", allowed=None, todo="do this")
    back = error_from_wire(error_to_wire(error))
    assert (type(back), str(back), back.allowed) == (type(error), "what: given a; do this", None)


def test_refusals_come_back():
    rows = [
        Refusal(key="batch", given="'-5'", allowed="1 to 9", todo="write batch=1"),
        Refusal(key="x", given="y", allowed="z", todo="w"),
    ]
    back = error_from_wire(error_to_wire(RequestError(refusals=rows)))
    assert back.refusals == tuple(rows)
    assert str(back) == str(RequestError(refusals=rows))


@pytest.mark.parametrize(
    "data",
    [
        None,
        7,
        {},
        {"kind": "SystemExit", "what": "x", "given": None, "allowed": None, "todo": None},
        {"kind": ["JobError"], "what": "x", "given": None, "allowed": None, "todo": None},
        {"kind": "RequestError", "what": "x", "given": None, "allowed": None, "todo": None, "refusals": [{"key": 1}]},
        {"kind": "JobError"},
    ],
)
def test_error_that_makes_no_sense_is_a_job_error(data):
    assert type(error_from_wire(data)) is JobError
    assert "was not understood" in str(error_from_wire(data))


def test_long_texts_are_clipped():
    back = error_from_wire(error_to_wire(JobError("x" * 10 * LIMIT_TEXT)))
    assert len(str(back)) == LIMIT_TEXT + 3
    assert clip_progress("a\n b" + "x" * 10_000) == "a b" + "x" * (LIMIT_PROGRESS - 3)
