from __future__ import annotations

import pytest

from sizer.base.units import GIB, format_both, format_bytes, format_count, format_range, pluralize


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (512, "512 B"),
        (1023, "1,023 B"),
        (1024, "1.00 KiB"),
        # 1536 / 1024 = 1.5
        (1536, "1.50 KiB"),
        # 2**20 - 1 bytes are 1023.999 KiB, which rounds to 1024.00 KiB = 1 MiB
        (2**20 - 1, "1.00 MiB"),
        # 3242745856 / 2**30 = 3.0200...
        (3242745856, "3.02 GiB"),
        (80 * GIB, "80.00 GiB"),
        (1000 * GIB, "1,000.00 GiB"),
        (2**40, "1.00 TiB"),
        (-1536, "-1.50 KiB"),
        # beyond the 53 bits of a float: 2**70 / 2**40 = 2**30
        (2**70, "1,073,741,824.00 TiB"),
    ],
)
def test_bytes_as_text(n: int, text: str):
    assert format_bytes(n) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (1000, "1,000 B"),
        (1024, "1.02 kB (1.00 KiB)"),
        # Llama 3.1 8B in bfloat16: 16060522496 / 10**9 = 16.0605, / 2**30 = 14.9575
        (16_060_522_496, "16.06 GB (14.96 GiB)"),
        (-(10**12), "-1.00 TB (-931.32 GiB)"),
    ],
)
def test_bytes_as_text_in_both_units(n: int, text: str):
    assert format_both(n) == text


@pytest.mark.parametrize(
    ("n", "like", "text"),
    [
        (16060522496, 16060522496, "16.06 GB (14.96 GiB)"),
        (64 * 2**20, 16060522496, "0.0671 GB (0.0625 GiB)"),
        (0, 16060522496, "0.00 GB (0.00 GiB)"),
        (3 * 2**40, 2**30, "3,298.53 GB (3,072.00 GiB)"),
        (-(2**29), 2**30, "-0.537 GB (-0.500 GiB)"),
        (2**20, 100, "1,048.58 kB (1,024.00 KiB)"),
    ],
)
def test_tables_have_the_unit_of_their_largest_figure(n, like, text):
    assert format_both(n, like=like) == text


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0"),
        (999, "999"),
        (1000, "1.00 K"),
        # ResNet-50: 25557032 / 10**6 = 25.557 -> 25.56
        (25_557_032, "25.56 M"),
        # Llama 3 8B: 8030261248 / 10**9 = 8.03
        (8_030_261_248, "8.03 B"),
        # 999995 / 1000 = 999.995, half up 1000.00 K = 1 M
        (999_995, "1.00 M"),
        (-1000, "-1.00 K"),
        (10**12, "1.00 T"),
    ],
)
def test_counts_as_text(n: int, text: str):
    assert format_count(n) == text


@pytest.mark.parametrize(
    ("n", "nouns", "text"),
    [
        (0, ("case",), "0 cases"),
        (1, ("case",), "1 case"),
        (1200, ("case",), "1,200 cases"),
        (1, ("process", "processes"), "1 process"),
        (2, ("process", "processes"), "2 processes"),
    ],
)
def test_what_is_counted(n: int, nouns: tuple[str, ...], text: str):
    assert pluralize(n, *nouns) == text


def test_text_grows_with_the_number():
    sizes = [0, *(2**power + delta for power in range(1, 50) for delta in (-1, 0, 1))]
    unit = {"B": 0, "KiB": 1, "MiB": 2, "GiB": 3, "TiB": 4}
    texts = (format_bytes(size).replace(",", "").split() for size in sorted(sizes))
    shown = [(unit[name], float(number)) for number, name in texts]
    assert shown == sorted(shown)


@pytest.mark.parametrize(
    ("low", "high", "text"),
    [
        (3 * GIB, 4 * GIB, "3.00 GiB to 4.00 GiB"),
        (576 * 2**20, 4 * GIB, "0.562 GiB to 4.00 GiB"),  # 576 / 1024 = 0.5625
        (0, GIB, "0 B to 1.00 GiB"),
        (-GIB, 2**20, "-1.00 GiB to 1.00 MiB"),
    ],
)
def test_both_ends_of_a_range_have_one_unit(low: int, high: int, text: str):
    assert format_range(low, high) == text
