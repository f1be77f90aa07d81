"""Memory: never [N, V], scratch under scratch_bytes, nothing for what needs no gradient.

Small shapes are on the CPU, also where there is a GPU: there, libraries take buffers of their own
(2 MiB at N=4096, V=256, H=512 on an H200, as much as was to be shown), so the shapes are large.
"""

import pytest
import torch
from lm_head_checks import OUTPUTS, Case, call, make_case
from lm_head_memory import Allocations, measure

KiB, MiB = 1 << 10, 1 << 20

CPU = torch.device("cpu")

# Statistics, upstream gradients, targets and their indices: bytes per row, generously; of the
# vocabulary only vectors. The allocator rounds every tensor up to 64 bytes.
PER_ROW, PER_COLUMN, ROUNDING = 160, 16, 64 * KiB

OUTPUT_SETS = {"log_probs": ("log_probs",), "all": OUTPUTS}


def footprint(case: Case, outputs: tuple[str, ...], frozen: tuple[str, ...], scratch: int):
    """Allocations of a forward and backward whose gradients are kept."""

    leaves = case.leaves(frozen)

    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]

    def step() -> object:
        result = call(case, leaves, outputs, scratch_bytes=scratch)
        values = [v for v in result if v is not None and v.requires_grad]
        if not values:
            return result
        ones = [torch.ones_like(value) for value in values]
        return result, torch.autograd.grad(values, wanted, ones)

    return measure(step, case.hidden.device)


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def allowance(case: Case, frozen: tuple[str, ...], scratch: int) -> int:
    """Gradients + float32 accumulator of hidden's gradient + scratch + vectors."""
    rows, columns = case.targets.numel(), case.vocabulary
    total = scratch + PER_ROW * rows + PER_COLUMN * columns + ROUNDING
    if "hidden" not in frozen:
        total += nbytes(case.hidden)
        total += 4 * case.hidden.numel() if case.hidden.element_size() < 4 else 0
    if "weight" not in frozen:
        total += nbytes(case.weight)
    return total


def report(found: Allocations, allowed: int) -> str:
    return f"peak {found.peak / MiB:.2f} MiB, allowed {allowed / MiB:.2f} MiB"


@pytest.mark.parametrize("outputs", OUTPUT_SETS)
@pytest.mark.parametrize("scratch", [MiB, 4 * MiB])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_without_logits_and_without_wide_weight_gradient(
    dtype: torch.dtype, scratch: int, outputs: str
) -> None:
    """N=1024, V=8192, H=256: logits are 16 (32) MiB, a float32 dW of bfloat16 8 MiB.

    Allowed at 1 MiB of scratch in bfloat16: 4 (dW) + 0.5 + 1 (dH) + 1 + 0.35 MiB.
    """
    case = make_case(1024, 8192, 256, dtype, ignored=0.0)
    found = footprint(case, OUTPUT_SETS[outputs], (), scratch)
    allowed = allowance(case, (), scratch)
    assert allowed < nbytes(case.weight) + 1024 * 8192 * dtype.itemsize
    if dtype == torch.bfloat16 and scratch == MiB:
        assert allowed < 4 * case.weight.numel()
    assert found.peak <= allowed, report(found, allowed)
    assert found.peak >= nbytes(case.weight), "the measurement misses the weight's gradient"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_long_and_narrow(dtype: torch.dtype) -> None:
    """N=16384 rows, V=2048: logits would be 64 (128) MiB, allowed are about 10."""
    case = make_case(16384, 2048, 32, dtype, ignored=0.0)
    found = footprint(case, OUTPUTS, (), 4 * MiB)
    allowed = allowance(case, (), 4 * MiB)
    assert allowed < 16 * MiB
    assert found.peak <= allowed, report(found, allowed)


@pytest.mark.parametrize("frozen", [("weight", "bias"), ("weight",)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a15_frozen_weight_allocates_nothing_of_its_size(
    dtype: torch.dtype, frozen: tuple[str, ...]
) -> None:
    case = make_case(256, 8192, 256, dtype, ignored=0.0)
    found = footprint(case, ("log_probs", "entropy"), frozen, MiB)
    allowed = allowance(case, frozen, MiB)
    assert allowed < nbytes(case.weight)
    assert found.largest < nbytes(case.weight) // 2
    assert found.peak <= allowed, report(found, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_hidden_allocates_nothing_of_its_size(dtype: torch.dtype) -> None:
    case = make_case(4096, 256, 512, dtype, ignored=0.0)
    found = footprint(case, ("log_probs", "entropy"), ("hidden",), MiB)
    allowed = allowance(case, ("hidden",), MiB)
    assert allowed < nbytes(case.hidden)
    assert found.peak <= allowed, report(found, allowed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_inference_allocates_scratch_and_vectors_only(dtype: torch.dtype) -> None:
    case = make_case(1024, 8192, 256, dtype, ignored=0.0)
    frozen = ("hidden", "weight", "bias")
    found = footprint(case, OUTPUTS, frozen, MiB)
    allowed = allowance(case, frozen, MiB)
    assert found.peak <= allowed, report(found, allowed)


def test_ignored_rows_cost_no_memory() -> None:
    """With 7 of 8 rows ignored, what is added for the valid ones is small."""
    case = make_case(8192, 1024, 256, ignored=0.0)
    case.targets[torch.arange(8192) % 8 != 0] = -100
    found = footprint(case, ("log_probs",), ("weight", "bias"), MiB)
    # Gradient of hidden, one copy of the valid rows of hidden and of their gradient.
    allowed = nbytes(case.hidden) * 10 // 8 + MiB + PER_ROW * 8192 + ROUNDING
    assert found.peak <= allowed, report(found, allowed)


@pytest.mark.parametrize("layout", ["transposed", "contiguous"])
def test_layout_of_the_weight_costs_no_copy(layout: str) -> None:
    """A weight stored transposed is read in place, not made contiguous."""
    case = make_case(128, 8192, 256, ignored=0.0, bias=False)
    weight = case.weight.T.contiguous().T if layout == "transposed" else case.weight
    case = Case(case.hidden, weight, case.targets)

    def forward() -> object:
        return call(case, {"hidden": case.hidden, "weight": weight}, ("log_probs",),
                    scratch_bytes=MiB)  # fmt: skip

    found = measure(forward, CPU)
    assert found.peak <= MiB + PER_ROW * 128 + ROUNDING, report(found, MiB)


def test_fp32_weight_under_autocast_is_cast_by_blocks() -> None:
    """No bfloat16 copy of the whole float32 weight (4 MiB here)."""
    case = make_case(128, 8192, 256, ignored=0.0, bias=False)

    def forward() -> object:
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return call(case, {"hidden": case.hidden, "weight": case.weight}, ("log_probs",),
                        scratch_bytes=MiB)  # fmt: skip

    found = measure(forward, CPU)
    allowed = MiB + 2 * case.hidden.numel() + PER_ROW * 128 + ROUNDING
    assert allowed < 2 * case.weight.numel()
    assert found.peak <= allowed, report(found, allowed)


CUDA_FROZEN = {"trained": (), "frozen_hidden": ("hidden",), "frozen_weight": ("weight",)}


@pytest.mark.cuda
@pytest.mark.parametrize("frozen", CUDA_FROZEN)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peak_on_a_gpu(dtype: torch.dtype, frozen: str) -> None:
    """N=4096, V=65536, H=512: logits are 512 (1024) MiB, a float32 dW of bfloat16 128 MiB.

    Allowed in bfloat16: 64 (dW) + 4 + 8 (dH) + 32 + 1.7 MiB, and 1 % for buffers of the libraries.
    """
    names, scratch = CUDA_FROZEN[frozen], 32 * MiB
    case = make_case(4096, 65536, 512, dtype, "cuda", ignored=0.0, bias=False)
    found = footprint(case, ("log_probs", "entropy"), names, scratch)
    allowed = allowance(case, names, scratch)
    if frozen == "frozen_weight":
        allowed += nbytes(case.hidden)  # kept by the forward, which this backward has no use for
    allowed = int(1.01 * allowed)
    if dtype == torch.bfloat16:
        assert allowed < 4 * case.weight.numel()
    if "weight" in names:
        assert allowed < nbytes(case.weight)
    else:
        assert found.peak >= nbytes(case.weight), "the measurement misses the weight's gradient"
    assert found.peak <= allowed, report(found, allowed)


@pytest.mark.cuda
def test_fp32_weight_under_autocast_is_cast_by_blocks_on_a_gpu() -> None:
    """The blocks are part of the scratch: the whole bfloat16 copy would be 64 MiB."""
    case = make_case(4096, 65536, 512, device="cuda", ignored=0.0, bias=False)

    def forward() -> object:
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
            return call(case, {"hidden": case.hidden, "weight": case.weight}, ("log_probs",),
                        scratch_bytes=32 * MiB)  # fmt: skip

    found = measure(forward, case.hidden.device)
    vectors = PER_ROW * 4096 + PER_COLUMN * 65536
    allowed = int(1.01 * (32 * MiB + 2 * case.hidden.numel() + vectors))
    assert allowed < 2 * case.weight.numel()
    assert found.peak <= allowed, report(found, allowed)
