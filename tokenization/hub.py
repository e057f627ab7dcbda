"""A tokenizer's files from the Hugging Face Hub: repository and revision in, a local directory out.

Downloads once, into the Hub's usual cache; HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they
mean to every Hub client. Knows nothing of what is in the files.
"""

from __future__ import annotations

from pathlib import Path

from tokenization.errors import TokenizerLoadError

# No weights: what PromptTokenizer.from_directory reads or looks for.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/tool_use.jinja",
    "generation_config.json",
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tekken.json",
    "tokenizer.model.v*",
)


def hub_directory(repository: str, revision: str, cache: Path | None = None) -> Path:
    """Fetches what is not in the cache yet.

    Args:
        repository: "owner/name".
        revision: Commit, tag or branch; only a commit stays the same for ever.
        cache: Where to keep files; None: the Hub's usual place.

    Raises:
        TokenizerLoadError: The Hub cannot be reached, or does not have it; or its client is not installed.
    """
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import (
            GatedRepoError,
            HfHubHTTPError,
            LocalEntryNotFoundError,
            RepositoryNotFoundError,
            RevisionNotFoundError,
        )
    except ImportError as error:
        raise TokenizerLoadError("huggingface_hub is not installed; pip install 'kvroute[hub]'") from error
    try:
        return Path(
            snapshot_download(repository, revision=revision, cache_dir=cache, allow_patterns=list(_FILES))
        )
    except GatedRepoError as error:
        raise TokenizerLoadError(
            f"{repository} is gated; set HF_TOKEN to a token that may read it"
        ) from error
    except RevisionNotFoundError as error:
        raise TokenizerLoadError(f"{repository} has no revision {revision}") from error
    except RepositoryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository} is not on the Hub; if it is private, set HF_TOKEN to a token that may read it"
        ) from error
    except LocalEntryNotFoundError as error:
        raise TokenizerLoadError(
            f"{repository}@{revision} is not in the cache, and the Hub is not to be reached: {error}"
        ) from error
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise TokenizerLoadError(f"{repository}@{revision} cannot be fetched: {error}") from error
