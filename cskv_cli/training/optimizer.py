"""AdamW with warm-up and cosine, whose whole state is tensors and a step number."""

import math

import torch
from torch import nn

WARM_UP = 10
BETAS = 0.9, 0.95
DEFAULT_LR = {"distill": 0.02, "reconstruction": 5e-5}


def make_optimizer(parameters: dict[str, nn.Parameter], objective: str, lr: float | None) -> torch.optim.AdamW:
    """AdamW without weight decay, a group for each parameter.

    The rate of `distill` is a share of each tensor's mean magnitude: factors of different layers and methods differ in
    scale by orders of magnitude. That of `reconstruction` is the paper's, the same for all.
    """
    lr = DEFAULT_LR[objective] if lr is None else lr
    groups = []
    for name, parameter in parameters.items():
        size = parameter.detach().abs().mean().item() if objective == "distill" else 1.0
        groups.append({"params": [parameter], "name": name, "peak_lr": lr * size})
    return torch.optim.AdamW(groups, lr=lr, betas=BETAS, weight_decay=0)


def set_rate(optimizer: torch.optim.AdamW, step: int, steps: int) -> float:
    """Set the rates for step `step` (from 0) of `steps`; return their share of the peak."""
    share = min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
    for group in optimizer.param_groups:
        group["lr"] = share * group["peak_lr"]
    return share


def state_tensors(optimizer: torch.optim.AdamW) -> dict[str, torch.Tensor]:
    """First and second moments by `m.` and `v.` and the parameter's name; empty before the first step."""
    tensors = {}
    for group in optimizer.param_groups:
        if state := optimizer.state[group["params"][0]]:
            tensors |= {f"m.{group['name']}": state["exp_avg"], f"v.{group['name']}": state["exp_avg_sq"]}
    return tensors


def restore_state(optimizer: torch.optim.AdamW, tensors: dict[str, torch.Tensor], step: int) -> None:
    """Set the moments as they were after `step` steps."""
    for group in optimizer.param_groups:
        parameter = group["params"][0]
        if f"m.{group['name']}" in tensors:
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step)),
                "exp_avg": tensors[f"m.{group['name']}"].to(parameter.device),
                "exp_avg_sq": tensors[f"v.{group['name']}"].to(parameter.device),
            }
