"""User code that a trace cannot follow is refused by name, or listed as uncounted."""

from __future__ import annotations

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from sizer.base.errors import TraceError
from sizer.estimating.custom import size_module, size_step
from sizer.tracing.compiled import names
from sizer.tracing.cuda.cudnn import version

# torch._dynamo of PyTorch 2.11 calls it at import
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")


def compiled_module() -> Callable[[], None]:
    model = nn.Linear(64, 64).cuda()
    model.compile()
    return lambda: model(torch.zeros(2, 64, device="cuda")).sum().backward()


def compiled_by_function() -> Callable[[], None]:
    model = torch.compile(nn.Linear(64, 64).cuda())
    return lambda: model(torch.zeros(2, 64, device="cuda")).sum().backward()


def compiled_function() -> Callable[[], None]:
    @torch.compile
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    return lambda: twice(torch.zeros(2, 64, device="cuda"))


@pytest.mark.filterwarnings("ignore:Using `torch.compile")  # PyTorch's own, where modules have hooks
@pytest.mark.parametrize("setup", [compiled_module, compiled_by_function, compiled_function])
def test_compiled_code_is_refused_by_name_on_other_devices(setup: Callable) -> None:
    with pytest.raises(TraceError, match=r"torch\.compile has compiled .+; call it without torch\.compile"):
        size_step(setup, gpu="m2-ultra-64gb")


def test_code_that_was_compiled_before_is_refused_and_works_again_afterwards() -> None:
    before = torch.compile
    twice = torch.compile(lambda x: x * 2, backend="aot_eager")

    def setup() -> Callable[[], None]:
        return lambda: twice(torch.zeros(2, 64, device="cuda"))

    with pytest.raises(TraceError, match=r"torch\.compile has compiled"):
        size_step(setup, gpu="m2-ultra-64gb")
    assert torch.compile is before
    assert twice(torch.ones(2)).tolist() == [2.0, 2.0]


def test_the_compiler_of_an_older_pytorch_is_refused_by_name() -> None:
    with (
        mock.patch.object(names, "installed_version", lambda: (2, 11)),
        pytest.raises(TraceError, match=r"the compiler of PyTorch 2\.11 cannot be traced: allowed PyTorch 2\.15 or newer"),
    ):
        names.check_compiler()


def test_compiling_without_a_call_is_no_fault() -> None:
    def setup() -> Callable[[], None]:
        model = nn.Linear(64, 64, bias=False).cuda()
        torch.compile(model)
        return lambda: model(torch.zeros(2, 64, device="cuda"))

    assert size_step(setup).estimates[0].weights_bytes == 64 * 64 * 4


def eight_bits() -> nn.Module:
    bnb = pytest.importorskip("bitsandbytes")
    return bnb.nn.Linear8bitLt(64, 64, bias=False, has_fp16_weights=False)


def four_bits() -> nn.Module:
    return pytest.importorskip("bitsandbytes").nn.Linear4bit(64, 64, bias=False, quant_type="nf4")


def four_bit_embedding() -> nn.Module:
    return pytest.importorskip("bitsandbytes").nn.EmbeddingNF4(64, 64)


@pytest.mark.parametrize(("make", "bits"), [(eight_bits, "8-bit"), (four_bits, "4-bit"), (four_bit_embedding, "4-bit")])
def test_low_bit_layers_of_a_module_are_refused_by_name(make: Callable[[], nn.Module], bits: str) -> None:
    with pytest.raises(TraceError, match=rf"bitsandbytes' {bits} layers .+weights="):
        size_module(make, (torch.zeros(2, 64),))


@pytest.mark.parametrize(("make", "weights"), [(eight_bits, 64 * 64), (four_bits, 64 * 32), (four_bit_embedding, 64 * 32)])
def test_low_bit_layers_are_quantized_as_they_come_to_the_device(make: Callable[[], nn.Module], weights: int) -> None:
    def setup() -> Callable[[], None]:
        model = make().cuda()
        dtype = torch.long if isinstance(model, nn.Embedding) else torch.float16
        return lambda: model(torch.zeros(2, 64, device="cuda", dtype=dtype))

    assert size_step(setup).estimates[0].weights_bytes == weights


def test_cudnns_benchmark_tries_every_plan_in_the_first_step() -> None:
    """Peaks of both steps, equal to those of PyTorch's own code over the null driver (A100, cuDNN 9.26)."""

    def setup() -> Callable[[], None]:
        model = nn.Conv2d(64, 64, 7, padding=3).cuda()
        inputs = torch.zeros(8, 64, 56, 56, device="cuda")
        return lambda: model(inputs).sum().backward()

    def peaks() -> tuple[int, int]:
        (estimate,) = size_step(setup, steps=2, gpu="a100-80gb").estimates
        *first, second = [phase.peak_allocated_bytes for phase in estimate.phases]
        return max(first), second

    plain = peaks()
    with torch.backends.cudnn.flags(enabled=True, benchmark=True):
        tried = peaks()
    assert tried[0] > 2 * plain[0]
    assert tried[1] == plain[1]
    if torch.__version__ >= "2.15" and version() == 92600:
        assert (plain, tried) == ((36128768, 36932096), (170934784, 36932096))


def sparse_made(device: str) -> Tensor:
    return torch.ones(4, 4, device=device).to_sparse()


def sparse_moved(device: str) -> Tensor:
    return torch.eye(4).to_sparse().to(device)


def sparse_built(device: str) -> Tensor:
    return torch.sparse_coo_tensor(torch.zeros(2, 3, dtype=torch.long, device=device), torch.ones(3, device=device), (4, 4))


def sparse_gradient(device: str) -> Tensor:
    table = nn.Embedding(4, 4, sparse=True, device=device)
    table(torch.arange(4, device=device)).sum().backward()
    return table.weight.grad


def test_lazy_modules_made_before_the_setup_are_traced_as_those_of_the_setup() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.LazyConv2d(8, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(10))

    def peak(module: nn.Module | None) -> int:
        def setup() -> Callable[[], None]:
            model = (make() if module is None else module).cuda()
            model(torch.zeros(2, 3, 16, 16, device="cuda"))
            return lambda: model(torch.zeros(8, 3, 16, 16, device="cuda")).sum().backward()

        return size_step(setup, gpu="a100-80gb").estimates[0].peak_allocated_bytes

    assert peak(make()) == peak(None)


@pytest.mark.parametrize("make", [sparse_made, sparse_moved, sparse_built, sparse_gradient])
def test_sparse_tensors_are_refused_by_name(make: Callable[[str], Tensor]) -> None:
    def setup() -> Callable[[], Tensor]:
        layer = nn.Linear(4, 4).cuda()
        return lambda: torch.sparse.mm(make("cuda"), layer.weight)

    with pytest.raises(TraceError, match="sparse tensors are not traced"):
        size_step(setup, gpu="rtx-4090")
    assert sparse_moved("cpu").layout is torch.sparse_coo
