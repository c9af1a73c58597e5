"""Recipes that come with cskv, and what is wrong with a file that is none."""

import pytest

from cskv_cli import recipes
from tests.cli import cskv


def test_ours_are_listed_shown_and_copied(tmp_path):
    listed = cskv("recipes", "ls")["recipes"]
    assert {"smollm2-135m", "longchat-7b", "mistral-7b-instruct"} <= listed.keys()
    for name in listed:
        text = cskv("recipes", "show", name)["text"]
        assert text == recipes.find(name).read_text()
        if "paper-" not in name:  # those are of sweeps
            assert f"cskv compress --recipe {name}" in text
            recipes.read(recipes.find(name))
    copied = cskv("recipes", "cp", "smollm2-135m", tmp_path)["file"]
    assert recipes.read(tmp_path / "smollm2-135m.yaml") == recipes.read(recipes.find(copied))
    assert "exists" in cskv("recipes", "cp", "smollm2-135m", tmp_path, exit_code=1)["error"]


@pytest.mark.parametrize(
    "content, reason",
    [
        ("init: {ratio_q: 0.5}", "ratio_q"),
        ("init: {ratio_k: 2}", "ratio_k"),
        ("train: {}", "no stage 'train'"),
        ("[1, 2", "not YAML"),
        ("", "holds no settings"),
        ("init: {rank_k: 3, ratio_k: 0.5}", "say the same thing"),
        ("init: [1]", "init"),
    ],
)
def test_what_is_wrong_is_said_with_the_file(tmp_path, content, reason):
    (tmp_path / "bad.yaml").write_text(content)
    failure = cskv("compress", "--recipe", tmp_path / "bad.yaml", "--run", tmp_path / "run", exit_code=1)
    assert "bad.yaml" in failure["error"] and reason in failure["error"]
    assert not (tmp_path / "run").exists()


def test_no_such_recipe_names_those_there_are(tmp_path):
    failure = cskv("recipes", "show", "nothing", exit_code=1)
    assert "no recipe nothing" in failure["error"] and "smollm2-135m" in failure["hint"]
