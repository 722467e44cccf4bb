"""The problems of the oracles as text: what is played is what is enumerated."""

import random
from typing import Any

import pytest

from agentrl.envs.oracle import OracleEnv, PlayedProblem, weak_player
from agentrl.errors import ConfigError
from agentrl.oracles.estimators import Oracle
from agentrl.oracles.problems import PROBLEMS
from agentrl.testing import check_env
from agentrl.tokens.arrays import floats, ints
from agentrl.trajectory import Completion, Task, Terminated, Trajectory, Turn

each_problem = pytest.mark.parametrize("name", PROBLEMS)


def enumerated(name: str, **options: Any) -> PlayedProblem:
    return OracleEnv().enumeration({"problem": name, **options})


def uniform(problem: PlayedProblem, share: float = 1.0) -> list[list[float]]:
    """Each word equally likely, all of them together with this probability."""
    return [
        [share / len(question.answers)] * len(question.answers) for question in problem.questions
    ]


def returns(name: str, player: Any, count: int, **options: Any) -> list[float]:
    """What so many episodes earn."""
    env, rng, found = OracleEnv(), random.Random(0), []
    for seed in range(count):
        env.reset(seed=seed, options={"problem": name, **options})
        total, over = 0.0, False
        while not over:
            _, reward, terminated, truncated, _ = env.step(player(env, rng))
            total, over = total + reward, terminated or truncated
        found.append(total)
    return found


@each_problem
def test_every_problem_keeps_the_contract(name: str) -> None:
    words = sorted({word for question in enumerated(name).questions for word in question.answers})
    assert check_env(OracleEnv, options={"problem": name}, actions=(*words, "nonsense")) is not None


@each_problem
def test_the_exact_return_is_that_of_the_oracle(name: str) -> None:
    problem, oracle = enumerated(name), Oracle(PROBLEMS[name]())
    found = problem.metrics(uniform(problem))
    assert found["return"] == pytest.approx(float(oracle.mean_return(0 * oracle.logits())))
    assert found["best_return"] == pytest.approx(oracle.best_return())
    assert found["regret"] == pytest.approx(found["best_return"] - found["return"])
    assert found["other"] == pytest.approx(0.0)


@each_problem
def test_the_exact_return_is_the_mean_of_what_is_played(name: str) -> None:
    problem = enumerated(name, other=-0.5)

    def player(env: OracleEnv, rng: random.Random) -> str:
        return rng.choice(env.point.words) if rng.random() < 0.8 else "nonsense"

    played = returns(name, player, 3000, other=-0.5)
    mean = sum(played) / len(played)
    error = (sum((one - mean) ** 2 for one in played) / len(played) ** 2) ** 0.5
    found = problem.metrics(uniform(problem, 0.8))
    assert abs(mean - found["return"]) < 4 * error
    assert 0.2 - 1e-9 <= found["other"] <= 1 - 0.8**3 + 1e-9


@each_problem
def test_the_advantages_at_a_point_are_zero_on_average_and_none_is_above_zero_for_the_best_policy(
    name: str,
) -> None:
    problem = enumerated(name, other=0.1)
    probabilities = uniform(problem, 0.7)
    chosen = [
        (number, word)
        for number, question in enumerate(problem.questions)
        for word in question.answers
    ]
    for number, question in enumerate(problem.questions):
        credits_ = [
            credit_of(problem, probabilities, number, word) for word in [*question.answers, ""]
        ]
        weights = [*probabilities[number], 0.3]
        assert sum(
            w * advantage for w, (_, advantage) in zip(weights, credits_, strict=True)
        ) == pytest.approx(0)
    best = [
        [float(word == problem.best_words(number)[0]) for word in question.answers]
        for number, question in enumerate(problem.questions)
    ]
    assert problem.metrics(best)["regret"] == pytest.approx(0)
    assert max(credit_of(problem, best, *one)[1] for one in chosen) <= 1e-9


def credit_of(
    problem: PlayedProblem, probabilities: Any, number: int, word: str
) -> tuple[float, float]:
    (credit,) = problem.credit(probabilities, of_one_turn({"decision": number, "word": word})) or ()
    return credit.value, credit.advantage


def of_one_turn(info: dict[str, Any]) -> Trajectory:
    turn = Turn(ints([0]), Completion(ints([1]), floats([0]), ints([0]), "stop"), 0.0, info)
    return Trajectory("", Task("oracle", 0), (turn,), Terminated())


def test_a_turn_without_a_decision_has_no_credit() -> None:
    problem = enumerated("bandit")
    assert problem.credit(uniform(problem), of_one_turn({"context": "summary"})) is None


def test_the_sign_is_shown_once_and_must_be_remembered() -> None:
    env = OracleEnv()
    env.reset(seed=1, options={"problem": "t_maze", "settings": {"length": 2}})
    sign, _, _, _, info = env.step("go")
    assert "A sign points" in sign
    assert info["state_key"] in ("left corridor 2", "right corridor 2")
    assert env.step("on")[0] == "corridor 1\non?"
    junction = env.step("on")
    assert junction[0] == "junction\nleft or right?"
    assert env.step("right" if "right" in sign else "left")[1:3] == (1.0, True)


def test_a_message_that_is_no_offered_word_ends_the_episode_with_its_own_reward() -> None:
    env = OracleEnv()
    env.reset(seed=0, options={"problem": "stopping", "other": -1.0})
    observation, reward, terminated, truncated, info = env.step("Go")
    assert (reward, terminated, truncated, info["success"], info["word"]) == (
        -1.0,
        True,
        False,
        False,
        "",
    )
    env.reset(seed=0, options={"problem": "corridor", "settings": {"noise": 1.0, "limit": 1}})
    observation, _, terminated, truncated, info = env.step("on")
    assert (terminated, truncated) == (False, True)
    assert observation.endswith("wait?")
    assert info["state_key"] == "place 0"


def test_better_players_earn_more() -> None:
    def perfect(env: OracleEnv, rng: random.Random) -> str:
        return weak_player(env, rng, skill=1.0)

    assert set(returns("dialogue", perfect, 20)) == {0.9}
    assert sum(returns("t_maze", perfect, 20)) == 20
    assert 0.55 < sum(returns("t_maze", weak_player, 1000)) / 1000 < 0.75


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"problem": "maze"}, "'bandit', 'stopping', 't_maze'"),
        (
            {"problem": "t_maze", "settings": {"lenght": 2}},
            r"settings of 't_maze': lenght: Unexpected.*Its settings are: length",
        ),
        (
            {"problem": "t_maze", "settings": {"length": 0}},
            r"settings of 't_maze': length: Input should be greater than or equal to 1",
        ),
        ({"problem": "stopping", "settings": {"length": 1}}, "Its settings are: none"),
    ],
)
def test_wrong_options_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        OracleEnv().reset(seed=0, options=options)
