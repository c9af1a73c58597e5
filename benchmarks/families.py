"""Every causal language model of transformers with a tiny config: does it work, is it refused, or does it fail?

    python -m benchmarks.families [MODEL_TYPE ...]

A model works if at full rank, with a window of 4 tokens, it gives the logits of its base.
"""

import sys
import tempfile
from pathlib import Path

import torch
from transformers import CONFIG_MAPPING, PretrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from cskv_cli.checkpoint.classes import base_class, empty_base
from cskv_cli.checkpoint.probe import check_supported
from cskv_cli.errors import CskvError
from tests.families import compressed
from tests.family_configs import ROUTED, SMALL

LARGEST = 3e7  # parameters; what is larger ignores the settings of SMALL
IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(12))


def tiny_config(kind: str) -> PretrainedConfig:
    """SMALL as far as the family takes it.

    Raises:
        Exception: whatever the family says of the last try.
    """
    for left_out in ((), ("head_dim",), ("head_dim", "num_key_value_heads")):
        for more in (ROUTED, {}):
            settings = {name: value for name, value in (SMALL | more).items() if name not in left_out}
            try:
                config = CONFIG_MAPPING[kind](**settings)
                if sum(p.numel() for p in empty_base(config).parameters()) > LARGEST:
                    raise ValueError("it stays large")
                text = config.get_text_config(decoder=True)
                if "sliding_attention" in (getattr(text, "layer_types", None) or []):
                    text.sliding_window = 8
                return config
            except Exception as error:
                last = error
    raise last


def verdict(kind: str) -> str:
    """One line on a model type."""
    try:
        config = tiny_config(kind)
    except Exception as error:
        return f"no tiny config ({type(error).__name__}: {str(error).splitlines()[0]})"
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        try:
            check_supported(Path(folder))
        except CskvError as error:
            return f"refused: {str(error).replace(f' ({folder})', '')}"
    torch.manual_seed(0)
    base = base_class(config)._from_config(config).float().eval()
    greedy = dict(max_new_tokens=10, do_sample=False, return_dict_in_generate=True, output_logits=True)
    models = base, compressed(base, window=4, sinks=2)
    expected, got = (torch.stack(model.generate(IDS, **greedy, eos_token_id=None).logits) for model in models)
    error = (got - expected).abs().max().item()
    return "works" if error < 2e-4 else f"FAILS: logits differ by {error:.2g}"


if __name__ == "__main__":
    for name in sys.argv[1:] or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            print(f"{name}: {verdict(name)}", flush=True)
        except Exception as failure:
            print(f"{name}: FAILS: {type(failure).__name__}: {failure}", flush=True)
