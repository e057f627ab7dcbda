"""Flags that say which pods and models there are."""

from __future__ import annotations

import argparse
from pathlib import Path

from router.flags.values import model_source, positive_duration, positive_number


def add_pods_flags(group: argparse._ArgumentGroup) -> None:
    """Adds the flags of this group."""
    group.add_argument(
        "--pods-file",
        type=Path,
        metavar="PATH",
        help="YAML with a list 'endpoints' of pods, each with name, address, port and maybe labels, as in "
        "docs/configuration.md; watched for changes",
    )
    group.add_argument(
        "--config-file",
        type=Path,
        metavar="PATH",
        help="EndpointPickerConfig: plugins, profiles, flow control, maybe the pods' file",
    )
    group.add_argument("--config-text", metavar="YAML", help="the same, as text")
    group.add_argument(
        "--resources-file",
        type=Path,
        metavar="PATH",
        help="YAML documents of the kinds InferenceObjective and InferenceModelRewrite",
    )
    group.add_argument(
        "--tokenizer",
        type=model_source,
        action="append",
        default=[],
        metavar="MODEL=SOURCE",
        help="a model's tokenizer: a directory with its tokenizer.json, hf:OWNER/NAME@REVISION, unix:PATH of "
        "a kvroute tokenizer, http://HOST:PORT of a server that renders, or pods: the model's own; may be "
        "repeated; kvroute-tiny's is built in",
    )
    group.add_argument(
        "--tokenize-deadline-ms",
        type=positive_number,
        default=50.0,
        metavar="N",
        help="a prompt not tokenized by then is picked by load alone (default: %(default)g)",
    )
    group.add_argument(
        "--refresh-metrics-interval",
        type=positive_duration,
        default="1s",
        metavar="DURATION",
        help="between two probes of a pod's health and metrics (default: %(default)s)",
    )
