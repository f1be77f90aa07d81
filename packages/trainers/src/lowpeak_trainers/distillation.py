"""On-policy distillation: the student's generations, scored against a teacher's distribution."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
import trl
from torch import Tensor
from trl.models import prepare_deepspeed
from trl.trainer.utils import create_model_from_path

from .fused_forward import why_head_is_off
from .offloading import OffloadingConfig
from .padding_free import IGNORE_INDEX
from .reference import temporarily
from .teacher import ScoredByTeacher
from .token_budget.distillation import GroupedRedirection

logger = logging.getLogger("lowpeak.trainers")

# What a batch may hold for the backbone of a vision-language model.
_MULTIMODAL = (
    "pixel_values",
    "image_grid_thw",
    "pixel_attention_mask",
    "spatial_shapes",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class DistillationConfig(OffloadingConfig, trl.DistillationConfig):
    """Settings of `trl.DistillationConfig` and `lowpeak.MemoryConfig`, and `shared_vocabulary`."""

    shared_vocabulary: bool = field(
        default=False,
        metadata={
            "help": "Allow a student and a teacher whose vocabularies differ in size, as when they "
            "were padded differently over one tokenizer: the divergence is taken over the tokens "
            "that both have, renormalized. False refuses such a pair."
        },
    )


class DistillationMixin(ScoredByTeacher):
    """Gives a DistillationTrainer that follows it in the bases the divergence of lowpeak.

    `class Mine(DistillationMixin, MyDistillationTrainer)` needs nothing else.

    Raises:
        ValueError: at construction, for `shared_vocabulary` where it cannot be served; in the first
            step, for a model whose logits lowpeak cannot compute.
    """

    # Set by the trainer that follows in the bases.
    use_vllm: bool
    generation_config: Any
    generation_kwargs: dict[str, Any]

    _distils: ClassVar[bool] = True

    def __init__(
        self,
        model: Any,
        teacher_model: Any = None,
        args: Any = None,
        *further: Any,
        **keywords: Any,
    ) -> None:
        shared = isinstance(args, DistillationConfig) and args.shared_vocabulary
        # TRL refuses vocabularies of different sizes, but takes no teacher from subclasses that
        # have one of their own.
        teacher_of_trl = None if shared else teacher_model
        super().__init__(model, teacher_of_trl, args, *further, **keywords)
        config = self._memory_config()
        config.validate_memory_config()
        reason = why_head_is_off(config)
        state = "on" if reason is None else f"off, by {reason}; TRL's own is used"
        logger.info("fused divergence: %s in %s", state, type(self).__name__)
        if shared and teacher_model is not None:
            if reason is not None:
                raise ValueError(
                    f"shared_vocabulary=True needs lowpeak's divergence, which {reason} switched "
                    "off: drop one of the two"
                )
            self._take_teacher(teacher_model)
        if self.teacher_model is not None:
            self._arrange_teacher(config)

    def _take_teacher(self, teacher: Any) -> None:
        """Load and prepare the teacher as TRL does; keep the student to the shared tokens."""
        if isinstance(teacher, str):
            teacher = self._load_teacher(teacher)
        elif self.args.teacher_model_init_kwargs is not None:
            raise ValueError(
                "teacher_model_init_kwargs is set, but teacher_model is a model already: "
                "drop the option, or pass the name of the model"
            )
        sizes = [m.config.get_text_config().vocab_size for m in (self.model, teacher)]
        if sizes[0] > sizes[1]:
            self._suppress(range(sizes[1], sizes[0]))
        self.teacher_model = (
            prepare_deepspeed(teacher, self.accelerator)
            if self.is_deepspeed_enabled
            else self.accelerator.prepare_model(teacher, evaluation_mode=True)
        )

    def _load_teacher(self, name: str) -> Any:
        keywords = dict(self.args.teacher_model_init_kwargs or {})
        dtype = keywords.get("dtype")
        keywords["dtype"] = dtype if dtype in ("auto", None) else getattr(torch, dtype)
        if self.args.teacher_model_revision is not None:
            keywords.setdefault("revision", self.args.teacher_model_revision)
        if self.args.distributed_state.distributed_type in ("MULTI_GPU", "DEEPSPEED"):
            keywords["device_map"] = None
        keywords.setdefault("trust_remote_code", self.args.trust_remote_code)
        return create_model_from_path(name, **keywords)

    def _suppress(self, tokens: range) -> None:
        """Keep the student from generating what the teacher cannot read."""
        if self.use_vllm:
            raise ValueError(
                f"the student has {len(tokens)} tokens more than the teacher, which vLLM would "
                "generate and the teacher could not read: set use_vllm=False, or cut the student's "
                f"vocabulary with resize_token_embeddings({tokens.start})"
            )
        suppressed = [*(self.generation_config.suppress_tokens or []), *tokens]
        self.generation_config.suppress_tokens = suppressed
        self.generation_kwargs["suppress_tokens"] = suppressed

    @contextmanager
    def _grouped(self, model: Any) -> Iterator[Any]:
        groups = GroupedRedirection(
            self._forward_redirection,
            self._compute_loss,
            self._budget,
            lambda parts, told: self._differentiate(model, parts, told),
            self.note_targets,
        )
        with temporarily(self, "_forward_redirection", groups):
            yield model

    def _compute_loss(
        self,
        unwrapped_student: Any,
        inputs: Mapping[str, Any],
        num_items_in_batch: Tensor | int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Loss, sum of the student's entropies and number of scored tokens of this rank."""
        if why_head_is_off(self._memory_config()) is not None:
            stock: Any = super()
            result: tuple[Tensor, Tensor, Tensor] = stock._compute_loss(
                unwrapped_student, inputs, num_items_in_batch
            )
            self.note_targets(result[2])
            return result
        mask = inputs["completion_mask"]
        if "tool_mask" in inputs:
            mask = mask * inputs["tool_mask"]
        tokens = inputs["completion_ids"].masked_fill(mask == 0, IGNORE_INDEX)
        labels = torch.cat([torch.full_like(inputs["prompt_ids"], IGNORE_INDEX), tokens], dim=1)
        divergence, entropy = self._divergence(
            unwrapped_student,
            _backbone_arguments(inputs),
            labels,
            temperature=self.temperature,
            shared_vocabulary=isinstance(self.args, DistillationConfig)
            and self.args.shared_vocabulary,
        )
        count = (mask != 0).sum()
        self.note_targets(count)
        divisor = count.clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        if isinstance(divisor, Tensor):
            divisor = divisor.to(divergence.device)
        return divergence.sum() / divisor, entropy.sum(), count


class DistillationTrainer(DistillationMixin, trl.DistillationTrainer):
    """`trl.DistillationTrainer` with the divergence in tiles: same arguments, same results."""


def _backbone_arguments(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Prompt and completion in one row, and what belongs to their images."""
    arguments = {name: inputs[name] for name in _MULTIMODAL if name in inputs}
    for argument, part in (("input_ids", "ids"), ("attention_mask", "mask")):
        both = [inputs[f"prompt_{part}"], inputs[f"completion_{part}"]]
        arguments[argument] = torch.cat(both, dim=1)
    return arguments
