"""The README's Python examples run, on a tiny model and data that need no download."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
HUB_MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
WORDS = ("<pad>", "<eos>", "the", "cat", "sat", "on", "mat")


@pytest.fixture
def model_folder(tmp_path: Path) -> str:
    """A tiny Llama and its tokenizer, saved as a hub would hold them."""
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, "<pad>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>", unk_token="<pad>"
    )
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
    )
    folder = tmp_path / "model"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def run(example: str, model_folder: str, **names: Any) -> dict[str, Any]:
    """Execute an example with the hub's model replaced by a local one.

    Where there is no GPU the arguments say so: transformers and TRL refuse their defaults there.
    """
    text = example.replace(HUB_MODEL, model_folder)
    if not torch.cuda.is_available():
        text = text.replace('"trained"', '"trained", use_cpu=True, bf16=False')
    namespace = dict(names)
    exec(compile(text, str(README), "exec"), namespace)
    return namespace


def example_with(text: str) -> str:
    (found,) = [example for example in EXAMPLES if text in example]
    return found


def test_examples_are_short() -> None:
    assert len(EXAMPLES) == 3
    assert max(len(example.splitlines()) for example in EXAMPLES) <= 12


# transformers 5.24 warns of a renamed method that TRL 1.16 and peft call.
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_trl_example(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    texts = datasets.Dataset.from_dict({"text": ["the cat sat on the mat"] * 4})
    monkeypatch.setattr(datasets, "load_dataset", lambda name, split: texts)
    monkeypatch.chdir(tmp_path)
    state = run(example_with("SFTTrainer"), model_folder)["trainer"].state
    assert state.global_step > 0
    assert 0 < state.log_history[-1]["train_loss"] < 10


def test_training_loop_example(model_folder: str, device: torch.device) -> None:
    namespace = run(example_with("fused_lm_head"), model_folder)
    with torch.no_grad():
        logits = namespace["hidden"][0, :4] @ namespace["weight"].T / 0.7
        expected = logits.log_softmax(-1).gather(-1, namespace["targets"][0, :4, None])
    torch.testing.assert_close(
        namespace["head"].log_probs[0, :4], expected.squeeze(-1), atol=1e-3, rtol=1e-5
    )
    assert namespace["weight"].grad.norm() > 0


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")
def test_transformers_example(
    model_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.chdir(tmp_path)
    rows = {"input_ids": [[2, 3, 4, 5]] * 4, "labels": [[2, 3, 4, 5]] * 4}
    namespace = run(
        example_with("reduce_memory"), model_folder, tokenized=datasets.Dataset.from_dict(rows)
    )
    assert namespace["trainer"].state.global_step > 0
    assert "forward" not in vars(namespace["model"])
