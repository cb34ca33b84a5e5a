"""Hugging Face folders: stock transformers reads what nafi writes, and no file chooses code."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    DistilBertConfig,
    DistilBertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

import nafi
from nafi.checkpoints import read, save_changed
from nafi.errors import CheckpointError, InputError
from nafi.fusion.held_out import held_out
from nafi.graph import permute, random_permutations, rebuild
from nafi.huggingface import is_filled_up, make_inputs, width_fields
from tests.test_cli import run, started

LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4}
WORDS = {"vocab_size": 37, "max_position_embeddings": 12}
SIZES = {"hidden_size": 16, "intermediate_size": 24, "initializer_range": 0.3}
TOKENS = {"bos_token_id": 1, "eos_token_id": 2}


def bert() -> nn.Module:
    return BertForSequenceClassification(BertConfig(**LAYERS, **WORDS, **SIZES, num_labels=3))


def gpt2() -> nn.Module:
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 4, "n_positions": 12, "initializer_range": 0.3}
    return GPT2LMHeadModel(GPT2Config(vocab_size=37, **sizes, **TOKENS))


def distilbert() -> nn.Module:
    sizes = {"dim": 16, "hidden_dim": 24, "n_layers": 2, "n_heads": 4, "initializer_range": 0.3}
    return DistilBertForMaskedLM(DistilBertConfig(**sizes, **WORDS))


def vit() -> nn.Module:
    images = {"image_size": 8, "patch_size": 4, "num_labels": 3}
    return ViTForImageClassification(ViTConfig(**LAYERS, **SIZES, **images))


def llama() -> nn.Module:
    one_layer = {**LAYERS, "num_hidden_layers": 1, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**one_layer, **WORDS, **SIZES, **TOKENS))


# Each network with the class that users read it by, and the field for the width of a layer.
NETWORKS: dict[Callable[[], nn.Module], tuple[Any, str, int]] = {
    bert: (AutoModelForSequenceClassification, "intermediate_size", 24),
    gpt2: (AutoModelForCausalLM, "n_inner", 64),
    distilbert: (AutoModelForMaskedLM, "hidden_dim", 24),
    vit: (AutoModelForImageClassification, "intermediate_size", 24),
    llama: (AutoModelForCausalLM, "intermediate_size", 24),
}
every_network = pytest.mark.parametrize("make", NETWORKS, ids=lambda make: make.__name__)


def seeded(make: Callable[[], Any], seed: int) -> Any:
    torch.manual_seed(seed)
    return make().eval()


def write(model: Any, folder: Path, **options: Any) -> Path:
    model.save_pretrained(folder, **options)
    (folder / "tokenizer.json").write_text('{"words": ["a", "b"]}')
    return folder


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**make_inputs(model)).logits


def difference(one: Any, two: Any) -> float:
    expected = logits(two)
    return float((logits(one) - expected).abs().max() / expected.abs().max())


def fuse(folder: Path, *arguments: str) -> str:
    """`nafi fuse` in this process, which has transformers already; what it tells on the way."""
    done = run("fuse", *arguments, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stderr


def refusal(folder: Path, *arguments: str) -> str:
    done = run("fuse", *arguments, cwd=folder)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    return done.stderr


@every_network
def test_three_folders_become_one_that_transformers_reads(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    auto, field, width = NETWORKS[make]
    for seed, name in enumerate("abc"):
        write(seeded(make, seed), tmp_path / name)
    fuse(tmp_path, "a", "b", "c", "--out", "fused", "--max-width", "1x")
    stock = auto.from_pretrained(tmp_path / "fused")
    assert type(stock) is type(make())
    assert difference(nafi.load(tmp_path / "fused"), stock) == 0
    assert difference(stock, seeded(make, 0)) > 0.1
    assert "filled up" not in (tmp_path / "fused" / "README.md").read_text()
    assert stock.num_parameters() == make().num_parameters()
    copied = (tmp_path / "fused" / "tokenizer.json").read_text()
    assert copied == (tmp_path / "a" / "tokenizer.json").read_text()
    # In the default widths, those grow that the configuration can say, in all layers alike.
    told = fuse(tmp_path, "a", "b", "c", "--out", "wide")
    assert f"config.json has fields for {field}; all other widths stay as they are" in told
    stock = auto.from_pretrained(tmp_path / "wide")
    assert getattr(stock.config, field) > width
    assert difference(nafi.load(tmp_path / "wide"), stock) == 0


@every_network
def test_permuted_copies_of_a_folder_give_the_original(
    make: Callable[[], Any], tmp_path: Path
) -> None:
    model = seeded(make, 0)
    spec = nafi.groups(model, make_inputs(model))
    for seed, name in enumerate("abc"):
        orders = random_permutations(spec, torch.Generator().manual_seed(seed))
        write(permute(model, spec, orders), tmp_path / name)
    assert difference(nafi.load(tmp_path / "a"), model) < 1e-4
    fuse(tmp_path, "a", "b", "c", "--out", "fused", "--max-width", "1x")
    stock = NETWORKS[make][0].from_pretrained(tmp_path / "fused")
    assert difference(stock, model) < 1e-4


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two BERTs, a and b."""
    folder = tmp_path_factory.mktemp("berts")
    for seed, name in enumerate("ab"):
        write(seeded(bert, seed), folder / name)
    return folder


@pytest.fixture
def copied(folders: Path, tmp_path: Path) -> Path:
    """The same to change."""
    return Path(shutil.copytree(folders, tmp_path / "copied"))


def change(folder: Path, **values: Any) -> None:
    """Other values in config.json; None takes one out."""
    config = json.loads((folder / "config.json").read_text()) | values
    kept = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(kept))


def test_weights_in_several_files_are_read(folders: Path, tmp_path: Path) -> None:
    model = nafi.load(folders / "a")
    model.save_pretrained(tmp_path / "shards", max_shard_size="5KB")
    assert len(list((tmp_path / "shards").glob("model-*.safetensors"))) > 2
    assert difference(nafi.load(tmp_path / "shards"), model) == 0
    assert read(tmp_path / "shards")[0].keys() == read(folders / "a")[0].keys()


def test_weights_of_torch_save_are_read_if_they_are_tensors(copied: Path) -> None:
    before = nafi.load(copied / "a")
    file = copied / "a/model.safetensors"
    torch.save(load_file(file), copied / "a/pytorch_model.bin")
    file.unlink()
    assert difference(nafi.load(copied / "a"), before) == 0
    torch.save(before, copied / "a/pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin cannot be read with"):
        nafi.load(copied / "a")


@pytest.mark.parametrize("name", ["../b/model.safetensors", "/etc/passwd", "..", "a.bin", 3])
def test_an_index_names_files_of_its_folder_only(copied: Path, name: Any) -> None:
    (copied / "a/model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"bert.pooler.dense.bias": name}}
    (copied / "a/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json: found .*, expected"):
        nafi.load(copied / "a")


def test_an_index_that_is_not_of_its_files_is_refused(copied: Path) -> None:
    (copied / "a/model.safetensors").rename(copied / "a/one.safetensors")
    index = {"weight_map": {"bert.pooler.dense.bias": "one.safetensors"}}
    (copied / "a/model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"one\.safetensors has .* unlike what"):
        nafi.load(copied / "a")


CODE = "open('sprung', 'w').close()"


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"model_type": "mine"}, "no model type 'mine'. The folder brings code of its own"),
        ({"architectures": ["Mine"]}, "no class 'Mine' for bert. The folder brings code"),
        ({"model_type": None, "auto_map": None}, "no model type none, and other code is never run"),
        ({"architectures": None}, "lacks architectures"),
        ({"architectures": ["GPT2LMHeadModel"]}, "no class 'GPT2LMHeadModel' for bert"),
        ({"architectures": ["logger"]}, "no class 'logger' for bert"),
        ({"quantization_config": {"load_in_4bit": True}}, "is quantised"),
        ({"num_hidden_layers": 10**6}, "far more than its weights"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, expected at most"),
        ({"num_labels": 10**6}, "num_labels is 1000000, expected at most 65536"),
        ({"num_hidden_layers": 3}, "the weights lack bert.encoder.layer.2"),
        ({"intermediate_size": 32}, "has another shape than config.json says"),
        ({"vocab_size": 10**6}, "describes 16,"),
        ({"hidden_act": "exec"}, "its network cannot be made"),
        ({"num_attention_heads": 5}, "its network cannot be made"),
    ],
)
def test_no_configuration_chooses_code(
    copied: Path, values: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Folders with code of their own: it is not run, whatever config.json says."""
    monkeypatch.chdir(copied)
    for name in ("modeling_mine", "configuration_mine"):
        (copied / "a" / f"{name}.py").write_text(CODE)
    names = {"AutoConfig": "configuration_mine.C", "AutoModel": "modeling_mine.M"}
    change(copied / "a", **{"auto_map": names, **values})
    with pytest.raises(CheckpointError) as refused:
        nafi.load(copied / "a")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)
    assert not (copied / "sprung").exists()
    assert "modeling_mine" not in sys.modules


def test_own_classes_are_used_where_a_folder_names_others(copied: Path) -> None:
    """And no other implementation of attention, which would come from the hub."""
    before = nafi.load(copied / "a")
    names = {"AutoModelForSequenceClassification": "modeling_mine.Mine"}
    change(copied / "a", auto_map=names, attn_implementation="someone/attention")
    model = nafi.load(copied / "a")
    assert type(model) is BertForSequenceClassification
    assert model.config._attn_implementation == "sdpa"
    assert difference(model, before) == 0


def test_tensors_without_a_place_are_told_of(copied: Path) -> None:
    state = load_file(copied / "a/model.safetensors")
    state["cls.seq_relationship.bias"] = torch.zeros(2)
    save_file(state, copied / "a/model.safetensors", metadata={"format": "pt"})
    with pytest.warns(UserWarning, match=r"no place for cls\.seq_relationship\.bias"):
        nafi.load(copied / "a")
    (copied / "a/model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"lacks model\.safetensors and"):
        nafi.load(copied / "a")
    (copied / "a/adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds an adapter"):
        nafi.load(copied / "a")


def test_networks_go_to_folders_and_files_in_python(folders: Path, tmp_path: Path) -> None:
    models = [nafi.load(folders / name) for name in "ab"]
    inputs = make_inputs(models[0])
    result = nafi.fuse(models, inputs)
    with pytest.raises(InputError, match=r"no field for .*pooler\.dense \(17, was 16"):
        nafi.save(result, tmp_path / "fused")
    assert not list(tmp_path.iterdir())
    nafi.save(result, tmp_path / "fused.safetensors")  # which holds the configuration
    loaded = nafi.load(tmp_path / "fused.safetensors")
    assert difference(loaded, result.model) == 0
    fitting = nafi.fuse(models, inputs, max_width=1.0)
    nafi.save(fitting, tmp_path / "fused", files_from=folders / "a")
    assert difference(nafi.load(tmp_path / "fused"), fitting.model) == 0
    assert (tmp_path / "fused/tokenizer.json").exists()
    # Files and folders may be fused with each other.
    fuse(tmp_path, "fused.safetensors", "fused", "--out", "again.safetensors")
    again = nafi.load(tmp_path / "again.safetensors")
    assert sum(p.numel() for p in again.parameters()) >= sum(p.numel() for p in loaded.parameters())


def test_a_network_that_returns_more_than_a_tensor_is_distilled() -> None:
    models = [seeded(distilbert, seed) for seed in range(2)]
    words = torch.randint(37, (16, 6), generator=torch.Generator().manual_seed(0))
    inputs = {"input_ids": words}
    result = nafi.fuse(models, inputs, max_width=1.0, probe=inputs, distill=20)
    held = words[held_out(torch.arange(len(words)))]
    with torch.no_grad():
        mean = sum(model(held).logits for model in models) / 2
        error = (result.model(held).logits - mean).square().mean()
    told = result.diagnostics["distilled"]
    assert told["after"] == pytest.approx(float(error), rel=1e-4)
    assert told["after"] <= told["before"]


def test_layers_of_one_field_become_equally_wide_without_a_change(tmp_path: Path) -> None:
    model = seeded(bert, 0)
    inputs = make_inputs(model)
    spec = nafi.groups(model, inputs)
    (field,) = width_fields(model, spec)
    assert field.name == "intermediate_size"
    assert len(field.groups) == 2
    wider = rebuild(model, spec, {field.groups[0]: 27, field.groups[1]: 31})
    nafi.save(wider, tmp_path / "wider")
    stock = AutoModelForSequenceClassification.from_pretrained(tmp_path / "wider")
    assert stock.config.intermediate_size == 31
    assert difference(stock, model) < 1e-5
    assert is_filled_up(wider, nafi.groups(wider, inputs))
    alike = rebuild(model, spec, dict.fromkeys(field.groups, 27))
    for network in (model, alike):
        assert not is_filled_up(network, nafi.groups(network, inputs))


def test_precision_and_shared_tensors_stay_as_transformers_writes_them(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        write(seeded(gpt2, seed).to(torch.bfloat16), tmp_path / name)
    fuse(tmp_path, "a", "b", "--out", "fused", "--max-width", "1x")
    tensors = load_file(tmp_path / "fused/model.safetensors")
    assert tensors.keys() == load_file(tmp_path / "a/model.safetensors").keys()
    assert "lm_head.weight" not in tensors
    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    stock = AutoModelForCausalLM.from_pretrained(tmp_path / "fused")
    assert stock.lm_head.weight is stock.transformer.wte.weight
    assert stock.dtype == torch.bfloat16


def test_what_no_configuration_says_is_not_written(folders: Path, tmp_path: Path) -> None:
    model = nafi.load(folders / "a")
    nafi.save(model, tmp_path / "kept")
    model.bert.encoder.layer[0].attention.self.scaling = 9.0  # in no file
    with pytest.raises(CheckpointError, match=r"kept is not written: .* outputs differ by"):
        nafi.save(model, tmp_path / "kept", overwrite=True)
    assert difference(nafi.load(tmp_path / "kept"), nafi.load(folders / "a")) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["kept"]


def test_other_weights_for_the_network_of_a_folder(tmp_path: Path) -> None:
    """As `nafi head` writes them; shared tensors are in the folder once."""
    write(seeded(gpt2, 0), tmp_path / "a")
    other = seeded(gpt2, 1)
    for name in ("b", "b.safetensors"):
        save_changed(tmp_path / "a", other, tmp_path / name)
        assert difference(nafi.load(tmp_path / name), other) == 0


def test_a_folder_is_replaced_whole_and_keeps_what_is_not_ours(copied: Path) -> None:
    fuse(copied, "a", "b", "--out", "fused", "--max-width", "1x")
    assert "exists already" in refusal(copied, "a", "b", "--out", "fused", "--max-width", "1x")
    (copied / "fused/notes.txt").write_text("mine")
    (copied / "fused/model-00001-of-00002.safetensors").write_text("of before")
    (copied / "fused/config.json").write_text("of before")
    fuse(copied, "a", "b", "--out", "fused", "--max-width", "1x", "--force")
    assert (copied / "fused/notes.txt").read_text() == "mine"
    assert not (copied / "fused/model-00001-of-00002.safetensors").exists()
    nafi.load(copied / "fused")
    assert sorted(path.name for path in copied.iterdir()) == ["a", "b", "fused"]


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--out", "a"], "--out: a is one of the checkpoints"),
        (["--out", "."], "holds a, a checkpoint"),
        (["--out", "no/fused"], "does not exist"),
        (
            ["--out", "f", "--method", "stack"],
            "cannot say what --method stack makes; give --max-width 1x",
        ),
        (
            ["--out", "f", "--budget", "2.0 params"],
            "cannot say what --budget makes; give --max-width 1x",
        ),
    ],
)
def test_what_no_folder_can_hold_is_refused_before_any_work(
    folders: Path, arguments: list[str], told: str
) -> None:
    assert told in refusal(folders, "a", "b", *arguments)
    assert sorted(path.name for path in folders.iterdir()) == ["a", "b"]


def test_other_words_are_told_of(copied: Path) -> None:
    (copied / "b/tokenizer.json").write_text('{"words": ["b", "a"]}')
    told = fuse(copied, "a", "b", "--out", "f.safetensors", "--max-width", "1x")
    assert "b/tokenizer.json is not as in a" in told


def test_a_factory_may_make_the_network_of_folders(copied: Path) -> None:
    """For networks whose code transformers does not have."""
    change(copied / "a", model_type="mine")
    (copied / "networks.py").write_text(
        "import torch\nfrom tests.test_huggingface import bert, make_inputs\n"
        "def example_inputs():\n    return make_inputs(bert())\n"
    )
    options = ["--out", "f.safetensors", "--max-width", "1x", "--model", "networks:bert"]
    fuse(copied, "a", "b", *options)
    assert read(copied / "f.safetensors")[1].factory == "networks:bert"


WITHOUT = """
import sys, importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name == "transformers" else find(name, *more)
sys.modules["transformers"] = None
from nafi.cli import main; main()
"""


@pytest.mark.slow
def test_without_transformers_the_extra_is_named(folders: Path) -> None:
    done = started("fuse", "a", "b", "--out", "fused", cwd=folders, code=WITHOUT)
    assert done.returncode == 2
    hint = "nafi: this needs transformers, which is not installed: pip install 'nafi[hf]'\n"
    assert done.stderr == hint


def test_a_dry_run_of_folders_forecasts_the_fused_widths(copied: Path) -> None:
    """In one file and in several; NaN tells that no weights are read."""
    shutil.rmtree(copied / "b")
    write(seeded(bert, 1), copied / "b", max_shard_size="10KB")
    arguments = ["fuse", "a", "b", "--out", "fused", "--json"]
    done = run(*arguments, cwd=copied)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    for file in copied.glob("[ab]/*.safetensors"):
        empty = {n: torch.full_like(t, torch.nan) for n, t in load_file(file).items()}
        save_file(empty, file, metadata={"format": "pt"})
    shutil.rmtree(copied / "fused")
    done = run(*arguments, "--dry-run", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert "config.json has fields for intermediate_size" in done.stderr
    plan = json.loads(done.stdout)
    assert not (copied / "fused").exists()
    bounds = {group["name"]: (group["least"], group["most"]) for group in plan["groups"]}
    for row in told["groups"]:
        least, most = bounds[row["group"]]
        assert least <= row["width"] <= most
    assert any(most == 48 for _, most in bounds.values()), "the field of config.json may grow"
    assert plan["of_client"] == seeded(bert, 0).num_parameters()
    change(copied / "b", intermediate_size=20)
    words = refusal(copied, "a", "b", "--out", "fused", "--dry-run")
    assert "another shape than config.json says" in words


def test_a_checkpoint_that_is_not_there_is_named_before_the_output(folders: Path) -> None:
    assert "nafi: c does not exist" in refusal(folders, "a", "c", "--out", "fused")


def test_inputs_by_name_come_from_a_function_as_the_guide_has_it(copied: Path) -> None:
    guide = (Path(__file__).parents[1] / "docs/howto/hugging-face.md").read_text()
    code = re.search(r"```python\n(import torch\n.*?)```", guide, re.DOTALL)
    assert code
    (copied / "mine.py").write_text(code[1])
    np.save(copied / "inputs.npy", np.ones((4, 6), np.int64))
    kept = ["--out", "fused", "--max-width", "1x", "--json"]
    words = refusal(copied, "a", "b", *kept, "--probe", "inputs.npy")
    assert "expected the network's 2 arguments" in words
    assert "on the command line, --probe module:function, which returns such a dict" in words
    done = run("fuse", "a", "b", *kept, "--probe", "mine:texts", cwd=copied)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["probe"] == "inputs"


def test_the_groups_of_a_folder_are_shown(folders: Path) -> None:
    done = run("inspect", "a", "--json", cwd=folders)
    assert done.returncode == 0, done.stderr
    model = seeded(bert, 0)
    expected = nafi.groups(model, make_inputs(model))
    shown = json.loads(done.stdout)["groups"]
    assert {name: group["width"] for name, group in shown.items()} == expected.widths
