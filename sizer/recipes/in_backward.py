"""An optimizer that steps in the backward pass, parameter by parameter, so that gradients never exist all at once.

Source: torchtune's OptimizerInBackwardWrapper and the tutorial "How to save memory by fusing the optimizer step into the
backward pass" (docs.pytorch.org). Both register the same hooks.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial

import torch
from torch import Tensor, nn


class StepsInBackward:
    """One optimizer for each trained parameter; it steps and frees the gradient as soon as that gradient is computed.

    `on_gradient` is called with each gradient before its parameter's step.
    """

    def __init__(self, module: nn.Module, make: Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]) -> None:
        self.on_gradient: Callable[[Tensor], None] = lambda gradient: None
        self.optimizers: list[torch.optim.Optimizer] = []
        self._hooks = ExitStack()
        for parameter in module.parameters():
            if parameter.requires_grad:
                own = make([parameter])
                self.optimizers += own
                handle = parameter.register_post_accumulate_grad_hook(partial(self._step, own))
                self._hooks.callback(handle.remove)

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()

    def _step(self, own: list[torch.optim.Optimizer], parameter: Tensor) -> None:
        if parameter.grad is not None:
            self.on_gradient(parameter.grad)
        for optimizer in own:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
