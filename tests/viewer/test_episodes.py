"""The index of episodes: filters, fates, and runs that go on."""

import tempfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from agentrl.errors import ConfigError
from agentrl.testing.made_up_run import MadeUpRun
from agentrl.viewer.episode import EpisodeReader
from agentrl.viewer.episodes import EpisodeIndex, EpisodeQuery
from agentrl.viewer.folders import RunFolder


@pytest.fixture
def made(tmp_path):
    run = MadeUpRun(tmp_path / "run", texts=("A door.", "A Dragon, 100% asleep."))
    run.begin()
    for _ in range(2):
        run.step()
    return run


def index_of(run: MadeUpRun) -> EpisodeIndex:
    return EpisodeIndex(RunFolder("run", run.folder))


def test_what_does_not_fit_into_memory_is_not_written_where_the_user_is(
    made, tmp_path, monkeypatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    (folder,) = index_of(made)._db.execute("SELECT current_setting('temp_directory')").fetchone()
    assert Path(folder).parent == Path(tempfile.gettempdir())


def test_each_episode_is_listed_once_with_its_fate_also_those_that_were_never_trained(made):
    found = index_of(made).page(EpisodeQuery(limit=1000))
    assert found["total"] == 2 * (4 * 4 + 1)
    assert len({row["id"] for row in found["rows"]}) == found["total"]
    failed = [row for row in found["rows"] if row["fate"] == "failed"]
    assert [(row["layer"], row["why"], row["score"]) for row in failed] == [
        ("environment", "environment: A door.", None)
    ] * 2
    trained = [row for row in found["rows"] if row["fate"] == "trained"]
    assert {(row["num_turns"], row["num_tokens"], row["staleness"]) for row in trained} == {
        (3, 18, 0)
    }


def test_filters_are_conditions_that_all_hold(made):
    index = index_of(made)
    every = index.page(EpisodeQuery(limit=1000))["rows"]
    wanted = [
        row
        for row in every
        if row["step"] == 1 and row["fate"] == "trained" and row["score"] >= 0.5
    ]
    found = index.page(EpisodeQuery(step=1, fate="trained", low=0.5, limit=1000))
    assert {row["id"] for row in found["rows"]} == {row["id"] for row in wanted}
    assert found["total"] == len(wanted)
    assert index.page(EpisodeQuery(status="truncated"))["total"] == sum(
        row["status"] == "truncated" for row in every
    )
    assert index.page(EpisodeQuery(layer="environment"))["total"] == 2
    assert index.page(EpisodeQuery(stale=1))["total"] == 0
    assert index.page(EpisodeQuery(env="no such"))["total"] == 0


def test_a_text_is_found_in_messages_ids_and_reasons_whatever_its_case_and_characters(made):
    index = index_of(made)
    assert index.page(EpisodeQuery(text="dragon, 100%"))["total"] == 32
    assert index.page(EpisodeQuery(text="DRAGON", step=0))["total"] == 16
    assert index.page(EpisodeQuery(text="0% a", step=0))["total"] == 16
    assert index.page(EpisodeQuery(text="%d%"))["total"] == 0  # it is no pattern
    assert index.page(EpisodeQuery(text="'); DROP TABLE fates; --"))["total"] == 0
    assert index.page(EpisodeQuery(text="train-000004/0"))["total"] == 1
    assert index.page(EpisodeQuery(text="a door"))["total"] == 34


def test_the_histogram_counts_all_scores_that_the_other_filters_leave(made):
    index = index_of(made)
    whole = index.page(EpisodeQuery(step=0))["histogram"]
    assert (whole["low"], whole["high"], sum(whole["counts"])) == (0.0, 1.0, 16)
    assert index.page(EpisodeQuery(step=0, low=0.9))["histogram"] == whole
    assert index.page(EpisodeQuery(fate="failed"))["histogram"]["counts"] == []


def test_rows_are_sorted_and_come_in_pages(made):
    index = index_of(made)
    scores = [
        row["score"]
        for row in index.page(EpisodeQuery(fate="trained", sort="score", limit=1000))["rows"]
    ]
    assert scores == sorted(scores, reverse=True)
    pages = [
        index.page(EpisodeQuery(sort="id", descending=False, offset=at, limit=10))["rows"]
        for at in (0, 10, 20, 30)
    ]
    names = [row["id"] for page in pages for row in page]
    assert names == sorted(names)
    assert len(names) == 34
    with pytest.raises(ConfigError, match="cannot be sorted by 'id; DROP"):
        index.page(EpisodeQuery(sort="id; DROP TABLE fates"))


def test_a_new_step_and_one_that_is_made_again_are_seen_without_a_restart(made):
    index = index_of(made)
    assert index.page(EpisodeQuery())["total"] == 34
    made.step()
    assert index.page(EpisodeQuery())["total"] == 51
    path = made.folder / "trajectories" / "step_000002.parquet"
    pq.write_table(pq.read_table(path).slice(0, 3), path)
    again = index.page(EpisodeQuery(step=2, fate="trained", limit=1000))["rows"]
    assert sum(row["place"] is not None for row in again) == 3
    path.unlink()
    assert all(row["place"] is None for row in index.page(EpisodeQuery(step=2))["rows"])


def test_files_of_earlier_versions_with_fewer_columns_are_read_too(made):
    path = made.folder / "trajectories" / "step_000000.parquet"
    pq.write_table(pq.read_table(path).drop_columns(["num_turns", "num_tokens", "started"]), path)
    rows = index_of(made).page(EpisodeQuery(fate="trained", limit=100))["rows"]
    assert {(row["step"], row["num_turns"]) for row in rows} == {(0, None), (1, 3)}


def test_a_search_reads_no_file_again_for_its_next_page_and_all_again_when_there_are_new_ones(
    made, monkeypatch
):
    searched = []
    search = EpisodeIndex._search
    monkeypatch.setattr(
        EpisodeIndex,
        "_search",
        lambda index, *asked: (searched.append(asked), search(index, *asked)),
    )
    index = index_of(made)
    first = index.page(EpisodeQuery(text="dragon", limit=10))
    second = index.page(EpisodeQuery(text="Dragon", limit=10, offset=10))
    assert first["total"] == second["total"] == 32
    assert not {row["id"] for row in first["rows"]} & {row["id"] for row in second["rows"]}
    assert [text for text, _ in searched] == ["dragon"]
    made.step()
    assert index.page(EpisodeQuery(text="dragon"))["total"] == 48
    assert index.page(EpisodeQuery(text="dragon", step=2))["total"] == 16
    assert index.page(EpisodeQuery(text="a door", step=2))["total"] == 16
    assert len(searched) == 4


def test_an_episode_that_was_not_trained_on_can_be_read_and_searched_and_has_no_score(tmp_path):
    run = MadeUpRun(tmp_path / "run", texts=("A door.", "A dragon."), untrained=True)
    run.begin()
    run.step()
    index = index_of(run)
    (failed,) = index.page(EpisodeQuery(fate="failed"))["rows"]
    assert (failed["kind"], failed["layer"], failed["score"], failed["num_turns"]) == (
        "untrained",
        "environment",
        None,
        3,
    )
    assert index.page(EpisodeQuery(fate="failed", text="dragon"))["total"] == 1
    assert index.page(EpisodeQuery())["total"] == 17
    assert (
        index.page(EpisodeQuery())["histogram"]
        == index.page(EpisodeQuery(fate="trained"))["histogram"]
    )
    assert failed["id"] in {row["id"] for row in index.in_play(0, 1e12)}
    assert index.failed_layers(0, 0) == ["environment"]
    episode = EpisodeReader(RunFolder("run", run.folder), index).episode(failed["id"])
    assert "was not trained: it failed" in episode["fate"]
    assert episode["trajectory"]["messages"][1]["content"] == "A door."


def test_files_of_a_release_that_had_more_statuses_are_read(made):
    path = sorted((made.folder / "trajectories").glob("*.parquet"))[0]
    table = pq.read_table(path)
    for status in ("cancelled", "stale"):
        statuses = [status, *table["status"].to_pylist()[1:]]
        column = table.schema.get_field_index("status")
        table = table.set_column(column, table.schema.field(column), [statuses])
        pq.write_table(table, path)
        index = index_of(made)
        (row,) = index.page(EpisodeQuery(status=status))["rows"]
        episode = EpisodeReader(RunFolder("run", made.folder), index).episode(row["id"])
        assert episode["trajectory"]["status"] == row["status"] == status


@pytest.mark.parametrize("name", ["run[1]", "run?", "ru*", "env=sokoban", "task=7/score=high"])
def test_the_episodes_of_a_folder_with_any_name_are_its_own(tmp_path, name):
    runs = [
        MadeUpRun(tmp_path / "run1" / "run", tools=("other",)),
        MadeUpRun(tmp_path / name / "run", texts=("A Dragon.",), tools=("own",)),
    ]
    for run in runs:
        run.begin()
        run.step()
    pages = [index_of(run).page(EpisodeQuery(limit=100)) for run in runs]
    shown = ("id", "env", "task", "fate", "step", "place")
    other, own = ([[row[key] for key in shown] for row in page["rows"]] for page in pages)
    assert own == other
    assert pages[1]["unreadable"] == []
    index = index_of(runs[1])
    assert index.page(EpisodeQuery(text="dragon"))["total"] == 17
    assert [tool["name"] for tool in index.tools()["tools"]] == ["own"]
    assert index.page(EpisodeQuery(tool="own"))["total"] == 16
