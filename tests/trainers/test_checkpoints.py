"""What lowpeak saves, stock TRL resumes, and the other way round."""

from __future__ import annotations

from pathlib import Path

import parity
import pytest
import tiny
import torch
import trl
from peft import LoraConfig, PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import lowpeak_trainers

LENGTHS = [5, 17, 9, 30, 3, 12, 22, 7] * 2
STOCK = (trl.SFTTrainer, trl.SFTConfig)
OURS = (lowpeak_trainers.SFTTrainer, lowpeak_trainers.SFTConfig)


def train(kind, folder, *, resume=None, peft=False):
    """Four steps with a checkpoint after the second."""
    trainer_class, config = kind
    trainer = trainer_class(
        model=tiny.llama(),
        args=config(
            **parity.settings(
                folder,
                max_steps=4,
                save_strategy="steps",
                save_steps=2,
                gradient_accumulation_steps=1,
            )
        ),
        train_dataset=tiny.documents(LENGTHS),
        processing_class=tiny.tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj"]) if peft else None,
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def checkpoint(folder):
    return str(folder / "checkpoint-2")


def weights(trainer):
    return {name: p.detach().cpu() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("peft", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize(
    ("first", "second"), [(OURS, STOCK), (STOCK, OURS)], ids=["to_trl", "back"]
)
def test_resume_under_the_other_trainer(first, second, peft, tmp_path):
    whole = train(STOCK, tmp_path / "stock", peft=peft)
    train(first, tmp_path / "first", peft=peft)
    # TRL counts num_tokens from 0 again, so a resumed run is compared with a resumed run.
    wanted = train(STOCK, tmp_path / "again", resume=checkpoint(tmp_path / "stock"), peft=peft)
    resumed = train(second, tmp_path / "second", resume=checkpoint(tmp_path / "first"), peft=peft)
    assert resumed.state.global_step == 4
    parity.assert_same_logs(resumed, wanted)
    for name, weight in weights(whole).items():
        error = (weights(resumed)[name] - weight).abs().max().item()
        # Adam turns the rounding of a gradient near 0 into a step of its full size
        assert error <= 1e-4 * max(1.0, weight.abs().max().item()), name


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def test_saved_files_keys_and_card_are_those_of_trl(tmp_path):
    folders = {}
    for name, kind in (("stock", STOCK), ("ours", OURS)):
        trainer = train(kind, tmp_path / name / "run")
        folders[name] = tmp_path / name / "run"
        trainer.save_model(folders[name] / "final")
        trainer.create_model_card(model_name="tiny", dataset_name="words", tags="one-more")
    assert files(folders["ours"]) == files(folders["stock"])
    saved = {
        name: load_file(folder / "final/model.safetensors") for name, folder in folders.items()
    }
    assert saved["ours"].keys() == saved["stock"].keys()
    cards = {name: (folder / "README.md").read_text() for name, folder in folders.items()}
    for card in cards.values():
        header = card.split("---")[1]
        assert all(f"- {tag}\n" in header for tag in ("trl", "sft", "one-more"))
        assert "trained with SFT" in card
    reloaded = AutoModelForCausalLM.from_pretrained(folders["ours"] / "final")
    for name, weight in reloaded.named_parameters():
        assert torch.equal(weight, saved["ours"][name])


def test_saved_adapter_is_the_trained_one(tmp_path):
    trainer = train(OURS, tmp_path, peft=True)
    trainer.save_model(tmp_path / "adapter")
    reloaded = PeftModel.from_pretrained(tiny.llama(), tmp_path / "adapter")
    ids = torch.tensor([[7, 8, 9]])
    trained = trainer.model.cpu().eval()
    with torch.no_grad():
        assert torch.equal(reloaded.eval()(input_ids=ids).logits, trained(input_ids=ids).logits)
