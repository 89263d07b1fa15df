"""Records in PostgreSQL: what each refusal means, a killed or frozen server, lost replies, durability, secrets."""

from __future__ import annotations

import contextlib
import multiprocessing
import socket
import threading
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import postgres
import pytest
from test_record_store import fence, listed

from dagster_resilient.errors import ConfigurationError, StorageError, StoragePermissionError, StoreUnavailableError
from dagster_resilient.state import sql_dialects
from dagster_resilient.state.records import Fence
from dagster_resilient.state.sql_store import open_records

pytestmark = pytest.mark.postgres


@contextlib.contextmanager
def trigger(server: postgres.PostgresServer, url: str, body: str) -> Iterator[None]:
    """Inside the block an insert runs this code on the server first."""
    schema = url.partition("%3D")[2]
    with server.connect() as connection:
        run = connection.cursor().execute
        run(f"CREATE FUNCTION {schema}.act() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN {body} RETURN NEW; END $$")
        run(f"CREATE TRIGGER act BEFORE INSERT ON {schema}.resilient_records EXECUTE FUNCTION {schema}.act()")
        try:
            yield
        finally:
            run(f"DROP FUNCTION {schema}.act() CASCADE")


def test_tables_that_another_process_is_just_making_are_waited_for(
    postgres_server: postgres.PostgresServer, postgres_url: str
) -> None:
    """CREATE TABLE IF NOT EXISTS alone fails there, since it sees a table only once it is committed."""
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = 'records'"
    with postgres_server.connect() as other, postgres_server.connect() as watcher, ThreadPoolExecutor(1) as pool:
        other.cursor().execute(f"SET search_path TO {postgres_url.partition('%3D')[2]}; BEGIN")
        other.cursor().execute(sql_dialects.PostgresDialect.setup[0])
        created = pool.submit(open_records(postgres_url).with_patience(0.0).create, "a/1", fence())
        look, deadline = watcher.cursor(), time.monotonic() + 30
        while look.execute(waiting) or look.fetchone() == (0,):
            assert time.monotonic() < deadline, "it does not wait"
            assert not created.done(), created.result()
        other.cursor().execute("COMMIT")
        assert created.result(30)


@pytest.mark.parametrize(
    ("state", "kind"),
    [
        ("40001", StoreUnavailableError),  # serialization failure
        ("40P01", StoreUnavailableError),  # deadlock
        ("53300", StoreUnavailableError),  # too many connections
        ("53200", StoreUnavailableError),  # out of memory
        ("55P03", StoreUnavailableError),  # lock not available
        ("57014", StoreUnavailableError),  # cancelled, by an operator or a timeout
        ("57P01", StoreUnavailableError),  # shutting down
        ("25006", StoreUnavailableError),  # a standby, until it is promoted
        ("08006", StoreUnavailableError),  # connection failure
        ("42501", StoragePermissionError),  # no rights
        ("28000", StoragePermissionError),
        ("53100", StorageError),  # disk full
        ("58030", StorageError),  # input or output error
        ("42P01", StorageError),  # the table is gone
        ("XX000", StorageError),  # internal error
    ],
)
def test_each_refusal_is_the_error_that_fits(
    postgres_server: postgres.PostgresServer, postgres_url: str, state: str, kind: type[StorageError]
) -> None:
    """By the server's own code: what passes is unavailable, a refusal is final; the message names key and cause."""
    records = open_records(postgres_url).with_patience(0.0)
    assert records.list("") == []
    raised = f"RAISE EXCEPTION 'the cause' USING ERRCODE = '{state}';"
    with trigger(postgres_server, postgres_url, raised), pytest.raises(StorageError, match="a/1: the cause") as caught:
        records.create("a/1", fence())
    assert type(caught.value) is kind
    assert (caught.value.store, caught.value.key) == (records.url, "a/1")
    assert records.create("a/1", fence())


def test_a_conflict_with_another_transaction_is_tried_again(
    postgres_server: postgres.PostgresServer, postgres_url: str
) -> None:
    """Three serialization failures are not seen by the caller; patience, as everywhere, bounds them."""
    records = open_records(postgres_url)
    assert records.list("") == []
    with postgres_server.connect() as connection:
        connection.cursor().execute(f"CREATE SEQUENCE {postgres_url.partition('%3D')[2]}.failures")
    failing = "IF nextval('failures') <= 3 THEN RAISE EXCEPTION 'x' USING ERRCODE = '40001'; END IF;"
    with trigger(postgres_server, postgres_url, failing):
        assert records.create("a/1", fence())
    assert listed(records, "") == ["a/1"]


def test_acknowledged_records_survive_a_killed_server(
    postgres_server: postgres.PostgresServer, postgres_url: str
) -> None:
    """The server is killed among creates and started again: every create succeeds in the end, and all are there."""
    records = open_records(postgres_url)
    begun, stop = threading.Event(), threading.Event()

    def write(worker: int) -> list[str]:
        done: list[str] = []
        while not stop.is_set() or len(done) < 5:
            key = f"w{worker}/{len(done):05d}"
            assert records.create(key, fence(key))
            done.append(key)
            begun.set()
        return done

    with ThreadPoolExecutor(3) as pool:
        writing = [pool.submit(write, n) for n in range(3)]
        try:
            assert begun.wait(30)
            for _ in range(2):
                with postgres_server.outage():
                    pass
        finally:
            stop.set()
        acknowledged = sorted(key for written in writing for key in written.result())
    assert listed(records, "") == acknowledged
    assert all(records.get(key, Fence) == fence(key) for key in acknowledged[::20])


def test_a_server_that_stays_away_is_unavailable(postgres_server: postgres.PostgresServer, postgres_url: str) -> None:
    """When the patience ends, and not forbidden or absent; when it is back, the same records go on."""
    records = open_records(postgres_url)
    assert records.create("a/1", fence())
    with postgres_server.outage():
        for patience in (0.0, 0.5):
            with pytest.raises(StoreUnavailableError, match=r"a/1: .*refused"):
                records.with_patience(patience).get("a/1", Fence)
    assert records.with_patience(0.0).get("a/1", Fence) == fence()


def test_a_connection_that_died_in_the_pool_costs_no_error(
    postgres_server: postgres.PostgresServer, postgres_url: str
) -> None:
    """A restart of the server between two calls is not seen, even by a caller without patience."""
    records = open_records(postgres_url).with_patience(0.0)
    assert records.create("a/1", fence())
    for n in range(2, 4):
        with postgres_server.outage():
            pass
        assert records.create(f"a/{n}", fence())
    assert listed(records, "") == ["a/1", "a/2", "a/3"]


def test_a_server_that_stands_still_is_given_up(
    postgres_server: postgres.PostgresServer, postgres_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes what is sent and never answers; no call waits for it for ever. When it goes on, so do the records."""
    monkeypatch.setattr(sql_dialects.PostgresDialect, "call_seconds", 0.5)
    records = open_records(f"{postgres_url}&connect_timeout=2").with_patience(0.0)
    assert records.create("a/1", fence())
    with postgres_server.frozen():
        for call in (lambda: records.create("a/2", fence()), lambda: records.get("a/1", Fence)):
            with pytest.raises(StoreUnavailableError):
                call()
    patient = records.with_patience(30.0)
    assert patient.create("a/2", fence())
    assert listed(patient, "") == ["a/1", "a/2"]


class LosingRelay:
    """A TCP relay to the server. While it is armed, the reply to the next INSERT is read and thrown away."""

    def __init__(self, port: int) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.armed = threading.Event()
        self.lost = 0
        self._target = port
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._target))
                insert = threading.Event()
                for pair in ((ours, theirs, insert, False), (theirs, ours, insert, True)):
                    threading.Thread(target=self._pump, args=pair, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket, insert: threading.Event, replies: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if replies and insert.is_set():
                    self.lost += 1
                    break
                if not replies and b"INSERT INTO resilient_records" in data and self.armed.is_set():
                    self.armed.clear()
                    insert.set()
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Accept no more."""
        self._listener.close()


@pytest.fixture
def relay(postgres_server: postgres.PostgresServer) -> Iterator[LosingRelay]:
    """A relay to the server of the tests."""
    losing = LosingRelay(postgres_server.port)
    yield losing
    losing.close()


def test_the_lost_reply_of_a_create_is_success(
    postgres_server: postgres.PostgresServer, postgres_url: str, relay: LosingRelay
) -> None:
    """The second try meets an equal record, which can only be the first one's. Another's record is still a conflict."""
    records = open_records(postgres_url.replace(f":{postgres_server.port}/", f":{relay.port}/"))
    assert records.create("a/1", fence("one"))
    relay.armed.set()
    assert records.create("a/2", fence("two"))
    relay.armed.set()
    assert not records.create("a/1", fence("other"))
    assert relay.lost == 2
    assert [records.get(f"a/{n}", Fence) for n in (1, 2)] == [fence("one"), fence("two")]


def test_a_commit_to_postgres_waits_for_the_disk(postgres_server: postgres.PostgresServer, postgres_url: str) -> None:
    """Also where the server's default is to acknowledge before; and no statement may run for ever."""

    def setting(name: str) -> str:
        value: str = records._database.run("ask", "", lambda c: c.exec_driver_sql(f"SHOW {name}").scalar())
        return value

    with postgres_server.connect() as connection:
        connection.cursor().execute("ALTER ROLE resilient SET synchronous_commit TO off")
        try:
            records = open_records(postgres_url)
            assert setting("synchronous_commit") == "on"
        finally:
            connection.cursor().execute("ALTER ROLE resilient RESET synchronous_commit")
    assert setting("statement_timeout") == "20s"


def test_the_order_is_bytewise_in_a_database_of_any_language(postgres_server: postgres.PostgresServer) -> None:
    """The database's own collation would put "a-2" behind "a1" and "B" behind "a"."""
    with postgres_server.connect("postgres") as connection:
        connection.cursor().execute(
            "CREATE DATABASE lettered TEMPLATE template0 LOCALE_PROVIDER icu ICU_LOCALE 'en-US' ENCODING 'UTF8'"
        )
    records = open_records(postgres_server.url.rpartition("/")[0] + "/lettered")
    names = ["B", "a", "a-2", "a1", "a_", "b", "a~", "é"]
    for name in names:
        records.create(f"k/{name}", fence(name))
    assert listed(records, "k/") == sorted((f"k/{name}" for name in names), key=str.encode)


SECRET = postgres.PASSWORD


def test_no_secret_is_shown(
    postgres_server: postgres.PostgresServer, postgres_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Not in the URL for people, a representation, a log line, or an error with all that led to it."""
    caplog.set_level("DEBUG")
    records = open_records(f"{postgres_url}&sslpassword={SECRET}").with_patience(0.0)
    assert records.create("a/1", fence())
    shown = [records.url, repr(records), repr(records._database), repr(vars(records))]
    with postgres_server.outage(), pytest.raises(StoreUnavailableError) as caught:
        records.get("a/1", Fence)
    shown += traceback.format_exception(caught.value)
    wrong = open_records(postgres_url.replace(SECRET, f"wrong-{SECRET}")).with_patience(0.0)
    with pytest.raises(StoragePermissionError, match="password authentication failed") as refused:
        wrong.get("a/1", Fence)
    shown += traceback.format_exception(refused.value)
    assert records.url == f"postgresql://resilient:***@127.0.0.1:{postgres_server.port}/records"
    assert SECRET not in "".join(shown) + caplog.text


def test_a_role_that_may_not_make_tables_is_told_so(postgres_server: postgres.PostgresServer) -> None:
    """The refusal names the schema; once an owner has made the tables and granted their use, the records work."""
    with postgres_server.connect() as connection:
        run = connection.cursor().execute
        run("CREATE ROLE reader LOGIN PASSWORD 'reader'")
        run("CREATE SCHEMA granted")
        run("GRANT USAGE ON SCHEMA granted TO reader")
        owner, reader = (
            open_records(f"{url}?options=-csearch_path%3Dgranted")
            for url in (postgres_server.url, postgres_server.url.replace(f"resilient:{SECRET}", "reader:reader"))
        )
        with pytest.raises(StoragePermissionError, match="permission denied for schema granted"):
            reader.create("a/1", fence())
        assert owner.list("") == []
        run("GRANT SELECT, INSERT, DELETE ON ALL TABLES IN SCHEMA granted TO reader")
        assert reader.create("a/1", fence())


def test_a_database_that_is_not_there_is_final(postgres_server: postgres.PostgresServer) -> None:
    """Waiting does not make it."""
    with pytest.raises(StorageError, match='database "absent" does not exist') as caught:
        open_records(postgres_server.url.rpartition("/")[0] + "/absent").list("")
    assert type(caught.value) is StorageError


def test_an_option_that_libpq_does_not_know_is_final(postgres_server: postgres.PostgresServer) -> None:
    """A slip in the URL is named, and not waited for."""
    with pytest.raises(StorageError, match="conect_timeout") as caught:
        open_records(f"{postgres_server.url}?conect_timeout=3").list("")
    assert type(caught.value) is StorageError


def test_ten_openings_of_a_url_hold_one_connection(postgres_server: postgres.PostgresServer, postgres_url: str) -> None:
    """As the server counts them. In a forked process they hold another one, and the last to go closes its own alone."""
    url = f"{postgres_url}&application_name=counted"

    def connections() -> int:
        with postgres_server.connect() as watcher:
            cursor = watcher.cursor()
            cursor.execute("SELECT count(*) FROM pg_stat_activity WHERE application_name = 'counted'")
            return int(cursor.fetchone()[0])

    def until(wanted: int) -> None:
        deadline = time.monotonic() + 30
        while connections() != wanted:  # a server's process ends a moment after its connection
            assert time.monotonic() < deadline, connections()

    def use() -> None:
        assert [opened.list("") for opened in many] == [[]] * 10
        assert connections() == 2
        many.clear()
        until(1)

    many = [open_records(url) for _ in range(10)]
    assert [opened.list("") for opened in many] == [[]] * 10
    assert connections() == 1
    child = multiprocessing.get_context("fork").Process(target=use)
    child.start()
    child.join(60)
    child.kill()
    assert child.exitcode == 0
    assert many[0].list("") == []
    assert connections() == 1
    many.clear()
    until(0)


@pytest.mark.parametrize(
    "wrong",
    [
        "postgresql://u:p@127.0.0.1:99999/records",
        "postgresql://u:p@127.0.0.1/records?connect_timeout=soon",
        "postgresql://u:p@127.0.0.1/records?sslmode=perhaps",
    ],
)
def test_what_no_server_can_answer_is_refused_at_once(wrong: str) -> None:
    """The driver names the value that it cannot use; it is not waited for, though the patience is long."""
    with pytest.raises(ConfigurationError, match=r"(99999|soon|perhaps).*Correct the URL"):
        open_records(wrong).with_patience(600.0).list("")
