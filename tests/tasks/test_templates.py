"""Templates over the columns of a row."""

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import load_config
from agentrl.errors import ConfigError
from agentrl.runs.task_sources import task_source
from agentrl.tasks.rows import BadRowError
from agentrl.tasks.suite_tasks import suite_source
from agentrl.tasks.template import RowTemplate

ROW = {
    "question": "Which is {prime}?",
    "choices": ["four", 5, None],
    "context": {"title": ["Sums"], "text": "é"},
    "Question Text": "Well?",
    "none": None,
    "gsm8k": "2 + 2 = 4\n#### 4",
    "math": "It is \\boxed{1} or $\\boxed{\\frac{1}{2}}$.",
    "hostile": "{{ question }} {question} {% for %}",
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize(
    ("template", "made"),
    [
        ("{question}", "Which is {prime}?"),
        ("Q: { question }\n{choices | lettered}", "Q: Which is {prime}?\nA. four\nB. 5\nC."),
        ("{choices}, {choices.0}, {choices.-2}", '["four", 5, null], four, 5'),
        ("{context.title} {context.text}|{none}|", '["Sums"] é||'),
        (
            "{Question Text} \\boxed{} \\frac{1}{2} {'a': 1}",
            "Well? \\boxed{} \\frac{1}{2} {'a': 1}",
        ),
        ("{hostile}", ROW["hostile"]),
        ("{{ hostile }}", ROW["hostile"]),
        ("{{ choices }}{{ none }}", '["four", 5, null]'),
        ("{% for one in choices[:2] %}{{ loop.index }}) {{ one }} {% endfor %}", "1) four 2) 5"),
        ('{{ row["Question Text"] | upper }} {{ choices | lettered }}', "WELL? A. four\nB. 5\nC."),
        ("{gsm8k | final} {math | final}", "4 \\frac{1}{2}"),
        ("{{ question.split()[-1] }}\n\n{{ none }}", "{prime}?"),
    ],
)
def test_a_template_of_columns_is_the_prompt(template: str, made: str) -> None:
    assert RowTemplate(template).of(ROW) == made


@pytest.mark.parametrize(
    "template",
    [
        "{{ question.__class__.__mro__[1].__subclasses__() }}",
        "{{ ''.join.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ '{0.__class__}'.format(question) }}{{ row.update({'question': 1}) }}",
        "{{ choices.append(1) }}",
        "{% for _ in range(10 ** 9) %}x{% endfor %}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_a_template_of_jinja_reaches_no_code(template: str) -> None:
    with pytest.raises(BadRowError, match="its template fails"):
        RowTemplate(template).of(ROW)


def test_a_template_that_fails_says_what_exists() -> None:
    with pytest.raises(
        BadRowError,
        match=r"no column 'qestion'. Did you mean 'question'.* need a template of Jinja",
    ):
        RowTemplate("{qestion}").of(ROW)
    with pytest.raises(
        BadRowError, match=r"'qestion' is undefined. The columns are question, choices"
    ):
        RowTemplate("{{ qestion }}").of(ROW)
    with pytest.raises(BadRowError, match="`lettered` takes a list"):
        RowTemplate("{question | lettered}").of(ROW)
    with pytest.raises(ValueError, match=r"no filter 'letered'. Did you mean 'lettered'"):
        RowTemplate("{choices | letered}")
    with pytest.raises(ValueError, match="no template of Jinja"):
        RowTemplate("{% for %}")


def config(tmp_path: Path, *overrides: str) -> Any:
    (tmp_path / "run.yaml").write_text(
        f"env: qa\ntasks: {tmp_path}/data.csv\nmodel: tiny\nreward: choice\n"
    )
    return load_config(tmp_path / "run.yaml", overrides).config


def test_templates_are_settings_of_tasks_and_suites_in_files_and_on_the_command_line(
    tmp_path: Path,
) -> None:
    (tmp_path / "data.csv").write_text(
        "question,a,b,key\n" + "".join(f"{n}?,x,y,b) yes\n" for n in range(4))
    )
    template = 'tasks.prompt="{question}\\nA. {a}\\nB. {b}"'
    answer = 'tasks.answer="{{ key[0] | upper }}"'
    loaded = config(tmp_path, template, answer, "tasks.held_out=0", "evaluation.tasks=0")
    options = task_source(loaded, "train").task(0).options
    assert options["prompt"][1:] == "?\nA. x\nB. y"
    assert options["answer"] == "B"
    (tmp_path / "data.yaml").write_text(
        f'env: qa\ntasks: {{data: {tmp_path}/data.csv, prompt: "{{a}}", answer: "B", held_out:'
        " 0}\nmodel: tiny\n"
    )
    written = load_config(
        tmp_path / "data.yaml", ["tasks.prompt={question}", "evaluation.tasks=0"]
    ).config
    assert task_source(written, "train").task(0).options["prompt"][1:] == "?"
    loaded = config(
        tmp_path, "tasks.prompt={question}", "tasks.columns={answer: key}", "tasks.held_out=0"
    )
    assert set(task_source(loaded, "train").task(0).options) == {"prompt", "answer"}
    suite = (
        f'evaluation.suites=[{{name: s, data: {tmp_path}/data.csv, prompt: "Is {{question}}",'
        ' answer: "B"}]'
    )
    [first] = config(tmp_path, suite, "tasks.prompt={question}", answer).evaluation.suites
    assert (
        suite_source(first, config(tmp_path, suite, "tasks.prompt={question}").env)
        .task(0)
        .options["answer"]
        == "B"
    )
    with pytest.raises(ConfigError, match=r"tasks.prompt: it is no template of Jinja"):
        config(tmp_path, "tasks.prompt='{% for %}'")
    with pytest.raises(ConfigError, match=r"none of the 4 rows can be a task: .*no column 'q'"):
        task_source(config(tmp_path, "tasks.prompt={q}"), "train")
