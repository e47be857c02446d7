import io
import os
import socket
from pathlib import Path

import pytest

from forerun.cloud.setup import job_files as job_files_module
from forerun.cloud.setup.bundle import Bundle
from forerun.cloud.setup.job_files import job_files
from forerun.errors import UserError

JOB = "model: {layers: 1, embed: 16, heads: 1}\nsteps: 1\ndata: {path: PATH}\n"
PRIVATE = (
    *(".env", ".env.local", "prod.env", ".netrc", ".hidden.txt", ".aws/credentials", ".ssh/config", ".git/config"),
    *("id_rsa", "id_ed25519.pub", "server.pem", "TLS.KEY", "credentials.json", "my-Service-Account-1.json"),
    *("keys/me_accessKeys.csv", "token", "secrets/all.txt", "secrets.yaml", "__pycache__/x.pyc", "a.kdbx"),
)


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "job"
    write(folder / "text/a.txt")
    return folder


def write(file: Path, content: str = "x") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(content)
    return file


def listed(folder: Path, path: str) -> tuple[dict[str, Path], set[str]]:
    local = job_files(JOB.replace("PATH", path), folder, (), "/j")
    return {file.name: file.source for file in local.files}, {file.name for file in local.skipped}


def code(folder: Path, path: str) -> str:
    with pytest.raises(UserError) as error:
        job_files(JOB.replace("PATH", path), folder, (), "/j")
    return error.value.code


def test_private_files_below_a_data_folder_are_skipped_and_reported(folder):
    for name in PRIVATE:
        write(folder / "text" / name)
    public = ("b.jsonl", "deep/tokenizer.json", "special_tokens_map.json", "added_tokens.json", "keyboard.txt")
    for name in public:
        write(folder / "text" / name)
    files, skipped = listed(folder, "text")
    assert set(files) == {f"text/{name}" for name in ("a.txt", *public)}
    whole_folders = (".aws", ".ssh", ".git", "secrets", "__pycache__")
    expected = {name if name.split("/")[0] not in whole_folders else name.split("/")[0] for name in PRIVATE}
    assert skipped == {f"text/{name}" for name in expected}


def test_private_files_that_match_a_pattern_are_skipped(folder):
    for name in (".env", "id_rsa", ".aws/credentials"):
        write(folder / "text" / name)
    assert listed(folder, '"text/*"') == ({"text/a.txt": folder / "text/a.txt"}, {"text/id_rsa"})
    assert code(folder, '"text/.*"') == "E-CLOUD-107"  # the pattern matches .env only


def test_the_model_folder_has_the_same_rules(folder):
    for name in ("config.json", "model.safetensors", ".env", "id_rsa"):
        write(folder / "model" / name)
    local = job_files("model: ./model\ndata: gs://b/x\nsteps: 1\n", folder, (), "/j")
    assert [file.name for file in local.files] == ["model/config.json", "model/model.safetensors"]
    assert [file.name for file in local.skipped] == ["model/.env", "model/id_rsa"]


@pytest.mark.parametrize("name", [".env", "id_rsa", ".netrc", "text/.x.jsonl", "server.pem", ".aws/data.txt", ".ssh"])
def test_a_private_path_that_the_job_names_is_an_error(folder, name):
    write(folder / name / "config" if name == ".ssh" else folder / name)
    assert code(folder, name) == "E-CLOUD-105"


def test_a_private_path_of_another_folder_is_an_error(folder, tmp_path):
    write(tmp_path / "home/.aws/config.txt")
    assert code(folder, str(tmp_path / "home/.aws")) == "E-CLOUD-105"
    (tmp_path / "innocent").symlink_to(tmp_path / "home/.aws")
    assert code(folder, str(tmp_path / "innocent")) == "E-CLOUD-105"
    (tmp_path / "data.txt").symlink_to(write(tmp_path / "home/.netrc"))
    assert code(folder, str(tmp_path / "data.txt")) == "E-CLOUD-105"


def test_a_job_in_a_hidden_folder_keeps_its_files(tmp_path):
    write(tmp_path / ".config/job/text/a.txt")
    files, _ = listed(tmp_path / ".config/job", "text")
    assert set(files) == {"text/a.txt"}


@pytest.mark.parametrize("path", ["text", '"text/*"', '"text/**"', '"text/**/*.txt"', "text/link.txt"])
def test_a_linked_file_that_leaves_the_folder_is_an_error(folder, tmp_path, path):
    (folder / "text/link.txt").symlink_to(write(tmp_path / "outside.txt"))
    assert code(folder, path) == "E-CLOUD-106"


@pytest.mark.parametrize("path", ["text", '"text/*"', '"text/**"', '"text/link/*.txt"', "text/link"])
def test_a_linked_folder_that_leaves_the_folder_is_an_error(folder, tmp_path, path):
    write(tmp_path / "outside/b.txt")
    (folder / "text/link").symlink_to(tmp_path / "outside")
    assert code(folder, path) == "E-CLOUD-106"


def test_a_link_to_the_next_folder_is_not_a_prefix_of_it(folder):
    write(folder / "text2/b.txt")
    (folder / "text/b.txt").symlink_to(folder / "text2/b.txt")
    assert code(folder, "text") == "E-CLOUD-106"


def test_links_inside_of_the_folder_travel_as_files(folder):
    (folder / "text/b.txt").symlink_to("a.txt")
    write(folder / "text/v1/c.txt")
    (folder / "text/latest").symlink_to("v1")
    (folder / "text/loop").symlink_to(".")
    (folder / "text/broken").symlink_to("nothing")
    (folder / "text/d.txt").symlink_to(write(folder / "text/.env"))
    files, skipped = listed(folder, "text")
    source = folder / "text/a.txt"
    assert files == {"text/a.txt": source, "text/b.txt": source, "text/v1/c.txt": folder / "text/v1/c.txt"}
    assert skipped == {f"text/{name}" for name in (".env", "broken", "d.txt", "latest", "loop")}
    files, _ = listed(folder, '"text/latest/*.txt"')
    assert files == {"text/latest/c.txt": folder / "text/v1/c.txt"}


def test_a_job_folder_behind_a_link_is_no_link_that_leaves(folder, tmp_path):
    (tmp_path / "alias").symlink_to(folder)
    files, _ = listed(tmp_path / "alias", "text")
    assert files == {"text/a.txt": folder / "text/a.txt"}


def test_a_pattern_does_not_enter_folders(folder):
    write(folder / "text/deep/b.txt")
    files, _ = listed(folder, '"text/*"')
    assert set(files) == {"text/a.txt"}  # what `forerun data` reads for this pattern on this machine


def test_pipes_and_sockets_do_not_travel(folder, tmp_path, monkeypatch):
    os.mkfifo(folder / "text/pipe")
    monkeypatch.chdir(folder / "text")  # the path of a socket has at most 108 bytes
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("socket")
        files, skipped = listed(folder, "text")
        assert (set(files), skipped) == ({"text/a.txt"}, {"text/pipe", "text/socket"})
        assert code(folder, "text/pipe") == "E-CLOUD-107"
        assert code(folder, '"text/p*"') == "E-CLOUD-107"
    assert code(folder, "/dev/null") == "E-CLOUD-107"


def test_a_folder_from_which_nothing_travels_is_an_error(folder):
    write(folder / "private/.env")
    (folder / "empty").mkdir()
    assert [code(folder, name) for name in ("private", "empty")] == ["E-CLOUD-107"] * 2


def test_the_ignore_file_has_the_rules_of_git(folder, tmp_path):
    for name in ("text/b.bak", "text/keep.bak", "text/cache/x.txt", "text/deep/cache/y.txt", "far.txt"):
        write(folder / name)
    (folder / "text/out.bak").symlink_to(tmp_path)  # an ignored link is no error
    write(folder / ".forerunignore", "# comment\n*.bak\n!keep.bak\n/text/cache/\nfar.txt\n")
    files, skipped = listed(folder, "text")
    assert set(files) == {"text/a.txt", "text/deep/cache/y.txt", "text/keep.bak"}
    assert skipped == {"text/b.bak", "text/cache", "text/out.bak"}
    assert code(folder, "far.txt") == "E-CLOUD-105"
    write(tmp_path / "other/c.txt")
    write(tmp_path / "other/far.txt")
    files, _ = listed(folder, str(tmp_path / "other"))  # the ignore file is that of the named folder
    assert set(files) == {"files/0/other/c.txt", "files/0/other/far.txt"}
    write(tmp_path / "other/.forerunignore", "c.*\n")
    files, _ = listed(folder, str(tmp_path / "other"))
    assert set(files) == {"files/0/other/far.txt"}


@pytest.mark.parametrize("content", [b"\xff\xfe", b"a\n!\n", None])
def test_an_ignore_file_that_cannot_be_read_is_an_error(folder, content):
    if content is None:
        os.mkfifo(folder / ".forerunignore")
    else:
        (folder / ".forerunignore").write_bytes(content)
    assert code(folder, "text") in ("E-CLOUD-108", "E-SYSTEM-003")


def test_modules_obey_the_rules(folder, tmp_path):
    for name in ("net.py", "lib/__init__.py", ".venv/x.py", "runs/1/x.py", "secrets.py", "skip/x.py", "lib/data.txt"):
        write(folder / name)
    write(folder / ".forerunignore", "skip/\n")
    write(tmp_path / "elsewhere/a.txt")
    (folder / "linked_data").symlink_to(tmp_path / "elsewhere")
    text = "model: net:Net\ndata: gs://b/x\n"
    local = job_files(text, folder, (), "/j")
    assert [file.name for file in local.files] == ["lib/__init__.py", "net.py"]
    assert [file.name for file in local.skipped] == ["secrets.py"]
    write(tmp_path / "elsewhere/__init__.py")
    with pytest.raises(UserError) as error:
        job_files(text, folder, (), "/j")
    assert error.value.code == "E-CLOUD-106"


def test_the_bytes_of_files_that_travel_are_limited(folder, monkeypatch):
    write(folder / "text/.large", "x" * 10)
    monkeypatch.setattr(job_files_module, "MOST_BYTES", 5)
    assert set(listed(folder, "text")[0]) == {"text/a.txt"}
    write(folder / "text/b.txt", "x" * 5)
    assert code(folder, "text") == "E-CLOUD-033"


@pytest.mark.parametrize("change", ["link", "pipe", "deletion"])
def test_a_file_that_changes_after_the_list_is_not_sent(folder, tmp_path, change):
    files, _ = listed(folder, "text")
    bundle = Bundle(files)
    source = folder / "text/a.txt"
    source.unlink()
    if change == "link":
        source.symlink_to(write(tmp_path / "private", "private content"))
    elif change == "pipe":
        os.mkfifo(source)
    stream = io.BytesIO()
    with pytest.raises(UserError) as error:
        bundle.write(stream)
    assert error.value.code in ("E-CLOUD-109", "E-SYSTEM-003")
    assert b"private content" not in stream.getvalue()
