"""What devices say of themselves decides their kind; what a machine's environment allows decides
which of them a run uses.
"""

import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from agentrl.errors import ConfigError
from agentrl.placement import devices, probe
from agentrl.placement.config import PlacementConfig
from agentrl.placement.device_map import DeviceMap, PlacementRequest, device_maps
from agentrl.placement.devices import GIB, Gpu, kind_of, usable_cores, usable_memory
from agentrl.placement.probe import Machine, NodeReport, inventory_of, probe_machine, visible

A100_40 = Gpu("NVIDIA A100-SXM4-40GB", int(39.4 * GIB), (8, 0), "", 108, 1.41e9, 1215e6, 5120)
H100 = Gpu("NVIDIA H100 80GB HBM3", int(79.1 * GIB), (9, 0), "", 132, 1.98e9, 2619e6, 5120)
LAPTOP = Gpu("NVIDIA GeForce RTX 4090 Laptop GPU", 16 * GIB, (8, 9), "", 76, 2.04e9, 9001e6, 256)
GB300 = Gpu("NVIDIA GB300", 277 * GIB, (10, 3), "", 152, 1.92e9, 3996e6, 8192)
PART = Gpu(
    "NVIDIA A100-SXM4-40GB MIG 3g.20gb", int(19.5 * GIB), (8, 0), "", 42, 1.41e9, 1215e6, 5120
)
T4 = Gpu("Tesla T4", int(14.6 * GIB), (7, 5), "", 40, 1.59e9, 5001e6, 256)


@pytest.mark.parametrize(
    ("gpu", "kind", "flops", "bandwidth"),
    [
        # Products of the table, by NVIDIA's data sheets.
        (A100_40, "A100-40GB", 312e12, 1555e9),
        (Gpu("NVIDIA A100-SXM4-80GB", int(79.2 * GIB)), "A100", 312e12, 2039e9),
        (Gpu("NVIDIA A100-PCIE-40GB", int(39.4 * GIB)), "A100-PCIE-40GB", 312e12, 1555e9),
        (Gpu("NVIDIA A100 80GB PCIe", int(79.2 * GIB)), "A100-PCIE", 312e12, 1935e9),
        (H100, "H100", 989e12, 3350e9),
        (Gpu("NVIDIA H100 NVL", int(93.1 * GIB)), "H100-NVL", 835e12, 3900e9),
        (Gpu("NVIDIA H200", int(139.8 * GIB)), "H200", 989e12, 4800e9),
        (Gpu("NVIDIA H20", int(95.1 * GIB), (9, 0), "", 78, 1.98e9), "H20", 148e12, 4000e9),
        (Gpu("NVIDIA B200", int(178.3 * GIB)), "B200", 2250e12, 7700e9),
        (Gpu("NVIDIA L40S", int(44.4 * GIB)), "L40S", 362e12, 864e9),
        (Gpu("NVIDIA L40", int(44.4 * GIB)), "L40", 181e12, 864e9),
        (Gpu("NVIDIA L4", 22 * GIB), "L4", 121e12, 300e9),
        (Gpu("NVIDIA A10G", int(22.1 * GIB)), "A10G", 70e12, 600e9),
        (Gpu("NVIDIA A10", int(22.1 * GIB)), "A10", 125e12, 600e9),
        (Gpu("NVIDIA GeForce RTX 4090", int(23.6 * GIB)), "RTX-4090", 165.2e12, 1008e9),
        # Not in the table, or less than its namesake: by units, clocks and bus.
        (LAPTOP, "RTX-4090", 79.4e12, 576e9),
        (GB300, "NVIDIA GB300", 2391e12, 8184e9),
        (T4, "Tesla T4", 65e12, 320e9),
        # A part of a GPU has its share.
        (PART, PART.name, 121e12, 770e9),
        # What says nothing of itself is taken for the slowest.
        (Gpu("Accelerator", 96 * GIB), "Accelerator", 121e12, 300e9),
    ],
)
def test_a_kind_is_what_the_device_says(
    gpu: Gpu, kind: str, flops: float, bandwidth: float
) -> None:
    found = kind_of(gpu)
    assert found.name == kind
    assert found.memory == gpu.memory
    assert found.flops == pytest.approx(flops, rel=0.01)
    assert found.bandwidth == pytest.approx(bandwidth, rel=0.01)


TORCH = """
import os
class cuda:
    @staticmethod
    def _names():
        names = os.environ.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")
        return names[:1] if names[0].startswith("MIG") else names  # CUDA sees one part at a time
    device_count = staticmethod(lambda: len(cuda._names()))
    @staticmethod
    def get_device_properties(number):
        class Says:
            name = "NVIDIA A100-SXM4-40GB"
            total_memory, major, minor, multi_processor_count = 42_298_834_944, 8, 0, 108
            uuid = "of-" + cuda._names()[number]
        if cuda._names()[number].startswith("MIG"):
            Says.name += " MIG 3g.20gb"
        return Says
"""
"""A torch of a machine with GPUs whose UUIDs tell by which names they are visible."""


@pytest.fixture
def gpus_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    (tmp_path / "torch.py").write_text(TORCH)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(probe, "_DRIVERS", (str(tmp_path),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return monkeypatch


def test_devices_are_those_of_the_inherited_list(gpus_here: pytest.MonkeyPatch) -> None:
    gpus_here.setenv("CUDA_VISIBLE_DEVICES", "4,5, 6,7")
    inventory = visible()
    assert inventory.nodes[0].devices == ("4", "5", "6", "7")
    assert inventory.kind.name == "A100-40GB"
    assert inventory.kind.memory == 42_298_834_944
    assert inventory.nodes[0].host_memory == usable_memory()
    assert inventory.nodes[0].cores == usable_cores()


def test_parts_of_gpus_keep_their_names_and_are_asked_one_at_a_time(
    gpus_here: pytest.MonkeyPatch,
) -> None:
    gpus_here.setenv("CUDA_VISIBLE_DEVICES", "MIG-aa,MIG-bb")
    machine = probe_machine(os.environ)
    assert machine.device_names == ("MIG-aa", "MIG-bb")
    assert [gpu.uuid for gpu in machine.gpus] == ["MIG-of-MIG-aa", "MIG-of-MIG-bb"]


def test_without_an_inherited_list_devices_have_their_uuids(gpus_here: pytest.MonkeyPatch) -> None:
    assert probe_machine(os.environ).device_names == ("GPU-of-0", "GPU-of-1")


def test_the_asking_process_does_not_load_torch(gpus_here: pytest.MonkeyPatch) -> None:
    gpus_here.setitem(sys.modules, "torch", None)  # to import it is an error now
    assert len(visible()) == 2


def test_a_torch_that_cannot_ask_is_named(gpus_here: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13 is missing')")
    with pytest.raises(ConfigError, match=r"cannot ask the GPUs of .*libcudart\.so\.13 is missing"):
        visible()


def machine(name: str, count: int, gpu: Gpu = H100, first: int = 0, cores: int = 64) -> Machine:
    names = tuple(str(number) for number in range(first, first + count))
    return Machine(name, (gpu,) * count, names, cores, 1024 * GIB)


def cluster(*machines: Machine) -> list[NodeReport]:
    return [
        NodeReport(f"id-{one.name}", f"10.0.0.{number}", len(one.gpus), one)
        for number, one in enumerate(machines)
    ]


UNEVEN = inventory_of(cluster(machine("a", 8), machine("b", 4, first=4)))


def test_nodes_of_different_sizes_are_used_as_they_are() -> None:
    assert UNEVEN.sizes == (8, 4)
    assert UNEVEN.visible_name(8) == "4"
    assert UNEVEN.host_share(0) == 128 * GIB
    assert UNEVEN.host_share(8) == 256 * GIB
    request = PlacementRequest(splits=(1, 2, 4, 8))
    maps = device_maps(PlacementConfig(name="colocated"), request, UNEVEN)
    assert {found.tensor_parallel() for found in maps} == {1, 2, 4}
    largest = next(found for found in maps if found.tensor_parallel() == 4)
    assert [(engine.node, engine.devices) for engine in largest.of("engine")] == [
        (0, (0, 1, 2, 3)),
        (0, (4, 5, 6, 7)),
        (1, (8, 9, 10, 11)),
    ]
    assert len(largest.of("trainer")) == 12


def test_a_layout_that_does_not_fit_nodes_of_different_sizes_is_refused_by_name() -> None:
    request = PlacementRequest(tensor_parallel=8)
    said = r"node 0 \(a at 10.0.0.0\) has devices 0-7, node 1 \(b at 10.0.0.1\) has devices 8-11"
    with pytest.raises(ConfigError, match=said):
        device_maps(PlacementConfig(name="colocated"), request, UNEVEN)
    lists = PlacementConfig.model_validate({"engine": "4-11", "trainer": "0-3"})
    with pytest.raises(ConfigError, match=said):
        device_maps(lists, request, UNEVEN)
    fitting = PlacementConfig.model_validate({"engine": "0-7", "trainer": "8-11"})
    (found,) = device_maps(fitting, request, UNEVEN)
    assert isinstance(found, DeviceMap)


def test_a_cluster_counts_only_what_its_nodes_have() -> None:
    few = replace(cluster(machine("a", 8))[0], counted=4)
    assert inventory_of([few]).nodes[0].devices == ("0", "1", "2", "3")
    blind = replace(cluster(machine("a", 2, first=6))[0], counted=8)
    said = r"8 GPUs on a at 10.0.0.0, and a process there sees 2 \(CUDA_VISIBLE_DEVICES=6,7\)"
    with pytest.raises(ConfigError, match=said):
        inventory_of([blind])


def test_kinds_that_differ_are_refused_with_the_nodes() -> None:
    said = r"a at 10.0.0.0 has 8 x NVIDIA H100 80GB HBM3; b at 10.0.0.1 has 4 x NVIDIA A100"
    with pytest.raises(ConfigError, match=said):
        inventory_of(cluster(machine("a", 8), machine("b", 4, A100_40)))


def test_rates_of_the_config_replace_those_of_the_table() -> None:
    stated = PlacementConfig.model_validate({"device": {"flops": 2e15, "network": 1e9}})
    kind = UNEVEN.with_rates(stated.device.stated).kind
    assert (kind.flops, kind.network, kind.bandwidth) == (2e15, 1e9, UNEVEN.kind.bandwidth)


def test_cores_and_memory_are_those_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores, memory = usable_cores(), usable_memory()
    monkeypatch.setattr(devices, "_GROUPS", tmp_path)
    (tmp_path / "cpu.max").write_text("100000 100000\n")
    (tmp_path / "memory.max").write_text(f"{GIB}\n")
    assert (usable_cores(), usable_memory()) == (1, GIB)
    (tmp_path / "cpu.max").write_text("max 100000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert usable_cores() >= cores
    assert usable_memory() >= memory


def fake(environ: Mapping[str, str]) -> tuple[Gpu, ...]:
    return (H100,) * len(environ["CUDA_VISIBLE_DEVICES"].split(","))


def test_a_machine_can_be_asked_by_a_fake() -> None:
    found = probe_machine({"CUDA_VISIBLE_DEVICES": "4,5", "OMP_NUM_THREADS": "7"}, fake)
    assert found.device_names == ("4", "5")
    assert found.threads == "7"
    assert found.gpus == (H100, H100)
