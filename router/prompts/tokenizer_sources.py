"""Sources of tokenizers.

SOURCE of `--tokenizer MODEL=SOURCE` is one of

    DIR                       directory with a tokenizer.json
    hf:OWNER/NAME@REVISION    tokenizer from the Hugging Face Hub (or its cache) at a pinned revision
    unix:PATH                 `kvroute tokenizer` behind a Unix socket
    http://HOST:PORT          server with vLLM's render endpoints
    pods                      render endpoints of the model's own pods
    none                      no tokenizer: its requests are routed by load
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from router.errors import ConfigError
from router.prompts.remote_tokenizers import RenderTokenizer, SidecarTokenizer
from router.prompts.tokenizers import Tokenizer
from tokenization import PromptTokenizer, TokenizerLoadError, hub_directory

_HUB = "hf:"
_SOCKET = "unix:"
_FILES = ("tokenizer.json", "tekken.json")


def open_tokenizers(sources: Mapping[str, Path | str]) -> dict[str, Tokenizer | None]:
    """Open the tokenizer of every base model; see SOURCE above.

    Raises:
        ConfigError: A source is invalid or cannot be loaded.
    """
    return {model: _open_source(model, str(source)) for model, source in sources.items()}


def model_directories(root: Path) -> dict[str, str]:
    """Return the directory of each model below `root` that has a tokenizer.

    A model's name is the path of its directory, NAME or OWNER/NAME; in a cache of the Hub it is that of its
    repository, whose newest snapshot counts.
    """
    files = [file for depth in ("*", "*/*") for name in _FILES for file in root.glob(f"{depth}/{name}")]
    found = {file.parent.relative_to(root).as_posix(): str(file.parent) for file in files}
    cached = [file for name in _FILES for file in root.glob(f"models--*/snapshots/*/{name}")]
    for file in sorted(cached, key=lambda file: file.parent.stat().st_mtime):
        model = file.relative_to(root).parts[0].removeprefix("models--").replace("--", "/")
        found[model] = str(file.parent)
    return found


def _open_source(model: str, source: str) -> Tokenizer | None:
    """Open a tokenizer, without connecting to other processes; None for the source `none`."""

    def checked(found: bool, form: str) -> None:
        if not found:
            raise ConfigError(f"--tokenizer {model}={source}: must have the form {form}")

    if source == "none":
        return None
    if source == "pods":
        return RenderTokenizer(model, None)
    if source.startswith(("http://", "https://")):
        checked(len(source.partition("://")[2].strip("/")) > 0, "http://HOST:PORT")
        return RenderTokenizer(model, source.rstrip("/"))
    if source.startswith(_SOCKET):
        checked(len(source) > len(_SOCKET), "unix:PATH")
        return SidecarTokenizer(model, source.removeprefix(_SOCKET))
    try:
        if source.startswith(_HUB):
            repository, _, revision = source.removeprefix(_HUB).partition("@")
            checked(repository.count("/") == 1 and bool(revision), "hf:OWNER/NAME@REVISION")
            return PromptTokenizer.from_directory(hub_directory(repository, revision))
        return PromptTokenizer.from_directory(source)
    except TokenizerLoadError as error:
        raise ConfigError(f"--tokenizer {model}={source}: {error}") from error
