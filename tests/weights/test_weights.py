"""Published weights: what is read is what was written, faults leave one version everywhere, and
nothing is left.
"""

import asyncio
import json
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache, partial
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import AutoModelForCausalLM

from agentrl.engines.local import LocalEngine
from agentrl.engines.router import Router
from agentrl.errors import EngineDeadError, EngineError, WeightsError, WorkerDiedError
from agentrl.flow import Flow, run_to_completion
from agentrl.protocols import Engine, GenerateRequest, Trainer
from agentrl.settings.sampling import SamplingParams
from agentrl.testing.engines import ScriptedEngine
from agentrl.testing.trainers import LOSS, random_batches
from agentrl.trainers.local import LocalTrainer
from agentrl.weights import plan
from agentrl.weights import store as store_module
from agentrl.weights.bundle import BundlePlace, Update, WeightBundle, weight_shapes
from agentrl.weights.config import WeightsConfig
from agentrl.weights.low_rank import Factors, LowRank
from agentrl.weights.publisher import Published, WeightPublisher, checksum
from agentrl.weights.store import WeightStore
from agentrl.weights.transports import live
from agentrl.weights.transports.files import WriteBuckets, bundle_of
from tests.processes import PATIENCE_SECONDS, hit, still_alive
from tests.properties import examples

Weights = Mapping[str, Tensor]
DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.bool, torch.float64]


@pytest.fixture
def shared_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder of this test's own in shared memory, where everything is published; empty at its
    end.
    """
    with tempfile.TemporaryDirectory(
        dir="/dev/shm" if Path("/dev/shm").is_dir() else None
    ) as folder:
        monkeypatch.setattr(store_module, "SHARED_MEMORY", Path(folder))
        monkeypatch.setattr(store_module, "default_parent", lambda: Path(folder))
        yield Path(folder)
        assert list(Path(folder).iterdir()) == []


@pytest.fixture(scope="module")
def lively_dir(shallow_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The shallow model with larger weights, so that other weights give other logprobs."""
    folder = tmp_path_factory.mktemp("models") / "lively"
    model = AutoModelForCausalLM.from_pretrained(shallow_model_dir)
    with torch.no_grad():
        for p in model.parameters():
            if p.dim() == 2:
                p.mul_(6.0)
    model.save_pretrained(folder)
    return folder


def tensors(shapes: Sequence[tuple[tuple[int, ...], torch.dtype]]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        f"layer.{i}.weight": torch.randn(shape, generator=generator).mul(100).to(dtype)
        for i, (shape, dtype) in enumerate(shapes)
    }


@examples(30)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 7), max_size=3).map(tuple), st.sampled_from(DTYPES)),
        max_size=12,
    ),
    st.integers(1, 2000),
)
def test_what_is_read_is_what_was_written(
    shapes: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    written = tensors(shapes)
    with tempfile.TemporaryDirectory() as folder:
        bundle = BundlePlace(Path(folder) / "v7", 7, bucket_bytes).write(written)
        sizes = [
            sum(written[name].nbytes for name in bucket.names) for bucket in bundle.manifest.buckets
        ]
        assert all(size >= bucket_bytes for size in sizes[:-1])
        for read in (WeightBundle.open(Path(folder) / "v7"), pickle.loads(pickle.dumps(bundle))):
            assert read == bundle
            assert list(read) == list(written)
            assert read.manifest.version == 7
            for name, tensor in written.items():
                assert read[name].dtype == tensor.dtype
                assert torch.equal(read[name], tensor)


def test_tensors_lie_in_the_files_and_stay_when_those_are_removed(tmp_path: Path) -> None:
    place = BundlePlace(tmp_path / "v1", 1, 1000)
    written = tensors([((400,), torch.float32)] * 3)
    with suppress(KeyError), place:
        assert len(pickle.dumps(place.write(written))) < 1500
        read = dict(WeightBundle.open(tmp_path / "v1"))
        assert all(
            mapped_file(tensor.data_ptr()).startswith(str(tmp_path)) for tensor in read.values()
        )
        raise KeyError
    assert not list(tmp_path.iterdir())
    assert all(torch.equal(tensor, written[name]) for name, tensor in read.items())
    with pytest.raises(WeightsError, match="no published weights"):
        WeightBundle.open(tmp_path / "v1")


def mapped_file(address: int) -> str:
    """The file that lies at an address of this process."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, stop = (int(bound, 16) for bound in line.split()[0].split("-"))
        if start <= address < stop:
            return line.split(maxsplit=5)[-1]
    raise AssertionError("nothing is mapped there")


@examples(40)
@given(st.data())
def test_any_byte_that_is_not_as_it_was_written_is_found(data: st.DataObject) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bundle = BundlePlace(Path(folder) / "v1", 1, 300).write(
            tensors([((40,), torch.float32)] * 4)
        )
        path = data.draw(st.sampled_from(sorted(bundle.folder.iterdir())))
        content = bytearray(path.read_bytes())
        at = data.draw(st.integers(0, len(content) - 1))
        damage = data.draw(st.sampled_from(["flip", "cut", "gone"]))
        if damage == "flip":
            content[at] ^= 1 << data.draw(st.integers(0, 7))
            path.write_bytes(content)
        elif damage == "cut":
            path.write_bytes(content[:at])
        else:
            path.unlink()
        with pytest.raises(WeightsError):
            WeightBundle.open(bundle.folder)


def test_a_low_rank_update_is_published_as_its_factors_and_read_merged(
    tiny_model_dir: Path, tmp_path: Path
) -> None:
    base = weight_shapes(tiny_model_dir)
    generator = torch.Generator().manual_seed(0)
    factors = {
        name: Factors(
            torch.randn(2, shape[1], generator=generator),
            torch.randn(shape[0], 2, generator=generator),
            0.3,
        )
        for name, shape in base.items()
        if "proj" in name
    }
    merged = LowRank(tiny_model_dir, factors)
    BundlePlace(tmp_path / "v1", 1, 10_000).write(merged)
    read = WeightBundle.open(tmp_path / "v1")
    assert read.manifest.size < sum(weight.nbytes for weight in merged.values()) / 10
    assert read.shapes() == base
    assert checksum(read) == checksum(merged)
    assert checksum(read) != checksum(LowRank(tiny_model_dir, {}))
    with pytest.raises(WeightsError, match=r"an update of .*gone, which cannot be read"):
        WeightBundle(
            tmp_path / "v1",
            read.manifest.model_copy(update={"update": Update(base=tmp_path / "gone", scales={})}),
        ).shapes()


@pytest.mark.parametrize("bucket_bytes", [1, 10_000_000])
def test_tied_weights_are_published_under_each_of_their_names(
    tmp_path: Path, bucket_bytes: int
) -> None:
    tied = torch.randn(3, 5)
    BundlePlace(tmp_path / "v1", 1, bucket_bytes).write(
        {"embed": tied, "x": torch.ones(2, 5).T, "head": tied}
    )
    read = WeightBundle.open(tmp_path / "v1")
    assert torch.equal(read["embed"], tied)
    assert torch.equal(read["head"], tied)
    assert torch.equal(read["x"], torch.ones(5, 2))


OWNER = """
import sys
from pathlib import Path
from agentrl.cluster.processes import start_local
from agentrl.weights.store import WeightStore

stores = [WeightStore.open(Path(parent)) for parent in sys.argv[1:]]
for store in stores:
    folder = store.place(1).folder
    folder.mkdir()
    (folder / "manifest.json").write_text("{}")
print(*(store._reaper.pid for store in stores), flush=True)
sys.stdin.read()
"""


def test_a_killed_owner_leaves_nothing(tmp_path: Path) -> None:
    """Its reaper sees to that at once; where it was killed too, the next store does, which touches
    no living one's.
    """
    places = [tmp_path / "reaped", tmp_path / "swept"]
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, *places],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        assert owner.stdout is not None
        reapers = [psutil.Process(int(pid)) for pid in owner.stdout.readline().split()]
        neighbours = [WeightStore.open(place) for place in places]
        assert [len(list(place.glob("*/v1-0/manifest.json"))) for place in places] == [1, 1]
        reapers[1].kill()
        owner.kill()
        owner.wait()
        assert still_alive(reapers, 10) == []
    assert [len(list(place.iterdir())) for place in places] == [1, 2]
    for place, neighbour in zip(places, neighbours, strict=True):
        WeightStore.open(place).close()
        assert list(place.iterdir()) == [neighbour.folder]
        neighbour.close()
        assert list(place.iterdir()) == []


@lru_cache
def plain_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


class Truth:
    """Plain forward passes of any weights of one model."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._model = plain_model(folder)
        self.versions: dict[int, Weights] = {
            0: {name: p.detach().clone() for name, p in self._model.named_parameters()}
        }

    def new(self, version: int) -> Weights:
        """Other weights, which become this version."""
        generator = torch.Generator().manual_seed(version)
        self.versions[version] = {
            name: p + 0.5 * p.std(correction=0) * torch.randn(p.shape, generator=generator)
            for name, p in self.versions[0].items()
        }
        return self.versions[version]

    async def assert_serves(self, engine: Engine, version: int) -> None:
        """The engine's logprobs are those of the version; its bytes too, where it has them in this
        process.
        """
        assert engine.policy_version == version
        if isinstance(engine, LocalEngine):
            assert served_checksum(engine) == checksum(self.versions[version])
        prompt = (7, 8, 9, 10, 11)
        request = GenerateRequest(f"of version {version}", prompt, SamplingParams(max_tokens=6))
        completion = await engine.generate(request)
        with torch.inference_mode():
            logits_TV = torch.func.functional_call(
                self._model,
                dict(self.versions[version]),
                (torch.tensor([[*prompt, *completion.token_ids]]),),
                {"use_cache": False},
                tie_weights=True,
            ).logits[0, len(prompt) - 1 : -1]
        logprobs_TV = torch.log_softmax(logits_TV, dim=-1)
        expected_T = logprobs_TV.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0]
        assert set(completion.policy_versions) == {version}
        assert (torch.tensor(completion.logprobs) - expected_T).abs().max() < 1e-3


def served_checksum(engine: LocalEngine) -> str:
    """Of the tensors that the engine samples from; of tied ones the first name."""
    names: dict[int, str] = {}
    for name, tensor in engine.weights.items():
        names.setdefault(tensor.data_ptr(), name)
    return checksum({name: engine.weights[name] for name in names.values()})


@dataclass
class Given(Trainer):
    """A trainer that gives what it is told to, or does `instead` what a test has in mind."""

    now: Weights = field(default_factory=dict)
    instead: Callable[[], Weights] | None = None

    async def weights(self) -> Weights:
        return self.now if self.instead is None else self.instead()


class Breaks(Mapping[str, Tensor]):
    """Weights of which the third is not to be had; counts how often somebody came so far."""

    def __init__(self, weights: Weights, error: Exception, times: int) -> None:
        self.weights = weights
        self.error = error
        self.times = times

    def __getitem__(self, name: str) -> Tensor:
        if self.times and name == list(self.weights)[2]:
            self.times -= 1
            raise self.error
        return self.weights[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.weights)

    def __len__(self) -> int:
        return len(self.weights)


TRANSPORTS = ["shared_memory", "direct", "stream", "handles"]
"""One of each kind."""


class Faulty(LocalEngine):
    """An engine that does something of the test's at the beginning of a phase, or in the middle of
    loading.
    """

    on_stage: Callable[[Weights], None] = staticmethod(lambda weights: None)
    on_commit: Callable[[], None] = staticmethod(lambda: None)

    async def stage_weights(self, weights: Weights, version: int) -> None:
        await asyncio.sleep(0)
        self.on_stage(weights)
        await super().stage_weights(weights, version)

    async def update_weights(self, weights: Weights, version: int) -> None:
        self.on_commit()
        await asyncio.sleep(0)  # where a cancellation could come through
        await super().update_weights(weights, version)

    def dies_in_the_middle_of_loading(self) -> None:
        model = self._entered()
        load, half = model.load_weights, RuntimeError("the device is gone")
        model.load_weights = lambda weights: load(Breaks(weights, half, times=1))  # type: ignore[method-assign]
        load_arrivals = model.load_arrivals

        def two_of(arrivals: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            yield from islice(arrivals, 2)
            raise half

        model.load_arrivals = lambda arrivals: load_arrivals(two_of(arrivals))  # type: ignore[method-assign]


@dataclass
class Cluster:
    """Two engines behind a router, a trainer, and a publisher between them."""

    truth: Truth
    engines: list[Faulty]
    router: Router
    publisher: WeightPublisher
    trainer: Given
    place: Path
    transport: str

    async def publish(self, version: int) -> Published:
        """Publish a version, and wait for its files, which are written beside the next step."""
        self.trainer.now = self.truth.new(version)
        published = await self.publisher.publish(self.trainer, version)  # type: ignore[arg-type]
        await published.weights.at_rest()
        return published

    async def assert_all_serve(self, version: int, *, alive: Sequence[int] = (0, 1)) -> None:
        for number, engine in enumerate(self.engines):
            if number in alive:
                await self.truth.assert_serves(engine, version)
            else:
                with pytest.raises(EngineDeadError):
                    await engine.generate(GenerateRequest("r", (7,), SamplingParams(max_tokens=1)))

    def keeps_only(self, version: int) -> bool:
        """True if nothing but this version lies where weights are published: not even that by
        `direct`.
        """
        found = [
            json.loads(path.read_text())["version"] for path in self.place.glob("*/*/manifest.json")
        ]
        return found == ([] if self.transport == "direct" else [version])


def test_a_large_model_has_more_time_to_be_loaded_unless_the_settings_say_how_much(
    tmp_path: Path,
) -> None:
    settings = WeightsConfig()
    assert settings.for_model(tmp_path).seconds == settings.seconds == 600
    for number in range(2):
        with (tmp_path / f"model-{number}.safetensors").open("wb") as file:
            file.truncate(30 * 10**9)  # takes no room on the disk
    assert settings.for_model(tmp_path).seconds == 600 + 20 * 60
    assert WeightsConfig(deadline=7).for_model(tmp_path).seconds == 7
    assert settings.for_model(tmp_path / "elsewhere").seconds == 600


@asynccontextmanager
async def cluster(  # type: ignore[no-untyped-def]
    model: Path, place: Path, transport: str = "shared_memory", folder: Path | None = None
):
    """All of it, with version 1 published."""
    config = LocalEngine.Config(max_batch=4, max_context=64)
    engines = [Faulty(config, model) for _ in range(2)]
    settings = WeightsConfig(
        transport=transport, folder=folder, bucket_mib=1, attempts=2, deadline=PATIENCE_SECONDS
    )
    async with Router(engines) as router, WeightPublisher(router, config=settings) as publisher:
        made = Cluster(Truth(model), engines, router, publisher, Given(), place, transport)
        await made.publish(1)
        await made.assert_all_serve(1)
        yield made


def failing(error: Exception, times: int) -> Callable[..., None]:
    """Raises the error so many times, and then does nothing."""
    errors = [error] * times

    def fail(*args: object) -> None:
        if errors:
            raise errors.pop()

    return fail


def flip_a_byte(bundle: Weights) -> None:
    assert isinstance(bundle, WeightBundle)
    path = bundle.folder / bundle.manifest.buckets[-1].file
    content = bytearray(path.read_bytes())
    content[-7] ^= 4
    path.write_bytes(content)


def fault(name: str, made: Cluster, version: int, *, times: int) -> None:
    """Let something go wrong so many times when this version is published."""
    second = made.engines[1]
    if name == "a bucket cannot be written":
        broken = Breaks(made.truth.new(version), OSError(28, "No space left on device"), times)
        made.trainer.instead = lambda: broken
    elif name == "the name is taken":
        (store,) = made.place.iterdir()
        tried = 1 if version == 2 else 3
        for number in range(tried, tried + times):
            (store / f"v{version}-{number}" / "something").mkdir(parents=True)
    elif name == "a byte is flipped on the way":
        flips = [flip_a_byte] * times
        second.on_stage = lambda bundle: flips.pop()(bundle) if flips else None
    elif name == "the second engine cannot stage":
        second.on_stage = failing(EngineError("no room for it"), times)
    else:
        raise AssertionError(name)


OF_FILES = ["a bucket cannot be written", "the name is taken", "a byte is flipped on the way"]
BEFORE_THE_COMMIT = [
    *((name, "shared_memory") for name in OF_FILES),
    *(("the second engine cannot stage", transport) for transport in TRANSPORTS),
]


@pytest.mark.parametrize(("name", "transport"), BEFORE_THE_COMMIT)
def test_a_fault_before_the_commit_is_retried_and_one_that_stays_leaves_the_old_version_everywhere(
    name: str, transport: str, lively_dir: Path, shared_memory: Path
) -> None:
    async def main() -> None:
        async with cluster(lively_dir, shared_memory, transport) as made:
            fault(name, made, 2, times=2)
            where = {"a byte": r"stage on engine \d of 2: ", "the sec": "stage on engine 1 of 2: "}
            said = r"version 2 .* after 2 attempts .* the previous version\. The last error: .*"
            said += next(
                (words for begin, words in where.items() if name.startswith(begin)), "writing into "
            )
            with pytest.raises(WeightsError, match=said):
                await made.publish(2)
            await made.assert_all_serve(1)
            assert made.keeps_only(1)
            fault(name, made, 3, times=1)
            assert (await made.publish(3)).attempts == 2
            await made.assert_all_serve(3)
            assert made.keeps_only(3)

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_an_engine_that_fails_to_commit_serves_nobody_and_the_others_go_on(
    transport: str, lively_dir: Path, shared_memory: Path
) -> None:
    async def main() -> None:
        async with cluster(lively_dir, shared_memory, transport) as made:
            made.engines[1].dies_in_the_middle_of_loading()
            if transport == "stream":  # who has not all weights yet is lost with it
                with suppress(EngineDeadError):
                    await made.publish(2)
                has_all = made.engines[0].policy_version == 2
                await made.assert_all_serve(2, alive=[0] if has_all else [])
                return
            await made.publish(2)
            await made.assert_all_serve(2, alive=[0])
            await made.publish(3)
            await made.assert_all_serve(3, alive=[0])
            made.engines[0].dies_in_the_middle_of_loading()
            with pytest.raises(EngineDeadError, match="the device is gone"):
                await made.publish(4)
            await made.assert_all_serve(4, alive=[])

    asyncio.run(main())


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_trainer_that_dies_while_it_gives_its_weights_changes_nothing(
    transport: str, lively_dir: Path, shared_memory: Path
) -> None:
    async def main() -> None:
        async with cluster(lively_dir, shared_memory, transport) as made:
            made.trainer.instead = failing(WorkerDiedError("trainer", 1, "killed"), 1)  # type: ignore[assignment]
            with pytest.raises(WorkerDiedError, match="trainer 1 died"):
                await made.publish(2)
            if transport != "direct":  # which reads nothing
                made.trainer.instead = lambda: Breaks(
                    made.truth.new(2), WorkerDiedError("trainer", 0, "killed"), 1
                )
                with pytest.raises(WorkerDiedError, match="trainer 0 died"):
                    await made.publish(2)
            await made.assert_all_serve(1)
            assert made.keeps_only(1)

    asyncio.run(main())


@pytest.mark.parametrize(
    ("phase", "served", "transport"),
    [
        ("gather", 1, "shared_memory"),
        ("write", 1, "shared_memory"),
        *(("stage", 1, transport) for transport in TRANSPORTS),
        *(("commit", 2, transport) for transport in TRANSPORTS),
    ],
)
def test_a_publisher_that_is_cancelled_leaves_one_version_everywhere(
    phase: str, served: int, transport: str, lively_dir: Path, shared_memory: Path
) -> None:
    async def main() -> None:
        async with cluster(lively_dir, shared_memory, transport) as made:
            loop, weights = asyncio.get_running_loop(), made.truth.new(2)

            def cancel(*args: object) -> None:
                loop.call_soon_threadsafe(flow.cancel)

            class Slow(Breaks):
                def __getitem__(self, name: str) -> Tensor:
                    cancel()
                    return self.weights[name]

            def give() -> Weights:
                if phase == "gather":
                    cancel()
                return Slow(weights, OSError(), 0) if phase == "write" else weights

            made.trainer.instead = give
            if phase == "stage":
                made.engines[1].on_stage = cancel
            if phase == "commit":
                made.engines[0].on_commit = cancel
            async with Flow("run") as flow:
                publishing = flow.start(made.publish(2), name="publish")
                await asyncio.wait({publishing})
            assert publishing.cancelled()
            await made.assert_all_serve(served)
            made.trainer.instead = None
            made.engines[0].on_commit = lambda: None
            made.engines[1].on_stage = lambda bundle: None
            await made.publish(3)
            await made.assert_all_serve(3)
            assert made.keeps_only(3)

    asyncio.run(main())


def test_a_version_stays_readable_as_long_as_an_engine_serves_it(
    lively_dir: Path, shared_memory: Path
) -> None:
    class Remembers(ScriptedEngine):
        """As a router does, for a replica that is restarted."""

        async def update_weights(self, weights: Weights, version: int) -> None:
            await super().update_weights(weights, version)
            self.published = weights

    async def main() -> None:
        async with Remembers(lambda ids: ()) as engine, Remembers(lambda ids: ()) as follower:
            config = WeightsConfig(transport="shared_memory")
            async with WeightPublisher(engine, ((follower, 2),), config) as publisher:
                for version in range(1, 6):
                    await publisher.publish(Given({"w": torch.full((3,), float(version))}), version)  # type: ignore[arg-type]
                    for served in [engine, follower] if version > 1 else [engine]:
                        bundle = WeightBundle.open(served.published.folder)  # type: ignore[attr-defined]
                        assert torch.equal(
                            bundle["w"], torch.full((3,), float(served.policy_version))
                        )
                    assert (
                        len([path for path in found(shared_memory) if path.name == "manifest.json"])
                        <= 2
                    )

    asyncio.run(main())


def found(folder: Path) -> list[Path]:
    """Everything in it."""
    return list(folder.rglob("*"))


def test_where_memory_cannot_be_written_auto_takes_the_disk(
    lively_dir: Path, shared_memory: Path, tmp_path: Path
) -> None:
    async def main() -> None:
        async with cluster(lively_dir, shared_memory, transport="auto", folder=tmp_path) as made:
            assert made.keeps_only(1)
            broken = Breaks(made.truth.new(2), OSError(28, "No space left on device"), 1)
            made.trainer.instead = lambda: broken
            await made.publish(2)
            await made.assert_all_serve(2)
            assert len(found(shared_memory)) == 1  # the place, empty
            assert "v2-0" in [path.name for path in found(tmp_path)]

    asyncio.run(main())
    assert found(tmp_path) == []


def test_what_a_place_lacks_is_said_with_the_way_out(
    lively_dir: Path, shared_memory: Path, tmp_path: Path
) -> None:
    taken = tmp_path / "file"
    taken.write_text("")

    async def main() -> None:
        with pytest.raises(
            WeightsError,
            match=r"writing into .*/file failed: .* by weights.transport and weights.folder",
        ):
            async with cluster(lively_dir, shared_memory, transport="disk", folder=taken):
                pass

    asyncio.run(main())


def test_direct_weights_are_handed_over_and_no_file_is_written(
    lively_dir: Path, shared_memory: Path
) -> None:
    async def main() -> None:
        truth = Truth(lively_dir)
        async with (
            LocalEngine(LocalEngine.Config(max_batch=4, max_context=64), lively_dir) as engine,
            WeightPublisher(engine, config=WeightsConfig(transport="direct")) as publisher,
        ):
            published = await publisher.publish(Given(truth.new(1)), 1)  # type: ignore[arg-type]
            for name, tensor in truth.versions[1].items():
                assert published.weights[name] is tensor
            await truth.assert_serves(engine, 1)
            with pytest.raises(WeightsError, match="unknown"):
                await publisher.publish(Given({"x": torch.ones(1)}), 2)  # type: ignore[arg-type]
            await truth.assert_serves(engine, 1)

    asyncio.run(main())


def test_a_place_that_no_rank_can_reach_is_refused(lively_dir: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalTrainer(LocalTrainer.Config(), lively_dir, total_steps=1) as trainer:
            place = BundlePlace(tmp_path / "of another machine" / "v1", 1, 1000)
            answers = await trainer.send_weights(WriteBuckets(place, "float32"))
            with pytest.raises(WeightsError, match=r"no rank .*of another machine.*folder that"):
                bundle_of(place, answers)

    asyncio.run(main())


@pytest.mark.slow
def test_twenty_updates_of_two_engines_leave_the_same_bytes_everywhere(
    lively_dir: Path, shared_memory: Path
) -> None:
    batches = random_batches(lively_dir, 20)

    async def main() -> None:
        config = LocalTrainer.Config(lr=3e-3, micro_batch_tokens=256)
        async with (
            cluster(lively_dir, shared_memory) as made,
            LocalTrainer(config, lively_dir, total_steps=20) as trainer,
        ):
            seen = set()
            for version, batch in enumerate(batches, start=2):
                await trainer.step(batch, LOSS, float(batch.num_loss_tokens))
                published = await made.publisher.publish(trainer, version)
                made.truth.versions[version] = {
                    k: w.detach().clone() for k, w in (await trainer.weights()).items()
                }
                await made.assert_all_serve(version)
                seen.add(checksum(published.weights))
                assert checksum(published.weights) == checksum(made.truth.versions[version])
                assert made.keeps_only(version)
                assert published.metrics()["weights/bytes"] > sum(
                    w.nbytes for w in published.weights.values()
                )
            assert len(seen) == 20

    asyncio.run(main())


@pytest.mark.vllm
@pytest.mark.long
def test_two_vllm_engines_take_up_the_same_versions_and_faults_leave_one(
    lively_dir: Path, shared_memory: Path
) -> None:
    from agentrl.engines.vllm import VllmEngine

    config = VllmEngine.Config(max_batch=4, max_context=64, kv_cache_gib=0.1, memory_fraction=0.3)
    truth, trainer = Truth(lively_dir), Given()

    async def main() -> None:
        settings = WeightsConfig(transport="shared_memory", bucket_mib=1, attempts=2)
        async with (
            VllmEngine(config, lively_dir) as first,
            VllmEngine(config, lively_dir) as second,
            WeightPublisher(first, ((second, 1),), settings) as publisher,
        ):
            stage, update = second.stage_weights, second.update_weights

            async def publish_and_check(version: int, served: int | None = None) -> None:
                trainer.now = truth.new(version)
                if served is None:
                    await publisher.publish(trainer, version)  # type: ignore[arg-type]
                else:
                    with pytest.raises(WeightsError, match=r"staging on follower 1 .*damaged"):
                        await publisher.publish(trainer, version)  # type: ignore[arg-type]
                for engine in (first, second):
                    await truth.assert_serves(engine, served or version)
                assert len(list(shared_memory.glob("*/v*"))) == 1  # noqa: ASYNC240

            async def stage_what_was_damaged(bundle: WeightBundle, version: int) -> None:
                flip_a_byte(bundle)
                await stage(bundle, version)

            async def update_from_nowhere(bundle: WeightBundle, version: int) -> None:
                shutil.rmtree(bundle.folder)
                await update(bundle, version)

            for version in range(1, 6):
                await publish_and_check(version)
            second.stage_weights = stage_what_was_damaged  # type: ignore[assignment]
            await publish_and_check(6, served=5)
            second.stage_weights = stage
            await publish_and_check(7)
            second.update_weights = update_from_nowhere  # type: ignore[assignment]
            with pytest.raises(EngineDeadError, match="version 8 broke off"):
                await publish_and_check(8)
            await truth.assert_serves(first, 8)
            with pytest.raises(EngineDeadError):
                await second.generate(GenerateRequest("r", (7,), SamplingParams(max_tokens=1)))

    asyncio.run(main())


def core_of(engine: Any) -> int:
    """The process of a vLLM engine that loads weights."""
    manager = engine._llm.engine_core.resources.engine_manager
    return int(manager.processes[0].pid)


@dataclass
class VllmRun:
    """Two vLLM engines that are replaced, and a publisher."""

    truth: Truth
    config: Any
    made: dict[int, Any] = field(default_factory=dict)
    trainer: Given = field(default_factory=Given)

    def engine(self, number: int) -> Any:
        from agentrl.engines.vllm import VllmEngine

        self.made[number] = VllmEngine(self.config, self.truth.folder)
        return self.made[number]

    async def publish_and_check(
        self, router: Router, publisher: WeightPublisher, version: int
    ) -> None:
        """Both engines, or their replacements, then serve this version."""
        self.trainer.now = self.truth.new(version)
        await publisher.publish(self.trainer, version)  # type: ignore[arg-type]
        async with asyncio.timeout(PATIENCE_SECONDS):
            while router.worker_count().alive < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        for engine in self.made.values():
            await self.truth.assert_serves(engine, version)


def cannot_join(engine: Any) -> None:
    tell = engine._tell_workers

    async def refuse(llm: Any, method: str, shipment: Any) -> None:
        if method == "join":
            raise WeightsError("no way to the trainer")
        await tell(llm, method, shipment)

    engine._tell_workers = refuse


def is_hit(engine: Any, number: signal.Signals) -> None:
    """Send it a signal when the bucket after the first one is about to be sent."""
    core = engine._llm.engine_core.resources.engine_manager.processes[0].pid

    def seal(bucket: plan.BucketPlan, buffer: Tensor, label: str) -> None:
        if label.endswith("/1") and live.seal is seal:  # type: ignore[attr-defined]
            live.seal = plan.seal  # type: ignore[attr-defined]
            hit(core, number)
        plan.seal(bucket, buffer, label)

    live.seal = seal  # type: ignore[attr-defined]


LOST = {
    "cannot join": cannot_join,
    "dies": partial(is_hit, number=signal.SIGKILL),
    "stands still": partial(is_hit, number=signal.SIGSTOP),
}


@pytest.mark.vllm
@pytest.mark.long
@pytest.mark.parametrize("transport", ["stream", "handles"])
@pytest.mark.parametrize("fault", LOST)
def test_a_vllm_engine_that_is_lost_during_an_update_is_replaced_and_no_weights_are_mixed(
    fault: str,
    transport: str,
    lively_dir: Path,
    shared_memory: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from agentrl.engines.vllm import VllmEngine

    config = VllmEngine.Config(max_batch=4, max_context=64, kv_cache_gib=0.1, memory_fraction=0.3)
    run = VllmRun(Truth(lively_dir), config)
    monkeypatch.setattr(live, "seal", plan.seal)
    if fault != "stands still":  # else the end of a process, or its leave, must do
        monkeypatch.setattr(live, "_LEASE_SECONDS", 10 * PATIENCE_SECONDS)

    async def main() -> None:
        settings = WeightsConfig(
            transport=transport, bucket_mib=1, attempts=1, deadline=PATIENCE_SECONDS
        )
        engines = [run.engine(0), run.engine(1)]
        async with (
            Router(
                engines, factory=run.engine, lease=30, update_seconds=PATIENCE_SECONDS
            ) as router,
            WeightPublisher(router, config=settings) as publisher,
        ):
            await run.publish_and_check(router, publisher, 1)
            LOST[fault](engines[1])
            await run.publish_and_check(router, publisher, 2)
            assert run.made[1] is not engines[1]
            if fault == "cannot join":
                assert run.made[0] is engines[0]
            await run.publish_and_check(router, publisher, 3)

    asyncio.run(main())


def test_to_the_end_finishes_the_work_and_then_cancels() -> None:
    done: list[str] = []

    async def work(error: Exception | None) -> str:
        await asyncio.sleep(0.01)
        done.append("work")
        if error is not None:
            raise error
        return "result"

    async def main() -> None:
        assert await run_to_completion(work(None)) == "result"
        with pytest.raises(KeyError):
            await run_to_completion(work(KeyError()))
        for error in (None, KeyError()):
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(run_to_completion(work(error)))
                await asyncio.sleep(0)
                task.cancel()
                await asyncio.sleep(0)
                task.cancel()
            assert task.cancelled()

    asyncio.run(main())
    assert done == ["work"] * 4
