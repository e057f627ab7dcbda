"""Picker configurations of the reference's guides and tests, by what they show."""

from __future__ import annotations

from typing import Any

HEAD: dict[str, Any] = {"apiVersion": "llm-d.ai/v1alpha1", "kind": "EndpointPickerConfig"}


def plugins(*types: str | dict[str, Any]) -> list[dict[str, Any]]:
    """Return plugin entries, given by type or as they are."""
    return [{"type": one} if isinstance(one, str) else one for one in types]


def profile(name: str, *references: str | tuple[str, float]) -> dict[str, Any]:
    """Return a scheduling profile."""
    return {
        "name": name,
        "plugins": [
            {"pluginRef": one} if isinstance(one, str) else {"pluginRef": one[0], "weight": one[1]}
            for one in references
        ],
    }


def disagg(**parameters: Any) -> dict[str, Any]:
    """Return the handler of disaggregated serving."""
    return {"type": "disagg-profile-handler", "parameters": parameters}


KNOWN: dict[str, dict[str, Any]] = {
    "optimized baseline": {
        "plugins": plugins(
            "queue-scorer", "kv-cache-utilization-scorer", "prefix-cache-scorer", "no-hit-lru-scorer"
        ),
        "schedulingProfiles": [
            profile(
                "default",
                ("queue-scorer", 2),
                ("kv-cache-utilization-scorer", 2),
                ("prefix-cache-scorer", 3),
                ("no-hit-lru-scorer", 2),
            )
        ],
    },
    "tiers, one producer for each": {
        "plugins": plugins(
            "token-producer",
            {
                "type": "approx-prefix-cache-producer",
                "name": "cpu-prefix-cache-producer",
                "parameters": {"autoTune": False, "lruCapacityPerServer": 1000},
            },
            "queue-scorer",
            {"type": "prefix-cache-scorer", "name": "gpu"},
            {
                "type": "prefix-cache-scorer",
                "name": "cpu",
                "parameters": {"prefixMatchInfoProducerName": "cpu-prefix-cache-producer"},
            },
        ),
        "schedulingProfiles": [profile("default", ("queue-scorer", 2), ("gpu", 1.0), ("cpu", 1.0))],
    },
    "prefill and decode apart": {
        "plugins": plugins(
            "disagg-headers-handler",
            disagg(deciders={"prefill": "always-disagg-pd-decider"}),
            "always-disagg-pd-decider",
            "prefill-filter",
            "decode-filter",
            "prefix-cache-scorer",
            "queue-scorer",
            "active-request-scorer",
            "max-score-picker",
        ),
        "schedulingProfiles": [
            profile(
                "prefill",
                "prefill-filter",
                ("prefix-cache-scorer", 3),
                ("queue-scorer", 2),
                "max-score-picker",
            ),
            profile("decode", "decode-filter", ("active-request-scorer", 2), "max-score-picker"),
        ],
    },
    "the older form of the same": {
        "plugins": plugins(
            "prefill-header-handler",
            "prefill-filter",
            "decode-filter",
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}},
            {
                "type": "pd-profile-handler",
                "parameters": {"deciderPluginName": "prefix-based-pd-decider"},
            },
        ),
        "schedulingProfiles": [profile("prefill", "prefill-filter"), profile("decode", "decode-filter")],
    },
    "encode apart, too": {
        "plugins": plugins(
            "encode-filter",
            "prefill-filter",
            "decode-filter",
            "always-disagg-multimodal-decider",
            {"type": "prefix-based-pd-decider", "parameters": {"nonCachedTokens": 16}},
            disagg(
                deciders={
                    "encode": "always-disagg-multimodal-decider",
                    "prefill": "prefix-based-pd-decider",
                }
            ),
        ),
        "schedulingProfiles": [
            profile("encode", "encode-filter"),
            profile("prefill", "prefill-filter"),
            profile("decode", "decode-filter"),
        ],
    },
    "decode only": {
        "plugins": plugins("decode-filter", "max-score-picker", "disagg-profile-handler"),
        "schedulingProfiles": [profile("decode", "decode-filter", "max-score-picker")],
    },
    "flow control": {
        "featureGates": ["flowControl"],
        "plugins": plugins(
            "queue-scorer",
            "round-robin-fairness-policy",
            "fcfs-ordering-policy",
            {
                "type": "concurrency-detector",
                "parameters": {"maxConcurrency": 132, "concurrencyMode": "requests", "headroom": 0.0},
            },
        ),
        "flowControl": {
            "saturationDetector": {"pluginRef": "concurrency-detector"},
            "maxBytes": "10Gi",
            "maxRequests": "1k",
            "defaultRequestTTL": "60s",
            "enableEviction": True,
            "priorityBands": [
                {
                    "priority": priority,
                    "maxRequests": most,
                    "fairnessPolicyRef": "round-robin-fairness-policy",
                    "orderingPolicyRef": "fcfs-ordering-policy",
                }
                for priority, most in ((100, "500"), (0, "200"), (-10, "50"))
            ],
        },
    },
    "payload unseen": {
        "plugins": plugins("passthrough-parser", "active-request-scorer", "session-affinity-scorer"),
        "requestHandler": {"parsers": [{"pluginRef": "passthrough-parser"}]},
        "schedulingProfiles": [profile("default", "active-request-scorer", "session-affinity-scorer")],
    },
    "precise, with a tokenizer": {
        "plugins": plugins(
            {
                "type": "token-producer",
                "parameters": {"modelName": "m", "vllm": {"url": "http://localhost:9999", "timeout": "3s"}},
            },
            {
                "type": "precise-prefix-cache-producer",
                "parameters": {
                    "tokenProcessorConfig": {
                        "blockSizeTokens": 64,
                        "hashSeed": "42",
                        "hashAlgorithm": "xxh64",
                    },
                    "indexerConfig": {
                        "kvBlockIndexConfig": {
                            "inMemoryConfig": {"size": 100000000, "podCacheSize": 10},
                            "enableMetrics": True,
                        },
                        "kvCacheBackendConfigs": [{"name": "cpu", "weight": 0.5}],
                    },
                    "kvEventsConfig": {
                        "topicFilter": "kv@",
                        "concurrency": 8,
                        "engineType": "vllm",
                        "discoverPods": True,
                        "podDiscoveryConfig": {
                            "podLabelSelector": "llm-d.ai/inference-serving=true",
                            "socketPort": 5600,
                            "replaySocketPort": 5700,
                        },
                    },
                    "speculativeIndexing": True,
                    "speculativeTTL": "3s",
                },
            },
            {
                "type": "prefix-cache-scorer",
                "parameters": {"prefixMatchInfoProducerName": "precise-prefix-cache-producer"},
            },
            "endpoint-notification-source",
        ),
        "schedulingProfiles": [profile("default", ("prefix-cache-scorer", 2))],
        "dataLayer": {
            "sources": [
                {
                    "pluginRef": "endpoint-notification-source",
                    "extractors": [{"pluginRef": "precise-prefix-cache-producer"}],
                }
            ]
        },
    },
}
