"""Documents that begin with tokens of earlier ones: against dense float64, each document alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from attention_oracle import assert_near
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lowpeak.attention import blockwise, shared_prefixes
from lowpeak.attention.documents import Documents
from lowpeak.attention.kernels import document_attention, varlen_serves
from lowpeak.attention.shared_prefixes import shared_keys, shared_prefix_attention

SCALE = 0.3
# Own tokens of each document, the document it begins like, the tokens it shares.
Document = tuple[int, int, int]
GROUPS: dict[str, list[Document]] = {
    "pair": [(9, 0, 0), (4, 0, 5)],
    "groups": [(9, 0, 0), (20, 0, 0), (3, 0, 7), (1, 1, 19), (2, 0, 7), (6, 0, 0), (5, 1, 1)],
    "chain": [(9, 0, 0), (4, 0, 5), (3, 1, 7), (1, 2, 10), (2, 1, 3)],
    "whole": [(5, 0, 0), (1, 0, 5), (3, 0, 5)],
    "long": [(300, 0, 0), (7, 0, 290), (270, 0, 1), (1, 2, 271)],
    "alone": [(4, 0, 0), (6, 0, 0)],
}


def tokens_of(documents: Sequence[Document]) -> list[list[int]]:
    """Of each document, the tokens of the row that it consists of."""
    whole: list[list[int]] = []
    begin = 0
    for own, owner, shared in documents:
        prefix = whole[owner][:shared] if shared else []
        whole.append([*prefix, *range(begin, begin + own)])
        begin += own
    return whole


def heads(
    documents: Sequence[Document],
    counts: tuple[int, int] = (4, 2),
    widths: tuple[int, int] = (8, 8),
    dtype: torch.dtype = torch.float64,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """Query, key and value of the row, as the leaves of a graph."""
    generator = torch.Generator().manual_seed(2)
    tokens = sum(own for own, _, _ in documents)
    shapes = ((counts[0], widths[0]), (counts[1], widths[0]), (counts[1], widths[1]))
    return [
        torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]


def each_alone(
    inputs: Sequence[Tensor], documents: Sequence[Document], window: int | None, scale: float
) -> Tensor:
    """What each document's own tokens come out as, from dense scores over the whole of it."""
    query, key, value = inputs
    groups = query.size(1) // key.size(1)
    outputs = []
    for (own, _, _), tokens in zip(documents, tokens_of(documents), strict=True):
        q = query[tokens[len(tokens) - own :]]
        k, v = (x[tokens].repeat_interleave(groups, 1) for x in (key, value))
        scores = torch.einsum("ihd,jhd->hij", q, k) * scale
        position = torch.arange(len(tokens), device=q.device)
        behind = position[len(tokens) - own :].unsqueeze(1) - position
        hidden = (behind < 0) | (behind >= (window or len(tokens)))
        probs = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        outputs.append(torch.einsum("hij,jhd->ihd", probs, v))
    return torch.cat(outputs)


def assert_exact(inputs: list[Tensor], documents: Sequence[Document], window: int | None) -> None:
    """Output and all gradients are those of dense scores, to float64."""
    found = shared_prefix_attention(*inputs, torch.tensor(documents), window=window, scale=SCALE)
    wanted = each_alone(inputs, documents, window, SCALE)
    assert_near(found, wanted, 1e-13)
    upstream = torch.randn_like(wanted)
    for gradient, right in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, inputs, upstream),
        strict=True,
    ):
        assert_near(gradient, right, 1e-12, floor=1.0)  # some are 0 but for rounding


@pytest.mark.parametrize("window", [None, 1, 2, 5, 8, 280])
@pytest.mark.parametrize("name", GROUPS)
def test_equals_each_alone(name: str, window: int | None, device: torch.device) -> None:
    assert_exact(heads(GROUPS[name], device=device), GROUPS[name], window)


@st.composite
def forests(draw: st.DrawFn) -> list[Document]:
    """Documents that share with any earlier one, as much as there is of it or less."""
    documents: list[Document] = []
    totals: list[int] = []
    for index in range(draw(st.integers(1, 6))):
        own, owner, shared = draw(st.integers(1, 12)), 0, 0
        if index and draw(st.booleans()):
            owner = draw(st.integers(0, index - 1))
            shared = draw(st.integers(0, totals[owner]))
        documents.append((own, owner, shared))
        totals.append(own + shared)
    return documents


@settings(deadline=None, max_examples=50)
@given(
    documents=forests(),
    window=st.none() | st.integers(1, 30),
    key_heads=st.integers(1, 3),
    groups=st.integers(1, 3),
    widths=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    scratch=st.sampled_from([1, 64, 1 << 20]),
)
def test_equals_each_alone_at_any_shape(
    documents: list[Document],
    window: int | None,
    key_heads: int,
    groups: int,
    widths: tuple[int, int],
    scratch: int,
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SCRATCH_ELEMENTS", scratch)
        patch.setattr(blockwise, "_SHORTEST_BLOCK", 3)
        assert_exact(heads(documents, (key_heads * groups, key_heads), widths), documents, window)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_rounds_only_its_results(dtype: torch.dtype, device: torch.device) -> None:
    documents = [(70, 0, 0), *[(3, 0, 60)] * 12, (9, 3, 62)]
    inputs = heads(documents, dtype=dtype, device=device)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    found = shared_prefix_attention(*inputs, torch.tensor(documents), window=None, scale=SCALE)
    wanted = each_alone(exact, documents, None, SCALE)
    # the varlen kernel rounds the probabilities too
    eps = torch.finfo(dtype).eps * (2 if varlen_serves(inputs[0], inputs[2], None) else 1)
    assert found.dtype == dtype
    assert_near(found, wanted, 2 * eps)
    upstream = torch.randn_like(found)
    for gradient, right in zip(
        torch.autograd.grad(found, inputs, upstream),
        torch.autograd.grad(wanted, exact, upstream.double()),
        strict=True,
    ):
        assert gradient.dtype == dtype
        assert_near(gradient, right, 8 * eps)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_gradients_of_a_large_group_are_rounded_once(
    dtype: torch.dtype, device: torch.device
) -> None:
    # each of 300 addends of about 1: a sum kept in bfloat16 stops growing at 256
    documents = torch.tensor([(10, 0, 0), *[(1, 0, 9)] * 300])
    keys = shared_keys(documents, 0, device)
    generator = torch.Generator().manual_seed(0)
    grad = torch.rand(keys.index.numel(), 2, 3, generator=generator, dtype=torch.float64) + 0.5
    grad = grad.to(device, dtype)
    wanted = torch.zeros(310, 2, 3, dtype=torch.float64).index_add_(
        0, keys.index.cpu(), grad.double().cpu()
    )
    found = keys.sum_uses(grad)
    assert found.dtype == dtype
    # one rounding to dtype, and those of 301 additions in float32
    tolerance = torch.finfo(dtype).eps + (0 if dtype == torch.float64 else 3e-5)
    assert_near(found.cpu(), wanted, max(tolerance, 1e-14))
    assert torch.equal(keys.gather(torch.arange(310, device=device)), keys.index)


def test_a_run_is_bitwise_repeatable(device: torch.device) -> None:
    documents = GROUPS["groups"]
    inputs = heads(documents, dtype=torch.float32, device=device)
    prefixes = torch.tensor(documents)

    def run() -> tuple[Tensor, ...]:
        output = shared_prefix_attention(*inputs, prefixes, window=None, scale=SCALE)
        return (output, *torch.autograd.grad(output.square().sum(), inputs))

    for one, two in zip(run(), run(), strict=True):
        assert torch.equal(one, two)


def test_nothing_gathered_waits_for_the_backward() -> None:
    documents = [(100, 0, 0), *[(2, 0, 90)] * 8]
    inputs = heads(documents, dtype=torch.float32)
    kept: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        output = shared_prefix_attention(*inputs, torch.tensor(documents), window=None, scale=SCALE)
    tokens, word = 116, 4
    # query, output, logs of sums; keys and values
    own = tokens * word * (2 * 4 * 8 + 4 + 2 * 2 * 8)
    assert sum(kept.values()) == own
    assert output.shape == (tokens, 4, 8)


def test_a_window_takes_the_end_of_a_prefix_only() -> None:
    documents = torch.tensor([(10, 0, 0), (3, 0, 8), (2, 1, 9)])
    assert shared_keys(documents, 0, torch.device("cpu")).index.tolist() == [
        *range(10), *range(8), *range(10, 13), *range(8), 10, *range(13, 15),
    ]  # fmt: skip
    assert shared_keys(documents, 4, torch.device("cpu")).index.tolist() == [
        *range(10), *range(5, 8), *range(10, 13), 6, 7, 10, *range(13, 15),
    ]  # fmt: skip


def test_what_is_seen_is_found_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    build = shared_prefixes._build

    def spy(prefixes: Tensor, window: int, device: torch.device) -> object:
        calls.append(window)
        return build(prefixes, window, device)

    monkeypatch.setattr(shared_prefixes, "_build", spy)
    documents = GROUPS["pair"]
    prefixes = torch.tensor(documents)
    inputs = heads(documents)
    for _ in range(3):
        for window in (None, 4):
            output = shared_prefix_attention(*inputs, prefixes, window=window, scale=SCALE)
            torch.autograd.grad(output.sum(), inputs)
    assert calls == [0, 4]
    prefixes[1, 2] = 4  # in place: what was found out is stale
    found = shared_prefix_attention(*inputs, prefixes, window=None, scale=SCALE)
    assert_near(found, each_alone(inputs, [(9, 0, 0), (4, 0, 4)], None, SCALE), 1e-13)
    assert calls == [0, 4, 0]


def test_meets_the_rules_of_an_operator() -> None:
    arguments = (*heads(GROUPS["chain"]), torch.tensor(GROUPS["chain"]), 3, SCALE)
    torch.library.opcheck(torch.ops.lowpeak.shared_prefix_attention.default, arguments)


@pytest.mark.parametrize(
    ("documents", "message"),
    [
        ([(4, 0, 0), (5, 1, 2)], "document 1 has 5 tokens of its own and 2 of document 1"),
        ([(4, 0, 0), (5, 0, 5)], "shares tokens of an earlier document only"),
        ([(9, 0, 0), (0, 0, 5)], "one of its own at least"),
        ([(4, 0, 0), (6, 0, 2)], "describes 10 tokens of 9"),
    ],
)
def test_wrong_documents_are_refused(documents: list[Document], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        shared_prefix_attention(
            *heads([(9, 0, 0)]), torch.tensor(documents), window=None, scale=SCALE
        )


@pytest.mark.cuda
@pytest.mark.parametrize("window", [None, 1, 4, 700])
@pytest.mark.parametrize("counts", [(4, 4), (8, 2)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_varlen_errs_no_more_than_without_sharing(
    dtype: torch.dtype, counts: tuple[int, int], window: int | None, device: torch.device
) -> None:
    documents = [(700, 0, 0), (64, 0, 600), (1, 0, 699), (130, 1, 640), (259, 0, 0), (9, 4, 17)]
    inputs = heads(documents, counts, (64, 64), dtype, device)
    assert varlen_serves(inputs[0], inputs[2], window)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    scale = 0.125
    wanted = each_alone(exact, documents, window, scale)
    upstream = torch.randn_like(wanted).to(dtype)
    right = torch.autograd.grad(wanted, exact, upstream.double())

    found = shared_prefix_attention(*inputs, torch.tensor(documents), window=window, scale=scale)
    gradients = torch.autograd.grad(found, inputs, upstream)

    whole = tokens_of(documents)
    index = torch.tensor([t for tokens in whole for t in tokens], device=device)
    own = torch.cat(
        [
            torch.arange(end - count, end)
            for (count, _, _), end in zip(documents, accumulate(len(t) for t in whole), strict=True)
        ]
    ).to(device)
    copies = [x.detach()[index].requires_grad_() for x in inputs]
    lengths = [len(tokens) for tokens in whole]
    ends = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    unshared = document_attention(
        *copies, Documents(ends, max(lengths)), window=window, scale=scale
    )
    spread = torch.zeros_like(unshared).index_copy(0, own, upstream)
    apart = torch.autograd.grad(unshared, copies, spread)
    summed = [
        torch.zeros_like(x).index_add(0, index, g.double())
        for x, g in zip(exact, apart, strict=True)
    ]

    def error(x: Tensor, y: Tensor) -> float:
        return (x.double() - y).abs().max().item()

    for name, shared, separate, wanted_value in zip(
        ("output", "query", "key", "value"),
        (found, *gradients),
        (unshared[own], *summed),
        (wanted, *right),
        strict=True,
    ):
        # the sums of gradients are rounded to dtype at the end, those of the other run are not
        rounding = torch.finfo(dtype).eps * max(wanted_value.abs().max().item(), 1e-2)
        assert error(shared, wanted_value) <= 2 * error(separate, wanted_value) + rounding, name
