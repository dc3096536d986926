"""What each operator kept and what its kernel held inside on a real device: one row per distinct call. No torch here."""

from __future__ import annotations

from dataclasses import dataclass

from sizer.base.codec import DecodeError, decode, encode
from sizer.device.record.measurement import DeviceFacts

SCHEMA = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow:
    """All calls of one operator with the same shapes, dtypes and plain arguments, in bytes as allocated.

    `arguments` are texts: a tensor is its dtype and shape ("float32[32,3,224,224]", with "/" and the strides where it is not
    contiguous), everything else its repr. `kept_bytes` is the least that a call left allocated, results included, and
    `most_kept_bytes` the most: a library's workspace that stays appears in the first call alone. `inner_bytes` is the most
    that a call held beyond what was allocated before it and what it left: the kernel's own workspace.
    """

    op: str
    arguments: tuple[str, ...]
    calls: int
    kept_bytes: int
    most_kept_bytes: int
    inner_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRecord:
    """The kernels of two steps of one piece of work. `failure` says what ended it early, None where nothing did."""

    schema: int = SCHEMA
    query: str
    device: DeviceFacts
    versions: dict[str, str]
    rows: tuple[KernelRow, ...]
    failure: str | None = None

    def to_dict(self) -> dict:
        """Dicts, lists and scalars; a row is a list in the order of KernelRow's fields, which keeps files small."""
        return encode(self) | {"rows": [list(encode(row).values()) for row in self.rows]}

    @classmethod
    def from_dict(cls, data: object) -> KernelRecord:
        """The record that `to_dict` came from. Raises DecodeError where `data` is anything else."""
        if not isinstance(data, dict) or not isinstance(data.get("rows"), list):
            raise DecodeError("a record of kernels is an object with a list of rows")
        names = KernelRow.__slots__
        rows = [dict(zip(names, row, strict=False)) if isinstance(row, list) else row for row in data["rows"]]
        return decode(cls, {**data, "rows": rows}, "kernels")
