"""Start, run and stop of one model server: sockets first, then the model, then requests until a signal."""

import asyncio
import logging
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from ipaddress import ip_address
from pathlib import Path

import uvloop

from model_server.config import TINY_MODEL, ServeOptions
from model_server.engine.build import build_engine, log_pool
from model_server.errors import ConfigError, ModelServerError, StartError
from model_server.kv_events.publisher import ZmqEventPublisher
from model_server.openai.app import Server
from tokenization import TINY_DIRECTORY, PromptTokenizer, TokenizationError

logger = logging.getLogger(__name__)


def run(options: ServeOptions) -> None:
    """Serve until SIGTERM or SIGINT; raises a ModelServerError if the start or the engine fails."""
    with ExitStack() as cleanup:
        listener = cleanup.enter_context(reserve(options.host, options.port))
        port = listener.getsockname()[1]
        admin = None
        if options.admin_port is not None:
            admin = cleanup.enter_context(reserve(options.host, options.admin_port))
        publisher = _publisher(options, port)
        if publisher is not None:
            cleanup.callback(publisher.close)
        tokenizer = load_tokenizer(options.engine.model)
        engine = build_engine(options.engine, None if publisher is None else publisher.publish)
        cleanup.callback(engine.close)
        for name, directory in options.lora_modules:
            if name in options.served_names:
                raise ConfigError(f"--lora-modules {name}: is the model's own name")
            engine.loras.load(name, directory)
        if publisher is not None:
            publisher.start()
        engine.start()
        log_pool(engine, options.engine)
        server = Server(options, engine, publisher, tokenizer)
        url = f"http://{_url_host(options.host)}:{port}"
        if admin is not None:
            _log_admin(options, admin.getsockname())
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            ready = partial(logger.info, "server ready: url=%s model=%s", url, options.served_names[0])
            runner.run(server.serve(listener, ready, admin))
        if not engine.stats().healthy:
            raise ModelServerError("the engine failed; see the log")
    logger.info("server stopped")


@contextmanager
def reserve(host: str, port: int) -> Iterator[socket.socket]:
    """Bind host:port without listening; raises a StartError.

    The port is reserved, but clients get "connection refused" while the model loads.
    """
    try:
        family, kind, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        # With SO_REUSEADDR only `listen` fails if another process listens on the port. Close the probe: on a
        # listening socket, clients would wait for the model instead of trying another server.
        with _bound(family, kind, address) as probe:
            probe.listen()
            address = probe.getsockname()
        listener = _bound(family, kind, address)
    except OSError as error:
        raise StartError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    with listener:
        yield listener


def load_tokenizer(model: str) -> PromptTokenizer:
    """Load the tokenizer of the built-in model or a checkpoint directory; raises a StartError."""
    try:
        directory = TINY_DIRECTORY if model == TINY_MODEL else Path(model)
        return PromptTokenizer.from_directory(directory, by_library=False)
    except TokenizationError as error:
        raise StartError(str(error)) from error


def _bound(family: int, kind: int, address: tuple[object, ...]) -> socket.socket:
    bound = socket.socket(family, kind)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError:
        bound.close()
        raise
    return bound


def _publisher(options: ServeOptions, port: int) -> ZmqEventPublisher | None:
    if options.events is None:
        return None
    # Other machines reach a server on all addresses by its host name.
    host = socket.gethostname() if options.host in ("0.0.0.0", "::", "") else options.host
    topic = options.events.topic or f"kv@{host}:{port}@{options.served_names[0]}"
    return ZmqEventPublisher(replace(options.events, topic=topic))


def _log_admin(options: ServeOptions, address: tuple[str, int]) -> None:
    logger.info("administration port ready: url=http://%s:%d", _url_host(options.host), address[1])
    if options.admin_token is None and not ip_address(address[0]).is_loopback:
        logger.warning(
            "administration port without a token, its snapshots expose prompts: port=%d "
            "(set --admin-token-file, or restrict access to routers)",
            address[1],
        )


def _url_host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
