"""Pushing a checkpoint to the Hugging Face Hub: everything that can be refused is asked before the long work."""

import re
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id

from cskv_cli.checkpoint.download import is_transport, reason
from cskv_cli.config import PushConfig
from cskv_cli.errors import CskvError

ATTEMPTS = 5
_TRANSIENT = {408, 429, 500, 502, 503, 504}
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN, or give --token"
_AGAIN = "run the same command again: only what is missing is sent"
_STALE = [
    "model*.safetensors",
    "cskv_*.py",
    "modeling_cskv.py",
]  # of an earlier push; a lone shard would hide the index
Result = TypeVar("Result")


class Push:
    """A repository to push to, in the name of whoever the token belongs to.

    Args:
        source: the base model as the user named it.

    Raises:
        CskvError: no token, an unknown one or one that only reads; a name that is no Hub id; the Hub cannot be reached.
    """

    def __init__(self, config: PushConfig, source: str) -> None:
        self.config = config
        self._token = _usable_token(config.token)
        self._api = HfApi(token=self._token)
        self.repo = _checked_id(config.push) if "/" in (config.push or "") else ""
        user = self._ask(self._api.whoami)
        if user.get("auth", {}).get("accessToken", {}).get("role") == "read":
            raise CskvError(
                "this token may only read", "make one that may write: https://huggingface.co/settings/tokens"
            )
        self.repo = self.repo or _checked_id(f"{user['name']}/{config.push or default_name(source)}")

    def claim(self) -> None:
        """Make sure that the repository and the branch may be written; they are created where they are missing.

        Raises:
            CskvError: they may not, or the repository is public where a private one is wanted.
        """
        config = self.config
        if not config.create_pr:  # anyone who may read may open a pull request
            self._ask(lambda: self._api.create_repo(self.repo, private=config.private or None, exist_ok=True))
            self._ask(lambda: self._api.auth_check(self.repo, write=True))
        info = self._ask(lambda: self._api.model_info(self.repo))
        if config.private and not info.private:
            raise CskvError(f"{self.repo} exists and is public", "drop --private, or make it private in its settings")
        if config.branch and not config.create_pr:
            self._ask(lambda: self._api.create_branch(self.repo, branch=config.branch, exist_ok=True))

    def check_card(self, text: str) -> None:
        """Let the Hub validate a model card.

        Raises:
            CskvError: the Hub refuses it.
        """
        try:
            self._ask(lambda: ModelCard(text).validate())
        except ValueError as error:
            raise CskvError(f"the Hub refuses the model card: {reason(error)}", "see: cskv export --card") from error

    def send(self, folder: Path, names: Iterable[str], card: str) -> dict[str, Any]:
        """Send these files of `folder`, with `card` as README.md; what the repository holds already is not sent.

        Shards and modeling files of an earlier push that are not among them are removed in the same commit.

        Returns:
            repo, commit, url and pull_request (None unless one was opened).

        Raises:
            CskvError: the Hub refuses, or fails for longer than the retries last.
        """
        config = self.config
        with tempfile.TemporaryDirectory(prefix="cskv-push-") as staging:  # links: nothing else can slip in
            for name in names:
                link = Path(staging, name)
                link.parent.mkdir(exist_ok=True)
                link.symlink_to((folder / name).resolve())
            Path(staging, "README.md").unlink(missing_ok=True)
            Path(staging, "README.md").write_text(card, encoding="utf-8")
            upload = lambda: self._api.upload_folder(  # noqa: E731
                repo_id=self.repo,
                folder_path=staging,
                commit_message=config.commit_message,
                revision=config.branch,
                create_pr=config.create_pr,
                delete_patterns=_STALE,
            )
            # after a lost answer a second try could open a second pull request
            commit = self._ask(upload, attempts=1 if config.create_pr else ATTEMPTS)
        pull_request = getattr(commit, "pr_url", None)
        return {"repo": self.repo, "commit": commit.oid, "url": commit.commit_url, "pull_request": pull_request}

    def _ask(self, call: Callable[[], Result], attempts: int = ATTEMPTS) -> Result:
        try:
            return retried(call, attempts)
        except Exception as error:
            cause = _cause(error)
            if isinstance(cause, (HfHubHTTPError, OfflineModeIsEnabled)) or is_transport(cause):
                raise self._explained(cause) from None  # the cause may quote the request
            raise

    def _explained(self, error: BaseException) -> CskvError:
        """A failure of the Hub as one line; the token is in none of them."""
        repo = self.repo or "the Hub"
        status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
        why = reason(error).replace(self._token, "***")
        if isinstance(error, OfflineModeIsEnabled):
            return CskvError("the Hub cannot be asked: HF_HUB_OFFLINE is set", "unset it, or leave out --push")
        if status == 401:
            return CskvError("the Hub does not accept this token", _LOG_IN)
        if status == 403:
            hint = "name a repository of yours with --push USER/NAME, or use a token that may write there"
            return CskvError(f"this token may not write to {repo}: {why}", hint)
        if status == 404:
            hint = "check its name, that the token may see it, and that it exists (--create-pr needs one)"
            return CskvError(f"{repo} is not on the Hub: {why}", hint)
        if status == 429:
            return CskvError(f"the Hub asks to slow down (429) and {ATTEMPTS} tries were not enough", _AGAIN)
        if status is not None and status < 500:
            return CskvError(f"the Hub refuses ({status}): {why}", "check the flags of --push")
        return CskvError(f"the Hub failed for {repo}: {why}", _AGAIN)


def default_name(source: str) -> str:
    """`<base>-cskv`, in characters that a Hub id may have."""
    base = source.rstrip("/").split("/")[-1].removesuffix(".gguf")
    return re.sub(r"(-|\.)\1+", r"\1", re.sub(r"[^A-Za-z0-9_.-]+", "-", base)).strip("-.")[:90] + "-cskv"


def retried(call: Callable[[], Result], attempts: int = ATTEMPTS) -> Result:
    """What `call` returns, tried again with back-off for as long as the Hub fails in a way that passes."""
    for attempt in range(1, attempts + 1):
        try:
            return call()
        except Exception as error:
            cause = _cause(error)
            if attempt == attempts or not _passes(cause):
                raise
            time.sleep(_asked_to_wait(cause) or 2 ** (attempt - 1))
    raise AssertionError("unreachable")


def _passes(error: BaseException) -> bool:
    if isinstance(error, HfHubHTTPError):
        return error.response.status_code in _TRANSIENT
    return is_transport(error) and not isinstance(error, OfflineModeIsEnabled)


def _cause(error: BaseException) -> BaseException:
    """What is behind the library's `RuntimeError("Error while uploading ...")`."""
    return error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ is not None else error


def _asked_to_wait(error: BaseException) -> int:
    """Seconds in Retry-After; 0 where it is not said."""
    headers = error.response.headers if isinstance(error, HfHubHTTPError) else {}
    value = headers.get("Retry-After", "")
    return int(value) if value.isdigit() else 0


def _usable_token(given: str | None) -> str:
    token = given or get_token()
    if not token:
        raise CskvError("pushing needs a token, and there is none", _LOG_IN)
    if not re.fullmatch(r"[\x21-\x7e]+", token):  # an HTTP library would quote it in its complaint
        raise CskvError("the token has blanks or characters that no token has", _LOG_IN)
    return token


def _checked_id(repo: str) -> str:
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise CskvError(f"{repo} is no Hub id: {reason(error)}", "write --push USER/NAME") from error
    return repo
