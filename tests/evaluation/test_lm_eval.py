"""The command of docs/evaluation.md: lm-evaluation-harness on an exported checkpoint, without this package.

Skipped where lm_eval is not installed; it is not among the dev dependencies, since it brings some thirty packages.
"""

import copy
import json
import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from cskv_cli.checkpoint.load import load_base, load_checkpoint
from tests.cli import compress
from tests.conftest import WORDS

pytestmark = pytest.mark.skipif(find_spec("lm_eval") is None, reason="lm_eval is not installed: pip install lm-eval")

TASKS = {
    "tiny_generation": "output_type: generate_until\ndoc_to_target: 'w1'\n"
    "generation_kwargs: {until: [], do_sample: false, max_gen_toks: 12}\nmetric_list: [{metric: exact_match}]\n",
    "tiny_choice": "output_type: multiple_choice\ndoc_to_choice: [w1, w2]\n"
    "doc_to_target: 0\nmetric_list: [{metric: acc}]\n",
}
QUESTIONS = [" ".join(WORDS[(7 * row + 3 * i) % 90] for i in range(30)) for row in range(3)]


@pytest.fixture
def responses(tiny):
    """What a model answers to each task, by the harness."""
    (tiny / "rows.jsonl").write_text("".join(json.dumps({"q": question}) + "\n" for question in QUESTIONS))
    data = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {tiny}/rows.jsonl}}}}\ntest_split: test\n"
    for name, text in TASKS.items():
        (tiny / f"{name}.yaml").write_text(f"task: {name}\ndoc_to_text: '{{{{q}}}}'\n{data}{text}")

    def run(model):
        out = tiny / f"out-{model.name}"
        arguments = f"pretrained={model},trust_remote_code=True"
        command = [sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", arguments, "--device", "cpu"]
        command += ["--tasks", ",".join(TASKS), "--include_path", tiny, "--batch_size", "1"]
        command += ["--output_path", out, "--log_samples"]
        environment = os.environ | {"HF_MODULES_CACHE": str(tiny / "modules"), "HF_DATASETS_CACHE": str(tiny / "data")}
        done = subprocess.run([*map(str, command)], env=environment, capture_output=True, text=True)
        files = {name: list(out.rglob(f"samples_{name}_*.jsonl")) for name in TASKS}
        assert all(files.values()), done.stderr  # its tables need packages that may be missing: the samples do not
        rows = {name: [json.loads(line) for line in file.read_text().splitlines()] for name, (file,) in files.items()}
        return {name: [row["resps"] for row in found] for name, found in rows.items()}

    return run


def test_generation_reads_the_compressed_cache_and_log_likelihood_does_not(tiny, tokenizer, responses):
    ending = copy.deepcopy(tokenizer)  # the harness needs a token that ends a text
    ending.eos_token = "<s>"
    ending.save_pretrained(tiny / "base")
    compress(tiny, "--rank-k", 5, "--rank-v", 5, "--window", 4, "--sinks", 1)
    export, base = tiny / "run" / "export", tiny / "base"
    ours, theirs = responses(export), responses(base)
    assert ours["tiny_choice"] == theirs["tiny_choice"]
    assert ours["tiny_generation"] != theirs["tiny_generation"]
    models = load_checkpoint(export, "cpu", torch.float32), load_base(base, "cpu", torch.float32)
    for model, found in zip(models, (ours, theirs), strict=True):
        for question, ((answer,),) in zip(QUESTIONS, found["tiny_generation"], strict=True):
            ids = torch.tensor([ending(question)["input_ids"]])
            tokens = model.generate(ids, do_sample=False, max_new_tokens=12, eos_token_id=1)[0, 30:]
            assert answer.split() == ending.decode(tokens).split("<s>")[0].split()
