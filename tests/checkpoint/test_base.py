"""Which sources are taken as a base model, what is known of them, and what each refusal names."""

import json
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import errors
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from cskv_cli.checkpoint.base import resolve_base
from cskv_cli.errors import CskvError

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A tiny Llama in bfloat16, saved as one file and as many shards."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2}
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)).bfloat16()
    root = tmp_path_factory.mktemp("saved")
    model.save_pretrained(root / "one")
    model.save_pretrained(root / "many", max_shard_size="10KB")
    return {"model": model, "one": root / "one", "many": root / "many"}


@pytest.fixture
def folder(saved, tmp_path):
    return Path(shutil.copytree(saved["one"], tmp_path / "model"))


@pytest.fixture
def resolve(tmp_path):
    return lambda source, revision=None: resolve_base(str(source), revision=revision, work_dir=tmp_path / "base")


def edit(path, **changes):
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


@pytest.mark.parametrize("which", ["one", "many"])
def test_a_folder_is_described_from_its_headers(saved, resolve, which):
    base = resolve(saved[which])
    state = saved["model"].state_dict()
    assert (base.source, base.kind, base.revision) == (str(saved[which]), "folder", None)
    assert (base.folder, base.converted, base.notes) == (saved[which], False, ())
    assert base.config == json.loads((saved[which] / "config.json").read_text())
    assert base.dtype == "bfloat16"
    assert base.parameter_bytes == sum(tensor.nbytes for tensor in state.values())
    assert set(base.weight_map) == set(state)
    assert base.shards == sorted(saved[which].glob("*.safetensors"))
    assert (len(base.shards) > 1) == (which == "many")


def test_the_dtype_is_that_of_most_bytes(folder, resolve):
    norms = {f"norm.{i}": torch.ones(2) for i in range(9)}
    save_file({"w": torch.ones(99, dtype=torch.float16)} | norms, folder / "model.safetensors")
    assert resolve(folder).dtype == "float16"


def test_a_gguf_beside_a_whole_model_is_left_alone(folder, resolve):
    (folder / "m.gguf").write_bytes(b"GGUF")
    assert resolve(folder).kind == "folder"


def test_the_weight_map_is_the_index(saved, resolve):
    index = json.loads((saved["many"] / "model.safetensors.index.json").read_text())
    assert resolve(saved["many"]).weight_map == index["weight_map"]


@pytest.mark.parametrize("which, extra", [("one", set()), ("many", {"model.safetensors.index.json"})])
def test_the_fingerprint_covers_config_shards_and_index(saved, resolve, tmp_path, which, extra):
    base = resolve(saved[which])
    expected = {"config.json", *extra, *(path.name for path in base.shards)}
    assert set(base.fingerprint(tmp_path / "hashes.json")) == expected


def test_one_changed_byte_changes_the_fingerprint_of_its_shard(folder, resolve, tmp_path):
    before = resolve(folder).fingerprint(tmp_path / "hashes.json")
    blob = bytearray((folder / "model.safetensors").read_bytes())
    blob[-1] ^= 1
    (folder / "model.safetensors").write_bytes(blob)
    after = resolve(folder).fingerprint(tmp_path / "hashes.json")
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


@pytest.mark.parametrize("source", ["./x", "/no/such", "~/nothing", "x.gguf", "a/b/c", "a\\b", "model.safetensors"])
def test_a_path_that_is_not_there_is_not_looked_up_on_the_hub(resolve, source, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", None)
    with pytest.raises(CskvError, match="no such file or folder") as error:
        resolve(source)
    assert error.value.message.startswith(source)


def test_a_revision_of_a_local_path_is_refused(folder, resolve):
    with pytest.raises(CskvError, match="--revision main needs a Hub id"):
        resolve(folder, "main")


CONFIGS = {
    "is already quantized (awq)": {"quantization_config": {"quant_method": "awq"}},
    "is already quantized (method not named)": {"quantization_config": {"bits": 4}},
    "is already quantized (compressed-tensors)": {"compression_config": {"quant_method": "compressed-tensors"}},
    "is already quantized (MLX)": {"quantization": {"bits": 4}},
    "is compressed by CSKV already": {"cskv": {"base_model": "me/base"}},
    "brings its own code": {"auto_map": {"AutoModelForCausalLM": "x.X"}},
    "config.json has no model_type": {"model_type": None},
    "no causal language model of type vit": {"model_type": "vit"},
    "is an encoder-decoder model (bart)": {"model_type": "bart", "is_encoder_decoder": True},
    "is a LlamaForSequenceClassification": {"architectures": ["LlamaForSequenceClassification"]},
}


@pytest.mark.parametrize("message", CONFIGS)
def test_a_config_that_cannot_be_compressed(folder, resolve, message):
    edit(folder / "config.json", **CONFIGS[message])
    with pytest.raises(CskvError) as error:
        resolve(folder)
    assert message in error.value.message
    assert error.value.message.startswith(str(folder))
    assert error.value.hint


def test_a_cskv_checkpoint_names_its_base(folder, resolve):
    edit(folder / "config.json", cskv={"base_model": "me/base"}, auto_map={"AutoModelForCausalLM": "x.X"})
    with pytest.raises(CskvError, match="compressed by CSKV") as error:
        resolve(folder)
    assert error.value.hint == "start from me/base"


@pytest.mark.parametrize("name, method", [("quant_config.json", "AWQ"), ("quantize_config.json", "GPTQ")])
def test_older_quantized_checkpoints(folder, resolve, name, method):
    (folder / name).write_text("{}")
    with pytest.raises(CskvError, match=f"already quantized \\({method}\\)"):
        resolve(folder)


@pytest.mark.parametrize("text", ["{", "[]"])
def test_a_broken_config_is_named(folder, resolve, text):
    (folder / "config.json").write_text(text)
    with pytest.raises(CskvError, match="model/config.json"):
        resolve(folder)


def test_no_config(folder, resolve):
    (folder / "config.json").unlink()
    with pytest.raises(CskvError, match="not a model: it has no config.json"):
        resolve(folder)


def test_a_peft_adapter_names_its_base(folder, resolve):
    (folder / "config.json").rename(folder / "adapter_config.json")
    edit(folder / "adapter_config.json", base_model_name_or_path="me/base")
    with pytest.raises(CskvError, match="PEFT adapter") as error:
        resolve(folder)
    assert "merge it into me/base" in error.value.hint


def test_no_weights(folder, resolve):
    (folder / "model.safetensors").unlink()
    with pytest.raises(CskvError, match="has no weights"):
        resolve(folder)
    (folder / "tf_model.h5").touch()
    with pytest.raises(CskvError, match="has only tf_model.h5"):
        resolve(folder)


def test_damaged_shards_are_refused_at_once(folder, resolve):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CskvError, match="model.safetensors is truncated"):
        resolve(folder)


def test_several_gguf_files_are_listed(resolve, tmp_path):
    for name in ("m.Q4.gguf", "m.Q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(CskvError, match="2 GGUF files: m.Q4.gguf, m.Q8.gguf") as error:
        resolve(tmp_path)
    assert error.value.hint == f"pass one: {tmp_path / 'm.Q4.gguf'}"


def test_a_file_that_is_no_gguf(folder, resolve):
    with pytest.raises(CskvError, match="model.safetensors is not a GGUF file"):
        resolve(folder / "model.safetensors")


def test_bin_weights_are_converted_in_the_work_folder(saved, folder, resolve, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(saved["model"].state_dict(), folder / "pytorch_model.bin")
    base = resolve(folder)
    assert (base.kind, base.converted, base.folder) == ("folder", True, tmp_path / "base" / "model")
    assert base.notes == ("pytorch_model.bin weights were rewritten as safetensors",)
    assert base.parameter_bytes == resolve(saved["one"]).parameter_bytes


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A stand-in for snapshot_download that copies from `remote`; the downloads made so far are in `fetched`."""

    class Hub:
        remote: Path | None = None
        error: Exception | None = None
        fetched: list[str] = []

        def snapshot_download(self, repo, revision=None, allow_patterns=None):
            if self.error:
                raise self.error
            self.revisions.append(revision)
            target = tmp_path / "cache" / COMMIT
            target.mkdir(parents=True, exist_ok=True)
            for name in filter_repo_objects(
                [path.name for path in self.remote.iterdir()], allow_patterns=allow_patterns
            ):
                shutil.copy(self.remote / name, target / name)
                self.fetched.append(name)
            return str(target)

    hub = Hub()
    hub.fetched, hub.revisions = [], []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot_download)
    return hub


@pytest.mark.parametrize("which", ["one", "many"])
def test_a_hub_model_is_pinned_to_its_commit(saved, resolve, hub, tmp_path, which):
    hub.remote = Path(shutil.copytree(saved[which], tmp_path / "remote"))
    (hub.remote / "consolidated.safetensors").touch()
    (hub.remote / "pytorch_model.bin").touch()
    base = resolve("me/tiny", "v1")
    assert (base.kind, base.revision, base.converted) == ("hub", COMMIT, False)
    assert hub.revisions == ["v1", COMMIT]
    assert set(base.weight_map) == set(saved["model"].state_dict())
    assert not {"consolidated.safetensors", "pytorch_model.bin"} & set(hub.fetched)


def test_a_hub_model_with_only_bin_weights(saved, folder, resolve, hub, tmp_path):
    (folder / "model.safetensors").unlink()
    torch.save(saved["model"].state_dict(), folder / "pytorch_model.bin")
    hub.remote = folder
    base = resolve("me/tiny")
    assert (base.revision, base.converted, base.folder) == (COMMIT, True, tmp_path / "base" / "tiny")


def test_a_quantized_hub_model_is_refused_before_its_weights_are_fetched(folder, resolve, hub):
    edit(folder / "config.json", quantization_config={"quant_method": "gptq"})
    hub.remote = folder
    with pytest.raises(CskvError, match="^me/tiny is already quantized"):
        resolve("me/tiny")
    assert "config.json" in hub.fetched
    assert "model.safetensors" not in hub.fetched


def http_error(kind):
    import httpx2

    return kind("refused", response=httpx2.Response(403, request=httpx2.Request("GET", "http://hub")))


@pytest.mark.parametrize(
    "error, message, hint",
    [
        (errors.HFValidationError("x"), "not a Hub id", "pass a Hub id"),
        (http_error(errors.GatedRepoError), "is gated", "hf auth login"),
        (http_error(errors.RevisionNotFoundError), "has no revision v1", "--revision"),
        (http_error(errors.RepositoryNotFoundError), "no such model on the Hub", "hf auth login"),
        (errors.LocalEntryNotFoundError("x"), "at revision v1 is not in the local cache", "HF_HUB_OFFLINE"),
        (http_error(errors.HfHubHTTPError), "could not be downloaded: refused", "again"),
        (OSError("No space left\non device"), "could not be downloaded: No space left", "again"),
    ],
)
def test_each_hub_failure_is_one_line(resolve, hub, error, message, hint):
    hub.error = error
    with pytest.raises(CskvError) as caught:
        resolve("me/tiny", "v1")
    assert caught.value.message.startswith("me/tiny")
    assert message in caught.value.message
    assert hint in caught.value.hint
    assert "\n" not in caught.value.message
