"""Errors of the model server: one tree, each message says what was wrong, where, and what to do."""


class ModelServerError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(ModelServerError):
    """A setting of the engine is out of range or contradicts another."""


class CapacityError(ModelServerError):
    """A model, a context or a batch does not fit into the memory that is planned with."""


class ModelError(ModelServerError):
    """A checkpoint directory is missing, of an unknown architecture, or its tensors do not fit."""


class AdapterError(ModelServerError):
    """A LoRA adapter does not fit the model, is not supported, or there is no room or no such name for it."""


class StartError(ModelServerError):
    """The server cannot start: an address is in use, or a file cannot be read."""


class WorkerError(ModelServerError):
    """A process that computes a part of the model has ended or failed; the others cannot go on without it."""


class RequestError(ModelServerError):
    """The engine can never run this request as asked."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # name of the request field at fault in the OpenAI API, or None


class QueueFullError(RequestError):
    """The waiting queue is at its cap; the same request may be taken later."""


class EngineClosedError(RequestError):
    """The engine is closed, or its step loop has died; it takes nothing more."""
