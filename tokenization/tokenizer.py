"""Tokenizer of one model, loaded from a Hugging Face directory: encodes, decodes and renders chats.

Its token ids and rendered chats equal those of the model's engines.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from tokenization.coded.harmony import HarmonyPrompts
from tokenization.coded.mistral import MistralPrompts
from tokenization.encoder import TextEncoder, TokenIds
from tokenization.errors import TokenizerLoadError, UnsupportedPromptError
from tokenization.images.rules import ImageFiles, ImageRule, image_rule
from tokenization.templates.chat_template import ChatTemplate, Message
from tokenization.templates.files import (
    ANY_TEXT,
    GPT_OSS,
    TemplateSources,
    mistral_file,
    mistral_pattern,
    read_json,
    template_sources,
    token_text_of,
)

# Tokenizer of the packaged model `kvroute-tiny`: byte-level BPE, 4,096 tokens, a ChatML-like template.
TINY_DIRECTORY = Path(__file__).parent / "tiny"

# Decoded text of bytes that are not (yet) a UTF-8 character.
REPLACEMENT = "\ufffd"

_IMAGE_FILES = ("config.json", "preprocessor_config.json", "processor_config.json")
_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class TokenTexts(dict[int, str | None]):
    """Texts of single ids, independent of their neighbours; None for an id that may be part of a character.

    A cache, because generation needs one per token; it has at most one entry per id of the vocabulary. The
    tokenizer must have a `ByteLevel` decoder.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens

    def __missing__(self, token_id: int) -> str | None:
        text: str = self._tokenizer.decode([token_id], skip_special_tokens=self._skip_special_tokens)
        own = self[token_id] = None if REPLACEMENT in text else text
        return own


@dataclass(eq=False)
class PromptTokenizer:
    """Tokenizer of one model with its chat templates and image rule. Thread-safe."""

    tokenizer: Tokenizer
    chat_template: ChatTemplate | None  # None if the model has none, or its engines do not use it
    eos_token_ids: frozenset[int]  # ids that end a generation
    tool_template: ChatTemplate | None = None
    mistral_text: re.Pattern[str] | None = None
    image_files: InitVar[ImageFiles | None] = None
    coded: HarmonyPrompts | MistralPrompts | None = None  # builds chats instead of the template

    def __post_init__(self, image_files: ImageFiles | None) -> None:
        tokenizer = self.tokenizer
        # Engines truncate and pad by themselves; settings in tokenizer.json must not change the ids.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self.image_rule: ImageRule | None = None  # expansion of images in prompts; None if unknown
        if image_files is not None:
            self.image_rule = image_rule(image_files, tokenizer)
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        # Characters of the longest token; a text has at least (its length / this) tokens.
        self.token_chars_max = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        added = tokenizer.get_added_tokens_decoder()
        # Skipped by decoding unless `skip_special_tokens` is False.
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._token_texts: dict[bool, TokenTexts] = {}
        if isinstance(tokenizer.decoder, ByteLevel):
            self._token_texts = {s: TokenTexts(tokenizer, skip_special_tokens=s) for s in (True, False)}
        self.encoder = TextEncoder(tokenizer)

    @classmethod
    def from_directory(cls, directory: Path | str, *, by_library: bool = True) -> PromptTokenizer:
        """Load a tokenizer from tokenizer.json, chat templates, config.json and processor files.

        Args:
            by_library: Whether the engines use the libraries mistral-common and oss-harmony for the same
                models as vLLM.

        Raises:
            TokenizerLoadError: A file is missing or broken, or the model's library is not installed.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        own_file = mistral_file(directory) if by_library else None
        mistral = None if own_file is None else MistralPrompts(own_file)
        if mistral is not None and not path.is_file():
            return cls(mistral.longest_piece(), None, frozenset(), mistral_text=ANY_TEXT, coded=mistral)
        if not path.is_file():
            raise TokenizerLoadError(f"{path}: no such file; a tokenizer directory must contain it")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises Exception itself for every kind of broken file
            raise TokenizerLoadError(f"{path}: {error}") from error
        settings = read_json(directory / "tokenizer_config.json")
        special = _token_texts({name: settings.get(name) for name in _SPECIAL_TOKENS})
        sources, mistral_text, images = TemplateSources(None, None), None, None
        coded: HarmonyPrompts | MistralPrompts | None = mistral
        if own_file is not None:
            added = tokenizer.get_added_tokens_decoder().values()
            mistral_text = mistral_pattern(own_file, [token.content for token in added])
        else:
            config, preprocessor, processor = (read_json(directory / name) for name in _IMAGE_FILES)
            images = ImageFiles(config, preprocessor, processor, settings)
            sources = template_sources(directory, settings, images.config)
            if by_library and images.config.get("model_type") == GPT_OSS:
                coded = HarmonyPrompts()
        # A model's extra special tokens have their own names in the template.
        extra = settings.get("extra_special_tokens")
        known = special | _token_texts(extra if isinstance(extra, dict) else {})
        default, tools = (ChatTemplate(source, known) if source is not None else None for source in sources)
        try:
            eos_token_ids = _eos_token_ids(directory, tokenizer, special)
            return cls(tokenizer, default, eos_token_ids, tools, mistral_text, images, coded)
        except TokenizerLoadError as error:
            raise TokenizerLoadError(f"{path}: {error}") from error

    @property
    def uses_tokenizer_json(self) -> bool:
        """Return whether engines encode and truncate every prompt by `tokenizer.json`."""
        return self.mistral_text is None

    def template_for(self, tools: object) -> ChatTemplate | None:
        """Return the template of chats with these tools (None: without tools), or None if there is none."""
        return self.chat_template if tools is None else self.tool_template or self.chat_template

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Encode a text; `add_special_tokens` adds the model's tokens around it, such as BOS.

        Raises:
            UnsupportedPromptError: It contains a lone surrogate, or is too long for the model's library.
        """
        other = self.mistral_text is not None and self.mistral_text.search(text)
        if other and isinstance(self.coded, MistralPrompts):
            return self.coded.text_ids(text, add_special_tokens=add_special_tokens)
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encode a text to a list, see `token_ids`."""
        ids: list[int] = self.token_ids(text, add_special_tokens=add_special_tokens).tolist()
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decode ids to a text; bytes that are not UTF-8 become U+FFFD."""
        text: str = self.tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_texts(self, *, skip_special_tokens: bool = True) -> TokenTexts | None:
        """Return the texts of single ids, or None if they depend on the ids around them."""
        return self._token_texts.get(skip_special_tokens)

    def to_json(self) -> str:
        text: str = self.tokenizer.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        """Return the vocabulary's spelling of an id; empty for an id outside of it."""
        return self.tokenizer.id_to_token(token_id) or ""

    def render_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """Render messages with the model's template; for options see `ChatTemplate.render`.

        Raises:
            PromptError: The template rejects the messages, or there is none.
        """
        template = self.template_for(tools)
        if template is None:
            raise UnsupportedPromptError("this model has no chat template; use /v1/completions", "messages")
        return template.render(messages, tools=tools, **options)


def _token_texts(values: Mapping[str, object]) -> dict[str, str]:
    return {name: text for name, value in values.items() if (text := token_text_of(value)) is not None}


def _eos_token_ids(directory: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """Return the EOS ids of generation_config.json, else of config.json, plus the tokenizer's own."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    own = tokenizer.token_to_id(special["eos_token"]) if "eos_token" in special else None
    return frozenset(ids if own is None else ids | {own})
