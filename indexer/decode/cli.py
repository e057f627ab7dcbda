"""`python -m indexer.decode`: for people who debug a fleet.

One payload a line comes in, as hex; one JSON object a line goes out: the batch with vLLM's field names, or
{"error": ...}. No line ends the command.

    ... | python -m indexer.decode --engine vllm
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import msgspec

from indexer.config import IndexerConfig
from indexer.decode import decode_event, split_batch
from indexer.errors import PayloadError
from indexer.events import KVEvent
from indexer.flags import CommandParser

# What engines tell beyond what the index needs, by engine.
_NOTES = {"vllm": ("locality", "ownership", "session_id"), "sglang": ("session_id",)}
# Always shown, as vLLM always sends them; other fields only where they are told.
_ALWAYS = frozenset(
    {"block_hashes", "parent_block_hash", "token_ids", "block_size", "lora_id", "medium", "lora_name"}
)
# Where SGLang's older arrays have a map of such notes.
_METADATA = 7
_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Decodes standard input to standard output until either ends.

    Args:
        argv: The arguments after the command's name; None takes the process's own.

    Returns:
        0, whatever the lines held; 130 if interrupted.
    """
    args = _parser().parse_args(argv)
    try:
        for line in decode_lines(sys.stdin.buffer, args.engine, args.max_payload_bytes):
            print(line, flush=True)
    except BrokenPipeError:
        # Nobody reads any more; what Python flushes when it ends must not complain again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def decode_lines(lines: BinaryIO, engine: str, max_bytes: int) -> Iterator[str]:
    """One JSON object for each line that is not blank.

    Args:
        lines: Payloads in hex.
        engine: "vllm" or "sglang".
        max_bytes: A longer payload is refused; of its line no more than that is kept in memory.
    """
    for number, line in enumerate(_bounded(lines, 2 * max_bytes + 2), start=1):
        if line is not None and not line.strip():
            continue
        try:
            yield json.dumps(
                _plain(_shown_batch(_payload(line, max_bytes), engine, max_bytes)), allow_nan=False
            )
        except PayloadError as error:
            yield json.dumps({"error": f"line {number}: {error.reason}: {error}"})
        except RecursionError:
            yield json.dumps({"error": f"line {number}: nested too deep to be shown"})


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="python -m indexer.decode",
        description="Decodes published KV cache events: one payload a line in hex on standard input, "
        "one JSON object a line on standard output.",
    )
    shown = "default: %(default)s"
    parser.add_argument(
        "--engine",
        choices=sorted(_NOTES),
        default="vllm",
        help=f"who published them; all layouts of both are read, the engine's own notes are shown ({shown})",
    )
    parser.add_argument(
        "--max-payload-bytes",
        type=int,
        default=IndexerConfig().max_payload_bytes,
        metavar="N",
        help=f"a longer payload is refused ({shown})",
    )
    return parser


def _bounded(lines: BinaryIO, longest: int) -> Iterator[bytes | None]:
    """The lines; None in place of one that has more than `longest` bytes, its end among them."""
    while line := lines.readline(longest):
        if len(line) < longest or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = lines.readline(longest)
        yield None


def _payload(line: bytes | None, max_bytes: int) -> bytes:
    if line is None:
        raise PayloadError("oversize", f"payload has more than {max_bytes} bytes")
    try:
        return bytes.fromhex(line.decode())
    except ValueError as error:
        raise PayloadError("no_hex", str(error)) from None


def _shown_batch(payload: bytes, engine: str, max_bytes: int) -> dict[str, Any]:
    batch = split_batch(payload, max_bytes)
    events: list[dict[str, Any]] = []
    rejected: list[str] = []
    reasons: list[str] = []
    for place, raw in enumerate(batch.events):
        try:
            events.append(_shown_event(decode_event(raw)) | _notes(bytes(raw), engine))
        except PayloadError as error:
            rejected.append(error.reason)
            reasons.append(f"event {place}: {error}")
    shown = {"ts": batch.ts, "events": events, "data_parallel_rank": batch.data_parallel_rank}
    return shown | ({"rejected": rejected, "rejected_because": reasons} if rejected else {})


def _shown_event(event: KVEvent) -> dict[str, Any]:
    fields = {name: getattr(event, name) for name in event.__struct_fields__}
    told = {name: value for name, value in fields.items() if name in _ALWAYS or value is not None}
    return {"type": type(event).__name__, **told}


def _notes(raw: bytes, engine: str) -> dict[str, Any]:
    try:
        fields = msgspec.msgpack.decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return {}
    if isinstance(fields, list):
        fields = fields[_METADATA] if len(fields) > _METADATA else None
    if not isinstance(fields, dict):
        return {}
    return {name: fields[name] for name in _NOTES[engine] if fields.get(name) is not None}


def _plain(value: object) -> object:
    """A value as JSON has it: bytes in hex, numbers that are none as null."""
    match value:
        case bytes():
            return value.hex()
        case float():
            return value if math.isfinite(value) else None
        case dict():
            return {str(name): _plain(item) for name, item in value.items()}
        case list() | tuple():
            return [_plain(item) for item in value]
        case None | bool() | int() | str():
            return value
        case _:
            return str(value)
