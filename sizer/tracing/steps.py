"""What a kernel does to memory, step by step, where the order against its results matters.

A list of sizes is held together and released, a tuple of sizes is held until the operator ends, a tensor is one of the
operator's results, which exists from there on. PRODUCT among the sizes of a list stands for cuBLAS's workspace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Final

from torch import Tensor

PRODUCT: Final = -1

Step = list[int] | tuple[int, ...] | Tensor
Steps = Iterable[Step]
Inner = Callable[[Any, tuple, dict, Any], Steps]
