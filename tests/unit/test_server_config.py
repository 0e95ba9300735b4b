"""What a nats-server is told: the text, the refusals, and what stays secret."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from jetspark.errors import ConfigError
from jetspark.server import ClusterRoutes, NatsCluster, NatsServer, Permissions, ServerConfig, ServerTLS, User
from jetspark.server.config import ServerOptions, render_config, with_options

NKEY = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def rendered(**options: Any) -> str:
    return render_config(ServerConfig(**options), port=4222, store_dir=Path("/data"))


def test_defaults_listen_on_loopback_with_jetstream_and_local_monitoring() -> None:
    assert rendered() == ('listen: "127.0.0.1:4222"\nhttp: "127.0.0.1:-1"\njetstream {\n  store_dir: "/data"\n}\n')


def test_no_port_lets_the_server_choose() -> None:
    assert 'listen: "127.0.0.1:-1"' in render_config(ServerConfig(), port=None, store_dir=Path("/data"))


def test_an_ipv6_host_is_bracketed() -> None:
    assert 'listen: "[::1]:4222"' in rendered(host="::1")


def test_without_jetstream_there_is_no_storage() -> None:
    assert "jetstream" not in rendered(jetstream=False)


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"durable": True}, "sync_interval: always"),
        ({"sync_interval_s": "always"}, "sync_interval: always"),
        ({"sync_interval_s": 0.5}, 'sync_interval: "500000us"'),
        ({"max_memory_bytes": 1000}, "max_memory_store: 1000"),
        ({"max_file_bytes": 2000}, "max_file_store: 2000"),
        ({"max_payload_bytes": 3000}, "max_payload: 3000"),
        ({"max_connections": 4}, "max_connections: 4"),
        ({"max_pending_bytes": 5000}, "max_pending: 5000"),
        ({"ping_interval_s": 1.5}, 'ping_interval: "1500000us"'),
        ({"write_deadline_s": 2}, 'write_deadline: "2000000us"'),
        ({"server_name": "a-1"}, 'server_name: "a-1"'),
        ({"token": "s3cret"}, 'token: "s3cret"'),
        ({"nkeys": [User(nkey=NKEY)]}, f'{{nkey: "{NKEY}"}}'),
        ({"extra_config": "debug: true"}, "debug: true"),
    ],
)
def test_each_option_becomes_its_line(options: dict[str, Any], line: str) -> None:
    assert line in [each.strip() for each in rendered(**options).splitlines()]


def test_strings_cannot_leave_their_quotes() -> None:
    text = rendered(token='a"} port: 1 #\\\n\t\x00é')
    assert '  token: "a\\"} port: 1 #\\\\\\x0A\\x09\\x00é"\n' in text


def test_permissions_are_rendered_per_verb() -> None:
    permissions = Permissions(publish_allow=["a.>"], publish_deny=["a.b"], subscribe_deny=["c"])
    assert (
        '{user: "u", password: "p", permissions: {publish: {allow: ["a.>"], deny: ["a.b"]}, subscribe: {deny: ["c"]}}}'
    ) in rendered(users=[User(user="u", password="p", permissions=permissions)])


def test_an_empty_allow_list_allows_nothing() -> None:
    permissions = Permissions(publish_allow=[], subscribe_allow=[], subscribe_deny=["x"])
    text = rendered(users=[User(user="u", password="p", permissions=permissions)])
    assert 'publish: {deny: [">"]}, subscribe: {deny: [">"]}' in text


@pytest.mark.parametrize(
    ("allow", "expected"),
    [
        (None, '{publish: {allow: [">"]}, allow_responses: true}'),
        ([], "{allow_responses: true}"),
        (["a"], '{publish: {allow: ["a"]}, allow_responses: true}'),
    ],
)
def test_allow_responses_does_not_change_what_the_allow_list_means(allow: list[str] | None, expected: str) -> None:
    permissions = Permissions(publish_allow=allow, allow_responses=True)
    assert f"permissions: {expected}" in rendered(users=[User(user="u", password="p", permissions=permissions)])


def test_an_operator_brings_its_accounts() -> None:
    text = rendered(operator_jwt="ey.op", system_account="ASYS", resolver_preload={"AAA": "ey.a"})
    assert 'operator: "ey.op"\nresolver: MEMORY\nsystem_account: "ASYS"\n' in text
    assert 'resolver_preload {\n  "AAA": "ey.a"\n}' in text


def test_tls_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("cert.pem", "key.pem", "ca.pem"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    tls = ServerTLS(cert_file="cert.pem", key_file="key.pem", ca_file="ca.pem", verify=True, handshake_first=True)
    lines = [line.strip() for line in rendered(tls=tls).splitlines()]
    assert f'cert_file: "{tmp_path}/cert.pem"' in lines
    assert f'key_file: "{tmp_path}/key.pem"' in lines
    assert f'ca_file: "{tmp_path}/ca.pem"' in lines
    assert {"verify: true", "handshake_first: true"} <= set(lines)


def test_a_cluster_names_its_routes() -> None:
    cluster = ClusterRoutes(name="c", port=6000, routes=["127.0.0.1:6001"], advertise="127.0.0.1:1")
    assert (
        'cluster {\n  name: "c"\n  listen: "127.0.0.1:6000"\n  routes: ["nats-route://127.0.0.1:6001"]\n'
        '  cluster_advertise: "127.0.0.1:1"\n}'
    ) in rendered(cluster=cluster, server_name="n")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durable": True, "sync_interval_s": 1.0}, "durable=True with sync_interval_s=1.0"),
        ({"sync_interval_s": "sometimes"}, "expected seconds or 'always'"),
        ({"sync_interval_s": 0}, "sync_interval_s=0: expected seconds above 0"),
        ({"sync_interval_s": float("nan")}, "sync_interval_s=nan"),
        ({"jetstream": False, "durable": True}, "durable=True with jetstream=False"),
        ({"extra_config": "debug: true\n jetstream { limits {} }"}, "extra_config has a jetstream block"),
        ({"max_payload_bytes": 0}, "max_payload_bytes=0: expected 1 or more"),
        ({"ping_interval_s": -1}, "ping_interval_s=-1: expected seconds above 0"),
        ({"host": ""}, "host=''"),
        ({"token": ""}, "token=''"),
        ({"server_name": "a b"}, "server_name='a b'"),
        ({"token": "x", "users": [User(user="u", password="p")]}, "token with users or nkeys"),
        ({"users": [User(nkey=NKEY)]}, "belongs in nkeys"),
        ({"nkeys": [User(user="u", password="p")]}, "belongs in users"),
        ({"system_account": "A"}, "system_account without operator_jwt"),
        ({"resolver_preload": {"A": "x"}}, "resolver_preload without operator_jwt"),
        ({"cluster": ClusterRoutes(name="c", routes=[])}, "cluster without server_name"),
    ],
)
def test_a_value_that_cannot_work_is_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        ServerConfig(**options)
    assert message in str(refusal.value)


@pytest.mark.parametrize("values", [{}, {"user": "u"}, {"password": "p"}, {"user": "u", "nkey": NKEY}])
def test_a_user_has_a_password_or_an_nkey(values: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="expected"):
        User(**values)


def test_a_seed_in_place_of_a_public_key_is_refused_without_repeating_it() -> None:
    seed = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
    with pytest.raises(ConfigError) as refusal:
        User(nkey=seed)
    assert seed not in str(refusal.value)


def test_a_lone_subject_is_not_taken_for_a_list_of_dead_letters() -> None:
    with pytest.raises(ConfigError, match=r"publish_allow='orders\.>': expected a list"):
        Permissions(publish_allow="orders.>")


def test_tls_files_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cert_file=.*no such file"):
        ServerTLS(cert_file=tmp_path / "no.pem", key_file=tmp_path / "no.pem")


def test_verifying_clients_takes_an_authority(tmp_path: Path) -> None:
    (tmp_path / "a.pem").touch()
    with pytest.raises(ConfigError, match="verify=True without ca_file"):
        ServerTLS(cert_file=tmp_path / "a.pem", key_file=tmp_path / "a.pem", verify=True)


def test_repr_has_no_secrets() -> None:
    shown = repr(
        [
            ServerConfig(users=[User(user="u", password="hidden-1")]),
            ServerConfig(token="hidden-2", extra_config="hidden-3"),
            ServerConfig(operator_jwt="hidden-4", resolver_preload={"A": "hidden-5"}),
            NatsServer(token="hidden-6"),
        ]
    )
    assert "hidden" not in shown


def test_an_unknown_option_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"unknown option colour: expected some of host, .*durable"):
        NatsServer(colour="red")  # type: ignore[call-arg]


def test_options_replace_fields_of_the_config_given() -> None:
    server = NatsServer(ServerConfig(host="127.0.0.2", durable=True), durable=False)
    assert server.config == ServerConfig(host="127.0.0.2")


def test_the_keywords_checked_by_type_checkers_are_the_fields() -> None:
    options = get_type_hints(ServerOptions)
    config = get_type_hints(ServerConfig)
    assert options == {each.name: config[each.name] for each in fields(ServerConfig)}
    assert with_options(None, {}) == ServerConfig()


@pytest.mark.parametrize(("port", "timeout"), [(-1, 1.0), (65536, 1.0), (None, 0.0)])
def test_an_impossible_port_or_timeout_is_refused(port: int | None, timeout: float) -> None:
    with pytest.raises(ConfigError, match="expected"):
        NatsServer(port=port, start_timeout_s=timeout)


def test_a_cluster_has_two_nodes_or_more_and_names_them_itself() -> None:
    with pytest.raises(ConfigError, match="size=1: expected 2 or more"):
        NatsCluster(1)
    with pytest.raises(ConfigError, match="server_name='x': NatsCluster sets this"):
        NatsCluster(3, server_name="x")
