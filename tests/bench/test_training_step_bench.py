"""The training step benchmark trains on what it says, and both sides train alike."""

import gc
import io
import json

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.gemma3.modeling_gemma3 import Gemma3MLP

from lowpeak_bench.step_clock import Schedule, step_clock
from lowpeak_bench.training_cases import GEMMA_3_1B, Run, build_model, build_trainer
from lowpeak_bench.training_data import Case, build_tokenizer
from lowpeak_bench.training_step import blank_result, main, parse_case, parser, run_case

TOKENS = 40
CPU = torch.device("cpu")
TINY = ["--config", "tiny", "--dtype", "float32", "--device", "cpu", "--warmup", "1"]

# Raised by TRL and transformers themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


def first_batch(case: Case, run: Run) -> dict[str, torch.Tensor]:
    model = build_model("tiny", torch.float32, CPU)
    tokenizer = build_tokenizer(model.config.vocab_size)
    trainer = build_trainer(case, model, tokenizer, run, step_clock(CPU, Schedule(0, 1, 1.0)))
    batch: dict[str, torch.Tensor] = trainer._prepare_inputs(
        next(iter(trainer.get_train_dataloader()))
    )
    return batch


def run_json(arguments: list[str], path) -> list[dict]:  # type: ignore[no-untyped-def, type-arg]
    stream = io.StringIO()
    assert main([*TINY, "--json", str(path), *arguments], stream) == 0, stream.getvalue()
    results: list[dict] = json.loads(path.read_text())["results"]  # type: ignore[type-arg]
    assert [result["failure"] for result in results] == [None] * len(results)
    return results


def test_architecture_is_that_of_gemma_3_1b() -> None:
    model = build_model("gemma-3-1b", torch.bfloat16, torch.device("meta"))
    assert sum(parameter.numel() for parameter in model.parameters()) == 999_885_952
    assert model.config.layer_types.count("full_attention") == 4
    rope = model.config.rope_parameters
    assert rope["full_attention"]["rope_theta"] == GEMMA_3_1B["rope_theta"]
    assert rope["sliding_attention"]["rope_theta"] == GEMMA_3_1B["rope_local_base_freq"]


@pytest.mark.parametrize(("method", "rows"), [("sft", 1), ("dpo", 2), ("grpo", 1)])
def test_a_step_sees_sequences_of_the_length_asked_for(method: str, rows: int, tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = Case(method, "trl", TOKENS)
    batch = first_batch(case, Run(1, str(tmp_path)))
    if method == "grpo":
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        trained = batch["completion_mask"].sum()
    else:
        ids = batch["input_ids"]
        trained = batch["completion_mask" if method == "dpo" else "attention_mask"].sum()
    assert ids.shape == (rows, TOKENS)
    assert ids.unique().numel() > TOKENS // 2
    assert trained == rows * (TOKENS - case.examples[0].prompt)


def test_ragged_pairs_have_the_lengths_that_the_case_states(tmp_path) -> None:  # type: ignore[no-untyped-def]
    case = Case("dpo", "trl", 128, "ragged")
    batch = first_batch(case, Run(1, str(tmp_path)))
    pairs = list(zip(batch["completion_mask"].sum(1).split(8), strict=False))
    assert len(case.examples) == 8
    stated = sorted(example.completions for example in case.examples)
    chosen, rejected = (half.tolist() for (half,) in pairs)
    assert sorted(zip(chosen, rejected, strict=True)) == stated
    lengths = batch["attention_mask"].sum(1).tolist()
    assert sorted(lengths) == sorted(
        example.prompt + count for example in case.examples for count in example.completions
    )
    assert 128 / 32 <= min(lengths) < max(lengths) <= 128
    assert batch["input_ids"].numel() == blank_result(case, CPU).padded_tokens


def test_ragged_pairs_of_the_published_case() -> None:
    lengths = [
        example.prompt + count
        for example in Case("dpo", "trl", 8192, "ragged").examples
        for count in example.completions
    ]
    assert len(lengths) == 16
    assert sum(lengths) == 35491
    assert (min(lengths), max(lengths)) == (472, 7384)


@pytest.mark.parametrize(("method", "groups", "completions"), [("dpo", 4, 2), ("grpo", 1, 8)])
def test_completions_share_their_prompt(
    method: str, groups: int, completions: int, tmp_path
) -> None:  # type: ignore[no-untyped-def]
    batch = first_batch(Case(method, "trl", 36, "shared-prompt"), Run(1, str(tmp_path)))
    if method == "grpo":
        prompts, answers = batch["prompt_ids"], batch["completion_ids"]
        assert batch["advantages"].sum() == 0
    else:
        assert torch.equal(batch["completion_mask"][:, :32].sum(1), torch.zeros(8))
        prompts, answers = batch["input_ids"].split([32, 4], dim=1)
    assert prompts.shape == (groups * completions, 32)
    assert prompts.unique(dim=0).size(0) == groups
    assert answers.shape == (groups * completions, 4)
    assert answers.unique(dim=0).size(0) == groups * completions


def test_a_shared_prompt_has_4096_tokens_and_completions_512() -> None:
    method, workload, tokens = parse_case("grpo-shared-prompt")
    (example,) = Case(method, "trl", tokens, workload).examples
    assert (example.prompt, example.completions) == (4096, (512,) * 8)


@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_warm_up_steps_of_long_sequences_are_short(method: str, tmp_path) -> None:  # type: ignore[no-untyped-def]
    run = Run(2, str(tmp_path), short_steps=1, short_tokens=16)
    batch = first_batch(Case(method, "trl", TOKENS), run)
    assert batch["completion_ids" if method == "grpo" else "input_ids"].size(1) == 16
    at_once = first_batch(Case(method, "trl", 16), run)
    ids = "completion_ids" if method == "grpo" else "input_ids"
    assert at_once[ids].size(1) == (12 if method == "grpo" else 16)


def test_both_sides_train_alike_and_leave_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    cases = ["--cases", f"sft:{TOKENS}", f"dpo:{TOKENS}", f"grpo:{TOKENS}", "dpo-ragged:128"]
    cases += ["--sides", "trl", "lowpeak", "--repeats", "1"]
    results = run_json(cases, tmp_path / "steps.json")
    assert len(results) == 8
    for stock, lowpeak in zip(results[::2], results[1::2], strict=True):
        assert (stock["side"], lowpeak["side"]) == ("trl", "lowpeak")
        assert lowpeak["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert lowpeak["gradient_norms"] == pytest.approx(stock["gradient_norms"], rel=1e-5)
        assert len(stock["losses"]) == 2
        assert stock["timed_steps"] == len(stock["step_seconds"]) == 1
        assert stock["ratios_to_trl"] == {}
        assert lowpeak["ratios_to_trl"] == {"seconds": lowpeak["seconds"] / stock["seconds"]}
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, PreTrainedModel)]


@pytest.mark.parametrize("method", ["dpo", "grpo"])
def test_a_shared_prompt_is_computed_once_and_trains_alike(
    method: str, tmp_path, monkeypatch
) -> None:  # type: ignore[no-untyped-def]
    tokens: list[int] = []
    forward = Gemma3MLP.forward

    def counted(self: Gemma3MLP, x: torch.Tensor) -> torch.Tensor:
        tokens.append(x.shape[:-1].numel())
        return forward(self, x)

    monkeypatch.setattr(Gemma3MLP, "forward", counted)
    last_layers = {}
    losses = {}
    for side in ("trl", "lowpeak", "lowpeak-shared"):
        arguments = ["--cases", f"{method}-shared-prompt:36", "--sides", side, "--repeats", "1"]
        (result,) = run_json(arguments, tmp_path / "steps.json")
        # the last is a layer of the last step, computed again in its backward
        last_layers[side] = tokens[-1]
        losses[side] = result["losses"] + result["gradient_norms"]
    assert last_layers["trl"] == last_layers["lowpeak"] == 8 * 36
    prompts = 4 if method == "dpo" else 1
    assert last_layers["lowpeak-shared"] < prompts * 32 + 8 * (4 + 1)
    assert losses["lowpeak"] == pytest.approx(losses["trl"], rel=1e-5, abs=1e-6)
    assert losses["lowpeak-shared"] == pytest.approx(losses["trl"], rel=1e-5, abs=1e-6)


def test_the_table_has_a_row_a_case() -> None:
    stream = io.StringIO()
    arguments = ["--trainers", "grpo", "--lengths", str(TOKENS), "--repeats", "1"]
    assert main([*TINY, *arguments], stream) == 0
    rows = [line for line in stream.getvalue().splitlines() if line.startswith("| GRPO")]
    assert [row.split("|")[3].strip() for row in rows] == ["trl", "lowpeak"]


def test_timing_ends_when_it_has_taken_enough(tmp_path) -> None:  # type: ignore[no-untyped-def]
    arguments = ["--cases", "grpo:16", "--sides", "trl", "--repeats", "3"]
    (full,) = run_json(arguments, tmp_path / "full.json")
    (cut,) = run_json([*arguments, "--enough-seconds", "0"], tmp_path / "cut.json")
    assert (full["timed_steps"], len(full["losses"])) == (3, 4)
    assert (cut["timed_steps"], len(cut["losses"])) == (1, 2)


def test_a_profile_has_the_work_of_one_step_after_the_timed_ones(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "profile.txt"
    arguments = ["--cases", "grpo:16", "--sides", "lowpeak", "--repeats", "1"]
    (result,) = run_json([*arguments, "--profile", str(path)], tmp_path / "steps.json")
    assert result["timed_steps"] == 1
    assert len(result["losses"]) == 3
    lines = path.read_text().splitlines()
    assert lines[0] == "grpo, 16 tokens, lowpeak"
    (forward,) = [line for line in lines if line.startswith("| lowpeak::lm_head_forward ")]
    assert forward.split("|")[4].strip() == "1"


def test_a_profile_is_of_one_case() -> None:
    with pytest.raises(SystemExit):
        main([*TINY, "--cases", "grpo:16", "--profile", "profile.txt"])


@pytest.mark.parametrize("text", ["sft-ragged", "ppo", "grpo:8k", "dpo-"])
def test_a_case_that_there_is_not_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        parser().parse_args(["--cases", text])


def test_a_case_that_fails_is_shown_with_its_reason() -> None:
    options = parser().parse_args(["--config", "tiny", "--device", "cpu", "--dtype", "float32"])
    result = run_case(Case("sft", "trl", 0), options, build_tokenizer(500))
    assert result.failure is not None
    assert result.seconds is None


def make_cublas_take_its_workspaces() -> None:
    """One of 32 MiB a thread (this one, and autograd's), kept until the process ends (H200)."""
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
        torch.nn.functional.linear(x, x, x[0]).sum().backward()
        torch.bmm(x[None], x[None]).sum().backward()


@pytest.mark.cuda
def test_memory_of_a_case_is_free_after_it() -> None:
    arguments = ["--config", "tiny", "--lengths", "64", "--warmup", "1", "--repeats", "1"]
    make_cublas_take_its_workspaces()
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert main(arguments, io.StringIO()) == 0
    gc.collect()
    assert torch.cuda.memory_allocated() <= before


@pytest.mark.cuda
def test_activations_are_what_a_step_adds_to_weights_and_optimizer_states(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "steps.json"
    arguments = ["--config", "tiny", "--cases", "sft:512", "--sides", "trl", "--repeats", "1"]
    assert main([*arguments, "--json", str(path)], io.StringIO()) == 0
    (result,) = json.loads(path.read_text())["results"]
    parameters = build_model("tiny", torch.float32, CPU).num_parameters()
    # bfloat16 weights and two Adam states were there before; gradients are made during the step.
    assert result["peak_bytes"] - result["activation_bytes"] >= 3 * 2 * parameters
    assert result["activation_bytes"] >= 2 * parameters


@pytest.mark.cuda
def test_a_profile_on_a_gpu_has_its_kernels(tmp_path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "profile.txt"
    arguments = ["--config", "tiny", "--cases", "sft:512", "--sides", "trl", "--repeats", "1"]
    assert main([*arguments, "--profile", str(path)], io.StringIO()) == 0
    kernels, waits = path.read_text().split("calls in which the host may wait")
    assert "| kernel " in kernels
    assert "elementwise_kernel" in kernels
    assert "aten::" not in kernels.replace("at::native", "")
    assert "cudaDeviceSynchronize" in waits
