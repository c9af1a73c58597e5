"""KIVI on the held-out part of a search: what its bytes buy without a cut of the rank."""

import torch
from transformers import PreTrainedModel

from cskv_cli.data.recall import Window
from cskv_cli.evaluation import methods
from cskv_cli.evaluation.baselines.kivi import cache_bytes
from cskv_cli.evaluation.divergence import divergence
from cskv_cli.evaluation.methods import Method
from cskv_cli.modeling.modeling_cskv import CACHE
from cskv_cli.search.options import Frame
from cskv_cli.search.simulator import Exact

KIVI_BITS = (4, 2)


def kivi_bytes(frame: Frame, bits: int) -> int:
    """True bytes of its cache in all layers that can be compressed."""
    shape = frame.shape
    head_dim = shape.channels // shape.heads
    return len(frame.layers) * cache_bytes(bits, shape.channels * shape.copies, head_dim, frame.tokens)


@torch.inference_mode()
def kivi_divergences(model: PreTrainedModel, bits: int, windows: list[Window], exacts: list[Exact]) -> list[float]:
    """KL(full cache || KIVI) of each window, the mean over its scored tokens; those of one prefill go side by side."""
    method, results = methods.kivi(model, bits), {}
    for prefill in {window.prefill for window in windows}:
        chosen = [i for i, window in enumerate(windows) if window.prefill == prefill]
        kls = _decoded(method, [windows[i] for i in chosen], [exacts[i] for i in chosen])
        results |= dict(zip(chosen, kls, strict=True))
    return [results[i] for i in range(len(windows))]


def _decoded(method: Method, windows: list[Window], exacts: list[Exact]) -> list[float]:
    ids = torch.stack([window.ids for window in windows]).to(method.model.device)
    prefill, sums, seen = windows[0].prefill, [0.0] * len(windows), [0] * len(windows)
    first = [ids[:, :prefill]] if prefill else []
    position, cache = max(prefill - 1, 0), method.new_cache()  # of the token that predicts
    with method.ready():
        for chunk in [*first, *ids[:, prefill:-1].split(1, dim=1)]:
            predicted = method.model(chunk, use_cache=True, logits_to_keep=1, **{CACHE: cache}).logits[:, -1]
            for row, window in enumerate(windows):
                if window.scored[position]:
                    exact = exacts[row].logits[seen[row]]
                    sums[row] += divergence(exact[None], predicted[row : row + 1]).item()
                    seen[row] += 1
            position += 1
    return [total / count for total, count in zip(sums, seen, strict=True)]
