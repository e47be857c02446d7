from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest
from error_assertions import raises_error

from forerun.errors import UserError
from forerun.evaluate.tasks import _require_harmless, require_lm_eval, results_table
from forerun.installation import install_command


def test_without_lm_eval_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    with pytest.raises(UserError) as caught:
        require_lm_eval()
    assert caught.value.fix == install_command("eval")


def test_a_task_that_runs_what_the_model_writes_is_refused() -> None:
    _require_harmless({"choice": SimpleNamespace(UNSAFE_CODE=False), "other": SimpleNamespace()})
    with raises_error("E-EVAL-014", "'humaneval'"):
        _require_harmless({"choice": SimpleNamespace(), "humaneval": SimpleNamespace(UNSAFE_CODE=True)})


RESULTS = {
    "results": {
        "arc": {"alias": "arc", "acc,none": 0.5, "acc_stderr,none": 0.025, "acc_norm,none": 0.75, "sample_len": 7},
        "easy": {"alias": "easy", "acc,none": 0.25, "acc_stderr,none": "N/A"},
        "all": {"alias": "all", "acc,none": 0.375, "acc_stderr,none": 0.01},
    },
    "groups": {"all": {"alias": "all", "acc,none": 0.375, "acc_stderr,none": 0.01}},
    "group_subtasks": {"all": ["easy"], "arc": []},
    "versions": {"arc": 1.0, "easy": 2},
    "n-shot": {"arc": 0, "easy": 5},
    "higher_is_better": {"arc": {"acc": True, "acc_norm": True}, "easy": {"acc": False}},
}


def test_every_metric_has_a_line_and_groups_come_first() -> None:
    lines = results_table(RESULTS).splitlines()
    cells = [[cell.rstrip() for cell in line.strip("|").split("|")] for line in lines]
    assert len({len(line) for line in lines}) == 1, "columns are aligned"
    assert cells[2:] == [
        ["all", "", "none", "", "acc", "", "0.3750", "±", "0.0100"],
        [" - easy", "2", "none", "5", "acc", "↓", "0.2500", "±", "N/A"],
        ["arc", "1.0", "none", "0", "acc", "↑", "0.5000", "±", "0.0250"],
        ["", "", "none", "0", "acc_norm", "↑", "0.7500", "±", "N/A"],
    ]
