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


class Adapter(NamedTuple):
    """LoRA on a head: scale * b @ a is added to its weight; a [r, H], b [V, r]."""

    a: Tensor
    b: Tensor
    alpha: int

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / len(self.a)


class HeadProblem(NamedTuple):
    """One LM head to differentiate: hidden [N, H], weight [V, H], targets [N] int64."""

    hidden: Tensor
    weight: Tensor
    targets: Tensor
    adapter: Adapter | None = None

    @property
    def leaves(self) -> dict[str, Tensor]:
        """What gradients are wanted of, by name."""
        found = {"hidden": self.hidden, "weight": self.weight}
        if self.adapter is not None:
            found |= {"adapter_a": self.adapter.a, "adapter_b": self.adapter.b}
        return {name: tensor for name, tensor in found.items() if tensor.requires_grad}


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
    """Run only the products that no implementation can avoid: logits, dH and, if trained, dW.

    Of an adapter: the same with its factors.
    """
    with torch.no_grad():
        logits = problem.hidden @ problem.weight.t()
        hidden_gradient = torch.mm(logits, problem.weight)
        if problem.weight.requires_grad:
            torch.mm(logits.t(), problem.hidden)
        if problem.adapter is not None:
            a, b, _ = problem.adapter
            features = problem.hidden @ a.t()
            logits.addmm_(features, b.t())
            of_features = logits @ b
            hidden_gradient.addmm_(of_features, a)
            torch.mm(of_features.t(), problem.hidden)
            torch.mm(logits.t(), features)


@functools.cache
def _peft_layer(vocabulary: int, width: int, rank: int, alpha: int, dtype: torch.dtype) -> Any:
    """A head with an adapter and no storage: its parameters are given in the call."""
    from peft import LoraConfig, inject_adapter_in_model

    model = torch.nn.Module()
    config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=["head"], init_lora_weights=False)
    with torch.device("meta"):
        model.head = torch.nn.Linear(width, vocabulary, bias=False, dtype=dtype)
        return inject_adapter_in_model(config, model).head


def load_peft(dtype: torch.dtype | None) -> Evaluate:
    """Return PEFT's LoRA layer, whose logits are all materialised; log_softmax in `dtype`.

    Both factors are in the dtype of the weight. None is the logits' own dtype.
    """
    import peft  # noqa: F401  # where it is missing, this is the place to fail

    def evaluate(problem: HeadProblem) -> Evaluation:
        assert problem.adapter is not None
        a, b, alpha = problem.adapter
        layer = _peft_layer(*problem.weight.shape, len(a), alpha, problem.weight.dtype)
        parameters = {
            "base_layer.weight": problem.weight,
            "lora_A.default.weight": a,
            "lora_B.default.weight": b,
        }
        log_probs = (
            torch.func.functional_call(layer, parameters, (problem.hidden,))
            .to(problem.hidden.dtype if dtype is None else dtype)
            .log_softmax(-1)
            .gather(-1, problem.targets[:, None])
            .squeeze(-1)
        )
        return Evaluation(-log_probs.float().mean(), log_probs)

    return evaluate


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
    from lowpeak import LowRank, fused_lm_head

    def evaluate(problem: HeadProblem) -> Evaluation:
        tokens, adapter = problem.targets.numel(), problem.adapter
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
            low_rank=None if adapter is None else LowRank(adapter.a, adapter.b, adapter.scale),
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


def peers_with_adapter() -> list[HeadImplementation]:
    """List what lowpeak is measured beside where the head has an adapter: TRL's, Liger's and
    CCE's heads take none."""
    return [
        HeadImplementation("PEFT, full logits, own dtype", lambda: load_peft(None)),
        HeadImplementation("PEFT, full logits, float32", lambda: load_peft(torch.float32)),
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
