"""What a transformers causal LM computes after its backbone, read off the model and its config."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.lm_head import LogitTransform

from .adapters import HeadAdapters, read_adapters

# Where configurations keep the two constants of the logit transform; a scale may be a divisor.
_SOFTCAP_NAMES = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
_SCALE_NAMES = ("logit_scale", "output_multiplier", "lm_head_multiplier")
_DIVISOR_NAMES = ("logits_scaling", "logits_mup_width_multiplier")
# It names its multiplier as the others name their divisor.
_MODELS_THAT_MULTIPLY_BY_DIVISOR = ("hyperclovax",)


@dataclass(frozen=True)
class Head:
    """The projection onto the vocabulary as it is at this call.

    Args:
        module: what `get_output_embeddings()` returns; PEFT may have wrapped it.
        owner: the module that holds the weight in use; another one where PEFT switches adapters.
        weight: [V, H], without what adapters add to it.
        bias: [V] or None, with what adapters add to it.
        adapters: those that are active.
    """

    module: nn.Module
    owner: nn.Module
    weight: Tensor
    bias: Tensor | None
    adapters: HeadAdapters = field(default_factory=HeadAdapters)

    @property
    def is_plain(self) -> bool:
        """Whether the weight can be multiplied with as it is (a quantised one cannot), and adapters
        are matrices too."""
        matrix = self.weight.is_floating_point() and self.weight.dim() == 2
        return matrix and self.adapters.detour is None

    @property
    def state(self) -> tuple[tuple[str, ...], str | None]:
        """What else than its weight and `logit_transform` decides how the head is computed."""
        return self.adapters.names, self.adapters.detour

    def require_whole_weight(self) -> None:
        """Check that the weight is not sharded; FSDP2 gathers it only around the module's forward.

        Raises:
            ValueError: for a DTensor.
        """
        factors = [x for low in self.adapters.low_rank for x in (low.a, low.b)]
        sharded = next((x for x in (self.weight, *factors) if isinstance(x, DTensor)), None)
        if sharded is not None:
            raise ValueError(
                f"the LM head's weight is sharded ({sharded.placements}) while its "
                "log-probabilities are computed. Put the head into the FSDP unit of the final norm "
                "or of the whole model, and leave it out of the tensor parallel plan"
            )


def read_head(model: Any) -> Head:
    """Look up the head of a causal LM; to be called at each step, since wrappers replace it.

    Raises:
        ValueError: for a model without a head, or a head that has its weight elsewhere (ZeRO-3
            partitions, offloaded to disk).
    """
    module = model.get_output_embeddings()
    if module is None:
        raise ValueError(
            f"{type(model).__name__}.get_output_embeddings() is None: it has no language model head"
        )
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise ValueError(
            f"{type(model).__name__}.get_output_embeddings() is a {type(module).__name__} without "
            "a weight: it has no single language model head. Set LOWPEAK_DISABLE=head"
        )
    # A head of one's own need not be a Linear; one without a bias may lack the attribute.
    bias = getattr(module, "bias", None)
    _check_weight_is_here(weight)
    adapters = read_adapters(module)
    owner = _owner_of(module, weight)
    return Head(module, owner, weight, adapters.added_to(bias), adapters)


def _owner_of(module: nn.Module, weight: Tensor) -> nn.Module:
    for candidate in module.modules():
        if any(parameter is weight for parameter in candidate.parameters(recurse=False)):
            return candidate
    return module


def _check_weight_is_here(weight: Tensor) -> None:
    if weight.numel() == 0:
        raise ValueError(
            "the LM head's weight is empty outside its own forward, as under DeepSpeed ZeRO stage "
            "3, which the fused head does not support: use stage 2, or set LOWPEAK_DISABLE=head"
        )
    if weight.is_meta:
        raise ValueError(
            "the LM head's weight is on the meta device (offloaded by device_map): "
            "give the head a device in the device_map"
        )


def logit_transform(model: Any) -> LogitTransform:
    """Scale and soft cap that the model's (text) config declares.

    Several families share these names; the self-test proves that this model means them so.
    """
    config = model.config.get_text_config()
    declared = {
        name: value
        for name in (*_SOFTCAP_NAMES, *_SCALE_NAMES, *_DIVISOR_NAMES)
        if isinstance(value := getattr(config, name, None), int | float)
    }
    softcap = next((declared[name] for name in _SOFTCAP_NAMES if name in declared), None)
    scale = next((declared[name] for name in _SCALE_NAMES if name in declared), None)
    divisor = next((declared[name] for name in _DIVISOR_NAMES if name in declared), None)
    if scale is None and divisor is not None:
        multiplies = config.model_type in _MODELS_THAT_MULTIPLY_BY_DIVISOR
        scale = divisor if multiplies else 1 / divisor
    return LogitTransform(
        scale=1.0 if scale is None else float(scale), softcap=float(softcap) if softcap else None
    )


def transform_candidates(declared: LogitTransform) -> Iterator[LogitTransform]:
    """The declared transform, then what is left of it if the model ignores a declared constant."""
    seen: list[LogitTransform] = []
    for candidate in (
        declared,
        replace(declared, scale=1.0),
        replace(declared, softcap=None),
        LogitTransform(),
    ):
        if candidate not in seen:
            seen.append(candidate)
            yield candidate


def apply_transform(raw: Tensor, transform: LogitTransform) -> Tensor:
    """The transform without its temperature, in plain torch; `raw` [..., V] of any float dtype."""
    z = raw * transform.scale
    if transform.softcap is None:
        return z
    capped = transform.softcap * torch.tanh(z / transform.softcap)
    return capped.masked_fill(raw == -float("inf"), -float("inf"))


def backbone_names(model: Any) -> tuple[str, ...]:
    """Modules that may be the backbone, outermost first, as dotted names.

    They are the modules on the way from the model to its input embeddings, none of which may hold
    the head: `base_model_prefix` is not always right (Llama4ForCausalLM). Which of them the model's
    forward calls is seen in the self-test.

    Raises:
        ValueError: when there is none.
    """
    embeddings, head = model.get_input_embeddings(), model.get_output_embeddings()
    path = next(name for name, module in model.named_modules() if module is embeddings)
    parts = path.split(".")[:-1]
    names = [".".join(parts[: end + 1]) for end in range(len(parts))]
    if not names or any(module is head for module in model.get_submodule(names[0]).modules()):
        raise ValueError(
            f"{type(model).__name__} keeps its input embeddings (at {path!r}) beside its head, not "
            "in a backbone module of its own, so its hidden states cannot be had without its "
            "logits: pass the language model inside it, or set LOWPEAK_DISABLE=head"
        )
    return tuple(names)
