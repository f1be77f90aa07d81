"""What lowpeak does with a family: right, tile by tile, refused or not buildable; see `check`."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

import tiny_models
import torch
import transformers
from family_configs import tiny_config
from tiny_models import token_batch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from lowpeak.models import install_fused_forward, reduce_memory

RIGHT = "right"
TILES = "tile by tile"
REFUSED = "refused"
NOT_BUILDABLE = "not buildable"
OWN_LOSS = "refused: it has a loss of its own"

OUTPUTS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# float32 against float64 of the same float32 logits.
TOLERANCE = {"rtol": 1e-5, "atol": 2e-5}
MOST_PARAMETERS = 20_000_000
MOST_SECONDS = 60


@dataclass(frozen=True)
class Verdict:
    """What became of one family.

    Args:
        family: `model_type` of its configuration.
        class_name: of the model.
        result: RIGHT, TILES, REFUSED or NOT_BUILDABLE.
        reason: why it is not the fused head.
        training: whether `reduce_memory` trains it; why not, where it does not.
    """

    family: str
    class_name: str
    result: str
    reason: str = ""
    training: str = ""


class NotBuildable(Exception):
    """The model's own constructor, forward or backward failed on the tiny configuration."""


def families() -> tuple[str, ...]:
    """Model types of all causal language models of this transformers; imports none of them."""
    return tuple(sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES))


def vision_families() -> tuple[str, ...]:
    """Those of the vision language models that are another class than their causal one."""
    causal, vision = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return tuple(sorted(name for name in vision if vision[name] != causal.get(name)))


def check(family: str) -> Verdict:
    """Build a tiny model of the family and compare all that lowpeak computes with its own logits.

    Raises:
        AssertionError: when lowpeak computes something else without saying so.
    """
    return _check(family, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family])


def check_vision(family: str) -> Verdict:
    """As `check`, a vision language model on text alone."""
    return _check(family, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[family])


def _check(family: str, names: str | tuple[str, ...]) -> Verdict:
    name = names if isinstance(names, str) else names[0]
    try:
        with _not_longer_than(MOST_SECONDS):
            model = build(CONFIG_MAPPING[family], getattr(transformers, name))
            own, own_gradients = _own_scores(model)
    except NotBuildable as failure:
        return Verdict(family, name, NOT_BUILDABLE, str(failure))
    with _not_longer_than(MOST_SECONDS):
        result, reason = _compare(model, own, own_gradients)
        training = "" if result == REFUSED else _train(model)
    return Verdict(family, name, result, reason, training)


def build(config_class: Any, model_class: Any) -> PreTrainedModel:
    """A tiny model with logits of some size, or NotBuildable."""
    try:
        of_a_part = model_class.config_class in config_class.sub_configs.values()
        config = tiny_config(model_class.config_class if of_a_part else config_class)
        with torch.device("meta"):
            parameters = sum(p.numel() for p in model_class(config).parameters())
    except Exception as error:
        raise NotBuildable(_failure("constructor", error)) from error
    if parameters > MOST_PARAMETERS:
        raise NotBuildable(f"{parameters} parameters")
    torch.manual_seed(0)
    model: PreTrainedModel = model_class(config).train()
    _enlarge_head(model)
    return model.to(tiny_models.DEVICE)


def _enlarge_head(model: PreTrainedModel) -> None:
    """Logits of some size, and a bias that is not zero: mistakes in them show."""
    head = model.get_output_embeddings()
    if head is None or not isinstance(getattr(head, "weight", None), Tensor):
        return
    with torch.no_grad():
        head.weight.mul_(0.5 / head.weight.std())
        if isinstance(getattr(head, "bias", None), Tensor):
            head.bias.normal_()


def _own_scores(model: PreTrainedModel) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Statistics of the model's own logits in float64, and the gradients of their objective."""
    batch = token_batch()
    labels = batch.pop("labels")[:, 1:]
    try:
        torch.manual_seed(0)
        logits = model(**batch, use_cache=False).logits
        z = logits[:, :-1].double()
        mask = labels != -100
        log_p = z.log_softmax(-1)
        index = labels.clamp(min=0).unsqueeze(-1)
        scores = {
            "log_probs": log_p.gather(-1, index).squeeze(-1),
            "entropy": -(log_p.exp() * log_p.masked_fill(log_p.isinf(), 0)).sum(-1),
            "log_sum_sq_probs": (2 * log_p).logsumexp(-1),
            "mean_logits": z.mean(-1),
        }
        scores = {name: torch.where(mask, value, 0.0) for name, value in scores.items()}
        scores["is_top1"] = (z.argmax(-1) == labels) & mask
        scores["loss"] = -scores["log_probs"].sum() / mask.sum()
        gradients = _gradients(model, scores)
    except Exception as error:
        raise NotBuildable(_failure("forward", error)) from error
    if not logits.isfinite().all():
        raise NotBuildable("forward: its logits are not finite")
    return scores, gradients


def _gradients(model: PreTrainedModel, scores: Any) -> dict[str, Tensor]:
    """Of the loss and of each entropy with a weight of its own, by parameter."""
    weights = torch.linspace(-1, 1, scores["entropy"].numel(), device=scores["entropy"].device)
    objective = scores["loss"] + (scores["entropy"] * weights.view_as(scores["entropy"])).sum()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(objective, tuple(named.values()), allow_unused=True)
    return {name: g for name, g in zip(named, found, strict=True) if g is not None}


def _compare(
    model: PreTrainedModel, own: dict[str, Tensor], own_gradients: dict[str, Tensor]
) -> tuple[str, str]:
    batch = token_batch()
    try:
        handle = install_fused_forward(model, outputs=OUTPUTS)
    except ValueError as refusal:
        return REFUSED, _text(refusal)
    try:
        torch.manual_seed(0)
        fused = model(**batch, fused_lm_head=True, output_router_logits=False)
        route = handle.fused.route(model, batch["labels"])
    except ValueError as refusal:
        return REFUSED, _text(refusal)
    finally:
        handle.remove()
    for name, value in own.items():
        torch.testing.assert_close(
            fused[name], value, check_dtype=False, **TOLERANCE, msg=lambda m, n=name: f"{n}: {m}"
        )
    gradients = _gradients(model, fused)
    assert gradients.keys() == own_gradients.keys()
    scale = max(gradient.norm().item() for gradient in own_gradients.values())
    for name, expected in own_gradients.items():
        assert (gradients[name] - expected).norm().item() <= 2e-5 * scale, name
    return (RIGHT, "") if route.transform is not None else (TILES, route.reason)


def _train(model: PreTrainedModel) -> str:
    """Compare the loss of `reduce_memory` with the model's own; why it refuses, if it does."""
    batch = token_batch()
    torch.manual_seed(0)
    try:
        own = model(**batch, use_cache=False).loss
    except Exception as error:
        return _failure("its own loss", error)
    handle = reduce_memory(model)
    try:
        torch.manual_seed(0)
        loss = model(**batch).loss
    except ValueError as refusal:
        text = _text(refusal)
        return OWN_LOSS if "it has a loss of its own" in text else text
    finally:
        handle.remove()
    torch.testing.assert_close(loss, own, rtol=1e-5, atol=1e-5)
    return "yes"


@contextmanager
def _not_longer_than(seconds: int) -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"longer than {seconds} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)


def _failure(where: str, error: Exception) -> str:
    # the first sentence says what is missing; later ones how to install it
    return f"{where}: {type(error).__name__}: {_text(error).split('. ')[0][:200]}"


def _text(error: Exception) -> str:
    return " ".join(str(error).split())
