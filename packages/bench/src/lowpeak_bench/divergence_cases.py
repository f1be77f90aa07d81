"""Ways to compute a distillation loss and its gradients: lowpeak, all logits, and TRL's kernel."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowpeak_bench.lm_head_reference import HeadShape

# name, beta of fused_divergence and of TRL's kernel
DIVERGENCES = {"forward-kl": 0.0, "reverse-kl": 1.0, "jsd": 0.5}


class PairProblem(NamedTuple):
    """Heads of student and teacher over the same tokens: hidden [N, H] and weight [V, H] each."""

    hidden: Tensor
    weight: Tensor
    teacher_hidden: Tensor
    teacher_weight: Tensor
    beta: float

    @property
    def leaves(self) -> list[Tensor]:
        """What is trained."""
        return [tensor for tensor in (self.hidden, self.weight) if tensor.requires_grad]


Evaluate = Callable[[PairProblem], Tensor]


@dataclass(frozen=True)
class PairImplementation:
    """A named way to compute the mean divergence; load() imports what it needs.

    `exact`: whether it computes the divergence over the whole vocabulary.
    """

    name: str
    load: Callable[[], Evaluate]
    exact: bool = True


def make_pair(
    shape: HeadShape, tokens: int, dtype: torch.dtype, device: torch.device, weight_std: float
) -> PairProblem:
    """Draw RMS-normed hidden states and normal weights; a teacher that is the student, disturbed.

    The disturbance is as large as half of each tensor, which gives divergences of the order of
    those at the start of a distillation. The student's weight is trained.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device)

    hidden, weight = normal(tokens, shape.hidden), normal(shape.vocabulary, shape.hidden)
    hidden *= hidden.square().mean(-1, keepdim=True).rsqrt()
    weight *= weight_std
    teacher_hidden = hidden + 0.5 * normal(tokens, shape.hidden)
    teacher_weight = weight + 0.5 * weight_std * normal(shape.vocabulary, shape.hidden)
    return PairProblem(
        hidden.to(dtype).requires_grad_(),
        weight.to(dtype).requires_grad_(),
        teacher_hidden.to(dtype),
        teacher_weight.to(dtype),
        0.0,
    )


def matrix_products(problem: PairProblem) -> None:
    """Run only the products that no implementation can avoid: both logits, dH and, trained, dW."""
    with torch.no_grad():
        logits = problem.hidden @ problem.weight.t()
        torch.mm(logits, problem.weight)
        if problem.weight.requires_grad:
            torch.mm(logits.t(), problem.hidden)
        del logits
        torch.mm(problem.teacher_hidden, problem.teacher_weight.t())


def divergence_of_logits(student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergence [N] of float32 or float64 logits [N, V] (arXiv 2306.13649)."""
    log_q, log_p = student.log_softmax(-1), teacher.log_softmax(-1)

    def kl(log_a: Tensor, log_b: Tensor) -> Tensor:
        return (log_a.exp() * (log_a - log_b)).sum(-1)

    if beta == 0.0:
        return kl(log_p, log_q)
    if beta == 1.0:
        return kl(log_q, log_p)
    weights = torch.tensor([beta, 1 - beta], dtype=log_p.dtype, device=log_p.device).log()
    log_m = torch.logaddexp(log_p + weights[0], log_q + weights[1])
    return beta * kl(log_p, log_m) + (1 - beta) * kl(log_q, log_m)


def full_logits(problem: PairProblem) -> Tensor:
    """Materialise the logits of both heads in float32."""
    student = (problem.hidden @ problem.weight.t()).float()
    with torch.no_grad():
        teacher = (problem.teacher_hidden @ problem.teacher_weight.t()).float()
    return divergence_of_logits(student, teacher, problem.beta).mean()


def load_trl() -> Evaluate:
    """Return TRL's chunked divergence, called as its DistillationTrainer calls it."""
    from trl.kernels.chunked_divergence import ChunkedDivergenceFunction

    function: Any = ChunkedDivergenceFunction

    def evaluate(problem: PairProblem) -> Tensor:
        student, teacher = problem[:2], problem[2:4]
        divergence: Tensor = function.apply(
            *student, None, *teacher, None, problem.beta, 1.0, 1.0, None, 1.0, None
        )[0]
        return divergence.mean()

    return evaluate


def load_lowpeak(expected: bool, scratch_bytes: int | None, backend: str) -> Evaluate:
    """Return lowpeak's fused divergence, with or without the expectation of a mean."""
    from lowpeak import fused_divergence

    def evaluate(problem: PairProblem) -> Tensor:
        hidden = problem.hidden
        divergence = fused_divergence(
            *problem[:4],
            beta=problem.beta,
            expected_grads=hidden.new_ones(hidden.size(0), dtype=torch.float32)
            if expected
            else None,
            scratch_bytes=scratch_bytes,
            backend=backend,
        ).divergence
        return divergence.mean()

    return evaluate


def load_table(k: int, backend: str) -> Evaluate:
    """Return the divergence against a table of the teacher's `k` likeliest tokens, made once."""
    from lowpeak import TopKLogProbs, fused_top_k_divergence, top_k_log_probs

    made: dict[int, TopKLogProbs] = {}

    def evaluate(problem: PairProblem) -> Tensor:
        key = id(problem.teacher_hidden)
        if key not in made:
            made[key] = top_k_log_probs(problem.teacher_hidden, problem.teacher_weight, k)
        return fused_top_k_divergence(
            problem.hidden, problem.weight, made[key], beta=problem.beta, backend=backend
        ).divergence.mean()

    return evaluate


def implementations(
    scratch_sizes: list[int | None], top_k: int, backend: str
) -> list[PairImplementation]:
    """List everything that is measured; lowpeak's for each scratch size (None: its own choice)."""
    found = [
        PairImplementation("full logits, float32", lambda: full_logits),
        PairImplementation("TRL", load_trl),
    ]
    for size in scratch_sizes:
        label = "" if size is None else f", {size / 2**20:g} MiB"
        for name, expected in (("lowpeak", False), ("lowpeak, expected gradients", True)):
            load = _loader(expected, size, backend)
            found.append(PairImplementation(name + label, load))
    table = PairImplementation(
        f"lowpeak, top-{top_k} table", lambda: load_table(top_k, backend), False
    )
    return [*found, table]


def _loader(expected: bool, size: int | None, backend: str) -> Callable[[], Evaluate]:
    return lambda: load_lowpeak(expected, size, backend)
