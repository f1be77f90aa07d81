"""Attention within documents, by blocks and through the varlen kernel, against dense float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from attention_oracle import assert_near, dense_attention
from hypothesis import given, settings
from hypothesis import strategies as st
from lm_head_memory import measure
from torch import Tensor
from torch.backends.cuda import cudnn_sdp_enabled

from lowpeak.attention import blockwise
from lowpeak.attention.blockwise import blockwise_attention
from lowpeak.attention.documents import Documents
from lowpeak.attention.forward import lowpeak_attention
from lowpeak.attention.kernels import cudnn_serves, document_attention, varlen_serves

SCALE = 0.3


def heads(
    tokens: int,
    counts: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Query, key and value [tokens, heads, width], as the leaves of a graph."""
    generator = torch.Generator().manual_seed(2)
    shapes = ((counts[0], widths[0]), (counts[1], widths[0]), (counts[1], widths[1]))
    return [
        torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]


def ends_of(lengths: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).to(device, torch.int32)


def assert_exact(inputs: list[Tensor], lengths: Sequence[int], window: int | None) -> None:
    """Output and all gradients are those of dense scores, to float64."""
    found = blockwise_attention(
        *inputs, ends_of(lengths, inputs[0].device), window=window, scale=SCALE
    )
    wanted = dense_attention(*inputs, lengths, window, SCALE)
    assert_near(found, wanted, 1e-13)
    upstream = torch.randn_like(wanted)
    found_gradients = torch.autograd.grad(found, inputs, upstream)
    for gradient, right in zip(
        found_gradients, torch.autograd.grad(wanted, inputs, upstream), strict=True
    ):
        assert_near(gradient, right, 1e-12, floor=1.0)  # some are 0 but for rounding


@pytest.mark.parametrize("window", [None, 1, 4, 130])
@pytest.mark.parametrize(
    "lengths", [[7, 5, 9], [4, 4, 4], [1, 1, 3, 1], [1], [300, 5, 300, 0, 40], [129]]
)
def test_equals_dense(lengths: list[int], window: int | None, device: torch.device) -> None:
    assert_exact(heads(sum(lengths), device=device), lengths, window)


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 24), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 30),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 4),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    scratch=st.sampled_from([1, 64, 1 << 20]),
)
def test_equals_dense_at_any_shape(
    lengths: list[int],
    window: int | None,
    key_heads: int,
    groups: int,
    widths: tuple[int, int],
    scratch: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SCRATCH_ELEMENTS", scratch)
        patch.setattr(blockwise, "_SHORTEST_BLOCK", 3)
        inputs = heads(sum(lengths), (key_heads * groups, key_heads), widths)
        assert_exact(inputs, lengths, window)


def test_blocks_are_crossed(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.setattr(blockwise, "_LONGEST_BLOCK", 8)
    monkeypatch.setattr(blockwise, "_SHORTEST_WINDOW_BLOCK", 8)
    for window in (None, 3, 8, 9, 20):
        assert_exact(heads(70, device=device), [33, 8, 29], window)


def test_one_document_in_another_place_is_the_same(device: torch.device) -> None:
    query, key, value = heads(12, device=device)
    row = [torch.cat([x, x + 1]) for x in (query, key, value)]
    first = blockwise_attention(query, key, value, ends_of([12], device), window=3, scale=SCALE)
    packed = blockwise_attention(*row, ends_of([12, 12], device), window=3, scale=SCALE)
    assert torch.equal(packed[:12], first)


def test_strided_inputs(device: torch.device) -> None:
    lengths = [7, 5]
    rows = [x.detach().transpose(0, 1).contiguous().transpose(0, 1) for x in heads(12)]
    assert not rows[0].is_contiguous()
    assert_exact([x.to(device).requires_grad_() for x in rows], lengths, 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_its_results(dtype: torch.dtype, device: torch.device) -> None:
    lengths = [70, 3, 57]
    inputs = heads(130, dtype=dtype, device=device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = blockwise_attention(*inputs, ends_of(lengths, device), window=None, scale=SCALE)
    wanted = dense_attention(*exact, lengths, None, SCALE)
    assert found.dtype == dtype
    assert_near(found, wanted, 2 * torch.finfo(dtype).eps)
    upstream = torch.randn_like(found)
    for gradient, right in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    ):
        assert gradient.dtype == dtype
        assert_near(gradient, right, 8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("window", [None, 64])
@pytest.mark.parametrize("lengths", [[8192], [5000, 3192]])
def test_no_tensor_of_tokens_by_tokens(
    lengths: list[int], window: int | None, device: torch.device
) -> None:
    inputs = heads(8192, (2, 1), (16, 16), torch.float32, device)
    ends = ends_of(lengths, device)

    def step() -> tuple[Tensor, ...]:
        output = blockwise_attention(*inputs, ends, window=window, scale=SCALE)
        return torch.autograd.grad(output.sum(), inputs)

    # A mask of tokens by tokens takes 64 MiB in bool, scores in float32 512 MiB.
    assert measure(step, device).peak < 8192**2 // 2


def test_meets_the_rules_of_an_operator() -> None:
    inputs = heads(9)
    torch.library.opcheck(
        torch.ops.lowpeak.blockwise_attention.default, (*inputs, ends_of([4, 5]), 3, SCALE)
    )


@pytest.mark.parametrize(
    ("lengths", "message"), [([4, 4], "from 0 to 8 over 9 tokens"), ([10, -1], "end of each")]
)
def test_wrong_documents_are_refused(lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        blockwise_attention(*heads(9), ends_of(lengths), window=None, scale=SCALE)


def test_wrong_arguments_are_refused() -> None:
    query, key, value = heads(9)
    ends = ends_of([9])
    for arguments, message in (
        ((query, key.float(), value), "convert them to one dtype"),
        ((query, key[:8], value[:8]), "differ in tokens or features"),
        ((query, key, value[:8]), "as many values as keys"),
        ((query[:, :3], key, value), "no multiple of 2 heads"),
    ):
        with pytest.raises(ValueError, match=message):
            blockwise_attention(*arguments, ends, window=None, scale=SCALE)
    with pytest.raises(ValueError, match="window=0"):
        blockwise_attention(query, key, value, ends, window=0, scale=SCALE)


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 1, 4, 700])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("counts", [(4, 4), (8, 2), (4, 1)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_equals_dense(
    dtype: torch.dtype,
    counts: tuple[int, int],
    width: int,
    window: int | None,
    device: torch.device,
) -> None:
    if torch.version.hip is not None and window is not None:
        pytest.skip("windows go by blocks there")
    inputs = heads(1024, counts, (width, width), dtype, device)
    assert varlen_serves(inputs[0], inputs[2], window)
    assert_like_dense(inputs, [700, 1, 64, 259], window)


@pytest.mark.cuda
@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("counts", [(4, 4), (4, 1)])
@pytest.mark.parametrize("lengths", [[1024], [512, 512], [1024, 1024, 1024]])
def test_documents_of_one_length_equal_dense(
    lengths: list[int], counts: tuple[int, int], width: int, device: torch.device
) -> None:
    inputs = heads(sum(lengths), counts, (width, width), torch.bfloat16, device)
    documents = Documents(ends_of(lengths, device), lengths[0])
    on_hopper = torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)
    assert cudnn_serves(*inputs, documents) == on_hopper
    assert_like_dense(inputs, lengths, None)


@pytest.mark.cuda
def test_cudnn_is_not_asked_for_every_length(device: torch.device) -> None:
    inputs = heads(1000, (4, 2), (64, 64), torch.bfloat16, device)
    for lengths in ([1000], [512, 488]):
        assert not cudnn_serves(*inputs, Documents(ends_of(lengths, device), lengths[0]))


@pytest.mark.cuda
@pytest.mark.parametrize(("length", "may_ask"), [(1000, False), (1024, True)])
def test_sdpa_asks_cudnn_for_lengths_that_come_again(
    length: int, may_ask: bool, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []
    sdpa = torch.nn.functional.scaled_dot_product_attention

    def spy(*arguments: Any, **options: Any) -> Tensor:
        asked.append(cudnn_sdp_enabled())
        return sdpa(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", spy)
    inputs = heads(length, (4, 4), (64, 64), torch.bfloat16, device)
    q, k, v = (x.detach().transpose(0, 1).unsqueeze(0) for x in inputs)
    found, _ = lowpeak_attention(torch.nn.Module(), q, k, v, None)
    assert asked == [may_ask]
    assert cudnn_sdp_enabled()
    wanted = dense_attention(*(x.detach().double() for x in inputs), [length], None, 64**-0.5)
    assert_near(found[0], wanted, 4 * torch.finfo(torch.bfloat16).eps)


def assert_like_dense(inputs: list[Tensor], lengths: list[int], window: int | None) -> None:
    """Output and gradients of half-precision kernels, within what half precision allows."""
    dtype, width, device = inputs[0].dtype, inputs[0].size(2), inputs[0].device
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = width**-0.5
    documents = Documents(ends_of(lengths, device), max(lengths))
    found = document_attention(*inputs, documents, window=window, scale=scale)
    wanted = dense_attention(*exact, lengths, window, scale)
    assert_near(found, wanted, 4 * torch.finfo(dtype).eps)
    upstream = torch.randn_like(found)
    for gradient, right in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    ):
        # in a window of 1 the gradients of queries and keys are 0; the kernel's are rounding
        assert_near(gradient, right, 16 * torch.finfo(dtype).eps, floor=1e-2)


@pytest.mark.cuda
def test_documents_are_read_once_a_step(device: torch.device) -> None:
    lengths = [30, 10]
    ends = ends_of(lengths, device)
    inputs = heads(40, dtype=torch.float32, device=device)
    blockwise_attention(*inputs, ends, window=4, scale=SCALE)
    torch.cuda.set_sync_debug_mode("error")
    try:
        output = blockwise_attention(*inputs, ends, window=4, scale=SCALE)
        torch.autograd.grad(output.sum(), inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    ends[1] += 1  # in place: what was read is stale
    found = blockwise_attention(*inputs, ends, window=4, scale=SCALE)
    wanted = dense_attention(*(x.double() for x in inputs), [31, 9], 4, SCALE)
    assert_near(found, wanted, 1e-5)


@pytest.mark.cuda
def test_what_varlen_cannot_take_goes_by_blocks(device: torch.device) -> None:
    for widths, dtype in (
        ((12, 12), torch.bfloat16),
        ((64, 32), torch.bfloat16),
        ((512, 512), torch.bfloat16),
        ((64, 64), torch.float32),
    ):
        inputs = heads(40, (4, 2), widths, dtype, device)
        assert not varlen_serves(inputs[0], inputs[2], None)
        documents = Documents(ends_of([30, 10], device), 30)
        found = document_attention(*inputs, documents, window=4, scale=SCALE)
        wanted = dense_attention(*(x.double() for x in inputs), [30, 10], 4, SCALE)
        assert_near(found, wanted, 4 * torch.finfo(dtype).eps)
