"""What "exact" means, as numbers: the only place where tolerances of the fused head are set.

float32 (and float64): the largest error against float64 is at most twice that of plain torch in
the same dtype. bfloat16, float16: at most twice that of float32 log_softmax over logits of that
dtype, plus 4 units in the last place of the largest logit. Neither grows with the number of tiles.
"""

import math

import torch

FACTOR = 2.0

# Of one tile, plain torch is the reference: a factor of two covers another summation order. Of
# many tiles, the error may exceed that of one tile by this factor, and by no power of their number.
TILES_FACTOR = 1.2

# float64 has no yardstick here (the oracle is float64 itself): sums of some hundred terms in
# another order differ by this many units.
FLOAT64_UNITS = 256

EPSILON = {
    dtype: torch.finfo(dtype).eps
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
}

ALL_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
NARROW_DTYPES = (torch.bfloat16, torch.float16)


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """Distance of neighbouring numbers of dtype at |value|; at least the one at 1."""
    return EPSILON[dtype] * 2.0 ** max(0, math.floor(math.log2(max(abs(value), 1.0))))


def value_tolerance(reference_error: float, largest_logit: float, dtype: torch.dtype) -> float:
    """Largest allowed |output - float64 output|, given the error of the yardstick.

    Narrow dtypes add the 4 ulp of the definition. float32 and float64 add 4 ulp too: on a handful
    of elements the yardstick may be right to the last bit by chance, which a factor cannot cover.
    """
    units = FLOAT64_UNITS if dtype == torch.float64 else 4
    return FACTOR * reference_error + units * unit_in_last_place(largest_logit, dtype)


def gradient_tolerance(
    reference_error: float,
    largest_gradient: float,
    largest_term: float,
    parameter_dtype: torch.dtype,
    compute_dtype: torch.dtype,
) -> float:
    """Largest allowed |gradient - float64 gradient|, given the error of the yardstick.

    The floor is one rounding of the result to the parameter's dtype, and the absolute roundoff of
    probability - onehot in the dtype of the statistics times the largest term it multiplies: again
    what the yardstick may escape by chance on tiny shapes.
    """
    units = FLOAT64_UNITS if compute_dtype == torch.float64 else 4
    return (
        FACTOR * reference_error
        + EPSILON[parameter_dtype] * largest_gradient
        + units * EPSILON[statistics_dtype(compute_dtype)] * largest_term
    )


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 statistics, float64 for float64 inputs."""
    return torch.float64 if dtype == torch.float64 else torch.float32
