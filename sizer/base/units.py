"""Bytes and counts as text. Everywhere else both are plain integers."""

from __future__ import annotations

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40

_BYTE_UNITS = ((TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB"))
_DECIMAL_UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))
_COUNT_UNITS = ((10**12, "T"), (10**9, "B"), (10**6, "M"), (10**3, "K"))


def format_bytes(n: int, *, like: int | None = None) -> str:
    """Return a number of bytes as text in binary units, two decimals: 3242745856 is "3.02 GiB". Below one KiB: "512 B".

    With `like` it has the unit of that number of bytes, and up to four decimals if it is small in that unit: a table has one
    unit.
    """
    return _scale(n, _BYTE_UNITS, " B") if like is None else _in_unit_of(like, n, _BYTE_UNITS)


def format_both(n: int, *, like: int | None = None) -> str:
    """Return bytes as text in decimal and binary units: 16060522496 is "16.06 GB (14.96 GiB)". Below one kB: "512 B".

    `like` is that of `format_bytes`.
    """
    if like is not None:
        return f"{_in_unit_of(like, n, _DECIMAL_UNITS)} ({format_bytes(n, like=like)})"
    return format_bytes(n) if abs(n) < KIB else f"{_scale(n, _DECIMAL_UNITS, ' B')} ({format_bytes(n)})"


def format_more(n: int) -> str:
    """Return a difference in bytes as `format_bytes` does, with its sign; "nothing" if it is 0."""
    return f"{'+' if n > 0 else ''}{format_bytes(n)}" if n else "nothing"


def format_range(low: int, high: int) -> str:
    """Return two numbers of bytes as text in the unit of the larger one: "0.563 GiB to 1.32 GiB"."""
    most = format_bytes(high)
    least, unit = format_bytes(low), most.rpartition(" ")[2]
    if low > 0 and not least.endswith(f" {unit}"):
        size = next(size for size, name in _BYTE_UNITS if name == unit)
        least = f"{low / size:.3f} {unit}"
    return f"{least} to {most}"


def format_count(n: int) -> str:
    """Return a count as text in powers of a thousand, two decimals: 25557032 is "25.56 M". Below one thousand: "640"."""
    return _scale(n, _COUNT_UNITS, "")


def pluralize(n: int, one: str, many: str | None = None) -> str:
    """Return a count with its noun: "1 case", "1,200 cases"; `many` is the plural if it is not `one` and an s."""
    return f"{n:,} {one if n == 1 else many or f'{one}s'}"


def _in_unit_of(like: int, n: int, units: tuple[tuple[int, str], ...]) -> str:
    """Return a number of bytes in the unit that another one has in binary units: two decimals, or up to four if it is small."""
    place = next((at for at, (unit, _) in enumerate(_BYTE_UNITS) if like >= unit), len(units) - 1)
    unit, name = units[place]
    size = n / unit
    decimals = 2 if abs(size) >= 1 or not n else 3 if abs(size) >= 0.1 else 4
    return f"{size:,.{decimals}f} {name}"


def _scale(n: int, units: tuple[tuple[int, str], ...], plain: str) -> str:
    sign, size = ("-", -n) if n < 0 else ("", n)
    if size < units[-1][0]:
        return f"{sign}{size:,}{plain}"
    # Hundredths of each unit, rounded half up in integers: 1023.999 KiB reads 1.00 MiB.
    scaled = (((size * 200 + unit) // (2 * unit), name) for unit, name in units)
    hundredths, name = next(row for row in scaled if row[0] >= 100)
    return f"{sign}{hundredths // 100:,}.{hundredths % 100:02} {name}"


def round_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is at least the number."""
    return -(-number // multiple) * multiple
