"""A step's report has each metric once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.errors import MetricNameError
from agentrl.observe.step_report import StepReport
from agentrl.protocols.metrics import merge_metrics

METRICS = st.dictionaries(st.sampled_from("abcdef"), st.floats(allow_nan=False), max_size=4)


def test_a_metric_that_two_parts_report_is_refused_and_both_are_named():
    report = StepReport(3, (), {"train": 1.0}, trainer={"reward": 0.5})
    with pytest.raises(MetricNameError, match="'reward' is reported twice, by episodes and by tr"):
        report.metrics(episodes={"reward": 0.25})


def test_a_loss_that_reports_the_name_of_a_timing_is_refused():
    with pytest.raises(MetricNameError, match=r"'seconds' is .*by trainer and by timing"):
        StepReport(0, (), {"train": 1.0}, trainer={"seconds": 0.5}).metrics()


def test_the_time_of_a_step_is_the_sum_of_its_phases():
    metrics = StepReport(0, (), {"rollout": 1.0, "train": 2.5}).metrics()
    assert metrics == {"seconds": 3.5, "seconds/rollout": 1.0, "seconds/train": 2.5}


@given(st.dictionaries(st.text("xyz", min_size=1), METRICS, max_size=4))
def test_parts_are_merged_exactly_if_their_names_differ(parts):
    names = [name for metrics in parts.values() for name in metrics]
    if len(names) > len(set(names)):
        with pytest.raises(MetricNameError):
            merge_metrics(parts)
        return
    merged = merge_metrics(parts)
    assert all(merged[name] == metrics[name] for metrics in parts.values() for name in metrics)
    assert list(merged) == names
