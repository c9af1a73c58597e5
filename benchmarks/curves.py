"""Reconstruction from several inits: the paper's Figure 4, and the table behind it.

    python -m benchmarks.curves --run RUN --test wiki-test.txt [--steps 96] [--work curves]

RUN is calibrated. At ratio 0.8 without sinks, the paper's cache, `random`, `asvd` and `whitened` are scored as they are
and after training on the paper's loss; `curves.png` in the work folder has the held-out loss of all three.
"""

import argparse
import json
import shutil
from pathlib import Path

from benchmarks.generalization import SCORED, cskv
from cskv_cli.training.curve import JSONL, plot_curves

METHODS = ("random", "asvd", "whitened")
CACHE = "--ratio-k", "0.8", "--ratio-v", "0.8", "--sinks", "0"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--steps", type=int, default=96)
    parser.add_argument("--lr", default="5e-5")
    parser.add_argument("--work", type=Path, default=Path("curves"))
    options = parser.parse_args()
    curves = {}
    print("| init | perplexity | after reconstruction | held-out squared error | after |\n|---|---|---|---|---|")
    for method in METHODS:
        run = options.work / method
        if not run.exists():
            shutil.copytree(
                options.run, run, ignore=lambda _, names: {"init", "finetune", "quantize", "export"} & {*names}
            )
        training = "--objective", "reconstruction", "--steps", options.steps, "--lr", options.lr, "--mix", "retrieval=0"
        cskv("init", "--run", run, "--method", method, *CACHE)
        report = cskv("finetune", "--run", run, *training, "--patience", 99)["held_out"]
        perplexity = []
        for factors in ("init", "finetune"):
            cskv("export", "--run", run, "--factors", factors)
            scores = cskv("eval", run / "export", "--data", options.test, *SCORED)
            perplexity.append(f"{scores['cskv']['perplexity']:.2f}")
        loss = [f"{report[when]['text']:.3g}" for when in ("before", "after")]
        print(f"| {method} | {' | '.join(perplexity + loss)} |", flush=True)
        curves[method] = [json.loads(line) for line in (run / "finetune" / JSONL).read_text().splitlines()]
    plot_curves(options.work / "curves.png", curves, "reconstruction")


if __name__ == "__main__":
    main()
