"""GPUs by their data sheets: memory, its bandwidth, arithmetic, and the link to the host.

Peaks, from the vendors' data sheets as of 2026-11: dense 16-bit tensor operations, one direction of the link,
and decimal gigabytes. A board may hold a few per cent more memory than its name says; none holds less.
"""

from dataclasses import dataclass, replace

_GB = 10**9
_TERA = 1e12
_PCIE_4, _PCIE_5 = 32, 64


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU."""

    name: str  # as people call it
    memory_bytes: int  # of its own memory
    memory_bytes_per_s: float  # speed of that memory
    flops_per_s: float  # dense 16-bit multiplications and additions, each counted
    link_bytes_per_s: float  # speed to or from host memory

    def at(self, efficiency: float) -> "Gpu":
        """Return the same GPU reaching only this share of its peaks."""
        return replace(
            self,
            memory_bytes_per_s=self.memory_bytes_per_s * efficiency,
            flops_per_s=self.flops_per_s * efficiency,
            link_bytes_per_s=self.link_bytes_per_s * efficiency,
        )


def _gpu(name: str, gb: int, gb_per_s: int, tflops: float, link_gb_per_s: int) -> Gpu:
    return Gpu(name, gb * _GB, float(gb_per_s * _GB), tflops * _TERA, float(link_gb_per_s * _GB))


GPUS: dict[str, Gpu] = {
    "a10": _gpu("A10", 24, 600, 125, _PCIE_4),
    "a100": _gpu("A100 80GB SXM", 80, 2039, 312, _PCIE_4),
    "a100-40gb": _gpu("A100 40GB SXM", 40, 1555, 312, _PCIE_4),
    "b200": _gpu("B200", 180, 8000, 2250, _PCIE_5),
    "h100": _gpu("H100 SXM", 80, 3350, 989, _PCIE_5),
    "h100-pcie": _gpu("H100 PCIe", 80, 2000, 756, _PCIE_5),
    "h200": _gpu("H200 SXM", 141, 4800, 989, _PCIE_5),
    "l4": _gpu("L4", 24, 300, 121, _PCIE_4),
    "l40s": _gpu("L40S", 48, 864, 362, _PCIE_4),
    "mi300x": _gpu("MI300X", 192, 5300, 1307, _PCIE_5),
    "rtx4090": _gpu("RTX 4090", 24, 1008, 165, _PCIE_4),
}

# Where flags give the rest: the link of a current host.
CUSTOM = _gpu("custom", 0, 0, 0, _PCIE_5)
