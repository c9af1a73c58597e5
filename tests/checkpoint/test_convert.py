"""GGUF files become the same weights in a safetensors folder; what cannot is named."""

import json

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cskv_cli.checkpoint import convert
from cskv_cli.errors import CskvError
from tests.checkpoint.converted import HEADS, KV_HEADS, SPECIAL, TOKENS, same, tiny_llama, untied, weights_of

TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"


@pytest.fixture(scope="module")
def model():
    return tiny_llama()


def write_gguf(path, model, skip=(), extra=()):
    """A GGUF file as llama.cpp's converter writes it: renamed tensors, rows of q and k in its RoPE order."""
    config, writer = model.config, gguf.GGUFWriter(path, "llama")
    writer.add_name("tiny")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(TOKENS)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(TOKENS) - len(SPECIAL)))
    writer.add_token_merges(["Ġ Ġ"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in extra:
        (writer.add_uint16 if isinstance(value, int) else writer.add_string)(key, value)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" or name in skip:
            continue
        tensor = tensor.float()
        for projection, heads in (("q_proj", HEADS), ("k_proj", KV_HEADS)):
            if projection in name:
                halves = tensor.reshape(heads, 2, config.head_dim // 2, -1)
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight",)), tensor.numpy())
    if "rope_freqs" in dict(extra):
        writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture
def gguf_file(model, tmp_path):
    return write_gguf(tmp_path / "tiny.F32.gguf", model)


def test_gguf_weights_are_the_models_own(model, gguf_file, tmp_path):
    folder, note = convert.convert_gguf(gguf_file, tmp_path / "base")
    assert folder == tmp_path / "base" / "tiny.F32"
    assert note == "GGUF F32 weights were dequantized to float32"
    assert same(weights_of(folder), untied(model))
    ids = torch.arange(20)[None]
    loaded = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_gguf_config_is_read_by_old_and_new_transformers(model, gguf_file, tmp_path):
    folder, _ = convert.convert_gguf(gguf_file, tmp_path / "base")
    config = json.loads((folder / "config.json").read_text())
    assert (config["rope_theta"], config["rope_scaling"]) == (54321.0, None)
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 54321.0}
    assert (config["dtype"], config["torch_dtype"]) == ("float32", "float32")
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, 2, 2)
    assert config["tie_word_embeddings"] is True
    assert not {"quantization_config", "_model_name_or_path"} & set(config)
    generation = json.loads((folder / "generation_config.json").read_text())
    assert (generation["bos_token_id"], generation["eos_token_id"], generation["pad_token_id"]) == (1, 2, 2)


def test_gguf_tokenizer(gguf_file, tmp_path):
    folder, _ = convert.convert_gguf(gguf_file, tmp_path / "base")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] == "PreTrainedTokenizerFast"
    assert settings["model_max_length"] == 99
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == (
        "<|im_start|>",
        "<|im_end|>",
        "<|im_end|>",
    )
    assert tokenizer.tokenize("a  12<|im_end|>") == ["a", "ĠĠ", "1", "2", "<|im_end|>"]
    assert tokenizer.decode(tokenizer("a  12")["input_ids"]) == "a  12"
    assert tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False) == "hi"


def test_conversion_prints_nothing(gguf_file, tmp_path, capfd):
    convert.convert_gguf(gguf_file, tmp_path / "base")
    assert capfd.readouterr() == ("", "")


def test_a_conversion_is_reused_until_its_source_changes(model, gguf_file, tmp_path):
    folder, note = convert.convert_gguf(gguf_file, tmp_path / "base")
    (folder / "mark").touch()
    assert convert.convert_gguf(gguf_file, tmp_path / "base") == (folder, note)
    assert (folder / "mark").exists()
    write_gguf(gguf_file, model, extra=[("general.author", "someone else")])
    convert.convert_gguf(gguf_file, tmp_path / "base")
    assert not (folder / "mark").exists()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_failed_conversion_leaves_nothing_that_looks_whole(gguf_file, tmp_path, monkeypatch, error):
    folder, _ = convert.convert_gguf(gguf_file, tmp_path / "base")
    (folder / ".cskv-source.json").write_text('{"made_from": {}}')

    def fail(path, value):
        raise error

    monkeypatch.setattr(convert, "_write_json", fail)
    with pytest.raises(error):
        convert.convert_gguf(gguf_file, tmp_path / "base")
    assert sorted(path.name for path in (tmp_path / "base").iterdir()) == ["hashes.json", "tiny.F32"]


def test_what_a_killed_conversion_left_is_cleared(gguf_file, tmp_path):
    left = tmp_path / "base" / ".tiny.F32.partial"
    left.mkdir(parents=True)
    (left / "stale.json").write_text("half")
    folder, _ = convert.convert_gguf(gguf_file, tmp_path / "base")
    assert not (folder / "stale.json").exists()
    assert not left.exists()


def test_a_file_without_the_magic_is_no_gguf(tmp_path):
    (tmp_path / "x.gguf").write_bytes(b"GGML and so on")
    with pytest.raises(CskvError, match="x.gguf is not a GGUF file"):
        convert.convert_gguf(tmp_path / "x.gguf", tmp_path / "base")


@pytest.mark.parametrize("keep", [4, 30, 3000, -4])
def test_a_cut_gguf_is_named(gguf_file, tmp_path, keep):
    gguf_file.write_bytes(gguf_file.read_bytes()[:keep])
    with pytest.raises(CskvError, match="tiny.F32.gguf is truncated or damaged"):
        convert.convert_gguf(gguf_file, tmp_path / "base")
    assert not list((tmp_path / "base").glob("*tiny*"))


REFUSED = {
    "is one of 3 parts": [("split.count", 3)],
    "scales RoPE by rope_freqs.weight": [("rope_freqs", "x")],
    "scales RoPE by llama.rope.scaling.type = yarn": [("llama.rope.scaling.type", "yarn")],
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_gguf_that_would_come_out_wrong(model, tmp_path, message):
    path = write_gguf(tmp_path / "t.gguf", model, extra=REFUSED[message])
    with pytest.raises(CskvError, match=f"t.gguf {message}"):
        convert.convert_gguf(path, tmp_path / "base")


def test_a_gguf_that_lacks_a_tensor(model, tmp_path):
    path = write_gguf(tmp_path / "t.gguf", model, skip=["model.layers.1.self_attn.v_proj.weight"])
    with pytest.raises(CskvError, match=r"t.gguf lacks model.layers.1.self_attn.v_proj.weight \(1 tensor"):
        convert.convert_gguf(path, tmp_path / "base")


def test_an_unsupported_architecture_is_named(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "t.gguf", "clip")
    writer.add_name("t")
    writer.add_tensor("x", np.ones(4, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(CskvError, match="t.gguf cannot be read as a model: .*clip") as error:
        convert.convert_gguf(tmp_path / "t.gguf", tmp_path / "base")
    assert "safetensors" in error.value.hint


def test_disk_is_checked_before_the_weights_are_read(gguf_file, tmp_path, monkeypatch):
    monkeypatch.setattr("cskv_cli.checkpoint.weights.free_bytes", lambda path: 0)
    with pytest.raises(CskvError, match="dequantizing tiny.F32.gguf needs"):
        convert.convert_gguf(gguf_file, tmp_path / "base")


LEGACY = {
    "llama3": (
        {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    ),
    "partial": (
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
        {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_scaling": None},
    ),
    "gemma3": (
        {
            "rope_parameters": {
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            }
        },
        {
            "rope_theta": 1e6,
            "rope_local_base_freq": 1e4,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
    ),
    "old already": ({"rope_theta": 7.0, "torch_dtype": "float16"}, {}),
    "old wins": ({"rope_theta": 7.0, "rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, {}),
    "dtype": ({"dtype": "bfloat16"}, {"torch_dtype": "bfloat16"}),
    "multimodal": (
        {"text_config": {"dtype": "float16"}},
        {"text_config": {"dtype": "float16", "torch_dtype": "float16"}},
    ),
}


@pytest.mark.parametrize("case", LEGACY)
def test_legacy_keys_are_added_and_nothing_is_taken(case):
    config, added = LEGACY[case]
    before = json.dumps(config)
    assert convert.add_legacy_keys(config) == config | added
    assert json.dumps(config) == before


@pytest.mark.real_model
def test_smollm2_is_its_own_blocks_dequantized(request, tmp_path):
    real = request.getfixturevalue("gguf")
    folder, note = convert.convert_gguf(real, tmp_path)
    assert note == "GGUF Q4_1 weights were dequantized to float32"
    reader = gguf.GGUFReader(real)
    blocks = {tensor.name: tensor for tensor in reader.tensors}
    written = weights_of(folder)

    def own(name):
        return torch.from_numpy(gguf.dequantize(blocks[name].data, blocks[name].tensor_type).copy())

    def half_split(weight, heads):
        """llama.cpp keeps the two RoPE halves of a head interleaved."""
        return weight.reshape(heads, -1, 2, 576).transpose(1, 2).reshape(weight.shape)

    layer = "model.layers.7."
    assert torch.equal(written["model.embed_tokens.weight"], own("token_embd.weight"))
    assert torch.equal(written[layer + "self_attn.q_proj.weight"], half_split(own("blk.7.attn_q.weight"), 9))
    assert torch.equal(written[layer + "self_attn.k_proj.weight"], half_split(own("blk.7.attn_k.weight"), 3))
    assert torch.equal(written[layer + "self_attn.v_proj.weight"], own("blk.7.attn_v.weight"))
    assert torch.equal(written[layer + "mlp.down_proj.weight"], own("blk.7.ffn_down.weight"))
    assert len(written) == len(blocks) == 272

    config = json.loads((folder / "config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 100000.0
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == reader.get_field("tokenizer.chat_template").contents()
    assert tokenizer.convert_ids_to_tokens([1, 2, 0]) == ["<|im_start|>", "<|im_end|>", "<|endoftext|>"]

    model = AutoModelForCausalLM.from_pretrained(folder)
    question = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
    inputs = tokenizer.apply_chat_template(question, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**inputs, max_new_tokens=40, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
