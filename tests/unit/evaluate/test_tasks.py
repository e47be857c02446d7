from __future__ import annotations

import importlib.util

import pytest

from forerun.errors import UserError
from forerun.evaluate.tasks import require_harness


def test_without_lm_eval_the_command_to_install_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "lm_eval" else real(name))
    with pytest.raises(UserError) as caught:
        require_harness()
    assert caught.value.fix == "pip install 'forerun[eval]'"
