"""Which libraries are here, what they say of themselves, and which one a TensorRT gets."""

import json

import pytest
from plugin_libraries import INFO, PLUGINS, file_name, write_library

from mha_deploy import __version__
from mha_deploy.bundle.folder import sha256
from mha_deploy.engine.plugins import (
    PluginError,
    build_folder,
    candidates,
    library_for,
    other_builds,
    places,
    read_library,
)


@pytest.fixture
def named(tmp_path, monkeypatch):
    """The folder that the environment names; the cache folder is another one."""
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(tmp_path / "named"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "named"


def test_a_library_says_what_it_is(named):
    path = write_library(named)
    library = read_library(path)
    assert library.version == INFO["version"]
    assert library.architectures == ("80", "90")
    assert library.sha256 == sha256(path)
    assert [each.name for each in library.plugins] == [each["name"] for each in PLUGINS]
    assert json.loads(json.dumps(library.to_dict()))["path"] == str(path)


def test_a_library_that_was_replaced_is_read_again(named):
    write_library(named)
    assert read_library(named / file_name()).version == "0.1.0"
    write_library(named, version="0.2.0")
    assert read_library(named / file_name()).version == "0.2.0"


@pytest.mark.sweep(2)
@pytest.mark.parametrize(
    ("code", "what", "got"),
    [
        ("int nothing(void) { return 0; }", "cannot be loaded here", "undefined symbol"),
        (
            'char const* mha_deploy_plugins_info(void) { return "{"; }',
            "no valid description",
            "truncated",
        ),
        (
            'char const* mha_deploy_plugins_info(void) { return "{}"; }',
            "no valid description",
            "required field",
        ),
        (
            "char const* mha_deploy_plugins_info(void) { return (char const*)1; }",
            "cannot be loaded here",
            "ended with -11",
        ),
    ],
)
def test_a_broken_library_is_reported_and_does_no_harm(named, code, what, got):
    path = write_library(named, code=code)
    with pytest.raises(PluginError, match=what) as caught:
        read_library(path)
    assert got in caught.value.got
    assert [(each, str(error).splitlines()[0] == caught.value.what) for each, error in candidates()] == [
        (path, True)
    ]


def test_a_file_that_is_no_library_is_reported(named):
    named.mkdir()
    (named / file_name()).write_text("not a library, but long enough to be looked at" * 9)
    with pytest.raises(PluginError, match="cannot be loaded here") as caught:
        library_for("8.6.1")
    assert "invalid ELF header" in caught.value.got


def test_the_library_of_the_same_major_version_is_taken(named):
    write_library(named)
    ten = write_library(named, tensorrt="10.16.0", interface="IPluginV3")
    assert library_for("10.0.1").path == ten
    assert library_for("8.6.1").tensorrt == "8.6.0"


def test_the_environment_comes_before_the_cache(named):
    cached = write_library(places()[-1])
    assert library_for("8.6.1").path == cached
    mine = write_library(named)
    assert library_for("8.6.1").path == mine
    assert [path for path, _ in candidates()] == [mine, cached]


def test_the_environment_may_name_a_file_of_any_name(named, tmp_path, monkeypatch):
    path = write_library(tmp_path / "mine").rename(tmp_path / "mine" / "attention.so")
    monkeypatch.setenv("MHA_DEPLOY_PLUGINS", str(path))
    assert library_for("8.6.1").path == path
    assert build_folder() == path.parent
    path.unlink()
    with pytest.raises(PluginError, match="There is no plugin library here") as caught:
        library_for("8.6.1")
    assert caught.value.got == str(path)


def test_a_library_whose_name_lies_is_not_taken(named, tmp_path):
    write_library(tmp_path / "ten", tensorrt="10.0.1")
    named.mkdir()
    (tmp_path / "ten" / file_name("10")).rename(named / file_name("8"))
    with pytest.raises(PluginError, match="no plugin library for TensorRT 8") as caught:
        library_for("8.6.1")
    assert "(TensorRT 10.0.1)" in caught.value.got


def test_without_a_library_the_error_says_where_it_was_looked_for(named):
    write_library(named)
    with pytest.raises(PluginError, match="no plugin library for TensorRT 11") as caught:
        library_for("11.4.0")
    assert f"looked in {named}, {places()[-1]}; found {named / file_name()}" in caught.value.got
    assert "mha-deploy plugins build" in caught.value.hint


def test_another_build_of_the_right_version_is_noted(named):
    record = read_library(write_library(named)).record()
    assert other_builds([record], "8.6.1") == []
    write_library(named, comment="another build")
    (note,) = other_builds([record], "8.6.1")
    assert note.startswith("the plugin library here is another build of version 0.1.0")
    assert record["plugins"] == PLUGINS


def test_the_cache_folder_is_that_of_this_version(named, tmp_path):
    assert places() == [named, tmp_path / "cache" / "mha-deploy" / "plugins" / __version__]
    assert build_folder() == named
