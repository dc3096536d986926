"""Test what to change in a pipeline's call: levers, limits, the peak's part, and which GPU. Each answer is a trace's."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sizer.catalogue.gpus import GPUS
from sizer.commands.decisions import format_devices, format_levers
from sizer.commands.report_text import format_report
from sizer.decision.devices import devices
from sizer.decision.levers import levers
from sizer.decision.limits import limits
from sizer.decision.peak import peak
from sizer.decision.pipeline_levers import PIPELINE_LEVERS
from sizer.estimating.estimator import estimate
from sizer.query.request import Request
from sizer.query.text import parse_query
from sizer.report.census import ArchitectureCounts
from sizer.report.decision import LeverReport, saves

SMALL = "arch=diffusers:sd1.5&dtype=float16&gpu=custom:2GiB@8.9"
BY_KEY = {lever.key: lever for lever in PIPELINE_LEVERS}


def known(part: str, image: tuple[int, int] | None = (1024, 1024), frames: int | None = None) -> ArchitectureCounts:
    row = type("Row", (), {"path": part})()
    census = type("Census", (), {"modules": (row,)})()
    return ArchitectureCounts(census=census, sequence_length=None, image_size=image, notes=(), uncounted=(), frames=frames)


@pytest.mark.parametrize(
    ("key", "asked", "part", "found"),
    [
        ("offload-model", "", "transformer", {"offloading": "model"}),
        ("offload-model", "&offload=sequential", "transformer", None),
        ("offload-group", "&offload=model", "transformer", {"offloading": "group-leaf"}),
        ("offload-sequential", "&weights=int8", "transformer", None),
        ("offload-sequential", "&offload=group-block:2", "transformer", None),
        ("vae-tiling", "&vae=slicing", "transformer", {"vae": ("slicing", "tiling")}),
        ("vae-tiling", "&vae=tiling", "transformer", None),
        ("vae-slicing", "", "transformer", None),
        ("vae-slicing", "&batch=2", "transformer", {"vae": ("slicing",)}),
        ("fp8-cast", "", "unet", {"part_weights": (("unet", "fp8-cast"),)}),
        ("fp8-cast", "&weights=transformer:nf4", "transformer", None),
        ("fp8-cast", "&weights=nf4", "transformer", None),
        ("fp8-cast", "", "prior", None),
        ("smaller", "", "transformer", {"image_size": (512, 512)}),
    ],
)
def test_a_lever_changes_a_call_once(key: str, asked: str, part: str, found: dict | None) -> None:
    request = parse_query(f"arch=diffusers:flux.1-dev{asked}")
    changed = BY_KEY[key].change(request, known(part))
    assert changed == (None if found is None else replace(request, **found))


def test_a_lever_of_weights_changes_both_denoisers() -> None:
    two = known("transformer")
    two.census.modules = (*two.census.modules, type("Row", (), {"path": "transformer_2.blocks"})())
    changed = BY_KEY["fp8-cast"].change(parse_query("arch=diffusers:wan2.2-t2v-a14b"), two)
    assert changed.part_weights == (("transformer", "fp8-cast"), ("transformer_2", "fp8-cast"))
    assert BY_KEY["fp8-cast"].code(changed).count("enable_layerwise_casting") == 2
    assert '["transformer", "transformer_2"]' in BY_KEY["nf4"].code(changed)


def test_half_a_video_has_frames_and_sides_that_every_vae_divides() -> None:
    request = parse_query("arch=diffusers:wan2.1-t2v-14b")
    video = known("transformer", (720, 1280), 81)
    assert BY_KEY["shorter"].change(request, video).frames == 41
    assert BY_KEY["smaller"].change(request, video).image_size == (352, 640)
    assert BY_KEY["shorter"].change(request, known("transformer")) is None
    assert BY_KEY["smaller"].change(request, known("transformer", None)) is None


@pytest.mark.parametrize("lever", PIPELINE_LEVERS, ids=lambda lever: lever.key)
def test_a_levers_code_compiles(lever) -> None:
    request = parse_query("arch=diffusers:wan2.1-t2v-14b&batch=2")
    changed = lever.change(request, known("transformer", (480, 832), 81))
    if changed is not None:  # nf4 needs bitsandbytes
        compile(lever.code(changed), "<code>", "exec")
    assert lever.change(parse_query("arch=hf:gpt2&batch=1&dtype=float32"), known("transformer")) is None


@pytest.fixture(scope="module")
def found() -> LeverReport:
    *_, last = levers(parse_query(SMALL))
    return last


@pytest.mark.full
def test_levers_are_traced_with_the_bytes_of_the_host(found: LeverReport) -> None:
    rows = {row.key: row for row in found.rows}
    for key in ("offload-model", "offload-group", "offload-sequential", "smaller", "fp8-cast"):
        assert saves(rows[key], found.base), key
        (own,) = estimate(parse_query(rows[key].query)).estimates
        assert own.process_bytes == rows[key].cell.process_bytes
    assert "1.99 GiB of host memory" in rows["offload-sequential"].cost
    assert "563.83 MiB copied to the device a call, 1.60 GiB a denoising step" in rows["offload-sequential"].cost
    assert "1.99 GiB copied to the device a call; " in rows["offload-model"].cost
    assert not saves(rows["vae-tiling"], found.base)  # 512 x 512 is one tile
    assert found.smallest.keys == ("offload-sequential",)


@pytest.mark.full
def test_levers_say_which_change_nothing(found: LeverReport) -> None:
    text = "\n".join(format_levers(found))
    assert "VAE tiling saves nothing" in text
    assert "VAE slicing changes nothing at batch 1" in text


@pytest.mark.full
def test_the_peak_names_its_part_and_what_lowers_it() -> None:
    *_, last = peak(parse_query(SMALL))
    (row,) = estimate(parse_query(SMALL)).estimates
    assert (last.phase, last.allocated_bytes) == ("vae", row.peak_allocated_bytes)
    (offloaded,) = estimate(parse_query(f"{SMALL}&offload=model")).estimates
    assert last.remedy.startswith("vae has the peak: 2.01 GiB of weights")
    assert "VAE tiling does not lower it." in last.remedy
    assert f"Model offload lowers it to {offloaded.peak_allocated_bytes / 2**30:.2f} GiB." in last.remedy


@pytest.mark.full
def test_a_limit_fits_and_the_next_step_does_not() -> None:
    *_, last = limits(parse_query("arch=diffusers:sd1.5&dtype=float16&gpu=custom:5GiB@8.9"))
    by_key = {limit.key: limit for limit in last.limits}
    side = by_key["image"].value
    assert side % 64 == 0
    fits = {value: fits_at(value) for value in (side, by_key["image"].most_value + 64)}
    assert list(fits.values()) == [True, False]


def fits_at(side: int) -> object:
    query = f"arch=diffusers:sd1.5&dtype=float16&gpu=custom:5GiB@8.9&image={side}x{side}"
    return estimate(parse_query(query)).estimates[0].fits


@pytest.mark.full
def test_which_gpu_names_each_reason_once() -> None:
    gpus = [GPUS[key] for key in ("t4", "rtx-4090", "m2-ultra-64gb", "cpu")]
    *_, last = devices(parse_query("arch=diffusers:sd1.5&dtype=float16"), gpus=gpus)
    text = [*format_devices(last)]
    assert "m2-ultra-64gb, cpu: a pipeline needs a CUDA device: offloading of pipelines was compared on these only" in text
    assert [row.gpu for row in last.rows if row.cell is not None and row.cell.fits] == ["t4", "rtx-4090"]


@pytest.mark.full
def test_a_report_does_not_repeat_that_the_batch_fits() -> None:
    report = estimate(parse_query("arch=diffusers:sd1.5&dtype=float16&gpu=t4"))
    text = format_report(report)
    assert "`sizer limits` searches the largest" in text
    assert "at least 1" not in text
    assert report.request["image_size"] == (512, 512)
    assert isinstance(parse_query(report.query), Request)
