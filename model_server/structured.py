"""Answers of a given shape: a request's JSON schema, pattern or choices in, a constraint on its tokens out.

The grammar engine is llguidance; a constraint follows one answer token by token. Knows nothing of HTTP.
"""

import json
from functools import cached_property
from typing import Any

from llguidance import LLMatcher, LLTokenizer

from model_server.api_errors import ApiError
from model_server.openai_types import GenerationBody, StructuredOutputs
from tokenization import PromptTokenizer

# Between JSON's words; without a bound a model may write spaces to its last token.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\t]{1,8}"}


class GrammarTokenizer:
    """What grammars are compiled for.

    Args:
        tokenizer: The served model's.
    """

    def __init__(self, tokenizer: PromptTokenizer) -> None:
        self._tokenizer = tokenizer

    def constraint(self, fields: GenerationBody) -> "Constraint | None":
        """Compile what a request asks its answer to be; None if it leaves it free.

        Raises:
            ApiError: 400, the shape is wrong, too complex, or contradicts another field.
        """
        param = _asking_field(fields)
        if param is None:
            return None
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids"):
            if getattr(fields, name):
                raise ApiError(400, f"{name} cannot be combined with {param}; leave one out", name)
        try:
            matcher = LLMatcher(self._tokens, _grammar(fields), log_level=0)
        except ValueError as error:  # no JSON, or half of a surrogate pair
            raise ApiError(400, f"{param} cannot be used: {error}", param) from error
        if matcher.is_error():
            raise ApiError(400, f"{param} cannot be used: {matcher.get_error()}", param)
        return Constraint(matcher)

    @cached_property
    def _tokens(self) -> LLTokenizer:
        # Made for the first request that needs it: a large vocabulary takes seconds.
        return LLTokenizer(self._tokenizer.to_json(), eos_token=sorted(self._tokenizer.eos_token_ids))


class Constraint:
    """The state of one answer; see `TokenConstraint`.

    Args:
        matcher: At the answer's beginning.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> "Constraint":
        """Return the same for another answer."""
        return Constraint(self._matcher.deep_copy())

    def allowed_bits(self) -> bytes:
        """Return one bit a token; after an error only the ends of a text are left."""
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> None:
        """Take the token that was chosen."""
        self._matcher.consume_token(token_id)

    @property
    def error(self) -> str | None:
        """Why it had to give up: a grammar may prove too complex on the way."""
        return self._matcher.get_error().partition("\n")[0] or None


def _asking_field(fields: GenerationBody) -> str | None:
    """The field that gives the answer's shape."""
    formatted, structured = fields.response_format, fields.structured_outputs
    if formatted is None or formatted.type == "text":
        return None if structured is None else "structured_outputs"
    if structured is not None:
        raise ApiError(400, "give response_format or structured_outputs, not both", "structured_outputs")
    return "response_format"


def _grammar(fields: GenerationBody) -> str:
    if fields.structured_outputs is not None:
        return _structured_grammar(fields.structured_outputs)
    assert fields.response_format is not None
    if fields.response_format.type == "json_object":
        return _json_grammar({"type": "object"})
    wrapped = fields.response_format.json_schema
    if wrapped is None or wrapped.schema is None:
        raise ApiError(400, "response_format json_schema needs json_schema.schema", "response_format")
    return _json_grammar(wrapped.schema)


def _structured_grammar(outputs: StructuredOutputs) -> str:
    if sum(bool(wish) for wish in (outputs.json, outputs.regex, outputs.choice, outputs.json_object)) != 1:
        raise ApiError(
            400,
            "structured_outputs needs exactly one of json, regex, choice and json_object",
            "structured_outputs",
        )
    if outputs.regex:
        return LLMatcher.grammar_from_regex(outputs.regex)
    if outputs.choice:
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in outputs.choice)
        return LLMatcher.grammar_from_lark(f"start: {choices}")
    return _json_grammar(outputs.json or {"type": "object"})


def _json_grammar(schema: dict[str, Any] | str) -> str:
    return LLMatcher.grammar_from_json_schema(schema, overrides=_JSON_OPTIONS)
