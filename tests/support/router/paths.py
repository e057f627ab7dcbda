"""Requests that must not reach a pod through a gateway: administration, and tricks with paths."""

from __future__ import annotations

import socket

ADMINISTRATION = [
    ("GET", "/metrics"),
    ("GET", "/kv_events/snapshot"),
    ("GET", "/kv_event_sources"),
    ("GET", "/is_sleeping"),
    ("GET", "/health"),
    ("GET", "/load"),
    ("GET", "/"),
    ("GET", "/v1"),
    ("POST", "/sleep"),
    ("POST", "/wake_up"),
    ("POST", "/reset_prefix_cache"),
    ("POST", "/detokenize"),
    ("POST", "/collective_rpc"),
    ("POST", "/v1/load_lora_adapter"),
    ("POST", "/v1/unload_lora_adapter"),
    ("POST", "/inference/v1/generate"),
    ("DELETE", "/v1/requests/cmpl-1"),
    # A served path is served only with its own method.
    ("DELETE", "/v1/completions"),
    ("GET", "/v1/completions"),
    ("POST", "/v1/models"),
]
TRICKS = [
    b"//metrics",
    b"/./metrics",
    b"/metrics/",
    b"/METRICS",
    b"/metrics;x",
    b"/metrics%00",
    b"/%6detrics",
    b"/%2fmetrics",
    b"\\metrics",
    b"metrics",
    b"*",
    b"http://x/metrics",
    b"http://x/v1/../metrics",
    b"/v1/../metrics",
    b"/v1//../metrics",
    b"/v1/%2e%2e/metrics",
    b"/v1/%2E%2E/metrics",
    b"/v1/.%2e/metrics",
    b"/v1/%2e./metrics",
    b"/v1/..%2fmetrics",
    b"/v1/..%5cmetrics",
    b"/v1/..\\metrics",
    b"/v1/..;/metrics",
    b"/v1/..;x=y/metrics",
    b"/v1/%2E%2E%2Fmetrics",
    b"/v1/%2e%2e%2f%2e%2e%2fmetrics",
    b"/v1/%252e%252e/metrics",
    b"/v1/..%252fmetrics",
    b"/v1/%25252e%25252e/metrics",
    b"/v1/..%c0%afmetrics",
    b"/v1/..%00/metrics",
    b"/v1/\xe2\x80\xa5/metrics",
    b"/v1/models/../../metrics",
    b"/v1/models/..%2f..%2fmetrics",
    b"/tokenize/../metrics",
    b"/v1/chat/completions/../../../metrics",
    b"/v1/chat/completions/%2e%2e/%2e%2e/%2e%2e/metrics",
    b"/v1/chat/completions/..%2f..%2f..%2fmetrics",
    b"/v1/chat/completions%2f..%2f..%2f..%2fmetrics",
    b"/v1/chat/completions;/../../metrics",
    b"/v1/chat/completions/..;/..;/..;/metrics",
    b"/v1/chat/completions\\..\\..\\..\\metrics",
    b"/v1/chat/completions%00/../../../metrics",
    b"/v1/chat/completions#/../../../metrics",
    b"/v1/chat/completions/metrics",
    b"/v1/chat/completions/",
    b"/V1/chat/completions",
    b"/v1/chat/completions%3f/../../../metrics",
    b"/v1/chat/completions?/../../../metrics",
]


def send(address: tuple[str, int], method: bytes, target: bytes, more: bytes = b"") -> tuple[int, bytes]:
    """Send a raw request; return the status (0: closed without one) and the body.

    Args:
        more: Further header lines, each ended by CRLF.
    """
    head = b"%b %b HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 2\r\n%b\r\n{}"
    with socket.create_connection(address, timeout=300) as client:
        client.sendall(head % (method, target, more))
        # Not to the connection's end, which Envoy delays by a second.
        with client.makefile("rb") as answer:
            status = answer.readline().partition(b" ")[2][:3]
            length = 0
            while (line := answer.readline().lower()).strip():
                if line.startswith(b"content-length:"):
                    length = int(line.partition(b":")[2])
            return int(status or 0), answer.read(length)
