"""Checks of one engine from outside: its pages, its KV events, its replay socket, and a prompt sent twice."""

from __future__ import annotations

import random
from functools import partial

import msgspec

from indexer import EngineReading
from kvroute.doctor.findings import Report
from kvroute.doctor.streams import events_problem, port_problem, replay_problem
from kvroute.engines import Engine
from kvroute.http_client import Answer, Http, UnreachableError
from router.pods.engine_load import EnginePage

_PAGE_S = 5.0
BLOCK_TOKENS = 16  # of the router's index by default
_BLOCK_TOKENS_MAX = 256
_PROMPT_BLOCKS = 3
_TOKEN_IDS = range(100, 250)  # ordinary tokens in all vocabularies
# Not the shared generator, which a seed may make repeat a prompt that is cached already.
_random = random.SystemRandom()


class Card(msgspec.Struct):
    """Model of /v1/models."""

    id: str
    max_model_len: int | None = None


class _Cards(msgspec.Struct):
    data: list[Card] = []


_CARDS = msgspec.json.Decoder(_Cards)


def cached_tokens(answer: Answer) -> int | None:
    """Return the cached prompt tokens of a response's usage; None if it does not tell."""
    value = answer.get("usage", "prompt_tokens_details", "cached_tokens")
    return value if isinstance(value, int) else None


def check_engine(
    engine: Engine, http: Http, report: Report, model: str | None, router_block_tokens: int
) -> Card | None:
    """Run all checks of an engine.

    Args:
        model: Model that it must serve; None: any.
        router_block_tokens: Block size of the router's index (`--block-tokens`).

    Returns:
        The model that it serves; None if it takes no requests.
    """
    try:
        card = _served(engine, http, report, model)
        if card is None:
            return None
        page = _page(engine, http, report, router_block_tokens)
        _check_ports(engine, report)
        if page.is_asleep:
            return None
        _check_requests(engine, http, report, card, page)
        return card
    except UnreachableError as error:
        report.add("engine", "hung" if error.is_hung else "refused", why=error)
        return None


def _served(engine: Engine, http: Http, report: Report, model: str | None) -> Card | None:
    health = http.ask(f"http://{engine.address}/health", read_s=_PAGE_S)
    if health.status not in (200, 404):
        report.add("engine", "unhealthy", why=health.text)
        return None
    report.add("engine", "answers")
    report.judge_clock(health.headers.get("date"))
    answer = http.ask(f"http://{engine.address}/v1/models", read_s=_PAGE_S)
    cards = {card.id: card for card in answer.read(_CARDS).data}
    if not cards:
        report.add("model", "key" if answer.status in (401, 403) else "none", why=answer.text)
        return None
    card = next(iter(cards.values())) if model is None else cards.get(model)
    names = ", ".join(cards)
    report.add("model", "other" if card is None else "served", names=names, model=model or (card and card.id))
    return card


def _page(engine: Engine, http: Http, report: Report, router_block_tokens: int) -> EnginePage:
    """Return the metrics page, and report what it tells."""
    answer = http.ask(engine.metrics_url, read_s=_PAGE_S)
    page = EnginePage(answer.body if answer.status == 200 else b"")
    if page.load(now_s=0.0) is None:
        report.add("metrics", "missing", url=engine.metrics_url)
    if page.is_asleep:
        report.add("asleep", "sleeps", what="the engine")
    if _reading(page).caching.is_on is False:
        report.add("caching", "switched_off")
    if (size := page.block_tokens) is None:
        case = "unknown"
    elif size % router_block_tokens:
        case = "no_multiple"
    else:
        case = "large" if size > _BLOCK_TOKENS_MAX else "fits"
    report.add("block_size", case, size=size, router=router_block_tokens)
    return page


def _reading(page: EnginePage) -> EngineReading:
    return page.reading() or EngineReading()


def _check_ports(engine: Engine, report: Report) -> None:
    replay, snapshot = (
        (engine.stream.replay_endpoint, engine.stream.snapshot_url) if engine.stream else (None, None)
    )
    for check, url, problem in (("replay", replay, replay_problem), ("snapshot", snapshot, port_problem)):
        why = problem(url) if url else ""
        report.add(check, "undeclared" if not url else "missing" if why else "open", url=url, why=why)


def _check_requests(engine: Engine, http: Http, report: Report, card: Card, page: EnginePage) -> None:
    """Send one prompt twice: the first must publish events, the second must hit."""
    size, reading = page.block_tokens or BLOCK_TOKENS, _reading(page)
    whole_blocks, most = _PROMPT_BLOCKS * size, card.max_model_len
    if most is not None and whole_blocks + 1 >= most:
        report.add("block_size", "beyond_model", most=most, blocks=_PROMPT_BLOCKS, size=size)
        return
    prompt = _random.choices(_TOKEN_IDS, k=whole_blocks + 1)
    body = {"model": card.id, "prompt": prompt, "max_tokens": 1}
    request = partial(http.ask, f"http://{engine.address}/v1/completions", body)
    endpoint = engine.stream.events_endpoint if engine.stream else None
    if endpoint is None:
        request()
        report.add("events", "elsewhere")
    else:
        why, port = events_problem(endpoint, request), endpoint.rpartition(":")[2]
        report.add("events", "missing" if why else "arrive", endpoint=endpoint, why=why, port=port)
    answer = request()
    if answer.status != 200:
        report.add("engine", "request", why=answer.text)
        return
    cached = cached_tokens(answer)
    if cached is None:
        report.add("caching", "untold")
    elif cached or reading.caching.is_on is not False:
        report.add("caching", "hits" if cached else "no_hit", cached=cached)
    if cached and cached < whole_blocks:
        report.add("drafter", "costs", tokens=whole_blocks - cached)
    elif cached:
        report.add("drafter", "free")
    elif reading.has_drafter:
        report.add("drafter", "may_cost")
