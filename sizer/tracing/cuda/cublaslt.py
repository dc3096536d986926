"""What cuBLASLt would answer where cuDNN asks it for algorithms of a matrix product (cublasLtMatmulAlgoGetHeuristic).

cuDNN's engines for 1x1 convolutions and Winograd's transforms multiply through cuBLASLt, and are left out of its list where
cuBLASLt offers no algorithm. Without a driver cublasLtCreate fails, so the library itself cannot be asked; its documentation
says which products it supports. As of cuBLAS 12.6 to 13.4 (cublasLtMatmul, "supported data types"; enumerations of library_types.h
and cublas_api.h).

*Known limitations*: how much workspace an algorithm takes is the library's own choice. It is taken as none, which is what
algorithms that do not split the inner dimension take; those that do hold copies of the product, within what cuDNN allows.
"""

from __future__ import annotations

from dataclasses import dataclass

# cudaDataType_t, cublasComputeType_t
FLOAT32, FLOAT16, BFLOAT16 = 0, 2, 14
COMPUTE_16, COMPUTE_32, COMPUTE_32_TF32 = 64, 68, 77

# Type of the operands and of the result, and the capability from which on their product is computed in float32. cuDNN asks for
# TF32 or not by the first device that a process asks it about, whatever the operands' type; it puts these engines first for half
# precision too, so TF32 counts as leave to use it and refuses nothing.
_SUPPORTED = {
    (FLOAT32, FLOAT32): (5, 0),
    (FLOAT16, FLOAT16): (5, 0),
    (FLOAT16, FLOAT32): (5, 0),
    (BFLOAT16, BFLOAT16): (8, 0),
    (BFLOAT16, FLOAT32): (8, 0),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """The types of a product of matrices by their numbers: in which it is computed, of its operands and of its result."""

    compute: int
    operand: int
    result: int


def workspace_bytes(product: Product, capability: tuple[int, int]) -> int | None:
    """The workspace of the algorithm that would be offered first on a device of this capability; None where there is none."""
    if product.compute == COMPUTE_16:
        least = (5, 3) if product.operand == product.result == FLOAT16 else None
    elif product.compute in (COMPUTE_32, COMPUTE_32_TF32):
        least = _SUPPORTED.get((product.operand, product.result))
    else:
        least = None
    return None if least is None or capability < least else 0
