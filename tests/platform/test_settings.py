"""Settings come from the command line, else the environment, else a TOML file, else defaults."""

from pathlib import Path

import pytest

from manylora.platform.settings import Settings, SettingsError, all_options, load_settings


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in all_options():
        monkeypatch.delenv(f"MANYLORA_{name.upper()}", raising=False)


def toml(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "manylora.toml"
    path.write_text(text)
    return path


def test_each_source_wins_over_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = toml(tmp_path, 'port = 1\nhost = "file"\nmax_loras = 3\nlog_level = "error"')
    monkeypatch.setenv("MANYLORA_PORT", "2")
    monkeypatch.setenv("MANYLORA_HOST", "environment")
    monkeypatch.setenv("MANYLORA_MAX_LORAS", "5")

    settings = load_settings({"port": "3"}, config)

    assert (settings.port, settings.host, settings.log_level) == (3, "environment", "error")
    assert settings.engine_config().max_loras == 5
    assert settings.engine_config().block_size == 16


def test_what_the_server_decides_wins_for_the_engine() -> None:
    config = load_settings({}).engine_config(model="/folder", adapter_store="/store")

    assert (config.model, config.adapter_store) == ("/folder", "/store")


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"port": "x"}, "port"),
        ({"port": "0"}, "port"),
        ({"port": "70000"}, "port"),
        ({"prot": "1"}, "prot"),
        ({"block_size": "0"}, "block_size"),
        ({"dtype": "int8"}, "dtype"),
        ({"max_num_seqs": "many"}, "max_num_seqs"),
        ({"log_level": "loud"}, "log_level"),
    ],
)
def test_a_bad_setting_is_named(given: dict[str, str], named: str) -> None:
    with pytest.raises(SettingsError, match=f"^{named}"):
        load_settings(given)


@pytest.mark.parametrize("text", ["prot = 1", "port =", "[server]\nport = 1", 'port = "x"'])
def test_a_bad_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(SettingsError):
        load_settings({}, toml(tmp_path, text))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="config"):
        load_settings({}, tmp_path / "nosuch.toml")


def test_the_token_shows_in_no_error_nor_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MANYLORA_ADMIN_TOKEN", "hunter2")

    settings = load_settings({})

    assert "hunter2" not in repr(settings)
    assert settings.admin_token is not None
    assert settings.admin_token.get_secret_value() == "hunter2"


def test_the_database_is_a_file_in_the_data_folder_unless_told(tmp_path: Path) -> None:
    assert Settings(data_dir=tmp_path).database == f"sqlite:///{tmp_path}/manylora.db"
    assert Settings(database_url="postgresql://x/y").database == "postgresql://x/y"
