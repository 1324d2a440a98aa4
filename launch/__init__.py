"""TPU pods: product names and topologies, and whether a run fits on them, found out on a machine without one."""

from launch.topology import CHIPS, Chip, Topology, TopologyError, parse_topology

__all__ = ["CHIPS", "Chip", "Topology", "TopologyError", "parse_topology"]
