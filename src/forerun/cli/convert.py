"""`forerun convert`: a job from a configuration of axolotl, TRL or the transformers Trainer."""

from __future__ import annotations

import sys
from typing import Annotated, Any

from forerun.cli.arguments import options_of
from forerun.verbs.job_files import convert as convert_file
from forerun.verbs.option_types import Value


@options_of("forerun.verbs.job_files:convert", omit=("path",))
def convert(file: Annotated[str, Value("FILE")], **options: Any) -> int:
    """Print the job on stdout, and what the user must know on stderr.

    Args:
      file: YAML file of axolotl or TRL, or TrainingArguments as JSON
    """
    converted = convert_file(file, **options)
    sys.stdout.write(converted.text)
    for assumption in converted.assumed:
        print(f"assumed: {assumption}", file=sys.stderr)
    for key, reason in converted.not_converted.items():
        print(f"not converted: {key}: {reason}", file=sys.stderr)
    print(
        f"converted from {converted.source}; {len(converted.not_converted)} keys not converted, "
        f"{len(converted.unneeded)} not needed (listed at the end of the job)",
        file=sys.stderr,
    )
    return 0
