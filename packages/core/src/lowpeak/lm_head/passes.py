"""Which rows the inner operators work on, and which pass serves them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import Keep, logits_pitch
from .forward import run_forward
from .low_rank_inputs import LowRankGradients
from .rows import gathered, nonzero, order_rows
from .single_pass import ExpectedSource, TargetSource, run_single_pass
from .tiles import HeadInputs


@dataclass(frozen=True)
class HeadRows:
    """The rows that count, those with an expected gradient first.

    `places`: where they are among all rows; None is everywhere. `expected`: gradients [n] by
    output, empty for none. `active`: how many rows have one that is not zero.
    """

    inputs: HeadInputs
    targets: Tensor
    places: Tensor | None
    expected: Mapping[str, Tensor]
    active: int

    @classmethod
    def of(
        cls,
        inputs: HeadInputs,
        targets: Tensor,
        expected: Mapping[str, Tensor],
        ignore_index: int | None,
        active: int | None,
    ) -> HeadRows:
        """All rows, or with an `ignore_index` those that it leaves, `active` of them first."""
        places = None
        if ignore_index is not None:
            busy = nonzero(expected) if expected else None
            places, active = order_rows(
                targets,
                inputs.weight.size(0),
                ignore_index,
                inputs.temperature,
                inputs.bias,
                busy,
            )
            expected = {name: gathered(x, places) for name, x in expected.items()}
        targets = gathered(targets, places).contiguous()
        if active is None:
            active = targets.size(0)
        return cls(inputs.selected(places), targets, places, expected, active)

    def selected(self, rows: Tensor) -> HeadRows:
        """Some of these rows."""
        places = rows if self.places is None else self.places.index_select(0, rows)
        targets = self.targets.index_select(0, rows)
        return HeadRows(self.inputs.selected(rows), targets, places, {}, rows.size(0))

    @property
    def active_places(self) -> Tensor | None:
        """Where the active rows are."""
        return None if self.places is None else self.places[: self.active]


def run_head(
    rows: HeadRows,
    names: tuple[str, ...],
    keep: Keep,
    scratch_bytes: int | None,
    backend: str,
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """The outputs `names` of each row, and the gradients to keep."""
    inputs, expected = rows.inputs, rows.expected
    if not keep.phase:
        return run_forward(inputs, rows.targets, names, scratch_bytes, backend), []
    if keep.phase == "logits":
        logits = empty_logits(inputs, keep.logits)
        results = run_forward(inputs, rows.targets, names, scratch_bytes, backend, logits)
        return results, [logits]
    if not rows.active:
        results = run_forward(inputs, rows.targets, names, scratch_bytes, backend)
        return results, _zeros(inputs, keep)
    source: TargetSource | ExpectedSource
    if not expected:
        source = TargetSource.unit(inputs, rows.active, keep.normalizer, backend)
    elif tuple(expected) == ("log_probs",) and inputs.compute_dtype != torch.float16:
        source = TargetSource(inputs, expected["log_probs"], None, backend)
    else:

        def expect(_: Mapping[str, Tensor], first: int, last: int) -> Mapping[str, Tensor]:
            return {name: x[first:last] for name, x in expected.items()}

        source = ExpectedSource(inputs, names, expect)
    return run_single_pass(
        inputs, rows.targets, names, source, keep, rows.active, scratch_bytes, backend
    )


def empty_logits(inputs: HeadInputs, rows: int) -> Tensor:
    """Room for the raw logits of some rows."""
    shape, dtype = (rows, logits_pitch(inputs)), inputs.tile_dtype
    return torch.empty(shape, dtype=dtype, device=inputs.hidden.device)


def pays_to_select(busy: int, rows: int, logits: Tensor | None, needs: Sequence[bool]) -> bool:
    """Whether a backward over the `busy` rows alone takes fewer products than one over all.

    Only the latter can use kept logits.
    """
    products = 1 + needs[0] + needs[1]
    return busy * products < rows * products - (0 if logits is None else logits.size(0))


def _zeros(inputs: HeadInputs, keep: Keep) -> list[Tensor]:
    """Kept gradients when no row has any."""
    vocabulary, width = inputs.weight.shape
    dtype = keep.hidden_dtype(inputs.hidden.dtype, inputs.compute_dtype)
    kept = []
    if keep.hidden:
        kept += [inputs.hidden.new_zeros(0, width, dtype=dtype) for _ in range(1 + keep.normalizer)]
    if keep.weight is not None:
        kept.append(inputs.weight.new_zeros(vocabulary, width, dtype=keep.weight))
    if keep.bias:
        kept.append(inputs.weight.new_zeros(vocabulary, dtype=inputs.statistics_dtype))
    if inputs.low is not None:
        low, needs = inputs.low.rows(0, 0), (keep.low_hidden, keep.low_weight)
        kept += LowRankGradients(low, needs, inputs.statistics_dtype).finish()
    return kept
