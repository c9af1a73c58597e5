"""A base model with one decoder layer in memory at a time."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import align_module_device, has_offloaded_params
from torch import nn
from transformers import AutoConfig, DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.utils.logging import disable_progress_bar

from cskv_cli.checkpoint.classes import base_class, empty_base
from cskv_cli.errors import CskvError
from cskv_cli.modeling.cskv_structure import find_attention, find_decoder, key_value_rows, weight_by_input
from cskv_cli.progress import Advance

SEE_MODELS = "cskv cannot compress it; docs/models.md lists the families it can, and why it cannot others"
BATCH_TOKENS = 2048  # in one call of a layer: enough to keep a processor busy, few enough for a small memory

Visit = Callable[[int, torch.Tensor], None]


def load_by_layer(
    folder: Path, offload_folder: Path, *, dtype: torch.dtype, device: torch.device | str
) -> PreTrainedModel:
    """Load a causal language model whose decoder layers stay on disk; `in_memory` brings one in.

    The layers are read from the checkpoint itself; only what transformers stores otherwise than the checkpoint does
    (mixtures of experts) is written to `offload_folder`, once. Everything else is on `device`, but an untied head,
    which stays on disk too.

    Raises:
        CskvError: the checkpoint lacks a tensor of the model.
    """
    config = AutoConfig.from_pretrained(folder)
    disable_progress_bar()
    model, loading = base_class(config).from_pretrained(
        folder,
        config=config,
        dtype="auto",
        device_map=_device_map(config, device),
        offload_folder=offload_folder,
        output_loading_info=True,
    )
    if missing := sorted(loading["missing_keys"]):
        raise CskvError(f"{folder} lacks {len(missing)} tensors of the model, among them {missing[0]}")
    _cast(model, model.dtype, dtype)
    return model.eval()


def _cast(model: PreTrainedModel, stored: torch.dtype, dtype: torch.dtype) -> None:
    """Change the dtype of the weights, of those on disk too: accelerate gives a weight the dtype of what it replaces.

    Told to `from_pretrained` it would make that read, and map into memory, the whole checkpoint.
    """
    for parameter in model.parameters():
        if parameter.dtype == stored:  # others are kept in float32 by transformers
            parameter.data = parameter.data.to(dtype)


def _device_map(config: PretrainedConfig, device: torch.device | str) -> dict[str, torch.device | str]:
    """Everything of the decoder on `device` but its layers; of the rest only a head that is tied to the embeddings."""
    model = empty_base(config)
    decoder = find_decoder(model)
    tied = bool(model.all_tied_weights_keys)
    places, module, prefix = {}, model, ""
    for step in decoder.name.split("."):
        is_head = lambda child: tied and child is model.get_output_embeddings()  # noqa: E731
        children = {name: child for name, child in module.named_children() if name != step}
        places |= {prefix + name: device if is_head(child) else "disk" for name, child in children.items()}
        module, prefix = getattr(module, step), f"{prefix}{step}."
    places |= {prefix + name: device for name, _ in module.named_children()}
    return places | {decoder.layers_name: "disk"}


@contextmanager
def in_memory(module: nn.Module, device: torch.device | str = "cpu") -> Iterator[nn.Module]:
    """Hold a module's weights on `device`, read once from where they are kept; then let go of them again."""
    parts = list(module.modules())
    hooks = [part._hf_hook for part in parts if has_offloaded_params(part)]
    with ExitStack() as stack:
        for part in parts:
            stack.enter_context(align_module_device(part, device))
        for hook in hooks:
            hook.offload = False  # or each call of the part would read its weights again, and drop them
        try:
            yield module
        finally:
            for hook in hooks:
                hook.offload = True


class LayerByLayer:
    """Windows of tokens on their way through a model: all of them through one decoder layer, then the next.

    Args:
        model: from `load_by_layer`, or any other.
        ids: [windows, seq_len].
        device: where a layer computes.

    Attributes:
        hidden: [windows, seq_len, hidden], on the CPU in the model's dtype: the input of the next layer.
    """

    @torch.no_grad()
    def __init__(self, model: PreTrainedModel, ids: torch.Tensor, device: torch.device | str) -> None:
        decoder = find_decoder(model)
        self.layers = decoder.layers
        self.device = device
        size = max(1, BATCH_TOKENS // ids.shape[1])
        self._batches = [slice(start, min(start + size, len(ids))) for start in range(0, len(ids), size)]
        with _recorded(self.layers) as calls:
            # All windows have one shape, so the masks and rotations of one serve them all.
            decoder.module(ids[:1].to(device), use_cache=False)
            self._arguments = [(args, kwargs) for _, args, kwargs in calls]
            first = calls[0][0]
            self.hidden = torch.empty(*ids.shape, first.shape[-1], dtype=first.dtype)
            for rows in self._batches:
                decoder.module(ids[rows].to(device), use_cache=False)
                self.hidden[rows] = calls[0][0]

    @torch.no_grad()
    def push(self, index: int, visit: Visit | None = None, advance: Advance | None = None) -> None:
        """Replace `hidden` by the output of layer `index`.

        Args:
            visit: called batch by batch with the number of its first window and with what the layer's attention is
                given, [batch, seq_len, hidden] on the device.
            advance: called with the number of windows just done.

        Raises:
            CskvError: the output is not finite.
        """
        layer, rows = self.layers[index], slice(0)
        args, kwargs = self._arguments[index]

        def see(_: nn.Module, given: tuple, named: dict[str, Any]) -> None:
            visit(rows.start, given[0] if given else named["hidden_states"])

        with ExitStack() as stack:
            stack.enter_context(in_memory(layer, self.device))
            if visit:
                stack.callback(find_attention(layer).register_forward_pre_hook(see, with_kwargs=True).remove)
            for rows in self._batches:
                output = layer(self.hidden[rows].to(self.device), *args, **kwargs)
                output = output[0] if isinstance(output, tuple) else output
                if not torch.stack(torch.aminmax(output)).isfinite().all():  # NaN wins; 20 times isfinite's speed
                    raise _overflow(index, output.dtype)
                self.hidden[rows] = output
                if advance:
                    advance(rows.stop - rows.start)


@contextmanager
def _recorded(layers: nn.ModuleList) -> Iterator[list[tuple[torch.Tensor, tuple, dict[str, Any]]]]:
    """Within, the layers compute nothing: each gives back its input and notes what it was last called with.

    Some models take the first of what a layer returns. Then the second layer is given no batch, and tuples are wanted.
    """
    calls: list[Any] = [None] * len(layers)
    wants_tuples: list[bool] = []
    forwards = [layer.forward for layer in layers]

    def recorder(index: int) -> Callable[..., torch.Tensor]:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            first = calls[0][0] if index else hidden_states
            calls[index] = (first, args, kwargs)
            if index == 1 and hidden_states.dim() < first.dim():
                wants_tuples.append(True)
            return (first,) if wants_tuples else first

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.forward = recorder(index)
        yield calls
    finally:
        for layer, forward in zip(layers, forwards, strict=True):
            layer.forward = forward


def _overflow(index: int, dtype: torch.dtype) -> CskvError:
    name = str(dtype).removeprefix("torch.")
    advice = {
        "float16": "compute in a wider type: --dtype bfloat16, or float32",
        "bfloat16": "compute in a wider type: --dtype float32",
    }
    hint = advice.get(name, "the weights of this layer, or of one before it, are damaged")
    return CskvError(f"layer {index} of the base model gives numbers that are not finite in {name}", hint)


def compressible_layers(config: PretrainedConfig) -> list[int]:
    """Return the decoder layers whose cache grows with every token; sliding-window layers are left alone.

    Raises:
        CskvError: there is none, or the model's cache is not one of keys and values by layer.
    """
    text = config.get_text_config(decoder=True)
    caches = DynamicCache(config=text).layers
    if getattr(text, "num_kv_shared_layers", 0) or getattr(text, "kv_sharing_modes", None):
        raise CskvError(f"{text.model_type}: layers share keys and values, which cskv keeps by layer", SEE_MODELS)
    for index, cache in enumerate(caches):
        if type(cache) is DynamicLayer or getattr(cache, "is_sliding", False) and "Linear" not in type(cache).__name__:
            continue
        state = "a state (linear attention or a convolution)" if "Linear" in type(cache).__name__ else "something else"
        raise CskvError(
            f"{text.model_type}: layer {index} keeps {state} in place of keys and values or beside them "
            f"({type(cache).__name__}), which cskv does not know",
            SEE_MODELS,
        )
    layers = [index for index, cache in enumerate(caches) if type(cache) is DynamicLayer]
    if not layers:
        window = getattr(text, "sliding_window", None)
        reason = f"all its layers look at the last {window} tokens only" if window else "no layer has full attention"
        raise CskvError(
            f"this {text.model_type} model has nothing to compress: {reason}, so its cache is bounded", SEE_MODELS
        )
    return layers


def kv_projections(attention: nn.Module) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
    """Return the projections "k" and "v" of an attention layer that is in memory, in float32.

    Returns:
        weight [hidden, channels] (`x @ weight`) and bias [channels], None where there is none.

    Raises:
        CskvError: the layer makes its keys and values in another way.
    """
    try:
        linears = key_value_rows(attention)
    except ValueError as error:
        raise CskvError(str(error)) from error
    return {name: _projection(linear, rows) for name, (linear, rows) in linears.items()}


def _projection(linear: nn.Module, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
    rows = rows.to(linear.weight.device)
    bias = None if getattr(linear, "bias", None) is None else linear.bias.detach()[rows].float()
    return weight_by_input(linear).detach()[:, rows].float(), bias
