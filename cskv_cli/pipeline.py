"""The stages in their order: each reuses what the run directory holds, and makes what it does not."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cskv_cli.allocation import ALLOCATION, AUTO
from cskv_cli.config import (
    CalibrateConfig,
    ExportConfig,
    FinetuneConfig,
    InitConfig,
    QuantizeConfig,
    SearchConfig,
    StageConfig,
)
from cskv_cli.console import Console
from cskv_cli.distributed import workers
from cskv_cli.errors import CskvError
from cskv_cli.options import Settings, validation_message
from cskv_cli.run import Manifest, Run, sha256

SHARED = ("calibrate", "finetune", "quantize")  # stages on which several processes work together


class Pipeline:
    """One run directory, its base model and the flags given; a `dry` one is only for planning.

    A stage none of whose flags are given keeps the settings it was last made with.
    """

    def __init__(
        self,
        run: Run,
        model: str | None,
        revision: str | None,
        settings: Settings,
        console: Console,
        *,
        dry: bool = False,
        trust_code: bool = False,
    ) -> None:
        from cskv_cli.data.sources import with_absolute_path
        from cskv_cli.stages.base import open_base

        self.run, self.settings, self.console = run, settings, console
        self._said: set[str] = set()
        texts = [settings.get(stage) for stage in ("calibrate", "search", "finetune")]
        for given in (*texts, settings.get("quantize", {}).get("qat")):
            if given and (data := given.get("data")):
                given["data"] = tuple(map(with_absolute_path, [data] if isinstance(data, str) else data))
        for given in (settings.get("init", {}), settings.get("quantize", {})):
            if given.get("allocation") not in (None, AUTO):
                given["allocation"] = str(Path(given["allocation"]).expanduser().absolute())
        with workers().main_first():
            opened = open_base(run, model, revision, console.progress, dry=dry, trust_code=trust_code)
        self.base, self._base_manifest = opened
        for note in self.base.notes:
            console.note(note)

    def config(self, stage: str, kind: type[StageConfig]) -> Any:
        """The settings a stage would be made with."""
        given = self.settings.get(stage, {})
        config = self.run.remembered(stage, given, kind)
        for name, (was, now) in self.run.fallen_back(stage, given, config).items():
            self._say_once(f"{stage}: {name} is not given and now {now}; it was {was}")
        return config

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            self.console.warn(text)

    def calibrate(self) -> Manifest:
        """Statistics of the layers' inputs."""
        from cskv_cli.checkpoint.load import load_tokenizer
        from cskv_cli.stages import calibrate

        config = self.config("calibrate", CalibrateConfig)

        def make(inputs: dict[str, str]) -> Manifest:
            windows = None
            if workers().main:
                tokenizer = load_tokenizer(self.base.folder)
                windows = calibrate.windows_for(config, self.base, tokenizer, self.console.progress)
            windows = workers().told(windows)
            for note in windows.notes:
                self.console.warn(note)
            return calibrate.calibrate(self.run, self.base, config, inputs, windows, self.console.progress)

        inputs = {"base": self._base_manifest.digest} | self._texts("calibrate", config.data)
        return self._stage("calibrate", config, inputs, make)

    def _texts(self, stage: str, data: tuple[str, ...]) -> dict[str, str]:
        """Digests of the text files; a file that is gone counts as it was when the stage last read it."""
        from cskv_cli.data.sources import parse_source

        known = self.run.manifest(stage)
        digests = {}
        for text in data:
            try:
                source = parse_source(text)
            except CskvError:
                if known is None or f"data:{text}" not in known.inputs:
                    raise
                digests[f"data:{text}"] = known.inputs[f"data:{text}"]
                continue
            if source.kind in ("file", "folder"):
                path = Path(source.name)
                files = [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file())
                digests[f"data:{text}"] = self._digest(path, files)
        return digests

    def _digest(self, folder: Path, files: list[Path]) -> str:
        from cskv_cli.checkpoint.weights import file_hashes

        cache = self.run.path / ".hashes.json"
        contents = {str(path.relative_to(folder)): file_hashes([path], cache)[path.name] for path in files}
        return hashlib.sha256(json.dumps(contents, sort_keys=True).encode()).hexdigest()

    def analyze(self) -> Manifest:
        """Spectra of the caches."""
        from cskv_cli.stages import analyze

        calibrated = self.calibrate()

        def make(inputs: dict[str, str]) -> Manifest:
            return analyze.analyze(self.run, self.base, calibrated, self.console.progress)

        return self._stage("analyze", analyze.AnalyzeConfig(), {"calibrate": calibrated.digest}, make)

    def search(self) -> Manifest:
        """Rank and bits per layer, under a budget of bytes."""
        from cskv_cli.stages.search import search

        config = self.config("search", SearchConfig)
        return self._stage(
            "search",
            config,
            self._search_inputs(config),
            lambda inputs: search(self.run, self.base, config, inputs, self.console.progress),
        )

    def plan_search(self) -> dict[str, Any]:
        """What `search` would do."""
        from cskv_cli.stages.search import plan

        config = self.config("search", SearchConfig)
        return plan(self.run, self.base, config, self._search_inputs(config), self.console.progress)

    def _search_inputs(self, config: SearchConfig) -> dict[str, str]:
        return {"calibrate": self.run.manifest("calibrate").digest} | self._texts("search", config.data)

    def allocation(self, config: InitConfig | QuantizeConfig) -> tuple[Path | None, dict[str, str]]:
        """The allocation file that a config names, and its digest as an input.

        Raises:
            CskvError: there is none, or the search's own was edited in place.
        """
        if config.allocation is None:
            return None, {}
        if config.allocation != AUTO:
            path = Path(config.allocation)
            if not path.is_file():
                raise CskvError(f"there is no allocation {path}", "name another one, or run: cskv search")
            return path, {f"allocation:{path}": sha256(path)}
        path, manifest = self.run.folder("search") / ALLOCATION, self.run.manifest("search")
        if manifest is not None and path.is_file() and sha256(path) != manifest.files[ALLOCATION]["sha256"]:
            raise CskvError(
                f"{path} was edited: the search would no longer be what it says",
                f"move it out of the run directory and give it by name: --allocation {ALLOCATION}",
            )
        return path, {"search": self.run.require("search").digest}

    def init(self, calibrated: Manifest) -> Manifest:
        """Factors."""
        from cskv_cli.stages.init import init

        config = self.config("init", InitConfig)
        path, chosen = self.allocation(config)
        return self._stage(
            "init",
            config,
            {"calibrate": calibrated.digest} | chosen,
            lambda inputs: init(self.run, self.base, config, inputs, self.console.progress, path),
        )

    def finetune(self, factors: Manifest) -> Manifest:
        """Trained factors."""
        from cskv_cli.stages.finetune import finetune

        config = self.config("finetune", FinetuneConfig)
        return self._stage(
            "finetune",
            config,
            self._training_inputs("finetune", factors, config),
            lambda inputs: finetune(self.run, self.base, factors.stage, config, inputs, self.console.progress),
        )

    def _training_inputs(self, stage: str, factors: Manifest, config: FinetuneConfig | None) -> dict[str, str]:
        """Digests of the factors, the statistics, and the text where it is not what was calibrated on."""
        inputs = {factors.stage: factors.digest, "calibrate": self.run.manifest("calibrate").digest}
        return inputs | (self._texts(stage, config.data) if config else {})

    def quantize(self, factors: Manifest) -> Manifest:
        """Factors in bases that quantize well, trained with the codes in the loop if asked for, and how to quantize."""
        from cskv_cli.stages.quantize import quantize

        config = self.config("quantize", QuantizeConfig)
        path, chosen = self.allocation(config)
        return self._stage(
            "quantize",
            config,
            self._training_inputs("quantize", factors, config.qat) | chosen,
            lambda inputs: quantize(self.run, self.base, factors.stage, config, inputs, self.console.progress, path),
        )

    def factors(self) -> Manifest:
        """The factors not yet quantized: trained ones where there are any.

        Raises:
            CskvError: there are none, or they no longer hold.
        """
        return self.run.require(self._last("finetune", "init"))

    def export(self, source: str | None = None) -> Manifest:
        """The checkpoint, from the factors of stage `source`, or else of the one that the settings name."""
        from cskv_cli.checkpoint.writer import extra_files
        from cskv_cli.stages.export import export

        config = self.config("export", ExportConfig)
        source = self._source(config, source)
        extras = self._digest(self.base.folder, extra_files(self.base.folder))
        inputs = {source: self.run.require(source).digest, "other files of the base": extras}
        return self._stage(
            "export",
            config,
            inputs,
            lambda inputs: export(self.run, self.base, config, source, inputs, self.console.progress),
        )

    def card(self, repo: str | None = None, source: str | None = None) -> str:
        """The model card of the export from stage `source`, with what was measured of it.

        The weights need not be exported yet.
        """
        from cskv_cli.checkpoint.card import PLACEHOLDER
        from cskv_cli.measurements import measured
        from cskv_cli.stages.export import preview_card

        config = self.config("export", ExportConfig)
        source = self._source(config, source)
        self.run.require(source)
        return preview_card(self.run, self.base, config, source, measured(self.run), repo or PLACEHOLDER)

    def _source(self, config: ExportConfig, source: str | None) -> str:
        source = source or config.factors
        return self._last("quantize", "finetune", "init") if source == "auto" else source

    def _last(self, *stages: str) -> str:
        """The first of these that is there, or else the last of them."""
        return next((stage for stage in stages if self.run.manifest(stage) is not None), stages[-1])

    def _stage(
        self, stage: str, config: StageConfig, inputs: dict[str, str], make: Callable[[dict[str, str]], Manifest]
    ) -> Manifest:
        if workers().told(self._reused(stage, config, inputs)):
            return self.run.manifest(stage)
        if workers().main or stage in SHARED:
            make(inputs)
        workers().wait()
        self.console.note(f"{stage}: wrote {self.run.folder(stage)}")
        return self.run.manifest(stage)

    def _reused(self, stage: str, config: StageConfig, inputs: dict[str, str]) -> bool:
        if not workers().main or not self.run.reusable(stage, config, inputs):
            return False
        try:
            self.run.require(stage)
        except CskvError as error:
            self.console.warn(f"{error.message}; making it again")
            return False
        self.console.note(f"{stage}: reused {self.run.folder(stage)}")
        return True


def checked(kind: type[StageConfig], values: Any, where: str) -> StageConfig:
    """A config from values of a file; what is wrong is said with the file's name.

    Raises:
        CskvError: a key or value that the stage does not have.
    """
    try:
        return kind.model_validate(values)
    except ValidationError as error:
        raise CskvError(f"{where}: {validation_message(error)}", "see: cskv recipes show smollm2-135m") from error
