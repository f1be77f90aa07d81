"""Where the documents of a batch begin and end, as the attention kernels need it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """The tokens of a batch [B, S], read row by row, split into documents.

    Args:
        cu_seq_lens: [documents + 1] int32: 0, then the end of each document.
        longest: number of tokens of the longest document, or an upper bound of it.
    """

    cu_seq_lens: Tensor
    longest: int

    def to(self, device: torch.device) -> Documents:
        """The same documents, their ends on `device`."""
        if self.cu_seq_lens.device == device:
            return self
        return Documents(self.cu_seq_lens.to(device), self.longest)


def rows_as_documents(rows: int, length: int, device: torch.device | str) -> Documents:
    """Each row of a batch [rows, length] as one document. No synchronisation."""
    ends = torch.arange(0, (rows + 1) * length, length, dtype=torch.int32, device=device)
    return Documents(ends, length)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def documents_from_ids(sequence_ids: Tensor) -> Documents:
    """The runs of equal ids in the rows of `sequence_ids` [B, S]. Two device synchronisations."""
    ids = sequence_ids.flatten(0, 1)
    is_start = torch.ones_like(ids, dtype=torch.bool)
    is_start[1:] = ids[1:] != ids[:-1]
    is_start[:: sequence_ids.size(1)] = True
    starts = is_start.nonzero().squeeze(1)
    ends = torch.cat([starts, starts.new_tensor([ids.numel()])])
    return Documents(ends.to(torch.int32), int(ends.diff().max()))
