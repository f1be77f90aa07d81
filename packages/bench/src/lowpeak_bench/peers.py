"""Ways to compute the LM head's loss and its gradients: lowpeak, plain torch and the peers.

Every peer is called as it ships, with its own defaults.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor


class HeadProblem(NamedTuple):
    """One LM head to differentiate: hidden [N, H], weight [V, H], targets [N] int64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor


class Evaluation(NamedTuple):
    """The mean loss, and the log-probabilities [N] where the implementation returns them."""

    loss: Tensor
    log_probs: Tensor | None


Evaluate = Callable[[HeadProblem], Evaluation]


@dataclass(frozen=True)
class HeadImplementation:
    """A named way to compute the loss.

    load() imports what it needs and returns the function, so that a peer that is not installed
    fails there and not before.
    """

    name: str
    load: Callable[[], Evaluate]


def full_logits(dtype: torch.dtype | None) -> Evaluate:
    """Materialise all logits; log_softmax in `dtype`, or in the logits' own where None."""

    def evaluate(problem: HeadProblem) -> Evaluation:
        # One expression: a name for the logits would keep a second [N, V] tensor alive.
        log_probs = (
            (problem.hidden @ problem.weight.t())
            .to(problem.hidden.dtype if dtype is None else dtype)
            .log_softmax(-1)
            .gather(-1, problem.targets[:, None])
            .squeeze(-1)
        )
        return Evaluation(-log_probs.float().mean(), log_probs)

    return evaluate


def matrix_products(problem: HeadProblem) -> None:
    """Run only the products that no implementation can avoid: logits, dH and, if trained, dW."""
    with torch.no_grad():
        logits = problem.hidden @ problem.weight.t()
        torch.mm(logits, problem.weight)
        if problem.weight.requires_grad:
            torch.mm(logits.t(), problem.hidden)


def load_trl(outputs: Sequence[str]) -> Evaluate:
    """Return TRL's chunked log-probabilities, called as its add_fused_lm_head calls them."""
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction

    function: Any = ChunkedLogProbFunction
    vocabulary_chunk = 32768  # trl/trainer/utils.py, TRL 1.16

    def evaluate(problem: HeadProblem) -> Evaluation:
        log_probs = function.apply(
            problem.hidden,
            problem.weight,
            None,
            problem.targets,
            1.0,
            vocabulary_chunk,
            None,
            1.0,
            tuple(outputs),
        )[0]
        return Evaluation(-log_probs.mean(), log_probs)

    return evaluate


def load_liger() -> Evaluate:
    """Return Liger's fused linear cross entropy with its default options."""
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss_function = LigerFusedLinearCrossEntropyLoss()

    def evaluate(problem: HeadProblem) -> Evaluation:
        loss = loss_function(problem.weight, problem.hidden, problem.targets)
        return Evaluation(loss, None)

    return evaluate


def load_cce(**options: Any) -> Evaluate:
    """Return Apple's cut cross entropy; filter_eps=None is exact, its default drops small tiles."""
    from cut_cross_entropy import linear_cross_entropy

    def evaluate(problem: HeadProblem) -> Evaluation:
        loss = linear_cross_entropy(
            problem.hidden, problem.weight, problem.targets, impl="cce", **options
        )
        return Evaluation(loss, None)

    return evaluate


def load_lowpeak(
    outputs: Sequence[str],
    scratch_bytes: int | None = None,
    backend: str = "auto",
    expected: bool = False,
) -> Evaluate:
    """Return lowpeak's fused head with the outputs, scratch size and backend asked for.

    `expected`: it is told the gradient of the mean loss beforehand.
    """
    from lowpeak import fused_lm_head

    def evaluate(problem: HeadProblem) -> Evaluation:
        tokens = problem.targets.numel()
        expected_grads = None
        if expected:
            gradient = torch.full((tokens,), -1 / tokens, device=problem.targets.device)
            expected_grads = {"log_probs": gradient}
        log_probs = fused_lm_head(
            problem.hidden,
            problem.weight,
            problem.targets,
            outputs=tuple(outputs),
            scratch_bytes=scratch_bytes,
            backend=backend,
            expected_grads=expected_grads,
        ).log_probs
        assert log_probs is not None
        return Evaluation(-log_probs.mean(), log_probs)

    return evaluate


def baselines_and_peers() -> list[HeadImplementation]:
    """List everything lowpeak is measured beside."""
    log_probs, entropy = ("log_probs",), ("log_probs", "entropy")
    return [
        HeadImplementation("full logits, own dtype", lambda: full_logits(None)),
        HeadImplementation("full logits, float32", lambda: full_logits(torch.float32)),
        HeadImplementation("TRL, log-probs", lambda: load_trl(log_probs)),
        HeadImplementation("TRL, + entropy", lambda: load_trl(entropy)),
        HeadImplementation("Liger fused linear CE", load_liger),
        HeadImplementation("Apple CCE, exact", lambda: load_cce(filter_eps=None)),
        HeadImplementation("Apple CCE, filtered", load_cce),
    ]


_LOWPEAK_OUTPUTS = {"log-probs": ("log_probs",), "+ entropy": ("log_probs", "entropy")}


def lowpeak_variants(
    scratch_sizes: Sequence[int | None],
    expected_sizes: Sequence[int | None],
    backends: Sequence[str],
) -> list[HeadImplementation]:
    """List lowpeak's head for each scratch size (None: its own choice), backend and output set.

    With a frozen head the plain rows take one pass where the size allows it. `expected_sizes` are
    those of the rows that are told the gradient beforehand.
    """
    variants = []
    for backend in backends:
        label = "" if backend == "auto" else f", {backend}"
        for expected, sizes in ((False, scratch_sizes), (True, expected_sizes)):
            for size in sizes:
                for name, outputs in _LOWPEAK_OUTPUTS.items():
                    words = "expected, " if expected else ""
                    words += f"{name}{label}"
                    words += "" if size is None else f", {size / 2**20:g} MiB"
                    load = functools.partial(load_lowpeak, outputs, size, backend, expected)
                    variants.append(HeadImplementation(f"lowpeak, {words}", load))
    return variants
