"""The inventory of machines in every state: no driver, an old one, two GPUs, Apple's, Intel's, AMD's; and of this one."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from sizer.base.codec import DecodeError
from sizer.base.errors import DeviceError, JobError
from sizer.base.units import GIB, KIB
from sizer.device.machine.computer import GpuMemory, Nvml, open_nvml
from sizer.device.machine.inventory import (
    PORTABLE,
    Inventory,
    find_devices,
    find_inventory,
    safe_device_line,
    take_inventory,
)
from sizer.device.record.measurement import DeviceFacts
from sizer.processes.environment import PROJECT
from sizer.processes.process import run_program
from tests.device.machine.scripted_torch import (
    NO_DRIVER,
    NO_GPU,
    TOO_OLD,
    Library,
    Scripted,
    cuda,
    gpu,
    machine,
    torch_with,
)

NOTHING = torch_with(version=None)  # a build for the CPU alone


def names(inventory: Inventory) -> list[str]:
    return [facts.device for facts in inventory.devices]


# ------------------------------------------------------------------------------------------------------- nothing but a CPU


@pytest.mark.parametrize(
    ("torch", "variables", "sentence"),
    [
        (torch_with(cuda=cuda(refusal=NO_DRIVER)), {}, r"No NVIDIA driver is installed; this build of PyTorch \(CUDA 13.0\)"),
        (torch_with(cuda=cuda(warning=TOO_OLD)), {}, r"The NVIDIA driver is too old: it knows CUDA 11.4, .* for CUDA 13.0; update"),
        (torch_with(cuda=cuda(refusal=NO_GPU)), {}, "No GPU was found that this build .* though its driver is installed"),
        (
            torch_with(cuda=cuda(refusal=NO_GPU)),
            {"CUDA_VISIBLE_DEVICES": ""},
            "CUDA_VISIBLE_DEVICES is '', which leaves PyTorch no GPU",
        ),
        (
            torch_with(cuda=cuda(warning="CUDA initialization: CUDA unknown error -\nthis may be due to")),
            {"CUDA_VISIBLE_DEVICES": "0"},
            "CUDA could not be started; PyTorch says 'CUDA initialization: CUDA unknown error - this may be due to'",
        ),
        (torch_with(cuda=cuda(refusal=NO_GPU), version=None, hip="7.0"), {}, r"No GPU was found .*\(ROCm 7.0\)"),
        (torch_with(version=None, xpu=()), {}, "No Intel GPU was found, or its driver is missing"),
        (torch_with(version=None, mps=None), {}, "MPS is not available: macOS of unknown version"),
        (NOTHING, {}, r"This build of PyTorch \(2.15.0\) only supports the CPU; .*https://pytorch.org/get-started"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said_in_one_sentence(torch, variables, sentence):
    found = take_inventory(machine(torch, Scripted(variables=variables)))
    assert names(found) == ["cpu", "meta"]
    (said,) = found.missing
    assert re.search(sentence, said), said
    assert said.endswith((".", "'.")) and "\n" not in said
    assert found.line == f"{PORTABLE}  # here: cpu"


def test_the_cpu_as_the_system_describes_it():
    files = {
        "/proc/cpuinfo": "processor\t: 0\nmodel name\t: A Fast One\nflags\t: x\nmodel name\t: A Fast One\n",
        "/proc/meminfo": "MemTotal:       67108864 kB\nMemAvailable:   33554432 kB\n",
    }
    cpu = take_inventory(machine(NOTHING, Scripted(files))).devices[0]
    assert cpu == DeviceFacts(device="cpu", name="A Fast One", total_bytes=64 * GIB, free_bytes=32 * GIB)


def test_a_container_may_use_less_than_the_system_has_free():
    files = {
        "/proc/meminfo": f"MemAvailable: {32 * GIB // KIB} kB\n",
        "/sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "/sys/fs/cgroup/memory.current": f"{5 * GIB}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {1 * GIB}\nactive_file 7\n",
    }
    # a limit of 8, 5 in use, 1 of them files that can be dropped
    assert Scripted(files).free_bytes() == 4 * GIB
    assert Scripted({**files, "/sys/fs/cgroup/memory.max": "max\n"}).free_bytes() == 32 * GIB
    assert Scripted().free_bytes() is None


def test_meta_is_for_planning_only():
    meta = take_inventory(machine(NOTHING)).devices[-1]
    assert (meta.device, meta.total_bytes, meta.free_bytes) == ("meta", None, None)
    assert meta.name.startswith("planning only")


# ------------------------------------------------------------------------------------------------------------------- GPUs


def test_two_gpus_with_what_the_driver_says():
    gpus = [gpu(uuid="u0"), gpu("NVIDIA T4", (7, 5), uuid="u1")]
    torch = torch_with(cuda=cuda(gpus, built=("sm_75", "sm_90")))
    found = take_inventory(machine(torch, library=Library("u0")))
    versions = {"driver": "570.86.15", "cuda": "13.0", "cudnn": "9.26.0"}
    assert found.devices[1:3] == (
        # NVML knows the first by its UUID; of the second the runtime says what is free
        DeviceFacts(
            device="cuda:0",
            name="NVIDIA H100",
            total_bytes=80 * GIB,
            free_bytes=70 * GIB,
            capability=(9, 0),
            resident_threads=132 * 2048,
            versions=versions,
        ),
        DeviceFacts(
            device="cuda:1",
            name="NVIDIA T4",
            total_bytes=80 * GIB,
            free_bytes=60 * GIB,
            capability=(7, 5),
            resident_threads=132 * 2048,
            versions=versions,
        ),
    )
    assert found.missing == ()
    assert found.line == f"{PORTABLE}  # here: cuda:0, the first of 2"
    assert Inventory.from_dict(found.to_dict()) == found


def test_a_gpu_that_makes_no_context_has_no_free_memory():
    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("CUDA-capable device(s) is/are busy or unavailable")

    torch = torch_with(cuda=cuda([gpu()], free=refuse))
    host = Scripted(programs={"nvidia-smi": "570.86.15\n"})
    assert take_inventory(machine(torch, host)).devices[1] == DeviceFacts(
        device="cuda:0",
        name="NVIDIA H100",
        total_bytes=80 * GIB,
        free_bytes=None,
        capability=(9, 0),
        resident_threads=132 * 2048,
        versions={"driver": "570.86.15", "cuda": "13.0", "cudnn": "9.26.0"},
    )


@pytest.mark.parametrize(
    ("capability", "built", "runs"),
    [
        ((9, 0), ("sm_90",), True),
        ((8, 9), ("sm_86",), True),  # machine code runs on later minor versions
        ((8, 0), ("sm_86",), False),  # and not on earlier ones
        ((9, 0), ("sm_86",), False),  # nor on another major version
        ((9, 0), ("sm_80", "compute_80"), True),  # PTX runs on any later one
        ((7, 0), ("compute_75", "sm_90a"), False),
        ((12, 0), ("sm_120",), True),
        ((3, 7), ("an unknown name",), True),
    ],
)
def test_a_gpu_that_this_build_has_no_kernels_for(capability, built, runs):
    found = take_inventory(machine(torch_with(cuda=cuda([gpu(capability=capability)], built=built))))
    if runs:
        assert (found.missing, found.line) == ((), f"{PORTABLE}  # here: cuda:0")
    else:
        assert "has compute capability" in found.missing[0] and ", ".join(built) in found.missing[0]
        assert found.line == 'device = torch.device("cpu")  # not cuda:0: no kernels for it'


def test_the_line_names_a_gpu_that_works():
    torch = torch_with(cuda=cuda([gpu("Tesla K80", (3, 7)), gpu()]))
    found = take_inventory(machine(torch))
    assert found.line == 'device = torch.device("cuda:1")  # not cuda:0: no kernels for it'
    assert len(found.missing) == 1 and found.missing[0].startswith("cuda:0 (Tesla K80) has compute capability 3.7")


def test_a_rocm_gpu_is_called_cuda():
    torch = torch_with(cuda=cuda([gpu("AMD Instinct MI300X", (9, 4))]), version=None, hip="7.0.2")
    found = take_inventory(machine(torch, Scripted({"/sys/module/amdgpu/version": "6.12.12\n"})))
    assert found.devices[1].versions == {"driver": "6.12.12", "rocm": "7.0.2", "miopen": "9.26.0"}
    assert found.devices[1].resident_threads is None  # what a context takes there is another driver's
    assert found.missing == (), "no list of NVIDIA's architectures is asked for"


def test_apples_gpu():
    host = Scripted(programs={"sysctl": "Apple M2 Ultra"})
    host.system = "15.1"
    found = take_inventory(machine(torch_with(version=None, mps=48 * GIB), host))
    assert found.devices[1] == DeviceFacts(
        device="mps", name="GPU of Apple M2 Ultra", total_bytes=48 * GIB, versions={"macos": "15.1"}
    )
    assert found.line.endswith("# here: mps")


def test_intels_gpu():
    arc = SimpleNamespace(name="Intel Arc A770", total_memory=16 * GIB, driver_version="1.6.31907")

    def refuse(index: int) -> tuple[int, int]:
        raise RuntimeError("The device does not support querying free memory")

    facts = {"device": "xpu:0", "name": "Intel Arc A770", "total_bytes": 16 * GIB, "versions": {"driver": "1.6.31907"}}
    found = take_inventory(machine(torch_with(version=None, xpu=[arc])))
    assert found.devices[1] == DeviceFacts(free_bytes=10 * GIB, **facts)
    silent = take_inventory(machine(torch_with(version=None, xpu=[arc], xpu_free=refuse)))
    assert silent.devices[1] == DeviceFacts(free_bytes=None, **facts)


def test_a_device_is_found_by_its_name():
    found = take_inventory(machine(torch_with(cuda=cuda([gpu(), gpu()]))))
    assert found.find("cuda").device == found.find("cuda:0").device == "cuda:0"
    assert found.find("cuda:1").device == "cuda:1"
    with pytest.raises(DeviceError, match=r"given 'cuda:2', allowed cpu, cuda:0, cuda:1$"):
        found.find("cuda:2")
    with pytest.raises(DeviceError, match=r"given 'meta'"):
        found.find("meta")
    with pytest.raises(DeviceError, match=r"given 'cuda', allowed cpu; No NVIDIA driver is installed"):
        take_inventory(machine(torch_with(cuda=cuda()))).find("cuda")


# ------------------------------------------------------------------------------------------------ NVIDIA's library by itself


class FakeLibrary:
    """nvml.h's functions, over one GPU called GPU-abc."""

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlSystemGetDriverVersion(self, text, length) -> int:
        text.value = b"570.86.15"
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid, handle) -> int:
        handle._obj.value = 7
        return 0 if uuid == b"GPU-abc" else 6

    def nvmlDeviceGetMemoryInfo(self, handle, memory) -> int:
        assert handle.value == 7
        memory._obj.total, memory._obj.free, memory._obj.used = 80, 70, 10
        return 0


def test_nvml_is_asked_by_uuid():
    nvml = Nvml(FakeLibrary())
    assert nvml.driver_version() == "570.86.15"
    known = GpuMemory(total_bytes=80, free_bytes=70, used_bytes=10)
    assert nvml.memory("abc") == nvml.memory("GPU-abc") == known
    assert nvml.memory("xyz") is None


def test_without_nvml_nobody_is_asked(monkeypatch):
    assert open_nvml("libno-such-library.so.1") is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(nvmlInit_v2=lambda: 9))  # the driver is not loaded
    assert open_nvml() is None


# ----------------------------------------------------------------------------------------------------------- this machine


def test_the_safe_line_sets_a_device_that_works_here():
    found = take_inventory()
    scope = {"torch": torch}
    exec(found.line, scope)
    assert isinstance(scope["device"], torch.device)
    assert torch.ones(2, device=scope["device"]).sum().item() == 2


def test_the_portable_line_does_not_trust_the_build_alone(monkeypatch):
    # A build for CUDA answers "cuda" without looking; with check_available it looks.
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert torch.accelerator.current_accelerator() == torch.device("cuda")
    scope = {"torch": torch}
    exec(safe_device_line([]), scope)
    assert scope["device"] == torch.device("cpu")


def test_the_caller_of_find_devices_imports_no_torch():
    code = (
        "import sys; from sizer.device.machine.inventory import find_devices\n"
        "print([facts.device for facts in find_devices()], 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, timeout=120)
    assert done.stdout.startswith("['cpu', ") and done.stdout.endswith("'meta'] False\n"), done.stderr


def test_a_torch_that_cannot_be_imported_is_said(monkeypatch, tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so is broken')")
    monkeypatch.setenv("PYTHONPATH", os.fspath(tmp_path))
    with pytest.raises(
        JobError, match=r"could not be listed .*libtorch.so is broken.*check that torch can be imported"
    ):
        find_devices()


def test_an_answer_that_makes_no_sense_is_said(monkeypatch):
    monkeypatch.setattr("sizer.device.machine.inventory.run_program", lambda module, **rest: {"devices": "all"})
    with pytest.raises(JobError, match=r"could not be listed .*allowed is the keys line, missing, versions"):
        find_inventory()
    with pytest.raises(DecodeError, match="inventory was"):
        Inventory.from_dict([])


def test_a_program_that_takes_too_long_is_killed():
    with pytest.raises(JobError, match="the devices could not be listed within 0 s"):
        run_program("sizer.device.machine.inventory", seconds=0, what="the devices could not be listed")


def test_a_program_that_says_nothing_is_told_by_its_exit_status():
    with pytest.raises(JobError, match=r"it failed \('exit status 0'\)"):
        run_program("sizer.base.units", seconds=60, what="it failed")
