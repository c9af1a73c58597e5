"""At full rank and without quantization a CSKV model is its base: same tokens, same logits, in every family."""

import pytest
import torch
import transformers

from cskv_cli.modeling import modeling_cskv
from tests.families import FAMILIES, MULTIMODAL, base_model, compressed
from tests.family_configs import IMAGE

IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(12))
PADDED = IDS.clone()
PADDED[0, :5] = 0
MASK = (PADDED != 0).long()
INPUTS = {"padded": dict(input_ids=PADDED, attention_mask=MASK), "plain": dict(input_ids=IDS)}


@pytest.mark.parametrize("family", FAMILIES)
def test_full_rank_equals_base(family):
    base = base_model(family)
    model = compressed(base, window=4, sinks=2)
    for implementation in ("eager", "sdpa"):
        try:
            base.set_attn_implementation(implementation)
        except ValueError:  # this family has no such implementation
            continue
        model.set_attn_implementation(implementation)
        for inputs in INPUTS.values():
            greedy = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True)
            expected, got = base.generate(**inputs, **greedy), model.generate(**inputs, **greedy)
            assert torch.equal(got.sequences, expected.sequences)
            torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=2e-4, rtol=2e-4)
            assert got.logits[0].isfinite().all()
            assert type(got.get("cache", got.get("past_key_values"))).__name__ == "CSKVCache"


@pytest.mark.parametrize("family", [name for name in ("Gemma3Vision", "Llava") if name in MULTIMODAL])
def test_an_image_in_the_prompt(family):
    base = base_model(family)
    model, ids = compressed(base, window=4, sinks=2), IDS[:1].clone()
    ids[:, 2:6] = IMAGE
    inputs = dict(input_ids=ids, pixel_values=torch.randn(1, 3, 8, 8, generator=torch.Generator().manual_seed(1)))
    if family == "Gemma3Vision":
        inputs["token_type_ids"] = (ids == IMAGE).long()
    greedy = dict(max_new_tokens=16, do_sample=False, return_dict_in_generate=True, output_logits=True)
    expected, got = base.generate(**inputs, **greedy), model.generate(**inputs, **greedy)
    blind = base.generate(input_ids=IDS[:1], **greedy)
    assert torch.equal(got.sequences, expected.sequences) and not torch.equal(got.logits[0], blind.logits[0])
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(expected.logits), atol=2e-4, rtol=2e-4)


@pytest.mark.parametrize("family", [name for name in ("Llama", "Mixtral", "GptOss") if name in FAMILIES])
@pytest.mark.parametrize("what", ["_can_set_attn_implementation", "_can_set_experts_implementation"])
def test_implementations_can_be_set_as_in_the_base(family, what):
    base = getattr(transformers, f"{family}ForCausalLM")
    ours = type(f"CSKV{family}", (modeling_cskv.CSKVForCausalLM, base), {"__module__": modeling_cskv.__name__})
    if hasattr(base, what):  # not all in every version
        assert getattr(ours, what)() == getattr(base, what)()
