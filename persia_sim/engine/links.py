"""The links of a run by name: two for each NIC and each rack's uplink, out and in."""

from __future__ import annotations

from collections.abc import Sequence

from persia_sim.model.placement import Placement


class Links:
    """A NIC is the number of its way out; its way in has the number after it."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.capacities: list[float] = []
        self._racks: list[int] = []
        self._uplinks: list[int] = []

    def nics(self, role: str, racks: Sequence[int], rates: Sequence[float]) -> list[int]:
        """New NICs of a role, each in its rack."""
        first = len(self.names)
        for number, (rack, rate) in enumerate(zip(racks, rates, strict=True)):
            self.names += [f"{role} {number} out", f"{role} {number} in"]
            self.capacities += [rate, rate]
            self._racks += [rack, rack]
        return list(range(first, len(self.names), 2))

    def uplinks(self, places: Placement) -> None:
        """The racks' uplinks; from now on messages between racks cross them."""
        racks = range(len(places.uplinks))
        self._uplinks = self.nics("uplink", racks, places.uplinks)

    def path(self, sender: int, receiver: int) -> tuple[int, ...]:
        """From one NIC to another: out, over both racks' uplinks where they differ, and in."""
        if self._uplinks:
            here, there = self._racks[sender], self._racks[receiver]
            if here != there:
                return sender, self._uplinks[here], self._uplinks[there] + 1, receiver + 1
        return sender, receiver + 1
