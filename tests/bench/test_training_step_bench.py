"""The training step benchmark trains on what it says, and both sides train alike."""

import gc
import io
import json

import pytest
import torch
from transformers import PreTrainedModel

from lowpeak_bench.training_cases import (
    GEMMA_3_1B,
    Case,
    build_model,
    build_tokenizer,
    build_trainer,
)
from lowpeak_bench.training_step import main, parser, run_case, step_clock

TOKENS = 40
CPU = torch.device("cpu")

# Raised by TRL and transformers themselves.
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]


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
    model = build_model("tiny", torch.float32, CPU)
    tokenizer = build_tokenizer(model.config.vocab_size)
    trainer = build_trainer(
        case, model, tokenizer, steps=1, output=str(tmp_path), callback=step_clock(CPU, 0)
    )
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    if method == "grpo":
        ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
        trained = batch["completion_mask"].sum()
    else:
        ids = batch["input_ids"]
        trained = batch["completion_mask" if method == "dpo" else "attention_mask"].sum()
    assert ids.shape == (rows, TOKENS)
    assert ids.unique().numel() > TOKENS // 2
    assert trained == rows * (TOKENS - (0 if method == "sft" else case.prompt_tokens))


def test_both_sides_train_alike_and_leave_nothing(tmp_path) -> None:  # type: ignore[no-untyped-def]
    stream = io.StringIO()
    path = tmp_path / "steps.json"
    arguments = ["--config", "tiny", "--dtype", "float32", "--device", "cpu", "--json", str(path)]
    arguments += ["--lengths", str(TOKENS), "--repeats", "1", "--warmup", "1"]
    assert main(arguments, stream) == 0
    results = json.loads(path.read_text())["results"]
    assert [result["failure"] for result in results] == [None] * 6
    for stock, lowpeak in zip(results[::2], results[1::2], strict=True):
        assert (stock["side"], lowpeak["side"]) == ("trl", "lowpeak")
        assert lowpeak["losses"] == pytest.approx(stock["losses"], rel=1e-5)
        assert lowpeak["gradient_norms"] == pytest.approx(stock["gradient_norms"], rel=1e-5)
        assert len(stock["losses"]) == 2
        assert len(stock["step_seconds"]) == 1
    assert "| GRPO" in stream.getvalue()
    gc.collect()
    assert not [one for one in gc.get_objects() if isinstance(one, PreTrainedModel)]


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
