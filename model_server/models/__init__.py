"""Decoders made from a Hugging Face checkpoint's config.json."""

from model_server.models.decoder import Decoder
from model_server.models.layer import ProjectionPart, Weight

__all__ = ["Decoder", "ProjectionPart", "Weight"]
