"""Levers: each one's figures are those of its question asked anew, and the smallest set fits by its own trace."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from importlib.util import find_spec

import pytest
import torch
import transformers
from torch import nn

from sizer.base.codec import decode, encode
from sizer.base.config_json import encode_config
from sizer.base.errors import BuildError, RequestError
from sizer.base.versions import installed_version
from sizer.catalogue.optimizers import OPTIMIZERS
from sizer.decision.cells import Cells
from sizer.decision.lever_table import ADAPTERS, LEVERS, OTHER_WORK
from sizer.decision.levers import describe_effect, levers
from sizer.query.text import format_query, parse_query
from sizer.report.decision import LeverReport, saves
from sizer.tracing.compiled.names import OLDEST_READ
from tests.decision.questions import (
    ADAPTED,
    AT_ONCE,
    CNN,
    DETECTION,
    FOR_EACH_SAMPLE,
    IN_TESTS,
    LANGUAGE,
    SERVED,
    TOO_LARGE,
    TWO_LAYERS,
    VISION,
    anew,
    fits_by_its_own_trace,
)

HALVED = "arch=torchvision:resnet18&image=96&dtype=float32&batch=%d&gpu=custom:3GiB@8.9"


@pytest.mark.parametrize("batch", [512, pytest.param(500, marks=pytest.mark.exhaustive), 509])
def test_accumulated_batches_divide_the_batch(batch):
    row = next(row for row in asked(HALVED % batch)[-1].rows if row.key == "batch")
    smaller = parse_query(row.query)
    if batch == 509:  # a prime number
        assert smaller.batches[0] < 509 <= smaller.batches[0] * smaller.accumulate
        return
    assert smaller.batches[0] * smaller.accumulate == batch
    assert row.cell.fits is True
    twice = next(size for size in range(smaller.batches[0] + 1, batch + 1) if batch % size == 0)
    assert twice == batch or fits_by_its_own_trace(row.query, batches=(twice,)) is not True


def test_a_lever_that_saves_nothing_says_why(grown):
    base = grown[-1].base
    for row in grown[-1].rows:
        if row.cell is not None and (row.key == "expandable" or not saves(row, base)):
            assert row.effect.endswith("."), row.key
    segments = next(row for row in grown[-1].rows if row.key == "expandable")
    assert segments.effect.startswith("Reserved memory ")


def test_a_dtype_without_kernels_has_its_reason():
    query = FOR_EACH_SAMPLE.replace("gpu=custom:2GiB@8.0", "gpu=rtx-4060-8gb")
    row = next(row for row in asked(query)[-1].rows if row.key == "bfloat16")
    assert row.cell is None
    assert "torchvision's operator nms has no bfloat16 kernel" in row.reason
    with pytest.raises(RequestError, match="nms has no bfloat16 kernel"):
        list(levers(parse_query(query.replace("float32", "bfloat16"))))


@cache
def asked(query: str) -> list[LeverReport]:
    return list(levers(parse_query(query)))


# A language model has nearly all the levers that a CNN has.
@pytest.fixture(
    scope="module",
    params=[
        pytest.param(query, id=name, marks=pytest.mark.exhaustive if name == "CNN" else ())
        for name, query in IN_TESTS.items()
    ],
)
def grown(request) -> list[LeverReport]:
    return asked(request.param)


def test_a_lever_saves_what_its_question_asked_anew_says(grown):
    found = grown[-1]
    assert found.base == anew(found.query)
    for row in found.rows:
        if row.key == "image" and "multiple of" in row.reason:  # a ViT's patches
            assert row.cell is None
            continue
        assert row.cell is not None, row.reason
        assert row.cell == anew(row.query), row.key


@pytest.mark.exhaustive
def test_smaller_batches_are_accumulated():
    four = LANGUAGE.replace("batch=2", "batch=4")
    row = next(row for row in asked(four)[-1].rows if row.key == "batch")
    smaller = parse_query(row.query)
    (batch,) = smaller.batches
    assert smaller.accumulate * batch == 4 and smaller.accumulate > 1
    row = next(row for row in list(levers(parse_query(SERVED)))[-1].rows if row.key == "batch")
    assert parse_query(row.query).accumulate == 1


def test_a_part_of_the_model_trains_alone():
    pytest.importorskip("peft")
    rows = {row.key: row for row in asked(LANGUAGE)[-1].rows}
    base = anew(LANGUAGE)
    assert rows["lora"].cell == anew(f"{LANGUAGE}&train=adapter")
    assert rows["lora"].cell.peak_allocated_bytes < base.peak_allocated_bytes
    assert "get_peft_model(model, LoraConfig(r=16" in rows["lora"].code
    assert rows["head"].cell == anew(f"{LANGUAGE}&train=head")
    assert keys_of(f"{LANGUAGE}&train=adapter").isdisjoint({"lora", "head"})


def test_weights_and_optimizer_state_are_quantized():
    pytest.importorskip("peft")
    pytest.importorskip("bitsandbytes")
    rows = {row.key: row for row in asked(LANGUAGE)[-1].rows}
    assert rows["qlora"].cell == anew(f"{LANGUAGE}&train=adapter&weights=nf4-dq")
    assert rows["adamw-8bit"].cell == anew(f"{LANGUAGE}&optimizer=adamw-8bit")
    assert rows["paged-adamw-8bit"].cell.peak_allocated_bytes < rows["adamw-8bit"].cell.peak_allocated_bytes
    assert keys_of(f"{LANGUAGE}&optimizer=adamw-8bit&train=adapter&weights=int8").isdisjoint({"qlora", "adamw-8bit"})


def test_a_model_that_is_only_run_has_levers_of_its_own():
    pytest.importorskip("bitsandbytes")
    found = asked(AT_ONCE)[-1]
    rows = {row.key: row for row in found.rows}
    assert rows["int8"].query == format_query(parse_query(f"{AT_ONCE}&weights=int8"))
    assert rows["nf4-dq"].query == format_query(parse_query(f"{AT_ONCE}&weights=nf4-dq"))
    assert rows["logits"].query == format_query(
        parse_query(f"{AT_ONCE.replace('mode=inference', 'mode=generate')}&new=1")
    )
    # 64 × 255 logits of 50,257 words in float32 are 3,128 MiB; beside a forward pass's own there is little at their peak
    assert found.base.peak_allocated_bytes - rows["logits"].cell.peak_allocated_bytes > 2 * 2**30
    assert rows["nf4-dq"].cell.peak_allocated_bytes < rows["int8"].cell.peak_allocated_bytes
    assert rows["int8"].cell.peak_allocated_bytes < found.base.peak_allocated_bytes
    assert (rows["batch"].title, rows["bfloat16"].cost) == ("Batches of 12", "precision of weights")


@pytest.mark.parametrize(
    ("config", "offered"),
    [
        ({"model_type": "llama"}, {"int8", "nf4-dq", "logits"}),
        ({"model_type": "llama", "quantization_config": {"quant_method": "fp8"}}, {"logits"}),  # a copy is larger
        ({"model_type": "bert"}, {"int8", "nf4-dq"}),  # it has no text to go on with
        ({"model_type": "t5"}, {"int8", "nf4-dq"}),  # its decoder's logits are of another text than the prompt
    ],
)
def test_what_a_model_that_is_run_is_offered(config: dict, offered: set[str]):
    pytest.importorskip("bitsandbytes")
    packed = encode_config(json.dumps(config | {"num_hidden_layers": 1, "num_layers": 1}))
    query = f"arch=config:{packed}&seq=8&mode=inference&dtype=bfloat16&batch=1&gpu=h100-80gb"
    assert keys_of(query) & {"int8", "nf4-dq", "logits"} == offered


def test_the_smallest_set_fits_by_its_own_trace(grown):
    found = grown[-1]
    if found.base.fits is True:
        assert found.smallest is None
        assert found.search == "It fits unchanged."
        return
    assert found.smallest is not None, found.search
    assert fits_by_its_own_trace(found.smallest.query) is True
    assert found.smallest.cell == anew(found.smallest.query)
    singles = {row.key for row in found.rows if row.cell.fits is True and row.key not in OTHER_WORK}
    assert (len(found.smallest.keys) == 1) == bool(singles)


def test_it_grows_row_by_row(grown):
    last = grown[-1]
    for report in grown:
        assert report.base == last.base
        assert report.rows == last.rows[: len(report.rows)]
        assert len(report.rows) + len(report.pending) == len(last.rows)
    assert [len(report.rows) for report in grown[: len(last.rows) + 1]] == list(range(len(last.rows) + 1))


def test_it_survives_the_way_to_the_page(grown):
    assert decode(LeverReport, encode(grown[-1])) == grown[-1]


def keys_of(query: str) -> set[str]:
    return {row.key for row in next(iter(levers(parse_query(query)))).rows} | set(
        next(iter(levers(parse_query(query)))).pending
    )


LOSSES = ("loss", "loss-trl", "loss-liger", "liger", "activations")
OF_OBJECTIVES = ("reference", "cached")
IN_RECIPES = (*LOSSES, *OF_OBJECTIVES, "optimizer-host")  # their code runs in tests/recipes
FLOAT16 = {"amp-float16", "float16"}  # offered where there is no bfloat16


def test_what_does_not_apply_is_not_offered():
    of_language = {"sdpa", "seq", "fla", "lora", "qlora", "static", "new", "int8", "nf4-dq", "logits", *LOSSES, *OF_OBJECTIVES}
    absent = () if find_spec("torchao") else ("optimizer-host",)
    of_compiled = ("compile", "budget", "graphs")
    assert keys_of(CNN) == {lever.key for lever in LEVERS} - {*of_language, *FLOAT16, *absent, "outputs", *of_compiled}
    assert "outputs" in keys_of(f"{CNN}&outputs=kept") and "outputs" not in keys_of(f"{CNN}&outputs=freed")
    offered = keys_of(f"{LANGUAGE}&attention=eager&optimizer_impl=fused&checkpointing=1&expandable=1")
    assert "sdpa" in offered
    assert offered.isdisjoint({"image", "fused", "checkpointing", "expandable"})
    half = keys_of(VISION)  # bfloat16 already
    assert half.isdisjoint({"bfloat16", "float16", "amp-bfloat16", "amp-float16"})
    on_t4 = keys_of(DETECTION)  # it has no tensor cores for bfloat16
    assert on_t4 >= FLOAT16 and on_t4.isdisjoint({"amp-bfloat16", "bfloat16"})
    assert keys_of(f"{CNN.partition('&gpu')[0]}&gpu=cpu").isdisjoint({"expandable", "amp-float16"})


@pytest.mark.exhaustive
def test_a_set_of_two_is_found_where_one_is_not_enough():
    query = f"{TWO_LAYERS}&seq=512&dtype=float32&batch=4&gpu=custom:2GiB@8.0"
    found = list(levers(parse_query(query)))[-1]
    assert all(row.cell.fits is not True for row in found.rows if row.key not in OTHER_WORK)
    assert len(found.smallest.keys) == 2, found.search
    assert fits_by_its_own_trace(found.smallest.query) is True
    assert found.search.startswith("The fewest changes that do, the first of ")


@pytest.mark.exhaustive
def test_more_than_two_are_thinned_out():
    query = f"{TWO_LAYERS}&seq=1024&dtype=float32&batch=6&gpu=custom:2GiB@8.0"
    found = list(levers(parse_query(query)))[-1]
    assert len(found.smallest.keys) > 2, found.search
    assert fits_by_its_own_trace(found.smallest.query) is True
    assert found.search.startswith("No two changes are enough")


@pytest.mark.exhaustive
def test_an_adapter_is_trained_where_all_of_it_cannot_be():
    found = list(levers(parse_query(ADAPTED)))[-1]
    assert found.smallest.keys[0] in ADAPTERS
    assert fits_by_its_own_trace(found.smallest.query) is True
    assert found.search.startswith(
        "The same work does not fit: even with all changes that leave the work the same the process takes "
    )


def test_where_nothing_helps_it_says_so():
    found = list(levers(parse_query(TOO_LARGE)))[-1]
    assert found.smallest is None
    assert found.search.startswith(
        "No set of these changes makes it fit for sure: even with all changes that leave the work the same the process takes "
    )


def test_what_does_not_help_has_its_reason():
    useless = next(iter(levers(parse_query(CNN)))).useless
    assert useless[0].startswith("torch.cuda.empty_cache() in the loop does not lower the peak")
    assert not next(iter(levers(parse_query(f"{CNN.partition('&gpu')[0]}&mode=inference&gpu=cpu")))).useless


@pytest.mark.exhaustive
def test_smaller_batches_of_work_that_has_events_for_each_sample_are_as_large_as_fit():
    found = list(levers(parse_query(FOR_EACH_SAMPLE.replace("batch=1", "batch=8"))))[-1]
    row = next(row for row in found.rows if row.key == "batch")
    (batch,) = parse_query(row.query).batches
    assert batch in (2, 4)
    assert row.cell.fits is True
    assert fits_by_its_own_trace(row.query, batches=(2 * batch,)) is not True


def test_one_dtype_and_batch_are_asked_for():
    with pytest.raises(RequestError, match=r"this answer is for one dtype and batch size: given .*focus=float32:8"):
        next(iter(levers(parse_query("arch=torchvision:resnet18"))))
    focused = next(iter(levers(parse_query("arch=torchvision:resnet18&image=64&focus=bfloat16:2"))))
    assert (focused.base.dtype, focused.base.batch) == ("bfloat16", 2)


def test_what_an_estimate_refuses_is_refused():
    with pytest.raises((RequestError, BuildError), match=r"no_such_model"):
        next(iter(levers(parse_query("arch=torchvision:no_such_model&dtype=float32&batch=2"))))


# ------------------------------------------------------------------------------------------------------- compiled code

BLOCKS = f"{TWO_LAYERS}&seq=256&dtype=bfloat16&batch=4&gpu=h100-80gb"
compiles = pytest.mark.skipif(
    installed_version() < OLDEST_READ or not find_spec("triton"), reason="this PyTorch compiles nothing here"
)


@compiles
@pytest.mark.exhaustive
def test_eager_code_is_compiled_after_all_other_levers_and_in_no_set():
    first, *_, before, last = levers(parse_query(BLOCKS), compiles=True)
    assert first.pending[-1] == "compile" and before.pending == ("compile",)
    assert before.search and before.smallest == last.smallest
    row = last.rows[-1]
    assert (row.key, row.title) == ("compile", "Compile the blocks")
    assert row.cell == anew(f"{BLOCKS}&compile=default&compile_scope=blocks") == anew(row.query)
    assert "compile" not in keys_of(BLOCKS)  # it is asked for by itself


@compiles
@pytest.mark.exhaustive
def test_compiled_code_has_a_budget_and_its_blocks():
    compiled = f"{BLOCKS}&compile=default"
    assert {"budget", "checkpointing", "lora", "inference"} <= keys_of(compiled)
    assert "compile" not in keys_of(compiled)  # its blocks are
    assert "compile" in keys_of(f"{compiled}&compile_scope=model")
    assert keys_of(f"{compiled}&budget=0.2").isdisjoint({"budget", "compile"})
    assert "inference" in keys_of(f"{compiled}&budget=0.2")  # without its budget

    base, found = (parse_query(query) for query in (compiled, f"{compiled}&budget=0.3"))
    (lever,) = [row for row in LEVERS if row.key == "budget"]
    changed = lever.change(base, Cells(base).counted(base))
    assert changed == found and lever.title(changed) == "An activation memory budget of 0.3"


@pytest.mark.exhaustive  # compiles three times
@compiles
def test_code_with_graphs_can_do_without_them():
    assert "graphs" in keys_of(f"{BLOCKS}&compile=reduce-overhead") - keys_of(f"{BLOCKS}&compile=default")


def test_compiled_code_that_takes_more_says_so():
    small = Cells(parse_query(LANGUAGE)).estimate(parse_query(LANGUAGE))
    more = replace(
        small, process_bytes=small.process_bytes + 2**30, peak_allocated_bytes=small.peak_allocated_bytes + 2**30
    )
    assert describe_effect("compile", small, more).endswith("Compiled code takes 1.00 GiB more.")


# ----------------------------------------------------------------------------------------------------------- their code


@pytest.mark.parametrize("lever", [row for row in LEVERS if row.key not in IN_RECIPES], ids=lambda lever: lever.key)
def test_the_code_of_a_lever_runs(lever, monkeypatch):
    """Runs the lines as they stand, around a model that has what they name."""

    class Model(nn.Linear):
        def generate(self, inputs: object, **settings: object) -> None:
            assert settings

        @classmethod
        def from_pretrained(cls, name: str, quantization_config: transformers.BitsAndBytesConfig) -> None:
            assert quantization_config.load_in_8bit == (lever.key == "int8") != quantization_config.load_in_4bit

        def set_attn_implementation(self, name: str) -> None:
            assert name == "sdpa"

        def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: dict) -> None:
            assert gradient_checkpointing_kwargs == {"use_reentrant": False}

    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "")
    size = {"seq": "&seq=4", "image": "&image=16"}.get(lever.key, "")
    request = parse_query(
        f"{TWO_LAYERS}{size}&dtype=float32&batch=2&gpu=cpu"
        if lever.key != "image"
        else "arch=torchvision:resnet18&image=16&batch=2&dtype=float32&gpu=cpu"
    )
    if lever.key == "budget":
        request = replace(request, budget=0.3)
    model = Model(8, 8)
    inputs = torch.zeros(4, 3, 32, 32) if lever.key == "image" else torch.zeros(4, 8)
    names = {
        "torch": torch, "model": model, "inputs": inputs, "targets": torch.zeros(4, 8), "loss_fn": nn.functional.mse_loss,
        "optimizer": torch.optim.SGD(model.parameters()), "scaler": torch.amp.GradScaler("cpu"), "outputs": [],
        "blocks": model.children(), "x": inputs,
    }  # fmt: skip
    if lever.key == "lora":
        pytest.importorskip("peft")
        names["model"] = nn.Sequential(model, nn.Linear(8, 8))
    names["name"] = "org/model"
    if lever.key == "qlora":
        pytest.importorskip("peft")
        adapted = nn.Sequential(model, nn.Linear(8, 8))

        def from_pretrained(name: str, quantization_config: transformers.BitsAndBytesConfig) -> nn.Module:
            assert quantization_config.bnb_4bit_use_double_quant
            return adapted

        monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    if "8bit" in lever.key:
        pytest.importorskip("bitsandbytes")
    names["head"] = model
    with torch._functorch.config.patch(activation_memory_budget=1.0):  # monkeypatch would leave the setting deleted
        exec(lever.code(request), names)
    if lever.key in ("fused", "adafactor", "sgd"):
        known = OPTIMIZERS["adamw" if lever.key == "fused" else lever.key].class_name
        assert type(names["optimizer"]).__name__ == known


def test_gradient_accumulation_gives_the_gradients_of_the_whole_batch():
    lever = next(lever for lever in LEVERS if lever.key == "batch")
    torch.manual_seed(0)
    model, inputs, targets = nn.Linear(8, 8), torch.randn(5, 8), torch.randn(5, 8)
    nn.functional.mse_loss(model(inputs), targets).backward()
    whole = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()

    class Looks:
        def step(self) -> None:
            for parameter, expected in zip(model.parameters(), whole, strict=True):
                torch.testing.assert_close(parameter.grad, expected)

        def zero_grad(self) -> None:
            self.done = True

    optimizer = Looks()
    request = parse_query("arch=torchvision:resnet18&dtype=float32&batch=2")
    exec(
        lever.code(request),
        {
            "model": model,
            "inputs": inputs,
            "targets": targets,
            "loss_fn": nn.functional.mse_loss,
            "optimizer": optimizer,
        },
    )
    assert optimizer.done


def test_queries_are_canonical(grown):
    for row in grown[-1].rows:
        assert format_query(parse_query(row.query)) == row.query
