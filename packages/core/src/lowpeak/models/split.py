"""A causal LM cut between backbone and head, for losses that need more than log-probabilities."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from lowpeak.lm_head import LogitTransform

from .inspection import logit_transform, read_head
from .self_test import Route, choose_route


class SplitCausalLM:
    """Hidden states, head and logit transform of a causal LM, proved by a self-test.

    The model is not changed. The test runs at the first `hidden_states`, and again for another
    head (PEFT switches it) or another declared transform.

    Args:
        model: `PreTrainedModel` with a language model head; of a `PeftModel` its base model.

    Raises:
        ValueError: for a model without a head; in `hidden_states` for one whose logits neither the
            fused head nor its own modules give.
    """

    def __init__(self, model: Any) -> None:
        read_head(model)
        self._model = model
        self._routes: weakref.WeakKeyDictionary[nn.Module, dict[Any, Route]]
        self._routes = weakref.WeakKeyDictionary()
        self._route: Route | None = None

    def hidden_states(self, tokens: Tensor, **arguments: Any) -> Tensor:
        """Hidden states [batch, length, H] of the backbone, called with `arguments`.

        Args:
            tokens: int64 of any shape, some of which go into the self-test; -100 is skipped.
            arguments: of the model's forward, but for labels.
        """
        self._route = self._find_route(tokens)
        backbone = self._model.get_submodule(self._route.backbone_name)
        arguments = {**arguments, "use_cache": False, "return_dict": True}
        hidden: Tensor = backbone(**arguments).last_hidden_state
        return hidden

    @property
    def transform(self) -> LogitTransform | None:
        """Scale and soft cap; None where only `logits` gives what the model itself computes, as it
        is with an adapter on the head."""
        assert self._route is not None, "hidden_states comes first"
        return self._route.transform

    def weight_and_bias(self) -> tuple[Tensor, Tensor | None]:
        """Weight [V, H] and bias [V] or None of the head as it is now, which is all where there is
        a `transform`.

        A sharded head is gathered if it is frozen.

        Raises:
            ValueError: for a sharded head that is trained.
        """
        head = read_head(self._model)
        if isinstance(head.weight, DTensor) and not head.weight.requires_grad:
            bias = head.bias.full_tensor() if isinstance(head.bias, DTensor) else head.bias
            return head.weight.full_tensor(), bias
        head.require_whole_weight()
        return head.weight, head.bias

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H], through the model's own modules."""
        assert self._route is not None, "hidden_states comes first"
        return self._route.own_head.logits(hidden)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _find_route(self, tokens: Tensor) -> Route:
        head = read_head(self._model)
        routes = self._routes.setdefault(head.owner, {})
        route = routes.get(head.state)
        if route is None or route.declared != logit_transform(self._model):
            forward = functools.partial(type(self._model).forward, self._model)
            detour = "its weight is not all, with an adapter" if head.adapters.names else None
            route = choose_route(self._model, forward, tokens, detour)
            routes[head.state] = route
        return route
