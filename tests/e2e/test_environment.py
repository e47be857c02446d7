"""Commands in an environment that is unusual: an ASCII locale, an open umask, little memory, a full disk."""

from __future__ import annotations

import json
import stat
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from forerun.units import KIB, Bytes

JOB = """\
model: {layers: 1, embed: 32, heads: 2}
data: {path: chat.jsonl, chat_template: chatml, tokenizer: bytes, store: store}
sequence: 128
batch: 8
steps: 2
device: cpu
name: run
sample: {tokens: 8}
"""
ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONIOENCODING": ""}

Forerun = Callable[..., "subprocess.CompletedProcess[bytes]"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("environment")
    rows = [
        {"messages": [{"role": "user", "content": f"{n} + 1 é"}, {"role": "assistant", "content": f"\u2717 {n + 1}"}]}
        for n in range(60)
    ]
    (folder / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    (folder / "job.yaml").write_text(JOB, "utf-8")
    (folder / "blå.yaml").write_text(JOB.replace("store: store", "store: blå"), "utf-8")
    return folder


@pytest.fixture(scope="module")
def forerun(shell: dict[str, str], folder: Path) -> Forerun:
    """Run a command after shell commands such as `umask 000`, in the ASCII locale if `locale` says so."""

    def run(*words: str | bytes, before: str = ":", locale: bool = False) -> subprocess.CompletedProcess[bytes]:
        environment = {**shell, "JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(folder / "cache")}
        environment |= ASCII if locale else {}
        environment.pop("JAX_COMPILATION_CACHE_DIR", None)
        return subprocess.run(
            ["bash", "-c", f'{before} && exec forerun "$@"', "bash", *words],
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=600,
            check=False,
        )

    return run


@pytest.fixture(scope="module")
def trained(forerun: Forerun) -> dict[str, subprocess.CompletedProcess[bytes]]:
    """The output of commands that write everything a run has, with umask 000 and in the ASCII locale."""
    commands = {
        "data": ("data", "job.yaml", "--html", "page.html"),
        "train": ("train", "job.yaml"),
        "generate": ("generate", "runs/run", "\u2717é".encode(), "--max-tokens", "8"),
        "export": ("export", "runs/run", "--to", "model"),
        "init": ("init", "--recipe", "custom", "begun/job.yaml"),
        "schema": ("schema", "--output", "job.schema.json"),
    }
    return {name: forerun(*words, before="umask 000", locale=True) for name, words in commands.items()}


@pytest.mark.parametrize("command", ["data", "train", "generate", "export", "init", "schema"])
def test_every_command_prints_in_an_ascii_locale(
    command: str, trained: dict[str, subprocess.CompletedProcess[bytes]]
) -> None:
    ran = trained[command]
    assert ran.returncode == 0, ran.stderr.decode()
    ran.stdout.decode("ascii")
    ran.stderr.decode("ascii")


@pytest.mark.usefixtures("trained")
def test_files_are_utf_8_in_an_ascii_locale(folder: Path) -> None:
    assert "\u2717" in (folder / "page.html").read_text("utf-8")
    assert json.loads((folder / "job.schema.json").read_text("utf-8"))


def test_a_file_name_that_an_ascii_locale_cannot_represent_is_no_bug(forerun: Forerun) -> None:
    """The store is a new folder, so that its name is needed and cannot be reported as missing."""
    ran = forerun("data", "blå.yaml".encode(), locale=True)
    assert ran.returncode == 2, ran.stderr.decode()
    assert "LC_ALL" in ran.stderr.decode("ascii")


@pytest.mark.usefixtures("trained")
def test_umask_000_makes_nothing_writable_for_others(folder: Path) -> None:
    made = ["cache", "store", "runs", "model", "begun", "page.html", "job.schema.json"]
    paths = [path for name in made for path in (folder / name, *(folder / name).rglob("*"))]
    assert len(paths) > 30
    modes = {str(path.relative_to(folder)): stat.S_IMODE(path.lstat().st_mode) for path in paths}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o022} == {}
    private = [mode for name, mode in modes.items() if Path(name).name == "compiled"]
    assert private == [0o700]


@pytest.mark.parametrize(("umask", "folder_mode", "file_mode"), [("077", 0o700, 0o600), ("002", 0o775, 0o664)])
def test_other_umasks_are_kept(forerun: Forerun, folder: Path, umask: str, folder_mode: int, file_mode: int) -> None:
    assert forerun("init", "--recipe", "sft", f"{umask}/job.yaml", before=f"umask {umask}").returncode == 0
    assert stat.S_IMODE((folder / umask).stat().st_mode) == folder_mode
    assert stat.S_IMODE((folder / umask / "job.yaml").stat().st_mode) == file_mode


@pytest.mark.parametrize(
    ("words", "limit_kib"),
    [
        (("check", "job.yaml"), 300_000),
        (("data", "job.yaml"), 300_000),
        (("train", "job.yaml"), 300_000),
        (("train", "job.yaml"), 1_000_000),
        (("train", "job.yaml", "--supervise"), 1_000_000),
        (("generate", "runs/run", "a"), 1_000_000),
    ],
)
def test_a_low_memory_limit_is_reported(forerun: Forerun, words: tuple[str, ...], limit_kib: int) -> None:
    ran = forerun(*words, before=f"ulimit -v {limit_kib}")
    said = ran.stderr.decode()
    assert ran.returncode == 2, said
    assert str(Bytes(limit_kib * KIB)) in said
    assert "bug" not in said
    assert "ulimit -v" in said


@pytest.mark.aot
def test_a_memory_limit_below_what_the_tpu_compiler_needs_is_reported(forerun: Forerun) -> None:
    ran = forerun("plan", "job.yaml", "--on", "v5e-1", before="ulimit -v 1000000")
    said = ran.stderr.decode()
    assert ran.returncode == 2, said
    assert "ulimit -v" in said


@pytest.mark.usefixtures("trained")
def test_a_disk_that_fills_up_keeps_the_page_of_before(forerun: Forerun, folder: Path) -> None:
    """A limit of the file size fails in the middle of a write, as a full disk does."""
    blocks = (folder / "page.html").stat().st_size // (2 * KIB)
    (folder / "second.html").write_text("before", "utf-8")
    before = {path.name for path in folder.iterdir()}
    ran = forerun("data", "job.yaml", "--html", "second.html", before=f"ulimit -f {blocks}")
    said = ran.stderr.decode()
    assert ran.returncode == 74, said
    assert "second.html" in said
    assert {path.name for path in folder.iterdir()} == before
    assert (folder / "second.html").read_text("utf-8") == "before"
