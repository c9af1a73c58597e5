"""Decoding from a method's cache, a token at a time."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from transformers import Cache

from cskv_cli.evaluation.methods import Method
from cskv_cli.evaluation.prefill import Prefill, forward


@dataclass
class Decoded:
    """What came of it.

    Attributes:
        tokens: [rows, at most `count`], chosen greedily.
        logits: [rows, vocabulary], those that the first of them was chosen by.
        cache: as it is afterwards.
    """

    tokens: torch.Tensor
    logits: torch.Tensor
    cache: Cache


@torch.inference_mode()
def decode(method: Method, prefill: Prefill, given: list[list[int]], count: int, stop: Collection[int] = ()) -> Decoded:
    """Go on after a prompt: the tokens `given`, then greedily `count` more, all read as decoding reads them.

    Args:
        given: token ids of each row, all of the same length (0: the first choice is the prompt's own, which is exact).
        stop: ids that end a row; decoding ends when all rows have one.
    """
    cache, mask = prefill.fill(method.model, method.new_cache()), prefill.mask
    tokens = list(torch.tensor(given, dtype=torch.long, device=mask.device).unbind(1))
    chosen = [] if tokens else [prefill.logits.argmax(-1)]
    first = prefill.logits
    ended = _ends(chosen[0], stop) if chosen else torch.zeros(len(mask), dtype=torch.bool, device=mask.device)
    with method.ready():
        for i in range(len(tokens) + count - 1):
            if len(chosen) == count or ended.all():
                break
            mask = torch.cat([mask, mask.new_ones(len(mask), 1)], dim=1)
            ids = tokens[i] if i < len(tokens) else chosen[-1]
            logits = forward(method.model, cache, ids[:, None], mask)
            if i + 1 < len(tokens):
                continue
            first = first if chosen else logits
            chosen.append(logits.argmax(-1))
            ended |= _ends(chosen[-1], stop)
    return Decoded(torch.stack(chosen, dim=1), first, cache)


def _ends(tokens: torch.Tensor, stop: Collection[int]) -> torch.Tensor:
    return torch.isin(tokens, torch.tensor(sorted(stop), dtype=tokens.dtype, device=tokens.device))
