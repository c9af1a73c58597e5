"""What the verbs that end in a checkpoint have to say about it."""

from pathlib import Path
from typing import Any

from cskv_cli.console import Console
from cskv_cli.layout import span


def show_checkpoint(
    console: Console, folder: Path, report: dict[str, Any], pushed: dict[str, Any] | None = None
) -> None:
    """Cache bytes before and after, where it was pushed to, and the command to run next."""
    per_token, error = report["cache_bytes_per_token"], report["relative_error"]
    console.table(
        f"KV cache of {report['base_model']}",
        ("", "base", "CSKV"),
        [
            ("bytes per token", f"{per_token['base']:,}", f"{per_token['cskv']:,.0f}"),
            ("share of the base", "100 %", f"{per_token['cskv'] / per_token['base']:.1%}"),
            ("key channels", report["channels"], span(report["rank_k"])),
            ("value channels", report["channels"], span(report["rank_v"])),
            *[
                (f"at {int(tokens):,} tokens", f"{size['base'] / 1e6:,.1f} MB", f"{size['cskv'] / 1e6:,.1f} MB")
                for tokens, size in report["cache_bytes"].items()
            ],
        ],
    )
    when = " before training" if report["trained"] else ""
    console.line(f"Relative error on the calibration tokens{when}: keys {error['k']:.2%}, values {error['v']:.2%}")
    console.line(f"Checkpoint: {folder}   (next: cskv eval {folder})")
    if pushed is not None:
        console.line(f"Pushed to {pushed['repo']}: {pushed['pull_request'] or pushed['url']}")
    console.result({"checkpoint": str(folder), **report} | ({} if pushed is None else {"pushed": pushed}))
