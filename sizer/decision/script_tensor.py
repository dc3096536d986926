"""Lines of a script that split a model's matrices among ranks: transformers' plan, in PyTorch's own parallel styles.

These hold the same memory (tests/distributed/test_sequence_parallel.py).
"""

from __future__ import annotations

from torch import nn

from sizer.base.errors import BuildError, RequestError
from sizer.catalogue.parallel import PARALLELS
from sizer.distributed.tensor_parallel import Style, styles
from sizer.query.request import Request

PLAN = """\
    plan = {{
{rules}    }}
    parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
{tied}"""
TIED = """\
    model.tie_weights()
"""


def tensor_imports(request: Request, module: nn.Module) -> tuple[str, ...]:
    """Return the imports of a script that splits matrices of a model."""
    if request.tp == 1:
        return ()
    plan = _plan(request, module)
    classes = {style.name for style in plan.values()} | {"parallelize_module"}
    if request.lp:
        classes.add("loss_parallel")
    kinds = [kind for kind in ("Replicate", "Shard") if any(kind in str(style) for style in plan.values())]
    if not PARALLELS[request.parallel].shards:
        kinds.insert(0, "DTensor")  # some parameters are whole
    listed = "".join(f"    {name},\n" for name in sorted(classes, key=str.lower))
    return (
        f"from torch.distributed.tensor import {', '.join(kinds)}",
        f"from torch.distributed.tensor.parallel import (\n{listed})",
    )


def tensor_lines(request: Request, module: nn.Module) -> str:
    """Return the lines that split the matrices of a model on meta; empty without tensor parallel."""
    if request.tp == 1:
        return ""
    rules = "".join(f"        {name!r}: {style},\n" for name, style in _plan(request, module).items())
    return PLAN.format(rules=rules, tied=TIED if module.config.get_text_config().tie_word_embeddings else "")


def _plan(request: Request, module: nn.Module) -> dict[str, Style]:
    try:
        return styles(module, sequence=request.sp, loss=request.lp)
    except RequestError:
        raise BuildError(
            "no script can be written for tensor parallel by styles that are transformers' own",
            given=type(module).__name__,
        ) from None
