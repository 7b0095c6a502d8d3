"""The transformer's two-layer perceptron."""

from __future__ import annotations

from torch import Tensor, nn


class Mlp(nn.Module):
    """Linear, GELU (exact, by erf, unless ``approximate="tanh"``), linear.

    Shape: ``(..., dim)`` -> the same. Keys: ``fc1.*``, ``fc2.*`` (timm's names).
    """

    def __init__(self, dim: int, hidden_dim: int, drop: float = 0.0, approximate: str = "none") -> None:
        super().__init__()
        self.fc1 = nn.Linear(dim, hidden_dim)
        self.act = nn.GELU(approximate)
        self.drop1 = nn.Dropout(drop)
        self.fc2 = nn.Linear(hidden_dim, dim)
        self.drop2 = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        """Act on each token by itself."""
        x = self.drop1(self.act(self.fc1(x)))
        return self.drop2(self.fc2(x))
