"""Local Kubernetes control plane: etcd and kube-apiserver on free ports, without nodes or controllers.

Pods are objects whose status the tests write. Needs KUBE_APISERVER and ETCD in the environment, the binaries;
INFERENCE_EXTENSION_CRDS and GATEWAY_API_CRDS may name folders with definitions.
"""

from __future__ import annotations

import base64
import json
import os
import secrets
import ssl
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import urllib3
import yaml
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa

from kvroute import parent_death
from tests.support.loopback import free_ports

_ISSUER = "https://kubernetes.default.svc"
_START_S = 120.0
_STOP_S = 30.0


def missing() -> str | None:
    """Return why no control plane can be started; None if one can."""
    for name in ("KUBE_APISERVER", "ETCD"):
        if not Path(os.environ.get(name, "/nonexistent")).is_file():
            return f"{name} does not name a binary: there is no API server to test against"
    return None


class ApiServer:
    """Control plane; `stop` and `start` restart the API server, while etcd keeps all objects.

    Attributes:
        url: Address of the API server, the same after restarts.
        kubeconfig: Credentials of an administrator.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True, exist_ok=True)
        self._port, self._etcd_port, peer_port = free_ports(3)
        self.url = f"https://127.0.0.1:{self._port}"
        self.kubeconfig = directory / "kubeconfig"
        self._key = rsa.generate_private_key(public_exponent=65_537, key_size=2048)
        self._token = secrets.token_hex(16)
        self._write_credentials()
        self._log = (directory / "etcd.log").open("ab"), (directory / "apiserver.log").open("ab")
        self._etcd = self._run_etcd(peer_port)
        self._api: subprocess.Popen[bytes] | None = None
        self._http: urllib3.PoolManager | None = None
        self.start()

    def start(self) -> None:
        """Start the API server and wait until it serves."""
        self._api = subprocess.Popen(
            [
                *_tied(os.environ["KUBE_APISERVER"]),
                f"--etcd-servers=http://127.0.0.1:{self._etcd_port}",
                "--bind-address=127.0.0.1",
                "--advertise-address=127.0.0.1",
                f"--secure-port={self._port}",
                f"--cert-dir={self.directory / 'certificates'}",
                f"--token-auth-file={self.directory / 'tokens.csv'}",
                "--authorization-mode=RBAC",
                "--service-cluster-ip-range=10.96.0.0/16",
                f"--service-account-issuer={_ISSUER}",
                f"--service-account-key-file={self.directory / 'service-account.key'}",
                f"--service-account-signing-key-file={self.directory / 'service-account.key'}",
                # No controllers run, so nothing would create the service account that pods need.
                "--disable-admission-plugins=ServiceAccount",
                "--endpoint-reconciler-type=none",
                "--etcd-compaction-interval=0",
            ],
            stdout=self._log[1],
            stderr=self._log[1],
        )
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            if self._api.poll() is not None:
                break
            try:
                if self.request("GET", "/readyz", check=False)[0] == 200:
                    return
            except (urllib3.exceptions.HTTPError, OSError):
                pass
            time.sleep(0.1)
        tail = (self.directory / "apiserver.log").read_text(errors="replace")[-2000:]
        raise RuntimeError(f"kube-apiserver does not serve:\n{tail}")

    def stop(self, *, kill: bool = False) -> None:
        """Stop the API server."""
        if self._api is not None:
            _end(self._api, kill=kill)
            self._api = None
        if self._http is not None:
            self._http.clear()

    def close(self) -> None:
        """Stop all processes."""
        self.stop(kill=True)
        _end(self._etcd, kill=True)
        for log in self._log:
            log.close()

    def request(
        self, method: str, path: str, body: Any = None, *, check: bool = True, patch: str = "merge"
    ) -> tuple[int, Any]:
        """Send a request as administrator; return status and JSON."""
        headers = {"Authorization": f"Bearer {self._token}"}
        if body is not None:
            headers["Content-Type"] = (
                f"application/{patch}-patch+json" if method == "PATCH" else "application/json"
            )
        if self._http is None:
            certificate = self.directory / "certificates" / "apiserver.crt"
            if not certificate.exists():
                raise OSError("no certificate yet")
            context = ssl.create_default_context(cafile=str(certificate))
            self._http = urllib3.PoolManager(ssl_context=context, retries=False)
        response = self._http.request(
            method, self.url + path, body=json.dumps(body) if body is not None else None, headers=headers
        )
        answer = json.loads(response.data) if response.data[:1] == b"{" else response.data.decode()
        if check and response.status >= 300:
            raise RuntimeError(f"{method} {path}: {response.status} {answer}")
        return response.status, answer

    def apply_definitions(
        self, folder: Path, *, only: str = "", changes: Mapping[str, str] | None = None
    ) -> None:
        """Install CRDs from a folder's YAML files and wait until they are served.

        Args:
            only: Restricts the files to those whose names contain this text.
            changes: Replacements in each file's text.
        """
        paths = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
        for file in sorted(folder.glob("*.yaml")):
            if only not in file.name:
                continue
            text = file.read_text()
            for old, new in (changes or {}).items():
                text = text.replace(old, new)
            for definition in yaml.safe_load_all(text):
                if not definition or definition.get("kind") != "CustomResourceDefinition":
                    continue
                # Kubernetes' own API groups require an approval annotation, which only released CRDs carry.
                definition.pop("status", None)
                status, answer = self.request("POST", paths, definition, check=False)
                if status not in (201, 409):
                    raise RuntimeError(f"{file.name}: {status} {answer}")
                self._wait_established(f"{paths}/{definition['metadata']['name']}")

    def token(self, namespace: str, account: str, lives_s: float) -> str:
        """Return an expiring token of an existing service account."""
        _, known = self.request("GET", f"/api/v1/namespaces/{namespace}/serviceaccounts/{account}")
        now = int(time.time())
        claims = {
            "iss": _ISSUER,
            "aud": [_ISSUER],
            "sub": f"system:serviceaccount:{namespace}:{account}",
            "iat": now - 3600,
            "nbf": now - 3600,
            "exp": now + int(lives_s),
            "kubernetes.io": {
                "namespace": namespace,
                "serviceaccount": {"name": account, "uid": known["metadata"]["uid"]},
            },
        }
        signed = ".".join(
            _base64(json.dumps(part).encode()) for part in ({"alg": "RS256", "typ": "JWT"}, claims)
        )
        signature = self._key.sign(signed.encode(), padding.PKCS1v15(), hashes.SHA256())
        return f"{signed}.{_base64(signature)}"

    def write_kubeconfig(
        self, path: Path, user: Mapping[str, str], *, namespace: str = "default", server: str | None = None
    ) -> Path:
        """Write a kubeconfig for a user given as {"token": ...} or {"tokenFile": ...}."""
        cluster = {
            "server": server or self.url,
            "certificate-authority": str(self.directory / "certificates" / "apiserver.crt"),
        }
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": dict(user)}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u", "namespace": namespace}}],
            "current-context": "x",
        }
        path.write_text(yaml.safe_dump(config))
        return path

    def forget_history(self) -> None:
        """Compact etcd's history, as happens by itself after some minutes."""
        at = json.loads(self._etcd_call("kv/range", {"key": _base64(b"\0", url=False)}))["header"]["revision"]
        self._etcd_call("kv/compaction", {"revision": at, "physical": True})

    def _etcd_call(self, what: str, body: Mapping[str, Any]) -> bytes:
        url = f"http://127.0.0.1:{self._etcd_port}/v3/{what}"
        response = urllib3.request("POST", url, body=json.dumps(body), retries=False)
        if response.status != 200:
            raise RuntimeError(f"etcd {what}: {response.status} {response.data!r}")
        return response.data

    def _wait_established(self, path: str) -> None:
        deadline_s = time.monotonic() + _START_S
        while time.monotonic() < deadline_s:
            definition = self.request("GET", path)[1]
            conditions = definition.get("status", {}).get("conditions") or ()
            if any(each["type"] == "Established" and each["status"] == "True" for each in conditions):
                spec = definition["spec"]
                version = next(each["name"] for each in spec["versions"] if each["served"])
                listed = f"/apis/{spec['group']}/{version}/{spec['names']['plural']}"
                if self.request("GET", listed, check=False)[0] == 200:
                    return
            time.sleep(0.05)
        raise RuntimeError(f"{path} is not served")

    def _write_credentials(self) -> None:
        pem = self._key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        (self.directory / "service-account.key").write_bytes(pem)
        (self.directory / "tokens.csv").write_text(f"{self._token},admin,admin,system:masters\n")
        self.write_kubeconfig(self.kubeconfig, {"token": self._token})

    def _run_etcd(self, peer_port: int) -> subprocess.Popen[bytes]:
        client, peer = f"http://127.0.0.1:{self._etcd_port}", f"http://127.0.0.1:{peer_port}"
        return subprocess.Popen(
            [
                *_tied(os.environ["ETCD"]),
                "--name=default",
                f"--data-dir={self.directory / 'etcd'}",
                "--log-level=warn",
                "--unsafe-no-fsync",
                f"--listen-client-urls={client}",
                f"--advertise-client-urls={client}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
            ],
            stdout=self._log[0],
            stderr=self._log[0],
        )


def _tied(program: str) -> list[str]:
    """Return the command of a program that ends with this process."""
    return [sys.executable, parent_death.__file__, str(os.getpid()), program]


def _end(process: subprocess.Popen[bytes], *, kill: bool) -> None:
    if kill:
        process.kill()
    else:
        process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(_STOP_S)


def _base64(data: bytes, *, url: bool = True) -> str:
    if not url:
        return base64.b64encode(data).decode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()
