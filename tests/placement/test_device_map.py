"""Placement: lists of devices are read exactly, every map is sound, and what is impossible is
refused.
"""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.placement.config import PlacementConfig, format_devices, parse_devices
from agentrl.placement.device_map import DeviceMap, PlacementRequest, device_maps
from agentrl.placement.devices import gpu_named, host
from agentrl.placement.inventory import Inventory

H100 = gpu_named("h100")
BASE = "env: frozen_lake\n"


@given(st.sets(st.integers(0, 200), min_size=1))
def test_a_list_of_devices_reads_back_to_itself(devices: set[int]) -> None:
    written = format_devices(sorted(devices))
    assert parse_devices(written) == tuple(sorted(devices))
    assert parse_devices(f" {written.replace(',', ' , ')} ") == tuple(sorted(devices))
    assert len(written.split(",")) <= len(devices)


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        ("0-5", (0, 1, 2, 3, 4, 5)),
        ("6,7", (6, 7)),
        ("0-3,6", (0, 1, 2, 3, 6)),
        (3, (3,)),
        ([6, 7], (6, 7)),
        ("9", (9,)),
    ],
)
def test_numbers_ranges_and_lists_are_lists_of_devices(
    written: object, devices: tuple[int, ...]
) -> None:
    assert parse_devices(written) == devices


@pytest.mark.parametrize(
    ("written", "said"),
    [
        ("3-0", "write 0-3"),
        ("0-2,1", "device 1 twice"),
        ("", "no list of devices"),
        ("-1", "no list"),
        ("a", "0-3,6"),
    ],
)
def test_what_is_no_list_of_devices_is_refused(written: str, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        parse_devices(written)


def config(tmp_path: Path, text: str, *overrides: str) -> PlacementConfig:
    path = tmp_path / "run.yaml"
    path.write_text(BASE + text)
    loaded = load_config(path, overrides).config
    path.write_text(loaded.to_yaml())
    assert load_config(path).config == loaded
    return loaded.placement


def test_a_placement_is_a_mode_or_lists_and_auto_when_nothing_is_said(tmp_path: Path) -> None:
    assert config(tmp_path, "").name == "auto"
    assert config(tmp_path, "placement: colocated\n").name == "colocated"
    listed = config(tmp_path, "placement:\n  engine: 0-5\n  trainer: 6,7\n")
    assert listed.lists == {"engine": (0, 1, 2, 3, 4, 5), "trainer": (6, 7)}
    assert config(tmp_path, "", "placement.engine=0", "placement.trainer=1,2").lists["trainer"] == (
        1,
        2,
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("placement: {engine: 0-5, trainer: 6,7}\n", "quote it"),
        ("placement: {name: local, engine: '0', trainer: '1'}\n", "a mode or lists, not both"),
        ("placement: colocate\n", "placement.name: .*'colocated'"),
        ("placement: {engine: 5-1, trainer: 0}\n", r"placement.engine: .*write 1-5.*run.yaml:2"),
        ("placement: {critic: 0}\n", "placement.critic: no such setting"),
    ],
)
def test_a_wrong_placement_says_the_way_out(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        config(tmp_path, text)


def only(placement: PlacementConfig, asked: PlacementRequest, inventory: Inventory) -> DeviceMap:
    found = device_maps(placement, asked, inventory)
    assert len(found) == 1
    return found[0]


def listed(engine: str, trainer: str) -> PlacementConfig:
    return PlacementConfig.model_validate({"engine": engine, "trainer": trainer})


def test_devices_are_numbered_through_over_nodes_and_lists_make_replicas() -> None:
    two_nodes = Inventory.uniform(H100, per_node=8, nodes=2)
    found = only(listed("0-7", "8-15"), PlacementRequest(tensor_parallel=4), two_nodes)
    assert [(r.devices, r.node) for r in found.of("engine")] == [
        ((0, 1, 2, 3), 0),
        ((4, 5, 6, 7), 0),
    ]
    assert [(r.devices, r.node) for r in found.of("trainer")] == [((d,), 1) for d in range(8, 16)]
    assert found.settings() == {
        "cluster.engines": 2,
        "engine.tensor_parallel": 4,
        "trainer.world_size": 8,
    }
    assert {(b.role, b.replica, b.gpus, b.node) for b in found.bundles()} == {
        ("engine", 0, 4, 0),
        ("engine", 1, 4, 0),
        *(("trainer", n, 1, 1) for n in range(8)),
    }


@pytest.mark.parametrize(
    ("placement", "asked", "said"),
    [
        (
            listed("6-9", "0"),
            PlacementRequest(tensor_parallel=4),
            "engine 0 would run on the devices 6-9 of 2 nodes",
        ),
        (
            listed("0-2", "8"),
            PlacementRequest(tensor_parallel=2),
            "3 devices make no whole replicas of 2",
        ),
        (listed("0-3", "16"), PlacementRequest(), "device 16, and there are 16"),
        (listed("0-3", "8-11"), PlacementRequest(engines=2), "4 replicas, but cluster.engines=2"),
        (listed("0-3", "8-11"), PlacementRequest(ranks=8), "4 replicas, but trainer.world_size=8"),
        (
            listed("0-3", "8-9"),
            PlacementRequest(trainer_grows=False),
            "lists 2 devices, and this trainer has one",
        ),
        (
            PlacementConfig.model_validate({"engine": "0-3"}),
            PlacementRequest(),
            "no devices of the trainer",
        ),
        (listed("0", "1"), PlacementRequest(has_engine=False), "this engine runs elsewhere"),
        (PlacementConfig(name="local"), PlacementRequest(ranks=4), "write placement=auto"),
        (
            PlacementConfig(name="disaggregated"),
            PlacementRequest(ranks=16),
            "no way to lay out .*world_size=16",
        ),
    ],
)
def test_a_map_that_cannot_be_is_refused_with_the_way_out(
    placement: PlacementConfig, asked: PlacementRequest, said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        device_maps(placement, asked, Inventory.uniform(H100, per_node=8, nodes=2))


def test_without_a_gpu_everything_is_where_it_was() -> None:
    laptop = Inventory.uniform(host(cores=2, memory=8 << 30))
    found = only(PlacementConfig(), PlacementRequest(engines=2, ranks=2), laptop)
    assert found.mode == "local"
    assert not found.time_shared
    assert [r.devices for r in found.replicas] == [(0,)] * 4
    assert found.bundles() == []
    with pytest.raises(ConfigError, match="there are none: write placement=local"):
        device_maps(PlacementConfig(name="colocated"), PlacementRequest(), laptop)


inventories = st.builds(
    Inventory.uniform, st.just(H100), st.sampled_from([1, 2, 4, 8]), st.integers(1, 4)
)
asked = st.builds(
    PlacementRequest,
    engines=st.sampled_from([1, 2, 3]),
    tensor_parallel=st.sampled_from([1, 2, 4]),
    ranks=st.sampled_from([1, 2, 5]),
    has_engine=st.booleans(),
    trainer_grows=st.booleans(),
    splits=st.sampled_from([(1,), (1, 2, 4, 8)]),
)


@given(st.sampled_from(["auto", "colocated", "disaggregated", "local"]), asked, inventories)
def test_every_map_is_sound(name: str, asked: PlacementRequest, inventory: Inventory) -> None:
    try:
        found = device_maps(PlacementConfig.model_validate({"name": name}), asked, inventory)
    except ConfigError:
        return
    assert found
    for devices in found:
        for role in ("engine", "trainer"):
            used = [device for replica in devices.of(role) for device in replica.devices]
            assert devices.mode == "local" or len(used) == len(set(used))
            assert all(0 <= device < len(inventory) for device in used)
        assert all({inventory.node(d) for d in r.devices} == {r.node} for r in devices.replicas)
        assert devices.of("trainer")
        assert bool(devices.of("engine")) == asked.has_engine
        if devices.mode == "disaggregated" and asked.has_engine:
            assert not devices.shared
        if asked.tensor_parallel > 1 and devices.of("engine"):
            assert devices.tensor_parallel() == asked.tensor_parallel
        used = {device for replica in devices.replicas for device in replica.devices}
        # No more than there is.
        assert sum(bundle.gpus for bundle in devices.bundles()) == pytest.approx(len(used))
