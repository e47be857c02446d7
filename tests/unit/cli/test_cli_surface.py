"""The words of the command line are a promise: a new or a lost one is a conscious change of this list."""

from __future__ import annotations

import pytest

from forerun.cli.commands import COMMANDS, GLOBAL_OPTIONS, parser_of

ANSWER = "--revision --code --max-tokens --temperature --top-k --top-p --stop --seed --device --devices --mesh --dtype"
SURFACE = {
    "init": "FILE --recipe --model --data",
    "convert": "FILE --devices --model --data",
    "check": "JOB KEY=VALUE --stage --on --all",
    "data": "JOB KEY=VALUE --stage --samples --full --html --shard --ray --verify --ledger",
    "tokenizer": "ACTION TEXTS --to --vocab --end --special --chat-template --split --normalize --compare",
    "plan": "JOB KEY=VALUE --stage --on --zone --provider --prices --max-usd --json --html --trace --calibrate"
    " --no-cache --search --search-all --goal --max-hours --out",
    "cache": "JOB KEY=VALUE --stage --on --zone --provider --prices",
    "train": "JOB KEY=VALUE --stage --fresh --take-over --profile --supervise --host --leader --secret",
    "profile": "JOB KEY=VALUE --stage --steps --warmup --to",
    "sweep": "JOB KEY=V1,V2 --parallel --stop-on-failure --dry-run",
    "report": "LOCATION --html",
    "compare": "LOCATION --html",
    "export": "RUN --to --dtype --step --stage --merge --dense --gguf --push --public --overwrite --code",
    "generate": f"SOURCE PROMPT --batch --out --rows {ANSWER}",
    "chat": f"SOURCE --system {ANSWER}",
    "eval": "SOURCE --revision --code --data --tasks --limit --chat --context --batch --device --devices --dtype"
    " --json",
    "watch": "LOCATION --once --web --port",
    "runs": "LOCATION --json",
    "run": "JOB KEY=VALUE --on --or --goal --spot --flex-start --reservation --max-usd --zones --project --bucket"
    " --keeper --no-wait --wait-seconds --prices --usd-per-hour --provider --disk-gib --image --network --subnetwork"
    " --service-account --internal-ips --tunnel-through-iap --no-export --yes --dry-run --list-files"
    " --print-startup",
    "ps": "--project --all --json",
    "logs": "NAME --host --attempt --no-follow --project",
    "stop": "NAME --no-wait --project",
    "down": "NAME --all --yes --project",
    "fetch": "NAME --to --project",
    "manifest": "JOB KEY=VALUE --on --for --to --spot --queue --image --nodes --gpus --hours",
    "doctor": "KEY=VALUE --smoke --cloud --project --on --zones --spot --disk-gib",
    "hardware": "TABLE --prices --zone --provider",
    "explain": "CODE",
    "schema": "--output",
}
EVERYWHERE = {"-h", "--help", "--debug"}


def test_the_commands_are_frozen() -> None:
    assert list(COMMANDS) == list(SURFACE)
    assert list(GLOBAL_OPTIONS) == ["--help", "--version", "--debug"]


@pytest.mark.parametrize("name", SURFACE)
def test_the_words_of_a_command_are_frozen(name: str) -> None:
    found: set[str] = set()
    for action in parser_of(name)._actions:
        found.update(action.option_strings or [str(action.metavar)])
    assert found == {*SURFACE[name].split(), *EVERYWHERE}


@pytest.mark.parametrize("name", SURFACE)
def test_every_word_has_help_and_every_example_is_understood(name: str) -> None:
    parser = parser_of(name)
    assert all(action.help for action in parser._actions)
    program, command, *rest = COMMANDS[name].example.split()
    assert (program, command) == ("forerun", name)
    parser.read(rest)


def test_options_stand_where_they_like() -> None:
    for text in (
        "job.yaml a=1 b=2 --on v6e-1,v5e-8 --json",
        "--on v6e-1,v5e-8 --json job.yaml a=1 b=2",
        "job.yaml --json a=1 --on v6e-1,v5e-8 b=2",
        "--json job.yaml a=1 b=2 --on=v6e-1,v5e-8",
    ):
        args = parser_of("plan").read(text.split())
        assert (args.job, args.overrides, args.on, args.json) == (
            "job.yaml",
            ["a=1", "b=2"],
            ["v6e-1", "v5e-8"],
            True,
        )
    assert parser_of("train").read(["job.yaml"]).overrides == []
