"""Models of other shapes than Llama's, through the whole pipeline to a checkpoint that answers as the base."""

import pytest

from tests.checkpoint.test_export_loads import answers
from tests.cli import compress
from tests.families import write_tiny

FULL_RANK = {"GPTNeoX": 64, "Falcon:new": 32, "Gemma3Vision": 32}


@pytest.mark.parametrize("family", FULL_RANK)
def test_full_rank_answers_as_the_base_in_both_versions(family, tmp_path, tokenizer, text):
    write_tiny(tmp_path, tokenizer, text, family)
    rank = FULL_RANK[family]
    compress(tmp_path, "--rank-k", rank, "--rank-v", rank, "--window", 4, "--sinks", 2)
    base = answers(tmp_path / "base", trust=False)
    for legacy in (False, True):
        ours = answers(tmp_path / "run" / "export", legacy=legacy)
        assert (ours["class"], ours["cache"]) == (f"CSKV{base['class']}", "CSKVCache")
        assert ours["transformers"].startswith("4.57.6" if legacy else "5.")
        for what in ("greedy", "beams", "second"):
            assert ours[what] == base[what], (what, legacy)
        assert sum(map(sum, ours["logits"])) == pytest.approx(sum(map(sum, base["logits"])), abs=1e-2)
