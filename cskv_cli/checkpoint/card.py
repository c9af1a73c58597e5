"""The model card of an exported checkpoint."""

from pathlib import Path
from typing import Any

from huggingface_hub import ModelCard, ModelCardData

from cskv_cli import __version__
from cskv_cli.checkpoint.base import BaseModel
from cskv_cli.layout import Layout, bits_span, span

_CARD = """---
{front}
---

# {title}

{base} with a smaller KV cache: the keys and values of old tokens are kept as low-rank latents
([CSKV](https://arxiv.org/abs/2409.10593)), those of the last {window} and the first {sinks} tokens exactly.
The weights are the base model's own; {kept} of its cache are left per token.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_OR_REPO", trust_remote_code=True)
tokenizer = AutoTokenizer.from_pretrained("PATH_OR_REPO")
```

Without `trust_remote_code` the same files load as the plain base model, with its full cache.

| tokens | base cache | CSKV cache |
|---|---|---|
{memory}

Latent channels per layer of {channels}: keys {rank_k}, values {rank_v}{bits}. Made with cskv {version}.

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


def write_card(folder: Path, base: BaseModel, layout: Layout, report: dict[str, Any]) -> None:
    """Write README.md; a local base is named by its folder alone, so that no path of this machine is in it."""
    on_hub = base.kind == "hub"
    name = base.source if on_hub else Path(base.source).name
    data = ModelCardData(
        base_model=base.source if on_hub else None,
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["cskv", "kv-cache", "low-rank"],
    )
    per_token = report["cache_bytes_per_token"]
    memory = "\n".join(
        f"| {int(tokens):,} | {_megabytes(size['base'])} | {_megabytes(size['cskv'])} |"
        for tokens, size in report["cache_bytes"].items()
    )
    text = _CARD.format(
        front=data.to_yaml().strip(),
        title=f"{Path(name).stem if base.kind == 'gguf' else name.rsplit('/', 1)[-1]}-cskv",
        base=f"[{name}](https://huggingface.co/{name})" if on_hub else name,
        window=layout.window,
        sinks=layout.sinks,
        kept=f"{per_token['cskv'] / per_token['base']:.1%}",
        memory=memory,
        channels=report["channels"],
        rank_k=span(layout.rank_k),
        rank_v=span(layout.rank_v),
        bits=_bits(layout) if layout.quantized else "",
        version=__version__,
    )
    ModelCard(text).save(folder / "README.md")


def _bits(layout: Layout) -> str:
    keys, values = bits_span(layout.bits_k, layout.rank_k), bits_span(layout.bits_v, layout.rank_v)
    return f"; {keys}-bit keys, {values}-bit values"


def _megabytes(size: float) -> str:
    return f"{size / 1e6:,.1f} MB"
