"""What TRL 1.16 promises of the options around its fused head, kept by lowpeak."""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager

import methods
import oracle
import parity
import pytest
import tiny
import torch
import transformers
import trl
from transformers import LlamaForCausalLM, PreTrainedModel
from transformers.models.llama import modeling_llama

import lowpeak_trainers

each_method = pytest.mark.parametrize("method", methods.METHODS)
ours = lowpeak_trainers
CONFIGS = [
    getattr(ours, f"{method}Config") for method in (*methods.METHODS, "Reward", "Distillation")
]
each_config = pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.__name__)


@contextmanager
def future_warning(pattern):
    """As pytest.warns, which would raise the warnings that peers give each other as errors."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    messages = [str(one.message) for one in caught if one.category is FutureWarning]
    assert any(re.search(pattern, message) for message in messages), messages


@each_method
def test_liger_kernels_warn_and_leave_the_head_alone(method, tmp_path):
    with future_warning(r"use_liger_kernel=True.*removed in v2.*use_kernels"):
        trainer = methods.build(
            ours,
            method,
            tmp_path,
            options={"use_liger_kernel": True, "liger_kernel_config": {"swiglu": False}},
        )
    assert trainer.args.liger_kernel_config == {
        "swiglu": False,
        "fused_linear_cross_entropy": False,
    }
    assert parity.has_lowpeak_head(trainer)


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")
@each_method
def test_liger_fused_cross_entropy_is_refused(method, tmp_path):
    options = {
        "use_liger_kernel": True,
        "liger_kernel_config": {"fused_linear_cross_entropy": True},
    }
    with pytest.raises(ValueError, match=r"fused_linear_cross_entropy.*not supported"):
        methods.build(ours, method, tmp_path, options=options)


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")
@each_method
def test_liger_is_applied_at_train_start_without_its_cross_entropy(method, tmp_path, monkeypatch):
    calls = []

    def apply(model, config):
        calls.append((type(model), config))

    monkeypatch.setattr(transformers.trainer, "apply_liger_kernel", apply)
    trainer = methods.build(ours, method, tmp_path, options={"use_liger_kernel": True})
    assert calls == []
    trainer.train()
    assert calls == [(LlamaForCausalLM, {"fused_linear_cross_entropy": False})]
    assert parity.has_lowpeak_head(trainer)


@pytest.fixture
def llama_is_restored(monkeypatch):
    """Liger patches the classes of the module, for good; here until the test ends."""
    for name in ("LlamaRMSNorm", "LlamaMLP", "apply_rotary_pos_emb"):
        monkeypatch.setattr(modeling_llama, name, vars(modeling_llama)[name])
    for kind in (modeling_llama.LlamaRMSNorm, modeling_llama.LlamaMLP, LlamaForCausalLM):
        monkeypatch.setattr(kind, "forward", vars(kind)["forward"])


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")
@pytest.mark.usefixtures("llama_is_restored")
@each_method
def test_liger_binds_its_layers_and_not_the_forward(method, tmp_path):
    """Its kernels need a GPU to run, but what it replaces can be seen anywhere."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    trainer = methods.build(ours, method, tmp_path, options={"use_liger_kernel": True})
    model = trainer.model
    fused = vars(model)["forward"]
    transformers.trainer.apply_liger_kernel(model, trainer.args.liger_kernel_config)
    assert vars(model)["forward"] is fused
    for module in (model.model.norm, model.model.layers[0].mlp):
        assert vars(module)["forward"].__module__.startswith("liger_kernel")


@pytest.mark.filterwarnings("ignore:`use_liger_kernel=True` is deprecated")
@pytest.mark.usefixtures("llama_is_restored")
@pytest.mark.cuda
@each_method
def test_liger_layers_and_the_fused_head_train_together(method, tmp_path):
    """Liger rounds in other places, so the bound is that of a few float32 roundings a layer."""
    pytest.importorskip("liger_kernel", reason="liger-kernel is not installed")
    trainers = [
        methods.build(
            ours, method, tmp_path, options={"use_liger_kernel": liger, "gradient_checkpointing": 0}
        )
        for liger in (False, True)
    ]
    record = parity.CompletionRecord()
    if method in methods.ONLINE:
        record.record(trainers[0])
        record.replay(trainers[1])
    for trainer in trainers:
        trainer.train()
    assert trainers[1].model.model.norm.forward.__module__.startswith("liger_kernel")
    assert parity.has_lowpeak_head(trainers[1])
    parity.assert_same_logs(trainers[1], trainers[0], tolerance=1e-3)


def test_hub_kernels_are_passed_to_the_model(tmp_path, monkeypatch):
    """The kernels themselves come from the Hub: what is tested is that the argument arrives."""
    seen = []
    load = PreTrainedModel.from_pretrained.__func__

    def spying(cls, *args, use_kernels=False, **kwargs):
        seen.append(use_kernels)
        return load(cls, *args, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "from_pretrained", classmethod(spying))
    path = tiny.save(tiny.llama(), tmp_path / "model")
    trainer = methods.build(
        ours, "SFT", tmp_path, model=path, options={"model_init_kwargs": {"use_kernels": True}}
    )
    assert seen == [True]
    assert parity.has_lowpeak_head(trainer)


@each_config
@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("use_liger_loss", True, r"use_liger_kernel=True.*model_init_kwargs"),
        ("max_prompt_length", 512, r"overlong prompts in the dataset.*max_length"),
        ("max_seq_length", 512, "use max_length"),
        ("evaluation_strategy", "no", "use eval_strategy"),
        ("rpo_alpha", 0.5, r'loss_type=\["sigmoid", "sft"\] with loss_weights'),
    ],
)
def test_removed_option_says_what_to_do(config, option, value, remedy, tmp_path):
    with pytest.raises(TypeError, match=f"{config.__name__} no longer has {option}.*{remedy}"):
        config(str(tmp_path), bf16=False, **{option: value})


@each_config
def test_unknown_and_several_removed_options(config, tmp_path):
    with pytest.raises(TypeError, match="unexpected keyword argument 'max_lenght'"):
        config(str(tmp_path), max_lenght=3)
    with pytest.raises(TypeError, match=r"no longer has max_seq_length, use_liger_loss\. max_seq_"):
        config(str(tmp_path), use_liger_loss=True, max_seq_length=3)


def test_an_option_that_a_config_still_has_is_not_removed(tmp_path):
    """DPO lost max_completion_length, GRPO has it; a user's config may have any."""
    assert ours.GRPOConfig(str(tmp_path), bf16=False, max_completion_length=7).output_dir
    with pytest.raises(TypeError, match="DPOConfig no longer has max_completion_length"):
        ours.DPOConfig(str(tmp_path), max_completion_length=7)

    class Theirs(ours.DPOConfig):
        def __init__(self, *args, max_prompt_length, **kwargs):
            super().__init__(*args, **kwargs)
            self.max_prompt_length = max_prompt_length

    assert Theirs(str(tmp_path), bf16=False, max_prompt_length=5).max_prompt_length == 5


def test_removed_options_are_really_removed():
    """A remedy for an option that every config has would never be seen."""
    from lowpeak_trainers.removed_options import REMEDIES

    everywhere = set.intersection(*(set(config.__dataclass_fields__) for config in CONFIGS))
    assert not everywhere & REMEDIES.keys()


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m not in methods.ONLINE])
def test_return_outputs_gives_full_logits_and_warns(method, tmp_path):
    trainer = methods.build(ours, method, tmp_path)
    batch = trainer._prepare_inputs(next(iter(trainer.get_train_dataloader())))
    ids, mask = batch["input_ids"], batch["attention_mask"]
    with torch.no_grad():
        alone = trainer.compute_loss(trainer.model, dict(batch))
        with future_warning("recomputed with an extra forward pass"):
            loss, outputs = trainer.compute_loss(trainer.model, dict(batch), return_outputs=True)
        wanted = tiny.llama().to(ids.device)(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(loss, alone)
    torch.testing.assert_close(outputs.logits, wanted, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("method", methods.ONLINE)
def test_online_methods_return_no_outputs(method, tmp_path):
    trainer = methods.build(ours, method, tmp_path)
    with pytest.raises(ValueError, match="does not support returning outputs"):
        trainer.compute_loss(trainer.model, {}, return_outputs=True)


@pytest.mark.parametrize("method", [m for m in methods.METHODS if m not in methods.ONLINE])
def test_compute_metrics_sees_full_logits_and_warns(method, tmp_path):
    shapes = []

    def metrics(prediction):
        logits = prediction.predictions
        shapes.append((logits[0] if isinstance(logits, tuple) else logits).shape)
        return {"seen": 1.0}

    data = methods.keywords_of(method)["train_dataset"].select(range(2))
    trainer = methods.build(ours, method, tmp_path, eval_dataset=data, compute_metrics=metrics)
    with future_warning("recomputed with an extra forward pass"):
        found = trainer.evaluate()
    assert found["eval_seen"] == 1.0
    assert shapes[0][-1] == tiny.VOCABULARY
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*recomputed with an extra forward pass")
        trainer.compute_metrics = None
        oracle.assert_close(trainer.evaluate()["eval_loss"], found["eval_loss"])


@each_method
def test_checkpointing_is_off_when_told(method, tmp_path):
    trainer = methods.build(ours, method, tmp_path, options={"gradient_checkpointing": False})
    modes = []

    class Watch(transformers.TrainerCallback):
        def on_substep_end(self, *args, model=None, **kwargs):
            modes.append(model.is_gradient_checkpointing)

        def on_step_end(self, *args, model=None, **kwargs):
            modes.append(model.is_gradient_checkpointing)

    trainer.add_callback(Watch())
    trainer.train()
    assert modes
    assert not any(modes)
    assert trainer.args.gradient_checkpointing is False


def test_max_length_cuts_prompt_and_completion_of_dpo(tmp_path):
    """Right values: the sequences cut to 10 tokens by hand; a prompt of 10 or more is dropped."""
    pairs = [(4, 6, 3), (7, 9, 5), (8, 4, 8), (10, 3, 3)]
    limit = 10
    trainer = methods.build(
        ours,
        "DPO",
        tmp_path,
        train_dataset=tiny.preferences(pairs),
        options={
            "max_length": limit,
            "max_steps": 1,
            "per_device_train_batch_size": 3,
            "gradient_accumulation_steps": 1,
            "loss_type": "sft",
        },
    )
    assert len(trainer.train_dataset) == 3
    batch = next(iter(trainer.get_train_dataloader()))
    assert batch["input_ids"].shape[1] == limit
    trainer.train()
    model = oracle.in_float64(tiny.llama())
    data = tiny.preferences(pairs)
    kept = []
    for row, (prompt, _, _) in zip(data, pairs[:3], strict=False):
        ids = tiny.tokenizer()(row["prompt"] + row["chosen"])["input_ids"] + [tiny.EOS]
        kept.append(oracle.log_probs(model, ids[:limit])[prompt - 1 :])
    oracle.assert_close(trainer.state.log_history[0]["loss"], -torch.cat(kept).mean().item())


@each_method
def test_d8_several_visible_gpus_are_refused(method, tmp_path, monkeypatch):
    """nn.DataParallel would scatter the batch; the count is what Trainer goes by."""
    for package in (trl, ours):
        monkeypatch.setattr(getattr(package, f"{method}Config"), "n_gpu", property(lambda self: 2))
        with pytest.raises(ValueError, match=r"nn.DataParallel.*accelerate launch"):
            methods.build(package, method, tmp_path)
