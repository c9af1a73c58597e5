"""The model card: metadata that the Hub takes for every kind of base, the recipe that made it, and nothing private."""

import json
import re

import pytest
import yaml
from huggingface_hub import ModelCard

from cskv_cli import recipes
from cskv_cli.measurements import Measurement, eval_results
from tests.checkpoint.test_convert import TOKENS, write_gguf
from tests.cli import CALIBRATION, cskv
from tests.fakehub import metadata_errors
from tests.families import base_model
from tests.hub import local_hub

FLAGS = "--rank-k", 8, "--ratio-v", 0.75, "--window", 8, "--sinks", 2


def made(tiny, model, *flags):
    """The card of a compression, and its metadata as huggingface_hub reads it."""
    run = tiny / "run"
    cskv("compress", model, "--run", run, "--data", tiny / "text.txt", *CALIBRATION, *FLAGS, *flags)
    card = (run / "export" / "README.md").read_text()
    assert metadata_errors(card) == [], card
    assert str(tiny) not in card and "null" not in card and "None" not in card and "root" not in card
    return card, ModelCard(card).data.to_dict()


def with_license(folder, front):
    (folder / "README.md").write_text(f"---\n{front}\n---\n# A base\n")
    return folder


def test_a_local_base_without_license(tiny):
    card, data = made(tiny, tiny / "base")
    assert data.keys() == {"library_name", "pipeline_tag", "tags"}
    assert (data["library_name"], data["pipeline_tag"]) == ("transformers", "text-generation")
    assert "# base-cskv" in card and "## Quality" not in card


@pytest.mark.parametrize(
    "front, expected",
    [
        ("license: apache-2.0", {"license": "apache-2.0"}),
        ("license: other\nlicense_name: mine\nlicense_link: LICENSE", {"license": "other", "license_name": "mine"}),
        ("license: My Own", {"license": "other", "license_name": "My Own"}),
        ("license: null", {}),
        ("license: [}", {}),
    ],
)
def test_the_license_is_the_bases(tiny, front, expected):
    _, data = made(tiny, with_license(tiny / "base", front))
    assert {key: data[key] for key in ("license", "license_name") if key in data} == expected


def test_a_hub_base(tiny, monkeypatch, tmp_path):
    with local_hub(monkeypatch, tmp_path) as hub:
        commit = hub.add("org/base", with_license(tiny / "base", "license: mit"))
        card, data = made(tiny, "org/base")
    assert (data["base_model"], data["license"]) == ("org/base", "mit")
    assert "[org/base](https://huggingface.co/org/base)" in card and f"revision: {commit}" in card


def test_a_gguf_base(tiny):
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    model = base_model("Llama", vocab_size=len(TOKENS), tie_word_embeddings=True, rope_parameters=rope)
    path = write_gguf(tiny / "My.Model.gguf", model, extra=[("general.license", "apache-2.0")])
    card, data = made(tiny, path)
    assert data["license"] == "apache-2.0" and "base_model" not in data
    assert "# My.Model-cskv" in card


def test_the_recipe_in_the_card_makes_the_same_checkpoint(tiny):
    card, _ = made(tiny, tiny / "base", "--bits", 4, "--group", 8)
    recipe = yaml.safe_load(re.search(r"```yaml\n(.*?)```", card, re.DOTALL)[1])
    assert recipe["model"] == "base" and recipe["calibrate"]["data"] == ["text.txt"]
    recipe["model"], recipe["calibrate"]["data"] = str(tiny / "base"), [str(tiny / "text.txt")]
    (tiny / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    recipes.read(tiny / "recipe.yaml")
    cskv("compress", "--recipe", tiny / "recipe.yaml", "--run", tiny / "again")
    ours, theirs = (json.loads((tiny / run / "export" / "manifest.json").read_text()) for run in ("again", "run"))
    assert ours["files"] == theirs["files"] and ours["config"] == theirs["config"]


def test_the_memory_table_is_what_inspect_reports(tiny):
    card, _ = made(tiny, tiny / "base")
    size = cskv("inspect", tiny / "run" / "export")["cache_bytes_per_token"]
    assert f"{size['cskv'] / size['base']:.1%} of its cache are left per token" in card
    for tokens in (4096, 32768, 131072):
        base, cskv_bytes = 4 * tokens * 64 * 4, 4 * (tokens * 16 + 10 * 64) * 4 + 4 * tokens
        row = f"| {tokens:,} | {base / 1e6:,.1f} MB | {cskv_bytes / 1e6:,.1f} MB | {cskv_bytes / base:.1%} |"
        assert row in card


def test_the_preview_is_the_card_and_needs_no_export(tiny):
    card, _ = made(tiny, tiny / "base")
    assert cskv("export", "--run", tiny / "run", "--card")["card"] + "\n" == card + "\n"
    cskv("init", "--run", tiny / "run", "--rank-k", 5)
    preview = cskv("export", "--run", tiny / "run", "--card")["card"]
    assert "keys 5, values 16" in preview and "keys 8" in (tiny / "run" / "export" / "README.md").read_text()


def test_results_that_are_no_numbers_stay_out_of_the_metadata():
    result = {"cskv": {"perplexity": float("inf")}, "base": {"perplexity": 2.0}}
    assert eval_results([Measurement("x", "perplexity", (), result), Measurement("x", "other", (), {})]) == []


def test_hub_data_sets_are_named(tiny, monkeypatch):
    monkeypatch.setattr("cskv_cli.data.hub.hub_documents", lambda *_: iter([(tiny / "text.txt").read_text()]))
    cskv("compress", tiny / "base", "--run", tiny / "run", "--data", "org/texts#en:test:body", *CALIBRATION)
    data = ModelCard((tiny / "run" / "export" / "README.md").read_text()).data.to_dict()
    assert data["datasets"] == ["org/texts"]
