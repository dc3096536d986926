"""Null versions of cuFFT, cuSOLVER and cuSPARSE, generated from NVIDIA's headers. No torch.

Each function that PyTorch calls returns success. Sizes of workspaces come back as 0 and handles as memory of their own, by the
types and names of the parameters. `null_libraries` says which of the libraries were called, so that a report can say that their
workspaces are not counted.
"""

from __future__ import annotations

import re
from pathlib import Path

LIBRARIES = ("cufft", "cusolver", "cusparse")  # bit 0, 1 and 2 of `null_libraries`
_HEADERS = ("cufft.h", "cufftXt.h", "cusolverDn.h", "cusolver_common.h", "cusparse.h")
_INCLUDED = ("cufft.h", "cufftXt.h", "cusolverDn.h", "cusparse.h")
_PROTOTYPE = re.compile(
    r"\b(cufftResult|cusolverStatus_t|cusparseStatus_t)\s+(?:CUFFTAPI|CUSOLVERAPI|CUSPARSEAPI|CUDENSEMATRIXAPI)?\s*"
    r"((?:cufft|cusolver|cusparse)\w+)\s*\(([^()]*)\)"
)
_SIZE = re.compile(r"lwork|[sS]ize|[bB]ytes")
# cuFFT transforms 16-bit numbers of lengths that are powers of two alone (cuFFT 13.3, "Half-precision cuFFT Transforms").
_HALVES = " || ".join(
    f"{argument} == {kind}"
    for argument in ("inputtype", "outputtype", "executiontype")
    for kind in ("CUDA_R_16F", "CUDA_C_16F", "CUDA_R_16BF", "CUDA_C_16BF")
)
_REFUSED = {
    "cufftXtMakePlanMany": f"if ({_HALVES}) for (int axis = 0; axis < rank; axis++) "
    "if (n[axis] & (n[axis] - 1)) return CUFFT_INVALID_SIZE;",
}
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)


def null_libraries(called: set[str], include: Path) -> str:
    """Return C code for the functions of these libraries among those that are called.

    Args:
        called: Names of functions.
        include: The folder of NVIDIA's headers.
    """
    found: dict[str, str] = {}
    for header in _HEADERS:
        if (include / header).is_file():
            text = _COMMENT.sub(" ", (include / header).read_text(encoding="utf-8", errors="replace"))
            for status, name, parameters in _PROTOTYPE.findall(text):
                if name in called:
                    found.setdefault(name, _function(status, name, " ".join(parameters.split())))
    return "\n".join(
        (
            "#include <stdlib.h>",
            *(f"#include <{header}>" for header in _INCLUDED),
            "static unsigned libraries;",
            "unsigned null_libraries(void) { return libraries; }",
            *found.values(),
            "",
        )
    )


def _function(status: str, name: str, parameters: str) -> str:
    bit = next(place for place, library in enumerate(LIBRARIES) if name.startswith(library))
    body = [f"libraries |= {1 << bit}u;", _REFUSED.get(name, "")]
    for parameter in parameters.split(","):
        match = re.fullmatch(r"\s*(?!const)([\w ]+?)\s*\*\s*(\w+)\s*", parameter)
        if match is None:
            continue
        kind, argument = match.groups()
        if kind in ("int", "size_t", "int64_t") and _SIZE.search(argument):
            body.append(f"if ({argument}) *{argument} = 0;")
        elif "reate" in name and kind == "cufftHandle":
            body.append(f"*{argument} = 1;")
        elif "reate" in name and re.search(
            r"(Handle_t|Descr_t|Info_t|Params_t|params_t|descr_t|Params|handle_t|Info)$", kind
        ):
            body.append(f"*{argument} = ({kind})calloc(1, 4096);")
    return f"{status} {name}({parameters}) {{ {' '.join(body)} return ({status})0; }}"
