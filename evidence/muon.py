"""Muon, for convolutions too: torch's own takes matrices only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

_COEFFICIENTS = 3.4445, -4.7750, 2.0315
"""Of the polynomial whose repetition brings every singular value near 1 (Jordan and others, 2024)."""


def orthogonalized(matrix: Tensor, repeats: int = 3) -> Tensor:
    """Nearly the orthogonal matrix next to this one: its singular vectors, with values of about 1.

    Small singular values need more repeats to come near 1.

    >>> torch.linalg.svdvals(orthogonalized(torch.diag(torch.tensor([3.0, 2.0, 1.0])))).min() > 0.6
    tensor(True)
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = (matrix.T if tall else matrix) / (matrix.norm() + 1e-7)
    for _ in range(repeats):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    """Steps of convolutions are orthogonal matrices and their weights have a fixed length; all else has plain SGD.

    ``lr`` is the rate of convolutions, ``rest`` times that the rate of all else; both follow one schedule.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, rest: float, weight_decay: float) -> None:
        given = list(parameters)
        groups: list[dict[str, Any]] = [
            {"params": [p for p in given if p.ndim == 4], "momentum": 0.6},
            {"params": [p for p in given if p.ndim < 4], "momentum": 0.85, "lr": rest * lr},
        ]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step, with Nesterov's momentum."""
        for group in self.param_groups:
            for parameter in group["params"]:
                gradient = parameter.grad
                if gradient is None:
                    continue
                if parameter.ndim < 4:
                    gradient = gradient.add(parameter, alpha=group["weight_decay"])
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(gradient)
                state["momentum"].mul_(group["momentum"]).add_(gradient)
                change = gradient.add(state["momentum"], alpha=group["momentum"])
                if parameter.ndim == 4:
                    parameter.mul_(len(parameter) ** 0.5 / parameter.norm())
                    change = orthogonalized(change.flatten(1)).view(parameter.shape)
                parameter.add_(change, alpha=-group["lr"])
