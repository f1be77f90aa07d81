"""Memory of fused_divergence, its compilation, and TRL's own on the CPU beside it."""

from collections.abc import Iterator

import pytest
import torch
from divergence_checks import Pair, call, make_pair, run
from lm_head_checks import error, largest
from lm_head_memory import measure
from torch import Tensor

from lowpeak import LogitTransform, fused_divergence

KiB, MiB = 1 << 10, 1 << 20
PER_ROW, PER_COLUMN, ROUNDING = 240, 16, 64 * KiB


def nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@pytest.mark.parametrize(("beta", "frozen", "dtype"), [
    (0.5, (), torch.bfloat16), (0.0, ("weight", "bias"), torch.bfloat16),
    (1.0, (), torch.float32), (0.5, ("weight", "bias"), torch.float32),
], ids=str)  # fmt: skip
def test_peak_without_logits_and_without_wide_weight_gradient(
    beta: float, frozen: tuple[str, ...], dtype: torch.dtype, device: torch.device
) -> None:
    """N=256, V=2048: both heads' logits are 4 MiB, allowed are 2.5 to 3.4 (all), 1.6 (frozen)."""
    pair = make_pair(256, 2048, beta, dtype, device, width=256, teacher_width=160, ignored=0.0)
    leaves = pair.student.leaves(frozen)
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    upstream = torch.ones(256, device=device)

    def step() -> object:
        divergence = call(pair, leaves, scratch_bytes=MiB).divergence
        return divergence, torch.autograd.grad(divergence, wanted, upstream)

    found = measure(step, device)
    student = pair.student
    allowed = MiB + PER_ROW * 256 + PER_COLUMN * 2048 + ROUNDING + nbytes(student.hidden)
    allowed += 4 * student.hidden.numel() if dtype == torch.bfloat16 else 0
    allowed += 0 if frozen else nbytes(student.weight)
    assert found.peak <= allowed, f"{found.peak / MiB:.2f} MiB, allowed {allowed / MiB:.2f}"
    if not frozen:
        assert found.peak >= nbytes(student.weight), "the measurement misses the gradient"


def test_evaluation_allocates_scratch_and_vectors_only(device: torch.device) -> None:
    pair = make_pair(256, 2048, 0.5, torch.bfloat16, device, width=128, ignored=0.0)
    leaves = pair.student.leaves(("hidden", "weight", "bias"))
    found = measure(lambda: call(pair, leaves, scratch_bytes=MiB), device)
    assert found.peak <= MiB + PER_ROW * 256 + PER_COLUMN * 2048 + ROUNDING


@pytest.fixture
def _fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.usefixtures("_fresh_dynamo")
@pytest.mark.filterwarnings(
    "ignore:<class 'torch.autograd.function.Function'> should not be instantiated"
)
@pytest.mark.parametrize(("row_selection", "beta"), [
    ("valid", 0.0), ("valid", 0.5), ("all", 0.5), ("all", 1.0),
])  # fmt: skip
def test_fullgraph(row_selection: str, beta: float, device: torch.device) -> None:
    """Masked rows included: their number depends on the data, the graph must not break on it."""

    def head(pair: Pair, leaves: dict[str, Tensor], mask: Tensor) -> Tensor:
        result = fused_divergence(
            leaves["hidden"] * 2,
            leaves["weight"],
            pair.teacher.hidden,
            pair.teacher.weight,
            beta=beta,
            mask=mask,
            student_bias=leaves["bias"],
            student_transform=LogitTransform(softcap=7.0, temperature=0.9),
            row_selection=row_selection,
        )
        return result.divergence + result.student_entropy

    compiled = torch.compile(head, fullgraph=True, backend="aot_eager")
    for rows, ignored in ((12, 0.3), (12, 1.1), (17, 0.6)):
        pair = make_pair(rows, 60, beta, device=device, ignored=ignored, seed=rows)
        results = []
        for function in (compiled, head):
            leaves = pair.student.leaves()
            value = function(pair, leaves, pair.mask)
            value.backward(torch.linspace(-1, 1, rows, device=device))
            results.append((value.detach(), *(leaf.grad for leaf in leaves.values())))
        for found, expected in zip(*results, strict=True):
            assert error(found, expected) <= 1e-6 * max(1.0, largest(expected))


def test_opcheck_of_both_operators(device: torch.device) -> None:
    """Schema and fake implementation, by torch's own checks."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = {}

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            if func.namespace == "lowpeak":
                seen.setdefault(func, (args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    for beta in (0.0, 0.5):
        pair = make_pair(7, 30, beta, device=device)
        with Recorder():
            run(pair, torch.ones(7, device=device))
        assert len(seen) == 2
        for operator, (args, kwargs) in seen.items():
            checks = ("test_schema", "test_faketensor")
            torch.library.opcheck(operator, args, kwargs, test_utils=checks)
        seen.clear()


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 1.0])
def test_sum_over_tokens_follows_trl(beta: float) -> None:
    """The loss, the entropy's sum and the gradients of TRL's DistillationTrainer, on the CPU."""
    module = pytest.importorskip("trl.trainer.distillation_trainer")
    pair = make_pair((3, 7), 130, beta)
    student, teacher = pair.student, pair.teacher
    losses = []
    for mine in (True, False):
        leaves = student.leaves()
        if mine:
            transform = LogitTransform(scale=0.5, softcap=6.0, temperature=0.7)
            result = fused_divergence(
                leaves["hidden"], leaves["weight"], teacher.hidden, teacher.weight,
                beta=beta, mask=pair.mask.long(), student_bias=leaves["bias"],
                teacher_bias=teacher.bias, student_transform=transform,
                teacher_transform=LogitTransform(temperature=0.7),
            )  # fmt: skip
            loss, entropy = result.divergence.sum() / 11, result.student_entropy.sum()
        else:
            loss, entropy, count = module._chunked_divergence_loss(
                leaves["hidden"], teacher.hidden, leaves["weight"], teacher.weight,
                pair.mask.long(), beta, num_items_in_batch=11,
                student_lm_head_bias=leaves["bias"], teacher_lm_head_bias=teacher.bias,
                student_logit_scale=0.5, student_final_logit_softcapping=6.0, temperature=0.7,
            )  # fmt: skip
            assert count == pair.mask.sum()
        loss.backward()
        losses.append([loss.detach(), entropy.detach(), *(leaf.grad for leaf in leaves.values())])
    for ours, theirs in zip(*losses, strict=True):
        assert error(ours, theirs) <= 1e-5 * max(1.0, largest(theirs))
