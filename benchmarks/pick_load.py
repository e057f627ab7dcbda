"""Closed-loop PickEndpoint load from a process of its own: an address and chat bodies in, one JSON line out.

`python -m benchmarks.pick_load ADDRESS BODIES CALLERS SECONDS [repeated]`; arguments as of benchmarks.load.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable
from itertools import cycle
from pathlib import Path

import grpc
import uvloop

from benchmarks.next_turns import next_turns
from router._pb import endpoint_picker_pb2 as pb


async def main(address: str, bodies: Path, callers: int, seconds: float, *, repeated: bool) -> None:
    """Run one period of load and print its result."""
    chats = bodies.read_bytes().splitlines()
    requests = map(_request, cycle(chats) if repeated else next_turns(chats))
    end_s = time.perf_counter() + seconds
    calls = 0

    async def call(pick: Callable[[pb.PickEndpointRequest], Awaitable[object]]) -> None:
        nonlocal calls
        while time.perf_counter() < end_s:
            await pick(next(requests))
            calls += 1

    async with grpc.aio.insecure_channel(address) as channel:
        pick = channel.unary_unary(
            "/kvroute.v1.EndpointPicker/PickEndpoint",
            pb.PickEndpointRequest.SerializeToString,
            pb.PickEndpointResponse.FromString,
        )
        await asyncio.gather(*(call(pick) for _ in range(callers)))
    print(json.dumps({"requests": calls, "per_s": calls / seconds}), flush=True)


def _request(body: bytes) -> pb.PickEndpointRequest:
    chat = json.loads(body)
    messages = json.dumps(chat["messages"]).encode()
    return pb.PickEndpointRequest(model=chat["model"], chat=pb.ChatInput(messages_json=messages))


if __name__ == "__main__":
    repeated = sys.argv[5:] == ["repeated"]
    uvloop.run(main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), repeated=repeated))
