"""Decoders made from a Hugging Face checkpoint's config.json."""

from model_server.models.architectures import ARCHITECTURES, decoder_shape
from model_server.models.decoder import Decoder
from model_server.models.hf_config import HfConfig
from model_server.models.layer import ProjectionPart
from model_server.models.shape import DecoderShape

__all__ = ["ARCHITECTURES", "Decoder", "DecoderShape", "HfConfig", "ProjectionPart", "decoder_shape"]
