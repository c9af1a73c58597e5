"""cskv: shrink the KV cache of a Hugging Face causal language model (CSKV, arXiv 2409.10593)."""

__version__ = "0.1.0"
