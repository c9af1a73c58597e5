"""Which models can be compressed, told before any work."""

from pathlib import Path

import pytest
import transformers

from cskv_cli.checkpoint.probe import check_supported
from cskv_cli.errors import CskvError
from tests.families import FAMILIES, SMALL, models_page


def save_config(folder, family, **settings):
    name = family.split(":")[0]
    kind = getattr(transformers, "Gemma3TextConfig" if name == "Gemma3" else f"{name}Config")
    merged = {**SMALL, **FAMILIES.get(family, {}), **settings}
    kind(**{key: value for key, value in merged.items() if value != "unset"}).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken(family, tmp_path):
    check_supported(save_config(tmp_path, family))


REFUSED = {
    "HunYuanDenseV1": ({}, "layer 0 makes its keys in a way that cskv cannot retrace"),
    "Mistral": ({"sliding_window": 8}, "so its cache is bounded"),
    "DeepseekV3": ({"kv_lora_rank": 8, "q_lora_rank": 8}, "deepseek_v3"),
    "GPT2": ({}, "gpt2"),
    "Falcon": ({"head_dim": "unset"}, "falcon"),
    "Bloom": ({}, "bloom"),
    "Mamba": ({}, "mamba"),
}


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_rebuilt_is_refused_by_name(family, tmp_path):
    settings, reason = REFUSED[family]
    with pytest.raises(CskvError, match=reason):
        check_supported(save_config(tmp_path, family, **settings))


def test_the_page_of_models_is_current():
    assert Path("docs/models.md").read_text() == models_page()
