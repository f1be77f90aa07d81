"""A forward that returns log-probabilities and statistics of the labels instead of logits."""

from __future__ import annotations

import functools
import inspect
import types
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from lowpeak.lm_head import LMHeadOutput, LogitTransform, fused_lm_head
from lowpeak.offload import kept_on_device

from .expected_loss import ExpectedLoss, expected_grads, expected_loss
from .inspection import Head, logit_transform, read_head
from .layout import BatchLayout, SeveralCalls
from .logit_tiles import show_logits
from .outputs import FusedCausalLMOutput, per_token, without_last
from .self_test import Route, choose_route

OUTPUT_NAMES = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1")
# TRL returns these without gradient, and its trainers rely on it.
_DETACHED_NAMES = ("log_sum_sq_probs", "mean_logits")
IGNORE_INDEX = -100

# Models only: a handle reaches its model, so that a global reference to it would keep the model.
_installed: weakref.WeakSet[nn.Module] = weakref.WeakSet()
# The functions bound as forwards. An attribute would not tell them: functools.wraps copies it.
_functions: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


@dataclass(frozen=True)
class ForwardSettings:
    """What is fixed when the fused forward is installed; see `install_fused_forward`."""

    temperature: float = 1.0
    cast_lm_head_to_fp32: bool = False
    outputs: tuple[str, ...] = ("log_probs",)
    scratch_bytes: int | None = None
    layout: BatchLayout | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.outputs) - set(OUTPUT_NAMES))
        if unknown:
            raise ValueError(
                f"outputs names {', '.join(unknown)}: use names among {', '.join(OUTPUT_NAMES)}"
            )
        LogitTransform(temperature=self.temperature)  # checks the value

    @property
    def names(self) -> tuple[str, ...]:
        """The outputs; log_probs is always one, since the loss is made of it."""
        return ("log_probs", *(name for name in self.outputs if name != "log_probs"))


@dataclass(eq=False)
class FusedForward:
    """The fused forward of causal LMs with the same own forward.

    Args:
        settings: see `install_fused_forward`.
        own_forward: called with the model first, it runs the model's own forward.
    """

    settings: ForwardSettings
    own_forward: Callable[..., Any]
    _routes: weakref.WeakKeyDictionary[nn.Module, dict[Any, Route]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __call__(
        self,
        model: Any,
        arguments: dict[str, Any],
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        expected: ExpectedLoss | None = None,
    ) -> FusedCausalLMOutput:
        """Run the backbone of `model` on the `arguments` and score the labels.

        `expected`: what the loss is going to be, None for what the context says.
        """
        if shift_labels is None:
            if labels is None:
                raise ValueError("fused_lm_head=True needs labels or shift_labels to score")
            layout = self.settings.layout
            rearranged = None if layout is None else layout(arguments, labels)
            if isinstance(rearranged, SeveralCalls):
                return self._in_turn(model, rearranged, num_items_in_batch)
            if rearranged is not None:
                labels = rearranged.labels
                expected = expected_loss(expected, rearranged.restore)
                given = (labels, None, num_items_in_batch, expected)
                return rearranged.restore(self._run(model, rearranged.arguments, *given))
        expected = expected_loss(expected) if shift_labels is None else None
        return self._run(model, arguments, labels, shift_labels, num_items_in_batch, expected)

    def _in_turn(
        self, model: Any, several: SeveralCalls, num_items_in_batch: Tensor | int | None
    ) -> FusedCausalLMOutput:
        joined = several.join([self(model, *call, None, None) for call in several.calls])
        assert joined.log_probs is not None
        assert joined.label_mask is not None
        joined.loss = -joined.log_probs.sum() / _loss_divisor(joined.label_mask, num_items_in_batch)
        return joined

    def _run(
        self,
        model: Any,
        arguments: dict[str, Any],
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: Tensor | int | None,
        expected: ExpectedLoss | None,
    ) -> FusedCausalLMOutput:
        config = model.config.get_text_config()
        arguments = {**arguments, "use_cache": False}
        if not model.config.return_dict or "return_dict" in arguments:
            arguments["return_dict"] = True
        if getattr(config, "output_router_logits", False):
            arguments.setdefault("output_router_logits", True)
        given = labels if shift_labels is None else shift_labels
        assert given is not None
        route = self.route(model, given)
        backbone_outputs = model.get_submodule(route.backbone_name)(**arguments)
        hidden = backbone_outputs.last_hidden_state
        if shift_labels is None:
            # the last position predicts nothing: ignoring it spares a copy of hidden[:, :-1]
            given = nn.functional.pad(given[:, 1:], (0, 1), value=IGNORE_INDEX)
        head = read_head(model)
        head.require_whole_weight()
        # A device_map can put the head on another device than the end of the backbone.
        targets = given.to(head.weight.device)
        hidden = hidden.to(head.weight.device)
        scored = self._score(route, head, hidden, targets, expected, arguments)
        if shift_labels is None:
            targets, scored = targets[:, :-1], without_last(scored)
        mask = targets != IGNORE_INDEX
        assert scored.log_probs is not None
        loss = -scored.log_probs.sum() / _loss_divisor(mask, num_items_in_batch)
        aux_loss = None
        if arguments.get("output_router_logits"):
            aux_loss = _router_loss(config, backbone_outputs, arguments.get("attention_mask"))
            coefficient = getattr(config, "router_aux_loss_coef", 0.0)
            loss = loss + coefficient * aux_loss.to(loss.device)
        return FusedCausalLMOutput(
            loss=loss, label_mask=mask, aux_loss=aux_loss, **per_token(scored)
        )

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def route(self, model: Any, labels: Tensor) -> Route:
        """How `model` is scored with the head it has now; found by the self-test once per head."""
        head = read_head(model)
        routes = self._routes.setdefault(head.owner, {})
        route = routes.get(head.state)
        if route is None or route.declared != logit_transform(model):
            forward = functools.partial(self.own_forward, model)
            route = choose_route(model, forward, labels)
            routes[head.state] = route
        return route

    def _score(
        self,
        route: Route,
        head: Head,
        hidden: Tensor,
        targets: Tensor,
        expected: ExpectedLoss | None,
        arguments: dict[str, Any],
    ) -> LMHeadOutput:
        settings = self.settings
        autocast: Any = nullcontext()
        if settings.cast_lm_head_to_fp32:
            autocast = torch.autocast(hidden.device.type, enabled=False)
            if head.weight.dtype != torch.float32:  # else fused_lm_head promotes, a tile at a time
                hidden = hidden.float()
        with autocast, kept_on_device():
            scored: LMHeadOutput
            if route.transform is None:
                scored = route.own_head.statistics(
                    hidden,
                    targets,
                    settings.temperature,
                    settings.names,
                    settings.scratch_bytes,
                    head.weight.size(0),
                )
            else:
                scored = fused_lm_head(
                    hidden,
                    head.weight,
                    targets,
                    bias=head.bias,
                    transform=LogitTransform(
                        route.transform.scale, route.transform.softcap, settings.temperature
                    ),
                    ignore_index=IGNORE_INDEX,
                    outputs=settings.names,
                    scratch_bytes=settings.scratch_bytes,
                    low_rank=head.adapters.low_rank,
                    expected_grads=expected_grads(
                        expected, head, hidden, targets, settings.names, settings.scratch_bytes
                    ),
                )
            if not torch.is_grad_enabled():
                show_logits(route, head, hidden, targets, arguments, settings.scratch_bytes)
        detached = {
            name: value.detach()
            for name in _DETACHED_NAMES
            if (value := getattr(scored, name)) is not None
        }
        return scored._replace(**detached)


def _loss_divisor(mask: Tensor, num_items_in_batch: Tensor | int | None) -> Tensor | int:
    if num_items_in_batch is None:
        return mask.sum().clamp(min=1)
    if isinstance(num_items_in_batch, Tensor):
        return num_items_in_batch.to(mask.device)
    return num_items_in_batch


def _router_loss(config: Any, backbone_outputs: Any, attention_mask: Tensor | None) -> Tensor:
    # All families of experts take over Mixtral's loss through transformers' modular system.
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    loss: Tensor | int = load_balancing_loss_func(
        backbone_outputs.router_logits,
        config.num_experts,
        config.num_experts_per_tok,
        attention_mask,
    )
    if not isinstance(loss, Tensor):
        raise ValueError(
            "output_router_logits is set, but the backbone returned no router logits: "
            "unset it in the model's config"
        )
    return loss


class FusedForwardHandle:
    """Takes a fused forward off its model again."""

    def __init__(self, model: Any, fused: FusedForward, previous: Any) -> None:
        self._model = weakref.ref(model)
        self._previous = previous
        self.fused = fused
        self.active = True

    def remove(self) -> None:
        """Restore the forward the model had. Calling it again does nothing.

        Where another library wrapped the forward since (accelerate, for mixed precision), its
        wrapper stays and calls the model's own forward.
        """
        model = self._model()
        if not self.active or model is None:
            return
        self.active = False
        _installed.discard(model)
        if not _is_fused(model.__dict__.get("forward")):
            return
        if self._previous is None:
            del model.forward
        else:
            model.forward = self._previous


def install_fused_forward(
    model: Any,
    *,
    temperature: float = 1.0,
    cast_lm_head_to_fp32: bool = False,
    outputs: tuple[str, ...] = ("log_probs",),
    scratch_bytes: int | None = None,
    layout: BatchLayout | None = None,
) -> FusedForwardHandle:
    """Teach a transformers causal LM to score labels without their logits.

    Afterwards `model(..., labels=labels, fused_lm_head=True)` returns a `FusedCausalLMOutput`,
    which is TRL's protocol. Any other call is the original forward. Install it before wrapping the
    model with PEFT. At the first such call a self-test proves the fused head on the model's own
    logits; what it cannot prove goes through the model's own modules, a tile of tokens at a time.

    Args:
        model: `PreTrainedModel` with a language model head.
        temperature: the logits are divided by it.
        cast_lm_head_to_fp32: project in float32, outside autocast.
        outputs: fields to compute, among log_probs (always), entropy, log_sum_sq_probs,
            mean_logits, is_top1.
        scratch_bytes: see `fused_lm_head`.
        layout: computes calls with labels in a layout of its own, such as without padding; it must
            not change any token's log-probability.

    Raises:
        ValueError: for an unknown output, a model without a head, and a model that has a fused
            forward already.
    """
    settings = ForwardSettings(
        temperature, cast_lm_head_to_fp32, tuple(outputs), scratch_bytes, layout
    )

    def adapt(fused: FusedForward) -> Callable[..., Any]:
        def forward(
            self: Any,
            *,
            fused_lm_head: bool = False,
            labels: Tensor | None = None,
            shift_labels: Tensor | None = None,
            num_items_in_batch: Tensor | int | None = None,
            **arguments: Any,
        ) -> Any:
            if fused_lm_head:
                return fused(self, arguments, labels, shift_labels, num_items_in_batch)
            arguments |= given_only(labels, shift_labels, num_items_in_batch)
            return fused.own_forward(self, **arguments)

        return forward

    return bind_forward(model, settings, adapt)


def given_only(
    labels: Tensor | None, shift_labels: Tensor | None, num_items_in_batch: Tensor | int | None
) -> dict[str, Any]:
    """Those of the arguments that are not None: not every model's forward has all of them."""
    arguments = {
        "labels": labels,
        "shift_labels": shift_labels,
        "num_items_in_batch": num_items_in_batch,
    }
    return {name: value for name, value in arguments.items() if value is not None}


def bind_forward(
    model: Any,
    settings: ForwardSettings,
    adapt: Callable[[FusedForward], Callable[..., Any]],
) -> FusedForwardHandle:
    """Bind the function that `adapt` makes of a `FusedForward` as the forward of `model`."""
    if model in _installed:
        raise ValueError(
            f"this {type(model).__name__} has a fused forward already: "
            "call remove() of the handle it came with first"
        )
    read_head(model)
    previous = model.__dict__.get("forward")
    if _is_fused(previous):  # a deep copy of a model with a fused forward
        previous = None
    own_forward = type(model).forward if previous is None else _ignore_model(previous)
    fused = FusedForward(settings, own_forward)
    handle = FusedForwardHandle(model, fused, previous)
    adapted = adapt(fused)
    positional = _positional_names(type(model).forward)

    # generate() and Trainer read the names of the arguments off the signature
    @functools.wraps(type(model).forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not handle.active:
            return own_forward(self, *args, **kwargs)
        if len(args) > len(positional):
            raise TypeError(f"{len(args)} positional arguments for {', '.join(positional)}")
        return adapted(self, **dict(zip(positional, args, strict=False)), **kwargs)

    _functions.add(forward)
    model.forward = types.MethodType(forward, model)
    _installed.add(model)
    return handle


def _is_fused(forward: Any) -> bool:
    return isinstance(forward, types.MethodType) and forward.__func__ in _functions


def _positional_names(forward: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments after self that may be given by position."""
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    parameters = inspect.signature(forward).parameters.values()
    return tuple(parameter.name for parameter in parameters if parameter.kind in kinds)[1:]


def _ignore_model(bound: Callable[..., Any]) -> Callable[..., Any]:
    def forward(model: Any, *args: Any, **kwargs: Any) -> Any:
        return bound(*args, **kwargs)

    return forward
