"""Tapes as bytes and back: a header in JSON, then the columns as they lie in memory, all of it deflated.

Nothing but numbers and texts is read: bytes that were tampered with give a wrong tape or a DecodeError, and run no code.
"""

from __future__ import annotations

import json
import re
import sys
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, fields, replace
from typing import Any

from sizer.base.codec import DecodeError, decode, encode
from sizer.tape.affine import AffineTape
from sizer.tape.communication import Collective
from sizer.tape.compiled_code import CompiledCode
from sizer.tape.family import TapeFamily
from sizer.tape.per_sample import PerSampleTape
from sizer.tape.size_queries import AffineSizeQuery, SizeQuery
from sizer.tape.tape import Loop, Tape

LIMIT_BYTES = 2**28  # of one archive when inflated: Llama-3.1-405B's tapes in one dtype take 13 MB
_COLUMNS = ("order", "sizes", "categories", "ops", "modules", "streams")
_ENDIAN = sys.byteorder

Range = tuple[tuple[int, int], tuple[int, int]]  # of capabilities
# Of a comparison: the compared value ("capability", "major", "minor"), the operator ("ge", "among"), the operand, and the result.
Decision = tuple[str, str, int | tuple[int, int] | tuple[Range, ...], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """A kernel that a trace took for an operator, why, and in how many modules."""

    operator: str
    kernel: str
    why: str
    modules: int

    def __str__(self) -> str:
        return f"{self.operator}: {self.kernel} ({self.why})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """Traces of one piece of work in one dtype: its tapes and kernels, or why there are none.

    `failure` says why batches without a tape in `family` could not be traced. `note` is to be read with the answer.
    `halves_differ` is True if a traced operator treats float16 and bfloat16 differently. `decisions` are the rules' comparisons
    on the device's compute capability: devices with equal results have the same traces. `compiled` is the result of
    torch.compile.
    """

    family: TapeFamily = field(default_factory=TapeFamily)
    failure: str = ""
    note: str = ""
    kernels: tuple[Kernel, ...] = ()
    halves_differ: bool = False
    decisions: tuple[Decision, ...] = ()
    compiled: CompiledCode | None = None

    def with_dtype(self, dtype: str, *, instead_of: str) -> Traced:
        """Return the same work in another dtype that takes the same kernels."""
        dtype_word = re.compile(
            rf"(^|, ){instead_of}(?=[,;]|$)"
        )  # the dtype of a kernel's reason; conditions name several dtypes
        kernels = tuple(replace(kernel, why=dtype_word.sub(rf"\g<1>{dtype}", kernel.why)) for kernel in self.kernels)
        return replace(self, family=self.family.with_dtype(dtype, instead_of=instead_of), kernels=kernels)


def pack(traced: Traced) -> bytes:
    """Return the bytes of a value, for `unpack`."""
    columns = _Writer()
    family = traced.family
    header = {
        "byte order": _ENDIAN,
        "lines": [[first, columns.write_line(line)] for first, line in family.lines],
        "exact": [columns.write_tape(tape) for tape in family.exact],
        "smallest": family.smallest,
        **{one.name: encode(getattr(traced, one.name)) for one in fields(Traced) if one.name != "family"},
    }
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    return zlib.compress(b"%d\n" % len(text) + text + b"".join(columns.parts), level=1)


def unpack(data: bytes) -> Traced:
    """Return the packed value. Raises DecodeError if the bytes are damaged, or from another machine."""
    inflater = zlib.decompressobj()
    try:
        whole = inflater.decompress(data, LIMIT_BYTES)
        length = whole[:20].partition(b"\n")[0]
        begin = len(length) + 1
        header = json.loads(whole[begin : begin + int(length)])
        columns = _Reader(memoryview(whole)[begin + int(length) :])
        if header.pop("byte order") != _ENDIAN:
            raise DecodeError("these tapes are of a machine with another byte order")
        family = TapeFamily(
            lines=tuple((first, columns.read_line(line)) for first, line in header.pop("lines")),
            exact=tuple(columns.read_tape(tape) for tape in header.pop("exact")),
            smallest=header.pop("smallest"),
        )
        kernels = decode(tuple[Kernel, ...], header.pop("kernels"), "kernels")
        compiled = decode(CompiledCode | None, header.pop("compiled"), "compiled")
        decisions = tuple((what, how, _tuples(other), outcome) for what, how, other, outcome in header.pop("decisions"))
        return Traced(family=family, kernels=kernels, decisions=decisions, compiled=compiled, **header)
    except (zlib.error, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise DecodeError(f"these are not the bytes of tapes ({type(error).__name__}: {error})") from error


class _Writer:
    """Concatenated columns, and a header of each tape."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []

    def write_line(self, line: AffineTape | PerSampleTape) -> dict:
        if isinstance(line, PerSampleTape):
            return {"first": self.write_tape(line.first), "second": self.write_tape(line.second), "outputs": line.outputs}
        self._write(line.constant, line.per_item)
        queries = [_query_row(query, query.constant, query.per_item) for query in line.size_queries]
        tape = self.write_tape(line.tape)
        return {"fitted_at": line.fitted_at, "tape": tape, "queries": queries, "told": line.collectives_per_item}

    def write_tape(self, tape: Tape) -> dict:
        self._write(*(getattr(tape, name) for name in _COLUMNS))
        return {
            "batch": tape.batch,
            "events": len(tape.order),
            "blocks": len(tape.sizes),
            "names": [tape.op_names, tape.module_names, tape.stand_ins],
            "marks": tape.marks,
            "queries": [_query_row(query, query.numbers) for query in tape.size_queries],
            "second_forward": tape.second_forward,
            "loops": [[loop.begin, loop.end, loop.count] for loop in tape.loops],
            "streams": len(tape.streams),
            "awaited": sorted(tape.awaited),
            "settled": tape.settled,
            "outputs": [tape.outputs, tape.graphs, sorted(tape.half_outputs)],
            "host_bytes": tape.host_bytes,
            "copied": tape.copied,
            "by_address": tape.by_address,
            "collectives": [list(astuple(row)) for row in tape.collectives],
        }

    def _write(self, *columns: array[int] | bytes) -> None:
        self.parts.extend(bytes(column) for column in columns)


def _tuples(value: Any) -> Any:
    """Return a list as a tuple, with the lists in it."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def _query_row(query: SizeQuery | AffineSizeQuery, *numbers: Iterable[int]) -> list:
    return [query.kind, query.words, *numbers, query.blocks]


def _collective(phase: str, kind: str, group: str, again: bool, calls: int, size: int) -> Collective:
    return Collective(phase=phase, kind=kind, group=group, again=again, calls=calls, bytes=size)


class _Reader:
    """The columns of an archive, in the order of the header."""

    def __init__(self, columns: memoryview) -> None:
        self._columns = columns

    def read_line(self, header: dict) -> AffineTape | PerSampleTape:
        if "second" in header:
            first, second = self.read_tape(header["first"]), self.read_tape(header["second"])
            return PerSampleTape(first=first, second=second, outputs=header["outputs"])
        blocks = header["tape"]["blocks"]
        constant, per_item = self._read("q", blocks), self._read("q", blocks)
        queries = (
            AffineSizeQuery(kind=kind, words=tuple(words), constant=tuple(a), per_item=tuple(b), blocks=tuple(blocks))
            for kind, words, a, b, blocks in header["queries"]
        )
        first, second = header["fitted_at"]
        return AffineTape(
            fitted_at=(first, second),
            tape=self.read_tape(header["tape"]),
            constant=constant,
            per_item=per_item,
            size_queries=tuple(queries),
            collectives_per_item=tuple(header["told"]),
        )

    def read_tape(self, header: dict) -> Tape:
        events, blocks = header["events"], header["blocks"]
        op_names, module_names, stand_ins = map(tuple, header["names"])
        return Tape(
            batch=header["batch"],
            order=self._read("q", events),
            sizes=self._read("q", blocks),
            categories=self._take(blocks),
            ops=self._read("l", blocks),
            modules=self._read("l", blocks),
            op_names=op_names,
            module_names=module_names,
            marks=tuple((position, phase) for position, phase in header["marks"]),
            stand_ins=stand_ins,
            size_queries=tuple(
                SizeQuery(kind=kind, words=tuple(words), numbers=tuple(numbers), blocks=tuple(blocks))
                for kind, words, numbers, blocks in header["queries"]
            ),
            second_forward=header["second_forward"],
            loops=tuple(Loop(begin=begin, end=end, count=count) for begin, end, count in header["loops"]),
            streams=self._take(header["streams"]),
            awaited=frozenset(header["awaited"]),
            settled=tuple((position, block) for position, block in header["settled"]),
            outputs=tuple(map(tuple, header["outputs"][0])),
            graphs=tuple(map(tuple, header["outputs"][1])),
            half_outputs=frozenset(header["outputs"][2]),
            collectives=tuple(_collective(*row) for row in header["collectives"]),
            host_bytes=header["host_bytes"],
            copied=tuple(header["copied"]),
            by_address=header["by_address"],
        )

    def _read(self, code: str, length: int) -> array[int]:
        column = array(code)
        column.frombytes(self._take(length * column.itemsize))
        return column

    def _take(self, size: int) -> bytes:
        if not 0 <= size <= len(self._columns):
            raise DecodeError(f"the columns end after {len(self._columns)} of {size} bytes")
        taken, self._columns = bytes(self._columns[:size]), self._columns[size:]
        return taken
