"""The model card of an exported checkpoint."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import ModelCard, ModelCardData, metadata_load

from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.layout import Layout, bits_span, span
from cskv_cli.measurements import Measurement, eval_results, quality_rows
from cskv_cli.modeling.modeling_cskv import TESTED
from cskv_cli.run import versions

PLACEHOLDER = "PATH_OR_REPO"
_LICENSE_KEYS = ("license", "license_name", "license_link")
_CARD = """---
{front}
---

# {title}

{base} with a smaller KV cache: the keys and values of old tokens are kept as low-rank latents
([CSKV](https://arxiv.org/abs/2409.10593)), those of the last {window} and the first {sinks} tokens exactly.
The weights are the base model's own; {kept} of its cache are left per token.

## Use

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("{repo}", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("{repo}")
```

transformers {oldest} or newer (tested to {newest}); nothing else is needed. `generate`, batches, beams and chat work as
with the base model.
A document is read once for many questions: `model.save_cache(cache, "document.safetensors")` writes the cache of a
forward (`model(**inputs).past_key_values`), and `model.load_cache("document.safetensors")` gives one to `generate`.
Pass `revision=` and `code_revision=` with a commit to pin both the weights and the code.
Without `trust_remote_code` the same files load as the plain base model, with its full cache.

## Memory

Bytes of the cache of one sequence in {dtype}, in the {layers} layers that are compressed:

| tokens | base cache | CSKV cache | left |
|---|---|---|---|
{memory}
{quality}
## How it was made

Latent channels per layer of {channels}: keys {rank_k}, values {rank_v}{bits}.
With this recipe and `cskv compress --recipe recipe.yaml`:

```yaml
{recipe}
```

Made with {versions}.

## Limits

- A prefill attends to exact keys and values; what is lost shows in tokens that are decoded after it. Benchmarks that
  never decode (multiple choice, perplexity by one forward pass) show no loss, and say nothing about this cache.
- Finding things in a long context suffers before perplexity does: measure on your own task.
- A static or quantized cache that is asked for by name replaces this one.

## Citation

```bibtex
@article{{wang2024cskv,
  title={{CSKV: Training-Efficient Channel Shrinking for KV Cache in Long-Context Scenarios}},
  author={{Wang, Luning and Li, Shiyao and Ning, Xuefei and Yuan, Zhihang and Yan, Shengen and Dai, Guohao and
    Wang, Yu}},
  journal={{arXiv preprint arXiv:2409.10593}},
  year={{2024}}
}}
```
"""


@dataclass(frozen=True)
class Origin:
    """What a checkpoint was made by, and what was measured of it.

    Attributes:
        recipe: settings by stage, as in a recipe file.
        datasets: Hub ids of the calibration text.
        measured: what `cskv eval` found for exactly this checkpoint.
    """

    recipe: dict[str, Any]
    datasets: Sequence[str] = ()
    measured: Sequence[Measurement] = field(default_factory=tuple)


def card_text(base: BaseModel, layout: Layout, report: dict[str, Any], origin: Origin, repo: str = PLACEHOLDER) -> str:
    """The card; a local base is named by its folder or file alone, so that no path of this machine is in it."""
    name = shown_name(base)
    title = repo.rsplit("/", 1)[-1] if repo != PLACEHOLDER else f"{name.rsplit('/', 1)[-1].removesuffix('.gguf')}-cskv"
    per_token = report["cache_bytes_per_token"]
    on_hub = f"[{name}](https://huggingface.co/{name})"
    memory = [
        f"| {int(tokens):,} | {_megabytes(size['base'])} | {_megabytes(size['cskv'])} "
        f"| {size['cskv'] / size['base']:.1%} |"
        for tokens, size in report["cache_bytes"].items()
    ]
    return _CARD.format(
        front=front_matter(base, origin, title),
        title=title,
        repo=repo,
        oldest=TESTED[0],
        newest=TESTED[1],
        base=on_hub if base.kind == "hub" else name,
        window=layout.window,
        sinks=layout.sinks,
        kept=f"{per_token['cskv'] / per_token['base']:.1%}",
        dtype=report["dtype"],
        layers=f"{len(layout.layers)} of {len(layout.rank_k)}",
        memory="\n".join(memory),
        quality=_quality(origin.measured),
        channels=report["channels"],
        rank_k=span(layout.rank_k),
        rank_v=span(layout.rank_v),
        bits=_bits(layout) if layout.quantized else "",
        recipe=yaml.safe_dump(origin.recipe, sort_keys=False, allow_unicode=True).strip(),
        versions=", ".join(f"{package} {version}" for package, version in versions().items()),
    )


def write_card(folder: Path, text: str) -> None:
    """Write it as README.md."""
    ModelCard(text).save(folder / "README.md")


def front_matter(base: BaseModel, origin: Origin, title: str) -> str:
    """The card's metadata as YAML; keys that have no value are absent."""
    results = eval_results(origin.measured)
    return ModelCardData(
        model_name=title if results else None,
        base_model=base.source if base.kind == "hub" else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["cskv", "kv-cache", "low-rank"],
        datasets=sorted(origin.datasets) or None,
        eval_results=results or None,
        **_license(base),
    ).to_yaml()


def shown_name(base: BaseModel) -> str:
    """The Hub id, or the last part of a local path."""
    return base.source if base.kind == "hub" else Path(base.source).name


def _license(base: BaseModel) -> dict[str, Any]:
    """What the base's own card says of its licence."""
    try:
        metadata = metadata_load(base.folder / "README.md") or {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    found = {key: metadata[key] for key in _LICENSE_KEYS if metadata.get(key)}
    if not isinstance(found.get("license"), (str, list)):
        return {}
    if isinstance(found["license"], str) and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", found["license"]):
        return {"license": "other", "license_name": found["license"]}
    return found


def _quality(measured: Sequence[Measurement]) -> str:
    """The section on what was measured; empty where nothing was."""
    rows = [f"| {' | '.join(row)} |" for measurement in measured for row in quality_rows(measurement)]
    if not rows:
        return ""
    head = "\n## Quality\n\nMeasured by `cskv eval` on these files, every token decoded from the compressed cache:\n\n"
    return head + "\n".join(["| | base | CSKV |", "|---|---|---|", *rows]) + "\n"


def _bits(layout: Layout) -> str:
    keys, values = bits_span(layout.bits_k, layout.rank_k), bits_span(layout.bits_v, layout.rank_v)
    return f"; {keys}-bit keys, {values}-bit values"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
