"""Rendered manifests: golden files, and rules that hold for every object."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from model_server import cli as model_server_cli
from router.app.config import parse_flags
from router.prompts import tokenizer_server
from tests.support.chart.helm import CHART, EVERYTHING, container, lint, manifests, one, pods, template, text
from tests.support.chart.readme import MARK, table
from tests.support.paths import ROOT

GOLDEN = Path(__file__).parent / "golden"
SALT = {"header": "x-tenant", "keySecret": {"name": "salt"}}
# Contents of ConfigMaps, which have tests of their own.
_LONG = 400
STANDALONE = {
    "modelServers": EVERYTHING["modelServers"],
    "tokenizer": EVERYTHING["tokenizer"],
    "peers": {"enabled": True},
    "indexer": {"hashSeed": 4711},
}


@pytest.mark.parametrize(("name", "values"), [("default", {}), ("everything", EVERYTHING)])
def test_manifests_equal_the_golden_files(name: str, values: dict[str, Any]) -> None:
    """Manifests equal the golden files; UPDATE_GOLDEN=1 rewrites these."""
    rendered = {}
    for each in manifests(values):
        for key, value in each.get("data", {}).items():
            each["data"][key] = value if len(value) < _LONG else "..."
        # Checksums of the omitted contents.
        each.get("spec", {}).get("template", {}).get("metadata", {}).pop("annotations", None)
        rendered[f"{each['kind']} {each['metadata']['name']}"] = each
    golden = GOLDEN / f"{name}.yaml"
    if os.environ.get("UPDATE_GOLDEN"):
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(yaml.safe_dump(rendered, width=110))
    assert rendered == yaml.safe_load(golden.read_text())


def test_the_readme_lists_the_values() -> None:
    """The table of README.md equals values.yaml; UPDATE_GOLDEN=1 rewrites it."""
    readme = CHART / "README.md"
    text, expected = readme.read_text().split(MARK)[0], table(CHART / "values.yaml")
    if os.environ.get("UPDATE_GOLDEN"):
        readme.write_text(text + MARK + expected)
    assert readme.read_text() == text + MARK + expected


def test_engines_take_adapters_and_containers() -> None:
    """Adapters become flags of either engine; further containers and the service account reach its pods."""
    for engine, flags in (("kvroute", ["--max-loras=4"]), ("vllm", ["--enable-lora"])):
        models = {
            **EVERYTHING["modelServers"],
            "engine": engine,
            "loraAdapters": [{"name": "sql", "path": "/adapters/sql"}, {"name": "law", "path": "org/law"}],
            "initContainers": [{"name": "fetch-adapters", "image": "fetch:1"}],
            "sidecars": [{"name": "log-shipper", "image": "ship:1"}],
            "serviceAccountName": "reads-weights",
        }
        spec = one(manifests({"modelServers": models}), "Deployment", "-models")["spec"]["template"]["spec"]
        args = spec["containers"][0]["args"]
        at = args.index("--lora-modules")
        assert args[at - 1 : at + 3] == [*flags, "--lora-modules", "sql=/adapters/sql", "law=org/law"]
        fetches = ["fetch-model"] if engine == "kvroute" else []
        assert [each["name"] for each in spec["initContainers"]] == ["fetch-adapters", *fetches]
        assert [each["name"] for each in spec["containers"]] == ["model-server", "log-shipper"]
        assert spec["serviceAccountName"] == "reads-weights"


def test_images_by_digest() -> None:
    """An image's digest replaces its tag."""
    digest = "sha256:" + "0a" * 32
    pinned = {"image": {"digest": digest, "tag": "ignored"}}
    objects = manifests({"router": pinned, "envoy": pinned, "modelServers": pinned})
    images = {each["image"] for _, template_ in pods(objects) for each in template_["spec"]["containers"]}
    assert images == {
        f"{name}@{digest}"
        for name in ("ghcr.io/kvroute/router", "ghcr.io/kvroute/model-server", "envoyproxy/envoy")
    }


def test_lint_reports_nothing() -> None:
    """`helm lint` reports neither errors nor warnings."""
    assert lint() == []


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_every_pod_is_restricted(values: dict[str, Any]) -> None:
    """Every container runs as non-root with read-only root filesystem, no capabilities, and limits."""
    for name, template_ in pods(manifests(values)):
        spec = template_["spec"]
        assert spec["securityContext"]["runAsNonRoot"] is True, name
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert spec["automountServiceAccountToken"] is name.endswith("-epp"), name
        for each in [*spec["containers"], *spec.get("initContainers", [])]:
            assert each["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }, name
            assert "memory" in each["resources"]["limits"], name


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_selectors_outlive_upgrades(values: dict[str, Any]) -> None:
    """Selectors and pod templates contain no version: upgrades work and restart only changed workloads."""
    for name, template_ in pods(manifests(values)):
        if name.endswith("-test"):
            continue
        assert not [
            label for label in template_["metadata"]["labels"] if "version" in label or "chart" in label
        ]
    for each in manifests(values):
        selector = each.get("spec", {}).get("selector")
        if each["kind"] == "Deployment":
            assert set(selector["matchLabels"]) - {"kvroute.dev/model-servers"} == {
                "app.kubernetes.io/name",
                "app.kubernetes.io/instance",
                "app.kubernetes.io/component",
            }


@pytest.mark.parametrize("values", [{}, EVERYTHING])
def test_the_grace_period_covers_draining(values: dict[str, Any]) -> None:
    """The grace period covers the readiness delay, the drain timeout and some seconds to exit."""
    objects = manifests(values)
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    for kind, suffix in (("router", "-epp"), ("envoy", "-envoy"), ("modelServers", "-models")):
        if kind == "envoy" and values.get("mode") == "gateway":
            continue
        drain = {**defaults[kind]["drain"], **values.get(kind, {}).get("drain", {})}
        grace_s = one(objects, "Deployment", suffix)["spec"]["template"]["spec"][
            "terminationGracePeriodSeconds"
        ]
        assert grace_s >= drain["announceSeconds"] + drain["timeoutSeconds"] + 10
    args = container(one(objects, "Deployment", "-epp"), "router")["args"]
    assert f"--drain-timeout={defaults['router']['drain']['timeoutSeconds']}s" in args


@pytest.mark.parametrize(
    "values", [{}, EVERYTHING, STANDALONE, {"envoy": {"door": "ext_proc", "responses": "full"}}]
)
def test_the_router_accepts_its_command_line(
    values: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The router's parser accepts every flag that the chart sets."""
    objects = manifests(values)
    router = container(one(objects, "Deployment", "-epp"), "router")
    monkeypatch.setenv("POD_NAMESPACE", "llm")
    config = tmp_path / "config.yaml"
    if "config" in values.get("router", {}):
        config.write_text(one(objects, "ConfigMap", "-epp")["data"]["config.yaml"])
    args = [
        arg.replace("$(KVROUTE_REDIS_URL)", "redis://h:6379/0").replace(
            "/etc/kvroute/config.yaml", str(config)
        )
        for arg in router["args"][1:]
    ]
    parsed, _ = parse_flags(args)
    ports = {port["containerPort"] for port in router["ports"]}
    assert {parsed.grpc_port, parsed.grpc_health_port, parsed.metrics_port} <= ports
    assert router["args"][0] == "router"


def test_the_tokenizer_accepts_its_command_line() -> None:
    """The tokenizer's parser accepts its flags, and its socket is the one that the router uses."""
    deployment = one(manifests(EVERYTHING), "Deployment", "-epp")
    args = container(deployment, "tokenizer")["args"]
    flags = tokenizer_server.command_parser().parse_args(args[1:])
    assert f"--tokenizer=qwen3-8b=unix:{flags.socket}" in container(deployment, "router")["args"]


@pytest.mark.parametrize(
    ("values", "model"),
    [
        ({}, "kvroute-tiny"),
        ({"gpus": 2, "tensorParallel": 2, "hostTierGiB": 0.5, "kvReplayPort": 0}, "kvroute-tiny"),
        (
            {"model": {"name": "m", "source": "pvc", "pvc": {"claim": "weights", "path": "llama"}}},
            "/models/llama",
        ),
        (
            {"model": {"name": "m", "source": "hub", "hub": {"repository": "o/n", "revision": "r1"}}},
            "/models/o/n/r1",
        ),
    ],
)
def test_our_model_server_accepts_its_command_line(values: dict[str, Any], model: str) -> None:
    """Our engine's parser accepts its flags, and events go to the router's port."""
    objects = manifests({"modelServers": values})
    server = container(one(objects, "Deployment", "-models"), "model-server")
    args = [arg.replace("$(POD_IP)", "10.0.0.1") for arg in server["args"]]
    flags = model_server_cli.command_parser().parse_args(args[1:])
    assert (flags.model, flags.host) == (model, "0.0.0.0")
    assert flags.endpoint == "tcp://*:5557"
    assert flags.replay_endpoint == ("" if values.get("kvReplayPort") == 0 else "tcp://*:5558")
    assert flags.topic == f"kv@10.0.0.1:8000@{flags.served_names[0]}"


def test_vllm_publishes_where_the_router_listens() -> None:
    """vLLM gets events, replay, CPU offload and tensor parallelism by its own flags."""
    objects = manifests(EVERYTHING)
    server = container(one(objects, "Deployment", "-models"), "model-server")
    assert (server["command"], server["args"][0]) == (["vllm", "serve"], "Qwen/Qwen3-8B")
    flags = dict(arg.removeprefix("--").split("=", 1) for arg in server["args"][1:] if "=" in arg)
    assert yaml.safe_load(flags["kv-events-config"]) == {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": "tcp://*:5557",
        "replay_endpoint": "tcp://*:5558",
        "topic": "kv@$(POD_IP):8000@qwen3-8b",
    }
    assert yaml.safe_load(flags["kv-transfer-config"])["kv_connector_extra_config"] == {
        "cpu_bytes_to_use": 32 << 30,
        "self_describing_kv_events": True,
    }
    assert flags["tensor-parallel-size"] == "2"
    assert server["resources"]["limits"]["nvidia.com/gpu"] == 2
    router = container(one(objects, "Deployment", "-epp"), "router")["args"]
    assert {"--kv-events-port=5557", "--kv-replay-port=5558"} <= set(router)


def test_the_hash_seed_may_come_from_a_secret() -> None:
    """Routers with a shared index read the hash seed from a Secret, not from the manifests."""
    seed = {"hashSeedSecret": {"name": "seeds", "key": "kvroute"}}
    router = container(
        one(manifests({"peers": {"enabled": True}, "indexer": seed}), "Deployment", "-epp"), "router"
    )
    assert "--hash-seed=$(KVROUTE_HASH_SEED)" in router["args"]
    (taken,) = [each["valueFrom"] for each in router["env"] if each["name"] == "KVROUTE_HASH_SEED"]
    assert taken == {"secretKeyRef": {"name": "seeds", "key": "kvroute"}}


@pytest.mark.parametrize(
    "values", [{}, {"mode": "gateway", "gateway": {"httpRoute": {"parentRefs": [{"name": "g"}]}}}]
)
def test_helm_test_runs_a_pod_whose_logs_can_be_read(values: dict[str, Any]) -> None:
    """In each mode the test pod is kept after `helm test`, so that --logs can read its logs."""
    annotated = [(each["kind"], each["metadata"].get("annotations", {})) for each in manifests(values)]
    ((kind, test),) = [each for each in annotated if "helm.sh/hook" in each[1]]
    assert (kind, test["helm.sh/hook"]) == ("Pod", "test")
    assert test["helm.sh/hook-delete-policy"] == "before-hook-creation"


def test_the_selector_finds_the_model_servers() -> None:
    """Pods, the selector flag, the pool and the headless service have the same labels."""
    for values in ({}, EVERYTHING):
        objects = manifests(values)
        deployment = one(objects, "Deployment", "-models")
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        selected = one(objects, "Service", "-models")["spec"]["selector"]
        assert selected.items() <= labels.items()
        if values:
            pool = one(objects, "InferencePool", "")
            assert pool["spec"]["selector"]["matchLabels"] == selected
        else:
            args = container(one(objects, "Deployment", "-epp"), "router")["args"]
            (selector,) = [arg for arg in args if arg.startswith("--endpoint-selector=")]
            told = dict(pair.split("=") for pair in selector.split("=", 1)[1].split(","))
            assert told == selected


def test_roles_grant_only_what_the_mode_needs() -> None:
    """Roles grant only what is watched; cluster-wide roles are for the metrics port, without its profiles."""

    def granted(values: dict[str, Any], kind: str) -> set[str]:
        roles = [each for each in manifests(values) if each["kind"] == kind]
        rules = [rule for role in roles for rule in role["rules"]]
        return {one for rule in rules for one in (rule.get("resources") or rule["nonResourceURLs"])}

    assert granted({}, "Role") == {"pods", "events"}
    assert granted({}, "ClusterRole") == set()
    pools = {"inferencepools", "inferenceobjectives", "inferencemodelrewrites"}
    assert granted(EVERYTHING, "Role") == {"pods", "events", *pools}
    pages = ("stream", "decisions", "funnel", "worth", "prefixes", "prefix_breaks")
    metrics = {"/metrics", *(f"/debug/{page}" for page in pages)}
    assert granted(EVERYTHING, "ClusterRole") == {"tokenreviews", "subjectaccessreviews", *metrics}


def test_only_routers_reach_administration_and_events() -> None:
    """Only routers reach the ports of administration, KV events and replay."""
    for values in ({}, EVERYTHING):
        rules = one(manifests(values), "NetworkPolicy", "-models")["spec"]["ingress"]
        guarded = [rule for rule in rules if {port["port"] for port in rule["ports"]} & {8001, 5557, 5558}]
        for rule in guarded:
            (peer,) = rule["from"]
            assert peer["podSelector"]["matchLabels"]["app.kubernetes.io/component"] == "router"
        opened = {port["port"] for rule in guarded for port in rule["ports"]}
        assert opened == ({8000, 5557, 5558} if values else {8000, 8001, 5557, 5558})


def test_routers_get_the_administration_port_and_its_secret() -> None:
    """Our engine's admin port is in the pods' annotation, and both sides read the token from one Secret."""
    secret = {"adminPort": 9001, "adminTokenSecret": {"name": "adm", "key": "t"}}
    objects = manifests({"modelServers": secret})
    models = one(objects, "Deployment", "-models")
    server = container(models, "model-server")
    flags = model_server_cli.command_parser().parse_args(server["args"][1:])
    told = models["spec"]["template"]["metadata"]["annotations"]["kvroute.dev/admin-port"]
    assert int(told) == flags.admin_port == 9001
    router = container(one(objects, "Deployment", "-epp"), "router")
    token = {
        "name": "KVROUTE_ADMIN_TOKEN",
        "valueFrom": {"secretKeyRef": {"name": "adm", "key": "t"}},
    }
    assert token in server["env"]
    assert token in router["env"]


def test_vllm_has_no_administration_port() -> None:
    """vLLM's pods have neither the admin annotation nor the token."""
    engine = {**EVERYTHING["modelServers"], "adminTokenSecret": {"name": "adm"}}
    models = one(manifests({"modelServers": engine}), "Deployment", "-models")
    assert "annotations" not in models["spec"]["template"]["metadata"]
    assert "KVROUTE_ADMIN_TOKEN" not in {each["name"] for each in container(models, "model-server")["env"]}


@pytest.mark.parametrize(
    "more", [{}, {"modelServers": {"enabled": False, "matchLabels": {"app": "vllm"}}}], ids=["own", "others"]
)
def test_engines_may_connect_to_the_router(more: dict[str, Any]) -> None:
    """With --events-bind router, container, Service and policy use one port, open only to the pool's pods."""
    policies = {"networkPolicy": {"enabled": True}}
    objects = manifests({"indexer": {"eventsBindPort": 6557}, **policies, **more})
    router = container(one(objects, "Deployment", "-epp"), "router")
    assert "--events-bind=tcp://*:6557" in router["args"]
    assert {"name": "kv-events", "containerPort": 6557} in router["ports"]
    ports = one(objects, "Service", "-epp")["spec"]["ports"]
    assert {"name": "kv-events", "port": 6557, "targetPort": "kv-events"} in ports
    rules = one(objects, "NetworkPolicy", "-epp")["spec"]["ingress"]
    (rule,) = [rule for rule in rules if {"port": 6557} in rule["ports"]]
    (peer,) = rule["from"]
    labels = peer["podSelector"]["matchLabels"]
    if more:
        assert labels == {"app": "vllm"}
    else:
        assert labels["app.kubernetes.io/component"] == "model-server"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"indexer": {"eventsBindPort": 5557}, "router": {"replicas": 2}}, "indexer.eventsBindPort"),
        ({"indexer": {"eventsBindPort": 5557}, "autoscaling": {"enabled": True}}, "indexer.eventsBindPort"),
        ({"modelServers": {"enabled": False}}, "modelServers.matchLabels"),
        ({"mode": "gateway"}, "gateway.httpRoute.parentRefs|networkPolicy.gateways"),
        ({"mode": "gateway", "gateway": {"kind": "envoyGateway"}}, "gateway.httpRoute.parentRefs"),
        (
            {
                "mode": "gateway",
                "gateway": {"kind": "envoyGateway", "httpRoute": {"parentRefs": [{"name": "g"}]}},
                "modelServers": {"enabled": False, "matchLabels": {"a": "b"}, "targetPorts": [1, 2]},
            },
            "modelServers.targetPorts",
        ),
        ({"indexer": {"backend": "redis", "redis": {"deploy": True}}}, "indexer.hashSeed"),
        ({"peers": {"enabled": True}}, "indexer.hashSeed"),
        ({"indexer": {"hashSeed": 1, "hashSeedSecret": {"name": "seed"}}}, "indexer.hashSeedSecret"),
        ({"indexer": {"backend": "redis", "hashSeed": 1}}, "indexer.redis.url"),
        ({"tokenizer": {"enabled": True}}, "tokenizer.source"),
        ({"modelServers": {"engine": "vllm"}}, "modelServers.model.source"),
        ({"modelServers": {"model": {"name": "m", "source": "hub"}}}, "modelServers.model.hub.repository"),
        ({"modelServers": {"model": {"name": "m", "source": "pvc"}}}, "modelServers.model.pvc.claim"),
        ({"modelServers": {"gpus": 1, "tensorParallel": 2}}, "modelServers.gpus"),
        (
            {"modelServers": {**EVERYTHING["modelServers"], "gpus": 0}},
            "modelServers.tensorParallel: 2 processes of vLLM need a GPU each",
        ),
        ({"modelServers": {"adminPort": 8000}}, "modelServers.adminPort"),
        ({"router": {"tracing": {"enabled": True}}}, "router.tracing.endpoint"),
        ({"modelServers": {"kvConnector": True}, "envoy": {"failOpen": True}}, "envoy.failOpen"),
        (
            {
                "mode": "gateway",
                "gateway": {
                    "inferencePool": {"failureMode": "FailOpen"},
                    "httpRoute": {"parentRefs": [{"name": "g", "namespace": "g"}]},
                },
                "modelServers": {"extraArgs": ["--kv-transfer-config", "{}"]},
            },
            "gateway.inferencePool.failureMode",
        ),
        ({"autoscaling": {"enabled": True, "targetCPUUtilizationPercentage": None}}, "autoscaling"),
        (
            {"modelServers": {"autoscaling": {"kind": "hpa", "queuedSeconds": None}}},
            "modelServers.autoscaling",
        ),
        ({"modelServers": {"autoscaling": {"kind": "keda"}}}, "modelServers.autoscaling.prometheus"),
        ({"router": {"tenantSalt": SALT}}, "router.tenantSalt.header.*envoy.door: ext_proc"),
        (
            {"router": {"tenantSalt": {"header": "x-tenant"}}, "envoy": {"door": "ext_proc"}},
            "router.tenantSalt.keySecret.name",
        ),
        (
            {**EVERYTHING, "router": {**EVERYTHING["router"], "tenantSalt": SALT}},
            "gateway.inferencePool.failureMode",
        ),
    ],
)
def test_contradicting_values_are_rejected(values: dict[str, Any], message: str) -> None:
    """Values that contradict each other are rejected with the path of the one to change."""
    error = template(values).error
    assert re.search(message, error), error


def test_the_salt_key_is_mounted_where_the_flag_names_it() -> None:
    """The router's --salt-key-file is the Secret's file."""
    values = {"router": {"tenantSalt": SALT}, "envoy": {"door": "ext_proc"}}
    deployment = one(manifests(values), "Deployment", "-epp")
    router, spec = container(deployment, "router"), deployment["spec"]["template"]["spec"]
    assert {"--salt-from=header:x-tenant", "--salt-key-file=/etc/kvroute-salt/key"} <= set(router["args"])
    (mount,) = [each for each in router["volumeMounts"] if each["mountPath"] == "/etc/kvroute-salt"]
    assert {"name": mount["name"], "secret": {"secretName": "salt"}} in spec["volumes"]


@pytest.mark.parametrize(
    ("models", "told"),
    [
        ({}, "auto"),
        ({"kvConnector": True}, "true"),
        ({"extraArgs": ['--kv-transfer-config={"kv_connector":"NixlConnector"}']}, "true"),
        ({"enabled": False, "matchLabels": {"llm-d.ai/role": "decode"}}, "true"),
    ],
)
def test_the_router_gets_the_kv_connector_setting(models: dict[str, Any], told: str) -> None:
    """The KV connector setting follows the values, vLLM's arguments and the pods' role."""
    router = {"forbiddenBodyFields": ["kv_hints", "mine"]}
    args = container(
        one(manifests({"modelServers": models, "router": router}), "Deployment", "-epp"), "router"
    )
    config, _ = parse_flags(args["args"][1:])
    assert (config.kv_connector, config.forbidden_fields) == (told, ("kv_hints", "mine"))


def test_the_notes_list_the_next_commands() -> None:
    """NOTES.txt names three steps and the most common problems."""
    notes = (CHART / "templates" / "NOTES.txt").read_text()
    assert all(f"  {step}. " in notes for step in (1, 2, 3))
    reasons = ("NoPodsMatch", "PodsNotReady", "WrongTargetPort", "PodUnreachable", "EngineWithoutEvents")
    assert [reason for reason in (*reasons, "Forbidden", "ErrImagePull") if reason not in notes] == []
    assert "NOTES.txt" not in text()


def test_the_default_images_are_those_that_a_release_publishes() -> None:
    """The release workflow pushes the images that the chart names by default, tagged with its appVersion."""
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "release.yml").read_text())
    version = yaml.safe_load((CHART / "Chart.yaml").read_text())["appVersion"]
    prefix = workflow["env"]["IMAGE_PREFIX"]
    images = {
        each["image"]
        for _, template_ in pods(manifests({}))
        for each in template_["spec"]["containers"]
        if "envoyproxy" not in each["image"]
    }
    assert images == {f"{prefix}/router:{version}", f"{prefix}/model-server:{version}"}


@pytest.mark.parametrize("kind", ["hpa", "keda"])
def test_model_servers_are_scaled_by_queued_work(kind: str) -> None:
    """Both autoscalers name the Deployment, which then has no fixed number of replicas, and both metrics."""
    scaling = {"kind": kind, "queuedSeconds": 0.5, "waitingRequests": 4, "prometheus": "http://p:9090"}
    objects = manifests({"modelServers": {"autoscaling": scaling}})
    deployment = one(objects, "Deployment", "-models")
    assert "replicas" not in deployment["spec"]
    scaler = one(objects, {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}[kind], "-models")
    assert scaler["spec"]["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
    if kind == "hpa":
        external, own = scaler["spec"]["metrics"]
        assert external["external"] == {
            "metric": {
                "name": "kvroute_router_queued_seconds_per_pod",
                "selector": {"matchLabels": {"model": "kvroute-tiny"}},
            },
            "target": {"type": "Value", "value": "500m"},
        }
        assert own["pods"]["target"] == {"type": "AverageValue", "averageValue": "4000m"}
    else:
        queued, waiting = scaler["spec"]["triggers"]
        assert (queued["metricType"], queued["metadata"]["threshold"]) == ("Value", "0.5")
        gauge = 'kvroute_router_queued_seconds_per_pod{namespace="llm",model="kvroute-tiny"}'
        assert gauge in queued["metadata"]["query"]
        assert (waiting["metricType"], waiting["metadata"]["threshold"]) == ("AverageValue", "4")


def test_several_models() -> None:
    """Each set of model servers is a Deployment of its own, with modelServers' settings where it has none."""
    small = {
        "model": {"name": "small", "source": "pvc", "pvc": {"claim": "weights"}},
        "gpus": 0,
        "replicas": 1,
    }
    large = {
        "model": {"name": "large", "source": "hub", "hub": {"repository": "org/large"}},
        "engine": "vllm",
    }
    scaling = {"autoscaling": {"kind": "keda", "prometheus": "http://p:9090"}}
    objects = manifests(
        {"modelServers": {"gpus": 2, "replicas": 3}, "moreModelServers": {"a": small, "b": large | scaling}}
    )
    sets = {
        suffix: one(objects, "Deployment", suffix)["spec"] for suffix in ("-models", "-models-a", "-models-b")
    }
    assert [each.get("replicas") for each in sets.values()] == [3, 1, None]
    selectors = [each["selector"]["matchLabels"] for each in sets.values()]
    assert [each["kvroute.dev/model-servers"] for each in selectors] == ["main", "a", "b"]
    containers = [each["template"]["spec"]["containers"][0] for each in sets.values()]
    gpus = [each["resources"]["limits"].get("nvidia.com/gpu") for each in containers]
    assert gpus == [2, None, 2]
    assert "--model=/models" in containers[1]["args"]
    assert containers[2]["command"] == ["vllm", "serve"]
    query = one(objects, "ScaledObject", "-models-b")["spec"]["triggers"][0]["metadata"]["query"]
    assert 'model="large"' in query
    router = container(one(objects, "Deployment", "-epp"), "router")["args"]
    assert [arg for arg in router if arg.startswith("--tokenizer=")] == [
        "--tokenizer=large=pods",
        "--tokenizer=small=pods",
    ]
    for pool in objects:
        if pool["kind"] == "Service" and pool["metadata"]["name"].endswith("-models"):
            assert all(
                pool["spec"]["selector"].items() <= each["template"]["metadata"]["labels"].items()
                for each in sets.values()
            )


def test_sets_of_model_servers_share_ports() -> None:
    """A set cannot have ports of its own, nor no model's name."""
    for wrong in ({"model": {"name": "a"}, "kvEventsPort": 1}, {"model": {}}, {}):
        assert "moreModelServers" in template({"moreModelServers": {"a": wrong}}).error


def test_further_pools_have_ports_of_their_own() -> None:
    """A further InferencePool is named to the router, and its port is open from the Gateway to the router."""
    pools = {"more": [{"name": "coder", "port": 9012}]}
    values = {"mode": "gateway", "gateway": {**EVERYTHING["gateway"], "inferencePool": pools}}
    objects = manifests(values)
    router = container(one(objects, "Deployment", "-epp"), "router")
    assert "--pool-port=coder=9012" in router["args"]
    assert 9012 in [port["containerPort"] for port in router["ports"]]
    assert 9012 in [port["port"] for port in one(objects, "Service", "-epp")["spec"]["ports"]]
    gateways = one(objects, "NetworkPolicy", "-epp")["spec"]["ingress"][0]
    assert {"port": 9012} in gateways["ports"]
    pools["more"][0]["port"] = 9003
    assert "gateway.inferencePool.more" in template(values).error.replace("/", ".")
