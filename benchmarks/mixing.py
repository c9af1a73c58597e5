"""How the statistics of several texts are best put together, in the runs that `benchmarks.generalization` left.

    python -m benchmarks.mixing --work DIR --test wiki-test.txt

Adds the Gram matrices of `builtin` and of `self` by token count (as calibrating on both does) and by trace (both weigh
the same in every layer), factorizes at ratios 0.5 and 0.8, and scores the test file.
"""

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from cskv_cli import statistics
from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.checkpoint.load import load_unfilled
from cskv_cli.data.sources import parse_source
from cskv_cli.data.windows import evaluation_windows
from cskv_cli.evaluation.methods import cskv
from cskv_cli.evaluation.perplexity import compare
from cskv_cli.factorize import METHODS, Context
from cskv_cli.layout import unquantized
from cskv_cli.spectrum import rank_at

Grams = list[torch.Tensor]


def by_count(grams: list[Grams]) -> Grams:
    """Sums: each text weighs as its tokens do."""
    return [sum(layer) for layer in zip(*grams, strict=True)]


def by_trace(grams: list[Grams]) -> Grams:
    """Sums of what has trace 1."""
    return [sum(gram / gram.trace() for gram in layer) for layer in zip(*grams, strict=True)]


def load_grams(run: Path) -> Grams:
    """Of every layer, float64."""
    layers = json.loads((run / "calibrate" / "manifest.json").read_text())["report"]["layers"]
    return [statistics.load_layer(run / "calibrate", i).gram.double() for i in layers]


@torch.no_grad()
def score(model: PreTrainedModel, grams: Grams, rank: int, ids: torch.Tensor) -> float:
    """Perplexity with whitened factors of these Grams put into a CSKV model of that rank."""
    for layer, gram in zip(model.model.layers, grams, strict=True):
        for name, (weight, _) in kv_projections(layer.self_attn).items():
            context = Context(gram, torch.ones(len(gram)), 0.5, torch.Generator())
            a, b = METHODS["whitened"](weight.double(), rank, context)
            getattr(layer.self_attn, f"{name}_down").weight.copy_(a.T)
            getattr(layer.self_attn, f"{name}_up").weight.copy_(b.T)
    return compare([cskv(model)], ids)[0].summary()["cskv"]["perplexity"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--test", required=True)
    options = parser.parse_args()
    runs = [options.work / name for name in ("builtin", "self")]
    source = json.loads((runs[0] / "base" / "manifest.json").read_text())["config"]["source"]
    base = resolve_base(source, revision=None, work_dir=runs[0] / "converted")
    grams, tokenizer = [load_grams(run) for run in runs], AutoTokenizer.from_pretrained(base.folder)
    ids = evaluation_windows([parse_source(options.test)], tokenizer, samples=3, seq_len=1024).ids
    print("| ratio | by token count | by trace |\n|---|---|---|")
    for ratio in (0.5, 0.8):
        ranks = json.loads((runs[0] / "init" / "layout.json").read_text())["rank_k"]
        rank = rank_at(ratio, base.config["num_key_value_heads"] * base.config["head_dim"])
        layout = unquantized(32, 4, (rank,) * len(ranks), (rank,) * len(ranks))
        model = load_unfilled(base.folder, layout, torch.float32)
        print(
            f"| {ratio} | "
            + " | ".join(f"{score(model, f(grams), rank, ids):.2f}" for f in (by_count, by_trace))
            + " |"
        )


if __name__ == "__main__":
    main()
