"""A model's tokenizer: text or messages in, the engine's own token ids out, and back.

Reads a Hugging Face directory: tokenizer.json and what lies beside it. Knows no models, pods or HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from tokenization.encoder import TextEncoder, TokenIds
from tokenization.errors import TokenizerLoadError, UnsupportedPromptError
from tokenization.images.rules import ImageFiles, ImageRule, image_rule
from tokenization.incremental import OwnTexts
from tokenization.templates.chat_template import ChatTemplate, Message
from tokenization.templates.files import (
    TemplateSources,
    read_by_mistral,
    read_json,
    template_sources,
    token_text_of,
)

# Tokenizer of the packaged model `kvroute-tiny`: byte-level BPE, 4,096 tokens, a ChatML-like template.
TINY_DIRECTORY = Path(__file__).parent / "tiny"

_SPECIAL_TOKENS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))


class PromptTokenizer:
    """Encodes, renders and decodes for one model; safe to share between threads."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_template: ChatTemplate | None,
        eos_token_ids: frozenset[int],
        tool_template: ChatTemplate | None = None,
        read_otherwise: re.Pattern[str] | None = None,
        image_files: ImageFiles | None = None,
    ) -> None:
        # Engines cut and pad for themselves; a setting left in tokenizer.json must not change the ids.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self.chat_template = chat_template  # None: the model has none, or its engines use none
        self._tool_template = tool_template
        self._read_otherwise = read_otherwise
        self.image_rule: ImageRule | None = None  # what images become in prompts; None: not known
        if image_files is not None:
            self.image_rule = image_rule(image_files, tokenizer)
        self.eos_token_ids = eos_token_ids  # they end a generation
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        # No text has fewer tokens than its length by this.
        self.token_chars_max = max(map(len, tokenizer.get_vocab(with_added_tokens=True)), default=1)
        added = tokenizer.get_added_tokens_decoder()
        # Decoding leaves them out unless it is told not to.
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._own_texts: dict[bool, OwnTexts] = {}
        if isinstance(tokenizer.decoder, ByteLevel):
            self._own_texts = {skip: OwnTexts(tokenizer, skip_special_tokens=skip) for skip in (True, False)}
        self.encoder = TextEncoder(tokenizer)

    @classmethod
    def from_directory(cls, directory: Path | str, *, mistral_common: bool = True) -> PromptTokenizer:
        """Loads tokenizer.json, chat templates, and what config.json and the files like it say.

        Args:
            mistral_common: Whether its engines take that library where vLLM does. What it does otherwise than
                `tokenizer.json` and the chat template is then not supported.

        Raises:
            TokenizerLoadError: A file is missing or broken.
        """
        directory = Path(directory)
        path = directory / "tokenizer.json"
        if not path.is_file():
            raise TokenizerLoadError(f"{path}: no such file; a tokenizer directory holds a tokenizer.json")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every kind of broken file
            raise TokenizerLoadError(f"{path}: {error}") from error
        settings = read_json(directory / "tokenizer_config.json")
        special = {
            name: text for name in _SPECIAL_TOKENS if (text := token_text_of(settings.get(name))) is not None
        }
        sources, read_otherwise, images = TemplateSources(None, None), None, None
        if mistral_common:
            added = tokenizer.get_added_tokens_decoder().values()
            read_otherwise = read_by_mistral(directory, [token.content for token in added])
        if read_otherwise is None:
            images = _image_files(directory, settings)
            sources = template_sources(directory, settings, images.config)
        known = special | _extra_tokens(settings)
        default, tools = (ChatTemplate(source, known) if source is not None else None for source in sources)
        try:
            eos_token_ids = _eos_token_ids(directory, tokenizer, special)
            return cls(tokenizer, default, eos_token_ids, tools, read_otherwise, images)
        except TokenizerLoadError as error:
            raise TokenizerLoadError(f"{path}: {error}") from error

    @property
    def is_library_known(self) -> bool:
        """Whether engines read every text by `tokenizer.json`, and cut prompts as its library does."""
        return self._read_otherwise is None

    def template_for(self, tools: object) -> ChatTemplate | None:
        """The template of chats with these tools (None: without any); None where there is none."""
        return self.chat_template if tools is None else self._tool_template or self.chat_template

    def token_ids(self, text: str, *, add_special_tokens: bool = True) -> TokenIds:
        """Encodes text.

        Args:
            add_special_tokens: Adds what the model expects around it (a BOS token, say).

        Raises:
            UnsupportedPromptError: The engines do not read this text by `tokenizer.json`, or it is none.
        """
        if self._read_otherwise is not None and self._read_otherwise.search(text):
            raise UnsupportedPromptError("this model's engines read this text by mistral-common", "prompt")
        return self.encoder.encode(text, add_special_tokens=add_special_tokens)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Encodes text to a list; as `token_ids`."""
        ids: list[int] = self.token_ids(text, add_special_tokens=add_special_tokens).tolist()
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Decodes ids; bytes that are not UTF-8 become U+FFFD."""
        text: str = self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        return text

    def own_texts(self, *, skip_special_tokens: bool = True) -> OwnTexts | None:
        """The texts of single ids; None where they depend on the ids around them."""
        return self._own_texts.get(skip_special_tokens)

    def to_json(self) -> str:
        text: str = self._tokenizer.to_str()
        return text

    def token_text(self, token_id: int) -> str:
        """The vocabulary's own spelling of one id; empty for an id outside it."""
        return self._tokenizer.id_to_token(token_id) or ""

    def render_chat(
        self, messages: Sequence[Message], *, tools: Sequence[Mapping[str, Any]] | None = None, **options: Any
    ) -> str:
        """Renders messages with the model's template; arguments as for `ChatTemplate.render`.

        Raises:
            PromptError: The template refuses the messages, or there is none.
        """
        template = self.template_for(tools)
        if template is None:
            raise UnsupportedPromptError("this model has no chat template; use /v1/completions", "messages")
        return template.render(messages, tools=tools, **options)


def _image_files(directory: Path, settings: Mapping[str, Any]) -> ImageFiles:
    names = ("config.json", "preprocessor_config.json", "processor_config.json")
    config, preprocessor, processor = (read_json(directory / name) for name in names)
    return ImageFiles(config, preprocessor, processor, settings)


def _extra_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens of a model's own, by the names under which its template knows them."""
    extra = settings.get("extra_special_tokens")
    named = extra.items() if isinstance(extra, dict) else ()
    return {name: text for name, value in named if (text := token_text_of(value)) is not None}


def _eos_token_ids(directory: Path, tokenizer: Tokenizer, special: Mapping[str, str]) -> frozenset[int]:
    """generation_config.json's ids (may be several), else config.json's; always the tokenizer's own too."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        value = read_json(directory / name).get("eos_token_id")
        if value is not None:
            ids.update(value if isinstance(value, list) else [value])
            break
    if (text := special.get("eos_token")) is not None and (
        token_id := tokenizer.token_to_id(text)
    ) is not None:
        ids.add(token_id)
    return frozenset(ids)
