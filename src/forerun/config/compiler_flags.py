"""Rules for the names of compiler options in a job (`compiler_options`)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import Field

from forerun.errors import JobValueError

OptionValue = Annotated[bool | int | float | str | None, Field(union_mode="left_to_right")]

_NAME = re.compile(r"xla_[a-z0-9_]{2,120}")
# Options that a job must not set, each with the reason. A pattern is searched in the name.
_REFUSED = (
    (r"dump", "it writes files"),
    (r"_(file|files|path|dir|directory|folder)(_|$)|_data_dir|load_ptx|extra_flags", "it names files or programs"),
    (r"excess_precision|fast_m|approximate|stochastic|bf16|bfloat16|_fp8|_f8|reduced_precision", "it changes results"),
    (r"inject|ignore_errors|disable_hlo_passes|enable_hlo_passes|_for_testing|_test_only", "it is for compiler tests"),
)


def require_compiler_flags(options: Mapping[str, object]) -> None:
    """Raise unless all names are compiler flags that change only how fast a program runs."""
    for name in options:
        if not _NAME.fullmatch(name):
            raise JobValueError(
                "E-JOB-153",
                f"compiler_options: {name!r} is not the name of a compiler option",
                fix="write it as xla_..., without dashes",
            )
        for pattern, reason in _REFUSED:
            if re.search(pattern, name):
                raise JobValueError(
                    "E-JOB-154",
                    f"compiler_options.{name}: {reason}",
                    fix="remove it, or set it in the environment for one command",
                )
