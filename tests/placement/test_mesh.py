"""The grid of a trainer's ranks."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.placement.mesh import ONE_RANK, Coordinates, Mesh

SIZES = st.integers(1, 4)
MESHES = st.builds(Mesh, SIZES, SIZES, SIZES, SIZES)


@given(MESHES)
def test_each_rank_has_a_place_of_its_own_and_each_place_a_rank(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert len(set(places)) == mesh.world_size
    assert [mesh.rank_of(place) for place in places] == list(range(mesh.world_size))
    assert places == sorted(places), "the last axis comes first"


@given(MESHES)
def test_each_part_of_a_batch_is_computed_by_as_many_ranks(mesh):
    parts = [mesh.data_parallel_rank(rank) for rank in range(mesh.world_size)]
    each = mesh.context * mesh.tensor
    assert sorted(parts) == sorted(list(range(mesh.data_parallel_size)) * each)
    leaders = [mesh.data_parallel_rank(rank) for rank in mesh.data_parallel_leaders]
    assert leaders == list(range(mesh.data_parallel_size))
    for rank in mesh.data_parallel_leaders:
        assert mesh.coordinates(rank)[2:] == (0, 0)


@given(MESHES, st.sampled_from(Coordinates._fields))
def test_the_lines_of_an_axis_have_each_rank_once(mesh, axis):
    lines = mesh.lines(axis)
    assert sorted(rank for line in lines for rank in line) == list(range(mesh.world_size))
    for line in lines:
        places = [mesh.coordinates(rank) for rank in line]
        assert [getattr(place, axis) for place in places] == list(range(getattr(mesh, axis)))
        assert len({place._replace(**{axis: 0}) for place in places}) == 1


def test_a_worked_example():
    mesh = Mesh(replicate=2, shard=2, tensor=2)
    assert (mesh.world_size, mesh.data_parallel_size) == (8, 4)
    assert mesh.coordinates(5) == Coordinates(replicate=1, shard=0, tensor=1)
    assert mesh.data_parallel_rank(5) == 2
    assert mesh.data_parallel_leaders == (0, 2, 4, 6)
    assert mesh.lines("shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert (ONE_RANK.world_size, ONE_RANK.coordinates(0)) == (1, Coordinates())


def test_what_is_not_on_the_mesh_is_refused():
    with pytest.raises(ValueError, match="'tensor' of a mesh has 1 or more ranks, got 0"):
        Mesh(tensor=0)
    with pytest.raises(
        ValueError, match=r"6 ranks of a replica .* groups of 4 that divide experts"
    ):
        Mesh(replicate=2, shard=3, context=2, expert=4)
    with pytest.raises(ValueError, match="a mesh of 2 ranks has no rank 2"):
        Mesh(shard=2).coordinates(2)
    with pytest.raises(ValueError, match="'context' of the mesh has 1 ranks, and no 1"):
        Mesh(shard=2).rank_of(Coordinates(context=1))
