"""Does the fused head compute what the model itself computes? A few tokens through both tell.

The model's own forward runs on a few tokens, in eval mode and without gradients. A hook behind the
backbone appends the same hidden states at 32 times their size, so that a soft cap shows even where
the logits are still small. What comes out is compared with the declared transform over the whole
vocabulary, and with `fused_lm_head` at some targets. Ranks do not talk to each other, beyond what
the forward itself does.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils.generic import ModelOutput

from lowpeak.lm_head import LogitTransform, fused_lm_head
from lowpeak.undisturbed import undisturbed

from .inspection import (
    Head,
    apply_transform,
    backbone_names,
    logit_transform,
    read_head,
    transform_candidates,
)
from .own_head import OwnHead, head_input_in_weight_dtype, logit_statistics

logger = logging.getLogger("lowpeak.models")

_MAX_TOKENS = 8
_MAGNIFICATION = 32.0
# Of a log-softmax in float32 at -16, however small the logits: ten roundings.
_LOG_PROB_TOLERANCE = 10 * 16 * torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Route:
    """How log-probabilities of a model are computed with one head.

    Args:
        backbone_name: dotted name of the module whose output goes to the head.
        transform: of `fused_lm_head`; None for the model's own modules, tile by tile.
        own_head: those modules.
        declared: the transform the config declared when the test ran.
        reason: why this way.
    """

    backbone_name: str
    transform: LogitTransform | None
    own_head: OwnHead
    declared: LogitTransform
    reason: str


@dataclass(frozen=True)
class _Trial:
    """What the fused head makes of the hidden states under one transform.

    Args:
        logits: [N, V] of plain torch.
        targets: [2, N], the most and the least likely token.
        log_probs: [2, N] of `fused_lm_head` at the targets.
    """

    transform: LogitTransform
    logits: Tensor
    targets: Tensor
    log_probs: Tensor


@dataclass
class _Recording:
    """What the hooks of one run saw."""

    backbone_name: str | None = None
    backbone_output: type[ModelOutput] | None = None
    hidden: Tensor | None = None
    head_parameters: dict[int, Tensor] = field(default_factory=dict)
    trials: list[_Trial] = field(default_factory=list)


@torch.compiler.disable  # type: ignore[untyped-decorator]
@torch.inference_mode(False)  # an evaluation may come first: the route it finds is for training too
@torch.no_grad()
def choose_route(
    model: Any, forward: Callable[..., Any], labels: Tensor, detour: str | None = None
) -> Route:
    """Test the head of `model`, whose own forward is `forward`, on some of the tokens in `labels`.

    `detour`: why its own modules are to serve whatever the fused head gives; None for no reason.

    Raises:
        ValueError: when neither the fused head nor the model's own modules, called tile by tile,
            give the logits of the model's forward.
    """
    head, declared = read_head(model), logit_transform(model)
    detour = head.adapters.detour or detour
    recording = _Recording()
    tries = head.is_plain and detour is None
    with undisturbed(model):
        own = _run(model, forward, tries, _some_tokens(labels, head), declared, recording)
    own_parameters, own = _parameters_behind(own), own.detach()
    name, output_class = recording.backbone_name, recording.backbone_output
    if name is None or output_class is None or recording.hidden is None:
        raise ValueError(
            f"the forward of {type(model).__name__} called none of {backbone_names(model)}, which "
            "hold its input embeddings: its hidden states cannot be had without its logits"
        )
    hidden = recording.hidden
    tolerance = _tolerance(own, hidden, head)
    own_head = OwnHead(model, forward, name, output_class)
    transform, reason = _matching_transform(recording.trials, own, tolerance)
    reason = detour or reason
    other_names = _difference(model, own_parameters, recording.head_parameters)
    if recording.trials and other_names:
        transform, reason = None, f"behind its backbone it has more to train: {other_names}"
    if transform is None:
        with undisturbed(model):
            _require_own_head(model, own_head, hidden, own, tolerance, reason)
    logger.info(
        "%s: fused LM head %s: %s",
        type(model).__name__,
        "on"
        if transform is not None
        else "off, the model's own head runs on a tile of tokens at a time",
        reason,
    )
    return Route(name, transform, own_head, declared, reason)


def _require_own_head(
    model: Any, own_head: OwnHead, hidden: Tensor, own: Tensor, tolerance: Tensor, reason: str
) -> None:
    cause: Exception | None = None
    try:
        excess = _largest_excess(own_head.logits(hidden).to(own.device), own, tolerance)
    except Exception as error:  # of another's forward, which may need more than hidden states
        excess, cause = float("inf"), error
    if excess > 0:
        raise ValueError(
            f"the fused LM head does not give the logits of {type(model).__name__} ({reason}), "
            "and neither do its own modules called on a tile of hidden states"
            f"{'' if cause is None else f' ({type(cause).__name__}: {cause})'}. lowpeak does not "
            "train on other logits: set LOWPEAK_DISABLE=head"
        ) from cause


@torch.no_grad()
def check_loss(
    model: Any,
    own_loss: Callable[[Tensor], Tensor],
    fused_loss: Callable[[Tensor], Tensor],
    labels: Tensor,
) -> None:
    """Compare the model's own loss on some of the tokens in `labels` with the fused one.

    Raises:
        ValueError: when they differ by more than rounding may.
    """
    head = read_head(model)
    token_ids = _some_tokens(labels, head)
    with undisturbed(model), head_input_in_weight_dtype(head.module):
        own, fused = own_loss(token_ids).item(), fused_loss(token_ids).item()
    tolerance = 16 * _coarsest_rounding(head.weight) + 1e-5
    if not abs(own - fused) <= tolerance * max(1.0, abs(own)):
        raise ValueError(
            f"the loss of {type(model).__name__} on {token_ids.numel()} tokens is {own}, but the "
            f"mean negative log-likelihood of the next token is {fused}: it has a loss of its own, "
            "which lowpeak does not compute. Set LOWPEAK_DISABLE=head"
        )


def _some_tokens(labels: Tensor, head: Head) -> Tensor:
    """[1, n] token ids: labels, since those are text even where the inputs hold images."""
    chosen = labels[labels != -100][:_MAX_TOKENS]
    if chosen.numel() < 2:  # a loss needs two
        chosen = torch.arange(min(_MAX_TOKENS, head.weight.size(0)), device=labels.device)
    return chosen.unsqueeze(0)


def _run(
    model: Any,
    forward: Callable[..., Any],
    tries: bool,
    token_ids: Tensor,
    declared: LogitTransform,
    recording: _Recording,
) -> Tensor:
    """Logits [2n, V] of the model's forward on `token_ids`, with the graph from the head on.

    `tries`: whether the fused head is tried on the way.
    """
    head = model.get_output_embeddings()
    hooks = []
    if tries:
        trial = _try_transforms(model, declared, recording)
        hooks.append(head.register_forward_pre_hook(trial))
    for name in backbone_names(model):
        hooks += _record_backbone(model.get_submodule(name), name, recording)
    try:
        with head_input_in_weight_dtype(head):
            output = forward(input_ids=token_ids, use_cache=False)
            logits: Tensor = output.logits.squeeze(0)
    finally:
        torch.set_grad_enabled(False)
        for hook in hooks:
            hook.remove()
    return logits


def _record_backbone(module: nn.Module, name: str, recording: _Recording) -> list[Any]:
    def before(module: nn.Module, args: Any) -> None:
        if recording.backbone_name is None:
            recording.backbone_name = name

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        if recording.backbone_name != name:
            return None
        hidden = output.last_hidden_state
        output.last_hidden_state = torch.cat([hidden, hidden * _MAGNIFICATION], dim=1)
        recording.hidden = output.last_hidden_state.squeeze(0)
        recording.backbone_output = type(output)
        torch.set_grad_enabled(True)  # what trains behind the backbone shows in the graph
        return output

    return [module.register_forward_pre_hook(before), module.register_forward_hook(after)]


def _try_transforms(
    model: Any, declared: LogitTransform, recording: _Recording
) -> Callable[[nn.Module, Any], None]:
    """A hook before the head, where FSDP has gathered its weight."""

    def before(module: nn.Module, args: Any) -> None:
        head = read_head(model)
        head.require_whole_weight()
        if recording.hidden is None or not head.is_plain:
            return
        hidden = recording.hidden.to(head.weight.device)
        if hidden.size(-1) != head.weight.size(1):
            return
        raw = _project(hidden, head)
        recording.head_parameters = _parameters_behind(raw)
        with torch.no_grad():
            try_all(hidden, head, raw.detach())

    def try_all(hidden: Tensor, head: Head, raw: Tensor) -> None:
        for transform in transform_candidates(declared):
            logits = apply_transform(raw, transform)
            targets = torch.stack([logits.argmax(-1), logits.argmin(-1)])
            fused = fused_lm_head(
                hidden.expand(2, -1, -1),
                head.weight,
                targets,
                bias=head.bias,
                transform=transform,
                low_rank=head.adapters.low_rank,
            )
            assert fused.log_probs is not None
            recording.trials.append(_Trial(transform, logits, targets, fused.log_probs))

    return before


def _project(hidden: Tensor, head: Head) -> Tensor:
    if not torch.is_autocast_enabled(hidden.device.type):
        hidden = hidden.to(head.weight.dtype)
    raw = nn.functional.linear(hidden, head.weight, head.bias)
    for low in head.adapters.low_rank:
        features = nn.functional.linear(hidden.to(low.a.dtype), low.a)
        raw = raw + (nn.functional.linear(features, low.b) * low.scale).to(raw.dtype)
    return raw


def _parameters_behind(result: Tensor) -> dict[int, Tensor]:
    """The leaves of the autograd graph of `result`, by id."""
    leaves: dict[int, Tensor] = {}
    seen: set[Any] = set()
    nodes: list[Any] = [result.grad_fn]
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            leaves[id(node.variable)] = node.variable
        nodes += [following for following, _ in node.next_functions]
    return leaves


def _difference(model: nn.Module, own: dict[int, Tensor], ours: dict[int, Tensor]) -> str:
    """Names of the parameters behind one of the two results only."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    leaves = {**own, **ours}
    differing = own.keys() ^ ours.keys()
    return ", ".join(sorted(names.get(key, str(tuple(leaves[key].shape))) for key in differing))


def _matching_transform(
    trials: list[_Trial], own: Tensor, tolerance: Tensor
) -> tuple[LogitTransform | None, str]:
    """The first transform that gives the model's own logits, or None; and the reason."""
    if not trials:
        return None, "its head is no plain matrix that takes what the backbone returns"
    for trial in trials:
        if _largest_excess(trial.logits, own, tolerance) > 0:
            continue
        flat = trial.targets.flatten()
        (expected,) = logit_statistics(own.repeat(2, 1), flat, ("log_probs",))
        excess = _largest_excess(
            trial.log_probs.reshape(-1, 1),
            expected.unsqueeze(-1),
            2 * tolerance.repeat(2, 1) + _LOG_PROB_TOLERANCE,
        )
        if excess > 0:
            return None, f"fused log-probabilities are {excess:.3g} beyond rounding off its own"
        scale, softcap = trial.transform.scale, trial.transform.softcap
        return trial.transform, f"equals the model's own, with scale {scale:g}, soft cap {softcap}"
    return None, "its logits are not what its config declares"


def _tolerance(own: Tensor, hidden: Tensor, head: Head) -> Tensor:
    """[N, 1]: 8 roundings of a row's largest finite logit, and the spread of summing H products.

    Each product is rounded to the coarsest dtype on the way; the sum over H is made in float32 at
    least, where it spreads by sqrt(H) roundings.
    """
    factors = [low.a for low in head.adapters.low_rank]
    coarsest = _coarsest_rounding(own, hidden, head.weight, *factors)
    summing = 4 * math.sqrt(hidden.size(-1)) * min(coarsest, torch.finfo(torch.float32).eps)
    largest = own.masked_fill(~own.isfinite(), 0).abs().amax(-1, keepdim=True).double()
    return largest * (8 * coarsest + summing)


def _coarsest_rounding(*tensors: Tensor) -> float:
    kind = tensors[0].device.type
    dtypes = [tensor.dtype for tensor in tensors if tensor.is_floating_point()]
    if torch.is_autocast_enabled(kind):
        dtypes.append(torch.get_autocast_dtype(kind))
    coarsest = max(torch.finfo(dtype).eps for dtype in dtypes)
    if kind == "cuda" and torch.backends.cuda.matmul.fp32_precision == "tf32":
        return max(coarsest, 2.0**-11)
    return coarsest


def _largest_excess(computed: Tensor, own: Tensor, tolerance: Tensor) -> float:
    """By how much `computed` is beyond the tolerance around `own` at most; below 0: nowhere."""
    if computed.shape != own.shape:
        return float("inf")
    same = computed == own  # infinities agree
    excess = (computed.double() - own.double()).abs() - tolerance
    excess = excess.masked_fill(same, -1.0).nan_to_num(nan=float("inf"), posinf=float("inf"))
    return float(excess.max())
