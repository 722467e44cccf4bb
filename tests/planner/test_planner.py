"""The plan before a run: it fits, says why, refuses what cannot be, says what would, and agrees
with measured runs.
"""

import io
import json
import shutil
from collections.abc import Callable
from dataclasses import astuple, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agentrl.config import RunConfig, load_config
from agentrl.errors import ConfigError
from agentrl.models.facts import PUBLISHED, KvShape, ModelFacts, model_facts
from agentrl.models.layer_facts import Heads, Kept
from agentrl.placement.device_map import device_maps
from agentrl.placement.devices import GIB, GPUS, gpu_named, host
from agentrl.placement.inventory import Inventory
from agentrl.planner.check import check_placement
from agentrl.planner.measured import read_measurements, with_measured
from agentrl.planner.memory import fit_of, loads
from agentrl.planner.plan import Plan
from agentrl.planner.report import as_json, print_plan
from agentrl.planner.run_facts import model_of, placement_request_of, stages_of
from agentrl.planner.search import make_plan
from agentrl.simulate.stages import workload
from tests.properties import examples
from tests.tiers import only

EXAMPLES = Path(__file__).parents[2] / "examples"
H100 = gpu_named("H100")
LONG = pytest.mark.long
OFFERED = [(1, 1), (2, 1), (4, 1), (8, 1), (8, 2), (8, 4), (8, 8)]
ON_ONE_DEVICE = ("placement=auto", "placement.engine=0-3", "placement.trainer=3")
# Quick to simulate; memory is what it was.
SMALL = (
    "rollout.groups_per_step=8",
    "rollout.group_size=4",
)


@pytest.fixture(autouse=True)
def in_the_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(EXAMPLES.parent)


@cache
def config(name: str, *overrides: str) -> RunConfig:
    return load_config(EXAMPLES / f"{name}.yaml", overrides).config


def planned(inventory: Inventory, name: str, *overrides: str) -> Plan:
    chosen = config(name, *overrides)
    return make_plan(chosen, inventory, model_of(chosen))


def refused(inventory: Inventory, name: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        planned(inventory, name, *overrides)
    return str(caught.value)


SHIPPED = {
    "colocated_8gpu": (Inventory.uniform(H100, 8), "colocated"),
    "disaggregated_16gpu": (Inventory.uniform(H100, 8, 2), "disaggregated"),
    "qwen3_8b": (Inventory.uniform(H100, 8), "colocated"),
    "qwen3_32b": (Inventory.uniform(H100, 8, 2), "colocated"),
    "qwen3_30b_a3b": (Inventory.uniform(H100, 8), "colocated"),
    "frozen_lake": (Inventory.uniform(host(cores=2, memory=16 * GIB)), "local"),
}


@pytest.mark.parametrize("name", only(SHIPPED, "qwen3_8b", "disaggregated_16gpu", "frozen_lake"))
def test_shipped_configs_get_a_map_that_respects_memory(name: str) -> None:
    inventory, mode = SHIPPED[name]
    plan = planned(inventory, name, *SMALL)
    assert plan.devices.mode == mode
    assert plan.devices.time_shared == (mode == "colocated")
    assert {load.device for load in plan.loads} == {
        d for r in plan.devices.replicas for d in r.devices
    }
    for load in plan.loads:
        assert 0 < load.peak <= load.limit < inventory.kind.memory
        assert load.host <= load.host_limit
    step = plan.step
    assert step.seconds == pytest.approx(step.rollout + step.train + step.switch + step.weights)
    assert min(step.rollout, step.train) > 0
    assert (step.switch > 0) == plan.devices.time_shared
    assert step.staleness <= config(name).rollout.max_staleness


def test_new_weights_are_sent_by_an_awake_trainer_where_memory_holds_both_sides() -> None:
    """Of a mixture of 57 GiB in bfloat16 and a trainer with moments in float32, it does not unless
    an engine has four devices.
    """
    inventory, chosen = Inventory.uniform(H100, 8), config("qwen3_30b_a3b")
    stages, work = stages_of(chosen, model_of(chosen)), workload(chosen.rollout, chosen.simulation)
    fits: dict[int, bool] = {}
    for devices in device_maps(chosen.placement, placement_request_of(chosen), inventory):
        for load in loads(stages, work, devices):
            if not devices.time_shared:
                assert load.transfer is None
                assert load.transfer_fits
                continue
            assert load.transfer is not None
            engine, trainer = load.awake["engine"].parts, load.awake["trainer"].parts
            both = engine["weights"] + trainer["weights"] + trainer["optimizer"]
            assert (
                both + sum(load.asleep.values())
                < load.transfer
                < sum(size.total for size in load.awake.values())
            )
            assert load.transfer_fits == (load.transfer <= load.limit)
            assert load.peak >= load.transfer or not load.transfer_fits
            fits[devices.tensor_parallel()] = load.transfer_fits
    assert fits == {1: False, 2: False, 4: True, 8: True}


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_32b", "qwen3_30b_a3b"])
def test_configs_of_real_size_are_short_and_leave_the_layout_to_the_planner(name: str) -> None:
    assert len((EXAMPLES / f"{name}.yaml").read_text().splitlines()) <= 30
    inventory, _ = SHIPPED[name]
    plan = planned(inventory, name, *SMALL)
    assert len(plan.devices.of("trainer")) == len(inventory)
    assert len(plan.devices.of("engine")) * plan.devices.tensor_parallel() == len(inventory)


def test_every_example_of_real_size_is_checked_against_the_planner() -> None:
    assert {path.stem for path in EXAMPLES.glob("qwen3_*.yaml")} <= SHIPPED.keys()


def test_a_mixture_whose_moments_do_not_fit_is_refused_with_the_numbers() -> None:
    """With float32 moments, Qwen3-30B-A3B overfills the devices by what an earlier count left out:
    the buffer of sums, contexts, NCCL, graphs.
    """
    eight, whole = Inventory.uniform(H100, 8), "trainer.moments=float32"
    said = refused(eight, "qwen3_30b_a3b", whole)
    assert "asleep engine 2.8 and trainer 2.0), which has 79.1 (77.5 usable)" in said
    assert "Most of the trainer's memory: optimizer 28.4, weights 14.2, gradients 14.2" in said
    assert "trainer.moments=" in said
    nothing_else = tuple(f"placement.assume.{use}_gib=0" for use in ("cuda_context", "nccl"))
    assert planned(
        eight, "qwen3_30b_a3b", *SMALL, whole, *nothing_else, "placement.assume.cuda_graphs_gib=0"
    ).loads


def test_the_plan_names_each_term_of_memory() -> None:
    plan = planned(Inventory.uniform(H100, 8), "qwen3_8b", *SMALL)
    load = as_json(plan)["memory"][0]
    of_processes = {"cuda context", "nccl"}
    assert load["awake"]["engine"].keys() == of_processes | {
        "weights",
        "kv cache",
        "step activations",
        "weight staging",
        "cuda graphs",
    }
    assert load["awake"]["trainer"].keys() == of_processes | {
        "weights",
        "gradients",
        "optimizer",
        "gathered",
        "block gradients",
        "reduce-scatter",
        "activations",
        "fragmentation",
    }
    kept = {role: load["awake"][role] for role in ("engine", "trainer")}
    assert load["asleep"]["engine"] == sum(
        kept["engine"][use] for use in ("cuda context", "nccl", "cuda graphs")
    )
    assert load["peak"] == max(
        sum(kept["engine"].values()) + load["asleep"]["trainer"],
        sum(kept["trainer"].values()) + load["asleep"]["engine"],
    )
    # The trainer's host memory is kept while it is awake, too.
    state = kept["trainer"]["weights"] + kept["trainer"]["optimizer"]
    assert load["host_parts"]["sleeping trainer"] == state
    assert load["host"] == sum(load["host_parts"].values())
    # What sleeps is what both switches move, there and back.
    moved = state + kept["engine"]["weights"]
    assert plan.step.switch == pytest.approx(2 * moved / (64e9 * 0.7))
    console = Console(record=True, width=400, file=io.StringIO())
    print_plan(plan, console)
    table = console.export_text()
    for use in (*kept["engine"], *kept["trainer"], *load["host_parts"], "engine asleep"):
        assert f"{use} " in table


def test_what_devices_of_80_gb_cannot_hold_is_refused_in_plain_words() -> None:
    said = refused(Inventory.uniform(H100, 2), "qwen3_32b")
    assert "Qwen/Qwen3-32B (32.76 billion parameters) does not fit on 2 x H100" in said
    assert "What would fit:\n  2 nodes of 8 x H100" in said
    with pytest.raises(ConfigError, match="'Qwen/Qwen3-33B'"):
        planned(Inventory.uniform(H100, 8), "qwen3_32b", "model=Qwen/Qwen3-33B")


def test_an_engine_is_spread_only_over_as_many_devices_as_its_heads_allow() -> None:
    told = refused(Inventory.uniform(H100, 3), "qwen3_8b", *SMALL, "engine.tensor_parallel=3")
    assert "cannot be spread over 3 devices: it has 32 attention heads and 8 heads of keys" in told
    assert "engine.tensor_parallel=1" in told
    experts = ("trainer.world_size=2", "trainer.expert_parallel=2")
    told = refused(Inventory.uniform(H100, 2), "qwen3_8b", *SMALL, *experts)
    assert (
        "trainer.expert_parallel=2 divides the experts of a layer, and the model has none" in told
    )
    matrices = ("trainer.world_size=3", "trainer.tensor_parallel=3")
    told = refused(Inventory.uniform(H100, 3), "qwen3_8b", *SMALL, *matrices)
    assert "the model has 8 heads of keys and 151936 ids" in told
    chosen = config("qwen3_8b", *SMALL)
    shape = model_of(chosen)
    odd = replace(shape, kv=replace(shape.kv, heads=replace(shape.kv.heads, queries=28, keys=4)))
    made = make_plan(chosen, Inventory.uniform(H100, 8), odd)
    assert made.devices.tensor_parallel() in {1, 2, 4}
    over_eight = [found for found in made.considered if found.devices.tensor_parallel() == 8]
    assert over_eight
    assert all(found.problems for found in over_eight)


def test_only_adapters_pass_through_the_memory_of_the_first_rank_s_host() -> None:
    whole = planned(Inventory.uniform(H100, 8), "qwen3_8b", *SMALL)
    lora = planned(
        Inventory.uniform(H100, 8),
        "qwen3_8b",
        *SMALL,
        "trainer.lora={rank: 8, alpha: 16, targets: all-linear}",
    )
    weights = 4 * whole.facts.parameters
    assert whole.loads[0].host - whole.loads[1].host == weights
    assert 0 < lora.loads[0].host - lora.loads[1].host < 0.02 * weights


def test_a_context_beyond_the_positions_of_the_model_is_refused_unless_its_config_extends_them(
    tmp_path: Path,
) -> None:
    told = refused(Inventory.uniform(H100, 8), "qwen3_8b", *SMALL, "engine.max_context=131072")
    assert "engine.max_context=131072, but Qwen/Qwen3-8B knows 40960 positions" in told
    values = json.loads((PUBLISHED / "Qwen" / "Qwen3-8B" / "config.json").read_text())
    yarn = {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "rope_theta": 1e6,
    }
    (tmp_path / "config.json").write_text(json.dumps({**values, "rope_scaling": yarn}))
    assert model_facts(tmp_path).max_positions == 131072


def test_a_reference_and_a_critic_are_counted_where_the_trainer_is() -> None:
    inventory, both = Inventory.uniform(H100, 8), ("algorithm=ppo", "algorithm.kl=0.1")
    alone, helped = (planned(inventory, "colocated_8gpu", *SMALL, *more) for more in ((), both))
    ranks, parameters = len(helped.devices.of("trainer")), helped.facts.parameters
    for load in helped.loads:
        parts = load.awake["trainer"].parts
        assert parts["reference"] == pytest.approx(4 * parameters / ranks, rel=0.01)
        assert parts["critic"] == pytest.approx(16 * parameters / ranks, rel=0.01)
    assert "critic" not in alone.loads[0].awake["trainer"].parts
    assert 2 * alone.step.train < helped.step.train < 3 * alone.step.train
    assert helped.step.switch > alone.step.switch


@pytest.mark.parametrize(
    ("gpus", "more"),
    [
        (1, ["trainer.lora={rank: 8, alpha: 16, targets: all-linear}"]),
        (2, ["model=Qwen/Qwen3-4B", "env.agents.south=frozen", "engine.memory_fraction=0.4"]),
        (8, ["model=Qwen/Qwen3-30B-A3B", "trainer.moments=int8", "engine.data_parallel=8"]),
        (8, ["algorithm=ppo", "algorithm.kl=0.1"]),
    ],
    ids=["adapters", "frozen agent", "divided experts", "reference and critic"],
)
def test_switches_take_as_long_as_what_sleeps_is_moved(gpus: int, more: list[str]) -> None:
    plan = planned(Inventory.uniform(H100, gpus), "colocated_8gpu", *SMALL, *more)
    moved = max(
        sum(size for use, size in load.host_parts.items() if use.startswith("sleeping"))
        for load in plan.loads
    )
    assert plan.step is not None
    assert plan.step.switch == pytest.approx(2 * moved / (64e9 * 0.7))
    assert moved >= max(load.awake["engine"].parts["weights"] for load in plan.loads)


@pytest.mark.parametrize(
    ("over", "more"),
    [
        ((1, 8), ["engine.data_parallel=8"]),
        ((4, 2), ["engine.tensor_parallel=4", "engine.data_parallel=2"]),
        ((8, 1), ["engine.tensor_parallel=8"]),
        ((4, 1), ["engine.tensor_parallel=4", "engine.quantization=fp8"]),
    ],
    ids=["experts over 8", "experts over 2 x 4", "more devices than heads of keys", "fp8"],
)
def test_a_token_takes_the_time_in_which_a_device_reads_its_part_of_weights_and_cache(
    over: tuple[int, int], more: list[str]
) -> None:
    chosen = config("qwen3_30b_a3b", "engine.dtype=bfloat16", *more)
    inventory, facts, assume = Inventory.uniform(H100, 8), model_of(chosen), chosen.placement.assume
    devices = make_plan(chosen, inventory, facts).devices
    work, stages = workload(chosen.rollout, chosen.simulation), stages_of(chosen, facts)
    made = stages.simulated_engine(work, devices, chosen.simulation.engine)
    (split, copies), fp8 = over, "engine.quantization=fp8" in more
    # Each request of a batch chooses 8 of 128 experts; the 512 episodes fill one at most.
    each_copy = 512 / (len(devices.of("engine")) * copies)
    requests = min(each_copy, stages.engine.max_batch) * copies
    experts = facts.expert_parameters * (1 - (1 - 8 / 128) ** requests) / copies
    blocks = facts.blocks - facts.expert_parameters + experts
    read = ((1 if fp8 else 2) * blocks + 2 * (facts.parameters - facts.blocks)) / split
    rate = H100.bandwidth * assume.engine_bandwidth
    fixed = made.seconds_per_token * (1 - made.slowdown)
    sums = 2 * 48 * (split > 1)
    waits = assume.engine_step_seconds + sums * assume.all_reduce_seconds
    assert fixed == pytest.approx(read / rate + waits, rel=1e-6)
    # Half of an episode's tokens, of at least one of 4 heads of keys of 128 numbers.
    cache = 2 * 48 * 2 * 128 * max(1, 4 // split) * (round(work.episode_tokens) // 2)
    computed = 2 * (facts.active + facts.embedding) / (split * H100.flops * assume.engine_flops)
    sent = sums * 2 * 2 * 2048 * (split - 1) / split / (H100.link * assume.links)
    each = made.seconds_per_token * made.slowdown * copies
    assert each == pytest.approx(cache / rate + computed + sent, rel=1e-6)


@pytest.mark.parametrize("another", ["env.agents.south=frozen", "recipe=distill"])
def test_an_engine_of_a_frozen_agent_or_a_teacher_is_counted_beside_that_of_the_policy(
    another: str,
) -> None:
    inventory, fraction = Inventory.uniform(H100, 8), "engine.memory_fraction=0.4"
    alone = planned(inventory, "colocated_8gpu", *SMALL, fraction)
    both = planned(inventory, "colocated_8gpu", *SMALL, fraction, another)
    assert both.loads[0].awake["engine"].total == 2 * alone.loads[0].awake["engine"].total
    assert "engine 1" in refused(inventory, "colocated_8gpu", "engine.memory_fraction=0.7", another)


def test_the_command_prints_the_plan_and_gives_it_as_json(agentrl: Callable[..., Any]) -> None:
    done = agentrl("plan", "examples/colocated_8gpu.yaml", *SMALL, "--gpus", "8", "--json")
    assert done.returncode == 0, done.stderr
    plan = json.loads(done.stdout)
    assert plan["mode"] == "colocated"
    assert {d for replica in plan["replicas"] for d in replica["devices"]} == set(range(8))
    assert all(load["peak"] <= load["limit"] for load in plan["memory"])
    said = agentrl(
        "plan", "examples/frozen_lake.yaml", "rollout.groups_per_step=1", "--gpus", "0"
    ).stdout
    for part in ("map: local", "memory of each device", "predicted step", "why"):
        assert part in said


def test_a_wish_that_cannot_fit_is_refused_with_what_would(agentrl: Callable[..., Any]) -> None:
    large = "engine.kv_cache_gib=100"
    done = agentrl("plan", "examples/colocated_8gpu.yaml", large, "--gpus", "1", "--device", "A100")
    assert done.returncode == 2
    assert "GiB on device 0" in done.stderr
    assert "which has 79.2 (77.6 usable)" in done.stderr
    way = done.stderr.split("What would fit:\n")[1].splitlines()[0].split()
    assert (
        planned(
            Inventory.uniform(gpu_named("A100")), "colocated_8gpu", *SMALL, large, *way
        ).devices.mode
        == "local"
    )


@pytest.mark.parametrize(
    ("name", "inventory", "overrides"),
    [
        ("disaggregated_16gpu", Inventory.uniform(H100, 2), ("placement=auto",)),
        pytest.param(
            "disaggregated_16gpu",
            Inventory.uniform(H100, 8),
            ("placement=auto", "trainer=local"),
            marks=LONG,
        ),
        pytest.param("disaggregated_16gpu", Inventory.uniform(H100, 8), ON_ONE_DEVICE, marks=LONG),
        ("colocated_8gpu", Inventory.uniform(H100, 8), ("engine.kv_cache_gib=0.1",)),
        ("frozen_lake", Inventory.uniform(host(cores=2, memory=GIB // 4)), ()),
        pytest.param("qwen3_32b", Inventory.uniform(H100, 8), (), marks=LONG),
    ],
)
def test_what_is_said_to_fit_does(
    name: str, inventory: Inventory, overrides: tuple[str, ...]
) -> None:
    said = refused(inventory, name, *overrides).split("What would fit:\n")[1].splitlines()
    ways = [way.split() for way in said if "=" in way]
    assert ways
    for way in ways:
        assert planned(inventory, name, *SMALL, *overrides, *way).loads
    offers = {
        str(offer): offer
        for kind in GPUS.values()
        for count in OFFERED
        if (offer := Inventory.uniform(kind, *count))
    }
    for offer in [offers[way.strip()] for way in said if "=" not in way]:
        assert planned(offer, name, *SMALL, *overrides).loads


def test_what_would_fit_names_each_kind_of_saving_once_and_more_devices() -> None:
    said = (
        refused(Inventory.uniform(H100, 8), "qwen3_30b_a3b", "trainer.moments=float32")
        .split("What would fit:\n  ")[1]
        .split("\n  ")
    )
    settings, devices = said[:-1], said[-1]
    assert {
        "trainer.activation_offload=true",
        "trainer.moments=bfloat16",
        "trainer.optimizer_offload=true",
    } <= set(settings)
    assert "trainer.moments=int8" not in settings
    assert sum("micro_batch_tokens" in way for way in settings) == 1
    assert devices == "2 nodes of 8 x H100 with 79.1 GiB each"
    wasteful = "trainer.activation_checkpointing=none", "trainer.micro_batch_tokens=65536"
    assert "trainer.activation_checkpointing=full" in refused(
        Inventory.uniform(H100, 4), "qwen3_8b", *wasteful
    )


def test_moments_of_fewer_bytes_are_counted() -> None:
    optimizer = [
        planned(Inventory.uniform(H100, 8), "qwen3_8b", *SMALL, f"trainer.moments={moments}")
        .loads[0]
        .awake["trainer"]
        for moments in ("float32", "bfloat16", "int8")
    ]
    whole, half, quarter = [size.parts["optimizer"] for size in optimizer]
    assert half == whole // 2
    assert quarter == pytest.approx(whole * (1 + 4 / 256) / 4)


def test_several_changes_that_fit_only_together_are_all_needed() -> None:
    tight = Inventory.uniform(replace(H100, memory=50 * GIB, host_memory=120 * GIB), 2)
    way = refused(tight, "qwen3_8b").split("What would fit:\n")[1].splitlines()[0].split()
    assert len(way) > 1
    assert planned(tight, "qwen3_8b", *SMALL, *way).loads
    for left_out in way:
        refused(tight, "qwen3_8b", *(one for one in way if one != left_out))


def test_a_folder_without_weights_is_planned_with_and_not_trained_on(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(PUBLISHED / "Qwen" / "Qwen3-1.7B", folder)
    assert planned(
        Inventory.uniform(H100, 8), "colocated_8gpu", *SMALL, f"model={folder}"
    ).facts.name == str(folder)
    overrides = f"model={folder}", f"run_dir={tmp_path / 'run'}", "env=frozen_lake"
    done = agentrl("train", "examples/colocated_8gpu.yaml", *overrides)
    assert done.returncode == 2
    assert str(folder) in done.stderr
    assert not (tmp_path / "run").exists()


def drawn(layers: int, hidden: int, vocab: int, experts: int) -> ModelFacts:
    """A decoder with MLPs of four times its hidden size: one in each layer, or several of which a
    token uses one.
    """
    attention, mlp = 4 * hidden**2, 8 * hidden**2
    block = attention + max(1, experts) * mlp
    heads = Heads(hidden // 64, max(1, hidden // 256), 64, 64)
    kept = Kept(
        24 * hidden, 2 * hidden, 12 * hidden, hidden, 10 * hidden, heads.queries, 9 * hidden
    )
    return ModelFacts(
        name="drawn",
        parameters=layers * block + vocab * hidden,
        blocks=layers * block,
        block=block,
        active=layers * (attention + mlp),
        layers=layers,
        hidden=hidden,
        vocab=vocab,
        max_positions=32768,
        attention=4 * layers * hidden,
        inner=4 * hidden,
        linear_ends={"linear": 20 * layers * hidden},
        kv=KvShape(layers, heads),
        kept=Kept(*(layers * number for number in astuple(kept))),
        largest=kept,
        experts=experts,
        chosen=min(experts, 1),
    )


shapes = st.builds(
    drawn,
    st.integers(4, 96),
    st.sampled_from([512, 1024, 4096, 8192]),
    st.sampled_from([32000, 152000]),
    st.sampled_from([0, 8]),
)


@examples(60)
@given(
    shapes,
    st.builds(
        Inventory.uniform,
        st.sampled_from(list(GPUS.values())),
        st.sampled_from([1, 2, 4, 8]),
        st.integers(1, 2),
    ),
    st.sampled_from(["auto", "colocated", "disaggregated"]),
    st.sampled_from(
        [
            ("colocated_8gpu", ""),
            ("disaggregated_16gpu", ""),
            ("colocated_8gpu", "trainer=deepspeed"),
        ]
    ),
)
def test_a_map_that_is_taken_never_overfills_a_device(
    facts: ModelFacts, inventory: Inventory, mode: str, of: tuple[str, str]
) -> None:
    chosen = (
        config(of[0], f"placement={mode}")
        if not of[1]
        else config("frozen_lake", f"placement={mode}", of[1])
    )
    stages, work = stages_of(chosen, facts), workload(chosen.rollout, chosen.simulation)
    try:
        found = device_maps(chosen.placement, placement_request_of(chosen), inventory)
    except ConfigError:
        return
    for devices in found:
        fit = fit_of(stages, work, devices)
        if fit.problems:
            continue
        for load in fit.loads:
            held = [sum(size.parts.values()) for size in load.awake.values()]
            # Counted again from the parts: in turns the larger one is awake, else both are.
            assert (max(held) if devices.time_shared else sum(held)) <= inventory.kind.memory
            roles = {replica.role for replica in devices.replicas if load.device in replica.devices}
            assert set(load.awake) == roles


@pytest.mark.long
def test_more_of_a_device_never_makes_a_step_slower() -> None:
    seconds = [
        planned(Inventory.uniform(H100, n), "colocated_8gpu", *SMALL, "placement=auto").step.seconds
        for n in (2, 8)
    ]
    assert seconds[1] < seconds[0]
    faster = replace(H100, flops=2 * H100.flops, bandwidth=2 * H100.bandwidth)
    assert planned(Inventory.uniform(faster, 8), "colocated_8gpu", *SMALL).step.seconds < seconds[1]


def test_auto_takes_the_fastest_of_the_maps_that_fit_and_says_so() -> None:
    plan = planned(
        Inventory.uniform(H100, 4),
        "colocated_8gpu",
        *SMALL,
        "placement=auto",
        "rollout.max_staleness=2",
    )
    simulated = [found.step.seconds for found in plan.considered if found.step]
    assert plan.step.seconds == min(simulated)
    assert len(simulated) > 1
    assert {found.devices.mode for found in plan.considered} == {"colocated", "disaggregated"}
    assert f"{plan.step.seconds:.1f} s a step" in plan.reason


def test_training_flop_are_six_for_each_weight_and_token() -> None:
    chosen = config("colocated_8gpu", "trainer.activation_checkpointing=none")
    facts = model_of(chosen)
    work = workload(chosen.rollout, chosen.simulation)
    # Attention to one token adds next to nothing.
    everything_sampled = replace(work, sampled=2.0, observed=0.0, lengths=())
    flop = stages_of(chosen, facts).train_flop(everything_sampled)
    tokens = everything_sampled.tokens
    once_more = 2 * facts.embedding * tokens  # the backward pass computes the logits again
    assert flop == pytest.approx(6 * facts.parameters * tokens + once_more, rel=0.01)
    twice = config("colocated_8gpu")  # recomputation is one more forward pass
    again = stages_of(twice, facts).train_flop(everything_sampled)
    assert again == pytest.approx(flop + 2 * facts.parameters * tokens, rel=0.01)


def test_ranks_wait_for_the_longest_episodes_of_a_step() -> None:
    drawn = config("colocated_8gpu")
    work = workload(drawn.rollout, drawn.simulation)
    assert len(work.lengths) == work.episodes
    assert 0 < min(work.lengths) < max(work.lengths) <= work.longest
    stages, even = stages_of(drawn, model_of(drawn)), replace(work, lengths=())
    long = replace(work, lengths=(100_000,) * 3 + (1000,) * 200)
    assert stages.waiting(long, 1) == 1
    assert 1.05 < stages.waiting(long, 2) < stages.waiting(long, 16)
    assert stages.waiting(even, 8) < 1.1
    assert stages.train_flop(long) > 1.1 * stages.train_flop(even), "attention to far tokens"
    alike = config("frozen_lake")
    assert workload(alike.rollout, alike.simulation).lengths == (), "nothing is drawn there"


@pytest.fixture
def run(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """A run that took 4 s to roll out, 9 to train, 0.02 to bring the weights over."""
    folder = tmp_path / "run"
    folder.mkdir()
    transport = f"weights.transport={getattr(request, 'param', 'auto')}"
    chosen = config("frozen_lake", "rollout.groups_per_step=8", f"run_dir={folder}", transport)
    (folder / "config.yaml").write_text(chosen.to_yaml())
    row = {
        "seconds/rollout": 4.0,
        "seconds/train": 9.0,
        "seconds/weights": 0.02,
        "turns": 5.0,
        "sampled_tokens": 64 * 10.0,
        "prompt_tokens": 64 * 150.0,
    }
    rows = [
        {"step": 0, **row, "seconds/rollout": 60.0},
        *({"step": step, **row} for step in (1, 2, 3)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.mark.parametrize("run", ["files", "handles", "stream"], indirect=True)
def test_a_plan_from_a_run_says_what_the_run_has_measured(run: Path) -> None:
    laptop = Inventory.uniform(host(cores=2, memory=16 * GIB))
    found = read_measurements(run)
    assert (found.steps, found.work.turns, found.work.sampled, found.work.observed) == (
        3,
        5.0,
        10.0,
        150.0,
    )
    same = with_measured(found.config, found, laptop)
    step = make_plan(same, laptop, model_of(same)).step
    assert step.train == pytest.approx(9.0, rel=0.02)
    assert step.weights == pytest.approx(0.02, rel=0.01)
    assert step.rollout == pytest.approx(4.0, rel=0.1)
    twice = with_measured(config("frozen_lake", "rollout.groups_per_step=16"), found, laptop)
    assert make_plan(twice, laptop, model_of(twice)).step.train == pytest.approx(18.0, rel=0.02)


def test_a_folder_that_has_measured_nothing_is_refused(tmp_path: Path, run: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run"):
        read_measurements(tmp_path / "nothing")
    (run / "metrics.jsonl").write_text('{"step": 0, "eval/success": 0.5}\n')
    with pytest.raises(ConfigError, match="no step in its metrics"):
        read_measurements(run)


def test_what_cannot_be_on_this_machine_is_refused_before_a_run_starts(
    agentrl: Callable[..., Any], tmp_path: Path
) -> None:
    done = agentrl(
        "train", "examples/frozen_lake.yaml", "placement=colocated", f"run_dir={tmp_path / 'run'}"
    )
    assert done.returncode == 2
    assert "puts everything on the first device: write placement=local" in done.stderr
    assert not (tmp_path / "run").exists()
    laptop = Inventory.uniform(host(cores=2, memory=64 * GIB))
    check_placement(config("frozen_lake"), laptop)
    check_placement(config("frozen_lake", "model=Qwen/Qwen3-1.7B"), laptop)
    # 16 + 4 bytes each.
    with pytest.raises(ConfigError, match=r"need 152\.6 GiB on CPU x2 with 64\.0 GiB and no GPU"):
        check_placement(config("frozen_lake", "model=Qwen/Qwen3-8B"), laptop)
