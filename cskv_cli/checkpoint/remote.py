"""Base models that bring their own code: taken where transformers' own class of that type is the same model."""

import copy
from pathlib import Path

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from cskv_cli.errors import CskvError

_HINT = "cskv exports models that transformers itself defines"
_LAYERS, _VOCABULARY, _TOKENS = 2, 64, 12


def check_same_model(folder: Path, source: str) -> None:
    """Run the code in `folder`, and refuse a model that it makes otherwise than transformers does.

    Both classes get the same random weights in two layers of the model's own shapes, and must give the same logits.
    An exported checkpoint stands on the class of transformers, and brings no code but ours.

    Raises:
        CskvError: the code does not run, or is another model.
    """
    config = _small(AutoConfig.from_pretrained(folder, trust_remote_code=False))
    torch.manual_seed(0)
    ours = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    name = type(ours).__name__
    try:
        own = _small(AutoConfig.from_pretrained(folder, trust_remote_code=True))
        theirs = _own_class(folder, own, type(ours))(own).float().eval()
        theirs.load_state_dict(ours.state_dict())
        logits = _logits(theirs)
    except Exception as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CskvError(
            f"{source}: its own code does not stand in for transformers' {name} ({reason})", _HINT
        ) from error
    if not torch.allclose(logits, _logits(ours), rtol=1e-4, atol=1e-4):
        raise CskvError(f"{source}: its own code is another model than transformers' {name}", _HINT)


def _own_class(folder: Path, config: PretrainedConfig, default: type[nn.Module]) -> type[nn.Module]:
    """Not by `AutoModelForCausalLM`, which would remember it for others of this config class."""
    reference = config.auto_map.get("AutoModelForCausalLM")
    return default if reference is None else get_class_from_dynamic_module(reference, folder)


def _small(config: PretrainedConfig) -> PretrainedConfig:
    config = copy.deepcopy(config)
    config.num_hidden_layers, config.vocab_size = min(_LAYERS, config.num_hidden_layers), _VOCABULARY
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    config.pad_token_id = config.bos_token_id = config.eos_token_id = None
    return config


@torch.no_grad()
def _logits(model: nn.Module) -> torch.Tensor:
    return model(torch.arange(_TOKENS)[None], use_cache=False).logits
