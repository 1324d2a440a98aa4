"""Collectives are counted from the text of a compiled program, loops multiplied out."""

import pytest

from launch.hlo import Collective, collectives, shape_bytes

# In the form of a compiled module for eight chips: a loop of known count around an all-gather, within a loop of
# unknown count; an asynchronous all-reduce and a reduce-scatter in the entry; one all-to-all inside a fusion.
MODULE = """
HloModule jit_step, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%layer (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %p = (s32[], bf16[64,8]{1,0}) parameter(0)
  %shard = bf16[64,8]{1,0:T(8,128)(2,1)} get-tuple-element(%p), index=1
  %whole = bf16[512,8]{1,0:T(8,128)(2,1)} all-gather(%shard), channel_id=1, replica_groups=[1,8]<=[8], dimensions={0}
  ROOT %out = (s32[], bf16[64,8]{1,0}) tuple(%whole, %shard)
}

%more (p: (s32[], bf16[64,8])) -> pred[] {
  %p = (s32[], bf16[64,8]{1,0}) parameter(0)
  ROOT %less = pred[] compare(%p, %p), direction=LT
}

%micro (p: (s32[], bf16[64,8])) -> (s32[], bf16[64,8]) {
  %p = (s32[], bf16[64,8]{1,0}) parameter(0)
  ROOT %layers = (s32[], bf16[64,8]{1,0}) while(%p), condition=%more, body=%layer, backend_config=TRIPS
}

%exchange (p: f32[16]) -> f32[16] {
  %p = f32[16]{0} parameter(0)
  ROOT %swap = f32[16]{0} all-to-all(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}

ENTRY %main.1 (p: (s32[], bf16[64,8]), x: f32[16]) -> f32[2] {
  %p = (s32[], bf16[64,8]{1,0}) parameter(0)
  %x = f32[16]{0} parameter(1)
  %loop = (s32[], bf16[64,8]{1,0}) while(%p), condition=%more, body=%micro
  %fused = f32[16]{0} fusion(%x), kind=kCustom, calls=%exchange
  %start = f32[16]{0} all-reduce-start(%fused), channel_id=3, replica_groups={{0,1},{2,3},{4,5},{6,7}}, to_apply=%add
  %done = f32[16]{0} all-reduce-done(%start)
  ROOT %part = f32[2]{0} reduce-scatter(%done), replica_groups=[1,8]<=[8], dimensions={0}, to_apply=%add
}
""".replace("TRIPS", '{"known_trip_count":{"n":"36"}}')


def test_a_loop_multiplies_by_its_trips():
    found = collectives(MODULE, unknown_trips=(2,))
    assert found["all-gather"] == Collective(count=2 * 36, bytes=2 * 36 * 512 * 8 * 2)


def test_loops_of_unknown_length_are_told_apart_by_how_deep_they_lie():
    found = collectives(MODULE.replace(', backend_config={"known_trip_count":{"n":"36"}}', ""), unknown_trips=(2, 5))
    assert found["all-gather"].count == 2 * 5


def test_a_loop_of_unknown_length_counts_once_by_default():
    assert collectives(MODULE)["all-gather"].count == 36


def test_a_loop_is_as_long_as_its_condition_says():
    """Without the compiler's note; the outer loop compares with something that is no constant."""
    module = MODULE.replace(', backend_config={"known_trip_count":{"n":"36"}}', "").replace(
        "condition=%more, body=%layer", "condition=%below, body=%layer"
    )
    condition = """
%below (p: (s32[], bf16[64,8])) -> pred[] {
  %limit = u32[]{:T(128)} constant(28)
  %p = (s32[], bf16[64,8]{1,0}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  ROOT %lt = pred[]{:T(512)} compare(%i, %limit), direction=LT, metadata={op_name="while/cond/lt"}
}
"""
    assert (
        collectives(module.replace("%exchange (", condition + "\n%exchange (", 1), (2,))["all-gather"].count == 2 * 28
    )


def test_both_branches_are_counted():
    swap = "%fused = f32[16]{0} fusion(%x), kind=kCustom, calls=%exchange"
    for named in ("true_computation=%exchange, false_computation=%other", "branch_computations={%exchange, %other}"):
        branches = f"%fused = f32[16]{{0}} conditional(%is, %x, %x), {named}"
        assert swap in MODULE
        assert collectives(MODULE.replace(swap, branches))["all-to-all"].count == 1


def test_an_asynchronous_pair_counts_once():
    assert collectives(MODULE)["all-reduce"] == Collective(count=1, bytes=16 * 4)


def test_a_reduce_scatter_counts_what_goes_in():
    assert collectives(MODULE)["reduce-scatter"] == Collective(count=1, bytes=16 * 4)


def test_fusions_are_looked_into():
    assert collectives(MODULE)["all-to-all"] == Collective(count=1, bytes=16 * 4)


def test_what_stands_there_in_parts_counts_once():
    """As the TPU compiler writes a gather that goes on during products: each part is a whole one by its shape."""
    line = next(line for line in MODULE.splitlines() if "all-gather(" in line)
    part = line + ', backend_config={"async_collective_fusion_config":{"flag_start":"2"}}'
    other = part.replace("%whole", "%more_of_it").replace("channel_id=1", "channel_id=7")
    parts = "\n".join([part, part.replace("%whole", "%rest"), other])
    assert collectives(MODULE.replace(line, parts))["all-gather"].count == 2 * 36


@pytest.mark.parametrize("groups", ["[1,8]<=[8]", "{{0,1,2,3,4,5,6,7}}", "mesh['a'=4,'b'=2] {'a','b'}"])
def test_a_group_is_read_however_it_is_written(groups):
    line = next(line for line in MODULE.splitlines() if "reduce-scatter(" in line)
    module = MODULE.replace(line, line.replace("[1,8]<=[8]", groups))
    assert collectives(module)["reduce-scatter"] == Collective(count=1, bytes=16 * 4)


def test_nothing_else_is_counted():
    assert set(collectives(MODULE)) == {"all-gather", "all-reduce", "all-to-all", "reduce-scatter"}
    assert collectives("HloModule empty") == {}


def test_bytes_of_shapes():
    assert shape_bytes("bf16[8,128]{1,0:T(8,128)(2,1)}") == 2048
    assert shape_bytes("(f32[4]{0}, f32[32]{0}, u32[])") == 128  # an asynchronous start: operand, result, context
    assert shape_bytes("pred[]") == 1
