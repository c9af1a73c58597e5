"""Which models can be compressed, told before any work."""

import json
from pathlib import Path

import pytest
import torch

from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.checkpoint.layers import kv_projections
from cskv_cli.checkpoint.probe import check_supported
from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_attention import compress
from cskv_cli.modeling.cskv_structure import find_attention, find_decoder
from tests.cli import cskv
from tests.families import FAMILIES, REFUSED, base_model, config_of, models_page


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_is_taken(family, tmp_path):
    config_of(family).save_pretrained(tmp_path)
    check_supported(tmp_path)


@pytest.mark.parametrize("family", REFUSED)
def test_what_cannot_be_compressed_is_refused_with_the_reason(family, tmp_path):
    settings, reason = REFUSED[family]
    config = config_of(family, **settings)
    config.save_pretrained(tmp_path)
    with pytest.raises(CskvError, match=reason) as caught:
        if config.is_encoder_decoder:
            resolve_base(str(tmp_path), revision=None, work_dir=tmp_path)
        check_supported(tmp_path)
    assert config.model_type in str(caught.value)
    assert "docs/models.md" in caught.value.hint or config.is_encoder_decoder


@pytest.mark.parametrize("verb", ["compress", "analyze"])
def test_the_verbs_refuse_before_any_work(verb, tmp_path):
    base_model("HunYuanDenseV1").save_pretrained(tmp_path / "base")
    run = tmp_path / "run"
    error = cskv(verb, tmp_path / "base", "--run", run, "--data", "builtin", exit_code=1)["error"]
    assert "layer 0 has a norm after RoPE on its keys" in error and "hunyuan_v1_dense" in error
    assert not list(run.glob("*/manifest.json"))


def test_a_family_that_transformers_cannot_write_text_with(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "vit"}))
    with pytest.raises(CskvError, match="no causal language model of type vit"):
        resolve_base(str(tmp_path), revision=None, work_dir=tmp_path)


@pytest.mark.parametrize(
    ("family", "decoder", "attention"),
    [
        ("Llama", "model", "self_attn"),
        ("GPTNeoX", "gpt_neox", "attention"),
        ("Falcon", "transformer", "self_attention"),
        ("OPT", "model.decoder", "self_attn"),
        ("Dbrx", "transformer", "norm_attn_norm.attn"),
        ("Gemma3Vision", "model.language_model", "self_attn"),
    ],
)
def test_the_parts_are_found(family, decoder, attention):
    found = find_decoder(base_model(family))
    assert found.name == decoder
    assert all(find_attention(layer) is layer.get_submodule(attention) for layer in found.layers)


@pytest.mark.parametrize("family", ["GPTNeoX", "Falcon", "Falcon:heads", "Falcon:new", "GPT2", "GPTBigCode", "Dbrx"])
def test_rows_of_a_fused_projection(family):
    """Against what the layer itself caches of a first token, which is not rotated."""
    model = base_model(family)
    seen = []
    attention = find_attention(find_decoder(model).layers[0])
    attention.register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    with torch.no_grad():
        output = model(torch.tensor([[5]]), use_cache=True)
    cached = output.get("cache", output.get("past_key_values")).layers[0]
    for (weight, bias), states in zip(kv_projections(attention).values(), (cached.keys, cached.values), strict=True):
        ours = seen[0] @ weight + (0 if bias is None else bias)
        if getattr(attention, "clip_qkv", None):
            ours = ours.clamp(-attention.clip_qkv, attention.clip_qkv)
        ours = ours.unflatten(-1, (-1, states.shape[-1])).transpose(1, 2)
        torch.testing.assert_close(ours.repeat_interleave(states.shape[1] // ours.shape[1], dim=1), states)


def test_rotations_out_of_sight_are_refused_at_loading():
    """As DBRX and JetMoe have them under transformers 4.57: their keys would be rebuilt without."""
    attention = find_attention(find_decoder(base_model("OPT")).layers[0])
    attention.rotary_emb = torch.nn.Identity()
    with pytest.raises(ValueError, match="OPTAttention rotates its keys by itself"):
        compress(attention, attention.config, (4, 4))


def test_the_page_of_models_is_current():
    assert Path("docs/models.md").read_text() == models_page()
