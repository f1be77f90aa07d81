"""Both passes of the divergence between two heads: the same tile of each, never more."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from ..kernels.divergence_fold import (
    Divergence,
    HeadTile,
    PairStatistics,
    fold_pair_torch,
    fold_pair_triton,
)
from ..kernels.divergence_gradient import divergence_gradient_torch, divergence_gradient_triton
from ..kernels.divergence_mixture import PairNormalizers, mixture_tile_torch, mixture_tile_triton
from .backward import HeadGradients
from .planner import TileCost, default_scratch_bytes
from .statistics import power_of_two
from .tiles import HeadInputs, TileWalk, head_plan, slice_or_none, tile_cost, use_triton

ROW_NAMES = ("student_centre", "student_log_sum", "teacher_centre", "teacher_log_sum", "mean")
RESULT_NAMES = ("divergence", "student_entropy", *ROW_NAMES)


# Float32 logits of two heads take four times the bytes of one head's in half precision, and tiles
# of fewer logits would be launched more slowly than they run.
_WIDE_TILES_ACCELERATOR = 4


def wide_scratch_bytes(scratch_bytes: int | None, device_type: str) -> int:
    """`scratch_bytes`, or the default for float32 tiles of half-precision heads."""
    if scratch_bytes is not None:
        return scratch_bytes
    factor = 1 if device_type == "cpu" else _WIDE_TILES_ACCELERATOR
    return factor * default_scratch_bytes(device_type)


@dataclass(frozen=True)
class HeadPair:
    """Student and teacher over the same rows and vocabulary, and which divergence of them."""

    student: HeadInputs
    teacher: HeadInputs
    beta: float

    @property
    def divergence(self) -> Divergence:
        """The formula that `beta` selects."""
        if self.beta == 0.0:
            return Divergence.FORWARD_KL
        return Divergence.REVERSE_KL if self.beta == 1.0 else Divergence.MIXTURE

    @property
    def statistics_dtype(self) -> torch.dtype:
        """float64 where either head is computed in float64, float32 otherwise."""
        return torch.promote_types(self.student.statistics_dtype, self.teacher.statistics_dtype)

    def use_triton(self, backend: str) -> bool:
        """Whether the Triton kernels serve both heads."""
        return use_triton(backend, self.student) and use_triton(backend, self.teacher)

    def teacher_cost(self, triton: bool) -> TileCost:
        """Scratch bytes of the teacher's tile."""
        return tile_cost(self.teacher, triton, False, False)


@dataclass(frozen=True)
class _Part:
    """A block of rows [first, last)."""

    first: int
    last: int
    student_temperature: Tensor | None
    teacher_temperature: Tensor | None


@dataclass(frozen=True)
class _Block:
    """A block of the vocabulary [start, end), with both heads' weights in their compute dtypes."""

    start: int
    end: int
    student_weight: Tensor
    teacher_weight: Tensor


class _PairWalk:
    """Walk both heads' logits tile by tile, vocabulary blocks outside."""

    def __init__(self, pair: HeadPair, student: TileWalk) -> None:
        self._pair = pair
        self.student = student
        self._teacher = TileWalk(pair.teacher, student.plan)
        # sliced once: slicing anew for every tile would cost more than launching its kernels
        self.parts = [
            _Part(
                first,
                last,
                slice_or_none(pair.student.temperature, first, last),
                slice_or_none(pair.teacher.temperature, first, last),
            )
            for first, last in student.row_blocks()
        ]

    def blocks(self) -> Iterator[_Block]:
        """The vocabulary's blocks, in order."""
        both = zip(self.student.vocabulary_blocks(), self._teacher.vocabulary_blocks(), strict=True)
        for (start, end, student), (_, _, teacher) in both:
            yield _Block(start, end, student, teacher)

    def tiles(self, block: _Block, part: _Part) -> tuple[HeadTile, HeadTile]:
        """Raw logits of student and teacher."""
        student, teacher = self._pair.student, self._pair.teacher
        return (
            HeadTile(
                self.student.logits(part.first, part.last, block.student_weight),
                slice_or_none(student.bias, block.start, block.end),
                part.student_temperature,
                student.transform,
            ),
            HeadTile(
                self._teacher.logits(part.first, part.last, block.teacher_weight),
                slice_or_none(teacher.bias, block.start, block.end),
                part.teacher_temperature,
                teacher.transform,
            ),
        )


def run_divergence_forward(
    pair: HeadPair, scratch_bytes: int | None, backend: str
) -> dict[str, Tensor]:
    """divergence, student_entropy and what ROW_NAMES lists, each [N].

    One pass over the logits for a KL divergence; a mixture needs both normalisers first, so two.
    """
    student = pair.student
    rows, device = student.hidden.size(0), student.hidden.device
    scratch_bytes = wide_scratch_bytes(scratch_bytes, device.type)
    statistics = PairStatistics.empty(rows, pair.statistics_dtype, device)
    walk = None
    if rows:
        triton = pair.use_triton(backend)
        fold = fold_pair_triton if triton else fold_pair_torch
        cost = tile_cost(student, triton, False, False) + pair.teacher_cost(triton)
        plan = head_plan(student, "forward", cost, scratch_bytes)
        walk = _PairWalk(pair, TileWalk(student, plan))
        sums = [statistics.rows(part.first, part.last) for part in walk.parts]
        for block in walk.blocks():
            for part, part_sums in zip(walk.parts, sums, strict=True):
                fold(*walk.tiles(block, part), part_sums, pair.divergence)
    results = normalizers_of(statistics)
    if pair.divergence == Divergence.MIXTURE:
        results |= _mixture(pair, walk, results, backend)
    else:
        results |= kl_divergence(pair.divergence, statistics, results)
    return results


def _mixture(
    pair: HeadPair, walk: _PairWalk | None, results: Mapping[str, Tensor], backend: str
) -> dict[str, Tensor]:
    """The second pass of a mixture."""
    from_teacher = torch.zeros_like(results["student_centre"])
    from_student = torch.zeros_like(from_teacher)
    normalizers = pair_normalizers(results)
    if walk is not None:
        sums = [
            (normalizers.rows(first, last), from_teacher[first:last], from_student[first:last])
            for first, last in ((part.first, part.last) for part in walk.parts)
        ]
        add = mixture_tile_triton if pair.use_triton(backend) else mixture_tile_torch
        for block in walk.blocks():
            for part, (rows, teacher_sum, student_sum) in zip(walk.parts, sums, strict=True):
                tiles = walk.tiles(block, part)
                add(*tiles, rows, pair.beta, teacher_sum, student_sum)
    divergence = pair.beta * from_teacher + (1 - pair.beta) * from_student
    return {"divergence": divergence.clamp_(min=0.0), "mean": from_student}


def kl_divergence(
    divergence: Divergence, statistics: PairStatistics, results: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A KL divergence from the sums of the only pass; rounding cannot make it negative."""
    excess = results["student_log_sum"] - results["teacher_log_sum"]
    if divergence == Divergence.FORWARD_KL:
        value = statistics.gap / statistics.teacher_sum + excess
    else:
        value = -(statistics.gap / statistics.student_sum + excess)
    value = value.clamp_(min=0.0)
    return {"divergence": value, "mean": value}


def normalizers_of(statistics: PairStatistics) -> dict[str, Tensor]:
    """student_entropy and both heads' normalisers from the sums over the whole vocabulary."""
    student_log_sum = statistics.student_sum.log()
    entropy = student_log_sum - statistics.student_centred / statistics.student_sum
    return {
        "student_entropy": entropy.clamp_(min=0.0),
        "student_centre": statistics.student_maximum,
        "student_log_sum": student_log_sum,
        "teacher_centre": statistics.teacher_maximum,
        "teacher_log_sum": statistics.teacher_sum.log(),
    }


def pair_normalizers(results: Mapping[str, Tensor]) -> PairNormalizers:
    """Those of `normalizers_of` as the kernels take them."""
    return PairNormalizers(**{name: results[name] for name in ROW_NAMES if name != "mean"})


def run_divergence_backward(
    pair: HeadPair,
    results: Mapping[str, Tensor],
    upstream: Tensor,
    needs: tuple[bool, bool, bool],
    scratch_bytes: int | None,
    backend: str,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the student's hidden [N, H], weight [V, H] and bias [V], where needed.

    `results` holds what ROW_NAMES lists, `upstream` [N] the gradient of each row's divergence.
    """
    student = pair.student
    mixture = pair.divergence == Divergence.MIXTURE
    scale = upstream * (1 - pair.beta) if mixture else upstream
    power = None
    if student.compute_dtype == torch.float16 and student.hidden.size(0):
        scale, power = normalise(
            scale, logit_bound(pair.divergence, results["mean"]) * student.slope
        )
    gradients = HeadGradients(student, needs, power)
    if student.hidden.size(0) == 0:
        return gradients.zeros()
    triton = pair.use_triton(backend)
    scratch_bytes = wide_scratch_bytes(scratch_bytes, student.hidden.device.type)
    gradient_of = divergence_gradient_triton if triton else divergence_gradient_torch
    walk = _PairWalk(pair, gradients.plan(triton, scratch_bytes, pair.teacher_cost(triton)))
    buffer = walk.student.gradient_buffer()
    normalizers = pair_normalizers(results)
    rows = [
        (normalizers.rows(first, last), scale[first:last], results["mean"][first:last])
        for first, last in ((part.first, part.last) for part in walk.parts)
    ]
    for block in walk.blocks():
        for part, (sums, factor, mean) in zip(walk.parts, rows, strict=True):
            tiles = walk.tiles(block, part)
            out = walk.student.gradient_tile(buffer, tiles[0].logits)
            gradient_of(*tiles, sums, factor, mean, pair.divergence, pair.beta, out)
            hidden = walk.student.hidden[part.first : part.last]
            gradients.add(
                out, (part.first, part.last), (block.start, block.end), block.student_weight, hidden
            )
        gradients.finish_block(block.start, block.end)
    return gradients.finish()


def logit_bound(divergence: Divergence, mean: Tensor) -> Tensor:
    """A bound [N] of the gradient of a logit for an upstream gradient of 1.

    |q_j - p_j| <= 1; and |q_j (log q_j - log p_j)| <= KL(q || p) + 1, since the terms of the other
    tokens are at least q - p each. The same holds for m in place of p.
    """
    if divergence == Divergence.FORWARD_KL:
        return torch.ones_like(mean)
    return 2 * mean + 1


def normalise(scale: Tensor, bound: Tensor) -> tuple[Tensor, Tensor]:
    """`scale` divided by a power of two for float16 gradients of logits, and that power."""
    power = power_of_two((scale * bound).abs().amax())
    return scale / power, power
