"""Request headers and body fields that only gateways and the router may set; a client's reach no engine."""

from __future__ import annotations

GATEWAY_ONLY_HEADERS: tuple[str, ...] = (
    # The endpoint picker protocol: the pod, the pods that the gateway allows, the pod that answered.
    "x-gateway-destination-endpoint",
    "x-gateway-destination-endpoint-subset",
    "x-gateway-destination-endpoint-served",
    # Disaggregation and KV transfer: hosts that an engine or its sidecar connects to.
    "x-prefiller-host-port",
    "x-encoder-hosts-ports",
    "x-kv-cache-source-host-port",
    # The engine of a pod that has several: vLLM reads the rank.
    "x-data-parallel-rank",
    "x-data-parallel-host-port",
    # Envoy's note that ext_authz sends only a part of the body; such a body is not read.
    "x-envoy-auth-partial-body",
)
"""Names in lower case, with and without a router's use for them: engines and sidecars obey them all.

Envoy removes them before any filter runs (`router.local.envoy_config`, the chart), so that what a filter sets
later stays.
"""

GATEWAY_ONLY_FIELDS = (
    # vLLM, TensorRT-LLM
    "kv_transfer_params",
    "ec_transfer_params",
    "kv_hints",
    "disaggregated_params",
    # SGLang
    "bootstrap_host",
    "bootstrap_port",
    "bootstrap_room",
    "bootstrap_pair_key",
    "decode_tp_size",
    "disagg_prefill_dp_rank",
    "routed_dp_rank",
    "data_parallel_rank",
    # Dynamo
    "backend_instance_id",
    "prefill_worker_id",
    "decode_worker_id",
)
"""Fields that are forbidden unless the configuration names others."""
