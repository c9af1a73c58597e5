"""Read a text once, save the cache, and ask about it in other processes.

python -m benchmarks.prompt_cache CHECKPOINT TEXT TOKENS
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache
from transformers.utils import logging

from cskv_cli.modeling.modeling_cskv import CACHE

logging.set_verbosity_error()
logging.disable_progress_bar()
QUESTIONS = "\n\nWhat is this text about?", "\n\nName one thing that it warns of."


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """What it returns, and the seconds that it took."""
    began = time.perf_counter()
    return call(), time.perf_counter() - began


def answer(model: Any, ids: torch.Tensor, question: torch.Tensor, cache: Any) -> list[int]:
    """20 greedy tokens after the text and a question."""
    asked = torch.cat([ids, question], dim=1)
    settings = dict(max_new_tokens=20, do_sample=False, attention_mask=torch.ones_like(asked))
    return model.generate(asked, **settings, **{CACHE: cache})[0, asked.shape[1] :].tolist()


@torch.no_grad()
def main(checkpoint: str, text: str, tokens: str, *saved: str) -> None:
    """Without `saved`, read the text, and run again with a file, the number of a question and the answer expected."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, trust_remote_code=True, dtype=torch.bfloat16).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    encode = lambda string: tokenizer(string, return_tensors="pt")["input_ids"]  # noqa: E731
    ids = encode(Path(text).read_text())[:, : int(tokens)]
    if saved:
        path, question, expected = saved
        cache, seconds = timed(lambda: model.load_cache(path))
        got = answer(model, ids, encode(QUESTIONS[int(question)]), cache)
        same = got == json.loads(expected)
        print(f"question {question}: loaded in {seconds:.2f} s, {len(got)} tokens, the same: {same}")
        print(f"   {tokenizer.decode(got, skip_special_tokens=True)!r}")
        return
    full = DynamicCache(config=model.config)
    model(ids, logits_to_keep=1, **{CACHE: full})
    base = sum(layer.keys.nbytes + layer.values.nbytes for layer in full.layers)
    output, seconds = timed(lambda: model(ids, use_cache=True, logits_to_keep=1))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "text.safetensors")
        _, saving = timed(lambda: model.save_cache(output[CACHE], path))
        size = path.stat().st_size
        print(f"{ids.shape[1]} tokens read in {seconds:.1f} s, saved in {saving:.2f} s")
        print(f"file: {size / 1e6:.2f} MB; the base's cache: {base / 1e6:.2f} MB; {size / base:.1%}")
        for i, question in enumerate(QUESTIONS):
            expected = answer(model, ids, encode(question), model.load_cache(path) if i else output[CACHE])
            command = [sys.executable, "-m", "benchmarks.prompt_cache", checkpoint, text, tokens, str(path), str(i)]
            subprocess.run([*command, json.dumps(expected)], check=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
