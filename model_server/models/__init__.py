"""Decoders made from a Hugging Face checkpoint's config.json."""

from model_server.models.decoder import Decoder
from model_server.models.layer import ProjectionPart, Weight
from model_server.shapes import ARCHITECTURES, DecoderShape, HfConfig, decoder_shape

__all__ = [
    "ARCHITECTURES",
    "Decoder",
    "DecoderShape",
    "HfConfig",
    "ProjectionPart",
    "Weight",
    "decoder_shape",
]
