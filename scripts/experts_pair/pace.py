"""Steps of an optimizer for as many seconds as there are, whatever the machine."""

import math
import time

import torch
from torch import Tensor, nn

WARM_UP = 100  # steps
LEAST = 0.02  # of the learning rate, at the end
REPORTS = 20


class Pace:
    """AdamW with a learning rate that falls with the time that has passed, as half a cosine.

    most: the highest learning rate; decay: of matrices
    """

    def __init__(self, model: nn.Module, seconds: float, most: float, decay: float) -> None:
        self.weights = [each for each in model.parameters() if each.requires_grad]
        matrices = [each for each in self.weights if each.dim() > 1]
        others = [each for each in self.weights if each.dim() <= 1]
        groups = [
            {"params": matrices, "weight_decay": decay},
            {"params": others, "weight_decay": 0},
        ]
        is_fused = self.weights[0].is_cuda
        self.optimizer = torch.optim.AdamW(groups, most, (0.9, 0.95), fused=is_fused)
        self.seconds = seconds
        self.most = most
        self.num_steps = 0
        self.num_reports = 0
        self.start = time.monotonic()

    def __str__(self) -> str:
        return f"{self.elapsed():6.1f} s, step {self.num_steps}"

    def elapsed(self) -> float:
        return time.monotonic() - self.start

    def goes_on(self) -> bool:
        return self.elapsed() < self.seconds

    def step(self, loss: Tensor) -> None:
        """Follow the gradient of a loss."""
        share = min(self.elapsed() / self.seconds, 1.0)
        falling = LEAST + (1 - LEAST) * 0.5 * (1 + math.cos(math.pi * share))
        for group in self.optimizer.param_groups:
            group["lr"] = self.most * falling * min((self.num_steps + 1) / WARM_UP, 1.0)
        loss.backward()
        nn.utils.clip_grad_norm_(self.weights, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.num_steps += 1

    def is_to_report(self) -> bool:
        """Whether the next twentieth of the time has begun since this was true."""
        if self.elapsed() * REPORTS < self.num_reports * self.seconds:
            return False
        self.num_reports = int(self.elapsed() * REPORTS / self.seconds) + 1
        return True
