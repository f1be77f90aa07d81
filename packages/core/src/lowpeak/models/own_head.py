"""The model's own way from hidden states to logits: its forward with the backbone taken out.

Slower than the fused head, but right for whatever a model does to its logits: a head that is no
plain linear layer, a layer between backbone and head, an unknown post-processing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.generic import ModelOutput

from lowpeak.lm_head import LMHeadOutput

# Logits, their float32 copy, log-softmax, and the gradient of each are alive at once.
_LIVE_COPIES_OF_A_TILE = 6
_DEFAULT_TILE_BYTES = 256 * 2**20


class _BackboneStandIn(nn.Module):
    """Returns given hidden states; everything else is asked of the backbone it stands for."""

    def __init__(self, backbone: nn.Module, output: ModelOutput) -> None:
        super().__init__()
        object.__setattr__(self, "_backbone", backbone)
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> ModelOutput:
        return self._output

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_backbone"), name)


@contextmanager
def _backbone_returns(model: nn.Module, name: str, output: ModelOutput) -> Iterator[None]:
    parent_name, _, child = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    backbone = parent.get_submodule(child)
    parent._modules[child] = _BackboneStandIn(backbone, output)
    try:
        yield
    finally:
        parent._modules[child] = backbone


@contextmanager
def head_input_in_weight_dtype(head: nn.Module) -> Iterator[None]:
    """Lets a float32 head take bfloat16 hidden states where no autocast does so."""

    def cast(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        weight: Any = module.weight
        if weight.is_floating_point() and not torch.is_autocast_enabled(hidden.device.type):
            hidden = hidden.to(weight.dtype)
        return (hidden, *rest)

    hook = head.register_forward_pre_hook(cast)
    try:
        yield
    finally:
        hook.remove()


class OwnHead:
    """Logits and statistics of given hidden states through the model's own modules.

    Args:
        model: the causal LM.
        forward: its own forward.
        backbone_name: dotted name of the module in it that makes the hidden states.
        backbone_output: the class of what that module returns.
    """

    def __init__(
        self,
        model: Any,
        forward: Callable[..., Any],
        backbone_name: str,
        backbone_output: type[ModelOutput],
    ) -> None:
        self._model = model
        self._forward = forward
        self._backbone_name = backbone_name
        self._backbone_output = backbone_output

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of hidden states [N, H], as the model's forward returns them."""
        output = self._backbone_output(last_hidden_state=hidden.unsqueeze(0))
        token_ids = torch.zeros(1, hidden.size(0), dtype=torch.long, device=hidden.device)
        arguments: dict[str, Any] = {"input_ids": token_ids, "use_cache": False}
        if hasattr(self._model.config.get_text_config(), "output_router_logits"):
            arguments["output_router_logits"] = False  # there is no router in the stand-in
        with (
            _backbone_returns(self._model, self._backbone_name, output),
            head_input_in_weight_dtype(self._model.get_output_embeddings()),
        ):
            logits: Tensor = self._forward(**arguments).logits
        return logits.squeeze(0)

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # it swaps modules
    def statistics(
        self,
        hidden: Tensor,
        targets: Tensor,
        temperature: float,
        names: tuple[str, ...],
        scratch_bytes: int | None,
        vocabulary: int,
    ) -> LMHeadOutput:
        """As `fused_lm_head`, a tile of tokens at a time; the backward computes the logits again.

        hidden [..., H], targets [...] with -100 where there is nothing to score.
        """
        mask = targets != -100
        rows, row_targets = hidden[mask], targets[mask]
        budget = _DEFAULT_TILE_BYTES if scratch_bytes is None else scratch_bytes
        tile = max(1, budget // (4 * vocabulary * _LIVE_COPIES_OF_A_TILE))

        def score(tile_rows: Tensor, tile_targets: Tensor) -> tuple[Tensor, ...]:
            return logit_statistics(self.logits(tile_rows), tile_targets, names, temperature)

        if rows.size(0) == 0:  # nothing of one row: zeros with every parameter in their graph
            one_row = hidden.reshape(-1, hidden.size(-1))[:1]
            columns = [column[:0] for column in score(one_row, targets.new_zeros(1))]
        else:
            tiles = [
                checkpoint(score, tile_rows, tile_targets, use_reentrant=False)
                for tile_rows, tile_targets in zip(
                    torch.split(rows, tile), torch.split(row_targets, tile), strict=True
                )
            ]
            columns = [torch.cat(parts) for parts in zip(*tiles, strict=True)]
        spread = [column.new_zeros(mask.shape).masked_scatter(mask, column) for column in columns]
        return LMHeadOutput(**dict(zip(names, spread, strict=True)))


def logit_statistics(
    logits: Tensor, targets: Tensor, names: tuple[str, ...], temperature: float = 1.0
) -> tuple[Tensor, ...]:
    """The statistics `names` of logits [N, V] at targets [N], in float32 or float64."""
    z = (logits if logits.dtype == torch.float64 else logits.float()) / temperature
    log_probs = z.log_softmax(-1)
    index = targets.unsqueeze(-1)
    computed: list[Tensor] = []
    for name in names:
        if name == "log_probs":
            computed.append(log_probs.gather(-1, index).squeeze(-1))
        elif name == "entropy":
            impossible = log_probs == -float("inf")
            computed.append(-(log_probs.exp() * log_probs.masked_fill(impossible, 0)).sum(-1))
        elif name == "log_sum_sq_probs":
            computed.append((2 * log_probs).logsumexp(-1))
        elif name == "mean_logits":
            computed.append(z.mean(-1))
        elif name == "is_top1":
            target = z.gather(-1, index)
            earlier = torch.arange(z.size(-1), device=z.device) < index
            computed.append(~((z > target) | (earlier & (z == target))).any(-1))
        else:
            raise ValueError(f"outputs names {name!r}, which is no statistic of the logits")
    return tuple(computed)
