"""What trainers share that score a student's tokens by a teacher's distribution."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.utils import is_peft_model
from torch import Tensor, nn

from lowpeak.config import MemoryConfig
from lowpeak.models import SplitCausalLM
from lowpeak.offload import kept_on_device

from .assembly import row_options_of, why_head_forbids_packing
from .attention import choose_teacher_attention
from .mixin import LowpeakMixin
from .padding_free import IGNORE_INDEX, PackedRow, PaddingFree
from .padding_free_switch import switch_padding_free
from .split_divergence import split_divergence


class ScoredByTeacher(LowpeakMixin):
    """Mixin for trainers with a `teacher_model` and a divergence from it."""

    # Set by the trainer that follows in the bases.
    beta: float
    temperature: float
    teacher_model: Any
    _forward_redirection: Any

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self._teacher_layout = PaddingFree()
        self._splits: WeakKeyDictionary[nn.Module, SplitCausalLM] = WeakKeyDictionary()
        super().__init__(*args, **keywords)

    @property
    def computes_divergence(self) -> bool:
        """Whether lowpeak has computed a divergence for this trainer."""
        return len(self._splits) > 0

    def _arrange_teacher(self, config: MemoryConfig) -> None:
        """Attention and layout of the teacher, whatever those of the student."""
        switch_padding_free(
            self._teacher_layout,
            f"the teacher of {type(self).__name__}",
            self.args,
            row_options_of(self.args).padding_free,
            choose_teacher_attention(self, config),
            lambda: why_head_forbids_packing(config),
        )

    def _divergence(
        self,
        unwrapped_student: Any,
        arguments: dict[str, Any],
        labels: Tensor,
        *,
        temperature: float,
        shared_vocabulary: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Divergence and student entropy where a label is predicted, 0 elsewhere.

        Both [B, S - 1], or [1, T] where student and teacher run on a packed row.

        Args:
            unwrapped_student: inside the wrapper whose forward is running.
            arguments: of both backbones; the batch is [B, S].
            labels: [B, S] tokens, -100 where there is nothing to score.
            temperature: of both softmaxes.
            shared_vocabulary: see `split_divergence`.
        """
        student = self._split(unwrapped_student)
        unwrapped_teacher = self.accelerator.unwrap_model(self.teacher_model)
        teacher = self._split(unwrapped_teacher)
        student_row, teacher_row = self._rows(arguments, labels)
        student_hidden = student.hidden_states(
            labels, **(arguments if student_row is None else student_row.arguments)
        )
        self.teacher_model.eval()
        with torch.no_grad():
            # by way of the wrapper's forward, in which FSDP and DeepSpeed gather the weights
            teacher_hidden = self._forward_redirection(
                self.teacher_model,
                unwrapped_teacher,
                teacher.hidden_states,
                labels,
                **(arguments if teacher_row is None else teacher_row.arguments),
            )
        if student_row is not None and teacher_row is not None:
            # each token is predicted one position before it
            targets = nn.functional.pad(student_row.labels[:, 1:], (0, 1), value=IGNORE_INDEX)
        else:
            targets = labels[:, 1:]
            student_hidden = _padded(student_row, student_hidden, labels.size(1))[:, :-1]
            teacher_hidden = _padded(teacher_row, teacher_hidden, labels.size(1))[:, :-1]
        with kept_on_device():
            return split_divergence(
                student,
                student_hidden,
                teacher,
                teacher_hidden,
                beta=self.beta,
                temperature=temperature,
                mask=targets != IGNORE_INDEX,
                shared_vocabulary=shared_vocabulary,
                scratch_bytes=self._memory_config().lm_head_scratch_bytes,
            )

    def _rows(
        self, arguments: dict[str, Any], labels: Tensor
    ) -> tuple[PackedRow | None, PackedRow | None]:
        """The packed row for the student and for the teacher, None for a padded batch."""
        layouts = (self._layout, self._teacher_layout)
        chosen = next((layout for layout in layouts if layout.on), None)
        if chosen is None:
            return None, None
        row = chosen(arguments, labels)
        student_row, teacher_row = (row if layout.on else None for layout in layouts)
        return student_row, teacher_row

    def _split(self, model: Any) -> SplitCausalLM:
        plain = self.accelerator.unwrap_model(model, keep_torch_compile=False)
        base = plain.get_base_model() if is_peft_model(plain) else plain
        if base not in self._splits:
            self._splits[base] = SplitCausalLM(base)
        return self._splits[base]


def _padded(row: PackedRow | None, hidden: Tensor, length: int) -> Tensor:
    # a model may have put its image tokens, or virtual ones, before the batch
    return hidden[:, -length:] if row is None else row.pad(hidden)
