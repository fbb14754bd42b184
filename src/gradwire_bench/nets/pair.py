"""Whether a user likes an item."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class NeuMF(nn.Module):
    """Neural matrix factorisation (He et al. 2017, arXiv 1708.05031): products of embeddings beside a small network.

    Args:
        users: How many.
        items: How many.
        factors: Predictive factors; the network's embeddings have twice, its first layer four times as many.
    """

    def __init__(self, users: int, items: int, factors: int = 16) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(users, factors), nn.Embedding(items, factors)
        self.deep_users, self.deep_items = nn.Embedding(users, 2 * factors), nn.Embedding(items, 2 * factors)
        for each in (self.users, self.items, self.deep_users, self.deep_items):
            nn.init.normal_(each.weight, std=0.1)
        self.tower = nn.Sequential(
            nn.Linear(4 * factors, 2 * factors), nn.ReLU(), nn.Linear(2 * factors, factors), nn.ReLU()
        )
        self.head = nn.Linear(2 * factors, 1)

    def forward(self, pairs: Tensor) -> Tensor:
        """Scores ``float32[B, 2]`` of no, which is always 0, and yes, for users and items ``int64[B, 2]``."""
        users, items = pairs.unbind(1)
        deep = self.tower(torch.cat((self.deep_users(users), self.deep_items(items)), 1))
        yes = self.head(torch.cat((self.users(users) * self.items(items), deep), 1))
        return torch.cat((torch.zeros_like(yes), yes), 1)
