"""Models from the Hugging Face Hub as local folders, each failure turned into one line."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from cskv_cli.errors import CskvError

WHAT_TO_PASS = "pass a Hub id, a model folder or a .gguf file"
_AGAIN = "run the command again: what is here already is not fetched again"
_TOKEN = "check HF_TOKEN, which wins over `hf auth login`"
_PATH_SUFFIXES = {".gguf", ".safetensors", ".bin", ".json", ".pt", ".pth"}
_TRANSPORTS = {"httpx", "httpx2", "httpcore", "hf_xet"}  # whose errors mean that the connection failed


def looks_like_path(source: str) -> bool:
    """Whether it can only mean a local path, so that it is not looked up on the Hub."""
    return (
        source.startswith((".", "/", "~"))
        or "\\" in source
        or source.count("/") > 1
        or Path(source).suffix.lower() in _PATH_SUFFIXES
    )


def download(source: str, revision: str | None, patterns: list[str] | None = None) -> Path:
    """A snapshot of the files that match, each Hub failure turned into one line."""
    from huggingface_hub import snapshot_download

    with hub_failures(source, revision):
        return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


@contextmanager
def hub_failures(source: str, revision: str | None) -> Iterator[None]:
    """Turn what huggingface_hub raises into a CskvError that says what to do."""
    from huggingface_hub import errors

    at = f"{source} at revision {revision}" if revision else source
    try:
        yield
    except errors.HFValidationError as error:
        raise CskvError(f"{source}: no such file or folder, and not a Hub id", WHAT_TO_PASS) from error
    except errors.GatedRepoError as error:
        hint = f"ask for access at https://huggingface.co/{source}, then `hf auth login`"
        raise CskvError(f"{source} is gated and your token has no access to it", hint) from error
    except errors.RevisionNotFoundError as error:
        raise CskvError(f"{source} has no revision {revision}", "check --revision on the model's page") from error
    except errors.RepositoryNotFoundError as error:
        hint = "check the spelling; for a private model, `hf auth login`"
        raise CskvError(f"{source}: no such local path, and no such model on the Hub", hint) from error
    except errors.LocalEntryNotFoundError as error:
        if isinstance(error.__cause__, errors.HfHubHTTPError):  # it was reached, and failed
            raise CskvError(f"{at} could not be downloaded: {reason(error.__cause__)}", _AGAIN) from error
        hint = "connect (or unset HF_HUB_OFFLINE), or pass a local folder or a .gguf file"
        raise CskvError(f"{at} is not in the local cache and the Hub cannot be reached", hint) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code != 401:
            raise CskvError(f"{at} could not be downloaded: {reason(error)}", _AGAIN) from error
        raise CskvError(f"{source} could not be read: the Hub does not accept your token", _TOKEN) from error
    except UnicodeEncodeError as error:  # of the header that the token goes into
        raise CskvError(f"{source} could not be read: your token has characters that no token has", _TOKEN) from error
    except Exception as error:
        if not isinstance(error, OSError) and not is_transport(error):
            raise
        raise CskvError(f"{at} could not be downloaded: {reason(error)}", _AGAIN) from error


def is_transport(error: BaseException) -> bool:
    """Whether the connection failed, rather than the Hub saying no."""
    return isinstance(error, (ConnectionError, TimeoutError)) or type(error).__module__.split(".")[0] in _TRANSPORTS


def reason(error: BaseException) -> str:
    """Why the Hub failed, in its own words where it has some, in one line."""
    said = getattr(error, "server_message", None) or str(error)
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
