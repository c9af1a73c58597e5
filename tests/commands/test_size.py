"""Memory that a compression takes, as the operating system counts it; benchmarks/size.py does so for 7B."""

from benchmarks.size import FLAGS, peak, write_model
from tests.cli import cskv

SHAPE = dict(
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3584,
    num_hidden_layers=24,
    num_attention_heads=8,
    num_key_value_heads=2,
    sliding_window=None,
    tie_word_embeddings=False,
)


def test_a_compression_holds_a_layer_and_not_the_model(tmp_path):
    write_model(tmp_path / "model", SHAPE)
    command = "compress", tmp_path / "model", "--run", tmp_path / "run", *FLAGS
    plan = cskv(*command[:-1], "--dry-run")
    idle = peak("-c", "import torch, cskv_cli.pipeline, cskv_cli.stages.calibrate, cskv_cli.stages.export")
    used = (peak("-m", "cskv_cli", *command)["peak_mb"] - idle["peak_mb"]) * 1e6
    weights = sum(path.stat().st_size for path in (tmp_path / "model").glob("*.safetensors"))
    assert weights > 650e6 and used < plan["memory_bytes"] + 250e6 < weights
