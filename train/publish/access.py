"""Coming to terms with the Hub: the token, the right to write, what is tried again, and what a refusal means."""

import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from huggingface_hub import HfApi, get_token

# HTTPError is the base of connection errors in whichever HTTP client the installed huggingface_hub uses.
from huggingface_hub.errors import (
    HFValidationError,
    HTTPError,
    OfflineModeIsEnabled,
    OIDCError,
    RepositoryNotFoundError,
)
from huggingface_hub.utils import validate_repo_id

from configs.errors import UserError

Result = TypeVar("Result")

TRIES, FIRST_WAIT_S, LONGEST_WAIT_S = 5, 1.0, 300.0
PASSING = {408, 409, 412, 429, 500, 502, 503, 504}  # what goes by itself
REFUSALS = (HTTPError, OSError, RuntimeError, ValueError, KeyError)  # all that huggingface_hub raises for an answer

ADVICE = {
    400: "correct what the Hub says is wrong",
    401: "log in with `hf auth login`, or set HF_TOKEN to a token that is valid and may write",
    403: "take a token that may write to this namespace, or push to a namespace of your own",
    404: "check the spelling of repository and revision, and that the token may see them",
    409: "somebody else is changing the repository: wait a moment",
    412: "somebody else is changing the repository: wait a moment",
    413: "look for a file in the folder that should not be there",
    429: "the Hub asks for a pause: wait a few minutes",
}


def check_repo_id(repo_id: str) -> None:
    """Raises UserError for a name that is not NAME/REPO."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise UserError(f"repository {repo_id!r}: expected NAME/REPO, e.g. my-name/my-draft ({error})") from None
    if "/" not in repo_id:
        raise UserError(f"repository {repo_id!r}: expected NAME/REPO, e.g. my-name/{repo_id}")


def usable_token(token: str | None, command: str) -> str:
    """`token`, or the one that huggingface_hub finds. Raises UserError naming `command` when there is none to use."""
    try:
        found = token or get_token()
    except OIDCError:
        raise UserError(f"HF_OIDC_RESOURCE is set, but gave no token; unset it, then run: {command}") from None
    if not found:
        raise UserError(f"no Hub token; log in with `hf auth login` or set HF_TOKEN, then run: {command}")
    # The HTTP client would refuse such a header with a message that quotes it.
    if not (found.isascii() and found.isprintable()) or " " in found:
        raise UserError(f"the Hub token holds a space or an unprintable character; set it again, then run: {command}")
    return found


def open_repository(repo_id: str, private: bool, revision: str | None, token: str) -> HfApi:
    """The Hub's API, once the token may write to `repo_id` and the repository and its branch `revision` are there.

    Raises UserError for a token that can only read, for `private` asked of a public repository; and whatever
    huggingface_hub raises for a refusal.
    """
    api = HfApi(endpoint=_endpoint(), token=token)
    account = retrying(api.whoami)
    if ((account.get("auth") or {}).get("accessToken") or {}).get("role") == "read":
        raise UserError(f"{repo_id}: the Hub token can only read; {ADVICE[403]}")
    # None and not False: an organisation whose repositories are private by default keeps its default.
    retrying(lambda: api.create_repo(repo_id, private=private or None, exist_ok=True))
    _check_right_to_write(api, repo_id)
    if private and not retrying(lambda: api.model_info(repo_id)).private:
        raise UserError(
            f"{repo_id}: --private was asked, but the repository exists and is public; make it private in "
            "its settings, push without --private, or choose another name"
        )
    if revision and revision != "main" and not revision.startswith("refs/"):
        retrying(lambda: api.create_branch(repo_id, branch=revision, exist_ok=True))
    return api


def _check_right_to_write(api: HfApi, repo_id: str) -> None:
    """An existing repository may answer that it exists and yet let nobody but its owner write."""
    try:
        retrying(lambda: api.auth_check(repo_id, write=True))
    except HTTPError as error:
        if _status(error) in (401, 403) or isinstance(error, RepositoryNotFoundError):
            raise  # any other answer: a Hub without this page, whose commit will tell


def retrying(call: Callable[[], Result]) -> Result:
    """What `call` gives; it is called again, after a pause that doubles, when a refusal is one that passes."""
    wait = FIRST_WAIT_S
    for _ in range(TRIES - 1):
        try:
            return call()
        except REFUSALS as error:
            if isinstance(error, UserError) or not _passes(error):
                raise
            time.sleep(min(_asked_wait(error) or wait, LONGEST_WAIT_S))
            wait *= 2
    return call()


@contextmanager
def hub_refusals(repo_id: str, token: str, what_next: str) -> Iterator[None]:
    """Turn whatever the Hub or the network answers into one line: what it said, what it means, what next."""
    try:
        yield
    except UserError:
        raise
    except REFUSALS as error:
        # Without the cause: a server may quote the token, and a traceback would print it.
        raise UserError(f"{repo_id}: {_reason(error, token)}. {what_next}") from None


def _endpoint() -> str | None:
    """huggingface_hub reads HF_ENDPOINT once, when it is imported; a notebook may set it later."""
    said = os.environ.get("HF_ENDPOINT", "").rstrip("/")
    if said and not re.fullmatch(r"https?://[\w.:-]+(/[\w./-]*)?", said):
        raise UserError(f"HF_ENDPOINT {said!r}: expected an address like https://huggingface.co")
    return said or None


def _passes(error: Exception) -> bool:
    """Whether it may work in a moment: a busy Hub, another commit under way, a cut connection."""
    status = _status(error)
    if status is None:
        if isinstance(error, OfflineModeIsEnabled) or getattr(error, "filename", None):
            return False  # a file of ours that cannot be read
        return isinstance(error, HTTPError | ConnectionError | TimeoutError) or error.__cause__ is not None
    return status in PASSING


def _asked_wait(error: Exception) -> float | None:
    """Seconds that the Hub asks to wait, if it does: Retry-After, or the t of its own `ratelimit` header."""
    headers = getattr(_response(error), "headers", {})
    asked = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)", str(headers.get("Retry-After", "")).strip())
    asked = asked or re.search(r"\bt=([0-9]+)", str(headers.get("ratelimit", "")))
    return float(asked[1]) if asked else None


def _reason(error: Exception, token: str) -> str:
    """What the Hub or the network said and what to do about it, on one line and without the token."""
    words = getattr(error, "server_message", None) or str(error.__cause__ or error)
    said = " ".join(str(words).split()).replace(token, "***")[:300]
    status = _status(error)
    if status is None and getattr(error, "filename", None):
        return f"{getattr(error, 'filename', '')} cannot be read ({getattr(error, 'strerror', said)})"
    if status is None:
        advice = "check the network, HF_ENDPOINT and HF_HUB_OFFLINE"
        return f"the Hub can't be reached ({type(error).__name__}: {said}); {advice}"
    advice = ADVICE.get(status, "the Hub has trouble: wait a few minutes" if status >= 500 else "see what it says")
    return f"the Hub answered {status} ({said}); {advice}"


def _status(error: Exception) -> int | None:
    status: int | None = getattr(_response(error), "status_code", None)
    return status


def _response(error: BaseException | None) -> Any:
    # A failed upload of weights arrives as a RuntimeError whose cause holds the answer.
    while error is not None:
        response = getattr(error, "response", None)
        if response is not None:
            return response
        error = error.__cause__
    return None
