"""DIN (Deep Interest Network; Zhou et al., KDD 2018): the candidate looks at the user's history.

    persia-runtime train --config run.toml --model.name din:DIN

reads the fields `item` and `history` of clicks.toml by their names; write your own names in
``TARGET`` and ``HISTORY``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from runtime.models.inputs import Embeddings, InputShape

TARGET, HISTORY = "item", "history"


class DIN(nn.Module):
    """[B, D] dense features and the rows of the fields -> logits [B, T]."""

    samples_are_independent = True
    """No sample sees another, so ranks of one process may be computed as one batch."""

    def __init__(self, shape: InputShape, hidden: Sequence[int]) -> None:
        super().__init__()
        dim = shape.one_dim("DIN")
        self.target = shape.columns(TARGET)

        # The activation unit: how much one event of the history says about the candidate.
        self.activation = nn.Sequential(nn.Linear(4 * dim, 32), nn.ReLU(), nn.Linear(32, 1))

        # The tower over what is known of user and candidate, and the interest that was read.
        layers: list[nn.Module] = []
        width = shape.width
        for wide in hidden:
            layers += [nn.Linear(width, wide), nn.ReLU()]
            width = wide
        self.tower = nn.Sequential(*layers, nn.Linear(width, shape.tasks))

    def forward(self, dense: Tensor, embeddings: Embeddings) -> Tensor:
        """One logit a task."""
        target = embeddings.pooled[:, self.target]  # [B, d]
        events, mask = embeddings.sequences[HISTORY], embeddings.masks[HISTORY]  # [B, L, d]

        # Candidate and event side by side, with their difference and product.
        candidate = target.unsqueeze(1).expand_as(events)
        pairs = torch.cat([candidate, events, candidate - events, candidate * events], dim=2)

        # The paper sums without a softmax, so that a long interest weighs more than a short one.
        weights = self.activation(pairs).squeeze(2) * mask  # [B, L]
        interest = (weights.unsqueeze(2) * events).sum(1)
        return self.tower(torch.cat([embeddings.pooled, interest, dense], dim=1))
