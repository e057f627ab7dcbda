"""Kubernetes' notation for sizes and counts: "100", "1k" or "10Gi" in, a whole number out."""

from __future__ import annotations

import re

_FACTORS: dict[str, int] = {"": 1} | {
    f"{letter}{suffix}": base**power
    for suffix, base in (("", 1000), ("i", 1024))
    for power, letter in enumerate("kMGT", 1)
}
_FACTORS["Ki"] = _FACTORS.pop("ki")
_QUANTITY = re.compile(r"([0-9]{1,15})(k|Ki|Mi?|Gi?|Ti?)?")


def quantity(text: str) -> int:
    """Reads a quantity.

    Raises:
        ValueError: It is none, or 0.
    """
    found = _QUANTITY.fullmatch(text)
    if found is None or not int(found[1]):
        raise ValueError("must be a whole number above 0, such as 100, 1G or 1Gi")
    return int(found[1]) * _FACTORS[found[2] or ""]
