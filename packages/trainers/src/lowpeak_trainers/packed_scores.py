"""Models that score a whole sequence, computed without the padding of their batches.

The model's own forward runs on the padded batch and finds the token to score by; only its backbone
is given something else, all sequences as documents of one packed row, and its hidden states go back
to where the tokens were.
"""

from __future__ import annotations

import inspect
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from lowpeak.undisturbed import undisturbed

from .padding_free import IGNORE_INDEX, PackedRow, PaddingFree

# TRL hands the margins of the pairs to the model, none of whose layers reads them.
_UNREAD = "margin"
_UNASKED = ("output_attentions", "output_hidden_states")
# Lengths of the sequences that the self-test scores.
_TEST_LENGTHS = (5, 7, 4)

# Of the last trainer of each model: the next one decides for itself.
_hooks: WeakKeyDictionary[nn.Module, tuple[RemovableHandle, ...]] = WeakKeyDictionary()


class PackedScores:
    """Gives the backbone of a model for sequence classification its batches packed.

    A call is left padded where `layout` leaves it so, where it passes anything else than token ids
    and their padding mask on to the backbone, and where padding is not made of the pad token: the
    model looks for the last token that is another one.

    Args:
        model: `PreTrainedModel` for sequence classification.
        layout: packs the calls, once it is switched on.
    """

    def __init__(self, model: Any, layout: PaddingFree) -> None:
        self._model = model
        self._layout = layout
        self._row: PackedRow | None = None
        self._packed_calls = 0
        backbone = model.base_model
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        parameters = inspect.signature(backbone.forward).parameters.values()
        self._names = [p.name for p in parameters if p.kind in kinds]
        for handle in _hooks.pop(model, ()):
            handle.remove()
        _hooks[model] = (
            backbone.register_forward_pre_hook(self._pack, with_kwargs=True),
            backbone.register_forward_hook(self._restore),
        )

    @torch.no_grad()
    def refusal(self) -> str | None:
        """Why scores of packed sequences are not those of each alone; None if they are.

        Three sequences of a few random tokens are scored in eval mode, which leaves no trace. Where
        weights are elsewhere (meta device, ZeRO-3) nothing is tested.
        """
        model = self._model
        if model.config.output_hidden_states or model.config.output_attentions:
            return "its config asks for what every layer computes"
        if any(p.numel() == 0 or p.is_meta for p in model.parameters()):
            return None
        before = self._layout
        self._layout = PaddingFree()
        calls = self._packed_calls
        try:
            with undisturbed(model):
                alone = torch.cat([self._score([ids]) for ids in self._sequences()])
                self._layout.switch(True)
                together = self._score(self._sequences())
        except Exception as error:  # whatever a model makes of a packed row is the reason
            return f"its forward fails on a few tokens ({type(error).__name__}: {error})"
        finally:
            self._layout = before
        if self._packed_calls == calls:
            return "its forward does not call its backbone with token ids and their padding mask"
        deviation = float((together - alone).norm() / alone.norm().clamp(min=1e-30))
        if not deviation <= self._rounding() ** 0.5:
            return f"the scores of packed sequences differ by {deviation:.1e} from each alone"
        return None

    def _sequences(self) -> list[Tensor]:
        config = self._model.config.get_text_config()
        generator = torch.Generator().manual_seed(0)
        plain = torch.tensor([i for i in range(min(config.vocab_size, 1000)) if i != self._pad()])
        chosen = torch.randint(len(plain), (sum(_TEST_LENGTHS),), generator=generator)
        return list(torch.split(plain[chosen], list(_TEST_LENGTHS)))

    def _score(self, sequences: list[Tensor]) -> Tensor:
        pad, device = self._pad(), self._model.device
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=pad or 0)
        mask = nn.utils.rnn.pad_sequence([torch.ones_like(s) for s in sequences], batch_first=True)
        scores: Tensor = self._model(
            input_ids=ids.to(device), attention_mask=mask.to(device), use_cache=False
        ).logits
        return scores.float()

    def _rounding(self) -> float:
        parameters = self._model.parameters()
        dtypes = {p.dtype for p in parameters if p.is_floating_point() and p.element_size() > 1}
        kind = self._model.device.type
        if torch.is_autocast_enabled(kind):
            dtypes.add(torch.get_autocast_dtype(kind))
        return max(torch.finfo(dtype).eps for dtype in dtypes)

    def _pad(self) -> int | None:
        pad: int | None = self._model.config.get_text_config().pad_token_id
        return pad

    def _pack(
        self, backbone: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[()], dict[str, Any]] | None:
        self._row = None
        if not self._layout.on:
            return None
        arguments = {**dict(zip(self._names, args, strict=False)), **kwargs}
        arguments.pop(_UNREAD, None)
        for name in _UNASKED:
            if arguments.get(name) is False:
                del arguments[name]
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if ids is None or mask is None or ids.shape != mask.shape:
            return None
        self._row = self._layout(arguments, self._labels(ids, mask != 0))
        if self._row is None:
            return None
        self._packed_calls += 1
        return (), {**self._row.arguments, "use_cache": False}

    def _labels(self, ids: Tensor, real: Tensor) -> Tensor:
        """Labels [B, S] that tell the layout what must stay.

        They are on padding that the model would take for text, and on the token that it scores by:
        that must be computed in its own row, whatever other rows begin with.
        """
        pad = self._pad()
        text = torch.ones_like(real) if pad is None else ids != pad
        labels = torch.full_like(ids, IGNORE_INDEX).masked_fill(text & ~real, 0)
        columns = torch.arange(ids.size(1), device=ids.device)
        scored = (columns * text).argmax(1, keepdim=True)  # as the model finds it
        # the first token of a row has nothing before it that could be shared
        inner = (scored > 0) & real.gather(1, (scored - 1).clamp(min=0))
        return torch.where(inner & (columns == scored), 0, labels)

    def _restore(self, backbone: nn.Module, args: Any, output: Any) -> Any:
        row, self._row = self._row, None
        if row is None:
            return None
        if isinstance(output, tuple):
            return (row.pad(output[0]), *output[1:])
        output["last_hidden_state"] = row.pad(output["last_hidden_state"])
        return output
