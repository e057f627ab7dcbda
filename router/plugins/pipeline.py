"""Configured plugin pipeline, which orders the candidates in place of the default cost policy.

Runs inside the pick: converts the scheduler's arrays to plugin objects, runs the profile handler, and
notifies producers and observers of the result.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from router.errors import RequestError
from router.picking.decision import PipelineResult
from router.plugins.api import Endpoint, Observer, PluginRequest, Stateful
from router.plugins.producers import AttributeProducer, PrefixProducer
from router.plugins.profiles import HandlerResult, PluginError, ProfileHandler
from router.pods.pod_set import Pod
from tokenization import decoded

if TYPE_CHECKING:
    from router.picking.scheduler import PricedCandidates

_log = logging.getLogger(__name__)

# Types of message parts that make a prompt multimodal.
_MEDIA = ("image_url", "input_image", "audio_url", "input_audio", "video_url", "image")
_PARTS_MAX = 1024


@dataclass(slots=True)
class Pipeline:
    """Orders the candidates of a request with a profile handler and its plugins."""

    handler: ProfileHandler
    plugins: Mapping[str, object]  # by name; those with `picked` are notified of picks
    prefixes: Mapping[str, PrefixProducer]  # by name
    attributes: Mapping[str, AttributeProducer]  # by name
    types: Mapping[str, str]  # plugin type by name, of all plugins
    random: np.random.Generator
    _observers: Sequence[tuple[str, Observer]] = field(init=False)

    def __post_init__(self) -> None:
        self._observers = [(name, one) for name, one in self.plugins.items() if isinstance(one, Observer)]

    def state(self) -> dict[str, Any]:
        """Return the type and internal state of every plugin by name, for debug pages."""
        return {name: {"type": kind, "state": self._state_of(name)} for name, kind in self.types.items()}

    def _state_of(self, name: str) -> object:
        plugin = self.plugins.get(name, self.prefixes.get(name))
        try:
            return plugin.state() if isinstance(plugin, Stateful) else None
        except Exception as error:
            # A custom plugin may fail because picks change its state at the same time.
            return f"unavailable: {error!r}"

    def rank(self, priced: PricedCandidates) -> tuple[NDArray[np.int64], PipelineResult]:
        pods, loads, tokens, now_s = priced.pods, priced.loads, priced.tokenized.tokens.total, priced.now_s
        columns = zip(
            priced.candidates.pods,
            priced.breakdowns["cost_s"].tolist(),
            priced.hits["cached_tokens"].tolist(),
            (loads["awaiting"] + loads["decoding"]).tolist(),
            loads["held_tokens"].tolist(),
            strict=True,
        )
        endpoints = [
            _endpoint(pods.get(pod.address, pod), now_s, tokens, *counts) for pod, *counts in columns
        ]
        request = self._request(priced)
        try:
            result = self.handler.run(request, endpoints)
            if result is None:
                raise RequestError(
                    429, "no endpoints available for the given request", dropped_reason="rejected-saturated"
                )
            dry = priced.tokenized.request.dry
            response_headers = {} if dry else self._notify_observers(request, result)
        except RequestError:
            raise
        except Exception as error:
            # Any exception of a plugin fails only this request.
            _log.exception("plugin failed: request=%s", request.id)
            raise RequestError(500, f"a plugin failed: {error}") from error
        targets = [one.address for one in (result.primary.endpoints[0], result.prefill) if one is not None]
        for producer in () if dry else self.prefixes.values():
            producer.dispatched(targets, pods)
        return _order(result, endpoints), _pipeline_result(result, response_headers)

    def _request(self, priced: PricedCandidates) -> PluginRequest:
        tokenized, pods = priced.tokenized, priced.candidates.addresses
        request, prefixes = tokenized.request, self.prefixes.items()
        attributes = {
            name: value
            for name, producer in self.attributes.items()
            if (value := producer.attribute(request.headers))
        }
        return PluginRequest(
            id=request.request_id,
            model=request.model,
            headers=request.headers,
            prompt_tokens=tokenized.tokens.total,
            priority=tokenized.priority,
            now_s=priced.now_s,
            random=self.random,
            attributes=attributes,
            prefixes={name: one.matches(tokenized, priced.matches, pods) for name, one in prefixes},
            multimodal=_is_multimodal(request.body),
        )

    def _notify_observers(self, request: PluginRequest, result: HandlerResult) -> dict[str, str]:
        """Notify all observers, even if some fail, and return their response headers."""
        headers: dict[str, str] = {}
        failures: list[Exception] = []
        for name, observer in self._observers:
            try:
                added = observer.picked(request, result.targets)
                if not isinstance(added, Mapping):
                    raise PluginError(f"plugin {name}: picked must return a mapping of headers")
                headers.update(added)
            except Exception as error:
                failures.append(error)
        if len(failures) > 1:
            raise PluginError(f"{len(failures)} plugins failed: {'; '.join(map(str, failures))}")
        if failures:
            raise failures[0]
        return headers


def _endpoint(
    pod: Pod,
    now_s: float,
    prompt_tokens: int,
    cost_s: float,
    cached_tokens: int,
    inflight: float,
    held_tokens: float,
) -> Endpoint:
    load, entry = pod.load, pod.entry
    return Endpoint(
        address=pod.address,
        id=f"{entry.namespace}/{entry.name}",
        labels=entry.labels,
        waiting_requests=(load.waiting or 0) if load else 0,
        running_requests=(load.running or 0) if load else 0,
        kv_usage=(load.kv_usage or 0.0) if load else 0.0,
        load_age_s=now_s - load.scraped_s if load else None,
        lora=load.lora if load else None,
        inflight_requests=int(inflight),
        inflight_tokens=int(held_tokens),
        uncached_tokens=max(0, prompt_tokens - cached_tokens),
        cost_s=cost_s,
    )


def _order(result: HandlerResult, endpoints: Sequence[Endpoint]) -> NDArray[np.int64]:
    """Return endpoint indices: the picks in their order, then all other scored endpoints by score."""
    indices = {endpoint.address: index for index, endpoint in enumerate(endpoints)}
    scores = result.primary.scores
    order = dict.fromkeys(endpoint.address for endpoint in result.primary.endpoints)
    order |= dict.fromkeys(sorted(scores, key=lambda address: -scores[address]))
    return np.fromiter((indices[address] for address in order), np.int64, len(order))


def _pipeline_result(result: HandlerResult, response_headers: Mapping[str, str]) -> PipelineResult:
    picked = result.primary
    best = picked.endpoints[0].address
    parts = ", ".join(f"{name} {score:.3g}" for name, score in picked.score_parts)
    return PipelineResult(
        destinations=tuple(
            f"{endpoint.address.rpartition(':')[0]}:{result.port}" if result.port else endpoint.address
            for endpoint in picked.endpoints
        ),
        scores=picked.scores,
        excluded=picked.removed,
        request_headers=dict(result.headers),
        response_headers=dict(response_headers),
        prefill=result.prefill.address if result.prefill is not None else None,
        reason=f"weighted score {picked.scores[best]:.3g} ({parts or 'no scorers'})",
    )


def _is_multimodal(body: Mapping[str, Any]) -> bool:
    messages = decoded(body.get("messages"))
    if not isinstance(messages, list):
        return False
    for message in messages[:_PARTS_MAX]:
        content = message.get("content") if isinstance(message, dict) else None
        for part in content[:_PARTS_MAX] if isinstance(content, list) else ():
            if isinstance(part, dict) and part.get("type") in _MEDIA:
                return True
    return False
