"""`cskv init`."""

from cskv_cli.config import InitConfig
from cskv_cli.console import Console
from cskv_cli.options import DEFAULT_RUN, RunOption, Settings, verb
from cskv_cli.run import Run


@verb(init=InitConfig)
def init(settings: Settings, console: Console, run: RunOption = DEFAULT_RUN) -> None:
    """Factorize the key and value projections of the calibrated model."""
    from cskv_cli.layout import load_layout
    from cskv_cli.pipeline import Pipeline

    here = Run(run)
    with here.lock():
        pipeline = Pipeline(here, None, None, settings, console)
        manifest = pipeline.init(here.require("calibrate"))
    rows = [(f"layer {e['index']}", f"{e['k']:.2%}", f"{e['v']:.2%}") for e in manifest.report["layers"]]
    total = manifest.report["relative_error"]
    console.table(
        "Relative error on the calibration tokens",
        ("", "keys", "values"),
        [*rows, ("all", f"{total['k']:.2%}", f"{total['v']:.2%}")],
    )
    layout = load_layout(run / "init")
    console.result({"folder": str(run / "init"), "rank_k": layout.rank_k, "rank_v": layout.rank_v} | manifest.report)
