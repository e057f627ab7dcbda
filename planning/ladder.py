"""Growth ladder of a deployment: what each rung buys for a load, what is seen before it, how to take it.

Each rung keeps the ones before it. Figures are upper bounds (roofline): a pod's time is divided between
prefills of what is not cached and decode steps at the largest batch that fits. By round robin over R pods a
request finds what an earlier one left in one of R cases; with prefix routing always.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import NamedTuple

from model_server.errors import ConfigError
from model_server.shapes.deployment import Budget, Deployment, Pool
from model_server.shapes.shape import divides
from planning.plan import decode_step, prefill_s
from planning.presets import Gpu

UTILIZATION_MAX = 0.95


@dataclass(frozen=True, slots=True)
class Load:
    """Requests that a deployment has to serve."""

    requests_per_s: float
    prompt_tokens: int
    output_tokens: int
    reused_share: float  # share of a prompt's tokens that an earlier request had, as in a conversation

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + self.output_tokens


class Rung(NamedTuple):
    """Deployment of one rung, and what it serves."""

    name: str
    gpus: int  # of one replica
    sequences: int  # that one replica holds at once; 0: the model does not fit
    requests_per_s: float  # of one replica among `replicas`, at most
    ttft_s: float  # of a prompt with what is cached, without a queue
    replicas: int  # that the load needs; 0 where no number suffices
    before: str  # what is seen before this rung helps: metric and value
    command: str  # flag or command that takes it


def ladder(deployment: Deployment, gpu: Gpu, budget: Budget, load: Load) -> Iterator[Rung]:
    """Yield the rungs from the given deployment upwards.

    Raises:
        ConfigError: The load is not positive, or its sequences are longer than the model's context.
    """
    most_tokens = deployment.shape.max_positions
    if load.context_tokens > most_tokens:
        raise ConfigError(
            f"--prompt-tokens and --output-tokens are {load.context_tokens:,} together; the model supports "
            f"{most_tokens:,} tokens"
        )
    more = replace(budget, utilization=max(budget.utilization, UTILIZATION_MAX))
    small = replace(deployment, fp8_kv=True)
    wide = small
    if divides(deployment.shape, 2 * deployment.tensor_parallel):
        wide = replace(small, tensor_parallel=2 * deployment.tensor_parallel)
    first = _Pod(deployment, budget, gpu, load)
    last = replace(first, budget=more, deployment=wide)
    rungs = (
        ("as given, round robin", first, "", ""),
        (
            f"{more.utilization:.0%} of the memory",
            replace(first, budget=more),
            "vllm:kv_cache_usage_perc above 0.9 while the GPU has free memory",
            f"--gpu-memory-utilization {more.utilization:g}",
        ),
        (
            "fp8 KV cache",
            replace(first, budget=more, deployment=small),
            "vllm:kv_cache_usage_perc above 0.9, vllm:num_preemptions_total grows",
            "--kv-cache-dtype fp8",
        ),
        (
            f"tensor parallel {wide.tensor_parallel}",
            last,
            "p50 of vllm:time_per_output_token_seconds above the target with few requests running",
            f"--tensor-parallel-size {wide.tensor_parallel}",
        ),
    )
    for name, pod, before, command in rungs:
        yield pod.rung(name, before, command)
    yield _with_prefix_routing(last)
    yield _disaggregated(last)


@dataclass(frozen=True, slots=True)
class _Pod:
    """One replica under a load."""

    deployment: Deployment
    budget: Budget
    gpu: Gpu
    load: Load

    @property
    def sequences(self) -> int:
        return Pool(self.deployment, self.budget).sequences(self.load.context_tokens)

    @property
    def decode_s(self) -> float:
        """Seconds of the pod that one request's decodes take, beside as many others as fit."""
        step = decode_step(self.deployment, self.gpu, max(1, self.sequences), self.load.context_tokens)
        return self.load.output_tokens / step.tokens_per_s

    def prefill_s(self, found_share: float) -> float:
        """Return the seconds of the pod for a prompt of which this share is cached."""
        tokens = ceil(self.load.prompt_tokens * (1.0 - found_share))
        return prefill_s(self.deployment, self.gpu, max(1, tokens))

    def rung(self, name: str, before: str, command: str, *, routed: bool = False) -> Rung:
        """Return the rung with the smallest number of replicas that serves the load.

        Args:
            routed: Whether requests go to the pod that has their past.
        """
        gpus, sequences, load = self.deployment.tensor_parallel, self.sequences, self.load
        if not sequences:
            return Rung(name, gpus, 0, 0.0, 0.0, 0, before, command)
        decode_s = self.decode_s

        def served_per_s(replicas: int) -> float:
            found_share = load.reused_share / (1 if routed else replicas)
            return replicas / (self.prefill_s(found_share) + decode_s)

        # A second pod halves what round robin finds, and two may serve less than one; from two on it grows.
        most = 2 + ceil(load.requests_per_s * (self.prefill_s(0.0) + decode_s))
        replicas = 1
        if served_per_s(1) < load.requests_per_s:
            replicas = 2 + bisect_left(range(2, most), load.requests_per_s, key=served_per_s)
        computed_s = self.prefill_s(load.reused_share / (1 if routed else replicas))
        rate = served_per_s(replicas) / replicas
        return Rung(name, gpus, sequences, rate, computed_s, replicas, before, command)


def _with_prefix_routing(pod: _Pod) -> Rung:
    before = "kvroute_router_queued_seconds_per_pod above 1, vllm:num_requests_waiting above 0 for minutes"
    rung = pod.rung("replicas with prefix routing", before, "", routed=True)
    return rung._replace(command=f"helm upgrade ... --set modelServers.replicas={rung.replicas}")


def _disaggregated(pod: _Pod) -> Rung:
    """Return a rung whose replicas are pods for prefill and pods for decode together."""
    before = "p99 of vllm:time_per_output_token_seconds above twice its p50 while prompts are long"
    rung = pod.rung("disaggregation", before, "", routed=True)
    if not rung.sequences:
        return rung
    deployment, load = pod.deployment, pod.load
    prefills = ceil(load.requests_per_s * rung.ttft_s)
    decodes = ceil(load.requests_per_s * pod.decode_s)
    pods = prefills + decodes
    copied_bytes = load.prompt_tokens * deployment.token_bytes / deployment.tensor_parallel
    return rung._replace(
        replicas=pods,
        requests_per_s=load.requests_per_s / pods,
        ttft_s=rung.ttft_s + copied_bytes / pod.gpu.link_bytes_per_s,
        command=f"label {prefills} prefill and {decodes} decode pods (llm-d.ai/role), disagg-profile-handler",
    )
