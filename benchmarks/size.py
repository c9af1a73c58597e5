"""Memory of compressing a model of 7 billion parameters, as the operating system measures it (docs/performance.md).

    OMP_NUM_THREADS=1 python -m benchmarks.size FOLDER [MODEL]

FOLDER gets the model (14.5 GB; Mistral-7B's shape in bfloat16, the same random weights in every layer), then the run;
an export of a folder's own weights is a copy, so 30 GB in all. MODEL is another folder, to be taken as it is.
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import MistralConfig, MistralForCausalLM, PreTrainedTokenizerFast

SHAPE = dict(
    vocab_size=32000, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, sliding_window=None, tie_word_embeddings=False,
)  # fmt: skip
FLAGS = ["--data", "builtin", "--samples", "2", "--seq-len", "64", "--ratio-k", "0.5", "--ratio-v", "0.5", "--json"]


def write_model(folder: Path, shape: dict = SHAPE) -> None:
    """A model with random weights in bfloat16, a shard for each layer, and a tokenizer of bytes."""
    folder.mkdir(parents=True, exist_ok=True)
    config = MistralConfig(**shape, dtype="bfloat16", architectures=["MistralForCausalLM"])
    config.save_pretrained(folder)
    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in MistralForCausalLM(config).state_dict().items()}
    torch.manual_seed(0)
    parts = {name.split(".")[2] if ".layers." in name else "outer": {} for name in shapes}
    for name, size in shapes.items():
        first = name.replace(f".layers.{name.split('.')[2]}.", ".layers.0.") if ".layers." in name else name
        part = parts[name.split(".")[2] if ".layers." in name else "outer"]
        known = parts["0"].get(first)
        part[name] = torch.randn(size).mul_(0.02).bfloat16() if known is None else known
    weight_map = {}
    for i, tensors in enumerate(parts.values(), start=1):
        shard = f"model-{i:05}-of-{len(parts):05}.safetensors"
        save_file(tensors, folder / shard, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(tensors, shard)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    letters = {chr(i): i for i in range(256)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)


def peak(*arguments: object) -> dict:
    """Runs Python with these arguments; its largest resident memory (ru_maxrss, the VmHWM of /proc) and its time."""
    began = time.monotonic()
    pid = os.posix_spawn(sys.executable, [sys.executable, *map(str, arguments)], os.environ)
    _, status, usage = os.wait4(pid, 0)
    assert status == 0, arguments
    seconds = {"wall_s": time.monotonic() - began, "processor_s": usage.ru_utime + usage.ru_stime}
    return {"peak_mb": usage.ru_maxrss * 1024 / 1e6} | seconds


def main(folder: Path, model: Path | None = None) -> None:
    """Prints one line for the idle process, and one for each verb."""
    if model is None:
        model = folder / "model"
        if not (model / "tokenizer.json").exists():
            write_model(model)
    idle = peak("-c", "import torch, cskv_cli.pipeline, cskv_cli.stages.calibrate, cskv_cli.stages.export")
    print("idle", idle, flush=True)
    for name, more in (("plan", ["--dry-run"]), ("compress", [])):
        used = peak("-m", "cskv_cli", "compress", model, "--run", folder / "run", *FLAGS, *more)
        print(name, used | {"above_idle_mb": used["peak_mb"] - idle["peak_mb"]}, flush=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
