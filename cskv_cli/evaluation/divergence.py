"""How far what a model predicts with a smaller cache is from what it predicts with its full one."""

import torch
from torch import nn
from transformers import PreTrainedModel

from cskv_cli.data.recall import Window


def log_probabilities(model: PreTrainedModel, window: Window) -> torch.Tensor:
    """At the tokens that a window scores, [scored, vocabulary], float32."""
    ids, scored = window.ids[None].to(model.device), window.scored.nonzero()[:, 0]
    logits = model(ids, use_cache=False, logits_to_keep=scored.to(ids.device)).logits[0]
    return logits.float().log_softmax(-1)


def divergence(full: torch.Tensor, compressed: torch.Tensor) -> torch.Tensor:
    """KL(full || compressed) of log-probabilities [tokens, vocabulary], the mean over the tokens, in nats."""
    return nn.functional.kl_div(compressed, full, reduction="batchmean", log_target=True)
