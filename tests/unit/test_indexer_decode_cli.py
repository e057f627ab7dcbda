"""`python -m indexer.decode`: lines of hex in, lines of JSON out, whatever the lines hold."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from indexer.decode.cli import decode_lines
from tests.unit.indexer_support import read_json

COMMAND = [sys.executable, "-W", "error", "-m", "indexer.decode"]
MAX_BYTES = 1 << 16
VECTORS = read_json("kv_event_vectors.json.gz")
MAPS = [vector for vector in VECTORS if vector["layout"] == "map"]


def shown(*lines: bytes, engine: str = "vllm", max_bytes: int = MAX_BYTES) -> list[dict[str, Any]]:
    """What the command prints of these lines."""
    text = io.BytesIO(b"".join(line + b"\n" for line in lines))
    return [json.loads(line) for line in decode_lines(text, engine, max_bytes)]


def in_hex(*events: object, ts: float = 1.5) -> bytes:
    """A batch of these events as a line."""
    return msgspec.msgpack.encode([ts, events, 0]).hex().encode()


def bytes_in_hex(value: Any) -> Any:
    """A vector's value with its byte strings as the command shows them."""
    if isinstance(value, dict):
        return value.get("$bytes") or {name: bytes_in_hex(item) for name, item in value.items()}
    return [bytes_in_hex(item) for item in value] if isinstance(value, list) else value


def test_lines_of_a_pipe_are_answered_in_order_and_the_command_ends_well() -> None:
    """Real vectors, a blank line, no hex and half a payload: one answer each, no warning, status 0."""
    lines = [vector["hex"] for vector in MAPS] + ["", "zz", MAPS[0]["hex"][:-2]]
    done = subprocess.run(
        [*COMMAND, "--engine", "vllm"], input="\n".join(lines), capture_output=True, text=True, check=True
    )
    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(MAPS) + 2
    for vector, answer in zip(MAPS, answers, strict=False):
        ts, events, rank = bytes_in_hex(vector["generic"])
        assert answer == {"ts": ts, "events": events, "data_parallel_rank": rank}
    assert [list(answer) for answer in answers[-2:]] == [["error"], ["error"]]


def test_a_closed_pipe_ends_the_command_quietly() -> None:
    """Who has seen enough closes the pipe, as `head` does; that is no error."""
    with subprocess.Popen(
        COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdin.write(in_hex(["AllBlocksCleared"]) + b"\n")
        process.stdin.flush()
        assert b"AllBlocksCleared" in process.stdout.readline()
        process.stdout.close()
        _, errors = process.communicate(in_hex(["AllBlocksCleared"]) + b"\n")
        assert (process.returncode, errors) == (0, b"")


@pytest.mark.parametrize("vector", VECTORS[::7], ids=lambda vector: f"{vector['version']}-{vector['name']}")
def test_arrays_are_shown_with_vllms_field_names(vector: dict[str, Any]) -> None:
    """Whatever the layout, an event shows the fields that vLLM always sends, and the hashes as they are."""
    [answer] = shown(vector["hex"].encode())
    for event, told in zip(answer["events"], bytes_in_hex(vector["generic"])[1], strict=True):
        tag = told["type"] if isinstance(told, dict) else told[0]
        assert event["type"] == tag
        if tag != "AllBlocksCleared":
            hashes = told["block_hashes"] if isinstance(told, dict) else told[1]
            assert event["block_hashes"] == hashes
            assert event.keys() >= {"block_hashes", "medium"}


def test_great_and_negative_hashes_stay_exact() -> None:
    """No hash becomes a float or loses its sign; byte strings are hex."""
    hashes = [2**64 - 1, -(2**63), 2**53 + 1]
    [answer] = shown(in_hex(["BlockStored", [*hashes, b"\x0f"], -7, [5], 1]), engine="sglang")
    assert answer["events"][0]["block_hashes"] == [*hashes, "0f"]
    assert answer["events"][0]["parent_block_hash"] == -7


def test_each_engines_notes_are_shown() -> None:
    """Fields that the index does not need are shown where they are told, in maps and in SGLang's arrays."""
    stored = {"type": "BlockStored", "block_hashes": [1], "locality": "LOCAL", "session_id": "s", "new": 1}
    [vllm] = shown(in_hex(stored))
    assert (vllm["events"][0]["locality"], vllm["events"][0]["session_id"]) == ("LOCAL", "s")
    assert "new" not in vllm["events"][0]
    array = ["BlockStored", [1], None, [5], 1, None, "GPU", {"cache_salt": "t", "session_id": "s"}]
    [sglang] = shown(in_hex(array), engine="sglang")
    assert (sglang["events"][0]["cache_salt"], sglang["events"][0]["session_id"]) == ("t", "s")


def test_what_is_left_out_of_a_batch_is_told() -> None:
    """A rejected event has its reason, its place in the batch and what is wrong with it."""
    [answer] = shown(in_hex(["BlockRemoved", [1]], ["New"], ["BlockRemoved", ["text"]]))
    assert [event["block_hashes"] for event in answer["events"]] == [[1]]
    assert answer["rejected"] == ["unknown_event", "broken_event"]
    assert answer["rejected_because"][1].startswith("event 2: Expected `int | bytes`")


def test_an_error_names_its_line() -> None:
    """Blank lines are skipped but counted, so that the number is that of the file."""
    answers = shown(b"", b"  ", b"zz", b"\xff", b"c0", b"c" * (2 * MAX_BYTES + 2), b"c0" * MAX_BYTES * 3)
    reasons = ["no_hex", "no_hex", "broken_batch", "oversize", "oversize"]
    for number, (answer, reason) in enumerate(zip(answers, reasons, strict=True), start=3):
        assert answer["error"].startswith(f"line {number}: {reason}: ")


def test_a_huge_line_takes_no_more_memory_than_a_payload_may_have() -> None:
    """A line is read in pieces, and what follows it is answered."""

    class Watched(io.BytesIO):
        longest = 0

        def readline(self, size: int | None = -1, /) -> bytes:
            line = super().readline(size)
            self.longest = max(self.longest, len(line))
            return line

    text = Watched(b"c0" * 1_000_000 + b"\n" + in_hex(["AllBlocksCleared"]) + b"\n")
    answers = [json.loads(line) for line in decode_lines(text, "vllm", 100)]
    assert "oversize" in answers[0]["error"]
    assert answers[1]["events"] == [{"type": "AllBlocksCleared"}]
    assert text.longest <= 202


def test_numbers_that_json_does_not_have_are_null() -> None:
    """A time that is no number, or an infinite one in an extra key, leaves the line valid JSON."""
    for ts in (float("nan"), float("inf")):
        event = {"type": "BlockStored", "block_hashes": [1], "extra_keys": [[float("-inf"), b"\x01"]]}
        [line] = decode_lines(io.BytesIO(in_hex(event, ts=ts)), "vllm", MAX_BYTES)
        answer = json.loads(line, parse_constant=pytest.fail)
        assert answer["ts"] is None
        assert answer["events"][0]["extra_keys"] == [[None, "01"]]


@settings(deadline=None)
@given(st.lists(st.binary(max_size=60) | st.binary(max_size=60).map(lambda data: data.hex().encode())))
def test_no_line_ends_the_command(lines: list[bytes]) -> None:
    """Any bytes are answered, by one valid JSON object for each line that is not blank."""
    text = b"\n".join(lines)
    answers = list(decode_lines(io.BytesIO(text), "vllm", MAX_BYTES))
    assert len(answers) == sum(bool(line.strip()) for line in text.split(b"\n"))
    assert all(isinstance(json.loads(answer), dict) for answer in answers)


@pytest.mark.parametrize("value", [b"\x91" * 900 + b"\xc0", b"\xd7\xff" + b"\x00" * 8, b"\xd4\x05\x01"])
def test_odd_extra_keys_are_shown_or_refused(value: bytes) -> None:
    """Deep lists, time stamps and extension types in an extra key get an answer, too."""
    event = b"\x83\xa4type\xabBlockStored\xacblock_hashes\x91\x01\xaaextra_keys\x91\x91" + value
    [answer] = shown((b"\x92\x01\x91" + event).hex().encode())
    assert answer.keys() & {"events", "error"}
