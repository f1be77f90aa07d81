"""The last tensors of a forward, which backward asks for before a copy of them is worth it."""

from lowpeak.offload.prefetch import Generation


class Margin:
    """Learns from one forward and backward which units the next should not copy.

    The units at the end of a forward that were still on their device when backward asked (those of
    the head: logits, say) were copied for nothing. In the next forward they stay, if it saves as
    many units as the one before, as far as half of the window holds them.
    """

    def __init__(self) -> None:
        self._units = 0
        self._first = 0

    def learn(self, generation: Generation, most_bytes: int) -> None:
        """Look at a forward whose backward has begun."""
        first, total = generation.made, 0
        while (nbytes := generation.found_on_device.get(first - 1)) is not None:
            total += nbytes
            if total > most_bytes:
                break
            first -= 1
        self._units, self._first = generation.made, first

    def keeps(self, place: int, made: int) -> bool:
        """Whether the unit at a place stays, when so many units were saved up to now."""
        return made <= self._units and place >= self._first
