"""TPU chips and slices by name.

A slice is named in two ways. A *topology* counts chips along the axes of the interconnect: `v5p:2x4x4`, `v5e:4x4`.
A *product name* counts chips (v5e, v6e) or TensorCores, two to a chip (v5p): `v5p-64` is 32 chips, `v5p:2x4x4`. gcloud
calls v5e slices `v5litepod-16`. Sources: cloud.google.com/tpu/docs/v5e, /v5p, /v6e.
"""

from __future__ import annotations

import dataclasses
import math
import re

from envace_jax.errors import ConfigError


class TopologyError(ConfigError):
    """A topology or product name that does not exist."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """What one chip has. Sources: the product pages above."""

    name: str
    hbm_bytes: int  # decimal GB, as advertised: what the compiler allows programs lies above it by its own reserve
    flops: float  # peak, bfloat16, FLOP/s
    hbm_bandwidth: float  # bytes/s
    ici_bandwidth: float  # bytes/s over all links of the chip, one direction
    axes: int  # of the interconnect


CHIPS = {
    "v5e": Chip("v5e", 16 * 10**9, 197e12, 819e9, 200e9, 2),
    "v5p": Chip("v5p", 95 * 10**9, 459e12, 2765e9, 600e9, 3),
    "v6e": Chip("v6e", 32 * 10**9, 918e12, 1640e9, 448e9, 2),
}

_FAMILIES = {"v5e": "v5e", "v5litepod": "v5e", "v5lite": "v5e", "v5p": "v5p", "v6e": "v6e"}

# Chips -> shape, of the slices that are sold.
_FLAT = {1: (1, 1), 4: (2, 2), 8: (2, 4), 16: (4, 4), 32: (4, 8), 64: (8, 8), 128: (8, 16), 256: (16, 16)}
_CUBES = {
    4: (2, 2, 1),
    8: (2, 2, 2),
    16: (2, 2, 4),
    32: (2, 4, 4),
    64: (4, 4, 4),
    128: (4, 4, 8),
    256: (4, 8, 8),
    512: (8, 8, 8),
    1024: (8, 8, 16),
    2048: (8, 16, 16),
    4096: (16, 16, 16),
    6144: (16, 16, 24),
}
SLICES = {"v5e": _FLAT, "v5p": _CUBES, "v6e": _FLAT}


@dataclasses.dataclass(frozen=True)
class Topology:
    """A slice: its chip and how many of them lie along each axis of the interconnect."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def chips(self) -> int:
        return math.prod(self.shape)

    @property
    def host(self) -> Topology:
        """The chips of one host: all of a slice of up to four (v5p) or eight chips (v5e, v6e), else four."""
        if self.chips <= (4 if self.chip.name == "v5p" else 8):
            return self
        return Topology(self.chip, (2, 2, 1)[: self.chip.axes])

    @property
    def hosts(self) -> int:
        return -(-self.chips // self.host.chips)

    @property
    def name(self) -> str:
        """As libtpu spells it: `v5p:2x4x4`."""
        return f"{self.chip.name}:{'x'.join(map(str, self.shape))}"

    @property
    def product(self) -> str:
        """As it is sold: `v5p-64`, `v5e-16`."""
        return f"{self.chip.name}-{self.chips * (2 if self.chip.name == 'v5p' else 1)}"

    @property
    def gcloud(self) -> str:
        """The accelerator type that gcloud wants: `v5p-64`, `v5litepod-16`."""
        return self.product.replace("v5e", "v5litepod")


def parse_topology(name: str) -> Topology:
    """A topology (`v5p:2x4x4`), product name (`v5p-64`) or gcloud's name (`v5litepod-16`).

    Raises:
        TopologyError: names the families, or the sizes of the family, that exist.
    """
    match = re.fullmatch(r"([a-z0-9]+?)(?::(\d+(?:x\d+)*)|-(\d+))", name.strip().lower())
    family = _FAMILIES.get(match[1]) if match else None
    if family is None:
        raise TopologyError(
            f"topology {name!r} is not known: give {', '.join(CHIPS)} with a shape, such as v5e:4x4 or v5p:2x4x4, "
            "or a product name, such as v5p-64 or v5litepod-16"
        )
    chip, slices = CHIPS[family], SLICES[family]
    if match[3]:
        per_chip = 2 if family == "v5p" else 1
        by_product = {chips * per_chip: shape for chips, shape in slices.items()}
        if int(match[3]) not in by_product:
            sizes = ", ".join(f"{family}-{n}" for n in by_product)
            raise TopologyError(f"topology {name!r}: no such slice is sold; there are {sizes}")
        return Topology(chip, by_product[int(match[3])])
    shape = tuple(int(n) for n in match[2].split("x"))
    if len(shape) != chip.axes or min(shape) < 1:
        example = Topology(chip, slices[16]).name
        raise TopologyError(f"topology {name!r}: {family} has {chip.axes} axes of at least 1, for example {example}")
    return Topology(chip, shape)


def larger(topology: Topology) -> list[Topology]:
    """The slices of the same chip that have more chips, the smallest first."""
    slices = SLICES[topology.chip.name]
    return [Topology(topology.chip, shape) for chips, shape in slices.items() if chips > topology.chips]
