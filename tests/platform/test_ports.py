"""The ports are taken before anything is made, each told by its setting when it cannot be had."""

import socket

import pytest

from manylora.platform.settings import Settings, SettingsError
from manylora.serve import taken_ports
from support.served import free_port


def test_the_metrics_port_is_optional_and_on_the_loopback_alone() -> None:
    with taken_ports(Settings(host="0.0.0.0", port=free_port())) as ports:
        assert ports.metrics is None
    both = Settings(host="0.0.0.0", port=free_port(), metrics_port=free_port())
    with taken_ports(both) as ports:
        assert ports.main.getsockname() == ("0.0.0.0", both.port)
        assert ports.metrics is not None
        assert ports.metrics.getsockname() == ("127.0.0.1", both.metrics_port)


def test_it_is_no_second_use_of_the_main_port() -> None:
    port = free_port()

    with (
        pytest.raises(SettingsError, match=r"^metrics_port: must be another"),
        taken_ports(Settings(port=port, metrics_port=port)),
    ):
        pass


def test_one_that_is_taken_is_named_and_the_other_let_go_of() -> None:
    port = free_port()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = Settings(port=port, metrics_port=taken.getsockname()[1])
        with (
            pytest.raises(SettingsError, match=r"^metrics_port: cannot listen on 127\.0\.0\.1"),
            taken_ports(settings),
        ):
            pass

    with taken_ports(Settings(port=port)) as ports:
        assert ports.main.getsockname()[1] == port
