"""ASVD (arXiv 2312.05821) on keys and values alone, as in CSKV's paper: all tokens as latents, no window.

Prefill is exact as for every other method, and a token that is decoded sees itself exactly; ASVD proper puts the
factors in place of the weights, for prefill too.
"""

import copy
from pathlib import Path

import torch
from transformers import AutoConfig, PreTrainedModel

from cskv_cli import statistics
from cskv_cli.checkpoint.classes import cskv_class, empty_base, layer_count
from cskv_cli.checkpoint.layers import compressible_layers, kv_projections
from cskv_cli.checkpoint.load import shape_of
from cskv_cli.factorize import Context, asvd
from cskv_cli.layout import unquantized
from cskv_cli.modeling.cskv_structure import attentions
from cskv_cli.spectrum import rank_at

ALPHA = 0.5


def asvd_model(folder: Path, calibrated: Path, ratio: float, dtype: torch.dtype | str) -> PreTrainedModel:
    """The model in `folder` (a base or an export) with ASVD's factors, as a CSKV model with a window of one token.

    Args:
        calibrated: folder of the calibrate stage.
        ratio: share of the key channels removed, and of the value channels.

    Raises:
        CskvError: the statistics of a layer are missing or damaged.
    """
    config = copy.deepcopy(AutoConfig.from_pretrained(folder))
    layers = compressible_layers(config)
    ranks = lambda rank: [tuple(rank if i in layers else None for i in range(layer_count(config)))] * 2  # noqa: E731
    rank = rank_at(ratio, shape_of(empty_base(config)).channels)
    config.cskv = unquantized(1, 0, *ranks(rank)).model_dump(mode="json")
    model = cskv_class(config).from_pretrained(folder, config=config, dtype=dtype, ignore_mismatched_sizes=True)
    modules = attentions(model)
    for i in layers:
        _set_factors(modules[i], statistics.load_layer(calibrated, i), rank)
    return model.eval()


@torch.no_grad()
def _set_factors(attention: torch.nn.Module, stats: statistics.LayerStatistics, rank: int) -> None:
    context = Context(stats.gram, stats.mean_abs.double(), ALPHA, torch.Generator())
    for name, (weight, bias) in kv_projections(attention).items():
        down, up = (getattr(attention, f"{name}_{end}") for end in ("down", "up"))
        a, b = asvd.factorize(weight.double(), rank, context)
        down.weight.copy_(a.T)
        up.weight.copy_(b.T)
        if bias is not None:
            up.bias.copy_(bias)
