"""Reports of offloading what should stay, or of not offloading what should, without a word.

Rows of the table of public reports that are in none of the four files of this name:

row     report                          why not
19, 20  pytorch#192722, #150517 ...     sizes and rounding of pinned blocks: the native host pool's
34      pytorch#160420, #197868         memory near its GPU: the native host pool's
35, 36  DeepSpeed#7412, kernels#1081    tiled layers, which move no saved tensor
25      unsloth#338 ... (WSL)           no pinned memory: in test_offload_failures; telling WSL
                                        apart is the native engine's
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import pytest
import torch
from offload_graphs import SELECTED
from offload_oracle import same, words
from offload_simulated import (
    MODES,
    assert_exact,
    gradients_under,
    simulated,
)
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from lowpeak.offload import OffloadActivations, OffloadStats

# Dynamo looks at the attributes of every tensor.
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
every_mode = pytest.mark.parametrize("mode", MODES)
SHAPE = (16, 16)
BYTES = 16 * 16 * 4


@every_mode
def test_r11_forwards_without_gradient_change_nothing(mode: str) -> None:
    """modelscope/ms-swift#9844: no_grad forwards (GRPO's log-probs) moved the groups' state."""
    context = simulated(mode)

    def forward(leaves: list[Tensor]) -> Tensor:
        x = leaves[0].sin()
        with torch.no_grad():
            before = context.stats()
            old = leaves[0].exp().tanh() * leaves[1]
            assert context.stats() == before
        with torch.inference_mode():
            leaves[0].exp().tanh().sum()
            assert context.stats() == before
        return x * old + leaves[1].exp()

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)


@every_mode
@pytest.mark.parametrize("policy", ["checkpoint_inputs", "all"])
def test_r13_reentrant_checkpoints(mode: str, policy: str) -> None:
    """verl-project/verl#3629: under a reentrant checkpoint the hooks saw nothing, silently."""
    context = simulated(mode, policy=policy)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0].sin()
        for _ in range(3):
            out = checkpoint(lambda x: (x * leaves[1]).tanh(), out, use_reentrant=True)
        return out

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)
    assert context.stats().offloaded.bytes >= 2 * 3 * BYTES


def test_r23_regions_compiled_under_the_context() -> None:
    """pytorch/pytorch#116221, #113263: a compiled region saved other tensors with hooks."""
    torch._dynamo.reset()
    region = torch.compile(lambda x, w: (x @ w).tanh().exp(), backend="aot_eager")

    def forward(leaves: list[Tensor]) -> Tensor:
        return region(leaves[0].sin(), leaves[1]) * leaves[0]

    for mode in ("laziest", "eager"):
        assert_exact(forward, [SHAPE, SHAPE], partial(simulated, mode))


def test_r23_contexts_inside_a_compiled_region() -> None:
    """The context ends the graph there; values are those of plain autograd."""
    torch._dynamo.reset()
    context = simulated("laziest")

    @torch.compile(backend="aot_eager")
    def compiled(x: Tensor, w: Tensor) -> Tensor:
        y = x.sin()
        with context:
            y = (y @ w).tanh()
        return y.exp()

    def forward(leaves: list[Tensor]) -> Tensor:
        return compiled(leaves[0], leaves[1])

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)


@every_mode
def test_r26_first_use_under_inference_mode(mode: str) -> None:
    """unslothai/unsloth#3828 (zoo#805): buffers of inference_mode could not be written."""
    with torch.inference_mode():
        context = simulated(mode)
        with context:
            torch.randn(SHAPE).sin()

    def forward(leaves: list[Tensor]) -> Tensor:
        return leaves[0].sin().exp() * leaves[1].tanh()

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)


@every_mode
def test_r29_parameters_are_never_copied(mode: str) -> None:
    """meta-llama/llama-cookbook#115: weights of linear layers were copied with the activations."""
    linear = nn.Linear(64, 64)
    fused = nn.Parameter(torch.randn(192, 64))
    context = simulated(mode)
    x = torch.randn(2, 64, requires_grad=True)
    with context:
        x = x.sin()  # saved too: 512 bytes, far fewer than any weight
        out = linear(x)
        first, second, third = fused.chunk(3)
        out = out + functional.linear(x, first) + functional.linear(x, second.t())
        out = out + functional.linear(x, third.view(64, 64).detach().requires_grad_())
    context.synchronize()
    assert context.stats().offloaded.bytes <= 4 * 512
    assert context.stats().kept["leaf"].bytes >= 2 * 64 * 64 * 4
    out.sum().backward()
    assert linear.weight.grad is not None


BACKENDS_WITHOUT_DEVICE = ["null"] if torch.accelerator.is_available() else ["null", "auto"]
PASSINGS = ("positional", "list", "dictionary", "keyword", "deep")


def checkpointed(how: str, a: Tensor, b: Tensor) -> Tensor:
    """One region of two inputs, handed over in every way."""
    if how == "positional":
        region = lambda a, b: (a * b).tanh()  # noqa: E731
        return checkpoint(region, a, b, use_reentrant=False)
    if how == "list":
        return checkpoint(lambda v: (v[0] * v[1]).tanh(), [a, b], use_reentrant=False)
    if how == "dictionary":
        return checkpoint(lambda v: (v["a"] * v["b"]).tanh(), {"a": a, "b": b}, use_reentrant=False)
    if how == "keyword":
        return checkpoint(lambda *, a, b: (a * b).tanh(), a=a, b=b, use_reentrant=False)
    nested = (1, {"x": [a, ("text", {"y": b})]})
    return checkpoint(
        lambda v: (v[1]["x"][0] * v[1]["x"][1][1]["y"]).tanh(), nested, use_reentrant=False
    )


@every_mode
@pytest.mark.parametrize("how", PASSINGS)
@pytest.mark.parametrize("policy", ["checkpoint_inputs", "all"])
def test_r30_checkpoint_inputs_in_containers_and_keywords(mode: str, how: str, policy: str) -> None:
    """InternLM/xtuner#1979: inputs inside lists, dicts and keywords were invisible to hooks."""
    context = simulated(mode, policy=policy)

    def forward(leaves: list[Tensor]) -> Tensor:
        out, other = leaves[0], leaves[1].exp()
        for _ in range(4):
            out, other = checkpointed(how, out.sin(), other), other.cos()
        return out

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)
    # Two runs of four regions with two inputs each; some may have been forwarded.
    assert context.stats().offloaded.bytes >= 2 * 4 * 2 * BYTES


@every_mode
def test_selective_saves_are_seen(mode: str) -> None:
    """offload.md, finding 10: what selective checkpointing saves is invisible to outer hooks."""
    context = simulated(mode, policy="checkpoint_inputs")
    make = partial(create_selective_checkpoint_contexts, SELECTED)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for _ in range(3):
            out = checkpoint(
                lambda x: (x.exp() @ leaves[1]).tanh().sin(),
                out.cos(),
                use_reentrant=False,
                context_fn=make,
            )
        return out

    assert_exact(forward, [SHAPE, SHAPE], lambda: context)
    # Input, product and tanh of each of three regions, in each of two runs.
    assert context.stats().offloaded.bytes >= 2 * 3 * 3 * BYTES


@every_mode
def test_edits_of_selective_saves_raise_as_plain_autograd(mode: str) -> None:
    """What a selective checkpoint keeps has a check of its own, and words of its own."""

    def forward(leaves: list[Tensor]) -> Tensor:
        make = partial(create_selective_checkpoint_contexts, SELECTED)
        region = lambda x: (x @ leaves[1]).tanh()  # noqa: E731
        kept = checkpoint(region, leaves[0].sin(), use_reentrant=False, context_fn=make)
        return kept.add_(1.0)

    def message(context: AbstractContextManager[object]) -> str:
        with pytest.raises(RuntimeError) as raised:
            gradients_under(context, forward, [SHAPE, SHAPE])
        return words(raised.value)

    expected = message(nullcontext())
    assert "selective" in expected
    assert message(simulated(mode)) == expected


@every_mode
def test_saves_of_a_backward_stay(mode: str) -> None:
    """Backward under the context, with a graph of its own: what it saves it asks for at once."""
    context = simulated(mode)
    x = torch.randn(SHAPE, requires_grad=True)
    with context:
        out = x.sin().exp().tanh()
        before = context.stats().offloaded
        (gradient,) = torch.autograd.grad(out.sum(), [x], create_graph=True)
        assert context.stats().offloaded == before
        assert context.stats().kept["in_backward"].count >= 3
    gradient.sum().backward()


def test_r32_automatic_offload_is_off_where_the_peak_is_elsewhere(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """huggingface/accelerate#4175: short sequences paid 35 % of time for no byte of the peak."""
    context = simulated("laziest", policy="auto")
    layers = [nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(2)]

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for layer in layers:
            out = checkpoint(layer, out, use_reentrant=False)
        return out

    with caplog.at_level(logging.INFO, logger="lowpeak"):
        for _ in range(3):
            assert_exact(forward, [SHAPE], lambda: context)
    assert context.stats().copied_out.count == 0
    assert context.explain().startswith("Off: ")
    reasons = [r for r in caplog.records if r.name.startswith("lowpeak.offload")]
    assert len(reasons) == 1
    assert "fewer than copies in flight would hold" in reasons[0].getMessage()


@every_mode
@pytest.mark.parametrize("policy", ["checkpoint_inputs", "all"])
def test_r40_layers_with_full_backward_hooks(mode: str, policy: str) -> None:
    """DeepSpeed#8282: a module's full backward hook makes views of inputs; nothing was moved."""
    seen: list[int] = []
    layers = [nn.Linear(16, 16) for _ in range(3)]
    for index, layer in enumerate(layers):
        layer.register_full_backward_hook(lambda *_, index=index: seen.append(index))
        layer.register_full_backward_pre_hook(lambda *_: None)
    context = simulated(mode, policy=policy)

    def forward(leaves: list[Tensor]) -> Tensor:
        out = leaves[0]
        for layer in layers:
            out = checkpoint(layer, out.sin(), use_reentrant=False).tanh()
        return out

    assert_exact(forward, [SHAPE], lambda: context)
    assert seen == [2, 1, 0] * 3
    assert context.stats().offloaded.bytes >= 2 * 3 * BYTES


@pytest.mark.parametrize("backend", BACKENDS_WITHOUT_DEVICE)
def test_h4_without_an_accelerator_nothing_happens(
    backend: str, caplog: pytest.LogCaptureFixture
) -> None:
    """huggingface/trl#4280: on a CPU the first step died of an AttributeError. Now: one line."""

    def forward(leaves: list[Tensor]) -> Tensor:
        return checkpoint(lambda x: x.sin().exp(), leaves[0].tanh(), use_reentrant=False)

    plain = gradients_under(nullcontext(), forward, [SHAPE])
    with caplog.at_level(logging.INFO, logger="lowpeak"):
        context = OffloadActivations(policy="all", min_bytes=1, device_backend=backend)
        for inside in (False, True, False):
            ours = gradients_under(context, forward, [SHAPE], inside=inside)
            assert same(ours[0], plain[0])
    said = [r for r in caplog.records if r.name.startswith("lowpeak.offload")]
    assert [record.levelno for record in said] == [logging.INFO]
    assert "no device" in said[0].getMessage()
    assert "no device" in context.explain()
    context.synchronize()
    assert context.stats() == OffloadStats()
    assert {event["ph"] for event in context.chrome_trace()["traceEvents"]} <= {"M"}
