"""Steps with CUDA graphs, by Inductor (`mode="reduce-overhead"`) and by hand, as those of `tests.tracing.compiled_works`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Any]
GRAPHS = {"mode": "reduce-overhead"}


def _mlp(width: int = 256) -> nn.Module:
    return nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)).cuda()


def _rows(count: int = 256, width: int = 256) -> Tensor:
    return torch.zeros(count, width, device="cuda")


class Block(nn.Module):
    """A residual block with dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.dropout = nn.LayerNorm(256), nn.Linear(256, 1024), nn.Linear(1024, 256), dropout

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), self.dropout)


def blocks(dropout: float = 0.0, *, passes: int = 1, training: bool = True) -> Step:
    """Return the step of four blocks that are compiled one by one: a step of them is one generation of graphs."""
    model = nn.Sequential(*(Block(dropout) for _ in range(4))).cuda()
    for block in model:
        block.compile(**GRAPHS)
    optimizer, x = torch.optim.AdamW(model.parameters()), _rows()

    def step() -> None:
        for _ in range(passes):
            model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    def predict() -> None:
        with torch.no_grad():
            model(x)

    return step if training else predict


def two_models() -> Step:
    """Return the step of two compiled models with eager code between them."""
    one, other = _mlp(), _mlp()
    first, second = torch.compile(one, **GRAPHS), torch.compile(other, **GRAPHS)
    optimizer, x = torch.optim.SGD([*one.parameters(), *other.parameters()]), _rows()

    def step() -> None:
        second(F.relu(first(x)) * 2).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def grows() -> Step:
    """Return a step whose batch grows from step to step: each is compiled and run as it is."""
    model, number = _mlp(), [0]
    called = torch.compile(model, dynamic=False, **GRAPHS)

    def step() -> None:
        number[0] += 1
        called(_rows(128 * number[0])).square().mean().backward()
        model.zero_grad()

    return step


def grows_late() -> Step:
    """Return a step of batches of three sizes: the later ones are recorded after replays of the first."""
    model = _mlp()
    called, optimizer = torch.compile(model, dynamic=False, **GRAPHS), torch.optim.SGD(model.parameters())

    def step() -> None:
        for count in (128, 128, 128, 256, 512):
            called(_rows(count)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    return step


def joins_late() -> Step:
    """Return a step in which a third model comes between two others once these are replayed: their outputs are kept meanwhile."""
    models, number, x = [_mlp() for _ in range(3)], [0], _rows()
    first, last, between = (torch.compile(model, **GRAPHS) for model in models)

    def run() -> None:
        number[0] += 1
        y = first(x)
        last(between(y) if number[0] > 3 else y).square().mean().backward()
        for model in models:
            model.zero_grad()

    def step() -> None:
        run()
        run()

    return step


def keeps_a_copy() -> Step:
    """Return a step that keeps copies of what graphs return, each in a generation of its own."""
    called, x = torch.compile(_mlp(), **GRAPHS), _rows()

    def step() -> None:
        with torch.no_grad():
            for _ in range(4):
                torch.compiler.cudagraph_mark_step_begin()
                kept = called(x).clone()
                kept + 1

    return step


def whole_step() -> Step:
    """Return a step that is recorded by hand as a whole, with its optimizer, after a warm-up on another stream."""
    model, x, recorded = _mlp(), _rows(), []
    optimizer = torch.optim.AdamW(model.parameters(), capturable=True)

    def train() -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    def step() -> None:
        if not recorded:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    train()
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.graph(graph):
                loss = train()
            recorded.extend((graph, loss))
        x.copy_(_rows())
        recorded[0].replay()

    return step


def shared_pool() -> Step:
    """Return a step of two graphs in one pool, one of which draws random numbers."""
    model, x, recorded = _mlp(), _rows(), []

    def step() -> None:
        with torch.no_grad():
            if not recorded:
                model(x)
                graphs = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[0]):
                    first = model(x)
                with torch.cuda.graph(graphs[1], pool=graphs[0].pool()):
                    second = F.dropout(model(first))
                recorded.extend((*graphs, first, second))
            for graph in recorded[:2]:
                graph.replay()
            recorded[3].clone()

    return step


def capturable(name: str) -> Step:
    """Return the step of an optimizer of torch.optim that keeps its counters on the device, without graphs."""
    model, x = _mlp(), _rows()
    optimizer = getattr(torch.optim, name)(model.parameters(), capturable=True)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


CAPTURABLE = ("Adadelta", "Adam", "AdamW", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop")
GRAPH_WORKS: dict[str, Callable[[], Step]] = {
    "graphs of blocks": blocks,
    "graphs of blocks with dropout": partial(blocks, 0.1),
    "graphs of two models": two_models,
    "graphs of a growing batch": grows,
    "graphs of batches recorded late": grows_late,
    "graphs joined late": joins_late,
    "graphs whose results are copied": keeps_a_copy,
    "a whole step recorded": whole_step,
    "two graphs in a pool": shared_pool,
    **{f"capturable {name}": partial(capturable, name) for name in CAPTURABLE},
}
