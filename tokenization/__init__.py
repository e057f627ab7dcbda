"""Tokenization exactly as engines do it; shared by the router and the model server."""

from tokenization.apis.anthropic import messages_as_chat
from tokenization.apis.chat import ITEMS_AT_ONCE_MAX, ManyItemsError, count_items, decoded
from tokenization.apis.responses import responses_as_chat
from tokenization.encoder import TokenIds
from tokenization.errors import (
    MediaPromptError,
    PromptError,
    PromptTooLongError,
    TokenizationError,
    TokenizerLoadError,
    UnsupportedPromptError,
)
from tokenization.images.prompts import ExpandedPrompt
from tokenization.incremental import IncrementalDecoder
from tokenization.prompts import PromptLimits, chat_prefix, chat_prompt, completion_prompts, image_chat
from tokenization.templates.files import hub_directory
from tokenization.tokenizer import TINY_DIRECTORY, PromptTokenizer

__all__ = [
    "ITEMS_AT_ONCE_MAX",
    "TINY_DIRECTORY",
    "ExpandedPrompt",
    "IncrementalDecoder",
    "ManyItemsError",
    "MediaPromptError",
    "PromptError",
    "PromptLimits",
    "PromptTokenizer",
    "PromptTooLongError",
    "TokenIds",
    "TokenizationError",
    "TokenizerLoadError",
    "UnsupportedPromptError",
    "chat_prefix",
    "chat_prompt",
    "completion_prompts",
    "count_items",
    "decoded",
    "hub_directory",
    "image_chat",
    "messages_as_chat",
    "responses_as_chat",
]
