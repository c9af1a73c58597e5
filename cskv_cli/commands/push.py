"""`--push`, for the verbs that end in a checkpoint."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from typer.core import TyperCommand

from cskv_cli.config import PushConfig
from cskv_cli.run import Manifest, Run

if TYPE_CHECKING:
    from cskv_cli.pipeline import Pipeline


class PushCommand(TyperCommand):
    """A command whose `--push` may stand without a value, which is then empty."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As of a command, after `--push` without a value became `--push=`."""
        return super().parse_args(ctx, list(_with_values(args)))


def _with_values(args: list[str]) -> Iterator[str]:
    for argument, following in zip(args, [*args, "-"][1:], strict=True):
        yield "--push=" if argument == "--push" and following.startswith("-") else argument


class Target:
    """The repository to push to, checked before the long work.

    Args:
        model: the base model, where it is given; else the one that the run remembers.
        dry: only ask who pushes; nothing is created.

    Raises:
        CskvError: the Hub would refuse.
    """

    def __init__(self, config: PushConfig, run: Run, model: str | None, dry: bool = False) -> None:
        from cskv_cli.checkpoint.hub import Push

        known = run.manifest("base")
        source = model or ("" if known is None else known.config["source"])
        self._push = Push(config, source)
        if not dry:
            self._push.claim()

    def check(self, pipeline: "Pipeline") -> None:
        """Let the Hub validate the metadata of the card to come."""
        from cskv_cli.checkpoint.card import Origin, front_matter

        front = front_matter(pipeline.base, Origin(recipe={}), self._push.repo.rsplit("/", 1)[-1])
        self._push.check_card(f"---\n{front}\n---\n")

    def send(self, pipeline: "Pipeline", export: Manifest) -> dict[str, Any]:
        """Push the files of the finished export and its card; see `Push.send`."""
        source = next(stage for stage in ("quantize", "finetune", "init") if stage in export.inputs)
        card = pipeline.card(self._push.repo, source)
        return self._push.send(pipeline.run.folder("export"), export.files, card)
