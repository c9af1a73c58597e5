"""What others do with an export beside `generate`: pipelines, disks, saving and pushing again, adapters."""

import copy
import json
import logging

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from tests.conftest import WORDS
from tests.hub import local_hub

IDS = torch.tensor([[3 + (7 * i) % 90 for i in range(24)]])
TEXTS = [" ".join(WORDS[(7 * i + start) % 90] for i in range(count)) for start, count in ((0, 24), (5, 9))]
GREEDY = dict(do_sample=False, max_new_tokens=14, pad_token_id=0)


def load(folder, **kwargs):
    return AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **kwargs).eval()


def answer(model, ids=IDS):
    output = model.generate(ids.to(model.device), return_dict_in_generate=True, output_logits=True, **GREEDY)
    return output.sequences, torch.stack(output.logits), type(output.get("cache", output.get("past_key_values")))


def assert_same(model, base, kind="CSKVCache"):
    (ours, logits, cache), (theirs, expected, _) = answer(model), answer(base)
    assert torch.equal(ours, theirs) and cache.__name__ == kind
    torch.testing.assert_close(logits, expected, atol=2e-4, rtol=2e-4)


def test_a_text_generation_pipeline(exports):
    chat = [{"role": "user", "content": TEXTS[0]}]
    found = {}
    for name in ("base", "full"):
        tokenizer = AutoTokenizer.from_pretrained(getattr(exports, name), padding_side="left")
        pipe = pipeline(
            "text-generation", model=str(getattr(exports, name)), tokenizer=tokenizer, trust_remote_code=name == "full"
        )
        found[name] = pipe(TEXTS, batch_size=2, **GREEDY), pipe(chat, **GREEDY)
        assert type(pipe.model).__name__ == {"base": "LlamaForCausalLM", "full": "CSKVLlamaForCausalLM"}[name]
    assert found["full"] == found["base"]
    assert len(found["full"][1][0]["generated_text"][-1]["content"].split()) > 8


def test_layers_that_stay_on_the_disk(exports, tmp_path):
    map_ = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    map_ |= {f"model.layers.{i}": "disk" if i % 2 else "cpu" for i in range(4)}
    for name in ("full", "low"):
        model = load(getattr(exports, name), device_map=map_, offload_folder=tmp_path / name)
        assert next(model.model.layers[1].self_attn.k_up.parameters()).is_meta
        assert_same(model, load(getattr(exports, name)))
    assert_same(load(exports.full, device_map=map_, offload_folder=tmp_path / "x"), load(exports.base))


def test_saved_again_twice(exports, tmp_path):
    first, second = tmp_path / "first 1.0", tmp_path / "second"
    load(exports.low).save_pretrained(first)
    load(first).save_pretrained(second)
    assert_same(load(second), load(exports.low))
    config = json.loads((second / "config.json").read_text())
    assert config["cskv"] == json.loads((exports.low / "config.json").read_text())["cskv"]


def test_pushed_again(exports, tmp_path, monkeypatch):
    with local_hub(monkeypatch, tmp_path):
        model = load(exports.low)
        model.push_to_hub("me/again")
        AutoTokenizer.from_pretrained(exports.low).push_to_hub("me/again")
        again = load("me/again")
        assert type(again).__module__ != type(model).__module__
        assert_same(again, model)
        assert AutoTokenizer.from_pretrained("me/again").encode(TEXTS[0]) == IDS[0].tolist()


@pytest.fixture
def adapter(exports, tmp_path):
    """LoRA on queries and outputs of the base, trained for a few steps and saved."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    settings = LoraConfig(r=4, target_modules=["q_proj", "o_proj"], task_type="CAUSAL_LM", init_lora_weights=False)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(exports.base), settings)
    train(model)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def train(model):
    """Losses of three steps of the adapter."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    losses = []
    for _ in range(3):
        loss = model(IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_an_adapter_of_the_base_works_on_its_export(exports, adapter):
    from peft import PeftModel

    plain = AutoModelForCausalLM.from_pretrained(exports.base)
    base = PeftModel.from_pretrained(copy.deepcopy(plain), adapter, is_trainable=True).eval()
    ours = PeftModel.from_pretrained(load(exports.full), adapter, is_trainable=True).eval()
    assert_same(ours, base)
    trained = train(copy.deepcopy(ours).train()), train(copy.deepcopy(base).train())
    assert trained[0] == pytest.approx(trained[1], rel=1e-4) and trained[0][-1] < trained[0][0]
    merged = ours.merge_and_unload()
    assert type(merged).__name__ == "CSKVLlamaForCausalLM"
    assert_same(merged, base)
    assert (answer(merged)[1] - answer(plain)[1]).abs().max() > 0.1  # the adapter matters


@pytest.mark.parametrize("targets, warned", [(["q_proj", "o_proj"], []), (["q_proj", "v_proj"], ["v_proj"])])
def test_an_adapter_that_latents_do_not_know_of_is_warned_of(exports, monkeypatch, targets, warned):
    from peft import LoraConfig, get_peft_model

    said = []
    logger = logging.getLogger("transformers.cskv")
    monkeypatch.setattr(logger, "warning_once", said.append, raising=False)
    model = get_peft_model(load(exports.low), LoraConfig(r=2, target_modules=targets, task_type="CAUSAL_LM"))
    model.generate(input_ids=IDS, **GREEDY)
    assert {name for line in said for name in ("k_proj", "v_proj", "q_proj") if f"changes {name}" in line} == {*warned}
