"""The divergence kernels against their plain-torch twins: same tiles, same sums and gradients."""

import pytest
import torch
from torch import Tensor

from lowpeak.kernels.divergence_fold import (
    Divergence,
    HeadTile,
    PairStatistics,
    fold_pair_torch,
    fold_pair_triton,
)
from lowpeak.kernels.divergence_gradient import (
    divergence_gradient_torch,
    divergence_gradient_triton,
)
from lowpeak.kernels.divergence_mixture import (
    PairNormalizers,
    mixture_tile_torch,
    mixture_tile_triton,
)
from lowpeak.kernels.logit_transform import TileTransform

pytest.importorskip("triton", reason="Triton ships with torch on Linux only")

IDENTITY = TileTransform()
EVERYTHING = TileTransform(scale=0.7, softcap=5.0, temperature=1.3)
MINUS_INFINITY = float("-inf")


def head_tile(
    rows: int,
    columns: int,
    device: torch.device,
    *,
    transform: TileTransform = IDENTITY,
    bias: torch.dtype | None = None,
    per_row: bool = False,
    masked: slice = slice(0),
) -> HeadTile:
    """A tile whose rows are strided and whose padding holds NaN, which must never be read."""
    buffer = torch.full((rows, columns + 5), float("nan"))
    buffer[:, :columns] = torch.randn(rows, columns) * 3
    values = None if bias is None else torch.randn(columns).to(device, bias)
    if values is not None:
        values[masked] = MINUS_INFINITY
    temperature = (torch.rand(rows) + 0.5).to(device) if per_row else None
    return HeadTile(buffer.to(device)[:, :columns], values, temperature, transform)


def copied(tile: HeadTile) -> HeadTile:
    """The same tile in memory of its own: the twins destroy it."""
    return HeadTile(tile.logits.clone(), tile.bias, tile.temperature, tile.transform)


def assert_close(ours: Tensor, theirs: Tensor, name: str = "", unit: float = 2e-6) -> None:
    atol = 4e-6 * max(1.0, float(theirs.float().nan_to_num(neginf=0.0).abs().max()))
    torch.testing.assert_close(ours, theirs, rtol=2 * unit, atol=atol, msg=name or None)


def fold_both(tiles: list[tuple[HeadTile, HeadTile]], divergence: Divergence) -> PairStatistics:
    """Fold the tiles in order with both, comparing after each."""
    rows, device = tiles[0][0].logits.size(0), tiles[0][0].logits.device
    ours, theirs = (PairStatistics.empty(rows, torch.float32, device) for _ in range(2))
    for student, teacher in tiles:
        fold_pair_triton(copied(student), copied(teacher), ours, divergence)
        fold_pair_torch(copied(student), copied(teacher), theirs, divergence)
        for name, value in vars(ours).items():
            assert_close(value, getattr(theirs, name), name)
    return theirs


def normalizers(statistics: PairStatistics) -> PairNormalizers:
    return PairNormalizers(
        student_centre=statistics.student_maximum,
        student_log_sum=statistics.student_sum.log(),
        teacher_centre=statistics.teacher_maximum,
        teacher_log_sum=statistics.teacher_sum.log(),
    )


def compare_all(
    student: HeadTile, teacher: HeadTile, out_dtype: torch.dtype = torch.float32, beta: float = 0.3
) -> list[Tensor]:
    """The fold, the mixture's sums and the gradients of all divergences over one tile."""
    rows, device = student.logits.size(0), student.logits.device
    gradients = []
    for divergence in Divergence:
        sums = normalizers(fold_both([(student, teacher)], divergence))
        parts = [torch.full((2, rows), 0.25, device=device) for _ in range(2)]
        for mixture, part in zip((mixture_tile_triton, mixture_tile_torch), parts, strict=True):
            mixture(copied(student), copied(teacher), sums, beta, part[0], part[1])
        assert_close(*parts, "mixture")
        scale, mean = torch.randn(2, rows, device=device)
        results = []
        for gradient in (divergence_gradient_triton, divergence_gradient_torch):
            first, second = copied(student), copied(teacher)
            same = out_dtype == torch.float32
            out = first.logits if same else torch.empty_like(first.logits, dtype=out_dtype)
            gradient(first, second, sums, scale, mean.abs(), divergence, beta, out)
            results.append(out)
        assert_close(*results, f"gradient {divergence.name}", max(2e-6, torch.finfo(out_dtype).eps))
        gradients.append(results[0])
    return gradients


@pytest.mark.parametrize("columns", [1, 1023, 1024, 1025, 2500])
def test_widths_around_a_block(columns: int, device: torch.device) -> None:
    compare_all(head_tile(2, columns, device), head_tile(2, columns, device))


@pytest.mark.parametrize(("out_dtype", "bias"), [
    (torch.float32, None), (torch.bfloat16, torch.bfloat16), (torch.float16, torch.float32),
], ids=str)  # fmt: skip
@pytest.mark.parametrize("transformed", [(0, 0), (1, 0), (0, 1), (1, 1)], ids=str)
def test_options_of_each_head(
    transformed: tuple[int, int],
    bias: torch.dtype | None,
    out_dtype: torch.dtype,
    device: torch.device,
) -> None:
    """A bias on the first head only, then on the second; a transform on either, both or none."""
    for biases in [(None, None)] if bias is None else [(bias, None), (None, bias)]:
        student, teacher = (
            head_tile(2, 40, device, bias=b, per_row=bool(on), transform=(IDENTITY, EVERYTHING)[on])
            for on, b in zip(transformed, biases, strict=True)
        )
        compare_all(student, teacher, out_dtype)


@pytest.mark.parametrize("divergence", Divergence, ids=lambda d: d.name)
def test_several_tiles(divergence: Divergence, device: torch.device) -> None:
    """Maxima that grow from tile to tile, and a first tile that is masked in both heads."""
    tiles = []
    for columns, lift in ((64, 0.0), (33, 0.0), (1, 40.0), (1100, 80.0)):
        pair = [
            head_tile(3, columns, device, bias=torch.float32, masked=slice(0 if lift else 64))
            for _ in range(2)
        ]
        pair[0].logits.add_(lift)
        pair[1].logits.sub_(lift / 2)
        tiles.append((pair[0], pair[1]))
    fold_both(tiles, divergence)


@pytest.mark.parametrize("masked", [
    (slice(0, 30), slice(0, 30)), (slice(0, 30), slice(30, 70)),
], ids=["both", "disjoint"])  # fmt: skip
def test_masked_columns(masked: tuple[slice, slice], device: torch.device) -> None:
    student, teacher = (
        head_tile(4, 70, device, bias=torch.float32, masked=part, transform=EVERYTHING)
        for part in masked
    )
    if masked[0] == masked[1]:
        for gradient in compare_all(student, teacher):
            assert (gradient[:, :30] == 0).all()
        return
    sums = normalizers(fold_both([(student, teacher)], Divergence.MIXTURE))
    parts = torch.zeros(2, 4, device=device)
    mixture_tile_triton(student, teacher, sums, 0.3, parts[0], parts[1])
    assert_close(parts[0], torch.full((4,), -0.3, device=device).abs().log().neg())
    assert_close(parts[1], torch.full((4,), 0.7, device=device).log().neg())


@pytest.mark.parametrize("divergence", Divergence, ids=lambda d: d.name)
def test_padding_and_other_rows_are_not_touched(
    divergence: Divergence, device: torch.device
) -> None:
    statistics = PairStatistics.empty(8, torch.float32, device)
    student, teacher = head_tile(3, 70, device), head_tile(3, 70, device)
    fold_pair_triton(student, teacher, statistics.rows(2, 5), divergence)
    untouched = [0, 1, 5, 6, 7]
    for name, value in vars(PairStatistics.empty(8, torch.float32, device)).items():
        assert torch.equal(getattr(statistics, name)[untouched], value[untouched]), name
    sums = normalizers(statistics).rows(2, 5)
    buffer = torch.full((3, 80), 7.0, device=device)
    one = torch.ones(3, device=device)
    divergence_gradient_triton(student, teacher, sums, one, one, divergence, 0.3, buffer[:, :70])
    assert (buffer[:, 70:] == 7.0).all()
    assert torch.isfinite(buffer).all()
