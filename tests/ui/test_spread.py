"""Phases that would be a pixel wide are stretched, in generations alone."""

from __future__ import annotations

from itertools import pairwise

from sizer.allocator.timeline import Curve
from sizer.ui.charts import LEAST_SHARE, spread


def curve_of(*phases: tuple[str, int]) -> Curve:
    """A curve with a point at each position, phase after phase."""
    count = sum(length for _, length in phases)
    return Curve(positions=tuple(range(count)), phases=phases, by_category=(tuple(range(count)),))


def test_the_prefill_of_a_long_generation_can_be_seen():
    curve = curve_of(("load", 5), ("prefill", 3), ("decode", 992))
    found = spread(curve)
    assert found.phases == curve.phases and found.by_category == curve.by_category
    assert all(before <= after for before, after in pairwise(found.positions))
    width = found.positions[-1] - found.positions[0]
    assert found.positions[8] - found.positions[5] >= 0.09 * width, "the prefill, from its first point to the first of decode"
    assert found.positions[8] - found.positions[5] == round(LEAST_SHARE * 999)


def test_distances_within_a_phase_stay_in_proportion():
    curve = Curve(positions=(0, 1, 4, 5, 1000), phases=(("prefill", 3), ("decode", 2)), by_category=((0,) * 5,))
    found = spread(curve).positions
    # the prefill has 5 of 1000 positions, and gets 120: 24 for each
    assert found[:4] == (0, 24, 96, 120)
    assert found[4] - found[3] == 995


def test_a_step_of_training_stays_as_it_is():
    curve = curve_of(("load", 1), ("forward", 500), ("backward", 500))
    assert spread(curve) is curve
    assert spread(Curve()) == Curve()
