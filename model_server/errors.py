"""Exceptions of the model server. Each message states the fault, its place and the fix."""


class ModelServerError(Exception):
    """Base class of the package's exceptions."""


class ConfigError(ModelServerError):
    """A setting is out of range or contradicts another."""


class CapacityError(ModelServerError):
    """A model, context or batch does not fit into the planned memory."""


class ModelError(ModelServerError):
    """A checkpoint is missing, has an unsupported architecture, or has unexpected tensors."""


class AdapterError(ModelServerError):
    """A LoRA adapter does not fit the model, is unsupported or unknown, or exceeds the limit of adapters."""


class StartError(ModelServerError):
    """The server cannot start: an address is in use or a file cannot be read."""


class WorkerError(ModelServerError):
    """A tensor-parallel rank or its device has failed; the engine cannot continue."""


class RequestError(ModelServerError):
    """The engine can never run this request."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param  # invalid field of the OpenAI API request, or None


class QueueFullError(RequestError):
    """The waiting queue is full; the request may succeed later."""


class EngineClosedError(RequestError):
    """The engine is closed or its loop has died; it accepts no requests."""
