"""Does a run fit? `envace compile CONFIG --topology v5p:2x4x4` finds out on a machine without a TPU.

1. The programs of the run (`programs`) are compiled for the topology by the real TPU compiler, from abstract arrays.
2. What the compiler says of their memory, and what stays resident beside each, is held against the chip's memory.
3. When that does not fit, other meshes, micro-batches and larger slices are guessed at (`costs`), and the likeliest are
   compiled until one does.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from envace_jax.config import Config
from envace_jax.grpo.logps import CHUNK
from envace_jax.train.state import data_shards
from launch.costs import (
    EFFICIENCY,
    cache_bytes,
    decode_seconds,
    guess_peak,
    kept_bytes,
    parameter_count,
    step_flops,
    step_seconds,
)
from launch.hlo import Collective, collectives
from launch.programs import copied_rows, lower, make_plan, mesh_sizes, read_model, sampling_plan
from launch.topology import Topology, larger, parse_topology
from models.qwen3 import Qwen3Config

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
# `Used 34.20G of 15.75G hbm`; `the total memory required for HLO temporaries (18.68G) exceeds available HBM (15.75G)`
_REFUSALS = (
    r"Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm",
    r"memory required for [^(]*\(([\d.]+)([KMGT]?)\) exceeds available HBM",
)
_UNREADABLE = "install the libtpu that this jax was made with: pip install 'jax[tpu]'"
_PROPOSALS = 3  # compiled at most


@dataclasses.dataclass(frozen=True)
class Program:
    """One compiled program on each chip, in bytes."""

    name: str
    arguments: int
    outputs: int  # but for those that take the place of donated arguments
    temporaries: int
    code: int
    resident: int  # what lies beside it: optimizer state during rollout, the reference policy, rows taken out
    collectives: dict[str, Collective] | None  # None: the compiled program could not be read
    refused: str | None = None  # the compiler's word when it does not fit; the sizes are then its total alone

    @property
    def peak(self) -> int:
        return self.arguments + self.outputs + self.temporaries + self.code + self.resident


@dataclasses.dataclass(frozen=True)
class Report:
    """What `envace compile` finds."""

    model: str
    topology: Topology
    mesh: tuple[int, int, int]
    micro_batch: int
    remat: str
    parameters_bytes: int
    optimizer_bytes: int
    activations_bytes: int  # by formula: what is kept of the layers for the backward pass; part of the temporaries
    programs: tuple[Program, ...]
    flops: float
    seconds: float
    decode_seconds: float
    proposal: Report | None = None

    @property
    def peak_bytes(self) -> int:
        return max(program.peak for program in self.programs)

    @property
    def fits(self) -> bool:
        fitting = all(program.refused is None for program in self.programs)
        return fitting and self.peak_bytes <= self.topology.chip.hbm_bytes

    def program(self, name: str) -> Program:
        return next(program for program in self.programs if program.name == name)

    @property
    def overrides(self) -> list[str]:
        """The settings that say what this report has compiled."""
        data, fsdp, tp = self.mesh
        return [
            f"mesh.data={data}",
            f"mesh.fsdp={fsdp}",
            f"mesh.tp={tp}",
            f"train.micro_batch={self.micro_batch}",
            f"train.remat={self.remat}",
        ]

    def to_dict(self) -> dict[str, Any]:
        """As `--json` prints it; bytes and collectives are those of one chip, operations those of all."""
        train = self.program("train")
        return {
            "model": self.model,
            "topology": self.topology.name,
            "product": self.topology.product,
            "chips": self.topology.chips,
            "mesh": dict(zip(("data", "fsdp", "tp"), self.mesh, strict=True)),
            "micro_batch": self.micro_batch,
            "remat": self.remat,
            "fits": self.fits,
            "peak_bytes": self.peak_bytes,
            "hbm_bytes": self.topology.chip.hbm_bytes,
            "parameters_bytes": self.parameters_bytes,
            "optimizer_bytes": self.optimizer_bytes,
            "activations_bytes": self.activations_bytes,
            "temporary_bytes": train.temporaries,
            "collectives": _as_dicts(train.collectives),
            "flops": self.flops,
            "seconds_estimate": self.seconds,
            "decode_seconds_estimate": self.decode_seconds,
            "programs": {
                program.name: {
                    "peak_bytes": program.peak,
                    "argument_bytes": program.arguments,
                    "temporary_bytes": program.temporaries,
                    "resident_bytes": program.resident,
                    "collectives": _as_dicts(program.collectives),
                    "refused": program.refused,
                }
                for program in self.programs
            },
            "proposal": None
            if self.proposal is None
            else {
                "topology": self.proposal.topology.name,
                "overrides": self.proposal.overrides,
                "peak_bytes": self.proposal.peak_bytes,
            },
        }


def run(config: Config, topology: str, *, as_json: bool = False, proposal: bool = True) -> int:
    """Compiles, prints, and returns the exit status: 0 when it fits, 1 when not.

    Raises:
        ConfigError: a model, mesh or topology that does not exist.
    """
    # One line of text or JSON is wanted, not the compiler's own account of a machine that has no TPU.
    logging.getLogger("jax").setLevel(logging.ERROR)
    # What is compiled for chips that are not here can be stored, but not read back without them.
    jax.config.update("jax_enable_compilation_cache", False)
    report = measure(config, parse_topology(topology))
    if proposal and not report.fits:
        report = dataclasses.replace(report, proposal=propose(config, report))
    print(json.dumps(report.to_dict()) if as_json else describe(report))
    return 0 if report.fits else 1


def measure(config: Config, topology: Topology) -> Report:
    """Compiles the programs of `config` for `topology`."""
    plan = make_plan(config, topology)
    parameters, optimizer = bytes_on_chip(plan.params), bytes_on_chip(plan.state.opt_state)
    reference = parameters if plan.reference else 0
    local = sampling_plan(plan)
    beside = optimizer + reference + (parameters if local is not plan else 0)  # several hosts sample from copies
    # A batch of few rows is decoded in a copy of their part of the cache.
    copied = copied_rows(local) * cache_bytes(config, plan.model) // mesh_sizes(config.mesh, topology)[2]
    resident = {"train": reference, "reference": parameters + optimizer, "prefill": beside, "decode": beside + copied}
    shapes, model = plan.shapes, plan.model
    # Micro-batches, and in each the pieces of a row that are scored: all, if all tokens are trained. Decoding: a token.
    loops = (shapes.micro_batches, -(-shapes.row_length // CHUNK))
    trips = {"train": loops, "reference": loops, "prefill": (), "decode": ()}
    programs = [_compile(name, make, resident[name], trips[name]) for name, make in lower(plan)]
    rows = shapes.rows * shapes.micro_batches
    useful, executed = step_flops(config, model, rows, shapes.row_length)
    by_name = {program.name: program for program in programs}
    sizes = mesh_sizes(config.mesh, topology)
    slots, shards = local.shapes.slots, data_shards(local.mesh)
    held = slots if slots % shards else slots // shards
    return Report(
        model=config.model,
        topology=topology,
        mesh=sizes,
        micro_batch=config.train.micro_batch,
        remat=config.train.remat_policy,
        parameters_bytes=parameters,
        optimizer_bytes=optimizer,
        activations_bytes=kept_bytes(config, model, sizes[2]),
        programs=tuple(programs),
        flops=useful,
        seconds=step_seconds(executed, _moved(by_name["train"]), topology),
        decode_seconds=decode_seconds(
            2 * parameter_count(model) / sizes[2],
            cache_bytes(config, model) * held / sizes[2],
            _moved(by_name["decode"]),
            topology,
        ),
    )


def propose(config: Config, report: Report) -> Report | None:
    """A setting or a larger slice that does fit, compiled; None when the likeliest ones do not either."""
    tried = 0
    for candidate, topology in candidates(config, report):
        found = measure(candidate, topology)
        if found.fits:
            return found
        tried += 1
        if tried == _PROPOSALS:
            break
    return None


def candidates(config: Config, report: Report) -> Iterator[tuple[Config, Topology]]:
    """Settings that should fit by estimate, the nearest to what was asked first: the same slice, then larger ones."""
    model = read_model(config.model)
    episodes = config.rollout.tasks_per_step * config.rollout.group_size
    asked = (report.topology.chips, *report.mesh, config.train.micro_batch)
    for topology in (report.topology, *larger(report.topology)):
        found = []
        for data, fsdp, tp in candidate_meshes(topology, model):
            for micro_batch in {min(config.train.micro_batch, 2**i) for i in range(4)}:
                # More rows than episodes would be padding alone.
                if (topology.chips, data, fsdp, tp, micro_batch) == asked or data * fsdp * micro_batch > episodes:
                    continue
                train = dataclasses.replace(config.train, micro_batch=micro_batch, remat="layer")
                mesh = dataclasses.replace(config.mesh, data=data, fsdp=fsdp, tp=tp)
                changed = dataclasses.replace(config, train=train, mesh=mesh)
                peak = guess_peak(changed, model, data, fsdp, tp, topology.hosts).peak
                if peak < 0.8 * topology.chip.hbm_bytes:
                    found.append(((tp, data, -micro_batch), changed))
        for _, changed in sorted(found, key=lambda pair: pair[0]):
            yield changed, topology


def candidate_meshes(topology: Topology, model: Qwen3Config) -> Iterator[tuple[int, int, int]]:
    """Sizes (data, fsdp, tp), powers of two that divide the model's heads and hidden dimension, tp within a host."""
    chips = topology.chips
    common = math.gcd(model.num_attention_heads, model.num_key_value_heads, model.intermediate_size, model.vocab_size)
    for tp in (1, 2, 4, 8):
        for data in (1, 2, 4):
            fsdp = chips // (tp * data)
            fine = common % tp == topology.host.chips % tp == 0 and fsdp and model.hidden_size % fsdp == 0
            fine = fine and fsdp * tp * data == chips
            if fine:
                yield data, fsdp, tp


def bytes_on_chip(tree: Any) -> int:
    """Bytes of abstract arrays on one chip."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize
        for leaf in jax.tree.leaves(tree)
    )


def needed_bytes(message: str) -> int | None:
    """What a program would take, or its temporaries alone where they are too much already, from the compiler's refusal;
    None for other errors."""
    for pattern in _REFUSALS:
        if match := re.search(pattern, message):
            return int(float(match[1]) * _UNITS[match[2]])
    return None


def describe(report: Report) -> str:
    """The report as text."""
    chip, topology = report.topology.chip, report.topology
    data, fsdp, tp = report.mesh
    train = report.program("train")
    lines = [
        f"{report.model} on {topology.name} ({topology.product}, {topology.chips} chips), mesh data={data} fsdp={fsdp} "
        f"tp={tp}, micro_batch={report.micro_batch}, remat {report.remat}",
        "",
        "on each chip:",
        f"  parameters          {_gb(report.parameters_bytes)}",
        f"  optimizer           {_gb(report.optimizer_bytes)}",
        f"  activations         {_gb(report.activations_bytes)}   kept for the backward pass, by formula",
        f"  temporaries         {_gb(train.temporaries)}   of the training step, activations included",
    ]
    for program in report.programs:
        note = f"   refused: {program.refused}" if program.refused else ""
        lines.append(f"  peak of {program.name:<11} {_gb(program.peak)}   of {_gb(chip.hbm_bytes).strip()}{note}")
    for program in report.programs:
        if program.collectives is None:
            lines.append(f"  {program.name}: collectives unknown; {_UNREADABLE}")
        for kind, value in (program.collectives or {}).items():
            lines.append(f"  {program.name}: {kind} x {value.count}, {_gb(value.bytes).strip()}")
    verdict = "fits" if report.fits else "does not fit"
    lines += [
        "",
        f"training step: {report.flops:.3g} FLOP by formula, about {report.seconds:.1f} s",
        f"decoding: about {1e3 * report.decode_seconds:.1f} ms for a token in every slot, caches full",
        f"  assumed: {EFFICIENCY:.0%} of {chip.flops / 1e12:.0f} TFLOP/s, recomputation included; collectives hidden",
        f"  behind arithmetic up to {chip.ici_bandwidth / 1e9:.0f} GB/s; decoding bound by reading weights and caches",
        f"  at {chip.hbm_bandwidth / 1e9:.0f} GB/s",
        "",
        f"{verdict}: {_gb(report.peak_bytes).strip()} of {_gb(chip.hbm_bytes).strip()}",
    ]
    if report.proposal is not None:
        found = report.proposal
        settings = f"--topology {found.topology.name} {' '.join(found.overrides)}"
        lines.append(f"this would ({_gb(found.peak_bytes).strip()}): {settings}")
    elif not report.fits:
        lines.append("no proposal fits, or none was asked for: lower rollout.max_length, or choose a larger chip")
    return "\n".join(lines)


def _compile(name: str, make: Any, resident: int, unknown_trips: Sequence[int]) -> Program:
    try:
        compiled = make().compile()
    except jax.errors.JaxRuntimeError as error:
        needed = needed_bytes(str(error))
        if needed is None:
            raise
        reason = next(line for line in str(error).splitlines() if needed_bytes(line) is not None).strip()
        return Program(name, 0, 0, needed, 0, resident, {}, refused=reason)
    memory = compiled.memory_analysis()
    return Program(
        name=name,
        arguments=memory.argument_size_in_bytes,
        outputs=memory.output_size_in_bytes - memory.alias_size_in_bytes,
        temporaries=memory.temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes,
        resident=resident,
        collectives=_read_collectives(compiled, unknown_trips),
    )


def _read_collectives(compiled: jax.stages.Compiled, unknown_trips: Sequence[int]) -> dict[str, Collective] | None:
    try:
        text = compiled.as_text()
    except jax.errors.JaxRuntimeError:  # jaxlib parses what libtpu writes, and knows the HLO of its own time only
        return None
    return collectives(text, unknown_trips)


def _as_dicts(found: dict[str, Collective] | None) -> dict[str, dict[str, int]] | None:
    return None if found is None else {kind: dataclasses.asdict(value) for kind, value in found.items()}


def _moved(program: Program) -> int:
    return sum(value.bytes for value in (program.collectives or {}).values())


def _gb(size: float) -> str:
    return f"{size / 1e9:8.2f} GB"
