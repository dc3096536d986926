"""Which rows of the ledger are asked for, and that question in SQL."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which rows are asked for; None takes all. `architecture` is a part of the name, whatever its case; `source` that of
    the query's arch ("torchvision", "hf", ...); `since` and `until` are ISO dates (UTC), both included; the rest must be equal."""

    architecture: str | None = None
    source: str | None = None
    family: str | None = None
    mode: str | None = None
    dtype: str | None = None
    batch: int | None = None
    device_name: str | None = None
    device_kind: str | None = None
    torch: str | None = None
    holds: bool | None = None
    since: str | None = None
    until: str | None = None


def where(filter: Filter | None) -> tuple[str, dict[str, object]]:
    """A filter as the WHERE clause of a SELECT, and its values."""
    wanted = {} if filter is None else {name: value for name, value in asdict(filter).items() if value is not None}
    conditions = [_CONDITIONS.get(name, f"{name} = :{name}") for name in wanted]
    return f"WHERE {' AND '.join(conditions)}" if conditions else "", wanted


_CONDITIONS = {
    "architecture": "instr(lower(architecture), lower(:architecture)) > 0",
    "source": "instr(query, 'arch=' || :source || ':') > 0",
    "since": "substr(measured_at, 1, 10) >= :since",
    "until": "substr(measured_at, 1, 10) <= :until",
}
