"""`cskv quantize`."""

from typing import Annotated, Any

import typer

from cskv_cli.commands.finetune import show_training
from cskv_cli.config import FinetuneConfig, QuantizeConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run

UNQUANTIZED = 16
BITS_HELP = "Bits of key and of value latents: 2, 3, 4 or 8; 16 is not to quantize."
BitsOption = Annotated[int | None, typer.Option("--bits", help=BITS_HELP)]


QatOption = Annotated[
    bool, typer.Option("--qat", help="Train the factors with the codes in the loop (the settings of finetune).")
]


@verb(without=("qat",), quantize=QuantizeConfig, training=FinetuneConfig)
def quantize(
    settings: Settings,
    console: Console,
    bits: BitsOption = None,
    qat: QatOption = False,
    run: RunOption = DEFAULT_RUN,
) -> None:
    """Choose how the latents become packed codes of a few bits."""
    if bits == UNQUANTIZED:
        raise typer.BadParameter("16 bits are not to quantize: cskv compress --bits 16 leaves this stage out")
    settings["quantize"] = bits_settings(bits, settings["quantize"])
    training = settings.pop("training")
    if qat:
        settings["quantize"]["qat"] = training
    elif set(training) - {"seed"}:
        raise typer.BadParameter(f"--{min(training).replace('_', '-')} is a setting of training: give --qat too")
    from cskv_cli.layout import load_layout
    from cskv_cli.pipeline import Pipeline

    here = Run(run)
    with here.lock():
        pipeline = Pipeline(here, None, None, settings, console)
        here.require("calibrate")
        manifest = pipeline.quantize(pipeline.factors())
    layout, report = load_layout(run / "quantize"), manifest.report
    rows = [(f"layer {e['index']}", *[cell for name in "kv" for cell in _cells(e[name])]) for e in report["layers"]]
    total = report["added_error"]
    console.table(
        "Relative error that quantization adds on the calibration sample",
        ("", "keys", "clip", "rotated", "values", "clip", "rotated"),
        [*rows, ("all", f"{total['k']:.2%}", "", "", f"{total['v']:.2%}", "", "")],
    )
    if "qat" in report:
        show_training(console, report["qat"])
    content = {"folder": str(run / "quantize"), "bits_k": layout.bits_k, "bits_v": layout.bits_v}
    console.result(content | {"group": layout.group} | report)


def bits_settings(bits: int | None, given: dict[str, Any]) -> dict[str, Any]:
    """`--bits` as the settings it stands for.

    Raises:
        typer.BadParameter: it is given beside both of those.
    """
    if bits is None or bits == UNQUANTIZED:
        return given
    if {"bits_k", "bits_v"} <= given.keys():
        raise typer.BadParameter("--bits says the same as --bits-k and --bits-v: give one or the others")
    return {"bits_k": bits, "bits_v": bits} | given


def _cells(choice: dict[str, Any]) -> tuple[str, str, str]:
    return f"{choice['added_error']:.2%}", f"{choice['clip']:g}", "yes" if choice["rotated"] else ""
