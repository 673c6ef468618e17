"""The checkpoint folder: complete, seeded, all or nothing, loadable by name."""

import json
import re
import subprocess
import sys

import pytest
from safetensors import safe_open

from inkling_mtp_staging.tiny_inkling import Recipe, Shape
from inkling_mtp_staging.tiny_inkling.__main__ import main
from inkling_mtp_staging.tiny_inkling.checkpoint import write_checkpoint

SMALL = ["--hidden", "512", "--vocab", "448", "--mtp-heads", "3"]


def tensors_of(folder):
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    out = {}
    for name, file in index["weight_map"].items():
        with safe_open(folder / file, "pt") as shard:
            out[name] = shard.get_tensor(name)
    return index, out


def test_same_arguments_give_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        assert main([str(tmp_path / name), *SMALL]) == 0
    a, b = tmp_path / "a", tmp_path / "b"
    assert sorted(f.name for f in a.iterdir()) == sorted(f.name for f in b.iterdir())
    for file in a.iterdir():
        assert file.read_bytes() == (b / file.name).read_bytes(), file.name


def test_another_seed_gives_other_answers(tmp_path):
    answers = []
    for seed in (1, 2):
        folder = tmp_path / str(seed)
        assert main([str(folder), *SMALL, "--seed", str(seed)]) == 0
        recipe = Recipe.load(folder)
        assert recipe.seed == seed
        answers.append(recipe.election().answer([1, 2, 3], 20))
    assert answers[0] != answers[1]


def test_shards_and_index_agree(tmp_path, monkeypatch):
    from inkling_mtp_staging.tiny_inkling import checkpoint

    monkeypatch.setattr(checkpoint, "SHARD_BYTES", 8 << 20)
    shape = Shape(hidden_size=512, vocab_size=448, num_mtp_heads=1)
    total = write_checkpoint(tmp_path / "m", Recipe(shape))
    index, tensors = tensors_of(tmp_path / "m")
    assert len(set(index["weight_map"].values())) > 2
    assert total == sum(t.nbytes for t in tensors.values())
    assert index["metadata"]["total_size"] == total


def test_every_name_is_one_that_sglangs_loader_maps(tmp_path):
    """Each name must reach a parameter: compare with the loader's own tables."""
    inkling = pytest.importorskip("sglang.srt.models.inkling")
    shape = Shape(hidden_size=512, vocab_size=448, num_mtp_heads=1)
    write_checkpoint(tmp_path / "m", Recipe(shape))
    _, tensors = tensors_of(tmp_path / "m")
    shards = {name for _, name, _ in inkling.ATTENTION_PARAMS_MAPPING}
    seen = {
        m[1] for n in tensors if (m := re.search(r"\.attn\.(w[qkvr]_d[uv])\.weight", n))
    }
    assert seen == shards


def test_refuses_a_folder_with_something_in_it(tmp_path, capsys):
    (tmp_path / "precious").write_text("mine")
    assert main([str(tmp_path), *SMALL]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert [f.name for f in tmp_path.iterdir()] == ["precious"]


def test_a_failure_leaves_nothing(tmp_path, monkeypatch, capsys):
    from inkling_mtp_staging.tiny_inkling import checkpoint

    def full_disk(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "write_tokenizer", full_disk)
    assert main([str(tmp_path / "m"), *SMALL]) == 2
    assert "No space left" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments, said",
    [
        (["--hidden", "1000"], "multiple of 128"),
        (["--hidden", "1152"], "multiple of 512"),
        (["--layers", "3"], "at least 4"),
        (["--vocab", "1000"], "multiple of 64"),
        (["--window", "100"], "multiple of 128"),
        (["--window", "0"], "positive multiple of 128"),
        (["--mtp-local", "9"], "depths 0 to 7"),
        (["--mtp-heads", "2"], "3 draft steps need as many MTP heads"),
        (["--accept-length", "4.5"], "choose between"),
        (["--vocab", "6400000"], "vocabulary"),
    ],
)
def test_an_argument_that_does_not_fit_is_one_line(tmp_path, capsys, arguments, said):
    assert main([str(tmp_path / "m"), *arguments]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_runs_as_a_module(tmp_path):
    command = [sys.executable, "-m", "inkling_mtp_staging.tiny_inkling"]
    ended = subprocess.run(
        [*command, str(tmp_path / "m"), *SMALL], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    assert "draft steps should accept 2.56" in ended.stdout


def test_any_text_encodes_and_answers_print(tmp_path):
    transformers = pytest.importorskip("transformers")
    assert main([str(tmp_path / "m"), *SMALL]) == 0
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path / "m")
    text = "Once upon a time, \u00e9t\u00e9 \u4f60\u597d baka!\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    recipe = Recipe.load(tmp_path / "m")
    answer = recipe.election().answer(tokenizer.encode(text), 50)
    assert re.fullmatch(r"( [a-z]+){50}", tokenizer.decode(answer))
