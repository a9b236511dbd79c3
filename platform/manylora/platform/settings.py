"""Every setting of the server: name, unit, default.

A value comes from the command line, else from the environment (`MANYLORA_PORT`), else from the
TOML file of `--config` (`port`), else from its default here. Engine options are not repeated:
they are the fields of `manylora.engine.config.EngineConfig` and come by the same ways.
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, SecretStr, ValidationError, create_model
from pydantic.fields import FieldInfo
from pydantic_settings import (
    BaseSettings,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
    TomlConfigSettingsSource,
)

from manylora.engine.config import EngineConfig
from manylora.engine.errors import InvalidRequestError


class SettingsError(Exception):
    """A setting is unknown, unreadable or out of its range; the message names it."""


class Settings(BaseSettings):
    """How one server runs. Make it with `load_settings`; tests may construct it."""

    model_config = SettingsConfigDict(env_prefix="MANYLORA_", extra="forbid", frozen=True)

    model: str = Field("demo", description="local Hugging Face folder, GGUF file, hub id, or demo")
    served_model_name: str | None = Field(None, description="what clients call the base model")
    host: str = Field("127.0.0.1", description="address to listen on")
    port: int = Field(8000, ge=1, le=65535, description="port to listen on")
    metrics_host: str = Field("127.0.0.1", description="address of --metrics-port")
    metrics_port: int | None = Field(
        None, ge=1, le=65535, description="port of /metrics without a credential; default: none"
    )
    data_dir: Path = Field(Path("data"), description="folder of the database and the adapters")
    database_url: str | None = Field(None, description="default: SQLite in the data folder")
    demo: bool = Field(False, description="seed two tenants with demo adapters")
    admin_token: SecretStr | None = Field(None, description="operator token for /api/v1")
    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="log level")
    max_upload_bytes: int = Field(1 << 30, ge=1, description="most bytes in one adapter upload")

    request_lives_kept: int = Field(
        100_000, ge=1, description="most ended requests whose stages are kept"
    )
    otlp_traces_endpoint: str | None = Field(
        None,
        pattern=r"^https?://",
        description="URL to send OpenTelemetry spans to, such as http://localhost:4318/v1/traces",
    )

    @property
    def database(self) -> str:
        """The URL of the database, which is a file in the data folder unless one is given."""
        from manylora.platform.db import sqlite_url  # short commands do without SQLAlchemy

        return self.database_url or sqlite_url(self.data_dir.resolve() / "manylora.db")

    @property
    def adapters_dir(self) -> Path:
        """Where checked adapters lie, one folder for each digest."""
        return self.data_dir.resolve() / "adapters"

    def engine_config(self, **overrides: Any) -> EngineConfig:
        """The engine's options; `overrides` are what the server decides (model folder, store).

        Raises:
            InvalidRequestError: an option is out of its range; `param` names it.
        """
        values: dict[str, Any] = {
            option.name: getattr(self, option.name, option.default)
            for option in dataclasses.fields(EngineConfig)
        }
        return EngineConfig(**(values | overrides))

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, env_settings, TomlConfigSettingsSource(settings_cls)


@functools.cache
def all_options() -> dict[str, FieldInfo]:
    """Every setting by name, the engine's options too, with type, default and description."""
    return _with_engine_options(None).model_fields


def _with_engine_options(config: Path | None) -> type[Settings]:
    options: dict[str, Any] = {
        option.name: (option.type, Field(option.default, description=option.metadata["help"]))
        for option in dataclasses.fields(EngineConfig)
        if option.name not in Settings.model_fields and option.name != "adapter_store"
    }
    base = type("FromFile", (Settings,), {"model_config": SettingsConfigDict(toml_file=config)})
    return create_model("AllSettings", __base__=base, **options)


def offline_settings() -> tuple[str, ...]:
    """The settings of a command that runs an engine of its own, without a server."""
    of_a_server = {"adapter_store", "max_num_waiting"}
    engine = [option.name for option in dataclasses.fields(EngineConfig)]
    return ("log_level", *(name for name in engine if name not in of_a_server))


def load_settings(given: Mapping[str, Any], config: Path | None = None) -> Settings:
    """Merge what the command line gave with the environment and a TOML file.

    Raises:
        SettingsError: naming the setting at fault.
    """
    if config is not None and not config.is_file():
        raise SettingsError(f"config: there is no file {config}")

    try:
        settings = _with_engine_options(config)(**given)
        settings.engine_config()
    except ValidationError as error:
        raise SettingsError(_first_fault(error)) from error
    except InvalidRequestError as error:
        raise SettingsError(error.message) from error
    except ValueError as error:  # the TOML cannot be read
        raise SettingsError(f"config: {error}") from error
    return settings


def _first_fault(error: ValidationError) -> str:
    fault = error.errors(include_input=False)[0]  # the input may be a secret
    name = ".".join(str(part) for part in fault["loc"])
    if fault["type"] == "extra_forbidden":
        return f"{name}: there is no such setting"
    return f"{name}: {fault['msg']}"
