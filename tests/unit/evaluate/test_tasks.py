from __future__ import annotations

import importlib.util
from types import SimpleNamespace

import pytest

from forerun.errors import UserError
from forerun.evaluate.tasks import _require_harmless, require_lm_eval
from forerun.installation import install_command


def test_without_lm_eval_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    with pytest.raises(UserError) as caught:
        require_lm_eval()
    assert caught.value.fix == install_command("eval")


def test_a_task_that_runs_what_the_model_writes_is_refused() -> None:
    _require_harmless({"choice": SimpleNamespace(UNSAFE_CODE=False), "other": SimpleNamespace()})
    with pytest.raises(UserError, match=r"'humaneval'.*E-EVAL-014"):
        _require_harmless({"choice": SimpleNamespace(), "humaneval": SimpleNamespace(UNSAFE_CODE=True)})
