"""PlacementReport mistakes, one module each; what only looks like one; and real architectures, which have none."""

from __future__ import annotations

import json
import linecache
import re
import threading
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sizer
from sizer.__main__ import main
from sizer.base.errors import BuildError, RequestError
from sizer.commands.placement import format_placement
from sizer.placement import report
from sizer.placement.check import check_placement, check_request
from sizer.placement.report import Group, PlacementReport
from sizer.processes.child import Channel
from sizer.query.text import parse_query
from sizer.service import tasks

X = torch.arange(8.0).reshape(2, 4)


class Model(nn.Module):
    """A linear layer from 4 to 4; its subclasses do something with it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def problems(found: PlacementReport) -> list[str]:
    assert found.ran, found.reason
    return [finding.problem for finding in found.findings]


def line_at(where: str) -> str:
    """The source at "file:line in function"."""
    file, _, rest = where.partition(":")
    return linecache.getline(file, int(rest.split()[0])).strip()


# ------------------------------------------------------------------------------------------------- made on the wrong device


class MakesNoise(Model):
    def forward(self, x):
        for _ in range(3):
            noise = torch.zeros(2, 4)
            x = self.linear(x) + noise
        return x


def test_a_factory_call_without_a_device():
    (finding,) = check_placement(MakesNoise(), (X,)).findings
    assert (finding.problem, finding.breaks) == (report.MADE_ELSEWHERE.problem, True)
    assert line_at(finding.where) == "noise = torch.zeros(2, 4)"
    assert finding.where.endswith("in MakesNoise.forward")
    assert finding.what.startswith(
        "a float32 tensor of shape (2, 4) is made on the CPU, and add uses it with the model's own tensors at "
    )
    assert line_at(finding.what.rpartition(" at ")[2]) == "x = self.linear(x) + noise"
    assert "device=x.device" in finding.todo


class KeepsADevice(Model):
    """Whose device was true when it was made."""

    def __init__(self):
        super().__init__()
        self.device = torch.device("cpu")

    def forward(self, x):
        return self.linear(x) * torch.ones(4, device=self.device)


class WritesIntoOne(Model):
    def forward(self, x):
        total = torch.zeros(4)
        total += self.linear(x).sum(0)
        return total


class Masks(Model):
    def forward(self, x):
        mask = torch.ones(2, 2, dtype=torch.bool).tril()
        x = self.linear(x)[None]
        return F.scaled_dot_product_attention(x, x, x, attn_mask=mask)


class LooksUp(Model):
    def forward(self, x):
        return F.embedding(torch.tensor([0, 2]), self.linear.weight) + x


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Model(), MakesNoise()])

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


@pytest.mark.parametrize("kind", [KeepsADevice, WritesIntoOne, Masks, LooksUp, Inner])
def test_other_tensors_made_on_the_cpu(kind):
    assert problems(check_placement(kind(), (X,))) == [report.MADE_ELSEWHERE.problem]


# ---------------------------------------------------------------------------------------------------------- left behind


class HasAMask(Model):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(4)

    def forward(self, x):
        return self.linear(x) * self.mask


class HasMasks(Model):
    def __init__(self):
        super().__init__()
        self.masks = {"first": [torch.ones(4)]}

    def forward(self, x):
        return self.linear(x) * self.masks["first"][0].to(x.device)


class HasAnUnusedOne(Model):
    def __init__(self):
        super().__init__()
        self.note = torch.ones(4)


class MovesItOnce(HasAMask):
    def forward(self, x):
        self.mask = self.mask.to(x.device)
        return self.linear(x) * self.mask


class HasALayerInAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.more = [nn.Linear(4, 4, bias=False)]

    def forward(self, x):
        return self.more[0](self.linear(x))


def test_an_attribute_that_to_leaves_behind():
    found = check_placement(HasAMask(), (X,))
    (finding,) = found.findings
    assert (finding.problem, finding.breaks) == (report.LEFT_BEHIND.problem, True)
    assert finding.what == "mask is neither parameter nor buffer, and mul uses it with the model's own tensors"
    assert line_at(finding.where) == "return self.linear(x) * self.mask"
    assert [(row.name, row.bytes) for row in found.stray] == [("mask", 16)]


def test_an_attribute_that_is_copied_each_time():
    (finding,) = check_placement(HasMasks(), (X,)).findings
    assert (finding.problem, finding.breaks) == (report.COPIED.problem, False)
    assert finding.what.startswith("masks['first'][0] is neither parameter nor buffer")


@pytest.mark.parametrize("kind", [HasAnUnusedOne, MovesItOnce])
def test_an_attribute_that_does_no_harm_is_listed_alone(kind):
    found = check_placement(kind(), (X,))
    assert problems(found) == []
    assert len(found.stray) == 1


def test_a_layer_in_a_plain_list():
    found = check_placement(HasALayerInAList(), (X,))
    assert problems(found) == [report.UNREGISTERED.problem, report.LEFT_BEHIND.problem]
    first, second = found.findings
    assert (first.where, first.breaks) == ("more[0].weight", False)
    assert "nn.ModuleList" in first.todo
    assert second.what.startswith("more[0].weight is neither parameter nor buffer, ")


# ---------------------------------------------------------------------------------------------------- inputs and weights


def test_an_input_on_another_device():
    (finding,) = check_placement(Model(), (X.to("meta"),)).findings
    assert (finding.problem, finding.breaks) == (report.INPUT_DEVICE.problem, True)
    assert finding.what == "input 0 is on meta, the weights are on cpu"
    assert finding.todo.startswith('x = x.to("cpu") before the call')
    assert finding.where.endswith("in Model.forward, in module linear")


class MovesItsInput(Model):
    def forward(self, x):
        return self.linear(x.to(self.linear.weight.device))


def test_an_input_that_forward_moves_is_no_mistake():
    assert problems(check_placement(MovesItsInput(), (X.to("meta"),))) == []


class TakesADict(Model):
    def forward(self, batch, scale=None):
        return self.linear(batch["x"][0]) * scale


def test_inputs_are_named_as_they_are_given():
    given = {"batch": {"x": [X.to("meta")]}, "scale": torch.ones(4, device="meta")}
    found = check_placement(TakesADict(), given)
    assert [finding.what.partition(" is on ")[0] for finding in found.findings] == ["batch['x'][0]", "scale"]
    assert found.findings[1].todo.startswith('scale = scale.to("cpu")')


def test_weights_on_two_devices():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=False).to("meta"))
    (finding,) = check_placement(model, (X,)).findings
    # 20 numbers on the CPU, 16 on meta
    assert (finding.problem, finding.where) == (report.MIXED_DEVICES.problem, "1.weight")
    assert finding.what == "1 of 3 parameters and buffers are on meta, the rest on cpu"


class CastsItsInput(Model):
    def forward(self, x):
        return self.linear(x.to(self.linear.weight.dtype))


class MixesDtypes(Model):
    def forward(self, x):
        return self.linear(x) @ torch.eye(4, device=x.device)


class UnderAutocast(Model):
    def forward(self, x):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            return self.linear(x)


def test_an_input_of_another_dtype():
    (finding,) = check_placement(Model().bfloat16(), (X,)).findings
    assert (finding.problem, finding.breaks) == (report.INPUT_DTYPE.problem, True)
    assert finding.what == "input 0: float32, but the weights are bfloat16"
    assert ".to(torch.bfloat16)" in finding.todo


def test_two_dtypes_in_one_product():
    (finding,) = check_placement(MixesDtypes().half(), (X.half(),)).findings
    assert (finding.problem, finding.what) == (
        report.MIXED_DTYPES.problem,
        "mm gets tensors of float32 and of float16",
    )


@pytest.mark.parametrize(("kind", "dtype"), [(CastsItsInput, torch.bfloat16), (UnderAutocast, torch.float32)])
def test_dtypes_that_meet_only_after_a_cast(kind, dtype):
    given = X if dtype == torch.bfloat16 else X.bfloat16()
    assert problems(check_placement(kind().to(dtype), (given,))) == []


# ------------------------------------------------------------------------------------------------- names, dropped results


class NamesADevice(Model):
    def forward(self, x):
        return self.linear(x) + torch.zeros(4, device="cuda")


class CallsCuda(Model):
    def forward(self, x):
        return self.linear(x.cuda())


class AsksFirst(Model):
    """The idiom of many older models; it is right on CUDA and on the CPU."""

    def forward(self, x):
        device = "cuda" if x.is_cuda else "cpu"
        return self.linear(x) + torch.zeros(4, device=device)


class DropsIt(Model):
    def forward(self, x):
        x.to("cpu")
        x.to(*("cpu",), **{"dtype": torch.float32})
        x.to(device="cpu").float()
        y = x.to(torch.float32)
        self.linear.to(torch.float32)
        return self.linear(y.float()).to(y.dtype)


@pytest.mark.parametrize("kind", [NamesADevice, CallsCuda])
def test_a_device_in_the_code(kind):
    (finding,) = check_placement(kind(), (X,)).findings
    assert (finding.problem, finding.what) == (
        report.HARD_CODED.problem,
        "the code names cuda, the weights are on cpu",
    )


def test_code_that_asks_before_it_names_a_device():
    assert problems(check_placement(AsksFirst(), (X,))) == []


def test_a_result_that_is_dropped():
    found = check_placement(DropsIt(), (X,))
    assert problems(found) == [report.DROPPED.problem] * 3
    assert [line_at(finding.where) for finding in found.findings] == [
        'x.to("cpu")',
        'x.to(*("cpu",), **{"dtype": torch.float32})',
        'x.to(device="cpu").float()',
    ]
    assert found.findings[0].todo == "assign it: x = x.to(...)"


# ------------------------------------------------------------------------------------------------ what a device does take


class MixesAsDevicesDo(nn.Module):
    """Scalars, indices, lengths and copies may come from the CPU."""

    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(4, 4, batch_first=True)
        self.register_buffer("table", torch.ones(4, 4))

    def forward(self, x):
        x = x * torch.tensor(2.0) + torch.arange(3)[1]
        x = x[:, torch.tensor([0, 1, 2, 3])]
        x[torch.tensor([True, False])] = 0.0
        x[:, 0] = torch.zeros(2)
        x = x + torch.linspace(0, 1, 4).to(x)
        x = torch.where(x > 0, x, torch.tensor(0.0)) @ self.table
        packed = nn.utils.rnn.pack_padded_sequence(x[None], torch.tensor([2]), batch_first=True)
        out, _ = self.lstm(packed)
        return nn.utils.rnn.pad_packed_sequence(out, batch_first=True)[0]


def test_what_a_device_takes_from_the_cpu_is_no_mistake():
    assert problems(check_placement(MixesAsDevicesDo(), (X,))) == []


class Branches(Model):
    """Control flow on an input, on a buffer, and on a value that only the weights know."""

    def __init__(self):
        super().__init__()
        self.register_buffer("limit", torch.tensor([3, 4]))

    def forward(self, x):
        if x.max() != 7 or self.limit.tolist() != [3, 4]:
            return torch.zeros(4) + x
        return self.linear(x) if self.linear.weight.sum() > 0 else x


def test_values_of_inputs_and_buffers_are_known_and_others_are_noted():
    found = check_placement(Branches(), (X,))
    assert problems(found) == []
    assert found.notes and all("taken as" in note for note in found.notes)


# ----------------------------------------------------------------------------------------------------- tensors at rest


def test_tensors_by_kind_device_and_dtype():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    found = check_placement(model, (X,))
    assert found.groups == (
        Group(kind="parameters", device="cpu", dtype="float32", tensors=4, elements=21, bytes=84),  # 12 + 3 + 3 + 3
        Group(kind="buffers", device="cpu", dtype="float32", tensors=2, elements=6, bytes=24),
        Group(kind="buffers", device="cpu", dtype="int64", tensors=1, elements=1, bytes=8),
        Group(kind="inputs", device="cpu", dtype="float32", tensors=1, elements=8, bytes=32),
    )
    assert (found.name, found.class_name, found.device) == ("Sequential", "Sequential", "cpu")
    assert PlacementReport.from_dict(json.loads(json.dumps(found.to_dict()))) == found


def test_a_module_on_meta_takes_inputs_from_anywhere():
    with torch.device("meta"):
        model = MakesNoise()
    for given in (X, X.to("meta")):
        found = check_placement(model, (given,))
        assert found.device == "meta"
        assert problems(found) == [report.MADE_ELSEWHERE.problem]


def test_a_module_without_weights_is_where_its_inputs_are():
    class Doubles(nn.Module):
        def forward(self, x):
            return x + torch.ones(4)

    assert problems(check_placement(Doubles(), (X.to("meta"),))) == [report.MADE_ELSEWHERE.problem]
    assert check_placement(Doubles(), ()).device == "cpu"


def test_the_module_is_not_touched():
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Dropout(0.5), MovesItOnceOf3())
    model[0].weight.grad = torch.ones(3, 4)
    before = {name: (id(tensor), tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    mask, state = model[3].mask, torch.get_rng_state()
    check_placement(model, (X,))
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert id(tensor) == before[name][0] and torch.equal(tensor, before[name][1])
    assert model[3].mask is mask and mask.device.type == "cpu"
    assert torch.equal(model[0].weight.grad, torch.ones(3, 4))
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and model[1].num_batches_tracked == 0


class MovesItOnceOf3(nn.Module):
    def __init__(self):
        super().__init__()
        self.mask = torch.ones(3)

    def forward(self, x):
        self.mask = self.mask.to(x.device)
        return x.mul_(self.mask)


def test_tied_weights_stay_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            assert self.head.weight is self.embed.weight
            return self.head(self.embed(ids))

    found = check_placement(Tied(), (torch.tensor([1, 2]),))
    assert problems(found) == []
    assert found.groups[0].elements == 32


def test_what_torch_compile_wraps_is_checked_itself():
    wrapper = nn.Module()
    wrapper._orig_mod = MakesNoise()  # as torch._dynamo.eval_frame.OptimizedModule has it
    assert problems(check_placement(wrapper, (X,))) == [report.MADE_ELSEWHERE.problem]


# ------------------------------------------------------------------------------------------------------ what cannot be run


def test_a_pass_that_fails_keeps_what_was_found_before():
    class Fails(MakesNoise):
        def forward(self, x):
            super().forward(x)
            raise ValueError("no such mode")

    found = check_placement(Fails(), (X,))
    assert (found.ran, [finding.problem for finding in found.findings]) == (False, [report.MADE_ELSEWHERE.problem])
    assert found.reason.startswith("ValueError") and "no such mode" in found.reason


def test_a_module_that_cannot_be_copied_says_so():
    model = Model()
    model.lock = threading.Lock()
    found = check_placement(model, (X,))
    assert not found.ran
    assert found.reason == "the module cannot be copied (TypeError: cannot pickle '_thread.lock' object)"


def test_a_lazy_parameter_is_refused():
    with pytest.raises(BuildError, match="is a lazy parameter without a shape"):
        check_placement(nn.LazyLinear(3), (X,))


# -------------------------------------------------------------------------------------------------------- built-in sources


@pytest.mark.parametrize(
    "query",
    [
        "arch=torchvision:swin_t&dtype=bfloat16&image=64",
        "arch=torchvision:fasterrcnn_mobilenet_v3_large_320_fpn",
        "arch=torchvision:lraspp_mobilenet_v3_large&mode=inference&image=64",
        "arch=hf:llama-3.2-1b&dtype=amp-bfloat16&seq=32",
        "arch=hf:bert-base-uncased&dtype=float16&seq=32",
        "arch=hf:t5-small&dtype=bfloat16&seq=32",
        "arch=hf:mixtral-8x7b&seq=16",
        "arch=hf:wav2vec2-base-960h",
    ],
)
def test_real_architectures_give_no_alarm(query):
    found = check_request(parse_query(query))
    assert problems(found) == []
    assert found.device == "meta"
    assert {group.kind for group in found.groups} >= {"parameters", "inputs"}


def test_the_job_answers_in_plain_values():
    channel = mock.create_autospec(Channel, instance=True)
    job = {"task": "placement", "query": "arch=hf:gpt2&dtype=bfloat16&seq=16", "config_text": None}
    found = PlacementReport.from_dict(json.loads(json.dumps(tasks.run(job, channel))))
    assert (found.class_name, found.findings) == ("GPT2LMHeadModel", ())
    assert channel.progress.mock_calls == [
        mock.call("building the model on meta"),
        mock.call("running a step on meta tensors in bfloat16"),
    ]


def test_command_line(capsys):
    assert main(["placement", "arch=torchvision:alexnet&dtype=bfloat16&image=64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "alexnet (AlexNet)"
    assert lines[2].split() == ["parameters", "meta", "bfloat16", "16", "61,100,840", "116.54", "MiB"]
    assert "No placement mistakes were found." in lines


def test_lines_begin_with_what_breaks():
    found = check_placement(HasMasksAndNoise(), (X,))
    lines = [line for line in format_placement(found) if ": " in line]
    assert lines[0].startswith(f"{report.MADE_ELSEWHERE.problem}: a float32 tensor")
    assert lines[4].startswith(f"{report.COPIED.problem} (works, but): masks")
    assert lines[1].startswith("    where: ") and lines[3].startswith("    do:    ")


class HasMasksAndNoise(HasMasks):
    def forward(self, x):
        return super().forward(x) + torch.zeros(4)


def test_the_package_offers_it():
    assert sizer.check_placement(Model(), (X,)).findings == ()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((MakesNoise, (X,)), "module: given the class MakesNoise, allowed an nn.Module; pass MyModel()"),
        ((MakesNoise(), X), "inputs: given an object of Tensor, allowed a tuple or a dict"),
    ],
)
def test_what_is_no_module_and_what_are_no_inputs_is_refused(arguments: tuple, words: str) -> None:
    with pytest.raises(RequestError, match=re.escape(words)):
        check_placement(*arguments)
