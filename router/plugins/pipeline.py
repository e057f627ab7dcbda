"""The configured pipeline in the place of the cost policy: what is known of the candidates in, an order out.

Runs inside the pick. Turns the scheduler's arrays into what plugins see, lets the profile handler run, and
tells producers and observers what came of it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from router.errors import RequestError
from router.picking.decision import Routing
from router.plugins.api import Endpoint, Observer, PluginRequest, Stateful
from router.plugins.producers import AttributeProducer, PrefixProducer
from router.plugins.profiles import Handled, PluginError, ProfileHandler
from router.pods.pod_set import Pod, PodSnapshot
from tokenization import decoded

if TYPE_CHECKING:
    from indexer import PodMatches
    from router.picking.candidates import Lineup
    from router.picking.scheduler import Prompted

_log = logging.getLogger(__name__)

# Parts of a message that only a multimodal model understands.
_MEDIA = ("image_url", "input_image", "audio_url", "input_audio", "video_url", "image")
_PARTS_MAX = 1024


@dataclass(slots=True)
class Pipeline:
    """Orders the candidates of one request."""

    handler: ProfileHandler
    plugins: Mapping[str, object]  # by name; those that observe are told the picks
    prefixes: Mapping[str, PrefixProducer]  # by name, as attributes: producers of what plugins consume
    attributes: Mapping[str, AttributeProducer]
    types: Mapping[str, str]  # of all plugins, by name
    random: np.random.Generator
    _observers: Sequence[tuple[str, Observer]] = field(init=False)

    def __post_init__(self) -> None:
        self._observers = [(name, one) for name, one in self.plugins.items() if isinstance(one, Observer)]

    def state(self) -> dict[str, Any]:
        """What plugins remember, by their names, for people."""
        return {name: {"type": kind, "state": self._state_of(name)} for name, kind in self.types.items()}

    def _state_of(self, name: str) -> object:
        plugin = self.plugins.get(name, self.prefixes.get(name))
        try:
            return plugin.state() if isinstance(plugin, Stateful) else None
        except Exception as error:
            # The picks go on meanwhile, and a plugin of somebody else's may not have thought of that.
            return f"not told: {error!r}"

    def rank(
        self,
        prompted: Prompted,
        lineup: Lineup,
        pods: PodSnapshot,
        matches: Sequence[PodMatches],
        prices: NDArray[Any],
        credits: NDArray[Any],
        known: NDArray[Any],
        now_s: float,
    ) -> tuple[NDArray[np.int64], Routing]:
        columns = zip(
            lineup.pods,
            prices["cost_s"].tolist(),
            credits["cached_tokens"].tolist(),
            (known["awaiting"] + known["decoding"]).tolist(),
            known["held_tokens"].tolist(),
            strict=True,
        )
        endpoints = [
            _endpoint(pods.get(pod.address, pod), now_s, prompted.tokens.total, *counts)
            for pod, *counts in columns
        ]
        request = self._request(prompted, matches, lineup.addresses, now_s)
        try:
            handled = self.handler.run(request, endpoints)
            if handled is None:
                raise RequestError(
                    429, "no endpoints available for the given request", dropped_reason="rejected-saturated"
                )
            response_headers = self._tell(request, handled)
        except RequestError:
            raise
        except Exception as error:
            # Whatever a plugin raises is an error of this one request.
            _log.exception("request %s: a plugin failed", request.id)
            raise RequestError(500, f"a plugin failed: {error}") from error
        sent_to = [one.address for one in (handled.primary.endpoints[0], handled.prefill) if one is not None]
        for producer in self.prefixes.values():
            producer.sent(sent_to, pods)
        return _order(handled, endpoints), _routing(handled, response_headers)

    def _request(
        self, prompted: Prompted, matches: Sequence[PodMatches], addresses: Sequence[str], now_s: float
    ) -> PluginRequest:
        request = prompted.request
        attributes = {
            name: value
            for name, producer in self.attributes.items()
            if (value := producer.attribute(request.headers))
        }
        return PluginRequest(
            id=request.request_id,
            model=request.model,
            headers=request.headers,
            prompt_tokens=prompted.tokens.total,
            priority=prompted.priority,
            now_s=now_s,
            random=self.random,
            attributes=attributes,
            prefixes={
                name: producer.matches(prompted, matches, addresses)
                for name, producer in self.prefixes.items()
            },
            multimodal=_is_multimodal(request.body),
        )

    def _tell(self, request: PluginRequest, handled: Handled) -> dict[str, str]:
        """All are told, whichever of them fails.

        Raises:
            Exception: One failed; a RequestError, if it raised one. Several did: 500.
        """
        headers: dict[str, str] = {}
        failures: list[Exception] = []
        for name, observer in self._observers:
            try:
                told = observer.picked(request, handled.targets)
                if not isinstance(told, Mapping):
                    raise PluginError(f"plugin {name}: picked must answer a mapping of headers")
                headers.update(told)
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


def _order(handled: Handled, endpoints: Sequence[Endpoint]) -> NDArray[np.int64]:
    """Places: the picks in their order, then who else was scored."""
    places = {endpoint.address: place for place, endpoint in enumerate(endpoints)}
    scores = handled.primary.scores
    order = dict.fromkeys(endpoint.address for endpoint in handled.primary.endpoints)
    order |= dict.fromkeys(sorted(scores, key=lambda address: -scores[address]))
    return np.fromiter((places[address] for address in order), np.int64, len(order))


def _routing(handled: Handled, response_headers: Mapping[str, str]) -> Routing:
    picked = handled.primary
    best = picked.endpoints[0].address
    parts = ", ".join(f"{name} {score:.3g}" for name, score in picked.parts)
    return Routing(
        destinations=tuple(endpoint.address for endpoint in picked.endpoints),
        scores=picked.scores,
        excluded=picked.removed,
        request_headers=dict(handled.headers),
        response_headers=dict(response_headers),
        prefill=handled.prefill.address if handled.prefill is not None else None,
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
