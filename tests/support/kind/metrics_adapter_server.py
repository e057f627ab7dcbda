"""Program of the metrics adapter in a pod: the external metrics API for gauges of one page: URL PORT."""

from __future__ import annotations

import json
import re
import ssl
import sys
import urllib.request
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

_GROUP = "external.metrics.k8s.io/v1beta1"
_PAIR = Path("/tmp/pair.pem")


def main(url: str, port: int) -> None:
    """Serve until killed."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            found = _resources() if path == f"/apis/{_GROUP}" else _values(url, path.rpartition("/")[2])
            data = json.dumps(found).encode()
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

    _make_pair()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(_PAIR)
    server = ThreadingHTTPServer(("0.0.0.0", port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


def _resources() -> dict[str, Any]:
    return {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": _GROUP, "resources": []}


def _values(url: str, name: str) -> dict[str, Any]:
    with urllib.request.urlopen(url, timeout=5) as page:
        found = re.findall(rf"^{name}(?:{{.*}})? (\S+)$", page.read().decode(), re.MULTILINE)
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    items = [
        {"metricName": name, "metricLabels": {}, "timestamp": now, "value": f"{int(float(value) * 1e6)}u"}
        for value in found
    ]
    return {"kind": "ExternalMetricValueList", "apiVersion": _GROUP, "metadata": {}, "items": items}


def _make_pair() -> None:
    """Write a key and a certificate that it signed."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "adapter")])
    now, day, serial = datetime.now(UTC), timedelta(days=1), x509.random_serial_number()
    made = x509.CertificateBuilder(name, name, key.public_key(), serial, now - day, now + day)
    pem = serialization.Encoding.PEM
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    _PAIR.write_bytes(key.private_bytes(pem, *plain) + made.sign(key, hashes.SHA256()).public_bytes(pem))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
