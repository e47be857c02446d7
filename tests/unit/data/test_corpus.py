from __future__ import annotations

from pathlib import Path

from forerun.config.schema import Data
from forerun.data.corpus import counts, open_text
from forerun.data.tokenizer import load_tokenizer


def test_a_folder_becomes_rows_whose_tokens_read_as_the_text(tmp_path: Path) -> None:
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first")
    tokenizer = load_tokenizer("bytes")
    rows = open_text(Data(path=str(tmp_path)), sequence=5, tokenizer=tokenizer, cache=tmp_path / ".cache")
    assert tokenizer.decode(rows.take(range(len(rows)))["tokens"][:, :].ravel()[:13]) == "firstsecond"
    assert counts(rows) == "2 documents  13 tokens  3 rows of 5  13.3% padding"
