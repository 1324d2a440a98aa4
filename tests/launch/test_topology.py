"""Slices by name: product names, gcloud's names and topologies mean the same chips."""

import pytest

from launch import CHIPS, TopologyError, parse_topology
from launch.topology import larger


# From cloud.google.com/tpu/docs: v5p counts TensorCores, two a chip; v5e and v6e count chips.
@pytest.mark.parametrize(
    ("name", "topology", "chips"),
    [
        ("v5p-8", "v5p:2x2x1", 4),
        ("v5p-16", "v5p:2x2x2", 8),
        ("v5p-32", "v5p:2x2x4", 16),
        ("v5p-64", "v5p:2x4x4", 32),
        ("v5p-128", "v5p:4x4x4", 64),
        ("v5p-256", "v5p:4x4x8", 128),
        ("v5p-512", "v5p:4x8x8", 256),
        ("v5e-1", "v5e:1x1", 1),
        ("v5e-4", "v5e:2x2", 4),
        ("v5e-8", "v5e:2x4", 8),
        ("v5e-16", "v5e:4x4", 16),
        ("v5litepod-16", "v5e:4x4", 16),
        ("v5litepod-64", "v5e:8x8", 64),
        ("v5litepod-256", "v5e:16x16", 256),
        ("v6e-8", "v6e:2x4", 8),
        ("v6e-32", "v6e:4x8", 32),
        ("v6e-256", "v6e:16x16", 256),
    ],
)
def test_a_product_name_is_a_topology(name, topology, chips):
    found = parse_topology(name)
    assert (found.name, found.chips) == (topology, chips)


@pytest.mark.parametrize(
    ("topology", "product", "gcloud"),
    [
        ("v5p:2x4x4", "v5p-64", "v5p-64"),
        ("v5p:4x4x4", "v5p-128", "v5p-128"),
        ("v5e:4x4", "v5e-16", "v5litepod-16"),
        ("v6e:8x8", "v6e-64", "v6e-64"),
    ],
)
def test_a_topology_has_a_product_name_and_one_for_gcloud(topology, product, gcloud):
    found = parse_topology(topology)
    assert (found.product, found.gcloud) == (product, gcloud)


# cloud.google.com/tpu/docs: slices of one host have up to four chips (v5p) or eight; larger ones four a host.
@pytest.mark.parametrize(
    ("name", "host", "hosts"),
    [("v5p-8", 4, 1), ("v5p-64", 4, 8), ("v5e-8", 8, 1), ("v5e-16", 4, 4), ("v6e-1", 1, 1), ("v6e-32", 4, 8)],
)
def test_hosts_of_a_slice(name, host, hosts):
    found = parse_topology(name)
    assert (found.host.chips, found.hosts) == (host, hosts)


def test_any_shape_is_a_topology():
    assert parse_topology("v5p:4x4x12").chips == 192


def test_chips_have_the_memory_that_is_advertised():
    assert {name: chip.hbm_bytes for name, chip in CHIPS.items()} == {"v5e": 16e9, "v5p": 95e9, "v6e": 32e9}


@pytest.mark.parametrize(
    ("name", "word"),
    [
        ("v9-8", "v5e, v5p, v6e"),
        ("v5p", "v5p:2x4x4"),
        ("v5p-63", "v5p-64"),
        ("v5e-5", "v5e-4"),
        ("v5p:4x4", "3 axes"),
        ("v5e:2x2x2", "2 axes"),
        ("v5e:0x4", "at least 1"),
    ],
)
def test_a_wrong_name_is_refused_with_names_that_exist(name, word):
    with pytest.raises(TopologyError, match=word):
        parse_topology(name)


def test_larger_slices_are_of_the_same_chip_and_grow():
    assert [slice_.product for slice_ in larger(parse_topology("v6e-32"))] == ["v6e-64", "v6e-128", "v6e-256"]
