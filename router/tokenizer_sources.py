"""Where a model's tokenizer comes from: the text of `--tokenizer MODEL=SOURCE` in, a tokenizer out.

SOURCE is one of

    DIR                       a directory that holds a tokenizer.json
    hf:OWNER/NAME@REVISION    the same, from the Hugging Face Hub (or its cache) at a pinned revision
    unix:PATH                 a `kvroute tokenizer` behind a Unix socket
    http://HOST:PORT          a server with vLLM's render endpoints
    pods                      the render endpoints of the model's own pods
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from router.errors import ConfigError
from router.pods import Pod
from router.prompt_tokens import PromptTokens
from router.request import RouteRequest
from router.tokenizer_render import RenderTokenizer
from router.tokenizer_sidecar import SidecarTokenizer
from tokenization import PromptTokenizer, TokenizerLoadError
from tokenization.hub import hub_directory

_PODS = "pods"
_HUB = "hf:"
_SOCKET = "unix:"
_URLS = ("http://", "https://")


class RemoteTokenizer(Protocol):
    """A tokenizer outside of this process."""

    @property
    def keeps_deadline(self) -> bool:
        """Whether `prompt_tokens` surely returns in time; else it needs a thread of its own."""

    def prompt_tokens(
        self, request: RouteRequest, context_tokens: int | None, pods: Sequence[Pod], timeout_s: float
    ) -> PromptTokens:
        """Tokenizes a request.

        Raises:
            RequestError: 400, when the prompt is not what the API allows.
            TokenizerUnavailableError: There is no answer.
            TimeoutError: There is none in time.
        """

    def close(self) -> None:
        """Lets connections go."""


def open_source(model: str, source: str) -> PromptTokenizer | RemoteTokenizer:
    """Opens a tokenizer; those in other processes are not asked yet.

    Raises:
        ConfigError: The source is misspelled, or a local one cannot be loaded; names the flag.
    """

    def checked(found: bool, form: str) -> None:
        if not found:
            raise ConfigError(f"--tokenizer {model}={source}: must have the form {form}")

    if source == _PODS:
        return RenderTokenizer(model, None)
    if source.startswith(_URLS):
        checked(len(source.partition("://")[2].strip("/")) > 0, "http://HOST:PORT")
        return RenderTokenizer(model, source.rstrip("/"))
    if source.startswith(_SOCKET):
        checked(len(source) > len(_SOCKET), "unix:PATH")
        return SidecarTokenizer(model, source.removeprefix(_SOCKET))
    if source.startswith(_HUB):
        repository, _, revision = source.removeprefix(_HUB).partition("@")
        checked(repository.count("/") == 1 and bool(revision), "hf:OWNER/NAME@REVISION")
        return _loaded(model, source, lambda: hub_directory(repository, revision))
    return _loaded(model, source, lambda: Path(source))


def _loaded(model: str, source: str, directory: Callable[[], Path]) -> PromptTokenizer:
    try:
        return PromptTokenizer.from_directory(directory())
    except TokenizerLoadError as error:
        raise ConfigError(f"--tokenizer {model}={source}: {error}") from error
