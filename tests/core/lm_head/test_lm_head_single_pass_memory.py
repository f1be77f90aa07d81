"""Memory of the single pass: a chunk within scratch_bytes, and what is kept, as documented."""

import pytest
import torch
from lm_head_checks import Case, backward, call, make_case, upstream_for
from lm_head_memory import measure

KiB, MiB = 1 << 10, 1 << 20
ROWS, VOCABULARY, WIDTH = 256, 4096, 128

# Statistics, coefficients, expected and upstream gradients and their float64 copies in the test
# that accepts them: bytes per row, generously. The allocator rounds every tensor up.
VECTORS = 400 * ROWS + 16 * VOCABULARY + 64 * KiB


def nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def peak(case: Case, frozen: tuple[str, ...], scratch: int | None, expected: str = "") -> int:
    """Peak of a step whose gradients are kept; leaves and upstream gradients are made before."""
    leaves = case.leaves(frozen)
    upstream = upstream_for(case, ("log_probs",))
    hints = {
        "": None,
        "right": upstream,
        "wrong": {"log_probs": upstream["log_probs"].square() + 1},
    }

    def step() -> object:
        result = call(
            case, leaves, ("log_probs",), scratch_bytes=scratch, expected_grads=hints[expected]
        )
        backward(result, upstream)
        gradients = [leaf.grad for leaf in leaves.values()]
        for leaf in leaves.values():
            leaf.grad = None
        return gradients

    return measure(step, torch.device("cpu")).peak


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_frozen_weight(dtype: torch.dtype) -> None:
    """A chunk, and what is kept: of the size of hidden. Logits of all rows are 2 (4) MiB."""
    case = make_case(ROWS, VOCABULARY, WIDTH, dtype, ignored=0.0, bias=False)
    found = peak(case, ("weight",), 7 * MiB // 4)
    assert found <= 7 * MiB // 4 + 2 * nbytes(case.hidden) + VECTORS
    assert found >= 16 * VOCABULARY * 12, "the measurement misses the chunk"


@pytest.mark.parametrize("expected", ["right", "wrong"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_expected_gradients(dtype: torch.dtype, expected: str) -> None:
    """The float32 gradient of a bfloat16 weight, 2 MiB, is part of the scratch until the end."""
    case = make_case(ROWS, VOCABULARY, WIDTH, dtype, ignored=0.0, bias=False)
    scratch = 4 * MiB
    found = peak(case, (), scratch, expected)
    allowed = scratch + nbytes(case.weight) + 2 * nbytes(case.hidden) + VECTORS
    if dtype == torch.float32:  # kept in float32: the result is a second one
        allowed += nbytes(case.weight)
    elif expected == "wrong":
        allowed += 4 * case.hidden.numel()
    assert found <= allowed, (found, allowed)
    assert found >= 6 * case.weight.numel(), "the measurement misses what is kept"


def test_a_single_chunk_keeps_the_weights_own_dtype() -> None:
    """Two bfloat16 gradients of the weight, kept and scaled, and no float32 one."""
    case = make_case(16, VOCABULARY, 8 * WIDTH, torch.bfloat16, ignored=0.0, bias=False)
    found = peak(case, (), None, "right")
    kept_and_result = 2 * nbytes(case.weight)
    assert kept_and_result <= found <= kept_and_result + 3 * MiB
    assert kept_and_result + 3 * MiB < 6 * case.weight.numel()
