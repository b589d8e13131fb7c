"""Muon for matrices, Adam for the rest; both states are plain tensors, so a run can be resumed."""

import torch
from torch import Tensor


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """Push the singular values of (…, R, C) towards one.

    Source: Jordan et al. 2024, "Muon: an optimizer for hidden layers"; the quintic iteration.
    """
    x = matrix.float()
    tall = x.shape[-2] > x.shape[-1]
    x = x.transpose(-1, -2) if tall else x
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = x @ x.transpose(-1, -2)
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Muon(torch.optim.Optimizer):
    """Orthogonalised momentum for matrices and stacks of matrices.

    The step has a root mean square of 0.2 lr whatever the shape, as in Moonlight (Liu et al. 2025).
    """

    def __init__(
        self, params: list[Tensor], lr: float, momentum: float = 0.95, decay: float = 0.1
    ) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "decay": decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Apply one update."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                momentum.lerp_(p.grad, 1 - group["momentum"])
                update = orthogonalise(p.grad.lerp(momentum, group["momentum"]))
                p.mul_(1 - group["lr"] * group["decay"])
                p.add_(update, alpha=-0.2 * max(p.shape[-2:]) ** 0.5 * group["lr"])
