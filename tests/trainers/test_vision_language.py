"""A vision-language model trains under SFT, DPO and GRPO as under stock TRL, with a fused head."""

from __future__ import annotations

import json

import methods
import parity
import pytest
import tiny_vision
import torch

import lowpeak_trainers

COLUMNS = {"SFT": ("completion",), "DPO": ("chosen", "rejected"), "GRPO": ()}
LENGTHS = [(4, 6, 3), (7, 2, 9), (3, 11, 5), (9, 4, 4), (5, 8, 8), (6, 3, 12)] * 4


def keywords(method):
    names = COLUMNS[method]
    lengths = [row[: 1 + len(names)] for row in LENGTHS]
    extra = {"ref_model": tiny_vision.llava(seed=1)} if method == "DPO" else {}
    return {
        "train_dataset": tiny_vision.pictures_with(lengths, names),
        "processing_class": tiny_vision.processor(),
        **extra,
    }


@pytest.mark.parametrize("method", COLUMNS)
def test_five_steps_are_those_of_trl(method, tmp_path):
    stock, ours = parity.assert_parity(
        *(
            lambda package=package: methods.build(
                package, method, tmp_path, model=tiny_vision.llava(), **keywords(method)
            )
            for package in methods.PACKAGES.values()
        ),
        online=method in methods.ONLINE,
    )
    for name, weight in stock.model.state_dict().items():
        torch.testing.assert_close(
            ours.model.state_dict()[name], weight, rtol=1e-4, atol=1e-4, msg=name
        )


def test_pictures_reach_the_loss_and_its_gradients(tmp_path):
    """Other pixels, another loss; and the oracle is full logits on the same padded batch."""
    trainer = methods.build(
        lowpeak_trainers, "SFT", tmp_path, model=tiny_vision.llava(), **keywords("SFT")
    )
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    assert batch["attention_mask"].min() == 0
    loss = trainer.compute_loss(trainer.model, dict(batch))
    loss.backward()
    found = {n: p.grad for n, p in trainer.model.named_parameters()}
    model = tiny_vision.llava().to(loss.device)
    wanted = model(**{**batch, "use_cache": False}).loss
    wanted.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=1e-5, msg=name)
    assert found["model.multi_modal_projector.linear_1.weight"].abs().max() > 0
    other = {**batch, "pixel_values": batch["pixel_values"].flip(-1)}
    assert abs(trainer.compute_loss(trainer.model, other) - loss) > 1e-3


def test_config_of_several_models_gets_no_use_cache(tmp_path):
    trainer = methods.build(
        lowpeak_trainers,
        "SFT",
        tmp_path,
        model=tiny_vision.llava(),
        options={"max_steps": 1},
        **keywords("SFT"),
    )
    trainer.train()
    assert "use_cache" not in vars(trainer.model.config)
    assert trainer.model.config.text_config.use_cache is True
    trainer.save_model(tmp_path / "saved")
    assert "use_cache" not in json.loads((tmp_path / "saved" / "config.json").read_text())
