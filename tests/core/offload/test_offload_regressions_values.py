"""Reports of wrong values: each condition again, gradients bit by bit those of plain autograd."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from offload_oracle import same, words
from offload_simulated import MODES, assert_exact, gradients_under, simulated
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from lowpeak.offload import OffloadActivations

every_mode = pytest.mark.parametrize("mode", MODES)


@every_mode
def test_r01_source_outlives_its_copy(mode: str) -> None:
    """meta-pytorch/torchtune#1867: storage was freed while its copy to the host ran."""

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for _ in range(6):
            out = out.sin().exp().tanh()
            torch.full_like(out, 7.0)  # takes the memory of what was just freed
        return out

    assert_exact(forward, [(16, 16)], lambda: simulated(mode))


class SavesState(torch.autograd.Function):
    """Multiplies by a saved host tensor, and tells what came back."""

    seen: Tensor | None = None

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, state: Tensor) -> Tensor:
        ctx.save_for_backward(state)
        return x * 2

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None]:
        (SavesState.seen,) = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * 2, None


@pytest.mark.cuda
def test_r03_host_tensors_come_back_as_they_were() -> None:
    """meta-pytorch/torchtune#2456: a saved CPU tensor came back on the GPU."""
    state = torch.randn(64, 64)
    x = torch.randn(64, 64, device="cuda", requires_grad=True)
    with OffloadActivations(policy="all", min_bytes=1, keep_last=0):
        out = SavesState.apply(x, state)
    out.sum().backward()
    assert SavesState.seen is not None
    assert SavesState.seen.device.type == "cpu"
    assert SavesState.seen.data_ptr() == state.data_ptr()


class SavesViews(torch.autograd.Function):
    """Saves its input in layouts of every kind, and records those that came back."""

    layouts: tuple[tuple[Tensor, tuple[int, ...], tuple[int, ...]], ...] = ()

    @staticmethod
    def views(x: Tensor) -> list[Tensor]:
        flat = x.reshape(-1)
        return [
            x.t(),
            x[3:, 2:],
            x[::2, 1::3],
            x[:, :1].expand(-1, 5),
            x[2].expand(4, 16),
            x.as_strided((5, 5), (3, 2), 7),
            flat[5:21].view(4, 4).t(),
            x.unfold(0, 3, 2),
            x.view(torch.int32)[1:],
            flat[4:8].view(torch.float64),
            x[3, 4],
            x[:0],
        ]

    @staticmethod
    def forward(ctx: torch.autograd.function.FunctionCtx, x: Tensor, shared: bool) -> Tensor:
        views = SavesViews.views(x.detach().clone())
        if not shared:
            count = len(views)
            views = [SavesViews.views(x.detach().clone())[index] for index in range(count)]
        ctx.save_for_backward(*views)
        return x * 2

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None]:
        saved = ctx.saved_tensors  # type: ignore[attr-defined]
        SavesViews.layouts = tuple((v.clone(), tuple(v.shape), v.stride()) for v in saved)
        return gradient * 2, None


@every_mode
@pytest.mark.parametrize("shared", [True, False], ids=["one-storage", "own-storages"])
def test_r07_strides_of_views_are_exact(mode: str, shared: bool) -> None:
    """huggingface/trl#5694: views with offsets or gaps came back dense, or shifted."""
    x = torch.randn(16, 16, requires_grad=True)
    with simulated(mode):
        out = SavesViews.apply(x, shared)
    out.sum().backward()
    expected = SavesViews.views(x.detach().clone())
    assert len(SavesViews.layouts) == len(expected)
    for (value, shape, stride), view in zip(SavesViews.layouts, expected, strict=True):
        assert same(value, view.clone())
        assert (shape, stride) == (tuple(view.shape), view.stride())


def test_r08_pointer_of_a_freed_storage_is_no_identity() -> None:
    """huggingface/trl#6241: the allocator gave a second tensor the pointer of an offloaded one."""
    memory = bytearray(4 * 256)
    x = torch.randn(256, requires_grad=True)
    context = simulated("eager")
    total = torch.zeros(())
    with context:
        for step in range(3):
            reused = torch.frombuffer(memory, dtype=torch.float32)
            reused.copy_(torch.full((256,), float(step + 1)))
            total = total + (x * reused).sum()
            del reused
            context.synchronize()
    total.backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((256,), 6.0))


@every_mode
def test_r10_square_matrix_and_its_transpose(mode: str) -> None:
    """modelscope/ms-swift#10157 (and verl): one key for x and x.T read the wrong activation."""

    def forward(leaves: list[Tensor]) -> Tensor:
        x = leaves[0].tanh()
        return x * leaves[1] + x.t() * leaves[1].exp() + (x.t().sin() * x).tanh()

    assert_exact(forward, [(16, 16), (16, 16)], lambda: simulated(mode))


class Recurrent(torch.autograd.Function):
    """A layer with a tuple for a state, parts of which are saved and parts of which are objects."""

    @staticmethod
    def forward(
        ctx: torch.autograd.function.FunctionCtx, x: Tensor, state: tuple[Tensor, int, list[Tensor]]
    ) -> Tensor:
        hidden, count, history = state
        ctx.save_for_backward(x, hidden, *history)
        ctx.count = count  # type: ignore[attr-defined]
        return x * hidden * count

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, gradient: Tensor
    ) -> tuple[Tensor, None]:
        x, hidden, *history = ctx.saved_tensors  # type: ignore[attr-defined]
        return gradient * hidden * ctx.count + 0 * x * sum(history), None  # type: ignore[attr-defined]


@every_mode
def test_r12_layers_that_save_tuples_and_recurrent_states(mode: str) -> None:
    """verl-project/verl#7472: assertions on the tuple states of recurrent layers."""
    torch.manual_seed(1)
    lstm = nn.LSTM(8, 8, num_layers=2)

    def forward(leaves: list[Tensor]) -> Tensor:
        x = leaves[0]
        out, (hidden, cell) = lstm(x)
        out = out + Recurrent.apply(x.tanh(), (out.detach(), 3, [x.detach().sin(), out.detach()]))
        return out + hidden[-1] * cell[-1]

    assert_exact(forward, [(5, 8)], lambda: simulated(mode))


@pytest.mark.parametrize("window_bytes", [None, 1, 1 << 20])
def test_r14_reload_waits_for_its_own_copy(window_bytes: int | None) -> None:
    """NVIDIA/Megatron-LM#7398: an unpack before its prefetch read a buffer still being written."""

    def forward(leaves: list[Tensor]) -> Tensor:
        return (leaves[0].sin() @ leaves[1]).tanh().exp()

    shapes = [(16, 16), (16, 16)]
    assert_exact(forward, shapes, lambda: simulated("laziest", window_bytes=window_bytes))


@pytest.mark.parametrize("keep_last", [0, 1, 5])
@pytest.mark.parametrize("window", [1, 5, 40])
def test_r15_many_layers_and_few_places(keep_last: int, window: int) -> None:
    """NVIDIA/TransformerEngine#1959: 32 layers in 5 groups mixed the indices of both."""
    torch.manual_seed(2)
    layers = [nn.Linear(16, 16) for _ in range(32)]

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for layer in layers:
            out = checkpoint(lambda x, layer=layer: layer(x).tanh() + x, out, use_reentrant=False)
        return out

    def context() -> OffloadActivations:
        options = {"window_bytes": window * 16 * 16 * 4, "keep_last": keep_last}
        return simulated("laziest", policy="checkpoint_inputs", **options)

    assert_exact(forward, [(16, 16)], context)


@every_mode
def test_r17_host_memory_is_reused_after_its_last_reader(mode: str) -> None:
    """pytorch/torchtitan#2581: the next step wrote a pool's buffer that was still being read."""
    context = simulated(mode)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for _ in range(5):
            out = out.sin().exp().tanh()
        return out

    for step in range(4):
        assert_exact(forward, [(16, 16)], lambda: context, seed=step)
        # What was prefetched for the rest of this graph is never read.
        x = torch.randn(16, 16, requires_grad=True)
        with context:
            middle = x.sin().exp()
            out = middle.tanh().sin().exp()
        torch.autograd.grad(out.sum(), [middle])
        del x, middle, out


@every_mode
def test_r21_expanded_tensors_cost_their_storage_and_keep_their_strides(mode: str) -> None:
    """pytorch/pytorch#186396, deepspeed#8388: expanded activations were written out in full."""
    context = simulated(mode)

    def forward(leaves: list[Tensor]) -> Tensor:
        row = leaves[0].sin()  # saves the leaf, which is nobody's activation
        wide = row.expand(1000, 16)
        return wide * leaves[1] + 0.0 * (wide.t() @ leaves[1]).sum()

    assert_exact(forward, [(1, 16), (1000, 16)], lambda: context)
    context.reset_stats()
    x = torch.randn(1, 16, requires_grad=True)
    with context:
        out = SavesState.apply(x, x.detach().sin().expand(4096, 16))
    context.synchronize()
    assert context.stats().copied_out.bytes <= 2 * 16 * 4
    out.sum().backward()
    assert SavesState.seen is not None
    assert SavesState.seen.stride() == (0, 1)


@every_mode
@pytest.mark.parametrize("newest_first", [False, True])
def test_r37_two_contexts_before_one_backward(mode: str, newest_first: bool) -> None:
    """TRL 1.16: contexts entered one after the other shared tensor ids; gradients were wrong."""

    def total(contexts: tuple[AbstractContextManager[object], ...]) -> list[Tensor | None]:
        torch.manual_seed(3)
        x, y = torch.randn(16, 16, requires_grad=True), torch.randn(16, 16, requires_grad=True)
        with contexts[0]:
            first = (x.exp() * y).tanh().sum()
        with contexts[1]:
            second = (y.sin() @ x).exp().tanh().sum()
        losses = [second, first] if newest_first else [first, second]
        for loss in losses:
            loss.backward()
        return [x.grad, y.grad]

    plain = total((nullcontext(), nullcontext()))
    once = simulated(mode)
    for contexts in ((simulated(mode), simulated(mode)), (once, once)):
        for ours, expected in zip(total(contexts), plain, strict=True):
            assert same(ours, expected)


@every_mode
def test_r08_versions_of_one_storage_are_told_apart(mode: str) -> None:
    """Saved, edited and saved again: the second is not the first, though the storage is."""
    unused: list[Tensor] = []

    def forward(leaves: list[Tensor]) -> Tensor:
        y = leaves[0] * 2
        # These savings are void after the edits; the loss does not depend on them.
        unused.append(y.sin())
        y.add_(1.0)
        unused.append(y[2:].sin())
        y[:8].mul_(1.5)
        return y.cos()

    plain = gradients_under(nullcontext(), forward, [(16, 16)])
    for _ in range(2):
        ours = gradients_under(simulated(mode), forward, [(16, 16)])
        assert same(ours[0], plain[0])


def edit_input(x: Tensor) -> Tensor:
    y = x * 2
    out = y.sin()
    y.add_(1.0)
    return out


def edit_output(x: Tensor) -> Tensor:
    out = (x * 2).exp()
    out.mul_(2.0)
    return out


def edit_through_a_view(x: Tensor) -> Tensor:
    y = x.tanh()
    out = y * y.sin()
    y[3:5, ::2].zero_()
    return out


def edit_then_drop(x: Tensor) -> Tensor:
    y = x.detach().clone()
    out = x * y
    y.add_(1.0)
    del y
    return out


def edit_parameter(x: Tensor) -> Tensor:
    weight = nn.Parameter(torch.ones(16, 16))
    out = x * weight
    with torch.no_grad():
        weight.add_(1.0)
    return out


def edit_between_backwards(x: Tensor) -> Tensor:
    y = x * 2
    (out,) = torch.autograd.grad(y.sin().sum(), [y], create_graph=True)
    y.add_(1.0)
    return out


EDITS = (
    edit_between_backwards,
    edit_input,
    edit_output,
    edit_through_a_view,
    edit_then_drop,
    edit_parameter,
)


@every_mode
@pytest.mark.parametrize("edit", EDITS, ids=lambda edit: edit.__name__)
@pytest.mark.parametrize("min_bytes", [1, 1 << 20])
def test_r38_in_place_after_save_raises_as_plain_autograd(
    mode: str, edit: object, min_bytes: int
) -> None:
    """Under any saved-tensor hook torch checks no versions: TRL gave a wrong gradient, silently."""
    assert callable(edit)

    def message(context: AbstractContextManager[object]) -> str:
        with pytest.raises(RuntimeError) as raised:
            gradients_under(context, lambda leaves: edit(leaves[0]), [(16, 16)])
        return words(raised.value)

    expected = message(nullcontext())
    assert "modified by an inplace operation" in expected
    assert message(simulated(mode, min_bytes=min_bytes)) == expected


@every_mode
@pytest.mark.parametrize("copied", [True, False], ids=["copied-before", "edited-at-once"])
def test_r38_mutations_can_be_allowed(mode: str, copied: bool) -> None:
    """on_mutation="snapshot": the value of the time of saving, as torch's save_on_cpu gives it."""
    x = torch.randn(16, 16, requires_grad=True)
    context = simulated(mode, on_mutation="snapshot")
    with context:
        y = x * 2
        out = y.sin()
        if copied:
            context.synchronize()
        y.add_(1.0)
    out.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, (x.detach() * 2).cos() * 2)
