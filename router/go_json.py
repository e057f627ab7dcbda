"""What Go's JSON reader says of a text that is no JSON object: bytes in, its words out.

The reference hands these words to clients, who may look for them. Only what is wrong at the text's beginning
or end is told as Go tells it; of anything else, our own reader's words are as good. Pure.
"""

from __future__ import annotations

_SPACE = b" \t\r\n"
_LITERALS = {b"t": b"true", b"f": b"false", b"n": b"null"}
_KINDS = {b"[": "array", b'"': "string", b"t": "bool", b"f": "bool"}
_TARGET = "Go value of type map[string]interface {}"
_ENDED = "unexpected end of JSON input"


def go_json_error(data: bytes, otherwise: str) -> str:
    """The complaint.

    Args:
        data: What was to be an object.
        otherwise: Our own reader's complaint; "" where it read something else than an object.
    """
    text = data.strip(_SPACE)
    first = text[:1]
    if not first:
        return _ENDED
    if first in _LITERALS:
        literal = _LITERALS[first]
        for at, letter in enumerate(literal):
            if at >= len(text):
                return _ENDED
            if text[at] != letter:
                found, expected = _quoted(text[at]), _quoted(letter)
                return f"invalid character {found} in literal {literal.decode()} (expecting {expected})"
    elif first not in b'{["-0123456789':
        return f"invalid character {_quoted(text[0])} looking for beginning of value"
    if otherwise:
        return _ENDED if "truncated" in otherwise else otherwise
    return f"json: cannot unmarshal {_KINDS.get(first, 'number')} into {_TARGET}"


def _quoted(byte: int) -> str:
    if byte == ord("'"):
        return "'\\''"
    if byte == ord('"'):
        return "'\"'"
    return repr(chr(byte)) if byte != ord("\\") else "'\\\\'"
