from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn

from sizer.architecture.module_census import take_census
from sizer.base.errors import BuildError
from sizer.report.census import Census, DtypeRow, ModuleRow, TensorRow


def census_of(factory) -> Census:
    with torch.device("meta"):
        module = factory()
    return take_census(module, name="tiny")


class Tied(nn.Module):
    """A language model in small: the head shares the embedding's weight."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(10, 4)
        self.head = nn.Linear(4, 10)
        self.head.weight = self.embedding.weight


class Holder:
    """A plain object, not a module."""

    def __init__(self, **attributes):
        vars(self).update(attributes)


class With(nn.Module):
    """A module with the given attributes."""

    def __init__(self, **attributes):
        super().__init__()
        for name, value in attributes.items():
            setattr(self, name, value)


def test_a_linear_layer():
    census = census_of(lambda: nn.Linear(3, 5))
    # weight 5*3 = 15 and bias 5: 20 elements, 4*20 = 80 B.
    assert census == Census(
        name="tiny",
        class_name="Linear",
        parameters=20,
        trainable_parameters=20,
        buffers=0,
        parameter_bytes=80,
        buffer_bytes=0,
        by_dtype=(DtypeRow(dtype="float32", parameters=20, buffers=0, bytes=80),),
        modules=(
            ModuleRow(
                path="",
                class_name="Linear",
                parameters=20,
                trainable_parameters=20,
                buffers=0,
                parameter_bytes=80,
                buffer_bytes=0,
            ),
        ),
    )


def test_a_tied_weight_counts_once_and_its_names_are_grouped():
    census = census_of(Tied)
    # embedding 10*4 = 40, shared by the head, whose bias adds 10: 50 elements, 4*50 = 200 B.
    assert (census.parameters, census.parameter_bytes) == (50, 200)
    assert census.tied_parameters == (("embedding.weight", "head.weight"),)
    assert {row.path: row.parameters for row in census.modules} == {"": 0, "embedding": 40, "head": 10}


def test_a_module_registered_twice_counts_once():
    def build():
        layer = nn.Linear(2, 2)
        return nn.Sequential(layer, nn.ReLU(), layer)

    census = census_of(build)
    assert census.parameters == 6  # 2*2 + 2
    assert census.tied_parameters == (("0.weight", "2.weight"), ("0.bias", "2.bias"))
    assert [row.path for row in census.modules] == ["", "0", "1"]


def test_batch_norm_counts_an_int64_counter():
    census = census_of(lambda: nn.BatchNorm2d(8))
    # weight and bias 2*8 = 16 parameters; running mean and variance 2*8 = 16 float32 and one int64 num_batches_tracked:
    # buffers 17 elements, 16*4 + 8 = 72 B; float32 in all 4*(16 + 16) = 128 B.
    assert (census.parameters, census.buffers, census.buffer_bytes) == (16, 17, 72)
    assert census.by_dtype == (
        DtypeRow(dtype="float32", parameters=16, buffers=16, bytes=128),
        DtypeRow(dtype="int64", parameters=0, buffers=1, bytes=8),
    )


def test_buffers_count_whether_or_not_they_are_saved():
    def build():
        module = With()
        module.register_buffer("saved", torch.zeros(3, dtype=torch.float16))
        module.register_buffer("unsaved", torch.zeros(5, dtype=torch.bool), persistent=False)
        module.register_buffer("absent", None)
        return module

    census = census_of(build)
    assert (census.buffers, census.buffer_bytes) == (8, 11)  # 3 float16 of 2 B, 5 bool of 1 B
    assert census.unregistered_tensors == ()


def test_frozen_parameters_are_not_trainable():
    census = census_of(lambda: nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 4).requires_grad_(False)))
    # 2*3 + 3 = 9 trainable, 3*4 + 4 = 16 frozen.
    assert (census.parameters, census.trainable_parameters) == (25, 9)
    assert [(row.path, row.trainable_parameters) for row in census.modules] == [("", 0), ("0", 9), ("1", 0)]


def test_half_precision_halves_the_bytes():
    census = census_of(lambda: nn.Linear(3, 5).to(torch.bfloat16))
    assert (census.parameters, census.parameter_bytes) == (20, 40)
    assert census.by_dtype == (DtypeRow(dtype="bfloat16", parameters=20, buffers=0, bytes=40),)


def test_a_plain_attribute_is_reported_and_not_counted():
    census = census_of(lambda: With(inner=With(scale=torch.ones(2, 3, dtype=torch.float64))))
    (row,) = census.unregistered_tensors
    # 2*3 elements of 8 B
    assert row == TensorRow(name="inner.scale", shape=(2, 3), dtype="float64", device="meta", bytes=48, why=row.why)
    assert "not a buffer: .to(device) leaves it where it is" in row.why
    assert (census.parameters, census.buffers) == (0, 0)


@pytest.mark.parametrize(
    ("attribute", "names"),
    [
        (lambda t: [t(), t()], ["held[0]", "held[1]"]),
        (lambda t: (t(),), ["held[0]"]),
        (lambda t: {"a": t(), 2: [t()]}, ["held['a']", "held[2][0]"]),
        (lambda t: {t()}, ["held[0]"]),
        (lambda t: Holder(mask=t(), cache=[t()]), ["held.mask", "held.cache[0]"]),
        (lambda t: [Holder(mask=t())], ["held[0].mask"]),
        (lambda t: Holder(deeper=Holder(mask=t())), []),  # two objects deep: not opened
        (lambda t: [[[[[t()]]]]], []),  # five lists deep: not opened
        (lambda t: [nn.Linear(2, 2)], ["held[0].weight", "held[0].bias"]),  # a module that is not registered
    ],
)
def test_where_tensors_are_looked_for(attribute, names):
    census = census_of(lambda: With(held=attribute(lambda: torch.ones(3))))
    assert [row.name for row in census.unregistered_tensors] == names


def test_an_unregistered_parameter_is_told_apart():
    census = census_of(lambda: With(weights=[nn.Parameter(torch.ones(4))]))
    (row,) = census.unregistered_tensors
    assert (row.name, row.bytes, census.parameters) == ("weights[0]", 16, 0)
    assert "does not give it to the optimizer" in row.why


def test_a_list_of_registered_tensors_and_modules_is_no_news():
    def build():
        module = With(layer=nn.Linear(2, 2))
        module.again, module.weights = [module.layer], [module.layer.weight]
        return module

    assert census_of(build).unregistered_tensors == ()


def test_a_tensor_with_two_paths_is_reported_once():
    shared = Holder(table=torch.ones(4))
    census = take_census(nn.Sequential(With(first=shared), With(second=shared, table=shared.table)), name="tiny")
    assert [row.name for row in census.unregistered_tensors] == ["0.first.table"]


def test_objects_that_refer_to_each_other_come_to_an_end():
    def build():
        module, ring = With(), []
        ring.append(ring)
        module.ring, module.parent = ring, [module]
        return module

    assert census_of(build).unregistered_tensors == ()


def test_tensors_that_ignored_meta_are_named():
    def build():
        module = nn.Linear(2, 2)
        module.register_buffer("positions", torch.arange(6, device="cpu"))
        module.table = torch.zeros(3, device="cpu")
        module.weight = nn.Parameter(torch.zeros(2, 2, device="cpu"))
        return module

    census = census_of(build)
    # weight 4*4 B, positions 6*8 B, table 3*4 B; the bias is on meta.
    assert [(row.name, row.device, row.bytes) for row in census.real_tensors] == [
        ("weight", "cpu", 16),
        ("positions", "cpu", 48),
        ("table", "cpu", 12),
    ]
    assert all(row.why.startswith('made on cpu although the model was built under torch.device("meta")')
               for row in census.real_tensors)  # fmt: skip
    assert (census.parameters, census.buffers) == (6, 6)  # weight 4 and bias 2; they count wherever they live


def test_a_lazy_parameter_cannot_be_counted():
    with pytest.raises(BuildError, match=r"1\.weight is a lazy parameter without a shape: given LazyLinear, allowed"):
        take_census(nn.Sequential(nn.ReLU(), nn.LazyLinear(3)), name="tiny")


def test_a_census_is_plain_data():
    census = census_of(lambda: With(layer=nn.BatchNorm1d(2), scale=torch.ones(1)))

    def leaves(value):
        if isinstance(value, (list, tuple)):
            return [leaf for item in value for leaf in leaves(item)]
        if isinstance(value, dict):
            return [leaf for item in value.values() for leaf in leaves(item)]
        return [value]

    assert {type(leaf) for leaf in leaves(dataclasses.asdict(census))} <= {str, int}
