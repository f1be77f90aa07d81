"""Does a packed row give what each of its documents gives alone? Two short ones tell.

The model runs in eval mode, without gradients and on a few random tokens: the documents alone, with
the attention it came with; then both in one row, with the attention in question, once as
transformers marks documents (`position_ids` that start again) and once as TRL does (`cu_seq_lens_q`
and more). Between these two rows the first document is another one, so that the second must come
out the same to the last bit or two: that shows a leak where dtypes are too coarse for the other
comparison. A row whose documents begin with tokens of earlier ones is tested in the same way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from lowpeak.undisturbed import undisturbed

from .forward import register_attention

_FIRST, _SECOND = 5, 7
# Tokens that the second and the third of three documents take over from the one before them.
_SHARED = (4, 7)


@contextmanager
def attention_of(model: Any, name: str) -> Iterator[None]:
    """Let `model` attend through the function registered as `name` for a while."""
    previous = model.config._attn_implementation
    if name == previous:
        yield
        return
    model.set_attn_implementation(name)
    try:
        yield
    finally:
        model.set_attn_implementation(previous)


@torch.no_grad()
def packing_reason(model: Any, attention: str) -> str | None:
    """Why a packed row through `attention` is not its documents, or None if it is.

    `model` is a `PreTrainedModel` whose weights are here, `attention` a name known to transformers.
    """
    register_attention()
    backbone = model.base_model
    with undisturbed(model):
        try:
            first, other, second = _documents(model)
            alone = [_hidden(backbone, ids) for ids in (first, second)]
        except Exception as error:
            return f"its forward does not take token ids alone ({type(error).__name__}: {error})"
        try:
            with attention_of(model, attention):
                if model.config._attn_implementation != attention:
                    return "its layers do not attend through transformers' AttentionInterface"
                one = _packed(backbone, first, second, marked=False)
                two = _packed(backbone, other, second, marked=True)
        except Exception as error:  # whatever a model makes of a packed row is the reason
            return f"its forward fails on a packed row ({type(error).__name__}: {error})"
    return _difference(torch.cat(alone, dim=1), one, two, _FIRST, _rounding(model))


@torch.no_grad()
def sharing_reason(model: Any, attention: str) -> str | None:
    """Why documents do not come out right that begin with tokens of others; None if they do.

    `model` is a `PreTrainedModel` whose weights are here and whose packed rows are right.
    """
    backbone = model.base_model
    with undisturbed(model):
        try:
            ends, others, first = _documents(model)
            second = torch.cat([first[:, : _SHARED[0]], ends], dim=1)
            third = torch.cat([second[:, : _SHARED[1]], others[:, :2]], dim=1)
            parts = [first, second, third]
            with attention_of(model, attention):
                starts = (0, *_SHARED)
                alone = [
                    _hidden(backbone, ids)[:, start:]
                    for ids, start in zip(parts, starts, strict=True)
                ]
                one = _shared(backbone, parts)
                # of the first document, tokens that the others do not begin with
                parts[0] = torch.cat([first[:, : _SHARED[0]], others[:, 2:]], dim=1)
                two = _shared(backbone, parts)
        except Exception as error:  # whatever a model makes of such a row is the reason
            return f"its forward fails on shared prefixes ({type(error).__name__}: {error})"
    return _difference(torch.cat(alone, dim=1), one, two, _SECOND, _rounding(model))


def _shared(backbone: Any, parts: list[Tensor]) -> Tensor:
    """Three documents in a row, the second and third without what they take over."""
    starts = (0, *_SHARED)
    own = [ids[:, start:] for ids, start in zip(parts, starts, strict=True)]
    positions = [
        torch.arange(start, ids.size(1), device=ids.device)
        for ids, start in zip(parts, starts, strict=True)
    ]
    prefixes = [[ids.size(1), max(0, i - 1), starts[i]] for i, ids in enumerate(own)]
    lengths = torch.tensor([0, *(ids.size(1) for ids in own)], device=own[0].device)
    ends = lengths.cumsum(0).to(torch.int32)
    return _hidden(
        backbone,
        torch.cat(own, dim=1),
        position_ids=torch.cat(positions).unsqueeze(0),
        cu_seq_lens_q=ends,
        cu_seq_lens_k=ends,
        max_length_q=_SECOND,
        max_length_k=_SECOND,
        shared_prefixes=torch.tensor(prefixes),
    )


def _rounding(model: Any) -> float:
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point() and p.element_size() > 1}
    kind = model.device.type
    if torch.is_autocast_enabled(kind):
        dtypes.add(torch.get_autocast_dtype(kind))
    return max(torch.finfo(dtype).eps for dtype in dtypes)


def _documents(model: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Ids [1, n] of a first document, of another first one, and of a second."""
    generator = torch.Generator().manual_seed(0)
    config = model.config.get_text_config()
    vocabulary = config.vocab_size
    special: set[int | None] = set()  # not every config has all three
    for name in ("pad", "bos", "eos"):
        ids = getattr(config, f"{name}_token_id", None)
        special.update(ids if isinstance(ids, list) else [ids])
    plain = [i for i in range(min(vocabulary, 1000)) if i not in special]
    count = 2 * _FIRST + _SECOND
    chosen = torch.randint(len(plain), (count,), generator=generator)
    tokens = torch.tensor(plain)[chosen].unsqueeze(0)
    tokens[:, _FIRST : 2 * _FIRST] = tokens[:, :_FIRST].roll(1, dims=1)
    tokens = tokens.to(model.device)
    return tokens[:, :_FIRST], tokens[:, _FIRST : 2 * _FIRST], tokens[:, 2 * _FIRST :]


def _hidden(backbone: Any, ids: Tensor, **arguments: Any) -> Tensor:
    hidden: Tensor = backbone(input_ids=ids, use_cache=False, return_dict=True, **arguments)[0]
    return hidden.float()


def _packed(backbone: Any, first: Tensor, second: Tensor, *, marked: bool) -> Tensor:
    ids = torch.cat([first, second], dim=1)
    lengths = torch.tensor([_FIRST, _SECOND], device=ids.device)
    positions = torch.cat([torch.arange(n, device=ids.device) for n in (_FIRST, _SECOND)])
    marks = {}
    if marked:
        ends = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
        marks = {
            "cu_seq_lens_q": ends,
            "cu_seq_lens_k": ends,
            "max_length_q": _SECOND,
            "max_length_k": _SECOND,
            "seq_idx": torch.arange(2, device=ids.device).repeat_interleave(lengths)[None].int(),
        }
    return _hidden(backbone, ids, position_ids=positions.unsqueeze(0), **marks)


def _difference(wanted: Tensor, one: Tensor, two: Tensor, first: int, eps: float) -> str | None:
    """What is wrong with row `one`; `two` is another in its `first` tokens only."""
    if one.shape != wanted.shape or two.shape != wanted.shape:
        return f"a packed row comes out as {tuple(one.shape)}, not as {tuple(wanted.shape)}"
    leak = _distance(two[:, first:], one[:, first:])
    if not leak <= eps**0.75:
        return f"a document changes by {leak:.1e} with the one packed before it"
    error = _distance(one, wanted)
    if not error <= eps**0.5:
        return f"a packed document differs by {error:.1e} from itself alone"
    return None


def _distance(found: Tensor, wanted: Tensor) -> float:
    """The largest relative error of a token's hidden state; nan if one is nan."""
    return float(((found - wanted).norm(dim=-1) / wanted.norm(dim=-1).clamp(min=1e-30)).max())
