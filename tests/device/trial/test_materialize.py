"""Modules for a device: buffers with their true values, weights that cost nothing to make, ties kept."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from sizer.architecture.blueprint import Blueprint
from sizer.architecture.torchvision_models import vision_blueprint
from sizer.base.errors import BuildError
from sizer.device.trial.materialize import (
    allocate_parameters,
    build_without_weights,
    initialize_parameters,
    load,
    parameter_and_buffer_bytes,
)
from tests.device.blueprints import blueprint, perceptron
from tests.tracing.models import BERT, GPT2, LLAMA, T5, VIT, WHISPER, text

CPU = torch.device("cpu")


def vision(name: str) -> Blueprint:
    return vision_blueprint(name, image_size=None, checkpointing=False)


MODELS: dict[str, Callable[[], Blueprint]] = {
    "resnet18": lambda: vision("resnet18"),
    "swin_t": lambda: vision("swin_t"),
    "regnet": lambda: vision("regnet_y_400mf"),
    "quantizable": lambda: vision("quantized_mobilenet_v2"),
    "detection": lambda: vision("fasterrcnn_mobilenet_v3_large_320_fpn"),
    "gpt2": lambda: text(**{**GPT2, "n_layer": 1, "n_embd": 24, "n_head": 2}),
    "bert": lambda: text(**{**BERT, "num_hidden_layers": 1, "vocab_size": 500}),
    "llama": lambda: text(**LLAMA),
    "t5": lambda: text(**{**T5, "num_layers": 1, "vocab_size": 500}),
    "vit": lambda: text(length=None, **{**VIT, "num_hidden_layers": 1}),
    "whisper": lambda: text(length=None, **WHISPER),
}


@pytest.mark.parametrize("name", MODELS)
def test_a_module_is_what_its_constructor_makes_of_it(name: str) -> None:
    plan = MODELS[name]()
    ordinary = plan.build()
    built = build_without_weights(plan, torch.float32)

    assert all(parameter.is_meta for parameter in built.parameters())
    module = load(built, CPU)
    buffers = dict(module.named_buffers())
    assert list(buffers) == [path for path, _ in ordinary.named_buffers()]
    for path, buffer in ordinary.named_buffers():
        assert torch.equal(buffers[path], buffer), path
    shapes = [(path, p.shape, p.dtype, p.requires_grad) for path, p in module.named_parameters()]
    assert shapes == [(path, p.shape, p.dtype, p.requires_grad) for path, p in ordinary.named_parameters()]
    assert all(parameter.device == CPU for parameter in module.parameters())


def test_rotary_tables_and_positions_are_there() -> None:
    llama = dict(build_without_weights(MODELS["llama"](), torch.float32).named_buffers())
    # 256 / 8 = 32 values a head: frequencies 10000 ** (-2i/32) for i in 0..15
    expected = 10000.0 ** (-torch.arange(0, 32, 2).float() / 32)
    assert torch.allclose(llama["model.rotary_emb.inv_freq"], expected)
    bert = dict(build_without_weights(MODELS["bert"](), torch.float32).named_buffers())
    assert bert["bert.embeddings.position_ids"].tolist() == [list(range(512))]


def test_floating_point_alone_is_cast() -> None:
    module = load(build_without_weights(blueprint(lambda: nn.BatchNorm1d(3)), torch.bfloat16), CPU)
    assert module.weight.dtype == module.running_mean.dtype == torch.bfloat16
    assert module.num_batches_tracked.dtype == torch.int64
    assert module.running_var.tolist() == [1.0, 1.0, 1.0]


class Tied(nn.Module):
    """Two layers with one weight, one frozen parameter, one that carries an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.frozen = nn.Parameter(torch.zeros(2), requires_grad=False)
        self.frozen.marked = True


def test_ties_attributes_and_frozen_weights_stay() -> None:
    module = build_without_weights(blueprint(Tied), torch.float32)
    # 9 weights that two layers share, two biases of 3, 2 frozen ones
    assert parameter_and_buffer_bytes(module) == (4 * (9 + 3 + 3 + 2), 0)
    module = load(module, CPU)
    assert module.first.weight is module.second.weight
    assert module.frozen.marked and not module.frozen.requires_grad
    assert {p.device.type for p in module.parameters()} == {"cpu"}
    assert parameter_and_buffer_bytes(module) == parameter_and_buffer_bytes(module, "cpu") == (68, 0)
    assert parameter_and_buffer_bytes(module, "cuda") == (0, 0)  # all of it is on the host


def test_an_accelerator_gets_the_module_by_its_own_to() -> None:
    module = build_without_weights(blueprint(Tied), torch.float32)
    allocate_parameters(module)
    assert module.first.weight is module.second.weight and module.first.weight.device == CPU
    moved: list[str] = []
    module.to = lambda device: moved.append(device.type) or module  # type: ignore[method-assign]
    assert load(module, torch.device("cuda:0")) is module
    assert moved == ["cuda"]


class Reader(nn.Module):
    """A constructor that wants values of a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2,), 3.0))
        if how == "item":
            self.scale = self.weight.sum().item()
        elif how == "buffer":
            self.register_buffer("twice", self.weight.detach() * 2)
        else:
            self.twice = self.weight.detach() * 2


@pytest.mark.parametrize("how", ["item", "buffer", "attribute"])
def test_a_constructor_that_reads_its_weights_finds_them(how: str) -> None:
    module = build_without_weights(blueprint(lambda: Reader(how)), torch.float32)
    assert module.weight.is_meta
    if how == "item":
        assert module.scale == 6.0
    else:
        assert module.twice.tolist() == [6.0, 6.0]


def test_a_constructor_that_fails_says_so() -> None:
    def broken() -> nn.Module:
        raise ValueError("no such layer")

    with pytest.raises(ValueError, match="no such layer"):
        build_without_weights(blueprint(broken), torch.float32)


def test_recurrent_layers_know_their_new_weights() -> None:
    module = load(build_without_weights(blueprint(lambda: nn.LSTM(3, 4, batch_first=True)), torch.float32), CPU)
    initialize_parameters(module)
    output, _ = module(torch.ones(2, 5, 3))
    output.sum().backward()
    assert module.weight_ih_l0.grad.abs().sum() > 0


def test_no_checkpointing_where_there_is_none() -> None:
    with pytest.raises(BuildError, match="Tiny has no gradient checkpointing: given checkpointing=1, allowed 0"):
        build_without_weights(blueprint(perceptron, 4), torch.float32, checkpointing=True)


def test_weights_are_small_and_scales_are_one() -> None:
    module = load(
        build_without_weights(blueprint(lambda: nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))), torch.float32), CPU
    )
    torch.manual_seed(0)
    initialize_parameters(module)
    linear, norm = module
    assert 0.015 < linear.weight.std() < 0.025 and linear.weight.abs().max() < 0.2
    assert linear.bias.tolist() == norm.bias.tolist() == [0.0] * 64
    assert norm.weight.tolist() == [1.0] * 64


def test_a_buffer_of_a_module_that_several_share_is_copied_once():
    def sharing() -> nn.Module:
        norm = nn.BatchNorm1d(4)
        return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), norm) for _ in range(50)))

    module = load(build_without_weights(blueprint(sharing), torch.float32), CPU)
    first = module[0][1]
    assert all(part[1] is first for part in module)
    assert {name: tuple(buffer.shape) for name, buffer in first.named_buffers()} == {
        "running_mean": (4,), "running_var": (4,), "num_batches_tracked": ()
    }  # fmt: skip
