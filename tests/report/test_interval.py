"""The interval of the largest batch, in one wording."""

from __future__ import annotations

import pytest

from sizer.report.interval import Interval, left_out


@pytest.mark.parametrize(
    ("least", "most", "words"),
    [
        (0, None, "not known"),
        (4, None, "at least 4"),
        (0, 5, "at most 5"),
        (4, 5, "4 to 5"),
        (1725, 1725, "1,725"),
        (0, 0, "none"),
    ],
)
def test_the_words(least, most, words):
    found = Interval(least=least, most=most)
    assert str(found) == words
    assert found.is_known == (words != "not known")


def test_each_verdict_narrows_the_interval():
    found = Interval()
    for value, fits, words in (
        (2, True, "at least 2"),
        (32, False, "2 to 31"),
        (16, "uncertain", "2 to 31"),
        (8, True, "8 to 31"),
        (9, False, "8"),
        (4, False, "8"),  # fragmentation: a smaller batch may not fit; what was seen to fit counts
    ):
        found = found.with_verdict(value, fits)
        assert str(found) == words


def test_the_order_of_answers_does_not_matter():
    one, other = Interval(least=4, most=40), Interval(most=12)
    assert one.meet(other) == other.meet(one) == Interval(least=4, most=12)
    assert Interval().meet(one) == one

@pytest.mark.parametrize(
    ("fits", "found"),
    [
        ({1: False, 2: False}, (4, 8)),
        ({1: False, 2: False, 8: False}, (4,)),  # what has a verdict is there
        ({1: True, 2: False}, ()),
        ({1: False, 4: False}, ()),  # not consecutive
        ({1: "uncertain", 2: False, 4: False}, (8,)),
        ({}, ()),
    ],
)
def test_batch_sizes_above_two_that_do_not_fit_are_left_out(fits, found):
    assert left_out((1, 2, 4, 8), fits) == found
