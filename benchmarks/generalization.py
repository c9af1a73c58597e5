"""What calibration on one kind of text costs on another.

    python -m benchmarks.generalization MODEL --train wiki-valid.txt --test wiki-test.txt [--work DIR]

Calibrates on the file, on `builtin`, on `self`, on builtin and self together (the default of cskv) and on all three,
and scores each at ratios 0.5 and 0.8 on the test file, on `builtin` and on text the model wrote. Windows are of 1024
tokens.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

SCORED = ["--samples", "3", "--seq-len", "1024"]


def cskv(*arguments) -> dict:
    command = [sys.executable, "-m", "cskv_cli", *map(str, arguments), "--json"]
    return json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)


def write_self_text(base: Path, path: Path) -> None:
    """Text that the model writes, with another seed than calibration uses."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from cskv_cli.data.self_sample import sample_from_model

    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForCausalLM.from_pretrained(base, dtype="float32")
    ids = sample_from_model(model, tokenizer, count=4, seq_len=1024, seed=4321)
    path.write_text("\n".join(tokenizer.batch_decode(ids)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--train", required=True)
    parser.add_argument("--test", required=True)
    parser.add_argument("--work", type=Path, default=Path("generalization"))
    parser.add_argument("--samples", type=int, default=48)
    options = parser.parse_args()
    sources = {
        "file": [options.train],
        "builtin": ["builtin"],
        "self": ["self"],
        "builtin + self": ["builtin", "self"],
        "all three": [options.train, "builtin", "self"],
    }
    tests = {"file": options.test, "builtin": "builtin", "self": str(options.work / "self.txt")}
    print(
        "| calibrated on | ratio | "
        + " | ".join(f"{name} (base)" for name in tests)
        + " |\n|---|---|"
        + "---|" * len(tests)
    )
    for name, data in sources.items():
        run = options.work / name.replace(" + ", "-").replace(" ", "-")
        flags = [flag for source in data for flag in ("--data", source)]
        for ratio in (0.5, 0.8):
            ratios = "--ratio-k", ratio, "--ratio-v", ratio
            report = cskv(
                "compress", options.model, "--run", run, *flags, "--samples", options.samples, *SCORED[2:], *ratios
            )
            if not Path(tests["self"]).exists():
                source = json.loads((run / "base" / "manifest.json").read_text())["config"]["source"]
                converted = list((run / "converted").glob("*/config.json"))
                write_self_text(converted[0].parent if converted else Path(source), Path(tests["self"]))
            cells = []
            for text in tests.values():
                scores = cskv("eval", report["checkpoint"], "--data", text, *SCORED)
                cells.append(f"{scores['cskv']['perplexity']:.2f} ({scores['base']['perplexity']:.2f})")
            print(f"| {name} | {ratio} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
