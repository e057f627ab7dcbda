"""Routes of the local stack's and the chart's Envoy: requests that may reach a pod; all others get a 404."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.envoy_headers import DESTINATION_HEADER
from router.gateway_only import GATEWAY_ONLY_HEADERS
from router.local.envoy_replies import openai_error

POD_HEADER = "x-kvroute-pod"
"""Response header that names the pod which answered."""

INFERENCE_PATHS: tuple[tuple[str, str], ...] = (
    ("POST", "/v1/chat/completions"),
    ("POST", "/v1/chat/completions/render"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/completions/render"),
    ("POST", "/v1/responses"),
    ("POST", "/v1/conversations"),
    ("POST", "/v1/messages"),
    ("POST", "/v1/messages/count_tokens"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/images/generations"),
    ("POST", "/tokenize"),
    ("GET", "/v1/models"),
)
"""Method and path of every request that reaches a pod: the router's `/v1` APIs, the models, `/tokenize`.

Each path is matched whole. Under a prefix such as `/v1/`, `/v1/..%2fmetrics` and others would pass as well.
"""

_API = "type.googleapis.com/envoy"
_FILTERS = f"{_API}.extensions.filters.http"
_POD_TRIES = 3


def virtual_host(name: str, routes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the virtual host of a listener, for every host name."""
    return {
        "name": name,
        "domains": ["*"],
        "response_headers_to_add": [{"header": {"key": POD_HEADER, "value": "%UPSTREAM_REMOTE_ADDRESS%"}}],
        "routes": routes,
    }


def gateway_routes(*, fail_open: bool) -> list[dict[str, Any]]:
    """Return the routes to the pod that the router picked.

    Args:
        fail_open: Whether requests without a pick go round robin.
    """
    # A generation may take minutes: its client, not the route, says when to give up.
    picked = {"cluster": "picked_pod", "timeout": "0s", "retry_policy": _unsent_again()}
    if not fail_open:
        # ORIGINAL_DST has no other pod to offer, so a request without a pick can only fail.
        return _allow_list([(picked, [])])
    has_pod = {"name": DESTINATION_HEADER, "present_match": True}
    return _allow_list([(picked, [has_pod]), (_ROUND_ROBIN, [])])


def round_robin_routes() -> list[dict[str, Any]]:
    """Return the routes of the listener that asks no router."""
    return _allow_list([(_ROUND_ROBIN, [])])


def path_options() -> dict[str, Any]:
    """Return the connection manager's options on odd spellings of a path.

    The allow-list holds without them; with them a pod sees a served path in its plain spelling.
    """
    return {
        "normalize_path": True,
        "merge_slashes": True,
        "path_with_escaped_slashes_action": "REJECT_REQUEST",
    }


def without_gateway_only_headers() -> dict[str, Any]:
    """Return the extension that removes a client's gateway-only headers before any filter runs."""
    return {
        "name": "envoy.http.early_header_mutation.header_mutation",
        "typed_config": {
            "@type": f"{_API}.extensions.http.early_header_mutation.header_mutation.v3.HeaderMutation",
            "mutations": [{"remove": name} for name in GATEWAY_ONLY_HEADERS],
        },
    }


_ROUND_ROBIN = {"cluster": "round_robin", "timeout": "0s"}


def _allow_list(actions: Iterable[tuple[dict[str, Any], list[dict[str, Any]]]]) -> list[dict[str, Any]]:
    """Return routes for all inference paths, and 404 for the rest.

    Args:
        actions: What to do with a request, and which headers it must have for that; the first match counts.
    """
    wanted = [(action, headers) for action, headers in actions]
    routes = [
        {"match": _match(method, path, headers), "route": action}
        for method, path in INFERENCE_PATHS
        for action, headers in wanted
    ]
    return [*routes, _not_found()]


def _match(method: str, path: str, headers: list[dict[str, Any]]) -> dict[str, Any]:
    is_method = {"name": ":method", "string_match": {"exact": method}}
    return {"path": path, "headers": [is_method, *headers]}


def _not_found() -> dict[str, Any]:
    """The last route: the router is not asked, since the answer does not depend on it."""
    json_type = {"header": {"key": "content-type", "value": "application/json"}}
    return {
        "match": {"prefix": "/"},
        "direct_response": {
            "status": 404,
            "body": {"inline_string": openai_error(404, "NotFoundError", "no such endpoint")},
        },
        "response_headers_to_add": [{**json_type, "append_action": "OVERWRITE_IF_EXISTS_OR_ADD"}],
        "typed_per_filter_config": {
            "envoy.filters.http.ext_authz": {
                "@type": f"{_FILTERS}.ext_authz.v3.ExtAuthzPerRoute",
                "disabled": True,
            },
            "envoy.filters.http.ext_proc": {
                "@type": f"{_FILTERS}.ext_proc.v3.ExtProcPerRoute",
                "disabled": True,
            },
        },
    }


def _unsent_again() -> dict[str, Any]:
    """Return the retry policy: only requests that the pod cannot have begun are sent once more."""
    return {
        "retry_on": "connect-failure,refused-stream,reset-before-request",
        "num_retries": _POD_TRIES,
        "retry_back_off": {"base_interval": "0.025s", "max_interval": "0.25s"},
    }
