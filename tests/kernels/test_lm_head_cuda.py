"""What only a GPU shows: 64-bit offsets, wide grids, CUDA graphs, synchronisations, streams."""

import threading
import warnings

import pytest
import torch
from lm_head_checks import (
    DIFFERENTIABLE,
    OUTPUTS,
    Transform,
    assert_exact,
    backward,
    call,
    error,
    largest,
    make_case,
    run,
    upstream_for,
)
from lm_head_oracle import evaluate
from sync_debug import synchronisations

pytestmark = pytest.mark.cuda


@pytest.fixture(autouse=True)
def _deterministic_blas(monkeypatch: pytest.MonkeyPatch) -> None:
    """What cuBLAS asks for under use_deterministic_algorithms."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


@pytest.mark.parametrize("scratch", [None, 16384 * 151936 * 2 + (1 << 30)], ids=["tiles", "one"])
def test_more_than_two_to_the_31_logits(scratch: int | None, device: torch.device) -> None:
    """N * V = 2.5e9: a 32-bit offset into the logits would wrap; "one" tile of 5 GB holds all."""
    rows, vocabulary = 16384, 151936
    case = make_case(rows, vocabulary, 64, torch.bfloat16, device, bias=False, ignored=0.0)
    upstream = upstream_for(case, ("log_probs", "entropy"))
    ours = run(case, ("log_probs", "entropy"), upstream, scratch_bytes=scratch)
    picked = torch.tensor([0, 1, 8191, 14134, 14135, rows - 2, rows - 1], device=device)
    sampled = evaluate(
        case.hidden[picked], case.weight, case.targets[picked],
        upstream={name: value[picked] for name, value in upstream.items()},
    )  # fmt: skip
    unit = torch.finfo(torch.bfloat16).eps * 16
    for name in ("log_probs", "entropy"):
        assert error(ours.outputs[name][picked], sampled.outputs[name]) <= 4 * unit, name
    gradient, expected = ours.gradients["hidden"], sampled.gradients["hidden"]
    assert error(gradient[picked], expected) <= 0.02 * largest(expected)
    assert_weight_blocks(case, ours, upstream, vocabulary)


def assert_weight_blocks(case, ours, upstream, vocabulary: int) -> None:  # type: ignore[no-untyped-def]
    """Rows of dW at the ends and in the middle, from float32 statistics and blocks of logits."""
    log_z = torch.cat([
        (part.double() @ case.weight.double().T).logsumexp(1) for part in case.hidden.split(512)
    ])  # fmt: skip
    entropy = ours.outputs["entropy"].double()
    for start in (0, 75000, vocabulary - 64):
        block = case.weight[start : start + 64].double()
        log_p = case.hidden.double() @ block.T - log_z.unsqueeze(1)
        p = log_p.exp()
        columns = torch.arange(start, start + 64, device=p.device)
        one_hot = (case.targets.unsqueeze(1) == columns).double()
        slope = upstream["log_probs"].double().unsqueeze(1) * (one_hot - p)
        slope -= upstream["entropy"].double().unsqueeze(1) * p * (log_p + entropy.unsqueeze(1))
        expected = slope.T @ case.hidden.double()
        gradient = ours.gradients["weight"]
        assert gradient is not None
        assert error(gradient[start : start + 64], expected) <= 0.02 * largest(expected), start


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_more_rows_than_a_grid_axis(backend: str, device: torch.device) -> None:
    """N > 65536: rows belong on the first axis of the grid."""
    case = make_case(70001, 127, 24, torch.float32, device)
    assert_exact(case, backend=backend, scratch_bytes=1 << 30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_realistic_shape(backend: str, dtype: torch.dtype, device: torch.device) -> None:
    """2048 tokens, 32003 columns, width 256: wide products and several tiles."""
    transform = Transform(softcap=30.0, temperature=0.8)
    case = make_case(2048, 32003, 256, dtype, device, transform=transform)
    assert_exact(case, backend=backend, scratch_bytes=1 << 25)


@pytest.mark.parametrize("frozen", [(), ("weight", "bias")], ids=["trained", "frozen"])
@pytest.mark.parametrize("outputs", [("log_probs",), OUTPUTS], ids=["log_probs", "all"])
def test_cuda_graph_of_forward_and_backward(
    outputs: tuple[str, ...], frozen: tuple[str, ...], device: torch.device
) -> None:
    """row_selection="all" is captured once and replayed with other data."""
    case = make_case(64, 5000, 64, torch.bfloat16, device)
    leaves = case.leaves(frozen)
    upstream = upstream_for(case, outputs)

    def step() -> list[torch.Tensor]:
        # New leaves on the same memory: a leaf keeps the stream of its first backward, and the
        # ones of warm-up, capture and comparison are three.
        views = {
            name: leaf.detach().requires_grad_(leaf.requires_grad) for name, leaf in leaves.items()
        }
        result = call(case, views, outputs, row_selection="all")
        values = [getattr(result, name) for name in upstream]
        wanted = [view for view in views.values() if view.requires_grad]
        gradients = torch.autograd.grad(values, wanted, list(upstream.values()))
        return [*(getattr(result, name).detach() for name in outputs), *gradients]

    # As the recipe for CUDA graphs in PyTorch's notes: warm-up on a side stream, then capture.
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    other = make_case(64, 5000, 64, torch.bfloat16, device, seed=7)
    with torch.no_grad():
        for name, leaf in leaves.items():
            leaf.copy_(getattr(other, name))
    case.targets.copy_(other.targets)
    graph.replay()
    torch.cuda.synchronize()
    replayed = [value.clone() for value in captured]
    for found, expected in zip(replayed, step(), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_all_rows_never_synchronise(backend: str, device: torch.device) -> None:
    case = make_case(64, 500, 64, torch.bfloat16, device)
    leaves, upstream = case.leaves(), upstream_for(case)
    backward(call(case, leaves, OUTPUTS, row_selection="all", backend=backend), upstream)
    torch.cuda.synchronize()
    with synchronisations("error"):
        with pytest.raises(RuntimeError, match="synchroniz"):
            upstream["log_probs"].sum().item()  # the mode is at work
        backward(call(case, leaves, OUTPUTS, row_selection="all", backend=backend), upstream)


@pytest.mark.parametrize("ignored", [0.0, 0.5])
@pytest.mark.parametrize("way", ["plain", "frozen", "expected"])
def test_synchronisations_of_valid_rows(way: str, ignored: float, device: torch.device) -> None:
    """Index checks and row selection share one. The backward has one where it looks for rows
    without a gradient, or whether the expectation held, and none with a frozen weight."""
    temperature = torch.full((64,), 0.9, device=device)
    transform = Transform(temperature=temperature)
    case = make_case(64, 500, 64, torch.float16, device, ignored=ignored, transform=transform)
    names = ("log_probs", "mean_logits") if way == "frozen" else DIFFERENTIABLE
    leaves = case.leaves(("weight", "bias") if way == "frozen" else ())
    upstream = upstream_for(case, names)
    options = {"expected_grads": upstream} if way == "expected" else {}
    backward(call(case, leaves, OUTPUTS, **options), upstream)
    torch.cuda.synchronize()
    with synchronisations("warn"), warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = call(case, leaves, OUTPUTS, **options)
        forward = sum("synchroniz" in str(w.message) for w in caught)
        backward(result, upstream)
        both = sum("synchroniz" in str(w.message) for w in caught)
    assert (forward, both) == (1, 1 if way == "frozen" else 2)


def test_deterministic_algorithms_are_available(device: torch.device) -> None:
    """No operation without a deterministic implementation, and the same bits twice."""
    case = make_case(3000, 5000, 64, torch.bfloat16, device)
    upstream = upstream_for(case)
    torch.use_deterministic_algorithms(True)
    try:
        first, second = (run(case, OUTPUTS, upstream) for _ in range(2))
    finally:
        torch.use_deterministic_algorithms(False)
    for name in OUTPUTS:
        assert torch.equal(first.outputs[name], second.outputs[name]), name
    for name in ("hidden", "weight", "bias"):
        assert torch.equal(first.gradients[name], second.gradients[name]), name


def test_worker_threads_and_streams(device: torch.device) -> None:
    """Four threads, each on its own stream, first use of the kernels among them."""
    cases = [make_case(200 + i, 3000, 64, torch.bfloat16, device, seed=i) for i in range(4)]
    expected = [run(case, OUTPUTS, upstream_for(case)) for case in cases]
    torch.cuda.synchronize()
    found: list[object] = [None] * len(cases)

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(5):
                    upstream = upstream_for(cases[index])
                    result = run(cases[index], OUTPUTS, upstream)
                torch.cuda.current_stream().synchronize()
            found[index] = result
        except Exception as failure:  # handed to the main thread
            found[index] = failure

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(cases))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result, wanted in zip(found, expected, strict=True):
        if isinstance(result, Exception):
            raise result
        for name in DIFFERENTIABLE:
            assert torch.equal(result.outputs[name], wanted.outputs[name]), name  # type: ignore[attr-defined]
        for name in ("hidden", "weight", "bias"):
            one, two = result.gradients[name], wanted.gradients[name]  # type: ignore[attr-defined]
            assert torch.equal(one, two), name


def test_second_device_guard(device: torch.device) -> None:
    """Tensors on a device that is not the current one."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    case = make_case(40, 300, 32, torch.bfloat16, "cuda:1")
    with torch.cuda.device(0):
        assert_exact(case)


def test_mixed_devices_are_refused(device: torch.device) -> None:
    case = make_case(4, 30, 8, device=device)
    with pytest.raises(ValueError, match=r"weight.*hidden|hidden.*weight"):
        call(case, {**case.leaves(), "hidden": case.hidden.cpu()}, ("log_probs",))
