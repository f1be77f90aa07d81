"""The divergence between two causal LMs, each cut between backbone and head."""

from __future__ import annotations

import torch
from torch import Tensor

from lowpeak import LogitTransform, fused_divergence
from lowpeak.models import SplitCausalLM

from .own_divergence import own_divergence


def split_divergence(
    student: SplitCausalLM,
    student_hidden: Tensor,
    teacher: SplitCausalLM,
    teacher_hidden: Tensor,
    *,
    beta: float,
    temperature: float,
    mask: Tensor,
    shared_vocabulary: bool,
    scratch_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    """Divergence and student entropy [...], as `lowpeak.fused_divergence`, 0 where masked.

    Args:
        student: gave `student_hidden`.
        student_hidden: [..., H].
        teacher: gave `teacher_hidden`.
        teacher_hidden: [..., Ht].
        beta: see `lowpeak.fused_divergence`.
        temperature: of both softmaxes.
        mask: [...], 0 for what does not count.
        shared_vocabulary: compare the tokens that both have, renormalized.
        scratch_bytes: for the tiles; None lets lowpeak choose.

    Raises:
        ValueError: for heads on two devices, or of two sizes without `shared_vocabulary`.
    """
    student_weight, student_bias = student.weight_and_bias()
    teacher_weight, teacher_bias = teacher.weight_and_bias()
    device = student_weight.device
    if teacher_weight.device != device:
        raise ValueError(
            f"the student's LM head is on {device}, the teacher's on {teacher_weight.device}: "
            "place both on one device in their device_map"
        )
    student_hidden, teacher_hidden, mask = (
        x.to(device) for x in (student_hidden, teacher_hidden, mask)
    )
    if student.transform is None or teacher.transform is None:
        sizes = {student_weight.size(0), teacher_weight.size(0)}
        if len(sizes) > 1 and not shared_vocabulary:
            raise ValueError(f"student and teacher have vocabularies of {sizes} tokens")
        return own_divergence(
            student_hidden,
            student.logits,
            teacher_hidden,
            teacher.logits,
            beta=beta,
            temperature=temperature,
            mask=mask,
            vocabulary=min(sizes),
            scratch_bytes=scratch_bytes,
        )
    result = fused_divergence(
        student_hidden,
        student_weight,
        teacher_hidden,
        teacher_weight,
        beta=beta,
        mask=mask,
        student_bias=student_bias,
        teacher_bias=teacher_bias,
        student_transform=_at_temperature(student.transform, temperature),
        teacher_transform=_at_temperature(teacher.transform, temperature),
        # all losses made of it are sums or means over the tokens
        expected_grads=mask.float() if torch.is_grad_enabled() else None,
        vocabulary="shared" if shared_vocabulary else "same",
        scratch_bytes=scratch_bytes,
    )
    return result.divergence, result.student_entropy


def _at_temperature(transform: LogitTransform, temperature: float) -> LogitTransform:
    return LogitTransform(transform.scale, transform.softcap, temperature)
