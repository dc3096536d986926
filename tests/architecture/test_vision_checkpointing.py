from __future__ import annotations

import pytest
import torch
from torch import nn
from torchvision.models import DenseNet

from sizer.architecture.checkpointing import checkpoint_blocks, repeated_blocks
from sizer.architecture.torchvision_models import vision_blueprint
from sizer.base.errors import RequestError
from sizer.device.trial.trial import one_thread
from sizer.tracing.steps import place


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x):
        return x + self.dropout(self.linear(x).relu())


class Stage(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        self.layers = nn.ModuleList([Block(width) for _ in range(depth)])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def saved_bytes(module, x):
    """Bytes of the distinct storages that autograd keeps between the passes, parameters not counted."""
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)
    del out
    return sum(kept.values())


def gradients(module, x):
    torch.manual_seed(1)
    module(x).square().sum().backward()
    return [parameter.grad.clone() for parameter in module.parameters()]


def test_stages_are_opened_and_single_modules_left_alone():
    module = nn.Sequential(nn.Conv2d(3, 3, 1), Stage(4, 2), Stage(4, 1), nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    assert repeated_blocks(module) == [*module[1].layers, *module[2].layers]
    assert repeated_blocks(nn.Sequential(Block(4), nn.Linear(4, 4))) == []


def test_gradients_stay_and_saved_tensors_go():
    torch.manual_seed(0)
    module = nn.Sequential(*[Block(32) for _ in range(4)])
    x = torch.randn(64, 32)
    expected = gradients(module, x)
    module.zero_grad()
    before = saved_bytes(module, x)
    names = [type(block).__name__ for block in module]
    checkpoint_blocks(module)
    assert [type(block).__name__ for block in module] == names
    assert repeated_blocks(module) == [*module]
    assert all(map(torch.equal, gradients(module, x), expected))
    # A tensor here has 64*32*4 = 8192 B. Each of the four blocks kept its input, the ReLU's output and the dropout mask; with
    # checkpointing its input alone.
    assert before == 4 * 3 * 8192
    assert saved_bytes(module, x) == 4 * 8192


def test_evaluation_runs_the_blocks_directly(monkeypatch):
    module = nn.Sequential(Block(4), Block(4))
    checkpoint_blocks(module)
    monkeypatch.setattr("sizer.architecture.checkpointing.checkpoint", None)
    assert module.eval()(torch.ones(1, 4)).shape == (1, 4)
    with torch.no_grad():
        assert module.train()(torch.ones(1, 4)).shape == (1, 4)


def test_a_list_that_grows_after_the_call_does_not_change_what_is_run_again():
    # A dense block hands every layer one list of features and appends to it afterwards.
    torch.manual_seed(0)
    module = DenseNet(growth_rate=4, block_config=(2, 2), num_init_features=4, num_classes=3).train()
    x = torch.randn(2, 3, 32, 32)
    with one_thread():
        expected = gradients(module, x)
        module.zero_grad()
        checkpoint_blocks(module)
        assert all(map(torch.equal, gradients(module, x), expected))


@pytest.mark.parametrize("name", ["resnet18", "swin_t"])
def test_a_real_model_has_the_same_gradients(name):
    blueprint = vision_blueprint(name, image_size=(40, 40), checkpointing=True)
    example = place(blueprint.example(2, True), torch.float32, torch.Tensor.contiguous)
    example.args[0].uniform_(generator=torch.Generator().manual_seed(0))
    results = []
    for switch in (lambda module: None, blueprint.checkpoint):
        with one_thread():
            torch.manual_seed(0)
            module = blueprint.build().train()
            switch(module)
            torch.manual_seed(1)
            blueprint.loss(module, example).backward()
        results.append([parameter.grad for parameter in module.parameters()])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", ["alexnet", "vgg16_bn", "ssd300_vgg16"])
def test_models_without_blocks_refuse(name):
    with pytest.raises(
        RequestError, match=f"checkpointing for {name}: given 1, allowed 0; it is a plain stack of layers"
    ):
        vision_blueprint(name, image_size=None, checkpointing=True)
