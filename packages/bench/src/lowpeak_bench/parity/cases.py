"""The rows of the parity table: every trainer, every loss, every option that changes the loss.

Loss types are read off TRL's own documentation of its options, so that a new one is not missed.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import trl

# Twice over the same completions: the second time the old log-probabilities differ.
TWO_ITERATIONS: dict[str, Any] = {"num_iterations": 2, "learning_rate": 1e-2}


@dataclass(frozen=True)
class Case:
    """One pair of runs.

    Args:
        trainer: "SFT", "DPO", ...
        loss: the loss type.
        option: what else was set, in words; empty for the defaults.
        options: what the config gets.
        model: "llama", "mixtral" (a mixture of experts), "lora" (an adapter on llama), "reward",
            "reward lora", or "calm": llama with small logits, trained in small steps, for losses
            that magnify the rounding of log ratios.
        same_as_default: the option must not change the loss, as an alias or another route to it.
    """

    trainer: str
    loss: str
    option: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "llama"
    same_as_default: bool = False

    @property
    def name(self) -> str:
        """Unique, and readable as a pytest id."""
        return "-".join(filter(None, (self.trainer, self.loss, self.option))).replace(" ", "_")

    def same_runs_as(self, other: Case) -> bool:
        """Whether nothing that matters to the runs differs."""
        mine, theirs = ((case.trainer, dict(case.options), case.model) for case in (self, other))
        return mine == theirs

    @property
    def default(self) -> Case:
        """The case to differ from: the same loss and learning rate without the option."""
        kept = {"loss_type", "loss_weights", "learning_rate", "max_completion_length"}
        if self.loss in _NEEDS_SMOOTHING:
            kept.add("label_smoothing")
        if self.trainer == "Distillation" or self.loss == "discopop":
            kept.add("beta")
        options = {name: value for name, value in self.options.items() if name in kept}
        if self.option == "chunked_nll alias":
            options["loss_type"] = "nll"
        model = self.model if self.model == "calm" else _DEFAULT_MODELS[self.trainer]
        return Case(self.trainer, self.loss, options=options, model=model)


_DEFAULT_MODELS = {
    **dict.fromkeys(("SFT", "DPO", "KTO", "GRPO", "RLOO", "Distillation"), "llama"),
    "Reward": "reward",
}
# EXO is not defined without it, and robust DPO equals sigmoid.
_NEEDS_SMOOTHING = ("exo_pair", "robust")


def all_cases() -> list[Case]:
    """Every row of the table, in its order."""
    groups = (_sft(), _dpo(), _kto(), _grpo(), _rloo(), _distillation(), _reward())
    return [case for group in groups for case in group]


def documented_values(config: Any, option: str) -> list[str]:
    """The quoted values in the help text of one of TRL's options, each once, in order."""
    (found,) = [f for f in dataclasses.fields(config) if f.name == option]
    quoted = re.findall(r"['`]([a-z_]+)['`]", str(found.metadata["help"]))
    return list(dict.fromkeys(quoted))


def loss_types(trainer: str) -> list[str]:
    """The loss types that TRL documents for DPO or GRPO."""
    config = {"DPO": trl.DPOConfig, "GRPO": trl.GRPOConfig}[trainer]
    others = ("loss_weights", "max_completion_length", "sequence")
    return [name for name in documented_values(config, "loss_type") if name not in others]


def _filled(case: Case) -> Case:
    """The case with rows filled up to 16 tokens: each by TRL, the packed one by lowpeak."""
    options = {**case.options, "pad_to_multiple_of": 16}
    return dataclasses.replace(case, option="filled to 16", options=options, same_as_default=True)


def _sft() -> Iterator[Case]:
    def case(loss: str, option: str = "", **options: Any) -> Case:
        return Case("SFT", loss, option, {"loss_type": loss, **options})

    yield case("nll")
    yield case("dft")
    yield Case(
        "SFT", "nll", "chunked_nll alias", {"loss_type": "chunked_nll"}, same_as_default=True
    )
    for loss in ("nll", "dft"):
        flat = case(loss, "padding free", padding_free=True, max_length=None)
        yield dataclasses.replace(flat, same_as_default=True)
    yield case("nll", "packed", packing=True, max_length=32, per_device_train_batch_size=1)
    yield case("nll", "label smoothing", label_smoothing_factor=0.1)
    yield Case("SFT", "nll", "mixture of experts", {"loss_type": "nll"}, "mixtral")
    yield Case("SFT", "nll", "LoRA", {"loss_type": "nll"}, "lora")
    yield _filled(case("nll"))


def _dpo() -> Iterator[Case]:
    def case(loss: str, option: str = "", **options: Any) -> Case:
        own = {"label_smoothing": 0.1} if loss in _NEEDS_SMOOTHING else {}
        if loss == "discopop":  # its gradient magnifies the rounding of log ratios by beta / tau
            own["beta"] = 0.02
        return Case("DPO", loss, option, {"loss_type": [loss], **own, **options})

    def calm_case(loss: str, option: str = "", **options: Any) -> Case:
        slow = case(loss, option, learning_rate=1e-5, **options)
        return dataclasses.replace(slow, model="calm")

    types = loss_types("DPO")
    for loss in types:
        yield calm_case(loss) if loss == "discopop" else case(loss)
    yield Case(
        "DPO", "sigmoid + sft", "", {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.5]}
    )
    yield Case(
        "DPO",
        "sigmoid + bco_pair + sft",
        "",
        {"loss_type": ["sigmoid", "bco_pair", "sft"], "loss_weights": [0.8, 0.2, 1.0]},
    )
    divergences = documented_values(trl.DPOConfig, "f_divergence_type")
    for divergence in (name for name in divergences if name not in (*types, "reverse_kl")):
        for loss in divergences[divergences.index("sigmoid") :]:
            if loss != "sft":  # it has no reference, so no divergence from it
                name = divergence.replace("_", " ")
                yield calm_case(loss, name, f_divergence_type=divergence)
    # one loss that depends on the pair, one on each sequence alone, one on each token alone
    for loss in ("sigmoid", "nca_pair", "sft"):
        if loss != "sft":  # which TRL fails to weigh, and which sums over nothing
            yield case(loss, "use_weighting", use_weighting=True)
            yield case(loss, "ld_alpha", ld_alpha=0.5)
        precompute = case(loss, "precomputed", precompute_ref_log_probs=True)
        yield dataclasses.replace(precompute, same_as_default=True)
    for loss in ("aot", "aot_unpaired"):
        yield case(loss, "label smoothing", label_smoothing=0.1)
    yield case("sigmoid", "beta", beta=0.5)
    yield calm_case("discopop", "tau", discopop_tau=0.5)
    yield Case("DPO", "sigmoid", "mixture of experts", {"loss_type": ["sigmoid"]}, "mixtral")
    yield Case("DPO", "sigmoid", "LoRA", {"loss_type": ["sigmoid"]}, "lora")
    yield _filled(case("sigmoid"))


def _kto() -> Iterator[Case]:
    for loss in ("kto", "apo_zero_unpaired"):
        base = {"loss_type": loss}
        yield Case("KTO", loss, "", base)
        yield Case("KTO", loss, "weights", {**base, "desirable_weight": 1.5})
        yield Case(
            "KTO", loss, "precomputed", {**base, "precompute_ref_log_probs": True},
            same_as_default=True,
        )  # fmt: skip
        yield Case("KTO", loss, "LoRA", base, "lora")
    yield Case("KTO", "kto", "mixture of experts", {"loss_type": "kto"}, "mixtral")
    yield _filled(Case("KTO", "kto", "", {"loss_type": "kto"}))


def _grpo() -> Iterator[Case]:
    def case(loss: str, option: str = "", model: str = "llama", **options: Any) -> Case:
        return Case("GRPO", loss, option, {"loss_type": loss, **options}, model)

    for loss in loss_types("GRPO"):
        yield case(loss)
        yield case(loss, "KL", beta=0.04)
        sequence: dict[str, Any] = {"importance_sampling_level": "sequence"}
        # no ratio differs from 1, and every token of a sequence has one advantage
        yield dataclasses.replace(case(loss, "sequence level", **sequence), same_as_default=True)
        yield case(loss, "sequence level, KL", **sequence, beta=0.04)
        yield case(loss, "old log-probs", **TWO_ITERATIONS)
        yield case(loss, "sequence level, old log-probs", **sequence, **TWO_ITERATIONS)
    for loss in ("dapo", "grpo"):
        yield case(loss, "entropy bonus", entropy_coef=0.01)
        # Completions of one prompt have the same entropy at their first token. Longer ones keep
        # the threshold clear of such ties, which rounding would break.
        longer: dict[str, Any] = {"max_completion_length": 16}
        yield case(loss, "top entropy quantile", top_entropy_quantile=0.25, **longer)
    yield case(
        "dapo", "adaptive entropy bonus", use_adaptive_entropy=True, entropy_target=6.0,
        entropy_coef=0.01, entropy_coef_delta=0.01,
    )  # fmt: skip
    yield case("dapo", "delta", **TWO_ITERATIONS, delta=1.05)
    yield case("dapo", "off-policy mask", **TWO_ITERATIONS, off_policy_mask_threshold=0.05)
    yield case("dapo", "KL without ratio", beta=0.04, use_bias_correction_kl=False)
    yield case("dapo", "temperature", temperature=0.7)
    yield case("dapo", "clip higher", **TWO_ITERATIONS, epsilon=0.01, epsilon_high=0.05)
    yield case("dapo", "truncated completions masked", mask_truncated_completions=True)
    yield case("dapo", "mixture of experts", "mixtral")
    yield case("dapo", "LoRA, KL", "lora", beta=0.04)
    yield _filled(case("dapo"))


def _rloo() -> Iterator[Case]:
    def case(option: str = "", model: str = "llama", **options: Any) -> Case:
        return Case("RLOO", "rloo", option, options, model)

    yield case()
    yield case("without KL", beta=0.0)
    yield case("two iterations", **TWO_ITERATIONS)
    yield case("normalized advantages", normalize_advantages=True)
    yield case("temperature", temperature=0.7)
    yield case("mixture of experts", "mixtral")
    yield case("LoRA", "lora")
    yield _filled(case())


def _distillation() -> Iterator[Case]:
    for beta, loss in ((0.0, "forward KL"), (0.5, "JSD"), (1.0, "reverse KL")):
        yield Case("Distillation", loss, "", {"beta": beta})
        yield Case("Distillation", loss, "temperature", {"beta": beta, "temperature": 0.7})
        yield Case("Distillation", loss, "LoRA", {"beta": beta}, "lora")
    yield _filled(Case("Distillation", "JSD", "", {"beta": 0.5}))


def _reward() -> Iterator[Case]:
    yield Case("Reward", "logsigmoid", model="reward")
    yield Case("Reward", "logsigmoid", "centred", {"center_rewards_coefficient": 0.1}, "reward")
    yield Case("Reward", "logsigmoid", "LoRA", model="reward lora")
    yield _filled(Case("Reward", "logsigmoid", model="reward"))
