"""The devices page, with scripted inventories and demonstrations in place of this machine's."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pandas as pd
import pytest
import streamlit as st
from streamlit.testing.v1 import AppTest

from sizer.base.errors import DeviceError, JobError
from sizer.base.units import GIB, MIB
from sizer.device.machine.demonstration import CACHED, EMPTIED, EMPTYING, Cost, Demonstration, Stage
from sizer.device.machine.inventory import PORTABLE, Inventory
from sizer.device.record.measurement import DeviceFacts, Spread
from sizer.service.settings import PUBLIC_VARIABLE
from sizer.ui import devices_view, measuring
from tests.ui.conftest import APP, markup, texts
from tests.ui.specs import rows_with

CPU = DeviceFacts(device="cpu", name="A Fast One", total_bytes=64 * GIB, free_bytes=32 * GIB)
META = DeviceFacts(device="meta", name="planning only", total_bytes=None)
H100 = DeviceFacts(
    device="cuda:0",
    name="NVIDIA H100",
    total_bytes=80 * GIB,
    free_bytes=70 * GIB,
    capability=(9, 0),
    versions={"driver": "570.86.15", "cuda": "13.0"},
)
NO_DRIVER = "No NVIDIA driver is installed; this build of PyTorch (CUDA 13.0) could use an NVIDIA GPU with one."


def inventory(*accelerators: DeviceFacts, missing: tuple[str, ...] = ()) -> Inventory:
    return Inventory(
        devices=(CPU, *accelerators, META),
        missing=missing,
        line=f"{PORTABLE}  # here",
        versions={"python": "3.11.2", "torch": "2.15.0"},
    )


def shown_on(device: str, *, cached: bool) -> Demonstration:
    def cost(what: str, seconds: float) -> Cost:
        return Cost(what=what, spread=Spread(median_seconds=seconds, low_seconds=0, high_seconds=1, runs=21))

    stages = (("", 0, 0), ("x = torch.empty(64 * 2**20)", 256, 256), ("del x", 0, 256))
    return Demonstration(
        device=device,
        name="x",
        block_bytes=256 * MIB,
        driver="as somebody says",
        stages=tuple(
            Stage(
                title="t",
                code=code,
                allocated_bytes=allocated * MIB,
                reserved_bytes=reserved * MIB if cached else None,
                driver_bytes=(reserved + 500) * MIB,
            )
            for code, allocated, reserved in stages
        ),
        costs=(cost(CACHED, 4e-6), cost(EMPTYING, 250e-6), cost(EMPTIED, 1200e-6)) if cached else (),
        remarks=() if cached else ("There is no cache.",),
    )


class Script:
    """What the machine answers, and what it was asked to show."""

    def __init__(self) -> None:
        self.inventory: Inventory | Exception = inventory(missing=(NO_DRIVER,))
        self.demonstration: Demonstration | Exception = shown_on("cpu", cached=False)
        self.asked: list[str] = []

    def find_inventory(self) -> Inventory:
        if isinstance(self.inventory, Exception):
            raise self.inventory
        return self.inventory

    def demonstrate(self, device: str) -> Demonstration:
        self.asked.append(device)
        if isinstance(self.demonstration, Exception):
            raise self.demonstration
        return self.demonstration


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Script]:
    script = Script()
    monkeypatch.setattr(devices_view.inventory, "find_inventory", script.find_inventory)
    monkeypatch.setattr(devices_view.demonstration, "demonstrate", script.demonstrate)
    st.cache_data.clear()
    yield script
    st.cache_data.clear()


def open_devices() -> AppTest:
    """The page, as the navigation opens it."""
    page = AppTest.from_file(str(APP), default_timeout=30)
    page.switch_page("pages/devices.py").run()
    assert not page.exception
    return page


def show_it(page: AppTest) -> AppTest:
    page.button(key="demonstrate").click().run()
    assert not page.exception
    return page


def charts(page: AppTest) -> list[dict]:
    return [json.loads(chart.proto.spec) for chart in page.get("vega_lite_chart")]


def test_without_an_accelerator_it_says_so_and_offers_the_cpu(script):
    page = open_devices()
    assert page.title[0].value == "What PyTorch can use on this machine"
    assert page.info[0].value == devices_view.ALONE
    assert NO_DRIVER in texts(page)
    assert page.code[0].value == f"{PORTABLE}  # here"
    frame = page.dataframe[0].value
    assert list(frame) == ["Device", "Name", "Memory, GiB", "Free, GiB"], "no columns that nobody fills"
    assert frame["Device"].tolist() == ["cpu", "meta"]
    assert (frame["Memory, GiB"][0], frame["Free, GiB"][0]) == (64, 32)
    assert pd.isna(frame["Memory, GiB"][1])
    assert not script.asked, "nothing runs before it is asked for"


def test_with_a_gpu_it_comes_first(script):
    script.inventory = inventory(H100)
    script.demonstration = shown_on("cuda:0", cached=True)
    page = open_devices()
    assert not page.info
    row = page.dataframe[0].value.iloc[1]
    assert (row["Memory, GiB"], row["Free, GiB"], row["Compute capability"]) == (80, 70, "9.0")
    assert row["Driver and runtime"] == "driver 570.86.15, cuda 13.0"
    show_it(page)
    assert script.asked == ["cuda:0"]
    shown = page.dataframe[1].value
    assert shown["Reserved"].tolist() == [0, 256, 256]
    assert shown["Process"].tolist() == [500, 756, 756]
    assert (
        "Here an allocation of 256.00 MiB takes **4 µs** from the cache. With `empty_cache()` before it, it takes "
        "**1,200 µs**, and `empty_cache()` itself **250 µs** (medians)."
    ) in markup(page)
    (chart,) = charts(page)
    assert chart["description"] == "Memory on cuda:0 after each line of code, in MiB"
    assert "Process: as somebody says." in [caption.value for caption in page.caption]


def test_the_demonstration_on_a_cpu_has_no_reserved_memory(script):
    page = show_it(open_devices())
    assert script.asked == ["cpu"]
    shown = page.dataframe[1].value
    assert list(shown) == ["Code", "Allocated", "Process"]
    assert shown["Code"].tolist() == ["(nothing yet)", "x = torch.empty(64 * 2**20)", "del x"]
    assert shown["Allocated"].tolist() == [0, 256, 0]
    assert "There is no cache." in texts(page)
    assert "empty_cache()` itself" not in markup(page)
    assert {row["figure"] for row in rows_with(charts(page)[0], "figure")} == {"Allocated", "Process"}


def test_what_was_shown_stays_and_belongs_to_its_device(script):
    script.inventory = inventory(H100)
    page = show_it(open_devices())
    page.run()
    assert script.asked == ["cuda:0"], "another run of the page asks nobody"
    page.segmented_control(key="demonstration_device").set_value("cpu").run()
    assert script.asked == ["cuda:0"]
    assert not charts(page), "nothing was shown on the CPU yet"


def test_a_device_that_is_full_says_what_to_do(script):
    script.demonstration = DeviceError("cpu has not enough free memory", given="1 GiB free", todo="end other programs")
    page = show_it(open_devices())
    assert page.error[0].value == "This device cannot be used."
    assert texts(page)[-3:] == ["cpu has not enough free memory", "Given: 1 GiB free", "What to do: end other programs"]
    assert page.dataframe, "the list of devices stands"


def test_a_torch_that_does_not_work_is_said(script):
    script.inventory = JobError(
        "the devices could not be listed ('ImportError')", todo="check that torch can be imported"
    )
    page = open_devices()
    assert texts(page) == [
        "the devices could not be listed ('ImportError')",
        "What to do: check that torch can be imported",
    ]


@pytest.mark.parametrize(("variable", "value"), [(measuring.MEASURING_VARIABLE, "off"), (PUBLIC_VARIABLE, "1")])
def test_where_strangers_use_the_app_nothing_runs(script, monkeypatch, variable, value):
    monkeypatch.setenv(variable, value)
    page = open_devices()
    assert devices_view.SWITCHED_OFF in [info.value for info in page.info]
    assert not page.button
