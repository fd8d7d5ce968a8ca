"""A factory is found, called and checked before anything is exported."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

import mha_deploy as md
from mha_deploy.errors import DeployError
from mha_deploy.exporter.own_model import load_factory, match_names, open_user_module, state_digest
from mha_deploy.model.precision import find_precision

HERE = Path(__file__).parents[1] / "own_models.py"


def test_a_factory_in_a_file():
    loaded = load_factory(f"{HERE}:encoder")
    assert loaded.name == "encoder"
    assert loaded.summary == "three layers"
    assert loaded.dims == {"tokens": ("B", "S"), "mask": ("B", "S")}
    assert {name: str(axis) for name, axis in loaded.axes.items()} == {"B": "1:4:8", "S": "1:32:64"}
    assert not loaded.module.training


def test_a_factory_that_only_running_the_file_shows(tmp_path):
    (tmp_path / "own_models.py").write_text(HERE.read_text())
    made = "import own_models\nfor size in 'ab':\n    globals()[f'enc_{size}'] = own_models.encoder\n"
    (tmp_path / "many.py").write_text(made)
    assert md.load_model(f"{tmp_path / 'many.py'}:enc_b").source == f"{tmp_path / 'many.py'}:enc_b"
    assert load_factory(f"{tmp_path / 'many.py'}:enc_b").module is not None
    with pytest.raises(DeployError, match="'enc_a'"):
        load_factory(f"{tmp_path / 'many.py'}:enc_aa")


def test_a_factory_in_a_module(monkeypatch):
    monkeypatch.syspath_prepend(HERE.parent)
    assert load_factory("own_models:encoder").name == "encoder"


def test_a_file_finds_its_neighbours(tmp_path):
    (tmp_path / "neighbour_of_a_factory.py").write_text("from own_models import encoder\n")
    (tmp_path / "made.py").write_text("from neighbour_of_a_factory import encoder as build\n")
    (tmp_path / "own_models.py").write_text(HERE.read_text())
    assert load_factory(f"{tmp_path / 'made.py'}:build").name == "build"


def test_a_folder_without_modules_is_no_neighbour(tmp_path):
    """Such as a model repository, whose name may be that of a package that others look for."""
    (tmp_path / "a_repository" / "model" / "1").mkdir(parents=True)
    (tmp_path / "a_repository" / "model" / "1" / "model.py").touch()
    (tmp_path / "a_package" / "inner").mkdir(parents=True)
    (tmp_path / "a_package" / "inner" / "__init__.py").touch()
    (tmp_path / "own_models.py").write_text(HERE.read_text())
    load_factory(f"{tmp_path / 'own_models.py'}:encoder")
    assert importlib.util.find_spec("a_package") is not None
    assert importlib.util.find_spec("a_repository") is None


def test_the_same_seed_gives_the_same_weights():
    one, same, other = (state_digest(load_factory(f"{HERE}:encoder", seed=s).module) for s in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("encode", "did you mean 'encoder'"),
        ("fails", "no model today"),
        ("needs_arguments", "needs size"),
        ("gives_a_module", "does not return a Deployable"),
        ("no_inputs", "no example inputs"),
        ("not_a_module", "not an nn.Module"),
        ("no_example", "mask is not an Example"),
        ("unknown_axis", "names an axis that has no range"),
        ("unused_axis", "No input has such an axis"),
        ("two_sizes", "8 in tokens, 9 in mask"),
        ("too_many_names", "more axis names than dimensions"),
        ("unknown_input", "did you mean 'mask'"),
        ("unnamed_inputs", "named parameters"),
        ("missing_input", "no example"),
        ("bad_range", "Axis S is not a range"),
    ],
)
def test_what_does_not_meet_the_contract_is_reported(name, says):
    with pytest.raises(DeployError) as error:
        load_factory(f"{HERE}:{name}")
    assert says in str(error.value)


def test_a_failure_is_reported_with_its_place():
    with pytest.raises(DeployError) as error:
        load_factory(f"{HERE}:fails")
    assert f"{HERE}:" in str(error.value)
    assert "ZeroDivisionError" in str(error.value)


@pytest.mark.parametrize("reference", ["nowhere.py:encoder", "no.such.module:encoder"])
def test_what_is_not_there(reference):
    with pytest.raises(DeployError, match="There is no such"):
        load_factory(reference)


def test_a_module_that_is_there_and_lacks_an_import(tmp_path):
    (tmp_path / "broken.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(DeployError) as error:
        load_factory(f"{tmp_path / 'broken.py'}:encoder")
    assert "not_installed_anywhere" in str(error.value)


# -- weights -----------------------------------------------------------------------------------


def saved(tmp_path, ending, change=lambda state: state):
    state = change(load_factory(f"{HERE}:encoder", seed=7).module.state_dict())
    path = tmp_path / f"weights{ending}"
    if ending == ".safetensors":
        from safetensors.torch import save_file

        save_file(state, path)
    else:
        torch.save(state, path)
    return path


@pytest.mark.parametrize("ending", [".safetensors", ".pt"])
def test_weights_from_a_file(tmp_path, ending):
    path = saved(tmp_path, ending)
    user = open_user_module(f"{HERE}:encoder", find_precision("fp16"), weights=path)
    assert user.state_sha256 == state_digest(load_factory(f"{HERE}:encoder", seed=7).module)
    assert all(parameter.dtype == torch.float16 for parameter in user.module.parameters())


def without(name):
    return lambda state: {key: tensor for key, tensor in state.items() if key != name}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (without("embedding.weight"), "no embedding.weight"),
        (lambda state: {**state, "embedding.weight": torch.ones(2, 2)}, "do not fit"),
    ],
)
def test_weights_of_another_module(tmp_path, change, says):
    path = saved(tmp_path, ".pt", change)
    with pytest.raises(DeployError) as error:
        open_user_module(f"{HERE}:encoder", find_precision("fp16"), weights=path)
    assert says in str(error.value)


def test_what_a_checkpoint_holds_besides_is_noted_and_its_prefix_dropped(tmp_path):
    def checkpoint(state):
        return {f"model.{name}": tensor for name, tensor in state.items()} | {"model.more": torch.ones(1)}

    path = saved(tmp_path, ".safetensors", checkpoint)
    user = open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=path, prefix="model")
    assert user.state_sha256 == state_digest(load_factory(f"{HERE}:encoder", seed=7).module)
    assert "more" in user.notes[0]


def wrapped(state):
    return {f"model.encoder.{name}": tensor for name, tensor in state.items()} | {"head": torch.ones(1)}


def twice(state):
    return wrapped(state) | {f"other.{name}": tensor for name, tensor in state.items()}


def test_weights_of_a_model_around_it_are_found_by_their_endings(tmp_path):
    path = saved(tmp_path, ".pt", wrapped)
    user = open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=path)
    assert user.state_sha256 == state_digest(load_factory(f"{HERE}:encoder", seed=7).module)
    assert any("model.encoder.*" in note for note in user.notes), "the mapping is shown"
    with pytest.raises(DeployError, match="Several parts") as caught:
        open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=saved(tmp_path, ".pt", twice))
    assert caught.value.hint.startswith("prefix=")


def test_a_module_around_the_model_takes_its_weights(tmp_path):
    inner = load_factory(f"{HERE}:encoder", seed=7).module
    outer = torch.nn.ModuleDict({"wrapped": load_factory(f"{HERE}:encoder", seed=8).module})
    state, notes = match_names(outer, inner.state_dict(), tmp_path / "weights.pt")
    outer.load_state_dict(state)
    assert state_digest(outer["wrapped"]) == state_digest(inner)
    assert "wrapped.*" in notes[0]
    (note,) = match_names(outer, inner.state_dict(), tmp_path / "weights.pt", "model.7")[1]
    assert " model.7.* " in note, "what the file calls them"
    other = {name: tensor[:1] for name, tensor in inner.state_dict().items()}
    assert match_names(outer, other, tmp_path / "weights.pt")[1] == (), "of other shapes"


@pytest.mark.parametrize("key", ["state_dict", "model"])
@pytest.mark.parametrize("suffix", [".pt", ".ckpt"])
def test_a_training_checkpoint_names_its_keys_and_the_way_on(tmp_path, key, suffix):
    path = tmp_path / f"train{suffix}"
    state = load_factory(f"{HERE}:encoder", seed=7).module.state_dict()
    torch.save({"epoch": 3, key: state, "optimizer": {"state": {}}}, path)
    with pytest.raises(DeployError) as caught:
        open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=path)
    assert all(name in caught.value.got for name in ("epoch", key, "optimizer"))
    assert f'"{key}"' in caught.value.hint
    torch.save(torch.load(path)[key], path)
    assert open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=path).state_sha256


@pytest.mark.parametrize("prefix", ["modell.", "elsewhere"])
def test_a_wrong_prefix_lists_those_of_the_file(tmp_path, prefix):
    state = load_factory(f"{HERE}:encoder", seed=7).module.state_dict()
    path = tmp_path / "weights.pt"
    torch.save({f"model.{name}": tensor for name, tensor in state.items()}, path)
    with pytest.raises(DeployError) as caught:
        open_user_module(f"{HERE}:encoder", find_precision("fp32"), weights=path, prefix=prefix)
    assert re.findall(r"\bmodel\w*", caught.value.hint) == ["model"]


def test_a_file_of_something_else(tmp_path):
    path = tmp_path / "weights.pt"
    torch.save([1, 2], path)
    with pytest.raises(DeployError, match="not a state dict"):
        open_user_module(f"{HERE}:encoder", find_precision("fp16"), weights=path)
    path.write_text("nothing of the kind")
    with pytest.raises(DeployError, match="not a state dict"):
        open_user_module(f"{HERE}:encoder", find_precision("fp16"), weights=path)
