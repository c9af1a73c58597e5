"""The shards of a Hub model without their weights: for plans, which read headers alone."""

import json
import shutil
import struct
from pathlib import Path

from cskv_cli.checkpoint.download import hub_failures
from cskv_cli.checkpoint.weights import INDEX_NAME, SINGLE_NAME, shard_names


def has_safetensors(source: str, revision: str, snapshot: Path) -> bool:
    """Whether a Hub model, whose small files are in `snapshot`, has weights of that kind."""
    from huggingface_hub import HfApi

    with hub_failures(source, revision):
        return (snapshot / INDEX_NAME).is_file() or HfApi().file_exists(source, SINGLE_NAME, revision=revision)


def fetch_headers(source: str, revision: str, snapshot: Path, folder: Path) -> Path:
    """Fill `folder` with the small files of a snapshot, and shards whose weights are holes that take no room.

    Of each shard only its header is fetched.

    Args:
        snapshot: holds the small files, the index of the shards among them if there is one.

    Raises:
        CskvError: the Hub fails, or has no shard of that name.
    """
    from huggingface_hub import HfApi, get_hf_file_metadata, hf_hub_url

    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(snapshot, folder, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    for name in shard_names(snapshot) or [SINGLE_NAME]:
        with hub_failures(source, revision):
            found = HfApi().parse_safetensors_file_metadata(source, name, revision=revision)
            size = get_hf_file_metadata(hf_hub_url(source, name, revision=revision)).size or 0
        tensors = {
            key: {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": list(info.data_offsets)}
            for key, info in found.tensors.items()
        }
        end = max((info.data_offsets[1] for info in found.tensors.values()), default=0)
        blob = json.dumps(tensors, separators=(",", ":")).encode()
        blob = blob.ljust(size - 8 - end)  # as long as the one there
        with (folder / name).open("wb") as file:
            file.write(struct.pack("<Q", len(blob)) + blob)
            file.truncate(8 + len(blob) + end)
    return folder
