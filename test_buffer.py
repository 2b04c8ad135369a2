#!/usr/bin/env python3
"""The specification of buffer.py, as tests, and its benchmark.

python test_buffer.py           what every change must keep; under two minutes
python test_buffer.py --all     the long proofs as well: kill -9, power cuts, full disks
python test_buffer.py NAME ...  only tests with one of these words in their names
python test_buffer.py bench     the benchmark

Where the folder ../shared with recorded traffic stands beside this one, more is tested.
"""

import base64
import collections
import contextlib
import dataclasses
import datetime
import errno
import fcntl
import functools
import gzip
import hashlib
import hmac
import http.client
import http.server
import importlib
import importlib.metadata
import importlib.util
import io
import itertools
import json
import logging
import math
import os
import pathlib
import platform
import re
import resource
import secrets
import select
import selectors
import shutil
import signal
import socket
import sqlite3
import ssl
import stat
import statistics
import struct
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import unittest
import urllib.parse
import warnings
import weakref
import wsgiref.util
import wsgiref.validate
import zlib
from concurrent.futures import ThreadPoolExecutor
from random import Random
from unittest import mock

with contextlib.suppress(ImportError):
    import waitress
    import waitress.wasyncore

import buffer

HERE = pathlib.Path(__file__).resolve().parent
SHARED = HERE.parent / "shared"
TOKEN = "a-token-for-the-tests"

long = unittest.skipUnless("--all" in sys.argv, "a long proof: --all")


# What the tests work with


class Clock:
    """Stands still until a test moves it."""

    def __init__(self, now=1_800_000_000):
        self.now = now

    def __call__(self):
        return self.now


class Case(unittest.TestCase):
    """An application on a file of its own, called in process, with a clock to move."""

    settings = ()  # pairs of name and text

    def setUp(self):
        self.folder = pathlib.Path(self.enter(tempfile.TemporaryDirectory()))
        self.clock = Clock()
        self.log = self.enter(self.assertLogs("buffer", logging.DEBUG))
        buffer.log.debug("assertLogs wants at least one line")
        self.open()

    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def open(self, **settings):
        environ = {"TOKEN": TOKEN, "DB_PATH": str(self.folder / "b.sqlite")}
        environ["MIN_FREE"] = "0"  # whatever disk the tests run on
        environ.update(self.settings, **settings)
        self.configured = buffer.Settings.read(environ)
        self.store = buffer.open_store(self.configured, self.clock)
        self.addCleanup(self.store.close)
        self.app = buffer.App(self.configured, self.store, self.clock)

    def call(self, method, url, body=b"", token=TOKEN, **environ):
        """(status, body) from the application, through wsgiref's validator."""
        path, _, query = url.partition("?")
        environ = {
            "REQUEST_METHOD": method,
            "SCRIPT_NAME": "",
            "PATH_INFO": path.encode().decode("latin-1"),
            "QUERY_STRING": query.encode().decode("latin-1"),
            "CONTENT_LENGTH": str(len(body)),
            "wsgi.input": io.BytesIO(body),
            **({"HTTP_X_TOKEN": token} if token else {}),
            **environ,
        }
        wsgiref.util.setup_testing_defaults(environ)
        self.answered = {}

        def start_response(status, headers, exc_info=None):
            self.answered.update(headers, status=int(status[:3]))

        parts = wsgiref.validate.validator(self.app)(environ, start_response)
        with contextlib.closing(parts):
            return self.answered["status"], b"".join(parts).decode()

    def send(self, body=b"{}", url="/webhook", **environ):
        self.assertEqual(
            (200, '{"status":"ok"}\n'), self.call("POST", url, body, **environ)
        )

    def claim(self, query=""):
        status, text = self.call("POST", f"/fila/pegar{query}")
        self.assertEqual(200, status)
        return json.loads(text)

    def settle(self, id_, verdict, body=b""):
        return self.call("POST", f"/fila/{id_}/{verdict}", body)[0]

    def rows(self, sql="SELECT * FROM fila ORDER BY id"):
        """What a stranger sees in the file."""
        with contextlib.closing(sqlite3.connect(self.configured.db_path)) as db:
            db.row_factory = sqlite3.Row
            return db.execute(sql).fetchall()

    def logged(self):
        return "\n".join(self.log.output)


class Faulty:
    """A connection to SQLite on which statements that contain `part` fail."""

    def __init__(self, db, part, error="disk I/O error", rolls_back=False):
        self.db, self.part, self.error, self.rolls_back = db, part, error, rolls_back

    def __getattr__(self, name):
        return getattr(self.db, name)

    def execute(self, sql, values=()):
        if self.part in f"{sql} {values}":
            if self.rolls_back:
                self.db.execute("ROLLBACK")
            raise sqlite3.OperationalError(self.error)
        return self.db.execute(sql, values)


class Service:
    """A real server in a subprocess, on a free port, with its own folder.

    Settings are keyword arguments. Leaving the block stops it. `folder` lets two
    services follow each other on one file.
    """

    def __init__(self, folder=None, python=sys.executable, prefix=(), **settings):
        self._own = None if folder else tempfile.TemporaryDirectory()
        self.folder = pathlib.Path(folder or self._own.name)
        self.db = self.folder / "b.sqlite"
        self.settings = {"TOKEN": TOKEN, "ADDR": "127.0.0.1:0", "DB_PATH": self.db}
        self.settings["MIN_FREE"] = 0  # whatever disk the tests run on
        self.settings.update(settings)
        self.command = [*prefix, python, str(HERE / "buffer.py")]
        self.process = None

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self.stop()
        if self._own:
            self._own.cleanup()

    def start(self, **options):
        """Starts the process and waits until it says where it listens."""
        env = {**os.environ, "PYTHONWARNINGS": "error::DeprecationWarning:__main__"}
        env.update({name: str(value) for name, value in self.settings.items()})
        self.log = self.folder / "log"
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.command, env=env, stderr=log, cwd=self.folder, **options
            )
        found = self.logged(r"listens on .*?(?: port (\d+))?,")
        self.port = int(found[1] or 0)

    def logged(self, pattern, seconds=20):
        """The match of a line in the log, once it is there."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            text = self.log.read_text(errors="replace")
            found = re.search(pattern, text)
            if found:
                return found
            if self.process.poll() is not None:
                break
            time.sleep(0.02)
        raise AssertionError(f"no {pattern!r} in the log:\n{text}")

    def stop(self, number=signal.SIGTERM):
        """Sends a signal and returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise

    def connect(self, timeout=30):
        """A keep-alive connection."""
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=timeout)

    def call(self, method, path, body=None, headers=None, token=TOKEN):
        """(status, headers, body) of one request on a connection of its own."""
        connection = self.connect()
        try:
            headers = {**({"X-Token": token} if token else {}), **(headers or {})}
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()
        finally:
            connection.close()


class Loop(Case):
    """The real server in this process, its loop turned by the test round by round."""

    def open(self, **settings):
        super().open(**settings)
        self.serve()

    def serve(self, delivery=None):
        listening = [socket.create_server(("127.0.0.1", 0))]
        self.server = buffer.Server(
            self.configured, self.app, listening, self.clock, delivery
        )
        self.clock.step = lambda: 0
        self.where = listening[0].getsockname()
        self.addCleanup(self.close_server)

    def close_server(self):
        for item in list(self.server.map.values()):
            item.close()

    def client(self, data=b""):
        client = socket.create_connection(self.where)
        self.addCleanup(client.close)
        client.settimeout(0)
        client.sendall(data)
        return client

    def turn(self, rounds=1):
        for _ in range(rounds):
            self.server.round(0.05)

    def heard(self, client):
        """What the server has sent by now; None where it has closed."""
        try:
            return client.recv(1 << 20) or None
        except BlockingIOError:
            return b""

    def first(self, data):
        """The status of the first answer to these bytes, as soon as it is there."""
        client, answer = self.client(data), b""
        for _ in range(6):
            self.turn()
            answer = self.heard(client)
            if answer != b"":
                break
        return int(answer.split(b" ")[1])

    def ask(self, data):
        """All that comes back for these bytes on a new connection."""
        client = self.client(data)
        self.turn(6)
        return self.heard(client)


def http_post(body=b"{}", headers=(), path="/webhook", token=TOKEN):
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"X-Token: {token}", *headers]
    lines.append(f"Content-Length: {len(body)}")
    return "\r\n".join([*lines, "", ""]).encode() + body


# Settings


class SettingsTest(unittest.TestCase):
    def read(self, **environ):
        return buffer.Settings.read({"TOKEN": TOKEN, **environ})

    def refused(self, **environ):
        with self.assertRaises(buffer.StartError) as caught:
            self.read(**environ)
        self.assertEqual(2, caught.exception.status)
        self.assertNotIn("\n", str(caught.exception))
        return str(caught.exception)

    def test_without_a_token_there_is_no_start_but_a_fresh_token_to_copy(self):
        for environ in ({"TOKEN": ""}, {"TOKEN": "", "MAX_BODY": "bad"}):
            first, second = self.refused(**environ), self.refused(**environ)
            self.assertRegex(first, r"TOKEN=[\w-]{43} python buffer.py")
            self.assertNotEqual(first, second)

    def test_defaults(self):
        settings = self.read()
        self.assertEqual(("", 8080), settings.addr)
        self.assertEqual(32 << 20, settings.max_body)
        self.assertEqual((600, 7, 120), (settings.lease, settings.retention_days, 120))
        self.assertIsNone(settings.webhook_token)

    def test_an_empty_value_means_the_default(self):
        self.assertEqual(32 << 20, self.read(MAX_BODY="").max_body)

    def test_an_empty_token_in_a_list_is_refused(self):
        for text in ("a,,b", ",", "a,", " ,a"):
            self.refused(TOKEN=text)
            self.refused(WEBHOOK_TOKEN=text)
        self.refused(WEBHOOK_TOKEN="")

    def test_several_tokens_for_rotation(self):
        self.assertEqual(
            (b"new", "velh\u00f3".encode()), self.read(TOKEN="new, velhó").token
        )

    def test_sizes(self):
        for text, number in (
            ("1048576", 1 << 20),
            ("512K", 512 << 10),
            ("32m", 32 << 20),
        ):
            self.assertEqual(number, self.read(MAX_BODY=text).max_body)
        for text, number in (("0", 0), ("1", 1), ("20G", 20 << 30)):
            self.assertEqual(number, self.read(MIN_FREE=text).min_free)

    def test_addresses(self):
        for text, expected in (
            (":8080", ("", 8080)),
            ("127.0.0.1:0", ("127.0.0.1", 0)),
            ("[::1]:80", ("::1", 80)),
            ("localhost:65535", ("localhost", 65535)),
            ("unix:/run/b.sock", ("unix", "/run/b.sock")),
        ):
            self.assertEqual(expected, self.read(ADDR=text).addr)

    def test_a_bad_value_is_named_with_what_is_allowed(self):
        for name, value, allowed in (
            ("ADDR", "8080", "127.0.0.1:8080"),
            ("ADDR", "::1:8080", "[::1]:8080"),
            ("ADDR", ":65536", "127.0.0.1:8080"),
            ("MAX_BODY", "32X", "32M"),
            ("MAX_BODY", "0", "512K"),
            ("MAX_BODY", "1G", "up to 512M"),
            ("MAX_BODY", "-1", "bytes"),
            ("MIN_FREE", "1T", "256M or 2G"),
            ("MAX_PENDING", "-1", "1000000"),
            ("LOG_FORMAT", "xml", "text or json"),
            ("LEASE", "0", "seconds"),
            ("LEASE", "ten", "from 1 to 604800"),
            ("LEASE", "٣", "from 1 to 604800"),
            ("RETENTION_DAYS", "0", "days"),
            ("RETENTION_DAYS", "nan", "days"),
            ("TRUSTED_PROXY", "10.0.0.0/99", "networks"),
            ("LOG_LEVEL", "LOUD", "DEBUG"),
            ("REQUEST_TIMEOUT", "1.5", "seconds"),
        ):
            with self.subTest(name=name, value=value):
                line = self.refused(**{name: value})
                self.assertIn(f"{name}={value!r}", line)
                self.assertIn(allowed, line)

    def test_a_secret_is_never_shown(self):
        self.assertNotIn("hidden", self.refused(TOKEN="hidden,"))
        self.assertNotIn(TOKEN, repr(self.read()))

    def test_settings_are_frozen(self):
        with self.assertRaises(AttributeError):
            self.read().lease = 1


# The store


class StoreTest(Case):
    def test_folder_and_file_are_for_the_owner(self):
        path = self.folder / "new" / "b.sqlite"
        previous = os.umask(0)
        self.addCleanup(os.umask, previous)
        store = buffer.Store(str(path))
        self.addCleanup(store.close)
        store.webhook(b"{}")
        self.assertEqual(0o750, stat.S_IMODE(path.parent.stat().st_mode))
        for file in path.parent.iterdir():
            self.assertEqual(0o600, stat.S_IMODE(file.stat().st_mode), file)

    def test_the_file_is_durable_and_can_shrink(self):
        for pragma, value in (
            ("journal_mode", "wal"),
            ("synchronous", 2),
            ("auto_vacuum", 2),
            ("secure_delete", 1),
        ):
            self.assertEqual(value, self.store._run(f"PRAGMA {pragma}")[0][0], pragma)

    def test_a_file_has_an_id_that_no_other_has_and_that_stays(self):
        before = self.store.file_id
        self.assertRegex(before, "^[0-9a-f]{16}$")
        self.open()
        self.assertEqual(before, self.store.file_id)
        reader, copy = buffer.ReadOnlyStore(self.configured.db_path), self.folder / "c"
        reader.backup(copy)
        reader.close()
        self.open(DB_PATH=str(copy))
        self.assertEqual(before, self.store.file_id)
        self.open(DB_PATH=str(self.folder / "other"))
        self.assertNotEqual(before, self.store.file_id)

    def test_every_query_of_the_hot_path_uses_its_index(self):
        queue = "COVERING INDEX fila_queue (status=? AND available_at=?"
        source = "COVERING INDEX fila_source (source=? AND status=? AND"
        by_id = "USING INTEGER PRIMARY KEY (rowid=?)"
        for name, index in (
            ("DUE", queue),
            ("DELAYS_OVER", "COVERING INDEX fila_queue (status=? AND available_at<?)"),
            ("LEASES_OVER", "COVERING INDEX fila_lease (lease_until<?)"),
            ("IN_WORK", "COVERING INDEX fila_lease (lease_until>?)"),
            ("PENDING", "contadores USING PRIMARY KEY (name=?)"),
            ("OLDEST_DUE", queue),
            ("OLDEST_DUE", "INDEX fila_queue (status=? AND available_at<?)"),
            ("OLDEST_DUE", by_id),
            *((name, by_id) for name in ("PEGAR", "PROCESSADO", "ERRO", "DEVOLVER")),
            *((name, by_id) for name in ("ESTENDER", "REENVIAR", "STATUS", "DELETE")),
            *((name, by_id) for name in ("LEASE_ENDED", "DELAY_ENDED", "FORGET")),
            *((name, by_id) for name in ("LOOK", "LOOK_SHORT", "REMEMBER")),
            ("LIST", queue),
            ("LIST_DELAYED", "COVERING INDEX fila_delayed (id>? AND id<?)"),
            ("LIST newest first", queue),
            (
                "LIST_DELAYED newest first",
                "COVERING INDEX fila_delayed (id>? AND id<?)",
            ),
            ("LIST_REASON", "COVERING INDEX fila_reason (reason=? AND id>? AND id<?)"),
            ("LIST_REASON newest first", "fila_reason (reason=? AND id>? AND id<?)"),
            ("MOTIVO", "COVERING INDEX fila_reason (reason=? AND id>? AND id<?)"),
            ("OLDEST_OPEN", queue),
            ("OLDEST_OPEN", "COVERING INDEX fila_delayed"),
            ("DELAYED", "COVERING INDEX fila_delayed"),
            ("SEARCHED", by_id),
            ("ANTECIPAR", by_id),
            ("CAME", "USING INTEGER PRIMARY KEY (rowid>?)"),
            ("EVENTO", "INDEX fila_event (<expr>=? AND event_id=?)"),
            ("EVENTO", "INDEX fila_event (<expr>>?)"),
            ("OLD", "COVERING INDEX fila_settled (settled_at<?)"),
            ("OLDEST_DUE", "COVERING INDEX fila_lease (lease_until<?)"),
            (
                "SEEN",
                "COVERING INDEX sqlite_autoindex_eventos_1 (source=? AND event_id=?)",
            ),
            ("DUE of a source", source),
            ("LIST of a source", source),
            ("DELAYS_OVER of a source", source),
            ("LIST_DELAYED of a source", "fila_delayed_source (source=? AND id>?"),
            ("LIST newest first of a source", source),
        ):
            name, _, kind = name.partition(" ")
            sql = getattr(buffer, name)
            sql = buffer.NEWEST[sql] if "newest first" in kind else sql
            sql = buffer.OF_SOURCE[sql] if "of a source" in kind else sql
            named = dict.fromkeys(re.findall(r":([a-z]\w*)", sql), 1)
            named.update({"ids": "[1]"} if "ids" in named else {})
            plan = self.store._run(f"EXPLAIN QUERY PLAN {sql}", **named)
            text = "\n".join(row["detail"] for row in plan)
            self.assertIn(index, text, name)
            self.assertNotRegex(text, r"(?m)SCAN fila$", name)
            if "MOTIVO" not in name:  # it sorts its few groups
                self.assertNotIn("TEMP B-TREE", text, name)

    def test_reasons_are_counted_in_an_index_alone(self):
        plan = f"EXPLAIN QUERY PLAN {buffer.MOTIVOS}"
        rows = self.store._run(plan, source=None, limit=1, after=0, until=9)
        self.assertIn("USING COVERING INDEX fila_reason", rows[0]["detail"])

    def test_a_request_that_fails_takes_nothing_else_with_it(self):
        with self.store.transaction():
            self.store.webhook(b"first")
            with self.assertRaises(sqlite3.Error):
                self.store.webhook([b"no value"])
            self.store.webhook(b"third")
        self.assertEqual(["first", "third"], [row["payload"] for row in self.rows()])

    def test_a_nested_failure_undoes_what_its_own_level_did(self):
        with self.store.transaction():
            with contextlib.suppress(ValueError), self.store.transaction():
                self.store.webhook(b"undone")
                with contextlib.suppress(ValueError), self.store.transaction():
                    raise ValueError
                raise ValueError
            self.store.webhook(b"kept")
        self.assertEqual(["kept"], [row["payload"] for row in self.rows()])

    def test_a_failed_begin_or_commit_leaves_the_lock_free(self):
        good = self.store._db
        for part in ("BEGIN", "COMMIT", "SAVEPOINT", "RELEASE"):
            self.store._db = Faulty(good, part)
            with contextlib.suppress(sqlite3.Error), self.store.transaction():
                self.store.webhook(b"{}")
                self.store.lease_ended()
            self.store._db = good
            with ThreadPoolExecutor(1) as other:
                other.submit(self.store.webhook, b"after").result(5)
        self.assertEqual({"after"}, {row["payload"] for row in self.rows()})

    def test_a_failed_rollback_does_not_end_the_service(self):
        good = self.store._db
        self.store._db = Faulty(Faulty(good, "INSERT"), "ROLLBACK")
        with self.assertRaises(sqlite3.Error):
            self.store.webhook(b"{}")
        self.store._db = good
        self.assertTrue(self.store.webhook(b"{}"))

    def test_after_sqlite_rolled_back_nothing_more_joins_the_transaction(self):
        with self.assertRaises(sqlite3.Error), self.store.transaction():
            self.store.webhook(b"lost")
            self.store._db.execute("ROLLBACK")
            with self.assertRaises(sqlite3.Error):
                self.store.webhook(b"must not become a transaction of its own")
        self.assertEqual([], self.rows())
        self.store.webhook(b"works again")

    def test_threads_get_their_own_rows(self):
        for number in range(256):
            self.store.webhook(b"%d" % number)
        got = []

        def consumer():
            while rows := self.store.pegar(3, 600, 1 << 20):
                got.extend(row["id"] for row in rows)

        threads = [threading.Thread(target=consumer) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(list(range(1, 257)), sorted(got))

    def test_what_is_no_database_of_ours_is_refused_in_one_line(self):
        def database(sql):
            path = self.folder / f"{len(list(self.folder.iterdir()))}.sqlite"
            with contextlib.closing(sqlite3.connect(path)) as db:
                db.executescript(sql)
            return path

        text = self.folder / "text"
        text.write_text("this is not a database, whatever its name says" * 50)
        for path, reason in (
            (text, "not a database"),
            (self.folder, "unable to open"),
            (pathlib.Path("/proc/nothing/b.sqlite"), "No such file"),
            (database("CREATE TABLE fila (a, b)"), "not a queue"),
            (database("PRAGMA user_version = 99"), "newer buffer.py made it"),
        ):
            before = path.read_bytes() if path.is_file() else None
            with self.assertRaises(buffer.StartError) as caught:
                buffer.Store(str(path))
            self.assertIn(reason, str(caught.exception))
            self.assertIn(str(path), str(caught.exception))
            self.assertNotIn("\n", str(caught.exception))
            if before:
                self.assertEqual(before, path.read_bytes())

    def test_an_old_sqlite_is_refused_with_what_helps(self):
        old = mock.patch("sqlite3.sqlite_version_info", (3, 34, 1))
        helps = "3.35 is needed.*uv run"
        with old, self.assertRaisesRegex(buffer.StartError, helps):
            buffer.Store(":memory:")


class GoProgramsFileTest(Case):
    """A file of the Go program opens as it is, and stays good for that program."""

    OLD = """
        CREATE TABLE fila (
            id         INTEGER PRIMARY KEY AUTOINCREMENT,
            payload    TEXT NOT NULL,
            status     TEXT NOT NULL DEFAULT 'pendente',
            locked_at  DATETIME,
            created_at DATETIME DEFAULT CURRENT_TIMESTAMP
        );
        CREATE INDEX idx_fila_status ON fila(status);
        INSERT INTO fila (payload, status, locked_at) VALUES
            ('{"n":1.10}', 'processado', '2020-01-01 00:00:00'),
            ('waits', 'pendente', NULL),
            ('old lease', 'processando', '2020-01-01 00:00:00'),
            ('new lease', 'processando', '2027-01-15 08:00:00'),
            (CAST(x'ff00fe' AS TEXT), 'pendente', NULL);"""
    RETURN_OLD = """
        UPDATE fila SET status='pendente', locked_at=NULL WHERE status='processando'
           AND locked_at < datetime('2027-01-15 08:20:00', '-10 minutes')"""
    CLAIM_OLD = """
        UPDATE fila SET status='processando', locked_at='2027-01-15 08:00:00' WHERE id IN
        (SELECT id FROM fila WHERE status='pendente' ORDER BY id LIMIT 1)
        RETURNING id, payload"""

    def open(self, **settings):
        path = self.folder / "b.sqlite"
        if not path.exists():
            self.old(self.OLD)
        super().open(**settings)

    def old(self, sql):
        with contextlib.closing(sqlite3.connect(self.folder / "b.sqlite")) as db:
            db.executescript(sql)

    def test_its_messages_come_out_and_leases_of_ten_minutes_hold(self):
        self.assertEqual([2, 3, 5], [item["id"] for item in self.claim()])
        for id_ in (2, 3, 5):
            self.settle(id_, "processado")
        self.clock.now += 599  # from 08:00:00, when the new lease began
        self.assertEqual([], self.claim())
        self.clock.now += 1
        self.assertEqual([4], [item["id"] for item in self.claim()])

    def test_its_messages_are_counted_and_those_it_adds(self):
        self.old("INSERT INTO fila (payload) VALUES ('from the old program')")
        found = {
            row["status"]: row["quantidade"] for row in self.store.report()["mensagens"]
        }
        self.assertEqual(
            {"pendente": 3, "processando": 2, "processado": 1, "erro": 0}, found
        )

    def test_text_that_is_not_utf8_does_not_spoil_the_claim(self):
        item = self.claim()[-1]
        self.assertEqual(("/wD+", "base64"), (item["payload"], item["codificacao"]))

    def test_its_history_is_kept_for_the_time_of_retention(self):
        self.assertEqual(0, self.store.purge(7, 100))
        self.clock.now += 7 * 86400 + 1
        self.assertEqual(1, self.store.purge(7, 100))

    def test_the_rebuilt_file_shrinks(self):
        self.assertEqual(2, self.store._run("PRAGMA auto_vacuum")[0][0])

    def test_without_room_for_a_copy_it_opens_as_well(self):
        """VACUUM, which lets a file shrink, is a nicety."""
        self.store.close()
        path = self.folder / "b.sqlite"
        path.unlink()
        self.old(self.OLD)
        run = buffer.Store._run

        def full(store, sql, **values):
            if sql == "VACUUM":
                raise sqlite3.OperationalError("disk is full")
            return run(store, sql, **values)

        with mock.patch.object(buffer.Store, "_run", full):
            self.open()
        self.assertIn(
            "will not shrink yet: OperationalError: disk is full", self.logged()
        )
        self.assertEqual([2, 3, 5], [item["id"] for item in self.claim()])

    def test_the_old_program_goes_on_with_the_file(self):
        self.claim("?limite=1")
        self.settle(2, "processado")
        self.store.close()
        self.old("CREATE INDEX IF NOT EXISTS idx_fila_status ON fila(status)")
        self.old("INSERT INTO fila (payload) VALUES ('from the old program')")
        self.old(self.CLAIM_OLD)
        self.open()
        self.clock.now += 600
        self.assertIn("from the old program", [i["payload"] for i in self.claim()])
        old = self.rows("SELECT status FROM fila ORDER BY id")
        self.assertEqual("processado", old[1]["status"])

    def test_a_lease_of_ours_means_the_same_to_the_old_program(self):
        self.claim()
        self.store.close()
        self.old(self.RETURN_OLD)
        [row] = self.rows("SELECT status FROM fila WHERE id = 2")
        self.assertEqual("pendente", row["status"])


# Senders


class WebhookTest(Case):
    def test_it_is_kept_with_what_belongs_to_it(self):
        self.send(
            b'{"a": 1}',
            "/webhook/messages-upsert?instance=loja&token=x&tag=1&tag=2",
            CONTENT_TYPE="application/json",
            HTTP_USER_AGENT="axios/1.7",
            HTTP_X_GITHUB_EVENT="push",
        )
        [item] = self.claim()
        self.assertEqual({"instance": "loja", "tag": ["1", "2"]}, item["query"])
        self.assertEqual("messages-upsert", item["caminho"])
        self.assertEqual("POST", item["metodo"])
        self.assertEqual("2027-01-15T08:00:00Z", item["recebido_em"])
        self.assertEqual("push", item["headers"]["x-github-event"])
        self.assertEqual("axios/1.7", item["headers"]["user-agent"])
        self.assertEqual("application/json", item["headers"]["content-type"])

    def test_credentials_and_what_proxies_add_are_not_kept(self):
        names = "X_TOKEN AUTHORIZATION COOKIE PROXY_AUTHORIZATION X_FORWARDED_FOR"
        names += " X_REAL_IP FORWARDED VIA CF_CONNECTING_IP CONNECTION"
        noise = {f"HTTP_{name}": "secret" for name in names.split()}
        self.send(b"{}", **{**noise, "HTTP_X_TOKEN": TOKEN})
        self.assertNotRegex(self.rows()[0]["headers"], f"secret|{TOKEN}")
        self.assertEqual(
            {"host": "127.0.0.1"}.keys() | {"content-length"},
            self.claim()[0]["headers"].keys() | {"content-length"},
        )

    def test_what_frameworks_take_for_path_method_or_client_is_not_kept(self):
        names = (
            "ORIGINAL_URL ORIGINAL_URI ORIGINAL_HOST REWRITE_URL ENVOY_ORIGINAL_PATH"
        )
        names += (
            " HTTP_METHOD_OVERRIDE HTTP_METHOD METHOD_OVERRIDE FORWARDED FORWARD_FOR"
        )
        names += " FORWARDED_PREFIX CLIENT_IP CLUSTER_CLIENT_IP HOST"
        self.send(**{f"HTTP_X_{name}": "/other" for name in names.split()})
        self.assertNotIn("/other", self.rows()[0]["headers"])

    def test_fields_that_connection_names_are_not_kept(self):
        self.send(
            HTTP_CONNECTION="close, X-Hop ,Keep-Alive", HTTP_X_HOP="1", HTTP_X_END="2"
        )
        headers = self.claim()[0]["headers"]
        self.assertEqual((None, "2"), (headers.get("x-hop"), headers.get("x-end")))

    def test_a_token_is_kept_in_no_header_and_nowhere_in_the_target(self):
        for token in (TOKEN, 'odd"+\\é/token-of-ours'):
            self.setUp()
            self.open(TOKEN=token, METRICS_TOKEN="only-for-/metrics")
            raw = token.encode()
            escaped = urllib.parse.quote(raw, "")
            every = "".join(f"%{byte:02x}" for byte in raw)
            written = (raw.decode("latin-1"), escaped, escaped.lower(), every)
            written += ("only-for-/metrics", "only-for-%2Fmetrics")
            for text in written:
                environ = {"HTTP_REFERER": f"https://h/webhook?a=1&token={text}&b=é"}
                environ["HTTP_X_API_KEY"] = f"Token {text}"
                environ["HTTP_X_ODD"] = '"\\'
                environ["REQUEST_URI"] = f"/webhook/x?key={escaped}&TOKEN={escaped}"
                url, own = environ["REQUEST_URI"], raw.decode("latin-1")
                self.send(b"{}", url, token=own, **environ)
                row = self.rows()[-1]
                headers = json.loads(row["headers"])
                self.assertEqual("Token ***", headers["x-api-key"], text)
                self.assertEqual('"\\', headers["x-odd"])
                url = "https://h/webhook?a=1&token=***&b=é"
                self.assertEqual(url, headers["referer"], text)
                self.assertEqual("key=***", row["query"])

    def test_paths(self):
        for url, path in (
            ("/webhook", None),
            ("/webhook/", None),
            ("/webhook//x", "x"),
            ("/webhook/x/y", "x/y"),
            ("/webhook/x%yão", "x%yão"),
        ):
            self.send(url=url)
            self.assertEqual(path, self.claim()[0].get("caminho"), url)

    def test_a_token_is_not_kept_however_it_is_written(self):
        self.send(url=f"/webhook?%74oken={TOKEN}&a=é")
        self.assertEqual({"a": "é"}, self.claim()[0]["query"])

    def test_where_a_token_may_stand(self):
        for headers, query in (
            ({"HTTP_X_TOKEN": TOKEN}, ""),
            ({"HTTP_AUTHORIZATION": f"Bearer {TOKEN}"}, ""),
            ({"HTTP_AUTHORIZATION": f"bearer  {TOKEN} "}, ""),
            ({"HTTP_X_TOKEN": ""}, f"?token={TOKEN}"),
            ({"HTTP_AUTHORIZATION": "Basic eDp5"}, f"?a=1&token={TOKEN}"),
            ({}, "?token=" + TOKEN.replace("-", "%2D")),
        ):
            status, _ = self.call(
                "POST", f"/webhook{query}", b"{}", token=None, **headers
            )
            self.assertEqual(200, status, (headers, query))

    def test_what_is_no_token(self):
        for headers, query in (
            ({}, ""),
            ({"HTTP_X_TOKEN": "x"}, ""),
            ({"HTTP_X_TOKEN": "x"}, f"?token={TOKEN}"),  # the header wins
            ({"HTTP_X_TOKEN": TOKEN + "1"}, ""),
            ({"HTTP_X_TOKEN": TOKEN + "/x"}, ""),
            ({"HTTP_X_TOKEN": TOKEN[:-1]}, ""),
            ({"HTTP_X_TOKEN": "\xe9\xff"}, ""),
            ({}, "?token="),
            ({}, "?token=%FF%FE"),
            ({}, f"?token={TOKEN}x"),
            ({}, f"?token={TOKEN[:-1]}/x"),
            ({}, f"?xtoken={TOKEN}"),
        ):
            answer = self.call("POST", f"/webhook{query}", b"{}", token=None, **headers)
            self.assertEqual((401, "não autorizado\n"), answer, (headers, query))
        self.assertEqual([], self.rows())
        self.assertNotIn(TOKEN, self.logged())

    def test_evolution_api_appends_the_event_to_the_token(self):
        self.send(url=f"/webhook?token={TOKEN}/messages-upsert", token=None)
        self.send(url=f"/webhook/loja?a=1&token={TOKEN}/send-message", token=None)
        first, second = self.claim()
        self.assertEqual("messages-upsert", first["caminho"])
        self.assertEqual("loja/send-message", second["caminho"])
        self.assertNotIn("query", first)
        self.assertEqual({"a": "1"}, second["query"])

    def test_only_a_sender_may_append_to_the_token(self):
        status, _ = self.call("POST", f"/fila/pegar?token={TOKEN}/x", token=None)
        self.assertEqual(401, status)

    def test_a_webhook_token_may_only_send(self):
        self.open(WEBHOOK_TOKEN="old-sender,new-sender")
        for token in ("old-sender", "new-sender", TOKEN):
            self.send(token=token)
        for url in ("/fila/pegar", "/fila/1/processado", "/fila/1/erro"):
            self.assertEqual(401, self.call("POST", url, token="new-sender")[0])
        self.assertEqual(3, len(self.claim()))

    def test_an_empty_body_is_refused(self):
        self.assertEqual((400, "payload inválido\n"), self.call("POST", "/webhook"))

    def test_get_is_never_2xx(self):
        """A proxy's 301 turns a POST into a GET; a 200 would lose every message."""
        for method in ("GET", "HEAD", "PUT", "DELETE", "OPTIONS", "PATCH"):
            for token in (TOKEN, None):
                status, _ = self.call(method, "/webhook/x", token=token)
                self.assertEqual((405, "POST"), (status, self.answered["Allow"]))

    def test_a_refusal_is_logged_once_in_a_while_without_payload_and_token(self):
        for _ in range(100):
            self.call("POST", "/webhook?token=wrong-one", b"the payload", token=None)
        self.assertEqual(1, self.logged().count("401"))
        self.assertIn("/webhook", self.logged())
        self.assertNotRegex(self.logged(), "payload|wrong-one")
        self.assertEqual(100, self.app.refused.total["token"])

    def test_repeated_lines_come_once_a_minute_with_their_number(self):
        clock = Clock(0)
        repeats = buffer.Repeats(logging.WARNING, clock)
        for second in range(130):
            clock.now = second
            repeats("kind", "it happened")
        lines = [line for line in self.log.output if "it happened" in line]
        self.assertEqual(3, len(lines))
        self.assertIn("number 61, 60 new", lines[1])

    def test_another_thread_may_have_logged_them(self):
        repeats = buffer.Repeats(logging.WARNING, lambda: repeats._kept.clear() or 0)
        repeats("kind", "it happened")
        self.assertNotIn("it happened", self.logged())

    def test_the_end_of_a_burst_is_logged_too(self):
        self.app.refused.clock = clock = Clock(0)
        for _ in range(100):
            self.call("POST", "/webhook", b"{}", token=None)
        for now in (59, 60, 120, 180):
            clock.now = now
            self.app.tick(now)
        lines = [line for line in self.log.output if "token: POST" in line]
        self.assertEqual(2, len(lines))
        self.assertIn("number 100, 99 new", lines[1])
        self.call("POST", "/webhook", b"{}", token=None)
        self.call("POST", "/webhook", b"{}", token=None)
        self.app.flush(gap=0)  # the service stops
        self.assertIn("number 102, 1 new", self.log.output[-1])


class DiscreetLogTest(Case):
    """No token, secret or payload in the log, whatever goes wrong."""

    def formatted(self, error, log_format="text"):
        """What start_log()'s handler writes of an exception."""
        settings = buffer.Settings.read({"TOKEN": TOKEN, "LOG_FORMAT": log_format})
        output, root = io.StringIO(), logging.getLogger()
        with mock.patch.multiple(root, handlers=[], level=root.level):
            with contextlib.redirect_stderr(output):
                buffer.start_log(settings)
            try:
                raise error
            except Exception:
                logging.getLogger("waitress").exception("Exception while serving %s", 1)
        self.assertEqual(1, output.getvalue().count("\n"), output.getvalue())
        return output.getvalue()

    def test_a_traceback_is_one_line_without_values(self):
        for error in (KeyError("hidden"), ValueError("hidden\nhidden")):
            line = self.formatted(error)
            self.assertRegex(line, r"ERROR Exception while serving 1: \w+Error at \w+")
            self.assertNotIn("hidden", line)

    def test_what_the_disk_and_sqlite_say_is_shown(self):
        for error, text in (
            (OSError(28, "No space left"), "OSError: No space left at"),
            (sqlite3.OperationalError("database is locked"), ": database is locked at"),
        ):
            self.assertIn(text, self.formatted(error))
        error = "Could not decode to UTF-8 column 'path' with text 'hidden'"
        line = self.formatted(sqlite3.OperationalError(error))
        self.assertIn("column 'path'", line)
        self.assertNotIn("hidden", line)

    def test_a_long_traceback_is_cut(self):
        def deeper():
            deeper()

        try:
            deeper()
        except RecursionError as error:
            self.assertEqual(10, buffer.trail(error).count("deeper"))

    def test_json_has_the_traceback_as_a_field(self):
        line = json.loads(self.formatted(KeyError("hidden"), "json"))
        self.assertRegex(line["time"], r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z$")
        self.assertEqual("ERROR", line["level"])
        self.assertEqual("Exception while serving 1", line["message"])
        self.assertRegex(
            line["traceback"], r"^KeyError at test_buffer.py:\d+ formatted$"
        )

    def test_json_has_what_was_summed_up_as_fields(self):
        self.call("POST", "/webhook", b"{}", token=None)
        record = self.log.records[-1]
        line = json.loads(buffer.JsonLines().format(record))
        self.assertEqual(
            ("WARNING", "token", 1, 1),
            (line["level"], line["kind"], line["number"], line["new"]),
        )

    def test_a_secret_that_a_request_holds_anywhere_stays_out(self):
        """The store's fault repeats all it was given."""

        def fails(*values, **more):
            raise ValueError(f"{values} {more}")

        self.store.webhook = fails
        self.app.refused.clock = itertools.count(step=60).__next__  # all are logged
        for token in (TOKEN, None):
            for path in (
                "/webhook",
                "/webhook?token=hidden",
                "/webhook&token=hidden",
                f"/{TOKEN}/webhook",
                f"/{'x' * 70}{TOKEN}",
            ):
                environ = {"PATH_INFO": path, "HTTP_X_KEY": "hidden"}
                url = "/webhook?token=hidden&a=hidden"
                self.call("POST", url, b"hidden", token, **environ)
        self.assertIn("ValueError at", self.logged())
        self.assertNotRegex(self.logged(), f"hidden|{TOKEN}")


# Signatures


def mac(secret, *parts, algorithm="sha256"):
    message = b"".join(p if isinstance(p, bytes) else p.encode() for p in parts)
    return hmac.new(secret.encode(), message, algorithm)


class SourceCase(Case):
    """Signed webhooks: `sign` makes the headers for a preset's body."""

    settings = (
        ("SECRET_GITHUB", "github-secret"),
        ("SECRET_STRIPE", "whsec_stripe"),
        ("SECRET_TELEGRAM", "telegram-secret"),
    )

    def github(self, body, secret="github-secret", **more):
        signature = "sha256=" + mac(secret, body).hexdigest()
        return {"HTTP_X_HUB_SIGNATURE_256": signature, **more}

    def stripe(self, body, at=None, secret="whsec_stripe"):
        at = self.clock.now if at is None else at
        signature = mac(secret, f"{at}.", body).hexdigest()
        return {"HTTP_STRIPE_SIGNATURE": f"t={at},v1={signature}"}

    def signed(self, url, body, headers):
        """The status of a webhook that carries no token."""
        return self.call("POST", url, body, token=None, **headers)[0]


class SourceTest(SourceCase):
    def test_the_signature_is_the_credential(self):
        body = b'{"id":1}'
        url = "/webhook/github/a/b?x=1"
        self.assertEqual(200, self.signed(url, body, self.github(body)))
        [item] = self.claim()
        self.assertEqual(("github", "a/b"), (item["fonte"], item["caminho"]))
        self.assertEqual({"x": "1"}, item["query"])

    def test_a_token_does_not_replace_it(self):
        answer = self.call("POST", f"/webhook/github?token={TOKEN}", b"{}")
        self.assertEqual((401, "não autorizado\n"), answer)
        self.assertEqual(1, self.app.refused.total["assinatura github"])

    def test_names_may_be_written_in_any_case_and_with_dashes(self):
        self.open(SECRET_MY_SHOP="s", SIGN_MY_SHOP="github")
        for name in ("my-shop", "My_Shop", "/MY-SHOP"):
            headers = self.github(b"{}", "s")
            self.assertEqual(200, self.signed(f"/webhook/{name}", b"{}", headers))
        self.assertEqual({"my-shop"}, {item["fonte"] for item in self.claim()})

    def test_what_is_no_source_is_plain_path(self):
        self.send(url="/webhook/gitlab/x")
        [item] = self.claim()
        self.assertEqual("gitlab/x", item["caminho"])
        self.assertNotIn("fonte", item)

    def test_both_secrets_while_rotating(self):
        self.open(SECRET_GITHUB="new", SECRET_GITHUB_OLD="old")
        for secret, status in (("new", 200), ("old", 200), ("other", 401)):
            headers = self.github(b"{}", secret)
            self.assertEqual(status, self.signed("/webhook/github", b"{}", headers))
        self.open(SECRET_GITLAB="new", SECRET_GITLAB_OLD="old")
        for secret, status in (("new", 200), ("old", 200), ("other", 401), ("", 401)):
            headers = {"HTTP_X_GITLAB_TOKEN": secret}
            self.assertEqual(status, self.signed("/webhook/gitlab", b"{}", headers))

    def test_a_plain_secret_is_not_kept_with_the_message(self):
        headers = {"HTTP_X_TELEGRAM_BOT_API_SECRET_TOKEN": "telegram-secret"}
        self.assertEqual(200, self.signed("/webhook/telegram", b"{}", headers))
        self.open(
            SECRET_X="hidden", SIGN_X="?key - -", SECRET_Y="hidden", SIGN_Y="X_Y - -"
        )
        self.assertEqual(200, self.signed("/webhook/x?key=hidden&a=1", b"{}", {}))
        self.assertEqual(200, self.signed("/webhook/y", b"{}", {"HTTP_X_Y": "hidden"}))
        for row in self.rows():
            self.assertNotRegex(f"{row['headers']}{row['query']}", "hidden|telegram-s")

    def test_nor_with_a_plain_one(self):
        self.open(SECRET_X="a-secret-of-a-source", SIGN_X="?key - -")
        self.send(
            url="/webhook/other?key=a-secret-of-a-source&b",
            HTTP_X_TELEGRAM_BOT_API_SECRET_TOKEN="the-one-before",
            HTTP_X_OTHER="a-secret-of-a-source",
        )
        [item] = self.claim()
        self.assertNotIn("x-telegram-bot-api-secret-token", item["headers"])
        self.assertEqual("***", item["headers"]["x-other"])
        self.assertEqual({"key": "***", "b": ""}, item["query"])

    def test_refusals_are_counted_by_source_and_reason(self):
        body = b"{}"
        for url, headers, reason in (
            ("/webhook/github", {}, "assinatura github"),
            ("/webhook/github", self.github(b"{ }"), "assinatura github"),
            ("/webhook/stripe", self.stripe(body, 1), "relogio stripe"),
            ("/webhook/telegram", {}, "token telegram"),
        ):
            before = self.app.refused.total[reason]
            self.assertEqual(401, self.signed(url, body, headers))
            self.assertEqual(before + 1, self.app.refused.total[reason], reason)

    def test_only_the_exact_bytes_are_genuine(self):
        body = b'{"n": 1.0}'
        for other in (b'{"n":1.0}', b'{"n": 1.0} ', b'{"n": 1}', b""):
            headers = self.github(body)
            self.assertEqual(401, self.signed("/webhook/github", other, headers), other)

    def test_a_signature_with_something_missing_or_more_is_refused(self):
        good = mac("github-secret", b"{}").hexdigest()
        for text in (
            *(good[:-1], good + "0", good[:32], good[:40], "0" * 64, "", "sha256="),
            "\xe9" * 64,
            *(
                good[:-1] + "é",
                mac("github-secret", b"{}", algorithm="sha1").hexdigest(),
            ),
            "A" * 100_000,
        ):
            headers = {"HTTP_X_HUB_SIGNATURE_256": text}
            self.assertEqual(401, self.signed("/webhook/github", b"{}", headers))

    def test_hex_or_base64_under_any_label_and_one_of_several(self):
        digest = mac("github-secret", b"{}")
        wrong = "0" * 64
        for text in (
            digest.hexdigest(),
            digest.hexdigest().upper(),
            "v1=" + digest.hexdigest(),
            base64.b64encode(digest.digest()).decode(),
            f"v1,{base64.b64encode(b'x' * 32).decode()} v1,"
            + base64.b64encode(digest.digest()).decode(),
            f"v1={wrong},v1={digest.hexdigest()},v0={wrong}",
        ):
            headers = {"HTTP_X_HUB_SIGNATURE_256": text}
            self.assertEqual(200, self.signed("/webhook/github", b"{}", headers), text)

    def test_a_timestamp_may_be_off_by_the_tolerance_both_ways(self):
        for off, status in ((-301, 401), (-300, 200), (300, 200), (301, 401)):
            headers = self.stripe(b"{}", self.clock.now + off)
            self.assertEqual(
                status, self.signed("/webhook/stripe", b"{}", headers), off
            )

    def test_tolerance_can_be_changed_and_switched_off(self):
        old = self.stripe(b"{}", self.clock.now - 1000)
        for seconds, status in (("999", 401), ("1000", 200), ("0", 200)):
            self.open(TOLERANCE_STRIPE=seconds)
            self.assertEqual(status, self.signed("/webhook/stripe", b"{}", old))

    def test_a_timestamp_in_milliseconds(self):
        headers = self.stripe(b"{}", self.clock.now * 1000 - 299_000)
        self.assertEqual(200, self.signed("/webhook/stripe", b"{}", headers))
        headers = self.stripe(b"{}", self.clock.now * 1000 - 301_000)
        self.assertEqual(401, self.signed("/webhook/stripe", b"{}", headers))

    def test_digits_by_the_thousand_are_refused(self):
        headers = self.stripe(b"{}", "9" * 5000)
        self.assertEqual(401, self.signed("/webhook/stripe", b"{}", headers))

    def test_whsec_is_text_for_stripe_and_base64_for_standard_webhooks(self):
        key = b"0123456789abcdef"
        secret = "whsec_" + base64.b64encode(key).decode()
        self.open(SECRET_STANDARDWEBHOOKS=secret)
        stamp = str(self.clock.now)
        message = b"msg_1." + stamp.encode() + b".{}"
        signature = base64.b64encode(hmac.digest(key, message, "sha256")).decode()
        headers = {
            "HTTP_WEBHOOK_ID": "msg_1",
            "HTTP_WEBHOOK_TIMESTAMP": stamp,
            "HTTP_WEBHOOK_SIGNATURE": "v1," + signature,
        }
        url = "/webhook/standardwebhooks"
        self.assertEqual(200, self.signed(url, b"{}", headers))
        self.assertEqual("msg_1", self.claim()[0]["evento"])

    def test_parts_in_brackets_may_be_missing(self):
        self.open(SECRET_X="s", SIGN_X="Sig [id:{q:id:lower};][r:{h:X-R};]b:{body} -")
        for query, headers, message in (
            ("?id=AbC", {"HTTP_X_R": "9"}, "id:abc;r:9;b:{}"),
            ("", {"HTTP_X_R": "9"}, "r:9;b:{}"),
            ("?id=", {}, "b:{}"),
        ):
            headers["HTTP_SIG"] = mac("s", message).hexdigest()
            self.assertEqual(200, self.signed(f"/webhook/x{query}", b"{}", headers))

    def test_what_is_not_in_brackets_may_not_be_missing(self):
        self.open(SECRET_SVIX="s")
        stamp = str(self.clock.now)
        headers = {"HTTP_SVIX_TIMESTAMP": stamp}
        headers["HTTP_SVIX_SIGNATURE"] = mac("s", f".{stamp}.", b"{}").hexdigest()
        self.assertEqual(401, self.signed("/webhook/svix", b"{}", headers))

    def test_a_query_value_is_signed_as_it_came(self):
        self.open(SECRET_X="s", SIGN_X="Sig {q:id} -")
        for text, status in (("AbC", 200), ("abc", 401)):
            headers = {"HTTP_SIG": mac("s", text).hexdigest()}
            self.assertEqual(status, self.signed("/webhook/x?id=AbC", b"{}", headers))

    def test_a_query_value_in_another_charset_can_be_signed(self):
        self.open(SECRET_X="s", SIGN_X="Sig {q:id}|{q:id:lower} -".replace("|", "||"))
        for query, message in (
            ("%E9%FF", b"\xe9\xff"),
            ("A%E9", b"a\xe9"),
            ("%C3%89", "é".encode()),
        ):
            headers = {"HTTP_SIG": mac("s", message).hexdigest()}
            self.assertEqual(200, self.signed(f"/webhook/x?id={query}", b"{}", headers))
        headers = {"HTTP_SIG": mac("s", b"\xef\xbf\xbd").hexdigest()}
        self.assertEqual(401, self.signed("/webhook/x?id=%E9", b"{}", headers))

    def test_either_of_two_templates_may_match(self):
        self.open(SECRET_X="s", SIGN_X="Sig a{body}||sha1:b{body} -")
        for part, algorithm, status in (
            ("a", "sha256", 200),
            ("b", "sha1", 200),
            ("b", "sha256", 401),
            ("a", "sha1", 401),
        ):
            headers = {
                "HTTP_SIG": mac("s", part, b"{}", algorithm=algorithm).hexdigest()
            }
            self.assertEqual(status, self.signed("/webhook/x", b"{}", headers))

    def test_the_signed_url_is_the_public_one(self):
        self.open(
            SECRET_X="s", SIGN_X="Sig {method}{url} -", PUBLIC_URL="https://h.example/"
        )
        message = "POSThttps://h.example/webhook/x/a%20b?q=%41"
        headers = {"HTTP_SIG": mac("s", message).hexdigest()}
        for more in (
            {},
            {"REQUEST_URI": "/webhook/x/a%20b?q=%41"},
            {"RAW_URI": "http://inside:80/webhook/x/a%20b?q=%41"},
        ):
            url = "/webhook/x/a b?q=%41"
            self.assertEqual(200, self.signed(url, b"{}", {**headers, **more}))

    def test_a_signature_in_the_query(self):
        self.open(SECRET_X="s", SIGN_X="?sig {body} -", SECRET_Y="y", SIGN_Y="?key - -")
        good = mac("s", b"{}").hexdigest()
        self.assertEqual(200, self.signed(f"/webhook/x?sig={good}", b"{}", {}))
        self.assertEqual(401, self.signed(f"/webhook/x?sig={good[:-1]}", b"{}", {}))
        for secret, query in (("y", "y"), ("a+b", "a+b"), ("ção", "%C3%A7%C3%A3o")):
            self.open(SECRET_Y=secret, SIGN_Y="?key - -")
            self.assertEqual(200, self.signed(f"/webhook/y?key={query}", b"{}", {}))
        self.assertEqual(401, self.signed("/webhook/y?key=%ff", b"{}", {}))

    def test_a_genuine_empty_body_is_still_no_message(self):
        self.assertEqual(400, self.signed("/webhook/github", b"", self.github(b"")))

    def test_a_wrong_setting_ends_the_start_and_says_what_is_wrong(self):
        for settings, reason in (
            ({"SIGN_X": "githab"}, "three words.*github, meta"),
            ({"SIGN_X": "H {body}"}, "three words"),
            ({"SIGN_X": "H {bodi} -"}, r"\{bodi\}"),
            ({"SIGN_X": "H {body -"}, r"\{body"),
            ({"SIGN_X": "H a]{body} -"}, "cannot be read"),
            ({"SIGN_X": "H [a[b]]{body} -"}, "cannot be read"),
            ({"SIGN_X": "H {body} $.."}, r"\$\.\."),
            ({"SIGN_X": "Hé {body} -"}, "Hé"),
            ({"SIGN_X": "square"}, "PUBLIC_URL"),
            ({"SIGN_X": "H body -"}, "body.* cannot be read"),
            ({"SIGN_X": "H {body}||- -"}, "cannot be read"),
            ({"SIGN_X": "H {body}|{t} -"}, "cannot be read"),
            ({"SIGN_X": "H sha512:{body} -"}, "sha512"),
            ({"SIGN_X": "H md5:{body} -"}, "md5"),
            ({"SIGN_X": "H SHA1:{body} -"}, "SHA1"),
            ({"SIGN_X": "?token - -"}, "token"),
            ({"SECRET_X": "whsec_"}, "SECRET_X"),
            ({"SECRET_X": " "}, "SECRET_X"),
            ({"SECRET_X": "hidden "}, "SECRET_X"),
            ({"SECRET_x": "y"}, "SECRET_x: write it in capitals"),
            ({"SECRET_MY-SHOP": "y"}, "- as _"),
            ({"SIGN_X_OLD": "github"}, "SIGN_X_OLD is set, but not SECRET_X_OLD"),
            ({"SECRET_X": ""}, "SECRET_X"),
            ({"SECRET_X_OLD": ""}, "SECRET_X_OLD"),
            ({"SIGN_Y": "github"}, "SIGN_Y is set, but not SECRET_Y"),
            ({"SECRET_Y_OLD": "y"}, "SECRET_Y_OLD is set, but not SECRET_Y"),
            ({"TOLERANCE_X": "soon"}, "TOLERANCE_X"),
            ({"DEDUPE": "$.a b"}, "DEDUPE"),
            ({"PUBLIC_URL": "hooks.example"}, "PUBLIC_URL"),
        ):
            with self.subTest(settings=settings):
                with self.assertRaises(buffer.StartError) as caught:
                    self.open(**{"SECRET_X": "hidden", **settings})
                self.assertRegex(str(caught.exception), reason)
                self.assertNotIn("hidden", str(caught.exception))
                self.assertEqual(2, caught.exception.status)

    def test_every_preset_can_be_read(self):
        for name in buffer.PRESETS:
            secret = f"SECRET_{name.upper()}"
            self.open(**{secret: "s", "PUBLIC_URL": "https://h.example"})
            self.assertEqual(401, self.signed(f"/webhook/{name}", b"{}", {}), name)


@unittest.skipUnless(SHARED.exists(), "no recorded signatures beside this folder")
class NamedTest(SourceCase):
    """FORWARD_<NAME> without a secret: a source that has a name, and needs a token."""

    settings = (
        *(("FORWARD_MY_SHOP", "http://n8n/x"), ("WEBHOOK_TOKEN", "only-for-sending")),
        *(("FORWARD_OTHER", "http://n8n/y"), ("SECRET_GITHUB", "github-secret")),
    )

    def test_a_token_is_its_credential(self):
        for token, status in (
            (None, 401),
            ("wrong", 401),
            (TOKEN, 200),
            ("only-for-sending", 200),
        ):
            answer = self.call("POST", "/webhook/my-shop", b"{}", token=token)
            self.assertEqual(status, answer[0], token)
        url = f"/webhook/my-shop?token={TOKEN}/messages-upsert"
        self.assertEqual(200, self.call("POST", url, b"{}", token=None)[0])
        self.assertEqual("messages-upsert", self.claim()[2]["caminho"])
        answer = self.call("POST", "/webhook/github", b"{}")
        self.assertEqual(401, answer[0], "a token does not replace a signature")

    def test_its_sender_is_known_before_the_body(self):
        def admitted(url, **headers):
            environ = {"REQUEST_METHOD": "POST", "PATH_INFO": url, **headers}
            return self.app.admit(environ)

        self.assertTrue(admitted("/webhook/my-shop", HTTP_X_TOKEN=TOKEN))
        self.assertFalse(admitted("/webhook/github"))
        with self.assertRaises(buffer.Refusal):
            admitted("/webhook/my-shop")

    def test_its_messages_have_its_name_and_can_be_claimed_by_it(self):
        for name in ("my-shop/a", "My_Shop/b", "/MY-SHOP//c", "plain/d", "my-shops/e"):
            self.send(url=f"/webhook/{name}")
        found = self.claim("?fonte=my_shop")
        self.assertEqual(["a", "b", "c"], [item["caminho"] for item in found])
        self.assertEqual({"my-shop"}, {item["fonte"] for item in found})
        found = self.claim()
        self.assertEqual(["plain/d", "my-shops/e"], [i["caminho"] for i in found])
        self.assertEqual({None}, {item.get("fonte") for item in found})

    def test_its_conversations(self):
        self.open(GROUP_KEY="$.de", GROUP_KEY_MY_SHOP="$.who")
        for name in ("my-shop", "other"):
            self.send(b'{"de":"a","who":"b"}', f"/webhook/{name}")
        self.assertEqual(["b", "a"], [item["chave"] for item in self.claim()])

    def test_an_event_id_is_one_of_its_own(self):
        self.open(DEDUPE="$.id")
        for url, status in (
            ("/webhook/my-shop", "ok"),
            ("/webhook/other", "ok"),
            ("/webhook", "ok"),
            ("/webhook/my-shop/x", "duplicado"),
        ):
            answer = self.call("POST", url, b'{"id":1}')[1]
            self.assertIn(status, answer, url)

    def test_handshakes_are_answered_as_without_a_name(self):
        self.open(VERIFY_TOKEN="v")
        query = "hub.mode=subscribe&hub.challenge=77&hub.verify_token="
        url = "/webhook/my-shop?" + query
        self.assertEqual((200, "77"), self.call("GET", url + "v", token=None))
        self.assertEqual(403, self.call("GET", url + "w", token=None)[0])
        url = "/webhook/github?" + query
        self.assertEqual(405, self.call("GET", url + "v", token=None)[0])
        answer = self.call("POST", "/webhook/my-shop?validationToken=abc")
        self.assertEqual((200, "abc"), answer)

    def test_what_belongs_to_one_that_signs_needs_a_secret(self):
        for settings, reason in (
            ({"SIGN_OTHER": "github"}, "^SIGN_OTHER is set, but not SECRET_OTHER$"),
            (
                {"TOLERANCE_OTHER": "1"},
                "^TOLERANCE_OTHER is set, but not SECRET_OTHER$",
            ),
            (
                {"SECRET_OTHER_OLD": "x"},
                "^SECRET_OTHER_OLD is set, but not SECRET_OTHER$",
            ),
            (
                {"GROUP_KEY_X": "$.a"},
                "^GROUP_KEY_X is set, but not SECRET_X, and FORWARD_X neither$",
            ),
            (
                {"FORWARD_X": ""},
                "^FORWARD_X is set, but not SECRET_X, and FORWARD_X neither$",
            ),
            ({"FORWARD_x": "http://h/"}, "capitals"),
        ):
            error = self.assertRaisesRegex(buffer.StartError, reason)
            with self.subTest(settings=settings), error:
                self.open(**settings)

    def test_what_others_call_so_does_not_become_one_in_silence(self):
        """Kubernetes sets these for a service that is called forward."""
        for name, value in (
            ("FORWARD_PORT", "tcp://10.0.0.1:80"),
            ("FORWARD_SERVICE_HOST", "10.0.0.1"),
            ("FORWARD_PORT_80_TCP", "tcp://10.0.0.1:80"),
        ):
            path = name.removeprefix("FORWARD_").lower().replace("_", "-")
            with self.assertRaises(buffer.StartError) as caught:
                self.open(**{name: value})
            text = str(caught.exception)
            self.assertTrue(text.startswith(f"{name}='***': it takes "), text)
            self.assertTrue(text.endswith(f"comes to /webhook/{path}"), text)
            self.assertEqual(2, caught.exception.status)


class VectorsTest(Case):
    """Made with the providers' own libraries."""

    SIGN = (("token", "X-Token - $.data.key.id"), ("basic", "Authorization - $.id"))

    def vectors(self):
        for line in (SHARED / "vectors" / "signatures.jsonl").read_text().splitlines():
            vector = json.loads(line)
            url = urllib.parse.urlsplit(vector["url"])
            name = vector["provider"]
            settings = {
                f"SECRET_{name.upper()}": vector["secret"],
                f"SIGN_{name.upper()}": dict(self.SIGN).get(name, name),
                f"TOLERANCE_{name.upper()}": str(vector["tolerance"] or 0),
                "PUBLIC_URL": f"{url.scheme}://{url.netloc}",
            }
            self.clock.now = vector["now"]
            yield vector, url, settings, base64.b64decode(vector["body_base64"])

    def test_each_has_its_verdict_and_event_id_over_http(self):
        for vector, url, settings, body in self.vectors():
            if "{url}" in buffer.PRESETS.get(vector["provider"], ""):
                continue  # it is signed for another URL than ours
            self.store.close()
            (self.folder / "b.sqlite").unlink()
            self.open(**settings)
            headers = {
                "CONTENT_TYPE"
                if name == "Content-Type"
                else "HTTP_" + name.upper().replace("-", "_"): value
                for name, value in vector["headers"].items()
            }
            where = f"/webhook/{vector['provider']}?{url.query}"
            status, _ = self.call(vector["method"], where, body, token=None, **headers)
            good = 200 if body else 400
            self.assertEqual(good if vector["valid"] else 401, status, vector["id"])
            if status == 200:
                found = self.rows()[0]["event_id"]
                self.assertEqual(vector["event_id"], found, vector["id"])

    def test_those_that_sign_their_url_have_their_verdict(self):
        for vector, url, settings, body in self.vectors():
            if "{url}" not in buffer.PRESETS.get(vector["provider"], ""):
                continue
            self.open(**settings)
            [source] = self.app.sources.values()
            request = mock.Mock(raw=body, method=vector["method"])
            request.target = f"{url.path}?{url.query}" if url.query else url.path
            request.query = urllib.parse.parse_qs(url.query, keep_blank_values=True)
            given = {name.lower(): text for name, text in vector["headers"].items()}
            request.header = lambda name, given=given: given.get(name.lower())
            try:
                source.verify(request, self.clock())
                self.assertTrue(vector["valid"], vector["id"])
            except buffer.BadSignature:
                self.assertFalse(vector["valid"], vector["id"])


class PresetsTest(SourceCase):
    """Each preset as its provider documents it: header, what is signed, and the id."""

    SIGNED = """
        generic          X-Signature                 {body}                hex
        github           X-Hub-Signature-256         {body}                sha256=hex
        meta             X-Hub-Signature-256         {body}                sha256=hex
        svix             svix-signature              msg_1.{now}.{body}    v1,base64
        standardwebhooks webhook-signature           msg_1.{now}.{body}    v1,base64
        shopify          X-Shopify-Hmac-Sha256       {body}                base64
        woocommerce      X-WC-Webhook-Signature      {body}                base64
        slack            X-Slack-Signature           v0:{now}:{body}       v0=hex
        chatwoot         X-Chatwoot-Signature        {now}.{body}          sha256=hex
        typeform         Typeform-Signature          {body}                sha256=base64
        stripe           Stripe-Signature            {now}.{body}          t={now},v1=hex
        paddle           Paddle-Signature            {now}:{body}          ts={now};h1=hex
        calendly         Calendly-Webhook-Signature  {now}.{body}          t={now},v1=hex
        square           x-square-hmacsha256-signature {url}{body}         base64
        hubspot          X-HubSpot-Signature-v3      POST{url}{body}{now}  base64
        zoom             x-zm-signature              v0:{now}:{body}       v0=hex
        razorpay         X-Razorpay-Signature        {body}                hex
        linear           Linear-Signature            {body}                hex
        notion           X-Notion-Signature          {body}                sha256=hex"""

    def test_each(self):
        body = '{"id":"evt_1","event_id":"evt_1"}'
        for line in self.SIGNED.strip().splitlines():
            name, header, message, form = line.split()
            self.open(
                **{f"SECRET_{name.upper()}": "s", "PUBLIC_URL": "https://h.example"}
            )
            url = f"https://h.example/webhook/{name}"
            parts = {"{body}": body, "{now}": str(self.clock.now), "{url}": url}
            for key, value in parts.items():
                message = message.replace(key, value)
            digest = mac("s", message)
            form = form.replace("hex", digest.hexdigest()).replace(
                "{now}", parts["{now}"]
            )
            text = form.replace("base64", base64.b64encode(digest.digest()).decode())
            headers = {"HTTP_" + header.upper().replace("-", "_"): text}
            for other in ("SVIX", "WEBHOOK"):
                headers[f"HTTP_{other}_ID"] = "msg_1"
                headers[f"HTTP_{other}_TIMESTAMP"] = parts["{now}"]
            for other in ("SLACK", "HUBSPOT", "ZM"):
                headers[f"HTTP_X_{other}_REQUEST_TIMESTAMP"] = parts["{now}"]
            headers["HTTP_X_CHATWOOT_TIMESTAMP"] = parts["{now}"]
            path = f"/webhook/{name}"
            self.assertEqual(200, self.signed(path, body.encode(), headers), name)
            self.assertEqual(
                401, self.signed(path, body.encode() + b" ", headers), name
            )

    def test_mercado_pago_in_both_spellings(self):
        self.open(SECRET_MERCADOPAGO="s")
        stamp = str(self.clock.now)
        for spelling in ("ORD01AbC", "ord01abc"):
            signature = mac("s", f"id:{spelling};request-id:r;ts:{stamp};").hexdigest()
            headers = {"HTTP_X_SIGNATURE": f"ts={stamp},v1={signature}"}
            headers["HTTP_X_REQUEST_ID"] = "r"
            url = "/webhook/mercadopago?data.id=ORD01AbC&type=order"
            self.assertEqual(200, self.signed(url, b"{}", headers))


class ProvidersTest(SourceCase):
    """Signed at test time by the providers' own libraries."""

    def test_stripe(self):
        stripe = library("stripe")
        body = '{"id": "evt_1", "object": "event"}'
        stamp = self.clock.now
        signature = stripe.WebhookSignature._compute_signature(
            f"{stamp}.{body}", "whsec_stripe"
        )
        headers = {"HTTP_STRIPE_SIGNATURE": f"t={stamp},v1={signature}"}
        self.assertEqual(200, self.signed("/webhook/stripe", body.encode(), headers))

    def test_standard_webhooks(self):
        library_ = library("standardwebhooks")
        secret = "whsec_" + base64.b64encode(b"k" * 24).decode()
        self.open(SECRET_STANDARDWEBHOOKS=secret)
        when = datetime.datetime.fromtimestamp(self.clock.now).astimezone()
        signature = library_.Webhook(secret).sign("msg_1", when, '{"a":1}')
        headers = {
            "HTTP_WEBHOOK_ID": "msg_1",
            "HTTP_WEBHOOK_TIMESTAMP": str(self.clock.now),
            "HTTP_WEBHOOK_SIGNATURE": signature,
        }
        url = "/webhook/standardwebhooks"
        self.assertEqual(200, self.signed(url, b'{"a":1}', headers))

    def test_slack(self):
        library("slack_sdk")
        from slack_sdk.signature import SignatureVerifier

        self.open(SECRET_SLACK="slack-secret")
        body, stamp = '{"event_id":"Ev1"}', str(self.clock.now)
        verifier = SignatureVerifier("slack-secret")
        signature = verifier.generate_signature(timestamp=stamp, body=body)
        headers = {
            "HTTP_X_SLACK_REQUEST_TIMESTAMP": stamp,
            "HTTP_X_SLACK_SIGNATURE": signature,
        }
        self.assertEqual(200, self.signed("/webhook/slack", body.encode(), headers))
        self.assertEqual("Ev1", self.claim()[0]["evento"])

    def test_square(self):
        library("square")
        from square.utils.webhooks_helper import verify_signature

        self.open(SECRET_SQUARE="square", PUBLIC_URL="https://h.example")
        url, body = "https://h.example/webhook/square", '{"event_id":"e"}'
        signature = base64.b64encode(mac("square", url, body).digest()).decode()
        good = {"request_body": body, "signature_header": signature}
        good.update(signature_key="square", notification_url=url)
        self.assertTrue(verify_signature(**good))
        headers = {"HTTP_X_SQUARE_HMACSHA256_SIGNATURE": signature}
        self.assertEqual(200, self.signed("/webhook/square", body.encode(), headers))

    def test_twilio(self):
        library("twilio")
        from twilio.request_validator import RequestValidator

        self.open(SECRET_TWILIO="twilio", PUBLIC_URL="https://h.example")
        validator = RequestValidator("twilio")
        url = "/webhook/twilio?a=1&b=%20"
        form = {
            "From": "+5511",
            "Body": "Olá ☕ & tchau",
            "Empty": "",
        }
        signature = validator.compute_signature("https://h.example" + url, form)
        body = urllib.parse.urlencode(form).encode()
        headers = {"HTTP_X_TWILIO_SIGNATURE": signature}
        self.assertEqual(200, self.signed(url, body, headers))
        self.assertEqual(401, self.signed(url, body + b"&x=1", headers))
        self.assertEqual(200, self.signed(url, body + b"&Empty=", headers))  # a set
        body = b'{"json": true}'
        url += "&bodySHA256=" + hashlib.sha256(body).hexdigest()
        signature = validator.compute_signature("https://h.example" + url, {})
        headers = {"HTTP_X_TWILIO_SIGNATURE": signature}
        self.assertEqual(200, self.signed(url, body, headers))
        self.assertEqual(401, self.signed(url, body + b" ", headers))


def library(name):
    try:
        return importlib.import_module(name)
    except ImportError:
        reason = f"the library {name} is not installed"
        raise unittest.SkipTest(reason) from None


class DuplicatesTest(SourceCase):
    def event(self, id_, url="/webhook/stripe"):
        body = json.dumps({"id": id_}).encode()
        return self.call("POST", url, body, token=None, **self.stripe(body))[1].strip()

    KNOWN, NEW = '{"status":"duplicado"}', '{"status":"ok"}'

    def test_the_second_arrival_is_answered_and_not_stored(self):
        answers = [self.event(id_) for id_ in ("a", "b", "a", "a")]
        self.assertEqual([self.NEW, self.NEW, self.KNOWN, self.KNOWN], answers)
        self.assertEqual(["a", "b"], [item["evento"] for item in self.claim()])

    def test_whatever_became_of_the_first(self):
        self.event("a")
        self.claim()
        for verdict in ("erro", "processado"):
            self.settle(1, verdict)
            self.assertEqual(self.KNOWN, self.event("a"))
        self.clock.now += 7 * 86400
        self.store.purge(0.001, 100)
        self.assertEqual([], self.rows())
        self.store.close()
        self.open()
        self.assertEqual(self.KNOWN, self.event("a"))

    def test_ids_are_remembered_for_dedupe_days(self):
        """Even when the message itself is erased or purged earlier."""
        self.open(RETENTION_DAYS="1")
        for id_ in ("a", "b"):
            self.event(id_)
        self.call("DELETE", "/fila/1")
        self.settle(2, "processado")
        housekeeper = buffer.Housekeeper(self.configured, self.store)
        for _ in range(7):
            self.clock.now += 86400
            housekeeper.tidy()
            self.assertEqual([self.KNOWN] * 2, [self.event("a"), self.event("b")])
        self.assertEqual([], self.rows())
        self.clock.now += 1
        housekeeper.tidy()
        self.assertEqual([self.NEW] * 2, [self.event("a"), self.event("b")])

    def test_a_failed_store_does_not_remember(self):
        good, self.store._db = self.store._db, Faulty(self.store._db, "INTO fila")
        body = b'{"id":"a"}'
        self.assertEqual(503, self.signed("/webhook/stripe", body, self.stripe(body)))
        self.store._db = good
        self.assertEqual(self.NEW, self.event("a"))

    def test_the_same_id_from_two_sources_is_two_events(self):
        self.event("a")
        headers = self.github(b"{}", HTTP_X_GITHUB_DELIVERY="a")
        self.assertEqual(200, self.signed("/webhook/github", b"{}", headers))
        self.assertEqual(2, len(self.rows()))

    def test_what_is_an_id(self):
        for value, expected in (
            ("text", "text"),
            (123456, "123456"),
            (10**30, str(10**30)),
            ("half \ud800", "half \\ud800"),
            ("", None),
            ("x" * 501, None),
            (None, None),
            (True, None),
            (1.5, None),
            ({}, None),
        ):
            self.event(value)
            [item] = self.claim()
            self.assertEqual(expected, item.get("evento"))

    def test_a_body_without_an_id_is_never_a_duplicate(self):
        for body in (b"{}", b"{}", b"[1]", b"not json", b'"id"', b"[" * 9999):
            headers = self.stripe(body)
            self.assertEqual(200, self.signed("/webhook/stripe", body, headers))
        self.assertEqual(6, len(self.rows()))

    def test_plain_webhooks_have_an_id_when_dedupe_says_where(self):
        self.open(DEDUPE="$.event,$.data.keys.0.id")
        first = b'{"event":"upsert","data":{"keys":[{"id":"3EB0"}]}}'
        second = b'{"event":"update","data":{"keys":[{"id":"3EB0"}]}}'
        missing = b'{"event":"connection"}'
        for body in (first, first, second, missing, missing):
            self.assertEqual(200, self.call("POST", "/webhook", body)[0])
        found = [item.get("evento") for item in self.claim()]
        self.assertEqual(["upsert,3EB0", "update,3EB0", None, None], found)
        self.open(DEDUPE="$.a,$.b")
        for a, b in (("x,y", "z"), ("x", "y,z")):
            body = json.dumps({"a": a, "b": b}).encode()
            self.assertIn("ok", self.call("POST", "/webhook", body)[1])

    def test_idempotency_key_is_not_assumed(self):
        for _ in range(2):
            self.send(HTTP_IDEMPOTENCY_KEY="k")
        self.open(DEDUPE="Idempotency-Key")
        for answer in (self.NEW, self.KNOWN):
            got = self.call("POST", "/webhook", b"{}", HTTP_IDEMPOTENCY_KEY="k")[1]
            self.assertEqual(answer, got.strip())


class ReplayTest(SourceCase):
    """What a stranger can do who has got hold of one signed request."""

    settings = (
        ("SECRET_GITHUB", "secret" * 3),
        ("SECRET_MERCADOPAGO", "secret" * 3),
        ("SECRET_LINEAR", "secret" * 3),
        ("SECRET_STANDARDWEBHOOKS", "secret" * 3),
        ("SECRET_TWILIO", "secret" * 3),
        ("PUBLIC_URL", "https://x"),
    )

    def post(self, url, body, **headers):
        return self.call("POST", url, body, token=None, **headers)

    def mac(self, *parts, algorithm="sha256"):
        return mac("secret" * 3, *parts, algorithm=algorithm).hexdigest()

    def github(self, body, delivery):
        signature = "sha256=" + self.mac(body)
        headers = {
            "HTTP_X_HUB_SIGNATURE_256": signature,
            "HTTP_X_GITHUB_DELIVERY": delivery,
        }
        return json.loads(self.post("/webhook/github", body, **headers)[1])["status"]

    def test_an_unsigned_id_makes_no_other_message_vanish(self):
        self.assertEqual("ok", self.github(b'{"old":1}', "id-of-an-event-to-come"))
        self.assertEqual("ok", self.github(b'{"new":1}', "id-of-an-event-to-come"))
        self.assertEqual(
            "duplicado", self.github(b'{"new":1}', "id-of-an-event-to-come")
        )
        self.assertEqual(
            "duplicado", self.github(b'{"old":1}', "id-of-an-event-to-come")
        )
        events = [row["event_id"] for row in self.rows()]
        self.assertEqual("id-of-an-event-to-come", events[0])
        self.assertRegex(events[1], r"\Aid-of-an-event-to-come [0-9a-f]{16}\Z")

    def test_nor_when_the_message_that_took_it_was_erased(self):
        self.github(b'{"old":1}', "id-of-an-event-to-come")
        self.call("DELETE", "/fila/1")
        for status in ("ok", "duplicado"):
            self.assertEqual(
                status, self.github(b'{"new":1}', "id-of-an-event-to-come")
            )

    def mercadopago(self, body, query="data.id=999", request="r1"):
        now = str(self.clock.now)
        digest = self.mac(f"id:999;request-id:r1;ts:{now};".encode())
        headers = {"HTTP_X_SIGNATURE": f"ts={now},v1={digest}"}
        if request:
            headers["HTTP_X_REQUEST_ID"] = request
        return self.post(f"/webhook/mercadopago?{query}", body, **headers)

    def test_neither_does_an_id_in_a_body_that_is_not_signed(self):
        self.assertEqual(200, self.mercadopago(b'{"id":12345,"forged":1}')[0])
        self.assertIn('"ok"', self.mercadopago(b'{"id":12345}')[1])
        self.assertIn('"duplicado"', self.mercadopago(b'{"id":12345}')[1])

    def test_a_signed_name_of_the_query_comes_once(self):
        for query in ("data.id=999&data.id=666", "data.id=666&data.id=999"):
            self.assertEqual(401, self.mercadopago(b"{}", query)[0])

    def test_what_is_signed_cannot_be_cut_in_another_place(self):
        query = "data.id=999;request-id:r1"
        self.assertEqual(401, self.mercadopago(b"{}", query, request=None)[0])
        now = str(self.clock.now)
        signed = f'a.{now}.b","x":1}}'
        signature = base64.b64encode(
            mac("secret" * 3, f"i.{now}.{signed}".encode()).digest()
        )
        headers = {"HTTP_WEBHOOK_SIGNATURE": f"v1,{signature.decode()}"}
        for id_, body, status in (
            ("i", signed, 200),
            (f"i.{now}.a", 'b","x":1}', 401),
        ):
            sent = {**headers, "HTTP_WEBHOOK_ID": id_, "HTTP_WEBHOOK_TIMESTAMP": now}
            answer = self.post("/webhook/standardwebhooks", body.encode(), **sent)
            self.assertEqual(status, answer[0])

    def test_the_time_that_linear_signs_in_the_body_is_checked(self):
        for off, status in (
            (0, 200),
            (299, 200),
            (301, 401),
            (-301, 401),
            (30 * 86400, 401),
        ):
            body = b'{"webhookTimestamp":%d}' % ((self.clock.now - off) * 1000)
            headers = {"HTTP_LINEAR_SIGNATURE": self.mac(body)}
            self.assertEqual(
                status, self.post("/webhook/linear", body, **headers)[0], off
            )

    def test_a_time_that_may_be_missing_is_refused_at_start(self):
        with self.assertRaisesRegex(buffer.StartError, "cannot be read"):
            self.open(SIGN_GITHUB="X-S [{t:X-Time}.]{body} -")

    def test_addresses_and_reasons_cost_time_in_line_with_their_bytes(self):
        trusted = buffer.Settings.read({"TOKEN": "x" * 16, "TRUSTED_PROXY": "::1"})

        def client(text):
            environ = {"REMOTE_ADDR": "::1", "HTTP_X_FORWARDED_FOR": text}
            return buffer.client_address(environ, trusted.trusted_proxy)

        def took(function, text):
            best = math.inf
            for _ in range(3):
                began = time.process_time()
                function(text)
                best = min(best, time.process_time() - began)
            return best

        fills = ("[", "]", ":", "1", "[]", "]:1", "::1,", "[::1]:80,", ",", " ", "7 a")
        functions = buffer.without_port, buffer.named, buffer.macs_in, client
        for function, fill in itertools.product(functions, fills):
            texts = (f"[{fill * (n * 1024 // len(fill))}x" for n in (16, 64))
            least, most = (took(function, text) for text in texts)
            if most > 0.004:
                self.assertLess(most, 6 * least, (function, fill))

    def test_a_form_that_is_signed_has_a_bound(self):
        body = b"a=" + b"%62" * 400_000
        headers = {"HTTP_X_TWILIO_SIGNATURE": "A" * 28}
        with mock.patch("urllib.parse.parse_qsl", side_effect=AssertionError):
            self.assertEqual(401, self.post("/webhook/twilio", body, **headers)[0])

    def test_signature_headers_cost_time_in_line_with_their_bytes(self):
        source = self.app.sources["STANDARDWEBHOOKS"]

        def took(text):
            request = mock.Mock(raw=b"x", header=lambda name: text, query={})
            best = math.inf
            for _ in range(3):
                began = time.process_time()
                with contextlib.suppress(buffer.BadSignature):
                    source.verify(request, 0)
                best = min(best, time.process_time() - began)
            return best

        for fill in (
            "a",
            "A" * 40 + " ",
            "v1,",
            "t=1,",
            "t=" + "1" * 15,
            "=",
            " ",
            "+/",
            "ts",
        ):
            least, most = (took(fill * (n * 1024 // len(fill))) for n in (16, 64))
            if most > 0.004:
                self.assertLess(most, 6 * least, fill)


class DuplicatesInARoundTest(Loop):
    settings = (("DEDUPE", "Idempotency-Key"),)

    def test_both_in_one_round(self):
        data = http_post(b"{}", ["Idempotency-Key: k"])
        clients = [self.client(data) for _ in range(3)]
        self.turn(3)
        answers = [self.heard(client).split()[-1] for client in clients]
        self.assertEqual(1, answers.count(b'{"status":"ok"}'))
        self.assertEqual(2, answers.count(b'{"status":"duplicado"}'))
        self.assertEqual(1, len(self.rows()))


class DuplicatesInTwoProcessesTest(unittest.TestCase):
    def test_the_same_event_200_times_is_stored_once(self):
        with Service(DEDUPE="Idempotency-Key") as one:
            settings = {"DB_PATH": one.db, "DEDUPE": "Idempotency-Key"}
            with Service(**settings) as two, ThreadPoolExecutor(16) as pool:
                headers = {"Idempotency-Key": "k"}
                answers = [
                    pool.submit(service.call, "POST", "/webhook", b"{}", headers)
                    for _ in range(100)
                    for service in (one, two)
                ]
                bodies = [answer.result()[2] for answer in answers]
            self.assertEqual(1, bodies.count(b'{"status":"ok"}\n'))
            self.assertEqual(199, bodies.count(b'{"status":"duplicado"}\n'))
            self.assertEqual(1, len(rows(one.db)))


class HandshakeTest(SourceCase):
    META = "/webhook/meta?hub.mode=subscribe&hub.challenge=115&hub.verify_token="

    def test_meta(self):
        self.open(VERIFY_TOKEN="vérify")
        answer = self.call("GET", self.META + "v%C3%A9rify", token=None)
        self.assertEqual((200, "115"), answer)
        self.assertEqual("nosniff", self.answered["X-Content-Type-Options"])
        self.assertIn("text/plain", self.answered["Content-Type"])
        for wrong in ("", "x", "%FF"):
            self.assertEqual(403, self.call("GET", self.META + wrong, token=None)[0])

    def test_a_get_is_405_unless_it_is_a_configured_handshake(self):
        self.assertEqual(405, self.call("GET", self.META + "x")[0])
        self.open(VERIFY_TOKEN="x")
        for method, url in (("GET", "/webhook"), ("HEAD", self.META + "x")):
            self.assertEqual(405, self.call(method, url)[0])
            self.assertEqual("POST", self.answered["Allow"])

    def test_a_challenge_is_short_and_printable(self):
        self.open(VERIFY_TOKEN="x")
        for challenge in ("", "a%0Ab", "%3Cscript%3E" + "a" * 1024, "%C3%A9"):
            url = self.META.replace("115", challenge) + "x"
            self.assertEqual(400, self.call("GET", url)[0], challenge)

    def test_slack(self):
        self.open(SECRET_SLACK="s")
        body = b'{"type":"url_verification","challenge":"3eZb"}'
        stamp = str(self.clock.now)
        headers = {
            "HTTP_X_SLACK_REQUEST_TIMESTAMP": stamp,
            "HTTP_X_SLACK_SIGNATURE": "v0="
            + mac("s", f"v0:{stamp}:", body).hexdigest(),
        }
        answer = self.call("POST", "/webhook/slack", body, token=None, **headers)
        self.assertEqual((200, "3eZb"), answer)
        self.assertEqual(401, self.signed("/webhook/slack", body, {}))
        self.assertEqual([], self.rows())

    def test_zoom(self):
        self.open(SECRET_ZOOM="z")
        body = b'{"event":"endpoint.url_validation","payload":{"plainToken":"q9"}}'
        stamp = str(self.clock.now)
        headers = {
            "HTTP_X_ZM_REQUEST_TIMESTAMP": stamp,
            "HTTP_X_ZM_SIGNATURE": "v0=" + mac("z", f"v0:{stamp}:", body).hexdigest(),
        }
        status, text = self.call("POST", "/webhook/zoom", body, token=None, **headers)
        expected = {"plainToken": "q9", "encryptedToken": mac("z", "q9").hexdigest()}
        self.assertEqual((200, expected), (status, json.loads(text)))
        self.assertEqual(401, self.signed("/webhook/zoom", body, {}))
        self.assertEqual([], self.rows())

    def test_microsoft_graph(self):
        url = "/webhook/graph?validationToken=Validation%3A+Testing"
        self.assertEqual((200, "Validation: Testing"), self.call("POST", url))
        self.assertEqual(401, self.call("POST", url, token=None)[0])
        self.send(b"{}", url)  # a body is a message
        self.assertEqual(1, len(self.rows()))

    def test_woocommerce(self):
        self.open(SECRET_WOOCOMMERCE="w")
        url = "/webhook/woocommerce"
        self.assertEqual(200, self.signed(url, b"webhook_id=12", {}))
        self.assertEqual(401, self.signed(url, b"webhook_id=12&x=1", {}))
        wrong = {"HTTP_X_WC_WEBHOOK_SIGNATURE": "wrong"}
        self.assertEqual(401, self.signed(url, b"webhook_id=12", wrong))
        self.assertEqual(401, self.signed("/webhook/github", b"webhook_id=12", {}))
        self.assertEqual(401, self.signed(url, b"{}", {}))
        self.assertEqual([], self.rows())

    def test_meta_does_not_check_the_urls_of_others(self):
        self.open(VERIFY_TOKEN="x", SECRET_META="m")
        for url, status in (("/webhook/meta", 200), ("/webhook/stripe", 405)):
            query = self.META.partition("?")[2]
            self.assertEqual(status, self.call("GET", f"{url}?{query}x")[0])

    def test_an_odd_challenge_is_no_fault_of_ours(self):
        self.open(SECRET_ZOOM="z")
        stamp = str(self.clock.now)
        for plain in ('"\\ud800"', "1.5", "null", "{}"):
            body = b'{"event":"endpoint.url_validation","payload":{"plainToken":%s}}'
            body %= plain.encode()
            headers = {"HTTP_X_ZM_REQUEST_TIMESTAMP": stamp}
            headers["HTTP_X_ZM_SIGNATURE"] = mac("z", f"v0:{stamp}:", body).hexdigest()
            self.assertEqual(200, self.signed("/webhook/zoom", body, headers), plain)

    def test_without_its_preset_nothing_is_a_handshake(self):
        body = b'{"type":"url_verification","challenge":"3eZb"}'
        self.send(body)
        self.assertEqual(200, self.signed("/webhook/github", body, self.github(body)))
        self.assertEqual(2, len(self.rows()))


class ContentEncodingTest(SourceCase):
    def test_it_is_taken_off_after_the_signature_check(self):
        plain = b'{"id": 1}'
        raw_deflate = zlib.compressobj(wbits=-15)
        for coding, body in (
            ("gzip", gzip.compress(plain)),
            ("x-gzip", gzip.compress(plain[:5]) + gzip.compress(plain[5:])),
            ("deflate", zlib.compress(plain)),
            ("gzip", gzip.compress(plain) + bytes(100)),
            ("Deflate", raw_deflate.compress(plain) + raw_deflate.flush()),
        ):
            headers = self.github(body, HTTP_CONTENT_ENCODING=coding)
            self.assertEqual(200, self.signed("/webhook/github", body, headers))
            [item] = self.claim()
            self.assertEqual({"id": 1}, item["payload"])
            self.assertNotIn("content-encoding", item["headers"])
            self.assertEqual("9", item["headers"]["content-length"])

    def test_what_is_not_what_it_says_is_kept_as_it_came(self):
        many = gzip.compress(b"") * 1001
        for body in (
            b"{}",
            gzip.compress(b"{}")[:-1],
            gzip.compress(b"{}") + b"x",
            many,
        ):
            self.send(body, HTTP_CONTENT_ENCODING="gzip")
            self.assertEqual("gzip", self.claim()[0]["headers"]["content-encoding"])
            self.assertEqual(
                body,
                bytes(self.rows()[-1]["payload"], "utf-8")
                if isinstance(self.rows()[-1]["payload"], str)
                else self.rows()[-1]["payload"],
            )

    def test_the_limit_is_on_the_inflated_size(self):
        self.open(MAX_BODY="1000")
        for size, status in ((1000, 200), (1001, 413)):
            body = gzip.compress(b"1" * size)
            answer = self.call("POST", "/webhook", body, HTTP_CONTENT_ENCODING="gzip")
            self.assertEqual(status, answer[0])

    def test_a_bomb_costs_little_memory(self):
        bomb = io.BytesIO()
        with gzip.GzipFile(fileobj=bomb, mode="wb", compresslevel=9) as file:
            for _ in range(10 * 1024 if "--all" in sys.argv else 256):
                file.write(bytes(1 << 20))
        body = bomb.getvalue()
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        answer = self.call("POST", "/webhook", body, HTTP_CONTENT_ENCODING="gzip")
        self.assertEqual(413, answer[0])
        self.assertLess(tracemalloc.get_traced_memory()[1], 50 << 20)


class LimitsTest(Case):
    def wrong(self, address="9.9.9.9", **environ):
        environ["REMOTE_ADDR"] = address
        return self.call("POST", "/webhook", b"{}", token="wrong", **environ)[0]

    def setUp(self):
        super().setUp()
        self.app.wrong.clock = Clock(0)

    def test_after_20_wrong_credentials_further_wrong_ones_get_429(self):
        self.assertEqual([401] * 20 + [429] * 5, [self.wrong() for _ in range(25)])
        self.assertGreater(int(self.answered["Retry-After"]), 0)
        self.app.wrong.clock.now += 60
        self.assertEqual([401] * 20 + [429], [self.wrong() for _ in range(21)])
        self.assertEqual(46, self.app.refused.total["token"])

    def test_a_verify_token_cannot_be_tried_out(self):
        self.open(VERIFY_TOKEN="x")
        url = "/webhook?hub.challenge=1&hub.verify_token=wrong"
        codes = [self.call("GET", url, token=None)[0] for _ in range(21)]
        self.assertEqual([403] * 20 + [429], codes)

    def test_a_right_credential_is_always_served(self):
        for _ in range(50):
            self.wrong()
        self.send(REMOTE_ADDR="9.9.9.9")
        self.claim()

    def test_addresses_do_not_pay_for_each_other(self):
        for _ in range(30):
            self.wrong()
        self.assertEqual(401, self.wrong("8.8.8.8"))

    def test_behind_a_trusted_proxy_the_address_is_the_senders(self):
        self.open(TRUSTED_PROXY="127.0.0.1")
        for _ in range(30):
            self.wrong("127.0.0.1", HTTP_X_FORWARDED_FOR="1.1.1.1")
        status = self.wrong("127.0.0.1", HTTP_X_FORWARDED_FOR="2.2.2.2")
        self.assertEqual(401, status)

    def test_memory_is_bounded(self):
        buckets = buffer.Buckets(1, 1, Clock(0))
        buckets.SIZE = 100
        for number in range(1000):
            buckets.take(str(number))
        self.assertEqual(100, len(buckets._levels))
        self.assertEqual(1, buckets.take("999"))
        self.assertEqual(0, buckets.take("0"))

    def test_rate_limit_is_per_address_with_a_burst_of_twice(self):
        self.open(RATE_LIMIT="5")
        self.app.webhooks.clock = Clock(0)

        def send(address):
            environ = {"REMOTE_ADDR": address}
            return self.call("POST", "/webhook", b"{}", **environ)[0]

        self.assertEqual([200] * 10 + [429], [send("1.1.1.1") for _ in range(11)])
        self.assertEqual("1", self.answered["Retry-After"])
        self.assertEqual(200, send("2.2.2.2"))
        self.app.webhooks.clock.now += 1
        self.assertEqual([200] * 5 + [429], [send("1.1.1.1") for _ in range(6)])
        for _ in range(30):  # consumers are not limited
            status, _ = self.call("POST", "/fila/pegar?limite=1", REMOTE_ADDR="1.1.1.1")
            self.assertEqual(200, status)

    def test_without_a_limit_there_is_none(self):
        for _ in range(100):
            self.send(REMOTE_ADDR="1.1.1.1")


class NeverA500Test(SourceCase):
    """Random headers and bodies: refused or kept, and never our fault."""

    settings = (
        *SourceCase.settings,
        *(("SECRET_SLACK", "s"), ("SECRET_TWILIO", "t"), ("SECRET_MERCADOPAGO", "m")),
        *(("SECRET_STANDARDWEBHOOKS", "whsec_!"), ("PUBLIC_URL", "https://h.example")),
    )

    NAMES = (
        "X-Hub-Signature-256 Stripe-Signature X-Slack-Signature X-Signature X-Token"
        " X-Slack-Request-Timestamp X-Twilio-Signature Authorization webhook-id"
        " webhook-timestamp webhook-signature Content-Encoding X-Request-Id"
        " X-Telegram-Bot-Api-Secret-Token X-Forwarded-For"
    )
    BITS = ("t=", "ts=", "v1=", ",", "=", "sha256=", "gzip", "Bearer ", "9" * 400)
    BITS += ("0" * 64, "\xff", "Ã©", " ", "\t", TOKEN, "-1", "whsec_", "A" * 44)
    BODIES = (b"{}", b"\xff", b"[" * 2000, b"a=1&b=%ff&&&=", b'{"id":"\\ud800"}')
    URLS = ("", "?bodySHA256=%ff", "?data.id=%80", "?token=%ff/\xff", "/\xff?a&=&%")

    def request(self, random):
        headers = {
            "HTTP_" + name.upper().replace("-", "_"): "".join(
                random.choice(self.BITS) for _ in range(random.randint(0, 5))
            )
            for name in random.sample(self.NAMES.split(), 4)
        }
        path, _, query = random.choice(self.URLS).partition("?")
        name = random.choice(["plain", *sorted(self.app.sources)]).lower()
        body = random.choice(self.BODIES)
        environ = {"REQUEST_METHOD": "POST", "QUERY_STRING": query, **headers}
        environ["PATH_INFO"] = f"/webhook/{name}{path}"
        environ.update(
            {"CONTENT_LENGTH": str(len(body)), "wsgi.input": io.BytesIO(body)}
        )
        reply = self.app.respond(environ)
        self.assertIn(reply.code, (200, 400, 401, 429), self.log.output[-1])

    def test_a_seeded_sweep(self):
        random = Random(4)
        for _ in range(2000):
            self.request(random)

    def test_hypothesis(self):
        try:
            import hypothesis
        except ImportError:
            self.skipTest("hypothesis is not installed")
        options = {"deadline": None, "database": None, "max_examples": 300}
        options["suppress_health_check"] = list(hypothesis.HealthCheck)

        @hypothesis.settings(**options)
        @hypothesis.given(hypothesis.strategies.randoms())
        def sweep(random):
            self.request(random)

        sweep()


# Consumers


class PegarTest(Case):
    def test_oldest_first_and_each_once(self):
        for number in range(5):
            self.send(b"%d" % number)
        self.assertEqual([0, 1], [item["payload"] for item in self.claim("?limite=2")])
        self.assertEqual([2, 3, 4], [item["payload"] for item in self.claim()])
        self.assertEqual([], self.claim())

    def test_nothing_is_an_empty_array_with_200(self):
        self.assertEqual((200, "[]\n"), self.call("POST", "/fila/pegar"))
        self.assertEqual("application/json", self.answered["Content-Type"])

    def test_limite(self):
        self.store.webhook(b"{}")
        for _ in range(9):
            self.store._run(
                "INSERT INTO fila (payload, size) SELECT payload, size FROM fila"
            )
        for query, count in (
            *((f"?limite={text}", 50) for text in ("", "abc", "0", "-1", "501", "1.5")),
            *((f"?limite={text}", 50) for text in ("1e2", "%2B7", "٣", "9" * 5000)),
            ("", 50),
            ("?limite=7", 7),
            ("?limite=1", 1),
            ("?limite=500", 500),
        ):
            self.assertEqual(count, len(self.claim(query)), query[:20])
            self.store._run("UPDATE fila SET status = 'pendente', attempts = 0")

    def test_a_lease_that_ends_gives_the_message_out_again(self):
        self.send()
        self.assertEqual(1, self.claim()[0]["tentativa"])
        self.clock.now += 599
        self.assertEqual([], self.claim())
        self.clock.now += 1
        self.assertEqual(2, self.claim()[0]["tentativa"])

    def test_a_batch_is_bounded_by_bytes_but_gives_at_least_one(self):
        self.open(MAX_BATCH_BYTES="100")
        for length in (150, 60, 60, 30, 5):
            self.send(b"1" * length)
        batches = [[len(str(i["payload"])) for i in self.claim()] for _ in range(4)]
        self.assertEqual([[150], [60, 30, 5], [60], []], batches)

    def test_a_big_message_waits_for_the_next_claim_and_holds_nobody_up(self):
        self.open(MAX_BATCH_BYTES="100")
        for body in (b"[1]", b"2" * 99, b"[3]", b"[4]"):
            self.send(body)
        self.assertEqual(
            [[1], [3], [4]], [i["payload"] for i in self.claim("?limite=3")]
        )
        self.assertEqual([2], [item["id"] for item in self.claim()])

    def test_a_lease_never_ends_a_moment_early(self):
        self.open(LEASE="1")
        self.send()
        self.clock.now += 0.9
        self.claim()
        self.clock.now += 0.9
        self.assertEqual([], self.claim())
        self.clock.now += 0.3
        self.assertEqual(1, len(self.claim()))

    def test_a_row_that_was_inserted_by_hand_comes_out(self):
        self.store._run("INSERT INTO fila (payload) VALUES ('{}')")
        self.assertEqual([{}], [item["payload"] for item in self.claim()])

    def test_what_cannot_be_shown_goes_to_erro_alone(self):
        """Whatever it is: the memory, a fault of ours, bytes that are no UTF-8 any more,
        headers that are no JSON."""
        for n in range(7):
            self.send(b'{"n":%d}' % n, url=f"/webhook/{n}?a={n}")
        for id_, change in (
            (2, "path = CAST(x'ff41' AS TEXT)"),
            (3, "headers = '{\"cut\": '"),
            (4, "query = CAST(x'7b22ff227d' AS TEXT)"),
            (5, "event_id = CAST(x'41ff' AS TEXT)"),
        ):
            self.store._run(f"UPDATE fila SET {change} WHERE id = {id_}")
        shown = buffer.item_json

        def failing(row):
            if row["id"] == 6:
                raise MemoryError
            return shown(row)

        with mock.patch("buffer.item_json", failing):
            self.assertEqual([1], [item["id"] for item in self.claim("?limite=6")][:1])
        self.assertEqual([6, 7], [item["id"] for item in self.claim()])
        found = {
            row["id"]: row["status"] for row in self.rows("SELECT id, status FROM fila")
        }
        self.assertEqual(["erro"] * 4, [found[n] for n in (2, 3, 4, 5)])
        self.assertEqual("processando", found[1])
        for id_ in (2, 3, 4, 5):
            status, text = self.call("GET", f"/fila/{id_}")
            self.assertEqual(200, status)
            self.assertIn("não pode ser mostrada", json.loads(text)["motivo"])
        self.assertEqual(7, len(json.loads(self.call("GET", "/fila")[1])))

    def test_no_damaged_number_stops_the_queue(self):
        for column in ("size", "lost", "attempts"):
            self.send()
            self.store._run(f"UPDATE fila SET {column} = CAST(x'ff' AS TEXT)")
            self.send()
            for method, url in (("GET", "/fila"), ("POST", "/fila/pegar")):
                with self.subTest(column, url=url):
                    status, text = self.call(method, url)
                    self.assertEqual(200, status)
                    self.assertGreater(len(json.loads(text)), 0)
            [newest] = self.rows("SELECT status FROM fila ORDER BY id DESC LIMIT 1")
            self.assertEqual("processando", newest["status"])
            self.store._run("DELETE FROM fila")

    def test_nor_one_of_a_conversation(self):
        self.open(GROUP_KEY="$.de")
        for column in ("size", "lost"):
            for n in range(2):
                self.send(b'{"de":"%d"}' % n)
            change = f"{column} = CAST(x'ff' AS TEXT)"
            self.store._run(f"UPDATE fila SET {change} WHERE id % 2 = 1")
            self.assertEqual(2, len(self.claim("?serie=1")), column)
            self.store._run("DELETE FROM fila")

    def test_a_damaged_row_is_listed_and_counted_like_others(self):
        names = (
            "status lease_until available_at settled_at source event_id reason tries"
        )
        for column in names.split():
            self.send(url="/webhook/x")
            [[id_]] = self.rows("SELECT max(id) FROM fila")
            change = f"{column} = CAST(x'41ff' AS TEXT)"
            self.store._run(f"UPDATE fila SET {change} WHERE id = {id_}")
            for url in (f"/fila/{id_}", "/fila", "/painel/dados", "/metrics"):
                with self.subTest(column, url=url):
                    self.assertEqual(200, self.call("GET", url)[0])
            self.assertEqual(204, self.call("DELETE", f"/fila/{id_}")[0])

    def test_so_does_what_the_memory_does_not_take_at_all(self):
        for n in range(3):
            self.send(b"%d" % n)
        run = self.store._run

        def small(sql, **values):
            if sql == buffer.PEGAR and 1 in json.loads(values["ids"]):
                raise MemoryError
            return run(sql, **values)

        with mock.patch.object(self.store, "_run", small):
            self.assertEqual([2, 3], [item["id"] for item in self.claim()])
        self.assertEqual("não cabe na memória", self.rows()[0]["reason"])

    def test_an_answer_has_a_bound_whatever_it_takes_to_show(self):
        """A control character takes six bytes as JSON."""
        self.open(MAX_BATCH_BYTES="1M")
        for _ in range(4):
            self.send(b"\x01" * 200_000)
        self.assertEqual(4, len(self.rows()))
        ids = []
        while items := self.call("POST", "/fila/pegar?limite=4")[1]:
            self.assertLess(len(items), 2_100_000)
            found = [item["id"] for item in json.loads(items)]
            if not found:
                break
            ids += found
        self.assertEqual([1, 2, 3, 4], ids)
        self.assertEqual({1}, {row["attempts"] for row in self.rows()})

    def test_an_empty_claim_writes_nothing(self):
        changes = self.store._db.total_changes
        self.claim()
        self.assertEqual(changes, self.store._db.total_changes)

    def test_rights(self):
        self.send()
        self.assertEqual(401, self.call("POST", "/fila/pegar", token="wrong")[0])
        self.assertEqual(405, self.call("GET", "/fila/pegar")[0])
        self.assertEqual("POST", self.answered["Allow"])
        self.assertEqual(1, len(self.claim()))


class PayloadTest(Case):
    """The bytes come out as they went in."""

    def test_json_is_handed_on_verbatim(self):
        for body in (
            b'{"a":1,"n":1.10,"big":12345678901234567890,"e":1E5,"a":2}',
            b' {"a" : [1, 2 ,3] }\n',
            '{"m":"olá ☕ 😀 \\u00e9 \\ud800","x":null}'.encode(),
            b"42",
            b'"text"',
            b"null",
            b"[]",
            b"[" * 500 + b"]" * 500,
            b'["' + b"[" * 1000 + b'\\"{"]',
            b"[" + b",".join([b"[{}]"] * 1000) + b"]",
        ):
            self.send(body)
            _, text = self.call("POST", "/fila/pegar")
            self.assertIn(f'"payload":{body.decode()},', text)
            json.loads(text)

    def test_what_is_not_json_comes_out_as_text(self):
        for body in (
            "not json at all",
            "a=1&b=2",
            '<xml attr="1"/>',
            '{"x":NaN}',
            "[Infinity]",
            "-Infinity",
            '\ufeff{"bom":true}',
            '{"a":1',
            "{'a':1}",
            "nul\0inside",
            "\0",
            " ",
            "[" * 100_000 + "]" * 100_000,
            '{"a":' * 501 + "1" + "}" * 501,
            '{"n":' + "7" * 5000 + "}",
            "\u2028 ☕",
        ):
            self.send(body.encode())
            [item] = self.claim()
            self.assertEqual(body, item["payload"])
            self.assertNotIn("codificacao", item)

    def test_what_is_not_utf8_comes_out_as_base64(self):
        for body in (
            b"\xff\xfe\x00",
            b"\xed\xa0\x80",
            b'{"a":"\xe9"}',
            bytes(range(256)),
        ):
            self.send(body)
            [item] = self.claim()
            self.assertEqual("base64", item["codificacao"])
            self.assertEqual(body, base64.b64decode(item["payload"]))

    def test_looking_for_brackets_costs_little(self):
        media = b"[" * 501 + b'"' + b"A" * (4 << 20) + b'"' + b"]" * 501
        unclosed = b"[" * 501 + b'"' + b'\\"' * 200_000
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for body in (media, unclosed):
            buffer.is_json(body)
        self.assertLess(tracemalloc.get_traced_memory()[1], 20 << 20)

    def test_no_objects_are_made_of_a_payload(self):
        """63 kB of packed brackets would be gigabytes of them."""
        many = 1 << 22
        bodies = (
            b"[" + b"[[[]]]," * many + b"0]",
            b'{"a":' * many,
            b"[" + b'{"":0},' * many + b"0]",
            b'""' * many,
            b"[" + b'"",' * many + b"0]",
            b"7," * many,
            b'{"a":' + b"[" * 400 + b'"' + b'\\"' * many + b'"' + b"]" * 400 + b"}",
            # valid ones in which the strings have to be told from the rest
            b'["' + b"7" * 5000 + b'a\\"' * many + b'"]',
            b'["' + b'a\\"' * many + b'"' + b",[]" * 600 + b"]",
        )
        tracemalloc.start()
        self.addCleanup(tracemalloc.stop)
        for body in bodies:
            tracemalloc.reset_peak()
            before = tracemalloc.get_traced_memory()[0]
            buffer.payload_json(body)
            buffer.read_json(body)
            peak = tracemalloc.get_traced_memory()[1] - before
            self.assertLess(peak, 4 * len(body) + (1 << 20), body[:9])

    def test_a_payload_is_judged_in_time_linear_in_its_bytes(self):
        """Four times the bytes may take six times as long; a square would be sixteen."""

        def took(head, fill, tail, size):
            body, best = head + fill * (size // len(fill)) + tail, math.inf
            for _ in range(3):
                began = time.process_time()
                buffer.payload_json(body)
                buffer.read_json(body)
                best = min(best, time.process_time() - began)
            return best

        digits = b'["' + b"7" * 5000
        for head, fill, tail in (
            (b"[", b"[" * 480 + b"]" * 480 + b",", b"0]"),
            (digits, b'\\"', b'"]'),
            (digits, b"\\\\", b'"]'),
            (digits + b'"', b',"a"', b"]"),
            (b"", b'"', b""),
            (b'"', b"\\", b""),
            (b"", b" ", b"x"),
            (b"[", b"1", b"]"),
            (b"", b"-", b""),
            (b"", b"[", b""),
            (b"", b'{"a":', b""),
        ):
            least, most = (took(head, fill, tail, n << 10) for n in (128, 512))
            if most > 0.004:
                self.assertLess(most, 6 * least, (head[:3], fill[:9]))
                self.assertLess(most, 0.15, (head[:3], fill[:9]))

    def test_a_backslash_ends_no_string_that_it_is_not_escaped_in(self):
        self.assertTrue(buffer.is_json(b'"' + b"[" * 600 + b'"'))
        for text in (b'"\\\\"', b'"\\\\\\""', b'"\\n\\\\"'):
            flat = b"[" + text + b",[]" * 600 + b"," + text + b"]"
            inside = b'["\\\\\\"' + b"[" * 600 + b'",' + text + b"]"
            deep = b"[" * 501 + text + b"]" * 501
            found = [buffer.is_json(body) for body in (flat, inside, deep)]
            self.assertEqual([True, True, False], found, text)

    def test_a_number_of_very_many_digits_is_not_computed(self):
        """Python before 3.10.7 takes the square of their number in time."""
        if hasattr(sys, "set_int_max_str_digits"):
            self.addCleanup(sys.set_int_max_str_digits, sys.get_int_max_str_digits())
            sys.set_int_max_str_digits(0)
        for value in (b"7" * 4300, b'"' + b"7" * 5000 + b'"'):
            found = buffer.read_json(b'{"id":%s}' % value)
            self.assertEqual(value.strip(b'"').decode(), str(found["id"]))
        self.assertIsNone(buffer.read_json(b'{"a":"\\"","id":' + b"7" * 4301 + b"}"))

    def test_json_with_very_many_values_comes_out_as_text(self):
        body = b"[" + b"0," * buffer.STRUCTURE + b"0]"
        self.assertEqual(b'"[0,', buffer.payload_json(body)[0][:4])
        body = b"[" + b"0," * (buffer.STRUCTURE - 10) + b"0]"
        self.assertEqual((body, False), buffer.payload_json(body))

    def test_digits_in_a_string_are_no_number(self):
        for body in (b'["' + b"7" * 5000 + b'"]', b"[" + b"7," * 5000 + b"7]"):
            self.assertEqual((body, False), buffer.payload_json(body))

    def test_a_form_of_very_many_fields_stays_text(self):
        form = {"CONTENT_TYPE": "application/x-www-form-urlencoded"}
        for count, kind in ((10_000, dict), (10_001, str)):
            self.send("&".join(["a=b"] * count).encode(), **form)
            [item] = self.claim("?formato=n8n")
            self.assertIsInstance(item["body"], kind)

    def test_one_bad_message_leaves_the_batch_readable(self):
        for body in (b"{}", b"[NaN]", b"\xff", b"[" * 5000, b"7" * 5000, b"{}"):
            self.send(body)
        self.assertEqual(6, len(self.claim()))

    def test_a_header_that_comes_twice_is_kept_once(self):
        """Some servers give CONTENT_TYPE and HTTP_CONTENT_TYPE."""
        environ = {"CONTENT_TYPE": "a/b", "HTTP_CONTENT_TYPE": "c/d"}
        environ.update({"CONTENT_LENGTH": "2", "HTTP_CONTENT_LENGTH": "2"})
        environ.update({"REQUEST_METHOD": "POST", "PATH_INFO": "/webhook"})
        environ.update({"HTTP_X_TOKEN": TOKEN, "wsgi.input": io.BytesIO(b"{}")})
        self.assertEqual(200, self.app.respond(environ).code)
        text = self.rows()[0]["headers"]
        self.assertEqual((1, 1), (text.count("content-type"), text.count("length")))

    def test_very_many_headers_are_not_remembered(self):
        self.send()
        before = buffer.kept_names.cache_info().currsize
        self.send(HTTP_CONNECTION="close, x-0")  # and those that a sender names so
        self.send(**{f"HTTP_X_{number}": "x" for number in range(200)})
        self.assertEqual(before, buffer.kept_names.cache_info().currsize)
        self.assertEqual(200, self.rows()[-1]["headers"].count('"x-'))

    def test_hostile_headers_and_queries_come_out_as_json(self):
        odd = {"PATH_INFO": "/webhook/\xff", "HTTP_X_ODD": '\xff"\\'}
        self.send(url="/webhook?a=%FF&b=%ED%A0%80&c", **odd)
        [item] = self.claim()
        self.assertEqual('\xff"\\', item["headers"]["x-odd"])
        self.assertEqual({"a", "b", "c"}, item["query"].keys())

    @unittest.skipUnless(SHARED.exists(), "no recorded traffic beside this folder")
    def test_recorded_payloads_come_out_as_they_went_in(self):
        for file in sorted((SHARED / "payloads").glob("*.jsonl")):
            for line in file.read_text().splitlines():
                body = line[line.index('"body": ') + 8 : line.rindex("}")]
                self.send(body.encode(), CONTENT_TYPE="application/json")
                _, text = self.call("POST", "/fila/pegar")
                self.assertIn(f'"payload":{body},"tentativa"', text)


class SettleTest(Case):
    def message(self):
        self.send()
        return self.claim()[0]["id"]

    def status(self, id_):
        return self.rows(f"SELECT status FROM fila WHERE id = {id_}")[0]["status"]

    def test_the_answer_names_the_status(self):
        id_ = self.message()
        answer = self.call("POST", f"/fila/{id_}/processado")
        self.assertEqual((200, '{"status":"processado"}\n'), answer)

    def test_unknown_and_impossible_ids(self):
        for id_, code in (
            ("99999", 404),
            ("-1", 404),
            ("0", 404),
            ("99999999999999999999", 404),
            ("9" * 5000, 404),
            ("abc", 400),
            ("1.5", 400),
            ("1_0", 400),
            ("٣", 400),
            (" 1", 400),
        ):
            for verdict in ("processado", "erro"):
                self.assertEqual(code, self.settle(id_, verdict), id_[:30])

    def test_no_such_verdict(self):
        id_ = self.message()
        answer = self.call("POST", f"/fila/{id_}/feito")
        self.assertEqual(400, answer[0])
        self.assertTrue(answer[1].startswith("status deve ser processado ou erro"))
        self.assertEqual("processando", self.status(id_))

    def test_erro_keeps_the_reason(self):
        id_ = self.message()
        self.settle(id_, "erro", "número inválido ☕\n".encode() + b"\xff" * 5000)
        reason = self.rows()[0]["reason"]
        self.assertTrue(reason.startswith("número inválido ☕"))
        self.assertLessEqual(len(reason), 2000)

    def test_unknown_paths(self):
        for path in ("/", "/nada", "/webhookx", "/filas", "/fila/1/2/3"):
            self.assertEqual(404, self.call("POST", path)[0], path)


class QueueCase(Case):
    def post(self, url, value=None):
        """(status, parsed answer) of a POST with a JSON body."""
        body = b"" if value is None else json.dumps(value).encode()
        status, text = self.call("POST", url, body)
        return status, json.loads(text) if text.startswith(("{", "[")) else text

    def get(self, url):
        status, text = self.call("GET", url)
        self.assertEqual(200, status, text)
        return json.loads(text)

    def messages(self, count):
        for number in range(count):
            self.send(b"%d" % number)

    def row(self, id_):
        [row] = self.rows(f"SELECT * FROM fila WHERE id = {id_}")
        return row


class VerdictsTest(QueueCase):
    """The settle table: which verdict on which status gives what."""

    TABLE = """
        processado pendente 200, processando 200, processado 200, erro 200
        erro       pendente 200, processando 200, processado 409, erro 200
        devolver   pendente 200, processando 200, processado 409, erro 409
        estender   pendente 409, processando 200, processado 409, erro 409
        reenviar   pendente 200, processando 409, processado 200, erro 200"""

    AFTER = (
        ("devolver", "pendente"),
        ("estender", "processando"),
        ("reenviar", "pendente"),
    )

    def message(self, status):
        self.send()
        id_ = self.claim("?limite=1")[0]["id"]
        if status == "pendente":
            self.settle(id_, "devolver?em=0")
        elif status != "processando":
            self.assertEqual(200, self.settle(id_, status))
        return id_

    def test_table(self):
        for line in self.TABLE.strip().splitlines():
            verdict, _, cells = line.strip().partition(" ")
            for cell in cells.split(","):
                status, code = cell.split()
                for many in (False, True):
                    with self.subTest(verdict=verdict, status=status, many=many):
                        self.check(verdict, status, int(code), many)

    def check(self, verdict, status, code, many):
        id_ = self.message(status)
        if many:
            got, answer = self.post(f"/fila/{verdict}", {"ids": [id_]})
            self.assertEqual(200, got)
            self.assertEqual(code == 200, answer["ids"] == [id_])
            self.assertEqual(
                code == 409, [i["id"] for i in answer["ignorados"]] == [id_]
            )
        else:
            self.assertEqual(code, self.settle(id_, verdict))
        after = dict(self.AFTER).get(verdict, verdict) if code == 200 else status
        self.assertEqual(after, self.row(id_)["status"])
        self.store.delete(id_)

    def test_unknown_ids(self):
        for verdict in ("processado", "erro", "devolver", "estender", "reenviar"):
            self.assertEqual(404, self.settle(99999, verdict))

    def test_the_fence_refuses_whoever_was_overtaken(self):
        self.send()
        self.claim()
        self.clock.now += 600
        self.assertEqual(200, self.settle(1, "processado?tentativa=1"))  # nobody has it
        self.settle(1, "reenviar")
        self.claim()
        self.clock.now += 600
        self.claim()
        for verdict in ("processado", "erro", "devolver", "estender"):
            self.assertEqual(409, self.settle(1, f"{verdict}?tentativa=1"))
            _, answer = self.post(f"/fila/{verdict}?tentativa=1", {"ids": [1]})
            self.assertIn("tentativa 2", answer["ignorados"][0]["motivo"])
        self.assertEqual("processando", self.row(1)["status"])
        self.assertEqual(200, self.settle(1, "processado?tentativa=2"))
        self.assertEqual(200, self.settle(1, "processado?tentativa=2"))

    def test_a_fence_that_is_no_number_does_nothing(self):
        self.send()
        self.claim()
        for text in ("abc", "", "-1", "1.0"):
            self.assertEqual(400, self.settle(1, f"processado?tentativa={text}"))
        self.assertEqual("processando", self.row(1)["status"])

    def test_replay_starts_from_the_beginning(self):
        id_ = self.message("erro")
        self.assertEqual(200, self.settle(id_, "reenviar"))
        row = self.row(id_)
        self.assertEqual(
            (0, 0, None, None),
            (row["attempts"], row["lost"], row["settled_at"], row["reason"]),
        )
        self.assertEqual(1, self.claim()[0]["tentativa"])

    def test_extending_counts_from_now(self):
        self.send()
        self.claim()
        self.clock.now += 500
        self.assertEqual(200, self.settle(1, "estender?segundos=1000"))
        self.clock.now += 999
        self.assertEqual([], self.claim())
        self.clock.now += 1
        self.assertEqual(1, len(self.claim()))


class ReasonsTest(QueueCase):
    """What is told of a message beside its status."""

    settings = (("MAX_ATTEMPTS", "2"),)

    def test_used_up_says_since_when(self):
        self.send()
        self.claim()
        self.settle(1, "devolver?em=0")
        self.claim()
        self.clock.now += 600
        self.store.lease_ended()
        self.assertIn("resolvido_em", self.get("/fila/1"))
        esgotadas = self.store.report()["contadores"]["esgotadas"]
        self.assertEqual({"": 1}, esgotadas)
        self.assertIn("messages have used up their attempts", self.logged())

    def test_many_that_are_used_up_are_few_lines_in_the_log(self):
        self.store.used_up.clock = clock = Clock(0)
        for id_ in range(1, 11):
            self.send()
            self.claim()
            self.settle(id_, "devolver?em=0")
            self.claim()
            self.settle(id_, "devolver?em=0")
        clock.now = 60
        self.app.flush()
        lines = [line for line in self.log.output if "used up" in line]
        self.assertEqual(2, len(lines))
        self.assertIn("number 10, 9 new", lines[1])

    def test_what_a_consumer_said_is_kept_until_a_replay(self):
        self.send()
        self.claim()
        self.settle(1, "devolver?em=0", b"busy")
        self.claim()
        self.settle(1, "devolver")
        self.assertEqual(
            ("erro", "busy"), (self.row(1)["status"], self.row(1)["reason"])
        )
        self.settle(1, "reenviar")
        self.assertIsNone(self.row(1)["reason"])
        self.assertNotIn("resolvido_em", self.get("/fila/1"))


class BatchTest(QueueCase):
    def test_it_tells_which_were_not_settled_and_why(self):
        self.messages(3)
        self.claim("?limite=2")
        self.settle(2, "processado")
        status, answer = self.post(
            "/fila/erro", {"ids": [3, 2, 1, 9, 1], "motivo": "x"}
        )
        self.assertEqual(
            (200, "erro", [3, 1]), (status, answer["status"], answer["ids"])
        )
        reasons = {item["id"]: item["motivo"] for item in answer["ignorados"]}
        self.assertEqual({2, 9}, reasons.keys())
        self.assertIn("processado", reasons[2])
        self.assertIn("não encontrada", reasons[9])
        self.assertEqual("x", self.row(1)["reason"])

    def test_malformed_is_400_without_effect(self):
        self.messages(1)
        self.claim()
        for body in (
            *(b"", b"[1]", b"{}", b'{"ids":1}', b'{"ids":[1', b'{"ids":[1,"a"]}'),
            *(b'{"ids":[1.5]}', b'{"ids":[true]}', b'{"ids":[null]}', b"\xff"),
            *(b'{"ids":[[1]]}', b"[" * 9999, b'{"ids":["1_0"]}'),
            json.dumps({"ids": [1] * 1001}).encode(),
        ):
            for verdict in ("processado", "erro", "devolver", "estender", "reenviar"):
                self.assertEqual(
                    400, self.call("POST", f"/fila/{verdict}", body)[0], body
                )
        self.assertEqual("processando", self.row(1)["status"])

    def test_a_thousand_in_one_transaction(self):
        with self.store.transaction():
            for _ in range(1000):
                self.store.webhook(b"{}")
        statements = []
        self.store._db.set_trace_callback(statements.append)
        _, answer = self.post("/fila/processado", {"ids": list(range(1, 1001))})
        self.store._db.set_trace_callback(None)
        self.assertEqual(1000, len(answer["ids"]))
        self.assertEqual(1, statements.count("COMMIT"))

    def test_ids_may_be_text_and_beyond_what_a_row_can_have(self):
        self.messages(1)
        _, answer = self.post("/fila/processado", {"ids": ["1", 10**29, -5]})
        self.assertEqual([1], answer["ids"])
        self.assertEqual([10**29, -5], [item["id"] for item in answer["ignorados"]])

    def test_replay_by_filter(self):
        for source in (None, "a", "b"):
            for _ in range(3):
                self.store.webhook(b"{}", source=source)
        self.post("/fila/erro", {"ids": [1, 2, 4, 5, 7, 8]})
        self.settle(9, "processado")
        for query, ids in (
            ("?status=erro&fonte=a&ate=4", [4]),
            ("?status=erro&fonte=a", [5]),
            ("?status=erro&ate=2", [1, 2]),
            ("?status=erro", [7, 8]),
            ("?status=processado", [9]),
        ):
            _, answer = self.post("/fila/reenviar" + query)
            self.assertEqual(len(ids), answer["quantidade"], query)
            self.assertFalse(answer["mais"])
            for id_ in ids:
                self.assertEqual("pendente", self.row(id_)["status"])
        self.settle(9, "erro")
        for query, value in (
            *((f"?status={status}", None) for status in ("pendente", "x", "")),
            ("?status=erro&ate=abc", None),
            ("?status=erro&ate=", None),
            ("?status=erro&fonte=", None),
            ("?status=erro&font=a", None),
            ("?status=erro&limite=1", None),
            ("?status=erro", {"ids": [1]}),
        ):
            self.assertEqual(400, self.post("/fila/reenviar" + query, value)[0])

    def test_replay_of_very_many_says_that_there_are_more(self):
        self.messages(3)
        self.post("/fila/erro", {"ids": [1, 2, 3]})
        with mock.patch.object(buffer.App, "MANY", 2):
            answers = [self.post("/fila/reenviar?status=erro")[1] for _ in range(2)]
        self.assertEqual(
            [(2, True), (1, False)], [(a["quantidade"], a["mais"]) for a in answers]
        )


class DevolverTest(QueueCase):
    def test_it_comes_back_after_the_delay(self):
        self.send()
        self.claim()
        self.assertEqual(200, self.settle(1, "devolver?em=90", b"busy"))
        self.assertEqual("busy", self.row(1)["reason"])
        self.clock.now += 89
        self.assertEqual([], self.claim())
        self.clock.now += 1
        self.assertEqual(2, self.claim()[0]["tentativa"])

    def test_em_0_is_at_once(self):
        self.send()
        self.claim()
        self.settle(1, "devolver?em=0")
        self.assertEqual(1, len(self.claim()))

    def test_backoff_doubles_up_to_an_hour_with_a_jitter_of_a_fifth(self):
        self.open(BACKOFF="30", MAX_ATTEMPTS="30")
        self.send()
        seen = set()
        for attempt in range(1, 25):
            self.claim()
            self.settle(1, "devolver")
            until = datetime.datetime.fromisoformat(
                self.row(1)["available_at"] + "+00:00"
            )
            delay = until.timestamp() - self.clock.now
            base = min(3600, 30 * 2 ** (attempt - 1))
            self.assertTrue(0.8 * base - 1 <= delay <= 1.2 * base + 1, (attempt, delay))
            seen.add(round(delay / base, 2))
            self.clock.now += delay
        self.assertGreater(len(seen), 5)

    def test_a_conversation_that_is_given_back_as_one_is_due_as_one(self):
        self.open(GROUP_KEY="$.de")
        for _ in range(3):
            for who in ("ana", "bob"):
                self.send(b'{"de":"%s"}' % who.encode())
        self.send()
        self.claim("?limite=1")  # it is one attempt ahead
        self.settle(1, "devolver?em=0")
        ids = [item["id"] for item in self.claim()]
        self.call("POST", "/fila/devolver", json.dumps({"ids": ids}).encode())
        due = collections.defaultdict(set)
        for row in self.rows():
            due[row["group_key"]].add(row["available_at"])
        self.assertEqual((1, 1), (len(due["ana"]), len(due["bob"])))
        waited = min(due["ana"]), buffer.utc(self.clock.now + 48)
        self.assertGreaterEqual(*waited)  # as after its second attempt

    def test_a_delayed_message_keeps_its_place(self):
        self.messages(3)
        self.claim("?limite=2")
        self.settle(1, "devolver?em=10")
        self.settle(2, "devolver?em=5")
        self.clock.now += 10
        self.assertEqual([1, 2, 3], [item["id"] for item in self.claim()])


class AttemptsTest(QueueCase):
    settings = (("MAX_ATTEMPTS", "3"),)

    def test_used_up_by_leases(self):
        self.send()
        for attempt in (1, 2, 3):
            self.assertEqual(attempt, self.claim()[0]["tentativa"])
            self.clock.now += 600
        self.assertEqual([], self.claim())
        [item] = self.get("/fila?status=erro")
        self.assertEqual("prazo esgotado na última tentativa", item["motivo"])

    def test_used_up_by_devolver(self):
        self.send()
        for _ in range(3):
            self.claim()
            status, answer = self.post("/fila/1/devolver?em=0")
        self.assertEqual((200, "erro"), (status, answer["status"]))
        self.assertIn("última tentativa", self.row(1)["reason"])

    def test_a_batch_tells_for_which_they_are_used_up(self):
        self.messages(2)
        self.store._run("UPDATE fila SET attempts = 2 WHERE id = 1")
        self.claim()
        _, answer = self.post("/fila/devolver", {"ids": [1, 2]})
        self.assertEqual(([1, 2], [1]), (answer["ids"], answer["esgotados"]))

    def test_the_last_reason_given_is_kept(self):
        self.send()
        for number in range(3):
            self.claim()
            self.settle(1, "devolver?em=0", b"reason %d" % number)
        self.assertEqual(
            ("erro", "reason 2"), (self.row(1)["status"], self.row(1)["reason"])
        )

    def test_a_claim_never_goes_past_them(self):
        self.send()
        self.store._run("UPDATE fila SET attempts = 3")
        self.assertEqual([], self.claim())
        self.open()  # as when MAX_ATTEMPTS was lowered
        self.assertEqual("erro", self.row(1)["status"])
        self.store.webhook(b"{}", source="a")
        self.store._run("UPDATE fila SET attempts = 3")
        self.assertEqual([], self.claim("?fonte=a"))

    def test_the_timer_sees_it_too(self):
        self.send()
        self.store._run("UPDATE fila SET attempts = 2")
        self.claim()
        self.clock.now += 600
        buffer.Housekeeper(self.configured, self.store).tidy()
        self.assertEqual("erro", self.row(1)["status"])


class PoisonTest(QueueCase):
    """A consumer dies of one message; nobody knows of which."""

    def run_consumer(self, count, limit, poison):
        self.messages(count)
        claims, open_ = (
            [],
            "SELECT 1 FROM fila WHERE status IN ('pendente', 'processando')",
        )
        while self.rows(open_):
            self.assertLess(len(claims), 2000)
            batch = self.claim(f"?limite={limit}")
            claims.append([item["id"] for item in batch])
            if any(item["payload"] in poison for item in batch) or not batch:
                self.clock.now += 600
            else:
                self.post("/fila/processado", {"ids": claims[-1]})
        status = {row["id"] - 1: row["status"] for row in self.rows()}
        self.assertEqual(set(poison), {n for n, s in status.items() if s == "erro"})
        self.assertEqual(count - len(poison), list(status.values()).count("processado"))
        return claims

    def test_one_among_50_reaches_erro_alone(self):
        claims = self.run_consumer(50, 50, {17})
        self.assertLess(len(claims), 40)

    def test_with_few_attempts_the_last_one_is_alone(self):
        for most in ("2", "3", "4"):
            self.store.close()
            (self.folder / "b.sqlite").unlink()
            self.open(MAX_ATTEMPTS=most)
            self.run_consumer(50, 50, {17})

    def test_several_and_a_full_batch(self):
        self.run_consumer(500, 500, {0, 250, 499})

    def test_claims_of_suspects_are_half_as_big_and_without_fresh_ones(self):
        self.messages(12)
        self.claim("?limite=8")
        self.clock.now += 600
        sizes = [[item["id"] for item in self.claim()] for _ in range(3)]
        self.assertEqual([[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12]], sizes)
        self.clock.now += 600
        self.assertEqual([1, 2], [item["id"] for item in self.claim()])

    def test_one_before_its_last_attempt_is_not_taken_along(self):
        rows = [
            {"id": 1, "lost": 8, "attempts": 1},
            {"id": 2, "lost": 8, "attempts": 3},
        ]
        self.assertEqual((rows[:1], 4), buffer.without_poison(rows, 8, most=4))

    def test_what_was_returned_by_hand_is_no_suspect(self):
        self.messages(4)
        self.claim()
        self.post("/fila/devolver?em=0", {"ids": [1, 2, 3, 4]})
        self.assertEqual(4, len(self.claim()))


class ClaimOptionsTest(QueueCase):
    def test_reserva_sets_this_lease(self):
        self.send()
        self.claim("?reserva=30")
        self.clock.now += 30
        self.assertEqual(1, len(self.claim()))

    def test_max_bounds_what_is_in_work(self):
        self.messages(10)
        self.assertEqual(3, len(self.claim("?max=3")))
        self.assertEqual(0, len(self.claim("?max=3")))
        self.settle(1, "processado")
        self.assertEqual(1, len(self.claim("?max=3")))
        self.assertEqual(2, len(self.claim("?max=5&limite=4")))
        self.assertEqual(0, len(self.claim("?max=0")))
        self.clock.now += 600
        self.assertGreater(len(self.claim("?max=3")), 0)

    def test_fonte_takes_only_that_source(self):
        for source in (None, "a", "b", "a"):
            self.store.webhook(b"{}", source=source)
        self.assertEqual([2, 4], [item["id"] for item in self.claim("?fonte=a")])
        self.assertEqual([], self.claim("?fonte=x"))
        self.assertEqual([3], [item["id"] for item in self.claim("?fonte=B")])
        self.assertEqual(400, self.call("POST", "/fila/pegar?fonte=")[0])
        self.assertEqual([1], [item["id"] for item in self.claim()])

    def test_a_source_may_be_written_as_in_its_setting(self):
        self.store.webhook(b"{}", source="my-shop")
        self.assertEqual(1, len(self.get("/fila?fonte=MY_SHOP")))
        self.assertEqual(1, len(self.claim("?fonte=my_shop")))

    def test_what_falls_due_at_once_is_bounded_and_hides_nothing(self):
        with mock.patch.object(buffer.Store, "BITE", (5, 1000)):
            for source in "aab":
                for _ in range(6):
                    self.store.webhook(b"{}", source=source)
            self.claim("?reserva=10")
            self.clock.now += 10
            self.assertGreater(len(self.claim("?max=1")), 0)
            self.store._run(
                "UPDATE fila SET status = 'pendente', lost = 0, lease_until = NULL,"
                " available_at = '2000-01-01'"
            )
            self.assertEqual(5, len(self.claim("?fonte=b")))

    def test_leases_end_in_bites_small_in_bytes(self):
        for _ in range(4):
            self.store.webhook(b"x" * (6 << 20))
        self.store.pegar(9, 600, 99 << 20)
        self.clock.now += 600
        self.assertEqual([2, 2, 0], [self.store.lease_ended() for _ in range(3)])

    def test_formato_n8n(self):
        self.send(b'{"a":1.10}', "/webhook/x?q=1", CONTENT_TYPE="application/json")
        self.send(b"a=1&b=%C3%A9&b=2", CONTENT_TYPE="application/x-www-form-urlencoded")
        self.send(b"text")
        self.store._run("INSERT INTO fila (payload, size) VALUES ('{}', 2)")
        first, form, text, old = self.claim("?formato=n8n")
        keys = {"id", "tentativa", "headers", "params", "query", "body"}
        for item in (first, form, text, old):
            self.assertEqual(keys, item.keys())
        self.assertEqual(({"a": 1.1}, {"q": "1"}), (first["body"], first["query"]))
        self.assertEqual("application/json", first["headers"]["content-type"])
        self.assertEqual({"a": "1", "b": ["é", "2"]}, form["body"])
        self.assertEqual("text", text["body"])

    def test_formato_n8n_reads_a_form_in_its_charset(self):
        for body, charset, value in (
            (b"nome=Jos%E9", "", "José"),
            (b"nome=Jos\xe9", "", "José"),
            (b"nome=%80", "; charset=windows-1252", "€"),
            (b"nome=%CF%F0", '; Charset="windows-1251"; x=y', "Пр"),
            (b"nome=%83e", "; charset=shift_jis", "テ"),
            (b"nome=Jos%C3%A9", "; charset=ISO-8859-1", "JosÃ©"),
            (b"nome=Jos%C3%A9", "", "José"),
            (b"nome=Jos%C3%A9", "; charset=utf-8", "José"),
            (b"nome=Jos\xc3\xa9", "; charset=windows-9999", "José"),
            (b"nome=Jos%E9", "; charset=utf-8", "José"),
            (b"nome=%81%E9", "", "\ufffdé"),
            (b"nome=%E9", "; charset=idna", "é"),
            (b"nome=a-%E9", "; charset=punycode", "a-é"),
        ):
            kind = "application/x-www-form-urlencoded" + charset
            self.send(body, CONTENT_TYPE=kind)
            [item] = self.claim("?formato=n8n")
            self.assertEqual({"nome": value}, item["body"], (body, charset))

    def test_a_form_is_kept_as_its_raw_text(self):
        self.send(b"a=1&b=%C3%A9", CONTENT_TYPE="application/x-www-form-urlencoded")
        self.assertEqual("a=1&b=%C3%A9", self.claim()[0]["payload"])

    def test_a_webhook_token_may_none_of_this(self):
        self.open(WEBHOOK_TOKEN="only-for-sending")
        self.send(token="only-for-sending")
        self.app.wrong = buffer.Buckets(100, 100)  # there are more routes than tries
        for path, method, _, right in buffer.ROUTES:
            if right is buffer.CONSUMER:
                url = path.replace("{id}", "1")
                status, _ = self.call(method, url, token="only-for-sending")
                self.assertEqual(401, status, url)
        self.assertEqual("pendente", self.row(1)["status"])


class ConversationCase(QueueCase):
    settings = (("GROUP_KEY", "$.de|X-De"), ("MAX_ATTEMPTS", "4"))

    def say(self, *people):
        """A message of each, in this order; None is nobody."""
        for who in people:
            self.send(json.dumps({"de": who}).encode())

    def after(self, seconds, query="?agrupar=8"):
        """[(key, ids)] of what is handed out so many seconds later."""
        self.clock.now += seconds
        return [(item["chave"], item["ids"]) for item in self.claim(query)]

    def singles(self, query="?serie=1"):
        return [item["id"] for item in self.claim(query)]

    def done(self, *ids):
        self.assertEqual(200, self.post("/fila/processado", {"ids": ids})[0])


class ConversationsTest(ConversationCase):
    """With `agrupar`: one item per conversation, after a silence."""

    def test_a_burst_is_one_item_once_its_newest_is_old_enough(self):
        for who in "abaa":
            self.say(who)
            self.clock.now += 1
        self.assertEqual([("b", [2])], self.after(5))
        self.assertEqual([], self.after(1))
        self.assertEqual([("a", [1, 3, 4])], self.after(1))

    def test_an_item_has_key_ids_and_messages(self):
        self.say("a", "a", None)
        self.clock.now += 8
        a, nobody = self.claim("?agrupar=8")
        self.assertEqual(["chave", "ids", "mensagens"], list(a))
        self.assertEqual([1, 2], [message["id"] for message in a["mensagens"]])
        self.assertEqual(
            ({"de": "a"}, 1, "a"),
            tuple(a["mensagens"][0][key] for key in ("payload", "tentativa", "chave")),
        )
        self.assertEqual((None, [3]), (nobody["chave"], nobody["ids"]))

    def test_a_message_without_key_is_a_conversation_of_its_own(self):
        self.say(None, "3", None, None)
        expected = [(None, [1]), ("3", [2]), (None, [3]), (None, [4])]
        self.assertEqual(expected, self.after(8))

    def test_who_never_stops_is_answered_after_ate(self):
        for _ in range(6):
            self.say("a")
            self.assertEqual([], self.after(7))
        self.say("a")
        self.assertEqual([("a", [1, 2, 3, 4, 5, 6, 7])], self.after(6))  # 6 times 8
        self.say("b")
        self.assertEqual([], self.after(4, "?agrupar=8&ate=5"))
        self.assertEqual([("b", [8])], self.after(1, "?agrupar=8&ate=5"))

    def test_what_arrives_meanwhile_waits_and_the_silence_counts_again(self):
        self.say("a")
        self.after(8)
        self.say("a")
        self.assertEqual([], self.after(20))
        self.say("a")
        self.done(1)
        self.assertEqual([], self.after(7))
        self.assertEqual([("a", [2, 3])], self.after(1))

    def test_it_waits_for_all_of_what_is_in_work(self):
        self.say("a", "a")
        self.after(8)
        self.say("a")
        self.done(1)
        self.assertEqual([], self.after(8))
        self.assertEqual(200, self.settle(2, "erro"))
        self.assertEqual([("a", [3])], self.after(0))

    def test_a_plain_claim_counts_as_work(self):
        self.say("a", "a")
        self.assertEqual(1, self.claim("?limite=1")[0]["id"])
        self.assertEqual([], self.after(8))
        self.done(1)
        self.assertEqual([("a", [2])], self.after(0))

    def test_nothing_overtakes_a_message_that_is_to_come_again(self):
        self.say("a", "a", "b")
        self.after(8)
        self.settle(1, "devolver?em=30")
        self.done(2)
        self.say("a")
        self.assertEqual([], self.after(29))
        self.assertEqual([("a", [1, 4])], self.after(1))

    def test_what_stands_before_it_does_not_wait_for_it(self):
        self.say("a", "a", "a")
        self.after(8)
        self.done(1)
        self.settle(2, "devolver?em=30")
        self.done(3)
        self.say("a")
        self.assertEqual(200, self.settle(1, "reenviar"))
        self.assertEqual([("a", [1])], self.after(8))
        self.done(1)
        self.assertEqual([("a", [2, 4])], self.after(30))

    def test_when_a_lease_ends_it_comes_again_with_what_came_since(self):
        self.say("a")
        self.after(8, "?agrupar=8&reserva=60")
        self.say("a")
        self.assertEqual([], self.after(59))
        self.assertEqual([("a", [1, 2])], self.after(1))

    def test_the_longest_waiting_are_first_and_none_starves(self):
        self.say("a")
        self.clock.now += 30
        self.say("b", "c")
        self.clock.now += 10
        self.say("a")
        self.assertEqual([("b", [2])], self.after(7, "?agrupar=8&limite=1"))
        expected = [("a", [1, 4]), ("c", [3])]  # a is over its 48 seconds
        self.assertEqual(expected, self.after(1, "?agrupar=8&limite=2"))

    def test_plain_claims_go_on_as_before(self):
        self.say("a", None, "a")
        self.assertEqual([1, 2, 3], [item["id"] for item in self.claim()])

    def test_a_slip_does_not_hand_out_messages(self):
        self.say("a")
        for query in (
            *("agrupar=0", "agrupar=-1", "agrupar=x", "agrupar=", "agrupar=604801"),
            *("agrupar=8&ate=0", "agrupar=8&ate=", "ate=8", "serie=2", "serie="),
        ):
            status, text = self.call("POST", f"/fila/pegar?{query}")
            self.assertEqual((400, 1), (status, text.count("\n")), query)
        self.assertEqual(1, len(self.claim("?serie=0")))


class SerialTest(ConversationCase):
    """With serie=1: single messages, never two of a key at once."""

    def test_of_each_key_the_oldest(self):
        self.say("a", "a", "b", None, None)
        self.assertEqual([1, 3, 4, 5], self.singles())
        self.assertEqual([], self.singles())
        self.done(1, 4)
        self.assertEqual([2], self.singles())

    def test_nothing_overtakes_a_message_that_is_to_come_again(self):
        self.say("a", "a")
        self.singles()
        self.settle(1, "devolver?em=30")
        self.assertEqual([], self.singles())
        self.clock.now += 30
        self.assertEqual([1], self.singles())
        self.settle(1, "erro")
        self.assertEqual([2], self.singles())

    def test_it_keeps_to_conversations_in_work_and_they_to_it(self):
        self.say("a", "a", "b")
        self.assertEqual([("a", [1, 2])], self.after(8, "?agrupar=8&limite=1"))
        self.assertEqual([3], self.singles())
        self.say("a", "b")
        self.assertEqual([], self.after(8))


class ConversationOptionsTest(ConversationCase):
    def test_limite_and_max_count_conversations(self):
        self.say(*"aabbccd")
        self.clock.now += 8
        self.assertEqual(2, len(self.claim("?agrupar=8&limite=2")))
        self.assertEqual([("c", [5, 6])], self.after(0, "?agrupar=8&max=3"))
        self.assertEqual([], self.after(0, "?agrupar=8&max=3"))
        self.assertEqual([], self.singles("?serie=1&max=3"))
        self.done(1, 2)
        self.assertEqual([7], self.singles("?serie=1&max=3"))

    def test_fonte_takes_only_that_source(self):
        for source in (None, "x", "y", "x"):
            self.store.webhook(b"{}", source=source, group_key="a")
        self.clock.now += 8
        [item] = self.claim("?agrupar=8&fonte=x")
        self.assertEqual(
            ("a", "x", [2, 4]), (item["chave"], item["fonte"], item["ids"])
        )
        self.assertEqual([3], self.singles("?serie=1&fonte=Y"))
        self.assertEqual(
            [("a", [1])], self.after(0)
        )  # of two sources: two conversations

    def test_reserva_and_formato(self):
        self.say("a")
        self.clock.now += 8
        [item] = self.claim("?agrupar=8&reserva=30&formato=n8n")
        self.assertEqual({"de": "a"}, item["mensagens"][0]["body"])
        self.assertEqual(1, len(self.after(30)))

    def test_bytes_cut_the_first_and_pass_over_others(self):
        self.open(MAX_BATCH_BYTES="100")
        for who, size in (*[("a", 60)] * 3, ("b", 30), ("b", 30), ("c", 30)):
            self.store.webhook(b"x" * size, group_key=who)
        self.assertEqual([("a", [1]), ("c", [6])], self.after(8))
        self.assertEqual([("b", [4, 5])], self.after(0))
        self.done(1)
        self.assertEqual([("a", [2])], self.after(0))

    def test_a_message_larger_than_all_comes_alone(self):
        self.open(MAX_BATCH_BYTES="100")
        for size in (10, 200, 10):
            self.store.webhook(b"x" * size, group_key="a")
        for id_ in (1, 2, 3):
            self.assertEqual([("a", [id_])], self.after(8))
            self.done(id_)

    def test_an_answer_has_no_more_messages_than_a_verdict_takes(self):
        with mock.patch.object(buffer.Store, "MANY", 3):
            self.say(*"aaaabbcc")
            self.assertEqual([("a", [1, 2, 3])], self.after(8))
            self.assertEqual([("b", [5, 6])], self.after(0))
            self.done(1, 2, 3)
            self.assertEqual([("a", [4]), ("c", [7, 8])], self.after(0))

    def test_a_claim_looks_at_few_that_are_too_long_for_it(self):
        with mock.patch.object(buffer.Store, "MANY", 3):
            self.say("a", *[f"p{n}" for n in range(20)] * 3)
            with mock.patch.object(self.store, "_run", wraps=self.store._run) as run:
                self.assertEqual([("a", [1])], self.after(8))
        looked = [call for call in run.mock_calls if buffer.OF_GROUP in call.args]
        self.assertEqual(3, len(looked))


class ConversationsAndPoisonTest(ConversationCase):
    """A consumer dies of one message; nobody knows of which conversation."""

    def test_suspects_come_in_half_as_big_a_claim_among_their_like(self):
        self.say(*"aabbccdd")
        self.assertEqual(4, len(self.after(8)))
        self.say("e")
        self.assertEqual([("a", [1, 2]), ("b", [3, 4])], self.after(600))
        self.assertEqual([("c", [5, 6]), ("d", [7, 8])], self.after(0))
        self.assertEqual([("e", [9])], self.after(0))
        self.assertEqual([("a", [1, 2])], self.after(600))

    def test_the_last_time_a_message_is_alone_and_its_end_frees_the_key(self):
        self.say("a", "a")
        for _ in range(3):
            self.assertEqual([("a", [1, 2])], self.after(600))
        self.assertEqual([("a", [1])], self.after(600))
        self.assertEqual([("a", [2])], self.after(600))
        self.assertEqual(["erro", "processando"], [r["status"] for r in self.rows()])
        self.done(2)
        self.assertEqual([], self.after(600))

    def test_a_claim_never_goes_past_them(self):
        self.say("a", "b")
        self.store._run("UPDATE fila SET attempts = 4 WHERE id = 1")
        self.assertEqual([("b", [2])], self.after(8))

    def test_attempts_are_counted_by_message(self):
        self.say("a")
        for _ in range(3):
            self.after(8)
            self.settle(1, "devolver?em=0")
        self.say("a")
        self.assertEqual([("a", [1, 2])], self.after(8))
        self.post("/fila/devolver?em=0", {"ids": [1, 2]})
        self.assertEqual(["erro", "pendente"], [r["status"] for r in self.rows()])
        self.assertEqual([("a", [2])], self.after(0))


class GroupKeyTest(ConversationCase):
    def key(self, body=b"{}", url="/webhook", **environ):
        self.send(body, url, **environ)
        return self.rows()[-1]["group_key"]

    def test_the_first_word_that_is_there_counts(self):
        self.assertEqual("a", self.key(b'{"de":"a"}', HTTP_X_DE="h"))
        self.assertEqual("h", self.key(b'{"de":""}', HTTP_X_DE="h"))
        self.assertEqual("h", self.key(b"no json", HTTP_X_DE="h"))
        self.assertEqual("h", self.key(b'{"de":"a"} no json', HTTP_X_DE="h"))
        self.assertEqual("a", self.key(b' {"de":"a"}\n', HTTP_X_DE="h"))
        self.assertEqual("5511", self.key(b'{"de":5511}'))
        self.assertIsNone(self.key(b'{"de":null}'))
        self.assertIsNone(self.key(b'{"de":{"a":1}}'))

    def test_what_no_column_takes_or_no_key_is(self):
        self.assertEqual("a\\ud800", self.key(b'{"de":"a\\ud800"}'))
        self.assertEqual("x" * 500, self.key(b'{"de":"%b"}' % (b"x" * 500)))
        self.assertIsNone(self.key(b'{"de":"%b"}' % (b"x" * 501)))

    def test_a_source_may_have_its_own(self):
        for own, key in (("$.tel", "t"), ("", "d"), ("-", None)):
            self.open(SECRET_SHOP="s", GROUP_KEY_SHOP=own, SIGN_SHOP="X-T - -")
            body, header = b'{"de":"d","tel":"t"}', {"HTTP_X_T": "s"}
            self.assertEqual(key, self.key(body, "/webhook/shop", **header), own)
        self.assertEqual("d", self.key(b'{"de":"d","tel":"t"}'))

    def test_a_wrong_word_ends_the_start(self):
        for name, text in (
            ("GROUP_KEY", "$."),
            ("GROUP_KEY", "a|"),
            ("GROUP_KEY_X", "a b"),
        ):
            with self.assertRaisesRegex(buffer.StartError, f"{name}=.*it takes"):
                self.open(SECRET_X="s", **{name: text})
        with self.assertRaisesRegex(buffer.StartError, "not SECRET_Y"):
            self.open(GROUP_KEY_Y="a")


class ConversationsKeptTest(ConversationCase):
    """Whatever changes a message, and whoever: its conversation knows."""

    def sqlite(self, sql):
        """What another program does to the file."""
        with contextlib.closing(sqlite3.connect(self.configured.db_path)) as db, db:
            db.executescript(sql)

    def test_a_file_without_conversations_has_nothing_of_them(self):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        self.open(GROUP_KEY="")
        self.send()
        self.claim()
        buffer.Housekeeper(self.configured, self.store).tidy()
        names = [row["name"] for row in self.rows("SELECT name FROM sqlite_master")]
        self.assertFalse(
            [name for name in names if re.search("conv|abert|^mudadas", name)]
        )

    def test_the_first_claim_finds_what_was_there_before(self):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        self.open(GROUP_KEY="")
        for key in "aabbcd":
            self.store.webhook(b"{}", group_key=key)
        self.claim("?limite=1")
        self.settle(3, "erro")
        self.post("/fila/pegar?limite=1")  # 2 of a
        self.settle(2, "devolver?em=60")
        self.done(5)
        self.assertEqual([("b", [4]), ("d", [6])], self.after(8))
        self.done(1)
        self.assertEqual([("a", [2])], self.after(60))

    def test_a_restart_changes_nothing(self):
        self.say("a", "b")
        self.assertEqual([("a", [1])], self.after(8, "?agrupar=8&limite=1"))
        self.say("a")
        self.settle(1, "devolver?em=30")
        self.store.close()
        self.open()
        self.assertEqual([("b", [2])], self.after(8))
        self.assertEqual([("a", [1, 3])], self.after(30))

    def test_the_old_programs_messages_and_changes(self):
        self.say("a", "a")
        self.after(8)
        self.sqlite("INSERT INTO fila (payload, created_at) VALUES ('x', NULL)")
        self.sqlite("UPDATE fila SET status='pendente', locked_at=NULL WHERE id < 3")
        self.assertEqual([("a", [1, 2]), (None, [3])], self.after(0))
        self.sqlite(
            "UPDATE fila SET status='processado' WHERE id < 3; DELETE FROM fila"
        )
        self.say("a")
        self.assertEqual([("a", [4])], self.after(8))

    def test_the_size_of_the_old_programs_messages_counts_once_it_is_known(self):
        self.say("a")
        self.sqlite("INSERT INTO fila (payload) SELECT 'long' FROM fila")
        self.sqlite("UPDATE fila SET group_key = 'a' WHERE id = 2")
        self.store.gather(10)
        self.store.close()
        self.open(MAX_BATCH_BYTES="13")  # 10 and 4 are over it
        self.clock.now = time.time()
        self.assertEqual([("a", [1])], self.after(8))

    def test_another_process_hands_out_by_the_same_rule(self):
        other = buffer.open_store(self.configured, self.clock)
        self.addCleanup(other.close)
        self.say("a", "a", "b")
        self.clock.now += 8
        [(source, key, rows)] = other.pegar_conversas(1, 60, 1000, quiet=8, longest=48)
        self.assertEqual(
            (None, "a", [1, 2]), (source, key, [row["id"] for row in rows])
        )
        self.assertEqual([("b", [3])], self.after(0))
        other.processado([1])
        self.assertEqual([], self.after(0))
        other.erro([2])
        self.say("a")
        self.assertEqual([("a", [4])], self.after(8))

    def test_erased_messages_hold_nobody_up(self):
        self.say("a", "a", "b", "b", "b")
        self.after(8, "?agrupar=8&limite=1")
        for id_ in (1, 2, 3):
            self.done(2)
            self.assertEqual(204, self.call("DELETE", f"/fila/{id_}")[0])
        self.say("a")
        self.assertEqual([("b", [4, 5]), ("a", [6])], self.after(8))

    def test_the_key_of_an_erased_message_is_gone_from_the_file(self):
        self.say("5511987", "5511988")
        self.after(8)
        self.assertEqual(204, self.call("DELETE", "/fila/1")[0])
        database = pathlib.Path(self.configured.db_path)
        log = database.with_name(f"{database.name}-wal")
        written = database.read_bytes() + log.read_bytes()
        self.assertEqual((False, True), (b"5511987" in written, b"5511988" in written))

    def test_what_is_purged_leaves_nothing_behind(self):
        self.say("a", "b")
        self.after(8)
        self.done(1, 2)
        self.clock.now += 8 * 86400
        buffer.Housekeeper(self.configured, self.store).tidy()
        for table in ("fila", "abertas", "conversas", "mudadas"):
            self.assertEqual([], self.rows(f"SELECT * FROM {table}"), table)

    def test_a_replay_comes_at_once_but_not_beside_another(self):
        self.say("a", "a")
        self.after(8)
        self.done(1, 2)
        self.say("a")
        self.post("/fila/reenviar", {"ids": [1]})
        self.assertEqual([], self.after(7))  # a has just written again
        self.assertEqual([("a", [1, 3])], self.after(1))
        self.post("/fila/reenviar", {"ids": [2]})
        self.assertEqual([], self.after(0))

    def test_until_all_is_seen_nothing_is_judged(self):
        self.say("a", "a", "b", "a")
        self.store.NEW, self.store.PATIENCE = 2, 0
        self.assertEqual(
            [[], [], [("a", [1, 2, 4]), ("b", [3])]], [self.after(8) for _ in "123"]
        )
        self.store.PATIENCE = 60
        self.say(*"ccccc")
        self.assertEqual([("c", [5, 6, 7, 8, 9])], self.after(8))

    def test_the_timer_takes_in_what_is_new(self):
        self.say(*"abcab")
        with mock.patch.object(buffer.Housekeeper, "GATHERED", 2):
            buffer.Housekeeper(self.configured, self.store).tidy()
        self.assertEqual(5, len(self.rows("SELECT * FROM abertas")))
        self.assertEqual([], self.rows("SELECT * FROM mudadas"))

    def test_a_claim_that_fails_leaves_no_half_made_tables(self):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        self.open(GROUP_KEY="")
        self.send()
        good, self.store._db = self.store._db, Faulty(self.store._db, "SELECT source")
        self.assertEqual(503, self.call("POST", "/fila/pegar?agrupar=8")[0])
        self.store._db = good
        self.assertEqual([(None, [1])], self.after(8))

    def test_a_start_that_fails_neither(self):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        broken = (*buffer.GROUPS[:-1], "no SQL")
        with mock.patch.object(buffer, "GROUPS", broken):
            self.assertRaises(buffer.StartError, self.open)
        self.open()
        self.say("a")
        self.assertEqual([("a", [1])], self.after(8))

    def test_a_clock_that_was_set_back_holds_nobody_up(self):
        self.say("a")
        self.clock.now -= 3600
        self.assertEqual([("a", [1])], self.after(0))

    def test_every_query_uses_its_index(self):
        one = "PRIMARY KEY (source=? AND group_key=?"
        row = "fila USING INTEGER PRIMARY KEY (rowid=?)"
        for sql, index in (
            (buffer.READ[0], row),
            *((sql, "PRIMARY KEY (") for sql in buffer.GATHER),
            (buffer.QUIET, "conversas_newest (newest<?)"),
            (buffer.SET_BACK, "conversas_newest (newest>?)"),
            (buffer.WAITED, "conversas_oldest (oldest<?)"),
            (buffer.OF_SOURCE[buffer.QUIET], "_newest_source (source=? AND newest<?)"),
            (buffer.OF_SOURCE[buffer.WAITED], "_oldest_source (source=? AND oldest<?)"),
            (buffer.GROUPS_IN_WORK, "COVERING INDEX conversas_in_work"),
            (buffer.GROUPS_WAITING, "COVERING INDEX conversas_oldest (oldest>?)"),
            (buffer.OF_GROUP, f"abertas USING {one} AND state=? AND id<?)"),
        ):
            named = dict.fromkeys(re.findall(r":([a-z]\w*)", sql), 1)
            named.update({"ids": "[1]"} if "ids" in named else {})
            plan = self.store._run(f"EXPLAIN QUERY PLAN {sql}", **named)
            text = "\n".join(row["detail"] for row in plan)
            self.assertIn(index, text, sql)
            self.assertNotRegex(
                text, r"(?m)SCAN (fila|abertas|conversas|mudadas)\b", sql
            )


class ConversationReportTest(ConversationCase):
    """What the page, the metrics and `status` tell of conversations."""

    def talks(self):
        return tuple(self.store.report()["conversas"].values())

    def test_how_many_wait_since_when_and_how_many_are_in_work(self):
        self.assertEqual((0, None, 0), self.talks())
        self.say("a", "a", "b")
        self.after(7)
        self.assertEqual((2, 7, 0), self.talks())
        self.after(1, "?agrupar=8&limite=1")
        self.say("a", "c")
        self.after(2)
        self.assertEqual((2, 10, 1), self.talks())  # "a" is in work, not waiting

    def test_new_ones_are_counted_once_the_timer_has_sorted_them(self):
        self.say("a", "b")
        self.assertEqual(0, self.talks()[0])
        buffer.Housekeeper(self.configured, self.store).tidy()
        self.assertEqual(2, self.talks()[0])

    def test_a_hundred_thousand_cost_less_than_5_ms(self):
        self.store._run(
            """
            WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n LIMIT 100000)
            INSERT INTO conversas
            SELECT '', i, 0, i, '2026-01-01 00:00:00', 0, 0, '2026-01-01 00:00:00' FROM n
            """
        )
        took, report = min(
            (timed(self.store._conversations, int(self.clock())) for _ in range(5)),
            key=lambda found: found[0],
        )
        self.assertEqual(self.store.COUNTED, report["esperando"])
        self.assertLess(took, 0.005)

    def test_metrics_and_status_tell_it_too(self):
        self.say("a")
        self.after(3)
        names = ("waiting 1", "oldest_seconds 3", "in_work 0")
        text = self.call("GET", "/metrics")[1]
        status = re.sub(" +", " ", buffer.status_table(self.store.report()))
        for name in names:
            self.assertIn(f"\nbuffer_conversations_{name}\n", text)
            self.assertIn(f"\nconversations_{name}\n", status)

    def test_where_nobody_asks_for_conversations_there_is_none(self):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        self.open(GROUP_KEY="")
        self.assertIsNone(self.store.report()["conversas"])
        self.assertNotIn("conversation", self.call("GET", "/metrics")[1])


class ListTest(QueueCase):
    def setUp(self):
        super().setUp()
        for number in range(8):
            self.store.webhook(b"%d" % number, source="a" if number % 2 else None)
        self.claim("?limite=5")
        self.settle(1, "processado")
        self.settle(2, "erro", b"bad")
        self.settle(3, "devolver?em=60")

    def ids(self, query=""):
        return [item["id"] for item in self.get(f"/fila{query}")]

    def test_by_status_source_and_id(self):
        for query, expected in (
            ("", [1, 2, 3, 4, 5, 6, 7, 8]),
            ("?status=pendente", [3, 6, 7, 8]),
            ("?status=processando", [4, 5]),
            ("?status=processado", [1]),
            ("?status=erro", [2]),
            ("?fonte=a", [2, 4, 6, 8]),
            ("?fonte=a&status=pendente", [6, 8]),
            ("?fonte=a&status=pendente&depois=6", [8]),
            ("?fonte=a&depois=4", [6, 8]),
            ("?limite=3", [1, 2, 3]),
            ("?limite=3&depois=3", [4, 5, 6]),
            ("?depois=8", []),
            ("?status=pendente&limite=2", [3, 6]),
            ("?status=pendente&depois=3&limite=1", [6]),
        ):
            self.assertEqual(expected, self.ids(query), query)
        self.assertEqual(400, self.call("GET", "/fila?status=x")[0])

    def test_newest_first(self):
        for query, expected in (
            ("", [8, 7, 6, 5, 4, 3, 2, 1]),
            ("&limite=3", [8, 7, 6]),
            ("&limite=3&depois=6", [5, 4, 3]),
            ("&depois=1", []),
            ("&depois=0", []),
            ("&status=pendente&limite=3", [8, 7, 6]),
            ("&status=pendente&depois=6", [3]),
            ("&fonte=a&depois=8", [6, 4, 2]),
        ):
            self.assertEqual(expected, self.ids(f"?ordem=desc{query}"), query)
        self.assertEqual([1, 2], self.ids("?ordem=asc&limite=2"))
        self.assertEqual(400, self.call("GET", "/fila?ordem=novas")[0])

    def test_by_reason(self):
        self.settle(4, "erro", b"bad")
        self.settle(5, "erro")
        for query, expected in (
            ("bad", [2, 4]),
            ("bad&ordem=desc", [4, 2]),
            ("bad&depois=2", [4]),
            ("bad&fonte=a&limite=1", [2]),
            ("ba", []),
            ("", [5]),
        ):
            self.assertEqual(expected, self.ids(f"?status=erro&motivo={query}"), query)
        for query in ("motivo=bad", "status=pendente&motivo=bad"):
            self.assertEqual(400, self.call("GET", f"/fila?{query}")[0])

    def test_by_event_id(self):
        for source in (None, "b", "a"):
            self.store.webhook(b"{}", source=source, event_id="evt 1")
        self.store.webhook(b"{}", source="b", event_id="evt 2")
        for query, expected in (
            ("evt+1", [9, 10, 11]),
            ("evt+1&fonte=b", [10]),
            ("evt+1&fonte=c", []),
            ("evt", []),
            ("", []),
        ):
            self.assertEqual(expected, self.ids(f"?evento={query}"), query)
        for more in ("status=erro", "depois=1", "status=erro&motivo="):
            self.assertEqual(400, self.call("GET", f"/fila?evento=x&{more}")[0])

    def test_it_shows_status_reason_and_times(self):
        done, failed, delayed, leased = self.get("/fila?limite=4")
        self.assertEqual(
            ("processado", "2027-01-15T08:00:00Z"),
            (done["status"], done["resolvido_em"]),
        )
        self.assertEqual(("erro", "bad"), (failed["status"], failed["motivo"]))
        self.assertEqual("2027-01-15T08:01:00Z", delayed["disponivel_em"])
        self.assertEqual("2027-01-15T08:10:00Z", leased["reservado_ate"])
        self.assertNotIn("motivo", leased)

    def test_looking_changes_nothing(self):
        before = [tuple(row) for row in self.rows()]
        self.ids()
        self.get("/fila/1?completo=1")
        self.clock.now += 10000
        self.ids("?status=pendente")
        self.assertEqual(before, [tuple(row) for row in self.rows()])

    def test_a_long_payload_is_cut_in_lists(self):
        text = "é" * 3000
        for body in (json.dumps({"a": text}).encode(), text.encode(), b"\xff" * 3000):
            self.send(body)
        cut = self.get("/fila?depois=8")
        self.assertEqual([True] * 3, [item["cortado"] for item in cut])
        self.assertEqual([18009, 6000, 3000], [item["tamanho"] for item in cut])
        self.assertEqual(
            ["base64"], [i["codificacao"] for i in cut if "codificacao" in i]
        )
        self.assertTrue(cut[0]["payload"].startswith('{"a": "'))
        self.assertTrue(text.startswith(cut[1]["payload"]))
        self.assertEqual(b"\xff" * 2048, base64.b64decode(cut[2]["payload"]))
        whole = self.get("/fila?depois=8&completo=1")
        self.assertEqual({"a": text}, whole[0]["payload"])
        self.assertNotIn("cortado", whole[0])
        self.assertEqual(text, self.get("/fila/10")["payload"])
        self.assertEqual(cut[1], self.get("/fila/10?completo=0"))
        self.store._run(
            "UPDATE fila SET payload = 'a' || char(0) || payload, size = NULL"
        )
        self.assertEqual(6002, self.get("/fila?depois=9")[0]["tamanho"])
        self.assertTrue(self.get("/fila?depois=9")[0]["payload"].startswith("a\0éé"))
        self.open(MAX_BATCH_BYTES="20000")
        self.assertEqual([9], self.ids("?depois=8&completo=1"))
        self.assertEqual([10, 11], self.ids("?depois=9&completo=1"))

    def test_one(self):
        self.assertEqual("bad", self.get("/fila/2")["motivo"])
        self.assertEqual(404, self.call("GET", "/fila/99")[0])
        self.assertEqual(400, self.call("GET", "/fila/abc")[0])

    def test_methods(self):
        for url, method, allow in (
            ("/fila/1", "PUT", "GET, DELETE"),
            ("/fila", "POST", "GET, DELETE"),
            ("/fila/1/payload", "POST", "GET"),
            ("/fila/pegar", "GET", "POST"),
            ("/fila/processado", "DELETE", "POST"),
        ):
            self.assertEqual(405, self.call(method, url)[0])
            self.assertEqual(allow, self.answered["Allow"])

    def test_erasing_removes_the_row_and_its_bytes(self):
        self.send(b'"a secret that must go"')
        self.assertEqual((204, ""), self.call("DELETE", "/fila/9"))
        self.assertEqual(404, self.call("DELETE", "/fila/9")[0])
        self.assertEqual(404, self.call("GET", "/fila/9")[0])
        for file in self.folder.iterdir():
            self.assertNotIn(b"a secret that must go", file.read_bytes(), file)


class SearchTest(QueueCase):
    """GET /fila?busca=TEXT, in slices."""

    def found(self, text, query=""):
        """Ids, over all slices."""
        ids, more = [], ""
        while True:
            text_ = urllib.parse.quote(text)
            answer = self.get(f"/fila?busca={text_}{query}{more}")
            ids += [item["id"] for item in answer["mensagens"]]
            if not answer["ate"]:
                return ids
            more = f"&ate={answer['ate']}"

    def test_what_payloads_hold_however_it_is_written(self):
        for body in (
            '{"nome":"João Ávila"}',
            '{"nome":"JO\\u00c3O"}',
            '{"nome":"jo\\u00E3o","u":"http:\\/\\/x\\/y"}',
            "n=joao",
            '{"e":"\\ud83d\\ude00 ok"}',
        ):
            self.send(body.encode())
        self.send(b"\xff\xfe Jo\xc3\xa3o")
        for text, expected in (
            ("joão", [6, 3, 2, 1]),
            ("ávila", [1]),
            ("http://x/y", [3]),
            ("😀 OK", [5]),
            ("nome", [3, 2, 1]),
            ("jo.o", []),
            ("%", []),
        ):
            self.assertEqual(expected, self.found(text), text)

    def test_ids_events_keys_and_paths(self):
        self.messages(3)
        values = {"event_id": "evt_77", "group_key": "5511@s", "path": "a/upsert"}
        self.store.webhook(b"x", source="s", **values)
        self.store.webhook(b'"2 and evt_77"')
        for text, expected in (
            ("2", [2, 5, 3]),  # first what it is the id of
            ("evt_77", [4, 5]),
            ("t_7", [5, 4]),
            ("5511", [4]),
            ("UPSERT", [4]),
        ):
            self.assertEqual(expected, self.found(text), text)

    def test_it_keeps_to_status_source_and_time(self):
        for number in range(4):
            self.clock.now += 60
            self.store.webhook(b"x", source="s" if number % 2 else None)
        self.settle(1, "erro", b"bad")
        times = "&desde=2027-01-15T08:02:00Z&ate=2027-01-15T08:03:00Z"
        for query, expected in (
            ("&status=erro", [1]),
            ("&status=erro&motivo=bad", [1]),
            ("&status=erro&motivo=x", []),
            ("&fonte=s", [4, 2]),
            (times, [3, 2]),
        ):
            self.assertEqual(expected, self.found("x", query), query)
        self.assertEqual([], self.found("1", "&status=pendente"))
        for query in ("busca=", "busca=" + "x" * 201, "desde=ontem", "ate=0"):
            self.assertEqual(400, self.call("GET", f"/fila?{query}")[0], query)

    def test_a_slice_takes_a_moment_and_says_where_to_go_on(self):
        with self.store.transaction():
            for number in range(1000):
                self.store.webhook(b"needle" if number < 3 else b"x")
        self.app.SEARCH = 0
        first = self.get("/fila?busca=needle")
        self.assertEqual({"mensagens": [], "ate": 800}, first)
        self.assertEqual([3, 2, 1], self.found("needle"))
        self.assertEqual([3, 2, 1], self.found("needle", "&limite=2"))

    def test_of_large_messages_few_are_read_at_once(self):
        for _ in range(4):
            self.send(b"x" * (2 << 20))
        self.app.SEARCH = 0
        self.assertEqual(2, self.get("/fila?busca=needle")["ate"])


class ManyTest(QueueCase):
    """Verdicts for all that a filter lets through, and their number before."""

    def setUp(self):
        super().setUp()
        for number in range(8):
            self.clock.now += 60
            self.store.webhook(b"%d" % number, source="a" if number % 2 else None)
        for id_, reason in (
            (1, "no 11"),
            (2, "no 12"),
            (3, "HTTP 404"),
            (4, "HTTP 500"),
        ):
            self.settle(id_, "erro", reason.encode())

    def many(self, verb, query):
        method = "DELETE" if verb == "apagar" else "POST"
        url = "/fila" if verb == "apagar" else f"/fila/{verb}"
        count = self.call("GET", f"/fila/quantas?{query}")
        if count[0] == 200:
            self.number = json.loads(count[1])["quantidade"]
        status, text = self.call(method, f"{url}?{query}" + self.more)
        return json.loads(text)["quantidade"] if status == 200 else status

    more = ""

    def test_each_verdict_and_each_filter(self):
        after = "desde=2027-01-15T08:06:00Z"
        for verb, query, count in (
            ("reenviar", "status=erro&parecido=no+99", 2),
            ("erro", "status=pendente&fonte=a&ate=2", 1),
            ("processado", "status=erro&motivo=HTTP+404", 1),
            ("apagar", "status=erro&fonte=a", 2),
            ("apagar", f"status=pendente&{after}&ate=2027-01-15T08:07:00Z", 2),
            ("processado", "status=pendente", 3),
            ("reenviar", "status=processado&ate=3", 2),
        ):
            self.assertEqual(count, self.many(verb, query), (verb, query))
            self.assertEqual(count, self.number, (verb, query))
        rows = [(row["id"], row["status"]) for row in self.rows()]
        done = [(5, "processado"), (8, "processado")]
        self.assertEqual([(1, "pendente"), (3, "pendente"), *done], rows)

    def test_a_slip_does_nothing(self):
        before = [tuple(row) for row in self.rows()]
        for verb, query in (
            ("apagar", ""),
            ("apagar", "status=processando"),
            ("apagar", "status=erro&font=a"),
            ("apagar", "status=erro&ate=x"),
            ("apagar", "status=erro&parecido="),
            ("processado", "status=pendente&adiadas="),
            ("erro", "status=erro"),
            ("processado", "status=processado"),
            ("reenviar", "status=erro&adiadas=1"),
            ("devolver", "status=pendente"),
            ("devolver", "status=pendente&adiadas=1&em=5"),
            ("reenviar", "status=pendente&parecido=x"),
        ):
            self.assertEqual(400, self.many(verb, query), (verb, query))
        self.assertEqual(before, [tuple(row) for row in self.rows()])

    def test_what_is_delayed_is_told_apart_and_comes_now(self):
        self.claim("?limite=3")
        for id_ in (5, 6, 7):
            self.settle(id_, "devolver?em=500")
        query = "status=pendente&adiadas=1"
        self.assertEqual([5, 6, 7], [i["id"] for i in self.get(f"/fila?{query}")])
        self.assertEqual(3, self.store.report()["adiadas"])
        self.assertEqual(200, self.settle(6, "devolver?em=0"))
        self.more = "&em=0"
        self.assertEqual(2, self.many("devolver", query))
        self.assertEqual(0, self.store.report()["adiadas"])
        self.assertEqual([5, 6, 7, 8], [item["id"] for item in self.claim()])

    def test_erased_bytes_are_gone(self):
        self.send(b'"a secret that must go"')
        self.assertEqual(
            1,
            self.many("apagar", "status=pendente&desde=2027-01-15T08:08:00Z&ate=9") - 1,
        )
        for file in self.folder.iterdir():
            self.assertNotIn(b"a secret that must go", file.read_bytes(), file)

    def test_reasons_that_differ_in_numbers_are_one(self):
        found = self.get("/fila/motivos?agrupar=1")
        first = {"motivo": "no 11", "quantidade": 2, "ate": 2, "motivos": 2}
        self.assertEqual([2, 1, 1], [one["quantidade"] for one in found])
        self.assertIn(found[0].pop("motivo"), ("no 11", "no 12"))
        self.assertEqual({**first, "motivo": 0}, {**found[0], "motivo": 0})
        times = "desde=2027-01-15T08:03:00Z&ate=2027-01-15T08:03:59Z"
        self.assertEqual(
            ["HTTP 404"], [one["motivo"] for one in self.get(f"/fila/motivos?{times}")]
        )
        for a, b, same in (
            ("id 3EB0000005A9 x", "id 77A5B2C1FF x", True),
            ("at 10.0.0.7:5432", "at 10.0.0.12:80", True),
            ("HTTP 404", "HTTP 422", False),
        ):
            self.assertEqual(
                same, buffer.without_numbers(a) == buffer.without_numbers(b)
            )


class HistoryTest(QueueCase):
    """What became of a message: its last ten attempts, kept with it."""

    def history(self, id_=1):
        return self.get(f"/fila/{id_}").get("historico", [])

    def test_each_attempt_with_its_time_its_end_and_how_long_it_took(self):
        self.store.most = 99
        self.send()
        self.assertEqual([], self.history())
        for verdict, body, seconds in (
            ("devolver?em=0", b"not\nnow", 7),
            ("erro", b"x" * 500, 3),
            ("reenviar", b"", 60),
        ):
            if verdict != "reenviar":
                self.claim()
            self.clock.now += seconds
            self.settle(1, verdict, body)
        self.claim("?reserva=30")
        self.clock.now += 40
        self.claim()
        found = self.history()
        self.assertEqual("2027-01-15T08:00:00Z", found[0]["em"])
        self.assertEqual(
            [
                ("devolver", 7, "not now"),
                ("erro", 3, "x" * 80),
                ("reenviar", None, None),
                ("prazo", 40, None),
                (None, None, None),
            ],
            [(one.get("fim"), one.get("durou"), one.get("motivo")) for one in found],
        )

    def test_the_last_ten_in_little_room(self):
        self.store.most = 999
        self.send()
        for number in range(40):
            self.claim()
            self.clock.now += 10
            self.settle(1, "devolver?em=0", b"%d " % number + b"y" * 70)
        found = self.history()
        self.assertEqual(10, len(found))
        self.assertEqual("39 y", found[-1]["motivo"][:4])
        self.assertEqual({10}, {one["durou"] for one in found})
        self.assertLessEqual(len(self.row(1)["tries"]), 1200)
        cut = "00 erro \n1800000000 pegar "
        cut += "n" * (buffer.TOLD_LENGTH - len(cut) - 1) + "\n"
        self.assertEqual(1, len(json.loads(buffer.history_json(cut))))


class RawPayloadTest(QueueCase):
    def test_no_cache_keeps_what_a_claim_or_metrics_answer(self):
        self.store.webhook(b"{}", True)
        for method, path in (
            ("POST", "/fila/pegar"),
            ("POST", "/fila/pegar"),  # nothing is left
            ("GET", "/metrics"),
        ):
            environ = {"REQUEST_METHOD": method, "HTTP_X_TOKEN": TOKEN}
            reply = self.app.respond({**environ, "PATH_INFO": path})
            self.assertEqual(200, reply.code)
            self.assertLessEqual(set(buffer.PRIVATE), set(reply.headers), path)

    def test_it_comes_as_it_came_and_no_browser_runs_it(self):
        for body in (b"<script>x</script>", b"\xff\x00", b'{"a":1.10}'):
            self.store.webhook(body, buffer.is_utf8(body))
        environ = {"REQUEST_METHOD": "GET", "HTTP_X_TOKEN": TOKEN}
        for id_, body in (
            (1, b"<script>x</script>"),
            (2, b"\xff\x00"),
            (3, b'{"a":1.10}'),
        ):
            reply = self.app.respond({**environ, "PATH_INFO": f"/fila/{id_}/payload"})
            self.assertEqual((200, body), (reply.code, reply.body))
        headers = dict(reply.headers)
        self.assertEqual("application/octet-stream", headers["Content-Type"])
        self.assertEqual("nosniff", headers["X-Content-Type-Options"])
        self.assertEqual(
            'attachment; filename="mensagem-3"', headers["Content-Disposition"]
        )
        self.assertEqual(404, self.call("GET", "/fila/9/payload")[0])
        self.assertEqual(401, self.call("GET", "/fila/1/payload", token="x")[0])


class MotivosTest(QueueCase):
    """Why messages failed, and replaying what failed for one reason."""

    def setUp(self):
        super().setUp()
        for number in range(7):
            self.store.webhook(b"%d" % number, source="a" if number % 2 else None)
        for id_, reason in enumerate("tttcc", 1):
            self.settle(id_, "erro", reason.encode())
        self.settle(6, "erro")
        self.settle(7, "processado")

    def test_the_commonest_first_with_the_last_id_counted(self):
        self.assertEqual(
            [
                {"motivo": "t", "quantidade": 3, "ate": 3},
                {"motivo": "c", "quantidade": 2, "ate": 5},
                {"motivo": None, "quantidade": 1, "ate": 6},
            ],
            self.get("/fila/motivos"),
        )
        of_a = self.get("/fila/motivos?fonte=a")
        self.assertEqual(
            {("t", 1), ("c", 1), (None, 1)},
            {(found["motivo"], found["quantidade"]) for found in of_a},
        )

    def test_one_reason(self):
        of_a = {"motivo": "t", "quantidade": 1, "ate": 2}
        self.assertEqual([of_a], self.get("/fila/motivos?motivo=t&fonte=a"))
        [none] = self.get("/fila/motivos?motivo=")
        self.assertEqual((None, 1), (none["motivo"], none["quantidade"]))
        self.assertEqual([], self.get("/fila/motivos?motivo=x"))

    def test_replay_of_one_reason(self):
        url = "/fila/reenviar?status=erro&motivo="
        for query, count in (("c&ate=4", 1), ("t&fonte=a", 1), ("t", 2), ("", 1)):
            answer = {"status": "pendente", "quantidade": count, "mais": False}
            self.assertEqual((200, answer), self.post(url + query), query)
        left = self.get("/fila?status=erro")
        self.assertEqual([(5, "c")], [(item["id"], item["motivo"]) for item in left])

    def test_in_bites(self):
        with mock.patch.object(buffer.App, "MANY", 2):
            url = "/fila/reenviar?status=erro&motivo=t"
            answers = [self.post(url)[1] for _ in range(2)]
        self.assertEqual(
            [(2, True), (1, False)], [(a["quantidade"], a["mais"]) for a in answers]
        )

    def test_a_reason_is_for_what_failed(self):
        url = "/fila/reenviar?status=processado&motivo=t"
        self.assertEqual(400, self.call("POST", url)[0])
        self.assertEqual("processado", self.row(7)["status"])


class Model:
    """The life of messages, in plain Python: what buffer.py must do, step by step."""

    def __init__(self, test, most=4, lease=600):
        self.test, self.most, self.lease = test, most, lease
        self.messages = {}
        self.count = 0

    @property
    def now(self):
        return self.test.clock.now

    def step(self, random):
        steps = (
            self.send,
            self.claim,
            self.claim,
            self.claim_conversations,
            self.claim_conversations,
            self.settle,
            self.settle_many,
            self.settle,
            self.wait,
            self.erase,
            self.replay,
        )
        random.choice(steps)(random)
        self.compare()

    def send(self, random):
        for _ in range(random.randint(1, 3)):
            source, key = random.choice([None, "a"]), random.choice([None, "k", "l"])
            self.test.store.webhook(b"{}", source=source, group_key=key)
            self.count += 1
            self.messages[self.count] = {
                "status": "pendente",
                "attempts": 0,
                "lost": 0,
                "due": 0,
                "until": 0,
                "source": source,
                "key": (source, key or self.count),
                "sent": self.now,
            }

    def leases_end(self):
        for message in self.messages.values():
            if message["status"] == "processando" and message["until"] <= self.now:
                used_up = message["attempts"] >= self.most
                message["status"] = "erro" if used_up else "pendente"
                message.update(lost=message["batch"], due=0)

    def claim(self, random):
        limit, query, source = self.options(random)
        due = [
            (id_, m)
            for id_, m in sorted(self.messages.items())
            if self.is_due(m) and source in (None, m["source"])
        ]
        if query["max"]:
            busy = sum(m["status"] == "processando" for m in self.messages.values())
            limit = min(limit, query["max"] - busy)
        expected = [id_ for id_, _ in self.batch(due[: 2 * limit], limit)]
        got = [item["id"] for item in self.test.claim(self.asked(query))]
        self.test.assertEqual(expected, got)
        self.lease_all(got, query["reserva"], len(got))

    def options(self, random):
        """(limit, query, source) of a claim, before which leases end."""
        limit, lease = random.randint(1, 6), random.choice([60, 600])
        source, most = random.choice([None, None, "a"]), random.choice([None, 3])
        query = {"limite": limit, "reserva": lease, "fonte": source, "max": most}
        self.leases_end()
        return limit, query, source

    def asked(self, query):
        return "?" + "&".join(f"{k}={v}" for k, v in query.items() if v is not None)

    def is_due(self, message):
        return message["status"] == "pendente" and message["due"] <= self.now

    def lease_all(self, ids, lease, batch):
        for id_ in ids:
            message = self.messages[id_]
            self.test.assertLess(message["attempts"], self.most)
            message.update(status="processando", until=self.now + lease, batch=batch)
            message["attempts"] += 1

    def batch(self, due, limit):
        """Of pairs whose second is a message, those that a claim may take together."""
        if not due or limit <= 0:
            return []
        first = due[0][1]
        due = [pair for pair in due if bool(pair[1]["lost"]) == bool(first["lost"])]
        if first["lost"]:
            limit = min(limit, 1 if self.is_last(first) else max(1, first["lost"] // 2))
            if limit > 1:
                due = [
                    (what, m)
                    for what, m in due
                    if m["lost"] // 2 >= limit and not self.is_last(m)
                ]
        return due[:limit]

    def is_last(self, message):
        return message["lost"] > 0 and message["attempts"] + 1 >= self.most

    def claim_conversations(self, random):
        """By conversation: what is due of those that are silent or have waited."""
        limit, query, source = self.options(random)
        quiet = query["agrupar"] = random.choice([None, 20, 60])
        if not quiet:
            query["serie"] = 1
        free, busy = self.conversations(source)
        if query["max"]:
            limit = max(0, min(limit, query["max"] - busy))
        waited = sorted(
            (m["sent"], id_)
            for id_, m, _, _ in free
            if m["sent"] <= self.now - 6 * (quiet or 0)
        )[: 2 * limit]
        silent = sorted(
            (newest, id_)
            for id_, _, newest, _ in free
            if newest <= self.now - (quiet or 0)
        )[: 2 * limit]
        ids = {id_ for _, id_ in waited + silent}
        due = sorted((id_, m, due) for id_, m, _, due in free if id_ in ids)
        expected = self.batch([(due, m) for _, m, due in due], limit)
        alone = not quiet or (due and self.is_last(due[0][1]))
        expected = [due[:1] if alone else due for due, _ in expected]
        got = self.test.claim(self.asked(query))
        got = [item["ids"] if quiet else [item["id"]] for item in got]
        self.test.assertEqual(expected, got)
        self.lease_all(itertools.chain(*got), query["reserva"], len(got))

    def conversations(self, source):
        """([(first id, first message, when its newest came, ids that are due)] of those
        that may go out, how many are in work)."""
        groups, free = {}, []
        for id_, m in sorted(self.messages.items()):
            if m["status"] in ("pendente", "processando"):
                groups.setdefault(m["key"], []).append((id_, m))
        busy = [
            key
            for key, group in groups.items()
            if any(m["status"] == "processando" for _, m in group)
        ]
        for key, group in groups.items():
            due = list(itertools.takewhile(lambda pair: self.is_due(pair[1]), group))
            if due and key not in busy and source in (None, key[0]):
                newest = max(m["sent"] for _, m in group if self.is_due(m))
                free.append((*due[0], newest, [id_ for id_, _ in due]))
        return free, len(busy)

    def verdict(self, verdict, id_, attempt, delay):
        """The status code and the change of one verdict, after the table."""
        message = self.messages.get(id_)
        if message is None:
            return 404
        status = message["status"]
        if attempt is not None and attempt != message["attempts"]:
            return 409
        if verdict == "processado":
            message["status"] = "processado"
        elif verdict == "erro":
            if status == "processado":
                return 409
            message["status"] = "erro"
        elif verdict == "devolver":
            if status in ("processado", "erro"):
                return 409
            if status == "processando":
                used_up = message["attempts"] >= self.most
                message["status"] = "erro" if used_up else "pendente"
                message.update(due=self.now + delay, lost=0)
            elif delay == 0:
                message["due"] = min(message["due"], self.now)
        elif verdict == "estender":
            if status != "processando":
                return 409
            message["until"] = self.now + delay
        elif status == "processando":
            return 409
        elif status != "pendente":
            message.update(status="pendente", attempts=0, lost=0, due=0)
        return 200

    VERDICTS = ("processado", "erro", "devolver", "estender", "reenviar")

    def settle(self, random):
        verdict = random.choice(self.VERDICTS)
        delay = random.choice(
            [0, 1, 90, 700] if verdict == "devolver" else [1, 90, 700]
        )
        id_ = random.randint(1, self.count + 1)
        attempt = random.choice([None, None, 1, 2])
        query = f"?em={delay}&segundos={delay}"
        query += f"&tentativa={attempt}" if attempt else ""
        expected = self.verdict(verdict, id_, attempt, delay)
        self.test.assertEqual(expected, self.test.settle(id_, verdict + query))

    def settle_many(self, random):
        verdict = random.choice(self.VERDICTS)
        delay = random.choice(
            [0, 1, 90, 700] if verdict == "devolver" else [1, 90, 700]
        )
        ids = random.sample(range(1, self.count + 2), min(5, self.count + 1))
        good = [id_ for id_ in ids if self.verdict(verdict, id_, None, delay) == 200]
        url = f"/fila/{verdict}?em={delay}&segundos={delay}"
        self.test.assertEqual(good, self.test.post(url, {"ids": ids})[1]["ids"])

    def wait(self, random):
        self.test.clock.now += random.choice([1, 10, 30, 60, 600])

    def erase(self, random):
        id_ = random.randint(1, self.count + 1)
        expected = 204 if self.messages.pop(id_, None) else 404
        self.test.assertEqual(expected, self.test.call("DELETE", f"/fila/{id_}")[0])

    def replay(self, random):
        source = random.choice([None, "a"])
        ids = [
            id_
            for id_, m in self.messages.items()
            if m["status"] == "erro" and source in (None, m["source"])
        ]
        for id_ in ids:
            self.verdict("reenviar", id_, None, 0)
        query = f"&fonte={source}" if source else ""
        answer = self.test.post(f"/fila/reenviar?status=erro{query}")[1]
        self.test.assertEqual(len(ids), answer["quantidade"])

    def compare(self):
        """What stands in the file is what stands here: none lost, none invented."""
        ours = {id_: (m["status"], m["attempts"]) for id_, m in self.messages.items()}
        theirs = {}
        for row in self.test.store._run("SELECT * FROM fila"):
            theirs[row["id"]] = row["status"], row["attempts"]
            settled = row["status"] in ("processado", "erro")
            self.test.assertEqual(settled, row["settled_at"] is not None)
            leased = row["status"] == "processando"
            self.test.assertEqual(leased, row["lease_until"] is not None)
            if row["status"] == "pendente":
                lost = max(0, row["lost"])
                self.test.assertEqual(self.messages[row["id"]]["lost"], lost)
        self.test.assertEqual(ours, theirs)
        counted = collections.Counter(m["status"] for m in self.messages.values())
        for row in self.test.store.report()["mensagens"]:
            counted[row["status"]] -= row["quantidade"]
        self.test.assertEqual(set(), {n for n in counted.values() if n})


class ModelTest(QueueCase):
    settings = (("MAX_ATTEMPTS", "4"),)

    def walk(self, seed, steps):
        self.store.close()
        (self.folder / "b.sqlite").unlink()
        self.open()
        self.store._run("PRAGMA synchronous = OFF")
        random, model, reached = Random(seed), Model(self), set()
        try:
            for _ in range(steps):
                model.step(random)
                reached |= {m["status"] for m in model.messages.values()}
        except AssertionError:
            print(f"seed {seed}")
            raise
        self.assertEqual(set(buffer.STATUSES), reached)

    def test_random_walks(self):
        for seed in range(20 if "--all" in sys.argv else 3):
            with self.subTest(seed=seed):
                self.walk(seed, 700)

    def test_hypothesis_walks(self):
        try:
            from hypothesis import HealthCheck, settings, stateful, strategies
        except ImportError:
            self.skipTest("hypothesis is not installed")
        test = self

        class Machine(stateful.RuleBasedStateMachine):
            def __init__(self):
                super().__init__()
                test.store._run("DELETE FROM fila")
                test.store._run("DELETE FROM sqlite_sequence")
                if test.store._run(buffer.IS_GROUPED):
                    test.store._run("DELETE FROM mudadas")
                    test.store._run("DELETE FROM abertas")
                    test.store._run("DELETE FROM conversas")
                    test.store._run("UPDATE conversas_lidas SET id = 0")
                self.model = Model(test)

            @stateful.rule(random=strategies.randoms())
            def step(self, random):
                self.model.step(random)

        self.store._run("PRAGMA synchronous = OFF")
        options = {"max_examples": 30, "stateful_step_count": 40, "deadline": None}
        checks = list(HealthCheck)
        stateful.run_state_machine_as_test(
            Machine,
            settings=settings(suppress_health_check=checks, database=None, **options),
        )


class LongPollTest(Loop):
    """A consumer that waits holds no thread and no transaction."""

    def wait(self, query="?espera=60"):
        client = self.client(http_post(b"", path=f"/fila/pegar{query}"))
        self.turn(2)
        return client

    def items(self, client):
        """What the client was given; None while it waits."""
        data = self.heard(client)
        return json.loads(data.partition(b"\r\n\r\n")[2]) if data else None

    def test_it_is_answered_in_the_round_in_which_a_message_arrives(self):
        waiting = self.wait()
        self.assertIsNone(self.items(waiting))
        sender = self.client(http_post(b"[1]"))
        self.turn(2)
        self.assertTrue(self.heard(sender).startswith(b"HTTP/1.1 200"))
        self.assertEqual([[1]], [item["payload"] for item in self.items(waiting)])

    def test_a_message_in_the_same_round_as_the_claim(self):
        claim = http_post(b"", path="/fila/pegar?espera=60")
        waiting, sender = self.client(claim), self.client(http_post())
        self.turn(3)
        self.heard(sender)
        self.assertEqual(1, len(self.items(waiting)))

    def test_when_there_is_something_it_does_not_wait(self):
        self.store.webhook(b"{}")
        self.assertEqual(1, len(self.items(self.wait())))

    def test_in_the_order_in_which_they_came(self):
        clients = [self.wait("?espera=60&limite=1") for _ in range(3)]
        for body in (b"1", b"2"):
            self.ask(http_post(body))
        got = [self.items(client) for client in clients]
        self.assertEqual([1, 2], [items[0]["payload"] for items in got[:2]])
        self.assertIsNone(got[2])

    def test_they_go_on_using_their_connections(self):
        waiting = self.wait()
        for body in (b"1", b"2"):
            self.ask(http_post(body))
            self.assertEqual(int(body), self.items(waiting)[0]["payload"])
            waiting.sendall(http_post(b"", path="/fila/pegar?espera=60"))
            self.turn(2)

    def test_what_falls_due_is_given_out(self):
        self.store.webhook(b"{}")
        self.store.pegar(1, 600, 100)
        self.store.devolver([1], delay=30)
        waiting = self.wait()
        self.clock.now += 29
        self.server.each_second(0)
        self.assertIsNone(self.items(waiting))
        self.clock.now += 1
        self.server.each_second(0)
        self.assertEqual(2, self.items(waiting)[0]["tentativa"])

    def test_a_conversation_that_falls_quiet(self):
        self.store.webhook(b"{}", group_key="a")
        waiting = self.wait("?espera=60&agrupar=8")
        other = self.wait("?espera=60&agrupar=9")
        for seconds, answer in ((7, None), (1, ["a"])):
            self.clock.now += seconds
            self.server.each_second(0)
            items = self.items(waiting)
            self.assertEqual(answer, items and [item["chave"] for item in items])
        self.assertIsNone(self.items(other))

    def test_a_conversation_that_is_quiet_already(self):
        self.store.webhook(b"{}", group_key="a")
        self.clock.now += 8
        self.assertEqual(1, len(self.items(self.wait("?espera=60&agrupar=8"))))

    def test_for_silence_it_is_not_asked_at_each_message(self):
        waiting = self.wait("?espera=60&agrupar=8")
        with mock.patch.object(self.store, "pegar_conversas") as asked:
            self.ask(http_post(b"{}"))
            asked.assert_not_called()
        self.clock.now += 8
        self.server.each_second(0)
        self.assertEqual(1, len(self.items(waiting)))
        self.assertEqual(set(), self.server.rounds.by_time)

    def test_with_serie_at_once_when_its_key_is_free(self):
        for _ in range(2):
            self.store.webhook(b"{}", group_key="a")
        self.store.pegar(1, 600, 100)
        waiting = self.wait("?espera=60&serie=1")
        self.assertIsNone(self.items(waiting))
        self.ask(http_post(b"", path="/fila/1/processado"))
        self.assertEqual([2], [item["id"] for item in self.items(waiting)])
        waiting = self.wait("?espera=60&serie=1")
        self.ask(http_post(b"{}"))
        self.assertEqual([3], [item["id"] for item in self.items(waiting)])

    def test_a_lease_that_ends_and_room_under_max(self):
        self.store.webhook(b"{}")
        self.store.webhook(b"{}")
        self.store.pegar(1, 600, 100)
        waiting = self.wait("?espera=60&max=1")
        self.assertIsNone(self.items(waiting))
        self.ask(http_post(b"", path="/fila/1/processado"))
        self.assertEqual(2, self.items(waiting)[0]["id"])

    def test_who_came_first_is_first_whatever_they_wait_for(self):
        self.store.webhook(b"{}")
        self.store.pegar(1, 600, 100)
        blocked = self.wait("?espera=60&max=1")
        clients = [self.wait(f"?espera=60&max={n}") for n in (5, 9, 7)]
        for n in range(3):
            self.ask(http_post(b"%d" % n))
            self.assertEqual(n, self.items(clients[n])[0]["payload"])
        self.assertIsNone(self.items(blocked))

    def test_each_waits_for_its_own(self):
        other, mine = self.wait("?espera=60&fonte=b"), self.wait("?espera=60&fonte=a")
        with self.store.transaction():
            self.store.webhook(b"{}", source="a")
        self.server.each_second(0)
        self.assertIsNone(self.items(other))
        self.assertEqual("a", self.items(mine)[0]["fonte"])
        self.store.webhook(b"{}", source="b")
        late = self.wait("?espera=60&fonte=b")
        self.assertEqual("b", self.items(other)[0]["fonte"])
        self.assertIsNone(self.items(late))

    def test_at_its_end_it_gets_nothing(self):
        waiting = self.wait("?espera=5")
        [channel] = self.server.rounds.everybody()
        self.assertAlmostEqual(time.monotonic() + 5, channel.until, delta=1)
        self.server.rounds.expire(channel.until - 0.01)
        self.assertEqual(channel.until, self.server.rounds.until)
        self.assertIsNone(self.items(waiting))
        self.server.rounds.expire(channel.until)
        self.assertEqual([], self.items(waiting))
        self.assertEqual({}, self.server.rounds.parked)

    def test_no_longer_than_a_minute(self):
        self.wait("?espera=99999")
        [channel] = self.server.rounds.everybody()
        self.assertLess(channel.until - time.monotonic(), 61)

    def test_when_the_server_stops_it_gets_nothing(self):
        waiting = self.wait()
        self.server.QUIET = 0
        self.server.drain()
        self.assertEqual([], self.items(waiting))

    def test_a_client_that_has_hung_up_is_given_nothing(self):
        gone, reset, begun, alive = (self.wait() for _ in range(4))
        begun.sendall(b"POST")
        for client in (gone, begun):
            client.close()
        reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        reset.close()
        self.ask(http_post(b"1"))
        self.assertEqual(1, self.items(alive)[0]["payload"])
        self.assertEqual({}, self.server.rounds.parked)
        self.assertEqual(1, self.rows()[0]["attempts"])

    def test_who_has_hung_up_keeps_no_place(self):
        clients = [self.wait() for _ in range(5)]
        for client in clients[1:]:
            client.close()
        self.server.each_second(0)
        self.assertEqual(1, len(self.server.rounds.everybody()))

    def test_when_the_commit_fails_nobody_is_given_anything(self):
        waiting = self.wait()
        sender = self.client(http_post())
        self.turn()
        good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
        self.turn()
        self.store._db = good
        for client in (waiting, sender):
            self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 503"))
        self.assertEqual([], self.rows())
        self.assertEqual({}, self.server.rounds.parked)

    def test_those_who_wait_cost_senders_nothing(self):
        def statements():
            seen = []
            sender = self.client(http_post())
            self.turn()
            self.store._db.set_trace_callback(seen.append)
            self.turn()
            self.store._db.set_trace_callback(None)
            self.heard(sender)
            return len(seen)

        alone = statements()
        self.store._run("DELETE FROM fila")
        clients = [self.wait(f"?espera=60&limite={n + 1}") for n in range(200)]
        polled = len(self.server.map)
        self.assertLess(polled, 10)  # the loop does not look at them
        self.assertLess(statements(), alone + 50)
        self.assertEqual(1, sum(self.items(client) is not None for client in clients))

    def test_what_is_counted_is_no_news_for_them(self):
        self.wait("?espera=60&fonte=nobody")
        with mock.patch.object(self.store, "pegar", wraps=self.store.pegar) as pegar:
            self.ask(http_post())
            asked = pegar.call_count
            self.ask(http_post(path="/fila/1/nada"))  # changes nothing
            self.assertEqual((1, 1), (asked, pegar.call_count))

    def test_too_many_are_answered_at_once(self):
        self.server.rounds.room = 2
        claim = http_post(b"", path="/fila/pegar?espera=60")
        burst = [self.client(claim) for _ in range(5)]
        self.turn(3)
        self.assertEqual(3, [self.items(client) for client in burst].count([]))
        self.ask(http_post())
        self.assertIsNone(self.items(self.wait()))
        self.assertEqual([], self.items(self.wait()))

    def test_it_ends_in_time_and_the_loop_rests(self):
        waiting = self.wait()
        [channel] = self.server.rounds.everybody()
        channel.until = self.server.rounds.until = time.monotonic() + 0.1
        began = time.monotonic()
        while self.items(waiting) is None:
            self.server.round(5)
        self.assertLess(time.monotonic() - began, 2)
        self.assertEqual(float("inf"), self.server.rounds.until)

    def test_nobody_waits_in_a_server_that_stops(self):
        self.server.rounds.closing = True
        self.assertEqual([], self.items(self.wait()))


class LongPollElsewhereTest(QueueCase):
    def test_under_another_server_it_returns_at_once(self):
        self.assertEqual([], self.claim("?espera=60"))


class ConsumersTest(unittest.TestCase):
    """Many at once, on a real server."""

    def test_n8n_settles_50_in_parallel_and_repeats_them_all(self):
        with Service() as service:
            for _ in range(50):
                service.call("POST", "/webhook", b"{}")
            items = json.loads(service.call("POST", "/fila/pegar")[2])
            for _ in range(2):
                codes = self.at_once(
                    lambda item: service.call("POST", f"/fila/{item['id']}/processado")[
                        0
                    ],
                    items,
                )
                self.assertEqual([200] * 50, codes)

    def at_once(self, function, items):
        with ThreadPoolExecutor(len(items)) as pool:
            return list(pool.map(function, items))

    def test_a_claim_lost_on_its_way_comes_back(self):
        with Service(LEASE=1) as service:
            service.call("POST", "/webhook", b"{}")
            client = socket.create_connection(("127.0.0.1", service.port))
            client.sendall(http_post(b"", path="/fila/pegar"))
            client.recv(1)
            client.close()
            answer = service.call("POST", "/fila/pegar?espera=10")[2]
            self.assertEqual(2, json.loads(answer)[0]["tentativa"])

    @long
    def test_8_consumers_that_crash_at_random_lose_nothing(self):
        count, lease, log = 400, 2, []
        with Service(MAX_ATTEMPTS=50) as service:
            for number in range(count):
                service.call("POST", "/webhook", b"%d" % number)

            def consume(seed):
                random = Random(seed)
                query = f"?limite=9&reserva={lease}&espera=4"
                while True:
                    began = time.monotonic()
                    items = json.loads(service.call("POST", f"/fila/pegar{query}")[2])
                    if not items:
                        return
                    ended = time.monotonic()
                    crash = random.random() < 0.2
                    log.extend((i["id"], i["tentativa"], began, ended) for i in items)
                    if not crash:
                        ids = json.dumps({"ids": [i["id"] for i in items]}).encode()
                        service.call("POST", "/fila/processado", ids)

            self.at_once(consume, range(8))
            listed = json.loads(service.call("GET", "/fila?limite=500")[2])
        self.assertEqual({"processado"}, {item["status"] for item in listed})
        self.assertEqual(count, len(listed))
        self.assertEqual(len(log), len({(id_, attempt) for id_, attempt, *_ in log}))
        claims = collections.defaultdict(list)
        for id_, attempt, began, ended in log:
            claims[id_].append((attempt, began, ended))
        for times in claims.values():
            times.sort()
            for (_, began, _), (_, _, ended) in itertools.pairwise(times):
                self.assertGreaterEqual(ended - began, lease)


class HealthTest(Case):
    def test_it_writes_once_a_second_at_most(self):
        with mock.patch.object(self.store, "probe") as probe:
            for _ in range(100):
                self.assertEqual(200, self.call("GET", "/health", token=None)[0])
            self.assertEqual(1, probe.call_count)
            self.app._probed -= 1
            self.call("GET", "/health", token=None)
            self.assertEqual(2, probe.call_count)

    def test_trouble_is_not_remembered(self):
        with mock.patch.object(self.store, "probe", side_effect=sqlite3.Error):
            for _ in range(2):
                self.assertEqual(503, self.call("GET", "/health", token=None)[0])
        self.assertEqual(200, self.call("GET", "/health", token=None)[0])

    def test_it_asks_for_no_token_and_tells_no_details(self):
        answer = self.call("GET", "/health", token=None)
        self.assertEqual((200, '{"status":"ok"}\n'), answer)
        self.assertEqual((200, ""), self.call("HEAD", "/health", token=None))

    def test_it_is_503_when_the_file_cannot_be_written(self):
        good = self.store._db
        for part in ("BEGIN", "user_version", "COMMIT"):
            self.store._db = Faulty(good, part)
            self.assertEqual(503, self.call("GET", "/health", token=None)[0])


class CountersTest(SourceCase, QueueCase):
    """What is counted is in the file, with what is counted in the same commit."""

    settings = (*SourceCase.settings, ("MAX_ATTEMPTS", "2"))

    def event(self, id_):
        body = json.dumps({"id": id_}).encode()
        self.assertEqual(200, self.signed("/webhook/stripe", body, self.stripe(body)))

    def counted(self, name):
        return self.store.report()["contadores"][name]

    def test_each_thing_by_its_name(self):
        self.send()
        self.send()
        for _ in range(2):
            self.event("evt_1")
        self.call("POST", "/webhook", b"{}", token="wrong")
        self.claim()
        self.settle(1, "processado")
        self.settle(1, "processado")  # changes nothing
        self.settle(2, "devolver?em=0")
        self.clock.now += 600
        self.claim()  # the lease of 3 has ended
        self.clock.now += 8 * 86400
        buffer.Housekeeper(self.configured, self.store).tidy()
        expected = {
            "recebidas": {"": 2, "stripe": 1},
            "duplicadas": {"stripe": 1},
            "recusadas": {"token": 1},
            "entregues": {"": 4},
            "resolvidas": {"processado": 1, "devolver": 1},
            "vencidas": {"": 2},
            "esgotadas": {"": 1},
            "apagadas": {"": 1},
        }
        self.maxDiff = None
        found = self.store.report()["contadores"]
        self.assertEqual(expected, found)

    def test_what_is_undone_is_not_counted(self):
        with self.store.transaction():
            self.store.webhook(b"kept")
            with contextlib.suppress(ValueError), self.store.transaction():
                self.store.webhook(b"undone")
                raise ValueError
        good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
        with self.assertRaises(sqlite3.Error):
            self.store.webhook(b"lost")
        self.store._db = good
        self.store.webhook(b"kept")
        self.assertEqual({"": 2}, self.counted("recebidas"))
        self.assertMessages()

    def assertMessages(self):
        """The kept numbers are what counting gives."""
        sql = "SELECT source, status, count(*) FROM fila GROUP BY 1, 2"
        found = {tuple(row.values()) for row in self.store.report()["mensagens"]}
        self.assertEqual(set(map(tuple, self.rows(sql))), {f for f in found if f[2]})

    def test_messages_are_right_whoever_changes_them(self):
        for _ in range(5):
            self.send()
        self.event("evt_1")
        self.claim("?limite=2")
        with contextlib.closing(sqlite3.connect(self.configured.db_path)) as shell:
            shell.executescript("""
                INSERT INTO fila (payload) VALUES ('by hand');
                INSERT INTO fila (payload, source) VALUES ('by hand', 'new');
                UPDATE fila SET status = 'erro' WHERE id = 3;
                UPDATE fila SET source = 'moved' WHERE id = 4;
                DELETE FROM fila WHERE id IN (1, 5)""")
        self.assertMessages()

    def test_refusals_alone_write_nothing(self):
        wal = pathlib.Path(f"{self.configured.db_path}-wal")
        before = wal.read_bytes()
        for _ in range(100):
            self.call("POST", "/webhook", b"{}", token="wrong")
        self.assertEqual(before, wal.read_bytes())
        self.assertEqual({"token": 100}, self.counted("recusadas"))

    def test_refusals_ride_along_with_what_is_written_next(self):
        refused = "SELECT n FROM contadores WHERE label = 'token'"
        for total, write in enumerate((self.send, self.store.write_refusals), 1):
            self.call("POST", "/webhook", b"{}", token="wrong")
            good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
            with contextlib.suppress(sqlite3.Error, AssertionError):
                write()
            self.store._db = good
            write()
            self.assertEqual(total, self.rows(refused)[0]["n"])
        self.call("POST", "/webhook", b"{}", token="wrong")
        self.store.close()
        self.assertEqual(3, self.rows(refused)[0]["n"])
        self.open()
        self.assertEqual(3, self.counted("recusadas")["token"])

    def test_reasons_are_few(self):
        self.send()
        for attempt in range(100):
            self.store._run("UPDATE fila SET attempts = :n", n=attempt)
            self.call("POST", f"/fila/1/erro?tentativa={attempt + 1}")
            self.call("GET", f"/{attempt}")
        self.assertEqual([100, 100], [*self.counted("recusadas").values()])

    def test_the_minutes_of_the_last_hour(self):
        minute = self.clock.now // 60 * 60
        for later, times in ((0, 3), (60, 1), (300, 2)):
            self.clock.now = minute + later
            for _ in range(times):
                self.send()
        self.claim()
        self.settle(1, "processado")
        self.settle(2, "erro")
        self.settle(3, "devolver")
        self.clock.now = minute + 330
        minutes = self.store.report()["por_minuto"]
        self.assertEqual(60, len(minutes))
        self.assertEqual([minute + 300 - 59 * 60, 0, 0, 0], minutes[0])
        found = {at - minute: counts for at, *counts in minutes if any(counts)}
        self.assertEqual({0: [3, 0, 0], 60: [1, 0, 0], 300: [2, 1, 1]}, found)
        self.clock.now = minute + 3600
        self.send()
        minutes = self.store.report()["por_minuto"]
        self.assertEqual((1, 2), (minutes[0][1], minutes[4][1]))
        rows = self.rows("SELECT * FROM minutos WHERE step = 1")
        self.assertLessEqual(len(rows), 60)

    def test_a_minute_whose_first_commit_fails_begins_with_the_next(self):
        self.send()
        self.clock.now += 60
        good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
        self.assertEqual(503, self.call("POST", "/webhook", b"{}")[0])
        self.store._db = good
        self.send()
        minutes = self.store.report()["por_minuto"]
        self.assertEqual([1, 1], [received for _, received, *_ in minutes[-2:]])

    def test_a_minute_is_counted_once_by_two_processes(self):
        other = buffer.open_store(self.configured, self.clock)
        self.addCleanup(other.close)
        for _ in range(3):
            self.store.webhook(b"{}")
            other.webhook(b"{}")
        self.assertEqual(6, other.report()["por_minuto"][-1][1])

    def test_the_minutes_bear_a_clock_that_is_set_back(self):
        self.send()
        self.clock.now -= 7200
        self.send()
        minutes = self.store.report()["por_minuto"]
        self.assertEqual(1, sum(received for _, received, *_ in minutes))

    def test_the_oldest_that_is_due(self):
        def oldest():
            return self.store.report()["mais_antiga"]

        self.assertIsNone(oldest())
        self.send()
        self.clock.now += 10
        self.send()
        self.clock.now += 10
        self.assertEqual(20, oldest())
        self.claim("?limite=1")
        self.assertEqual(10, oldest())  # one in work does not count
        self.settle(2, "processado")
        self.assertIsNone(oldest())
        self.clock.now += 610
        self.assertEqual(10, oldest())  # its lease is over, though nobody has claimed
        self.claim()
        self.settle(1, "erro")
        self.settle(1, "reenviar")
        self.claim()
        self.settle(1, "devolver?em=100")
        self.assertIsNone(oldest())
        self.clock.now += 130
        self.assertEqual(30, oldest())

    def test_looking_costs_the_same_however_many_there_are(self):
        def steps():
            count = itertools.count()
            self.store._db.set_progress_handler(lambda: next(count) and 0, 1)
            self.store.report()
            self.store._db.set_progress_handler(None, 1)
            return next(count)

        self.send()
        few = steps()
        with self.store.transaction():
            for _ in range(2000):
                self.store.webhook(b"{}")
        self.assertLess(steps(), few + 50)


class MetricsTest(QueueCase):
    settings = (("METRICS_TOKEN", "watcher"),)
    FAMILY = re.compile(
        r"# HELP (\w+) [^\n]+\n# TYPE \1 (counter|gauge|histogram)\n"
        r'((?:\1(?:_bucket|_sum|_count)?(?:\{(?:\w+="(?:[^"\\\n]|\\[\\n"])*",?)+\})?'
        r" -?[0-9.e+-]+\n)*)"
    )

    def metrics(self):
        status, text = self.call("GET", "/metrics")
        self.assertEqual(200, status)
        self.assertIn("version=0.0.4", self.answered["Content-Type"])
        self.assertEqual("", self.FAMILY.sub("", text))
        return text

    def everything(self):
        """The text when there is something of all."""
        attempts = {"ok": 2, 'an "odd"\nname\\': 1}
        one = {"destino": "x", "estado": "aberto", "em_voo": 1, "tentativas": attempts}
        self.app.delivery = mock.Mock(report=lambda: [one])
        self.store.group()
        self.send()
        self.call("POST", "/webhook", b"{}", token="wrong")
        self.store.webhook(b"{}", source='a "b" \\\n', event_id="1")
        self.store.webhook(b"{}", source='a "b" \\\n', event_id="1")
        self.claim()
        self.settle(1, "processado")
        return self.metrics()

    def test_rights(self):
        for token, status in ((TOKEN, 200), ("watcher", 200), ("wrong", 401)):
            self.assertEqual(status, self.call("GET", "/metrics", token=token)[0])
        for url in ("/webhook", "/fila/pegar"):
            answer = self.call("POST", url, b"{}", token="watcher")
            self.assertEqual(401, answer[0])

    def test_numbers(self):
        text = self.everything()
        for line in (
            'buffer_messages{source="",status="processado"} 1',
            'buffer_messages{source="",status="erro"} 0',
            'buffer_received_total{source=""} 1',
            'buffer_refused_total{reason="token"} 1',
            'buffer_settled_total{verdict="processado"} 1',
            "buffer_claimed_total 2",
            'buffer_request_seconds_count{route="POST /webhook"} 2',
            f'buffer_info{{version="{buffer.__version__}",python="',
            'buffer_received_total{source="a \\"b\\" \\\\\\n"} 1',
            'buffer_delivery_attempts_total{target="x",outcome="ok"} 2',
            'buffer_delivery_breaker{target="x",state="aberto"} 1',
        ):
            self.assertIn(f"\n{line}", text)

    def test_prometheus_own_parser(self):
        parser = library("prometheus_client.parser")
        text = self.everything()
        families = list(parser.text_string_to_metric_families(text))
        self.assertEqual(len(families), text.count("# TYPE"))
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in families
            for sample in family.samples
        }
        self.assertEqual(1, samples["buffer_received_total", 'a "b" \\\n'])

    def test_a_path_of_a_stranger_is_no_label(self):
        self.call("GET", "/secret-path")
        self.call("GET", "/fila/77")
        text = self.metrics()
        self.assertNotIn("secret", text)
        self.assertIn('route="none"', text)
        self.assertIn('route="GET /fila/{id}"', text)

    def test_each_verdict_is_there_before_it_is_first_given(self):
        """In Prometheus a sum with what is not there is nothing, and no alert."""
        for verdict in ("processado", "erro", "devolver", "estender", "reenviar"):
            self.assertIn(
                f'buffer_settled_total{{verdict="{verdict}"}} 0\n', self.metrics()
            )

    def test_readme_has_each_family(self):
        readme = (HERE / "README.md").read_text()
        for name in re.findall("# TYPE (\\w+)", self.everything()):
            self.assertTrue(re.search(rf"\| `{name}", readme), name)

    def test_a_histogram_counts_up_to_each_bound(self):
        histogram = buffer.Histogram((1, 10))
        for value in (0.5, 1, 1.5, 11):
            histogram.observe(value)
        found = list(buffer.buckets({}, histogram))
        self.assertEqual([2, 3, 4, 14, 4], [number for *_, number in found])


class TimesTest(Loop):
    """How long requests and commits take, as the loop sees it."""

    def setUp(self):
        super().setUp()
        self.before = sum(self.store.commits.counts)

    def test_all_of_a_round_share_a_commit(self):
        clients = [self.client(http_post()) for _ in range(5)]
        self.turn(2)
        self.assertTrue(all(map(self.heard, clients)))
        self.assertEqual(
            [0, 0, 1], self.app.shared.counts[:3]
        )  # one commit of up to 10
        self.assertEqual(self.before + 1, sum(self.store.commits.counts))
        self.assertEqual(5, sum(self.app.times["POST /webhook"].counts))

    def test_a_round_that_writes_nothing_is_no_commit(self):
        self.ask(http_post(token="wrong"))
        self.ask(http_post(b"", path="/fila/pegar"))
        self.assertEqual(self.before, sum(self.store.commits.counts))
        self.assertEqual(0, sum(self.app.shared.counts))

    def test_the_time_is_until_after_the_commit(self):
        ticks = itertools.count()
        client = self.client(http_post())
        self.turn()  # accepts
        with mock.patch("buffer.time.monotonic", lambda: next(ticks) / 2):
            self.store._db.set_trace_callback(
                lambda sql: sql == "COMMIT" and next(ticks)
            )
            self.turn()
        self.assertIsNotNone(self.heard(client))
        self.assertGreaterEqual(self.app.times["POST /webhook"].sum, 1)

    def test_those_that_want_to_wait_are_not_slow(self):
        self.client(http_post(b"", path="/fila/pegar?espera=60"))
        self.turn(3)
        self.assertNotIn("POST /fila/pegar", self.app.times)


class TroubleTest(Case):
    """Trouble on our side is 503 with Retry-After, never a 4xx, and leaves by itself."""

    def test_storage_trouble_is_503_and_one_line_in_the_log(self):
        good = self.store._db
        for part in ("BEGIN", "INSERT", "COMMIT"):
            self.store._db = Faulty(good, part)
            for _ in range(10):
                self.assertEqual(503, self.call("POST", "/webhook", b"{}")[0])
                self.assertIn("Retry-After", self.answered)
        self.store._db = good
        self.assertEqual([], self.rows())
        self.assertEqual(1, self.logged().count("disk I/O error"))
        self.send()

    def test_a_locked_file_is_503_until_it_is_free(self):
        with mock.patch.object(buffer.Store, "BUSY", 0.01):
            self.open()
        with contextlib.closing(sqlite3.connect(self.configured.db_path)) as other:
            other.isolation_level = None
            other.execute("BEGIN IMMEDIATE")
            for url in ("/webhook", "/fila/pegar", "/fila/1/processado"):
                self.assertEqual(503, self.call("POST", url, b"{}")[0])
            other.execute("ROLLBACK")
        self.send()

    def test_a_fault_of_ours_is_503_without_details(self):
        def fails(*_, **__):
            raise KeyError("inside")

        with mock.patch.object(self.app.store, "pegar", fails):
            for _ in range(10):
                status, text = self.call("POST", "/fila/pegar")
        self.assertEqual(503, status)
        self.assertNotIn("inside", text)
        self.assertEqual(1, self.logged().count("unexpected error"))
        self.assertRegex(self.logged(), r"KeyError at buffer.py:\d+ respond, .*pegar")


class PressureTest(Case):
    """Senders get 503 before the disk is full, and consumers go on."""

    settings = (("MIN_FREE", "1G"), ("MAX_PENDING", "10"))

    def setUp(self):
        super().setUp()
        self.now, self.free = 0, 2 << 30

    def codes(self):
        """(webhook, health, pegar) after a second."""
        self.store.free = lambda: self.free
        self.now += 1
        self.app.tick(self.now)
        sent = self.call("POST", "/webhook", b"{}")[0]
        health = self.call("GET", "/health", token=None)[0]
        return sent, health, self.call("POST", "/fila/pegar?limite=1")[0]

    def test_below_min_free_senders_wait_and_consumers_go_on(self):
        self.assertEqual((200, 200, 200), self.codes())
        self.free = (1 << 30) - 1
        self.assertEqual((503, 503, 200), self.codes())
        self.call("POST", "/webhook", b"{}")
        self.assertEqual("30", self.answered["Retry-After"])
        self.assertEqual(200, self.settle(1, "processado"))

    def test_who_shows_no_token_is_not_told(self):
        self.free = 0
        self.codes()
        self.assertEqual(401, self.call("POST", "/webhook", b"{}", token=None)[0])

    def test_it_ends_with_a_tenth_of_room(self):
        self.free = 1 << 29
        self.codes()
        for free, code in (((11 << 30) // 10 - 1, 503), ((11 << 30) // 10 + 1, 200)):
            self.free = free
            self.assertEqual((code, code, 200), self.codes())

    def test_max_pending_counts_what_waits_and_what_is_in_work(self):
        for _ in range(10):
            self.send()
        self.claim("?limite=5")
        self.settle(1, "devolver?em=100")
        self.assertEqual((503, 503, 200), self.codes())
        self.settle(2, "processado")
        self.assertEqual((503, 503, 200), self.codes())
        self.settle(3, "erro")
        self.assertEqual((200, 200, 200), self.codes())

    def test_the_log_says_when_it_begins_and_ends(self):
        for self.free in (0, 0, 2 << 30, 2 << 30):
            self.codes()
        begins = "senders get 503: the database's disk has 0 MiB free, MIN_FREE is 1024"
        self.assertEqual(1, self.logged().count(begins))
        self.assertEqual(1, self.logged().count("served again: the database's disk"))

    def test_a_file_that_is_not_the_open_one_any_more(self):
        """Removed, replaced, or without its WAL: commits would go where nobody looks."""
        path = self.configured.db_path
        for name, replace in itertools.product((path, f"{path}-wal"), (False, True)):
            with self.subTest(name=name, replace=replace):
                self.send(b'"before"')
                os.rename(name, f"{name}.away")
                if replace:
                    pathlib.Path(name).touch()
                self.assertEqual((503, 503), self.codes()[:2])
                os.replace(f"{name}.away", name)
                self.assertEqual((200, 200), self.codes()[:2])

    @unittest.skipUnless(os.path.isdir("/proc/self/fd"), "needs /proc")
    def test_the_open_file_can_be_saved_as_the_log_says(self):
        self.send(b'"not lost"')
        for name in self.folder.iterdir():
            name.unlink()
        self.codes()
        command = re.search(r"save what is open: (cp .*)", self.logged())[1]
        subprocess.run(command.split(), cwd=self.folder, check=True)
        saved = rows(self.folder / "rescued.sqlite")
        self.assertIn(('"not lost"',), saved)

    def test_requests_do_not_pay_for_it(self):
        self.store.free = free = mock.Mock(return_value=2 << 30)
        self.store.pending = pending = mock.Mock(return_value=0)
        for n in range(1000):  # two seconds
            self.app.tick(n / 500)
        self.assertLess(free.call_count, 25)
        self.assertLess(pending.call_count, 25)

    def test_trouble_while_looking_refuses_nobody(self):
        with mock.patch.object(self.store, "free", side_effect=OSError(5, "I/O")):
            self.app.tick(0)
        self.assertIn("cannot look at the disk: OSError: I/O", self.logged())
        self.assertEqual({}, self.store.report()["contadores"]["recusadas"])


class BodyTest(Case):
    """Under another WSGI server the body's end is what Content-Length says."""

    settings = (("MAX_BODY", "10"),)

    def post(self, body, **environ):
        return self.call("POST", "/webhook", body, **environ)[0]

    def test_limit(self):
        self.assertEqual(200, self.post(b"1" * 10))
        self.assertEqual(413, self.post(b"1" * 11))

    def test_the_stream_may_end_by_itself(self):
        chunked = {"CONTENT_LENGTH": "", "wsgi.input_terminated": True}
        self.assertEqual(200, self.post(b"1" * 10, **chunked))
        self.assertEqual(413, self.post(b"1" * 11, **chunked))

    def test_never_reads_beyond_content_length(self):
        self.assertEqual(200, self.post(b"12345rest", CONTENT_LENGTH="5"))
        self.assertEqual([12345], [item["payload"] for item in self.claim()])

    def test_a_body_that_breaks_off_leaves_no_row(self):
        self.assertEqual(400, self.post(b"123", CONTENT_LENGTH="5"))
        self.assertEqual([], self.rows())

    def test_a_chunked_body_whose_end_is_unknown_is_411(self):
        """Read as empty it would be a 400, after which senders forget the message."""
        chunked = {"CONTENT_LENGTH": "", "HTTP_TRANSFER_ENCODING": "chunked"}
        self.assertEqual(411, self.post(b"{}", **chunked))

    def test_nonsense_lengths(self):
        for text in ("abc", "-1", "+5", "9" * 5000, "٣"):
            environ = {"REQUEST_METHOD": "POST", "PATH_INFO": "/webhook"}
            environ.update({"HTTP_X_TOKEN": TOKEN, "CONTENT_LENGTH": text})
            reply = self.app.respond({**environ, "wsgi.input": io.BytesIO(b"123")})
            self.assertEqual(400, reply.code, text[:9])


class WeakTokensTest(unittest.TestCase):
    """What can be guessed, or read in README, opens nothing but this machine."""

    GOOD = "sixteen-letters!"

    def start(self, is_private=False, **tokens):
        settings = buffer.Settings.read({"TOKEN": self.GOOD, **tokens})
        with self.assertLogs("buffer") as log:
            buffer.log.info("begins")
            buffer.refuse_weak_tokens(settings, is_private)
        return log.output[1:]

    def test_they_do_not_start_where_others_can_try(self):
        for name in ("TOKEN", "WEBHOOK_TOKEN", "METRICS_TOKEN"):
            for weak in (
                "short",
                "fifteen-letters",
                "a-long-random-secret",
                f"{self.GOOD},x",
            ):
                with self.assertRaisesRegex(
                    buffer.StartError, "can be guessed. Try: TOKEN="
                ):
                    self.start(**{name: weak})
                self.assertEqual(1, len(self.start(True, **{name: weak})))
        self.assertEqual([], self.start())

    def test_only_loopback_is_private(self):
        for address, private in (("127.0.0.1", True), ("0.0.0.0", False)):
            with socket.create_server((address, 0)) as sock:
                self.assertEqual(private, buffer.is_private(sock))
        with (
            tempfile.TemporaryDirectory() as folder,
            socket.socket(socket.AF_UNIX) as sock,
        ):
            sock.bind(f"{folder}/s")  # a proxy passes everybody on
            self.assertFalse(buffer.is_private(sock))

    def test_readme_tells_no_token_that_works_anywhere(self):
        readme = (HERE / "README.md").read_text()
        for token in re.findall(r"TOKEN=([\w-]{4,})", readme):
            if not token.startswith(("WEBHOOK", "METRICS")):
                self.assertIn(token.encode(), buffer.EXAMPLES)

    def test_short_secrets_are_warned_of(self):
        settings = buffer.Settings.read({"TOKEN": self.GOOD, "SECRET_X": "whsec_short"})
        with mock.patch("logging.basicConfig"), self.assertLogs("buffer") as log:
            buffer.start_log(settings)
        self.assertIn("SECRET_X is shorter than 16", log.output[0])


class HostedTest(Case):
    """Under another WSGI server: opened by the first request, in each process."""

    def setUp(self):
        super().setUp()
        buffer.hosted.cache_clear()
        self.addCleanup(buffer.hosted.cache_clear)
        environ = {"TOKEN": TOKEN, "DB_PATH": str(self.folder / "b.sqlite")}
        environ["MIN_FREE"] = "0"
        self.enter(mock.patch.dict(os.environ, environ))
        self.app = buffer.application

    def test_each_request_is_answered_and_does_a_little_housekeeping(self):
        with mock.patch.object(buffer.Housekeeper, "tidy") as tidy:
            self.send()
            self.assertEqual(1, len(self.claim()))
        tidy.assert_called_once_with(bites=5)

    def test_a_connection_does_not_cross_a_fork(self):
        self.send()
        here = buffer.hosted(os.getpid())
        with mock.patch("os.getpid", return_value=-1):
            self.send()
            self.assertIsNot(here, buffer.hosted(-1))

    def test_senders_wait_when_the_disk_is_nearly_full(self):
        with mock.patch.dict(os.environ, {"MIN_FREE": "999999G"}):
            self.assertEqual(503, self.call("POST", "/webhook", b"{}")[0])
            self.claim()

    def test_alarms_need_a_process_that_stays(self):
        with mock.patch.dict(os.environ, {"ALERT_URL": "http://x/hidden"}):
            self.send()
        self.assertIn("ALERT_URL is told nothing", self.logged())
        self.assertNotIn("hidden", self.logged())

    def test_so_does_delivery(self):
        for name in ("FORWARD_URL", "FORWARD_LOJA"):
            buffer.hosted.cache_clear()
            more = {"SECRET_LOJA": "s", "SIGN_LOJA": "github", name: "http://x/hidden"}
            with mock.patch.dict(os.environ, more):
                self.send()
        self.assertEqual(2, self.logged().count("nothing is delivered"))
        self.assertNotIn("hidden", self.logged())

    def test_a_wrong_setting_is_503(self):
        with mock.patch.dict(os.environ, {"MAX_BODY": "x"}):
            buffer.hosted.cache_clear()
            self.assertEqual(503, self.call("POST", "/webhook", b"{}")[0])
        self.assertIn("MAX_BODY='x'", self.logged())


class ClientAddressTest(unittest.TestCase):
    def address(self, trusted, peer, forwarded=None):
        environ = {"REMOTE_ADDR": peer}
        if forwarded:
            environ["HTTP_X_FORWARDED_FOR"] = forwarded
        return buffer.client_address(environ, buffer.networks(trusted))

    def test_headers_of_strangers_are_ignored(self):
        self.assertEqual("9.9.9.9", self.address("", "9.9.9.9", "1.1.1.1"))
        self.assertEqual("9.9.9.9", self.address("127.0.0.1", "9.9.9.9", "1.1.1.1"))

    def test_the_nearest_hop_that_is_not_ours(self):
        ours = "127.0.0.1,10.0.0.0/8"
        chain = "6.6.6.6, 1.1.1.1, 10.1.2.3"
        for peer in ("127.0.0.1", "::ffff:127.0.0.1", "localhost"):
            self.assertEqual("1.1.1.1", self.address(ours, peer, chain))
        self.assertEqual("10.0.0.1", self.address(ours, "127.0.0.1", "10.0.0.1"))
        self.assertEqual("127.0.0.1", self.address(ours, "127.0.0.1"))
        self.assertEqual("", self.address("", "", "6.6.6.6"))
        for hop, address in (
            ("1.1.1.1:53", "1.1.1.1"),
            ("[2001:db8::1]:53", "2001:db8::1"),
            ("[2001:db8::1]", "2001:db8::1"),
            ("2001:db8::1", "2001:db8::1"),
        ):
            self.assertEqual(address, self.address(ours, "127.0.0.1", hop))
        self.assertEqual("x" * 64, self.address(ours, "127.0.0.1", "x" * 999))


# Delivery


class Answers:
    """A real HTTP target in a thread. It notes requests, and answers as it is told:

    with the bytes of a whole answer, or whatever a function makes of the connection.
    """

    OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

    def __init__(self, *plan, default=OK, port=0, tls=None):
        self.plan, self.default = list(plan), default
        self.requests, self.busy, self.busiest, self.lines = [], 0, 0, 0
        self.lock = threading.Lock()
        self.listener = socket.create_server(("127.0.0.1", port), backlog=100)
        self.port = self.listener.getsockname()[1]
        if tls:
            self.listener = tls.wrap_socket(self.listener, server_side=True)
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self):
        with contextlib.suppress(OSError):
            while True:
                try:
                    line, _ = self.listener.accept()
                except ssl.SSLError:  # a client that does not trust it
                    continue
                self.lines += 1
                threading.Thread(target=self.serve, args=[line], daemon=True).start()

    def serve(self, line):
        with line, line.makefile("rb") as file, contextlib.suppress(OSError):
            while self.request(line, file):
                pass

    def request(self, line, file):
        start = file.readline().decode("latin-1").split()
        if not start:
            return False
        headers = http.client.parse_headers(file)
        body = file.read(int(headers["Content-Length"]))
        request = *start[:2], headers, body
        with self.lock:
            self.requests.append(request)
            self.busy += 1
            self.busiest = max(self.busy, self.busiest)
            answer = self.plan.pop(0) if self.plan else self.default
        try:
            return self.act(answer, line, request)
        finally:
            with self.lock:
                self.busy -= 1

    def act(self, answer, line, request):
        """Answers; whether the connection stays."""
        if callable(answer):
            return answer(line)
        line.sendall(answer)
        return b"close" not in answer

    def close(self):
        self.listener.close()

    def bodies(self):
        return [body for *_, body in self.requests]


def respond(status, body=b"", *headers):
    lines = [f"HTTP/1.1 {status}", f"Content-Length: {len(body)}", *headers, "", ""]
    return "\r\n".join(lines).encode("latin-1") + body


def reset(line):
    line.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    line.close()


def unused_port():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


class DeliveryCase(Case):
    """Delivery to real targets, its rounds turned by the test, its clock moved by it."""

    def open(self, **settings):
        super().open(**settings)
        self.steady = Clock(0)
        self.news = threading.Event()
        self.delivery = buffer.Delivery(self.configured, self.store, self.steady)
        self.delivery.loop_wake = self.news.set
        self.addCleanup(self.delivery.stop)

    def answers(self, *plan, **options):
        target = Answers(*plan, **options)
        self.addCleanup(target.close)
        return target

    def turn(self):
        with self.store.transaction():
            self.delivery.turn(look=True)
        self.delivery.committed()

    def flow(self):
        """Turns until nothing more can be delivered now."""
        self.turn()
        while any(target.flying for target in self.delivery.targets):
            self.assertTrue(self.news.wait(20), "nothing comes back")
            self.news.clear()
            self.turn()

    def after(self, seconds):
        self.clock.now += seconds
        self.steady.now += seconds
        self.flow()

    def look(self, id_=1):
        return json.loads(self.call("GET", f"/fila/{id_}")[1])

    def statuses(self):
        return [row["status"] for row in self.rows()]


class PushTest(DeliveryCase):
    def deliver_one(
        self, body=b"{}", url="/webhook", forward="", settings=(), **environ
    ):
        target = self.answers()
        self.open(FORWARD_URL=target.url + forward, **dict(settings))
        self.send(body, url, **environ)
        self.flow()
        self.assertEqual(["processado"], self.statuses())
        [request] = target.requests
        return request

    def test_a_message_arrives_as_it_came(self):
        method, path, headers, body = self.deliver_one(
            b'{"v":1.10}',
            "/webhook?origem=a%26b&x=1&x=2",
            forward="/webhook/xyz?k=v",
            CONTENT_TYPE="application/json",
            HTTP_X_EVENT="pedido",
            HTTP_USER_AGENT="Evolution",
        )
        self.assertEqual(("POST", b'{"v":1.10}'), (method, body))
        self.assertEqual("/webhook/xyz?k=v&origem=a%26b&x=1&x=2", path)
        self.assertEqual("application/json", headers["Content-Type"])
        self.assertEqual(
            ("pedido", "Evolution"), (headers["X-Event"], headers["User-Agent"])
        )
        self.assertEqual("1", headers["X-Buffer-Id"])
        self.assertEqual("1", headers["X-Buffer-Tentativa"])
        self.assertEqual(f"{self.store.file_id}-1", headers["Idempotency-Key"])

    def test_what_is_not_the_senders_to_say_is_left_out(self):
        *_, headers, _ = self.deliver_one(
            HTTP_HOST="buffer.example",
            HTTP_COOKIE="c",
            HTTP_CONNECTION="keep-alive",
            HTTP_ACCEPT_ENCODING="br",
            HTTP_X_BUFFER_ID="9",
            HTTP_IDEMPOTENCY_KEY="forged",
        )
        self.assertTrue(headers["Host"].startswith("127.0.0.1:"))
        for name in ("Cookie", "Connection", "Accept-Encoding", "X-Token"):
            self.assertNotIn(name, headers)
        self.assertEqual(["1"], headers.get_all("X-Buffer-Id"))
        key = f"{self.store.file_id}-1"
        self.assertEqual([key], headers.get_all("Idempotency-Key"))

    def test_what_we_say_of_a_message_no_sender_can_say(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url, SECRET_LOJA="s", SIGN_LOJA="X-T - -")
        forged = {"HTTP_X_BUFFER_FONTE": "loja", "HTTP_X_BUFFER_OTHER": "x"}
        self.send(**forged)
        self.send(b"{}", "/webhook/loja", HTTP_X_T="s", **forged)
        self.flow()
        for (*_, headers, _), source in zip(target.requests, ("", "loja")):
            self.assertEqual([source], headers.get_all("X-Buffer-Fonte"))
            self.assertNotIn("X-Buffer-Other", headers)

    def test_bytes_are_bytes(self):
        *_, body = self.deliver_one(bytes(range(256)))
        self.assertEqual(bytes(range(256)), body)

    def test_the_path_below_webhook_is_appended(self):
        for path, forward, expected in (
            ("/messages-upsert", "/hook", "/hook/messages-upsert"),
            ("/a/b", "/hook/", "/hook/a/b"),
            ("/caf%C3%A9 x", "", "/caf%C3%A9%20x"),
            ("/../../rest/%2e%2e/users", "/hook", "/hook/rest/users"),
            ("/a%3Fb%23c", "/hook", "/hook/a%3Fb%23c"),
        ):
            with self.subTest(path):
                self.setUp()
                url = "/webhook" + urllib.parse.unquote(path).replace("?", "\0")
                environ = {
                    "PATH_INFO": url.replace("\0", "?").encode().decode("latin-1")
                }
                self.assertEqual(
                    expected, self.deliver_one(b"x", "/", forward, **environ)[1]
                )

    def test_headers_and_credentials_for_the_target(self):
        header = {"FORWARD_HEADER_X_API_KEY": "k", "FORWARD_HEADER_X_EVENT": "ours"}
        *_, headers, _ = self.deliver_one(settings=header, HTTP_X_EVENT="theirs")
        self.assertEqual("k", headers["X-Api-Key"])
        self.assertEqual(["ours"], headers.get_all("X-Event"))

    def test_a_password_in_the_url_is_sent_as_basic(self):
        target = self.answers()
        url = target.url.replace("://", "://user:p%40ss@")
        self.open(FORWARD_URL=url)
        self.send()
        self.flow()
        headers = target.requests[0][2]
        self.assertEqual(b"user:p@ss", base64.b64decode(headers["Authorization"][6:]))
        self.assertNotIn("@", headers["Host"])
        self.assertNotIn("p%40ss", repr(self.configured))

    def test_what_cannot_be_sent_is_no_reason_to_show_the_url(self):
        for error in (ValueError("hidden"), KeyError("hidden")):
            with (
                self.subTest(error),
                mock.patch.object(buffer.Push, "address", side_effect=error),
            ):
                self.setUp()
                self.open(FORWARD_URL=self.answers().url)
                self.send()
                self.flow()
                self.assertEqual("pendente", self.look()["status"])
                self.assertNotIn("hidden", self.look()["motivo"] + self.logged())

    def test_the_idempotency_key_is_the_event(self):
        target = self.answers()
        self.open(
            FORWARD_URL=target.url,
            SECRET_LOJA="s",
            SIGN_LOJA="X-T - $.id",
            DEDUPE="$.id",
        )
        self.send(b'{"id":"evt_1"}', "/webhook/loja", HTTP_X_T="s")
        self.send('{"id":"é\\n 7"}'.encode())
        self.send(b'{"id":3}')
        self.send(b'{"id":"a%20b"}')
        self.send(b'{"id":"a b"}')
        self.flow()
        keys = [headers["Idempotency-Key"] for _, _, headers, _ in target.requests]
        expected = ["loja:evt_1", ":%C3%A9%0A%207", ":3", ":a%2520b", ":a%20b"]
        self.assertEqual(expected, keys)

    def test_a_connection_is_used_again(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url)
        for _ in range(5):
            self.send()
        self.flow()
        self.assertEqual((5, 1), (len(target.requests), target.lines))

    def test_a_connection_that_the_target_has_closed_is_no_failure(self):
        gone = Answers.OK.replace(b"\r\n\r\n", b"\r\nX: 1\r\n\r\n")

        def close(line):
            line.sendall(gone)
            return False

        target = self.answers(close, close)
        self.open(FORWARD_URL=target.url)
        for _ in range(3):
            self.send()
        self.flow()
        self.assertEqual(["processado"] * 3, self.statuses())
        self.assertEqual([1, 1, 1], [row["attempts"] for row in self.rows()])

    def test_order_and_never_two_at_once(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url)
        for number in range(20):
            self.send(b"%d" % number)
        self.flow()
        self.assertEqual([b"%d" % n for n in range(20)], target.bodies())
        self.assertEqual(1, target.busiest)

    def test_concurrency_is_a_bound(self):
        barrier = threading.Barrier(4, timeout=20)

        def together(line):
            barrier.wait()
            line.sendall(Answers.OK)
            return True

        target = self.answers(default=together)
        self.open(FORWARD_URL=target.url, FORWARD_CONCURRENCY="4")
        for _ in range(12):
            self.send()
        self.flow()
        self.assertEqual(["processado"] * 12, self.statuses())
        self.assertEqual(4, target.busiest)

    def test_where_senders_crowd_they_come_first(self):
        held = threading.Event()
        self.addCleanup(held.set)
        target = self.answers(default=lambda line: held.wait(20) and False)
        self.open(FORWARD_URL=target.url, FORWARD_CONCURRENCY="50")
        for _ in range(50):
            self.send()
        begun = []
        for passed, crowded in ((0, True), (0, True), (0.02, True), (0, False)):
            self.steady.now += passed
            with self.store.transaction():
                self.delivery.turn(crowded=crowded)
            self.delivery.committed()
            begun.append(len(self.delivery.targets[0].flying))
        self.assertEqual([1, 1, 2, 50], begun)

    def test_a_rate_bounds_how_many_start(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url, FORWARD_RATE="2", FORWARD_CONCURRENCY="8")
        for _ in range(10):
            self.send()
        self.flow()
        begun = [len(target.requests)]
        for _ in range(8):
            self.after(0.25)
            begun.append(len(target.requests))
        self.assertEqual([1, 1, 2, 2, 3, 3, 4, 4, 5], begun)
        self.assertEqual(2.5, self.delivery.until)

    def test_a_source_can_go_somewhere_else(self):
        theirs, others = self.answers(), self.answers()
        self.open(
            FORWARD_URL=others.url,
            FORWARD_LOJA=theirs.url,
            SECRET_LOJA="s",
            SIGN_LOJA="X-T - -",
            SECRET_OUTRA="s",
            SIGN_OUTRA="X-T - -",
        )
        for name in ("loja/a", "outra/b", "c"):
            self.send(name.encode(), f"/webhook/{name}", HTTP_X_T="s")
        self.flow()
        self.assertEqual([b"loja/a"], theirs.bodies())
        self.assertEqual([b"outra/b", b"c"], others.bodies())
        self.assertEqual("/a", theirs.requests[0][1])

    def test_so_can_one_that_has_a_name_only(self):
        theirs, others = self.answers(), self.answers()
        self.open(FORWARD_URL=others.url, FORWARD_LOJA=theirs.url + "/x")
        for name in ("loja/a", "outra/b"):
            self.send(name.encode(), f"/webhook/{name}")
        self.flow()
        [(_, path, headers, body)] = theirs.requests
        self.assertEqual(("/x/a", b"loja/a"), (path, body))
        self.assertEqual("loja", headers["X-Buffer-Fonte"])
        self.assertEqual([b"outra/b"], others.bodies())

    def test_with_a_place_for_one_source_only_the_others_wait(self):
        target = self.answers()
        self.open(FORWARD_LOJA=target.url, SECRET_LOJA="s", SIGN_LOJA="X-T - -")
        self.send(b"1")
        self.send(b"2", "/webhook/loja", HTTP_X_T="s")
        self.flow()
        self.assertEqual(["pendente", "processado"], self.statuses())
        self.assertEqual([1], [item["id"] for item in self.claim()])

    def test_consumers_can_claim_beside_it(self):
        target = self.answers(lambda line: release.wait(20) and False)
        release = threading.Event()
        self.addCleanup(release.set)
        self.open(FORWARD_URL=target.url)
        self.send(b"1")
        self.send(b"2")
        self.turn()
        self.assertEqual([2], [item["id"] for item in self.claim()])

    def test_what_waits_for_one_place_costs_the_others_nothing(self):
        """Claims beside 10 and beside 1,000 messages of a source that is left out."""
        signs = {"SECRET_LOJA": "s", "SIGN_LOJA": "X-T - -", "GROUP_KEY": "$.de"}
        self.open(**signs)
        self.store.leave_out(True)
        self.store.group()
        steps = []

        def measured(claim, **options):
            count = itertools.count()
            self.store._db.set_progress_handler(lambda: next(count) and 0, 1)
            self.assertTrue(claim(1, 60, 10**6, without=["loja"], **options))
            self.store._db.set_progress_handler(None, 1)
            steps.append(next(count))

        for number in (10, 1000):
            with self.store.transaction():
                for n in range(number):
                    self.store.webhook(b"{}", source="loja", group_key=f"a{n}")
                for n in range(2):
                    self.store.webhook(b"{}", group_key=f"{number} {n}")
                    self.store.webhook(b"{}", source="outra", group_key=f"{number} {n}")
            self.store.gather(10**6)
            self.clock.now += 10
            measured(self.store.pegar)
            self.store.gather(10**6)
            measured(self.store.pegar_conversas, quiet=8, longest=48)
        self.assertLess(steps[2], 1.5 * steps[0])
        self.assertLess(steps[3], 1.5 * steps[1])

    def test_the_index_for_it_is_there_while_it_is_needed(self):
        def names():
            return [row["name"] for row in self.rows("SELECT name FROM sqlite_master")]

        url = self.answers().url
        signs = {"SECRET_LOJA": "s", "SIGN_LOJA": "X-T - -"}
        self.open(FORWARD_URL=url, FORWARD_LOJA=url, **signs)
        self.assertIn("fila_plain", names())
        buffer.open_delivery(buffer.Settings.read({"TOKEN": TOKEN}), self.store)
        self.assertNotIn("fila_plain", names())


class AsItCameTest(DeliveryCase):
    """Path and query, from the head of a request to the target."""

    def arrive(self, target, fields=(), token=TOKEN):
        incoming = buffer.Incoming(self.app, "127.0.0.1")
        incoming.received(http_post(b"{}", fields, target, token))
        self.assertEqual(200, self.app.respond(incoming.environ).code, target)

    def passed_on(self, target, forward="/base", **settings):
        """The target of the one request that comes of it."""
        self.setUp()
        place = self.answers()
        self.open(FORWARD_URL=place.url + forward, **settings)
        self.arrive(target)
        self.flow()
        return place.requests[0][1]

    def test_path_and_query_are_passed_on_byte_for_byte(self):
        for sent in (
            "/a%2Fb/%E9?b=2&a=1&b=3&uploads&sig=%E9%FF",
            "/loja/",
            "/a//b/",
            "/a%2fb%2Fc",
            "/x;v=1/(~!$'*,=:@)/%7e",
            "/50%/%zz/%",
            "?uploads",
            "?a=1&&b=&=c&d=%26+%20&e=;f",
            "?a=http://x/?y[]=1",
            "/...x/.git/a..b/..c",
        ):
            self.assertEqual("/base" + sent, self.passed_on("/webhook" + sent))

    def test_what_may_not_stand_in_a_target_is_escaped(self):
        self.assertEqual(
            "/base/caf%C3%A9?q=%C3%A9", self.passed_on("/webhook/café?q=é")
        )

    def test_the_absolute_form_and_a_fragment(self):
        for sent in (
            "http://h:1/webhook/a%2Fb?c",
            "//webhook//a%2Fb?c",
            "/%77ebhook/a%2Fb?c",
        ):
            self.assertEqual("/base/a%2Fb?c", self.passed_on(sent), sent)
        self.assertEqual("/base/a", self.passed_on("/webhook/a#b/c"))

    def test_the_token_is_left_out_wherever_it_stands(self):
        for sent, expected in (
            (f"?token={TOKEN}", ""),
            (f"?a&token={TOKEN}&b=", "?a&b="),
            (f"?%74oken={TOKEN}&a=%E9", "?a=%E9"),
            (f"?a&TOKEN={TOKEN}", "?a"),
            (f"/x?token={TOKEN}/messages-upsert", "/x/messages-upsert"),
            (f"/x/?token={TOKEN}/a%3Fb&c", "/x/a%3Fb?c"),
        ):
            with self.subTest(sent):
                self.setUp()
                place = self.answers()
                self.open(FORWARD_URL=place.url + "/base")
                data = http_post(b"{}", (), "/webhook" + sent)
                if "?token" in sent:
                    data = data.replace(f"X-Token: {TOKEN}\r\n".encode(), b"")
                incoming = buffer.Incoming(self.app, "127.0.0.1")
                incoming.received(data)
                self.assertEqual(200, self.app.respond(incoming.environ).code)
                self.flow()
                self.assertEqual("/base" + expected, place.requests[0][1])

    def test_no_segment_leads_out_of_the_targets_path(self):
        for sent, expected in (
            ("/../x", "/x"),
            ("/%2e%2E/.%2e/./x", "/x"),
            ("/a/..;v=1/x", "/a/x"),
            ("/a/..%3bv/x", "/a/x"),
            ("/..%2F..%2fadmin/x", "/x"),
            ("/a%2F..%2Fb/x", "/x"),
            ("/..%5C..%5cx/y", "/y"),
            ("/..\\x/y", "/y"),
            ("/%c0%ae%c0%ae/..%c0%afx/y", "/y"),
            ("/..%00/..%20/y", "/y"),
            ("/..//x", "/x"),
            ("//x", "/x"),
            ("/..", ""),
        ):
            self.assertEqual(
                "/base" + expected, self.passed_on("/webhook" + sent), sent
            )
        self.assertEqual("/x", self.passed_on("/webhook//..//x", ""))

    def test_a_name_in_the_targets_own_query_is_not_the_senders_to_say(self):
        for sent in (
            *(
                "mode=evil",
                "%6Dode=evil",
                "MODE=evil",
                "mode",
                "mode[]=evil",
                "mode[x]=evil",
            ),
            *("+mode=evil", "mode%00x=evil", "x;mode=evil", "a.b=evil", "a+b=evil"),
        ):
            found = self.passed_on(f"/webhook?c&{sent}&d=%E9", "/x?mode=safe&a_b=1")
            self.assertEqual("/x?mode=safe&a_b=1&c&d=%E9", found, sent)
        self.assertEqual("/x?mode=safe", self.passed_on("/webhook", "/x?mode=safe"))

    def test_consumers_see_names_and_values(self):
        self.arrive("/webhook/a%2Fb/%C3%A9/?b=2&a=1&b=3&uploads&sig=%FF&c=x+y")
        self.arrive("/webhook/%2F/?")
        item, bare = self.claim()
        self.assertEqual("a/b/é", item["caminho"])
        expected = {
            "b": ["2", "3"],
            "a": "1",
            "uploads": "",
            "sig": "\ufffd",
            "c": "x y",
        }
        self.assertEqual(expected, item["query"])
        self.assertEqual(list(expected), list(item["query"]))
        self.assertFalse({"caminho", "query"} & bare.keys())
        [found] = json.loads(self.call("GET", "/fila?busca=b/É")[1])["mensagens"]
        self.assertEqual(1, found["id"])

    def test_below_a_source_what_follows_its_name(self):
        self.open(SECRET_LOJA="s", SIGN_LOJA="X-T - -")
        for sent, kept in (
            ("loja/a%2Fb/", "a%2Fb/"),
            ("LO%4aA//a%2Fb", "a%2Fb"),
            ("loja%2Fa%2Fb", "a%2Fb"),
            ("loja/", None),
            ("loja", None),
        ):
            self.arrive(f"/webhook/{sent}", ["X-T: s"])
            self.assertEqual(kept, self.rows()[-1]["path"], sent)

    def test_where_the_server_tells_no_target_or_another_one(self):
        for uri in (
            {},
            {"REQUEST_URI": "/app/else?x"},
            {"RAW_URI": "/webhook/%61/b%3Fc%E9"},
        ):
            path = {"PATH_INFO": "/webhook/a/b?c\xe9", **uri}
            self.call("POST", "/?d=\xe9 &e", b"{}", **path)
            row = self.rows()[-1]
            came = "%61" if "RAW_URI" in uri else "a"
            self.assertEqual(f"{came}/b%3Fc%E9", row["path"])
            self.assertEqual("d=%C3%A9%20&e", row["query"])


def self_signed(folder):
    """(key, certificate) for localhost, or None where there is no openssl."""
    if not shutil.which("openssl"):
        return None
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost "
        f"-addext subjectAltName=DNS:localhost -keyout {key} -out {certificate}",
        shell=True,
        check=True,
        capture_output=True,
    )
    return key, certificate


class KeepAliveTest(DeliveryCase):
    """A POST is not repeated as if nothing had happened (RFC 9110 9.2.2)."""

    def test_a_connection_that_breaks_without_an_answer_counts_and_is_tried_at_once(
        self,
    ):
        for broken in (reset, lambda line: False):
            self.setUp()
            target = self.answers(Answers.OK, broken)
            self.open(FORWARD_URL=target.url)
            for _ in range(2):
                self.send()
            self.flow()
            self.assertEqual(["processado"] * 2, self.statuses())
            attempts = [r[2]["X-Buffer-Tentativa"] for r in target.requests]
            self.assertEqual(["1", "1", "2"], attempts)

    def test_an_answer_that_breaks_off_is_not_tried_at_once(self):
        def half(line):
            line.sendall(b"HTTP/1.1 200 OK\r\nContent-Le")
            reset(line)

        for broken in (
            half,
            b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nclose",
            b"HTTP/1.1 200 OK\r\nX: close",
        ):
            self.setUp()
            target = self.answers(Answers.OK, broken)
            self.open(FORWARD_URL=target.url)
            for _ in range(2):
                self.send()
            self.flow()
            self.assertEqual(2, len(target.requests))
            self.assertEqual(["processado", "pendente"], self.statuses())

    def test_a_timeout_is_called_one_in_the_log(self):
        def hang(line):
            self.steady.now += 301
            self.delivery.targets[0].check(self.steady.now)
            return False

        self.open(FORWARD_URL=self.answers(hang).url)
        self.send()
        self.flow()
        self.assertIn(
            "it may still be at work on it: raise FORWARD_TIMEOUT", self.logged()
        )

    def test_a_user_without_a_password(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url.replace("//", "//user@"))
        self.send()
        self.flow()
        basic = base64.b64decode(target.requests[0][2]["Authorization"].split()[1])
        self.assertEqual(b"user:", basic)

    def test_a_delivery_to_itself_is_noticed(self):
        self.open(FORWARD_URL=self.answers().url)
        self.app.delivery = self.delivery
        ours = {"HTTP_X_BUFFER_DE": self.store.file_id}
        self.assertEqual(508, self.call("POST", "/webhook", b"{}", **ours)[0])
        self.send(HTTP_X_BUFFER_DE="0123456789abcdef")
        self.assertIn("leads back to this buffer.py", self.logged())


class TlsTest(DeliveryCase):
    def test_a_certificate_is_verified(self):
        files = self_signed(self.folder)
        if not files:
            self.skipTest("openssl is not installed")
        key, certificate = files
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        target = self.answers(tls=context)
        self.open(
            FORWARD_URL=target.url.replace("http://127.0.0.1", "https://localhost")
        )
        self.send(b"1")
        self.flow()
        self.assertIn("certificate verify failed", self.look()["motivo"])
        self.assertEqual([], target.requests)
        with mock.patch.dict(os.environ, {"SSL_CERT_FILE": str(certificate)}):
            self.after(2)
        self.assertEqual(["processado"], self.statuses())


class FailedPushTest(DeliveryCase):
    """What is not 2xx comes back, and says why."""

    def deliver(self, *plan, **settings):
        """Delivers one message; it as it stands in the queue then."""
        target = self.answers(*plan)
        self.open(FORWARD_URL=target.url, **settings)
        self.send()
        self.flow()
        self.target = target
        return self.look()

    def test_by_its_status(self):
        for status, body, reason in (
            ("500 Internal Server Error", b"boom", "500 Internal Server Error: boom"),
            (
                "404 Not Found",
                b'{"message":"not active"}',
                '404 Not Found: {"message":"not active"}',
            ),
            ("400", b"", "400"),
            ("500 E", b"x" * 9999, "500 E: " + "x" * 500),
            ("500 E", b"\xff\0", "500 E: \ufffd\0"),
        ):
            with self.subTest(status):
                self.setUp()
                item = self.deliver(respond(status, body))
                self.assertEqual(("pendente", reason), (item["status"], item["motivo"]))
                self.assertIn("disponivel_em", item)
                self.assertEqual("fluindo", self.delivery.report()[0]["estado"])

    def test_the_log_says_once_in_a_while_that_messages_are_refused(self):
        target = self.answers(default=respond("404 Hidden", b"hidden"))
        self.open(FORWARD_URL=target.url)
        for _ in range(5):
            self.send()
        self.flow()
        where = f"FORWARD_URL (127.0.0.1:{target.port})"
        line = f"{where} did not take message 1, its attempt 1: 404 (number 1, 1 new)"
        self.assertIn(line, self.logged())
        self.assertEqual(1, self.logged().count("did not take"))
        self.delivery.stop()
        self.assertIn("404 (number 5, 4 new)", self.logged())
        self.assertNotIn("idden", self.logged())

    def test_redirects_are_not_followed(self):
        other = self.answers()
        item = self.deliver(respond("301 Moved", b"", f"Location: {other.url}"))
        self.assertIn(f"301 Moved para {other.url}", item["motivo"])
        self.assertEqual([], other.requests)

    def test_by_a_broken_answer(self):
        for name, answer in {
            "reset": reset,
            "closed": lambda line: False,
            "garbage": b"\0\1\2 garbage, close\r\n\r\n",
            "chunks": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\nzz\r\n",
            "a header that breaks off": b"HTTP/1.1 200 OK\r\nConnection: close",
            "a body that breaks off": b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\nConnection: close\r\n\r\nabc",
        }.items():
            with self.subTest(name):
                self.setUp()
                item = self.deliver(answer)
                self.assertEqual("pendente", item["status"])
                self.assertIn("interrompida", item["motivo"])
                self.after(120)
                self.assertEqual(["processado"], self.statuses())

    def test_in_time_or_not_at_all(self):
        released = threading.Event()
        self.addCleanup(released.set)
        item = self.deliver(
            lambda line: released.wait(20) and False, FORWARD_TIMEOUT="1"
        )
        self.assertEqual("sem resposta em 1 s", item["motivo"])

    def test_an_answer_that_trickles_has_the_same_deadline(self):
        start = b"HTTP/1.1 200 OK\r\n"
        for part, begun in {
            "headers": start + b"X-Slow: ",
            "body": start + b"Content-Length: 9999999\r\n\r\n",
            "last body": start + b"Connection: close\r\n\r\n",
        }.items():
            with self.subTest(part):
                self.setUp()
                self.trickle(begun)
                self.assertEqual("sem resposta em 300 s", self.look()["motivo"])

    def trickle(self, begun):
        cut = threading.Event()
        self.addCleanup(cut.set)

        def trickle(line):
            line.sendall(begun)
            self.steady.now += 301
            with contextlib.suppress(OSError):
                while line.send(b"x") and not cut.wait(0.01):
                    pass
            return False

        target = self.answers(trickle)
        self.open(FORWARD_URL=target.url)
        self.send()
        self.turn()
        deadline = time.monotonic() + 5
        while not self.news.wait(0.02):
            self.assertLess(time.monotonic(), deadline)
            self.turn()
        self.turn()

    def test_an_interim_answer_is_not_the_answer(self):
        def hints(line):
            line.sendall(b"HTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n")
            line.sendall(b"HTTP/1.1 102 Processing\r\n\r\n")
            line.sendall(respond("500 E"))
            return True

        target = self.answers(hints)
        self.open(FORWARD_URL=target.url)
        self.send(b"1")
        self.send(b"2")
        self.flow()
        self.assertEqual(["pendente", "processado"], self.statuses())
        self.assertEqual("500 E", self.look(1)["motivo"])
        self.assertEqual((2, 1), (len(target.requests), target.lines))

    def test_an_answer_that_does_not_wait_for_the_body_is_heard(self):
        with socket.create_server(("127.0.0.1", 0)) as listener:
            self.open(FORWARD_URL=f"http://127.0.0.1:{listener.getsockname()[1]}")
            self.send(bytes(20 << 20))
            self.turn()
            line, _ = listener.accept()
            with line:
                line.recv(1000)
                line.sendall(respond("413 Too Large", b"big"))
            self.flow()
        self.assertEqual("413 Too Large: big", self.look()["motivo"])

    def test_a_thread_without_work_holds_no_message(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url, FORWARD_CONCURRENCY="8")
        for _ in range(8):
            self.send()
        parcels = []
        begin = self.delivery.targets[0].begin
        self.delivery.targets[0].begin = lambda found: (
            parcels.extend(map(weakref.ref, found)) or begin(found)
        )
        self.flow()
        self.assertEqual(8, len(parcels))
        end = time.monotonic() + 5
        while any(parcel() for parcel in parcels):
            self.assertLess(time.monotonic(), end)

    def test_a_long_answer_is_not_read_to_its_end(self):
        def pour(line):
            line.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
            with contextlib.suppress(OSError):
                while True:
                    line.sendall(bytes(1 << 20))
            return False

        self.assertEqual("processado", self.deliver(pour)["status"])

    def test_it_waits_for_its_backoff_and_others_go_on(self):
        target = self.answers(respond("500 E"))
        self.open(FORWARD_URL=target.url, BACKOFF="100")
        self.send(b"1")
        self.send(b"2")
        self.flow()
        self.assertEqual(["pendente", "processado"], self.statuses())
        self.after(79)
        self.assertEqual([b"1", b"2"], target.bodies())
        self.after(43)
        self.assertEqual([b"1", b"2", b"1"], target.bodies())
        self.assertEqual("2", target.requests[-1][2]["X-Buffer-Tentativa"])

    def test_retry_after_is_obeyed(self):
        self.deliver(respond("429 Slow", b"", "Retry-After: 300"))
        self.after(299)
        self.assertEqual(1, len(self.target.requests))
        self.after(2)
        self.assertEqual(["processado"], self.statuses())

    def test_retry_after_in_its_forms(self):
        now = 1_800_000_000
        date = "Fri, 15 Jan 2027 08:02:00 GMT"
        for text, expected in (
            ("0", 0),
            (" 120 ", 120),
            ("999999999999", 3600),
            (date, 120),
            ("Fri, 15 Jan 2021 08:02:00 GMT", 0),
            ("Fri, 15 Jan 2099 08:02:00 GMT", 3600),
            ("soon", None),
            ("-1", None),
            ("٣", None),
            (None, None),
        ):
            with self.subTest(text):
                self.assertEqual(expected, buffer.retry_after(text, lambda: now))

    def test_when_attempts_are_used_up_it_is_erro_with_the_last_answer(self):
        target = self.answers(default=respond("500 E", b"boom"))
        self.open(FORWARD_URL=target.url, MAX_ATTEMPTS="3")
        self.send()
        self.flow()
        for _ in range(3):
            self.after(3700)
        item = self.look()
        self.assertEqual(
            ("erro", "500 E: boom", 3),
            (item["status"], item["motivo"], item["tentativa"]),
        )
        self.assertEqual(3, len(target.requests))

    def test_a_lost_commit_is_settled_again(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url)
        self.send()
        self.turn()
        self.news.wait(20)
        whole = self.store._db
        self.store._db = Faulty(whole, "COMMIT")
        with self.assertRaises(sqlite3.Error):
            self.turn()
        self.delivery.rolled_back()
        self.store._db = whole
        self.assertTrue(self.delivery.due(False))
        self.flow()
        self.assertEqual(["processado"], self.statuses())
        self.assertEqual(1, len(target.requests))


class BreakerTest(DeliveryCase):
    """A target that is down as a whole costs nobody an attempt."""

    def attempts(self):
        return [row["attempts"] for row in self.rows()]

    def test_refused_connections(self):
        port = unused_port()
        self.open(FORWARD_URL=f"http://127.0.0.1:{port}", FORWARD_CONCURRENCY="3")
        for number in range(10):
            self.send(b"%d" % number)
        self.flow()
        for _ in range(100):
            self.after(31)
        self.assertEqual(["pendente"] * 10, self.statuses())
        self.assertEqual([0] * 10, self.attempts())
        self.assertIn("Connection refused", self.look(1)["motivo"])
        self.assertNotIn("motivo", self.look(10))
        [state] = self.delivery.report()
        self.assertEqual("parado", state["estado"])
        self.assertEqual({"conexao": 103}, state["tentativas"])
        target = self.answers(port=port)
        self.after(31)
        self.assertEqual(["processado"] * 10, self.statuses())
        self.assertEqual([b"%d" % n for n in range(10)], sorted(target.bodies()))
        self.assertEqual("fluindo", self.delivery.report()[0]["estado"])
        self.assertIn("is in trouble", self.logged())
        self.assertIn("is back after 3131 seconds", self.logged())

    def test_those_under_way_do_not_put_off_the_next_try(self):
        self.open(
            FORWARD_URL=f"http://127.0.0.1:{unused_port()}", FORWARD_CONCURRENCY="16"
        )
        for _ in range(16):
            self.send()
        self.flow()
        self.assertEqual(1, self.delivery.until)

    def test_what_a_target_answers_is_not_in_the_log(self):
        answer = respond("503 hidden", b"hidden\nhidden")
        self.open(FORWARD_URL=self.answers(default=answer).url)
        self.send()
        self.flow()
        self.after(2)
        self.assertIn("is in trouble, one message is tried: 503", self.logged())
        self.assertNotIn("hidden", self.logged())
        self.assertIn("hidden", self.look(1)["motivo"])

    def test_one_that_flaps_does_not_fill_the_log(self):
        target = self.answers(*[respond("503 Down")] * 2 + [Answers.OK], default=None)
        target.plan *= 20
        self.open(FORWARD_URL=target.url)
        for _ in range(20):
            self.send()
        self.flow()
        for _ in range(20):
            self.after(2)
        self.assertLess(self.logged().count("is in trouble"), 3)
        self.assertLess(self.logged().count("is back"), 3)

    def test_the_order_is_kept(self):
        port = unused_port()
        self.open(FORWARD_URL=f"http://127.0.0.1:{port}")
        for number in range(5):
            self.send(b"%d" % number)
        self.flow()
        self.after(31)
        target = self.answers(port=port)
        self.after(31)
        self.assertEqual([b"%d" % n for n in range(5)], target.bodies())

    def test_an_unknown_name(self):
        self.open(FORWARD_URL="http://nobody.invalid/x")
        self.send()
        self.flow()
        self.assertEqual([0], self.attempts())
        self.assertEqual("parado", self.delivery.report()[0]["estado"])

    def test_tries_grow_apart_up_to_ten_seconds(self):
        self.open(FORWARD_URL=f"http://127.0.0.1:{unused_port()}")
        self.send()
        self.flow()
        waits = []
        for _ in range(8):
            waits.append(self.delivery.until - self.steady.now)
            self.after(waits[-1])
        self.assertEqual([1, 2, 4, 8, 10, 10, 10, 10], waits)

    def test_a_gateway_without_its_target(self):
        for status in ("502 Bad", "503 Unavailable", "504 Timeout"):
            with self.subTest(status):
                self.setUp()
                target = self.answers(*[respond(status)] * 4)
                self.open(FORWARD_URL=target.url)
                for number in range(5):
                    self.send(b"%d" % number)
                self.flow()
                for _ in range(4):
                    self.after(31)
                self.assertEqual([b"0"] * 5 + [b"1", b"2", b"3", b"4"], target.bodies())
                self.assertEqual([2, 1, 1, 1, 1], self.attempts())

    def test_retry_after_is_for_the_next_try(self):
        target = self.answers(respond("503 Down", b"", "Retry-After: 100"))
        self.open(FORWARD_URL=target.url)
        self.send()
        self.flow()
        self.assertEqual(100, self.delivery.until)
        self.after(99)
        self.assertEqual(1, len(target.requests))
        self.after(2)
        self.assertEqual(["processado"], self.statuses())

    def test_a_message_that_brings_it_down_steps_aside_and_ends_in_erro(self):
        def by_body(line):
            poison = target.requests[-1][3] == b"poison"
            line.sendall(respond("504 Timeout") if poison else Answers.OK)
            return True

        target = self.answers(default=by_body)
        self.open(FORWARD_URL=target.url, MAX_ATTEMPTS="3")
        self.send(b"poison")
        for _ in range(5):
            self.send(b"good")
        self.flow()
        for _ in range(7):
            self.after(31)
        self.assertEqual(["processado"] * 5, self.statuses()[1:])
        for _ in range(40):
            self.send(b"good")
            self.after(31)
        self.assertEqual("erro", self.look()["status"])
        self.assertEqual("504 Timeout", self.look()["motivo"])
        self.assertEqual({"processado"}, set(self.statuses()[1:]))

    def test_no_answer_does_not_show_that_it_is_up(self):
        bad = respond("502 Bad", b"", "Connection: close")
        target = self.answers(bad, *[reset] * 3)
        self.open(FORWARD_URL=target.url)
        for _ in range(3):
            self.send()
        self.flow()
        for _ in range(3):
            self.after(31)
            self.assertEqual("parado", self.delivery.report()[0]["estado"])
        self.assertLessEqual(max(self.attempts()), 2)
        for _ in range(3):
            self.after(73)
        self.assertEqual(["processado"] * 3, self.statuses())

    def poisoned(self, bad, count, status="504 Timeout", good=20, **settings):
        """A target for which the first `count` messages fail by themselves; the seconds
        until all others are delivered."""

        def by_body(line):
            poison = b"poison" in target.requests[-1][3]
            line.sendall(respond(status) if poison else Answers.OK)
            return True

        target = self.answers(default=by_body)
        self.open(FORWARD_URL=target.url, **settings)
        for n in range(bad):
            self.send(b'{"who":"p%d","poison":1}' % n)
        for n in range(good):
            self.send(b'{"who":"g%d"}' % n)
        self.flow()
        for spent in range(count):
            if {"processado"} == set(self.statuses()[bad:]):
                return spent
            self.after(1)
        return self.fail(f"not after {count} s: {self.statuses()}")

    def test_messages_that_fail_by_themselves_stop_no_others(self):
        for bad, most, settings in (
            (2, 60, {}),
            (2, 60, {"BACKOFF": "5"}),
            (2, 60, {"FORWARD_CONCURRENCY": "16"}),
            (20, 280, {"BACKOFF": "5"}),
            (2, 90, {"GROUP_KEY": "$.who", "FORWARD_GROUP": "5"}),
        ):
            with self.subTest(bad=bad, **settings):
                self.setUp()
                self.assertLess(self.poisoned(bad, 400, **settings), most)

    def test_later_pauses_are_seconds_and_they_end_in_erro(self):
        self.poisoned(2, 60, MAX_ATTEMPTS="3", BACKOFF="5")
        waited = 0
        for n in range(100):
            if n % 5 == 0:
                self.send(b"{}")
            self.after(1)
            waiting = [row for row in self.rows() if row["status"] == "pendente"]
            waited = max(waited, len([row for row in waiting if row["id"] > 22]))
        self.assertEqual(["erro", "erro"], self.statuses()[:2])
        self.assertLess(waited, 4)

    def test_five_different_messages_in_a_row_are_trouble_of_the_target(self):
        """Whatever the answer: the rest of the queue waits and keeps its attempts."""
        for status in ("500 Broken", "404 Not Found", "401 No", "301 Moved", "200 OK"):
            with self.subTest(status):
                self.setUp()
                broken = respond(status)
                if status == "200 OK":
                    broken = b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\nclose"
                target = self.answers(default=broken)
                self.open(FORWARD_URL=target.url)
                for _ in range(30):
                    self.send()
                self.flow()
                self.assertEqual([1] * 5 + [0] * 25, self.attempts())
                [state] = self.delivery.report()
                self.assertEqual(("parado", True), (state["estado"], state["problema"]))
                for _ in range(60):
                    self.after(1)
                self.assertLessEqual(sum(self.attempts()), 5 + 12)
                target.default = Answers.OK
                for _ in range(100):
                    self.after(1)
                self.assertEqual({"processado"}, set(self.statuses()))

    def test_a_success_in_between_means_that_they_fail_by_themselves(self):
        target = self.answers(*[*[respond("500 No")] * 4, Answers.OK] * 4)
        self.open(FORWARD_URL=target.url)
        for _ in range(20):
            self.send()
        self.flow()
        self.assertEqual([1] * 20, self.attempts())
        self.assertEqual("fluindo", self.delivery.report()[0]["estado"])

    N8N = (
        b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 31\r\n\r\n"
        b"n8n is starting up. Please wait"
    )
    OFF = respond(
        "404 Not Found", b'{"code":404,"message":"The webhook is not registered."}'
    )

    def test_n8n_that_starts_loses_nothing_and_keeps_the_order(self):
        """It refuses, says 200 while it migrates, then 404 until its routes are there."""
        port = unused_port()
        self.open(FORWARD_URL=f"http://127.0.0.1:{port}/webhook/x")
        for n in range(300):
            self.send(b"%d" % n)
        self.flow()
        for _ in range(20):
            self.after(1)
        target = self.answers(port=port, default=self.N8N)
        for answer in (
            self.N8N,
            respond("404 Not Found", b"Cannot POST /webhook/x"),
            self.OFF,
        ):
            target.default = answer
            for _ in range(20):
                self.after(1)
        self.assertEqual({"pendente"}, set(self.statuses()))
        self.assertEqual([0] * 300, self.attempts())
        self.assertIn("is in trouble, one message is tried: 404", self.logged())
        self.assertIn("is not registered", self.delivery.report()[0]["ultimo_erro"])
        target.default = Answers.OK
        seen = len(target.requests)
        for _ in range(11):
            self.after(1)
        self.assertEqual([b"%d" % n for n in range(300)], target.bodies()[seen:])
        self.assertEqual({"processado"}, set(self.statuses()))
        self.assertEqual([1] * 300, self.attempts())

    def test_a_404_of_what_has_a_path_of_its_own_is_its_own(self):
        target = self.answers(self.OFF)
        self.open(FORWARD_URL=target.url)
        self.send(url="/webhook/other")
        self.send()
        self.flow()
        self.assertEqual(["pendente", "processado"], self.statuses())

    def limited(self, number, **settings):
        """A target that allows 20 a second; (requests, statuses) of so many messages."""
        taken = collections.Counter()

        def limit(line):
            second = int(self.steady.now)
            with lock:
                taken[second] += 1
                full = taken[second] > 20
            retry = (
                "Retry-After: 1"
                if second % 2
                else "Retry-After: Thu, 01 Jan 1970 00:00:00 GMT"
            )
            line.sendall(respond("429 Slow", b"", retry) if full else Answers.OK)
            return True

        lock = threading.Lock()
        target = self.answers(default=limit)
        self.open(FORWARD_URL=target.url, MAX_ATTEMPTS="2", **settings)
        for _ in range(number):
            self.send()
        self.flow()
        self.assertEqual("limitado", self.delivery.report()[0]["estado"])
        for _ in range(number // 20 + 10):
            self.after(1)
        return len(target.requests), set(self.statuses())

    def test_a_limit_of_the_target_costs_nobody_an_attempt(self):
        for at_once in ("1", "16"):
            with self.subTest(at_once):
                self.setUp()
                requests, statuses = self.limited(300, FORWARD_CONCURRENCY=at_once)
                self.assertEqual({"processado"}, statuses)
                self.assertLessEqual(requests, 330)

    def test_retry_after_is_at_least_a_second(self):
        for said, waits in (("0", 1), ("Thu, 01 Jan 1970 00:00:00 GMT", 1), ("7", 7)):
            self.setUp()
            self.open(
                FORWARD_URL=self.answers(
                    respond("429 S", b"", f"Retry-After: {said}")
                ).url
            )
            self.send()
            self.flow()
            self.assertEqual(waits, self.delivery.until)

    def test_cloudflare_speaks_for_a_target_that_is_down(self):
        for status in (520, 521, 522, 523, 524, 525, 526, 527, 530):
            self.setUp()
            self.open(FORWARD_URL=self.answers(respond(f"{status} X")).url)
            self.send()
            self.flow()
            self.assertEqual("parado", self.delivery.report()[0]["estado"], status)


class PauseTest(DeliveryCase):
    """A person pauses a target, lets it go on, or has it tried now."""

    def open(self, **settings):
        super().open(**settings)
        self.app.delivery = self.delivery

    def act(self, act, query=""):
        return self.call("POST", f"/entrega/{act}{query}")[0]

    def test_a_pause_lasts_until_a_person_ends_it_also_over_a_restart(self):
        target = self.answers()
        self.open(FORWARD_URL=target.url)
        self.assertEqual(200, self.act("pausar"))
        self.send()
        self.flow()
        self.assertEqual([], target.requests)
        self.delivery.stop()
        self.store.close()
        self.open(FORWARD_URL=target.url)
        self.flow()
        [state] = self.delivery.report()
        self.assertEqual(("pausado", 1), (state["estado"], state["esperando"]))
        self.assertEqual(200, self.act("retomar", "?destino=FORWARD_URL"))
        self.flow()
        self.assertEqual(1, len(target.requests))
        self.assertIn("pausar FORWARD_URL from", self.logged())

    def test_now_does_not_wait_for_the_next_try(self):
        target = self.answers(respond("503 Down", b"", "Retry-After: 3000"))
        self.open(FORWARD_URL=target.url)
        self.send()
        self.flow()
        self.assertEqual(3000, self.delivery.report()[0]["proxima"])
        self.assertEqual(200, self.act("tentar"))
        self.flow()
        self.assertEqual(["processado"], self.statuses())

    def test_what_is_not_there(self):
        self.assertEqual(404, self.act("pausar"))
        self.open(FORWARD_URL=self.answers().url)
        self.assertEqual(404, self.act("pausar", "?destino=FORWARD_OTHER"))
        self.assertEqual(404, self.act("other"))
        self.assertEqual(401, self.call("POST", "/entrega/pausar", token="wrong")[0])

    def test_what_is_told_of_a_target(self):
        target = self.answers(Answers.OK, respond("503 Down", b"secret" * 99))
        self.open(FORWARD_URL=target.url.replace("//", "//user:password@"))
        self.send()
        self.flow()
        self.after(10)
        for _ in range(3):
            self.send()
        self.flow()
        self.after(0)
        self.clock.now += 30
        self.steady.now += 0.5
        [state] = self.delivery.report()
        self.assertNotIn("password", str(state))
        self.assertEqual(target.url.removeprefix("http://"), state["endereco"])
        names = [
            "estado",
            "problema",
            "desde",
            "em_voo",
            "ultimo_sucesso",
            "ultimo_erro_ha",
        ]
        names += [
            "tentativas_5min",
            "falhas_5min",
            "esperando",
            "mais_antiga",
            "proxima",
        ]
        self.assertEqual(
            ["parado", True, 30, 0, 40, 30, 2, 1, 3, 30, 1],
            [state[name] for name in names],
        )
        self.assertEqual(200, len(state["ultimo_erro"]))
        self.assertNotIn("secret", self.logged())

    def test_trouble_is_as_old_after_a_restart(self):
        self.open(FORWARD_URL=f"http://127.0.0.1:{unused_port()}")
        self.send()
        self.flow()
        self.after(100)
        self.delivery.stop()
        self.store.close()
        self.clock.now += 50
        self.open(FORWARD_URL=self.configured.forward_url)
        [state] = self.delivery.report()
        self.assertEqual((True, 150), (state["problema"], state["desde"]))
        self.assertIn("sem conexão", state["ultimo_erro"])


class NamedClaimsTest(DeliveryCase):
    """Who starts again goes on at once where it was."""

    def ids(self, query):
        return [item["id"] for item in self.claim(query)]

    def test_a_consumer_that_claims_again_gets_first_what_it_had(self):
        for n in range(6):
            self.send(b"%d" % n)
        self.assertEqual([1, 2, 3, 4], self.ids("?consumidor=a&limite=4"))
        self.settle(2, "processado")
        self.assertEqual([5], self.ids("?consumidor=b&limite=1"))
        first = self.claim("?consumidor=a&limite=4")
        self.assertEqual(
            [1, 3], [item["id"] for item in first]
        )  # half of what was lost
        self.assertEqual({2}, {item["tentativa"] for item in first})
        self.assertEqual("b", self.look(5)["consumidor"])
        self.assertNotIn("consumidor", self.look(6))

    def test_who_has_no_name_loses_nothing_by_claiming_again(self):
        for _ in range(2):
            self.send()
        self.assertEqual([1], self.ids("?limite=1"))
        self.assertEqual([2], self.ids("?limite=1"))

    def test_a_name_has_a_length(self):
        for name in ("", "x" * 101):
            self.assertEqual(
                400, self.call("POST", f"/fila/pegar?consumidor={name}")[0]
            )

    def test_it_is_found_by_an_index(self):
        plan = self.rows_of("EXPLAIN QUERY PLAN" + buffer.HELD, consumer="a", limit=9)
        self.assertIn("INDEX fila_consumer (consumer=?)", plan)

    def rows_of(self, sql, **values):
        return " ".join(row["detail"] for row in self.store._run(sql, **values))

    def test_a_delivery_that_died_comes_first_after_the_start(self):
        hold = threading.Event()
        self.addCleanup(hold.set)
        target = self.answers(lambda line: hold.wait(20) and False)
        self.open(FORWARD_URL=target.url)
        for n in range(3):
            self.send(b"%d" % n)
        self.turn()
        self.assertEqual("FORWARD_URL", self.look()["consumidor"])
        self.store.close()  # as by kill -9
        again = self.answers()
        self.open(FORWARD_URL=again.url)
        self.flow()
        self.assertEqual([b"0", b"1", b"2"], again.bodies())
        self.assertEqual("2", again.requests[0][2]["X-Buffer-Tentativa"])

    def test_a_stop_gives_back_what_it_cannot_finish(self):
        hold = threading.Event()
        self.addCleanup(hold.set)
        self.open(FORWARD_URL=self.answers(lambda line: hold.wait(20) and False).url)
        self.send()
        self.turn()
        self.delivery.stop()
        self.assertEqual(
            ("pendente", 0), tuple(self.rows("SELECT status, attempts FROM fila")[0])
        )


class SeriesTest(DeliveryCase):
    """FORWARD_SERIE: single messages, several at once, one of each conversation."""

    settings = (("GROUP_KEY", "$.who"), ("FORWARD_SERIE", "1"))

    def test_never_two_of_a_conversation_and_in_order(self):
        seen = collections.defaultdict(list)
        target = self.answers()
        self.open(FORWARD_URL=target.url, FORWARD_CONCURRENCY="8")
        for n in range(40):
            self.send(json.dumps({"who": f"w{n % 4}", "n": n}).encode())
        self.turn()
        self.assertEqual(4, len(self.delivery.targets[0].flying))
        self.flow()
        for body in target.bodies():
            seen[json.loads(body)["who"]].append(json.loads(body)["n"])
        self.assertEqual(40, sum(map(len, seen.values())))
        for numbers in seen.values():
            self.assertEqual(sorted(numbers), numbers)

    def test_it_needs_a_key_and_no_group(self):
        for wrong in ({"GROUP_KEY": "-"}, {"FORWARD_GROUP": "5"}):
            with self.assertRaises(buffer.StartError):
                self.open(FORWARD_URL="http://x", **wrong)


class PushConversationsTest(DeliveryCase):
    """FORWARD_GROUP: a conversation in one POST, after a silence."""

    def begin(self, *plan, **settings):
        self.target = self.answers(*plan)
        how = {"FORWARD_URL": f"{self.target.url}/hook?k=v", "FORWARD_GROUP": "8"}
        self.open(**{**how, "GROUP_KEY": "$.de", **settings})

    def say(self, who, what, url="/webhook/x?y=1", **environ):
        body = json.dumps({"de": who, "texto": what}).encode()
        self.send(body, url, **environ)

    def heard(self):
        """(key, texts) of each conversation that was delivered."""
        bodies = map(json.loads, self.target.bodies())
        return [
            (body["chave"], "".join(m["payload"]["texto"] for m in body["mensagens"]))
            for body in bodies
        ]

    def test_a_damaged_message_fails_alone(self):
        self.begin()
        for n in range(3):
            self.say("a", n)
        self.store._run("UPDATE fila SET headers = '{\"cut' WHERE id = 2")
        self.after(10)
        self.after(10)
        self.assertEqual(["processado", "erro", "processado"], self.statuses())
        self.assertIn("não pode ser mostrada", self.look(2)["motivo"])
        [body] = self.target.bodies()
        self.assertEqual([1, 3], json.loads(body)["ids"])

    def test_it_is_delivered_as_one_when_it_is_silent(self):
        self.begin()
        for what in "abc":
            self.say("ana", what)
            self.after(7)
        self.assertEqual([], self.target.requests)
        self.after(1)
        self.assertEqual([("ana", "abc")], self.heard())
        self.assertEqual(["processado"] * 3, self.statuses())
        [(_, path, headers, body)] = self.target.requests
        self.assertEqual("/hook?k=v", path)
        self.assertEqual("application/json", headers["Content-Type"])
        self.assertEqual([1, 2, 3], json.loads(body)["ids"])
        self.assertEqual("1", headers["X-Buffer-Id"])
        self.assertEqual("x", json.loads(body)["mensagens"][0]["caminho"])

    def test_who_never_stops_is_answered_too(self):
        self.begin()
        for _ in range(10):
            self.say("ana", "a")
            self.after(6)
        self.assertEqual([("ana", "a" * 8)], self.heard())

    def test_what_comes_meanwhile_waits_for_the_answer_and_for_silence(self):
        answered = threading.Event()
        self.begin(
            lambda line: answered.wait(20) and (line.sendall(Answers.OK) or True)
        )
        self.say("ana", "a")
        self.clock.now += 8
        self.turn()
        self.say("ana", "b")
        self.clock.now += 30
        self.turn()
        self.assertEqual(1, len(self.delivery.targets[0].flying))
        answered.set()
        self.flow()
        self.assertEqual([("ana", "a"), ("ana", "b")], self.heard())

    def test_concurrency_counts_conversations(self):
        barrier = threading.Barrier(3, timeout=20)

        def together(line):
            barrier.wait()
            line.sendall(Answers.OK)
            return True

        self.begin(together, together, together, FORWARD_CONCURRENCY="3")
        for what in "ab":
            for who in ("ana", "bob", "eva"):
                self.say(who, what)
        self.after(8)
        self.assertEqual(
            [("ana", "ab"), ("bob", "ab"), ("eva", "ab")], sorted(self.heard())
        )
        self.assertEqual(3, self.target.busiest)

    def test_one_that_failed_comes_back_as_one_with_the_same_key(self):
        self.begin(respond("500 E"))
        self.say("ana", "a")
        self.say("ana", "b")
        self.after(8)
        self.assertEqual(1, len({row["available_at"] for row in self.rows()}))
        self.assertEqual("500 E", self.look(2)["motivo"])
        self.after(40)
        self.assertEqual([("ana", "ab")] * 2, self.heard())
        first, second = (headers for _, _, headers, _ in self.target.requests)
        self.assertEqual(first["Idempotency-Key"], second["Idempotency-Key"])
        self.assertRegex(first["Idempotency-Key"], "^sha256:[0-9a-f]{64}$")
        self.assertEqual("2", second["X-Buffer-Tentativa"])

    def test_a_target_that_is_down_costs_no_attempts(self):
        self.begin(FORWARD_URL=f"http://127.0.0.1:{unused_port()}")
        self.say("ana", "a")
        self.say("ana", "b")
        for _ in range(20):
            self.after(31)
        self.assertEqual([0, 0], [row["attempts"] for row in self.rows()])

    def test_a_source_can_go_somewhere_else(self):
        theirs = self.answers()
        signs = {"SECRET_LOJA": "s", "SIGN_LOJA": "X-T - -"}
        self.begin(FORWARD_LOJA=theirs.url, **signs)
        self.say("ana", "a", "/webhook/loja", HTTP_X_T="s")
        self.say("ana", "b")
        self.after(8)
        self.assertEqual([("ana", "b")], self.heard())
        self.assertEqual("loja", json.loads(theirs.bodies()[0])["fonte"])

    def test_it_needs_a_key_and_http(self):
        for settings, text in (
            ({"GROUP_KEY": "-"}, "FORWARD_GROUP is set, but not GROUP_KEY"),
            ({"FORWARD_URL": "amqp://x/?routing_key=q"}, "takes no FORWARD_GROUP"),
        ):
            with self.assertRaisesRegex(buffer.StartError, text):
                self.begin(**settings)


class DeliverySettingsTest(SettingsTest):
    def test_defaults(self):
        settings = self.read()
        found = settings.forward_url, settings.forward_concurrency
        self.assertEqual(
            (None, 1, 300, 0), (*found, settings.forward_timeout, settings.forward_rate)
        )
        self.assertEqual((), settings.forward_header)
        self.assertIsNone(self.read(FORWARD_URL="").forward_url)

    def test_what_is_no_target(self):
        for url in (
            "n8n:5678/x",
            "ftp://n8n/x",
            "http://",
            "http://n8n:0/",
            "http://n8n:x/",
            "http://n8n/a b",
            "http://n8n/#x",
            "http://n8n/é",
            "http://:80/",
        ):
            with self.subTest(url):
                line = self.refused(FORWARD_URL=url)
                self.assertIn("FORWARD_URL='***': it takes one URL with http://", line)

    def test_headers(self):
        read = self.read(
            FORWARD_HEADER_X_API_KEY="hidden", FORWARD_HEADER_AUTHORIZATION="Bearer x"
        )
        self.assertEqual(
            (("AUTHORIZATION", "Bearer x"), ("X-API-KEY", "hidden")),
            read.forward_header,
        )
        self.assertNotIn("hidden", repr(read))
        line = self.refused(FORWARD_HEADER_X="hidden\nX: y")
        self.assertIn("FORWARD_HEADER_X='***': it takes the value of a header", line)
        self.refused(FORWARD_HEADER_CONTENT_LENGTH="1")

    def test_what_belongs_to_a_target_without_one(self):
        for name in ("FORWARD_GROUP", "FORWARD_HEADER_X"):
            settings = self.read(GROUP_KEY="$.de", **{name: "8"})
            with self.assertRaisesRegex(buffer.StartError, "but not FORWARD_URL"):
                buffer.open_delivery(settings, None)

    def test_a_source_without_a_secret_has_a_name_only(self):
        [(name, source)] = self.read(FORWARD_LOJA="http://x/").sources
        self.assertEqual(
            ("LOJA", None, "http://x/"), (name, source.secret, source.forward)
        )

    def test_amqp_without_pika(self):
        settings = self.read(FORWARD_URL="amqp://x/?routing_key=q")
        without = mock.patch.dict(sys.modules, {"pika": None})
        with without, self.assertRaises(buffer.StartError) as caught:
            buffer.Delivery(settings, mock.Mock())
        self.assertIn(
            "-m pip install pika, or apt install python3-pika", str(caught.exception)
        )


class DeliveryLoopTest(Loop):
    """In the server's rounds."""

    def open(self, **settings):
        Case.open(self, **settings)
        self.delivery = buffer.Delivery(self.configured, self.store)
        self.serve(self.delivery)
        self.addCleanup(self.delivery.stop)

    def target(self, *plan, **options):
        target = Answers(*plan, **options)
        self.addCleanup(target.close)
        self.open(FORWARD_URL=target.url)
        return target

    def until(self, condition):
        end = time.monotonic() + 20
        while not condition():
            self.assertLess(time.monotonic(), end)
            self.turn()

    def test_a_message_is_claimed_in_the_round_in_which_it_arrives(self):
        target = self.target()
        commits = []
        self.store._db.set_trace_callback(
            lambda sql: commits.append(sql) if sql == "COMMIT" else None
        )
        client = self.client(http_post(b"1"))
        self.until(lambda: self.delivery.busy())
        self.assertEqual(1, len(commits))
        self.assertIn(b"200 OK", self.heard(client))
        self.until(lambda: not self.delivery.busy())
        self.assertEqual(([b"1"], 2), (target.bodies(), len(commits)))

    def test_eight_requests_in_a_round_are_a_crowd(self):
        self.target()
        for number in (7, 8):
            with mock.patch.object(self.delivery, "turn") as turn:
                clients = [self.client(http_post()) for _ in range(number)]
                self.until(lambda c=clients: all(map(self.heard, c)))
            crowded = [call.kwargs["crowded"] for call in turn.call_args_list]
            self.assertEqual(number == 8, any(crowded))

    def test_nothing_is_started_whose_claim_was_not_committed(self):
        target = self.target()
        whole = self.store._db
        self.store._db = Faulty(whole, "COMMIT")
        client = self.client(http_post(b"1"))
        self.turn(3)
        self.assertIn(b"503", self.heard(client))
        self.store._db = whole
        self.assertFalse(self.delivery.busy())
        self.turn(3)
        self.assertEqual([], target.bodies())

    def test_while_commits_fail_it_tries_again_with_the_looks(self):
        target = self.target()
        self.delivery.targets[0].at_once = 300
        for _ in range(300):
            self.store.webhook(b"{}")
        self.store._db = Faulty(self.store._db, "COMMIT")
        self.server.rounds.answer(look=True)
        self.assertEqual(math.inf, self.delivery.until)
        self.assertFalse(self.delivery.due(look=False))
        self.assertEqual([], target.requests)

    def test_when_nothing_is_to_be_done_the_loop_rests(self):
        self.target()
        self.turn(3)
        statements = []
        self.store._db.set_trace_callback(statements.append)
        for _ in range(5):
            self.server.round(0)
        self.assertEqual([], statements)

    def test_stopping_finishes_what_is_in_hand_and_claims_nothing_more(self):
        begun, release = threading.Event(), threading.Event()

        def slow(line):
            begun.set()
            release.wait(20)
            line.sendall(Answers.OK)
            return True

        target = self.target(slow)
        self.client(http_post(b"1"))
        self.client(http_post(b"2"))
        self.until(begun.is_set)
        # after silent connections are closed, so that only the delivery is awaited
        threading.Timer(2 * self.server.QUIET, release.set).start()
        self.server.drain()
        statuses = [row["status"] for row in self.rows()]
        self.assertEqual(
            (["processado", "pendente"], [b"1"]), (statuses, target.bodies())
        )

    def test_stopping_waits_only_so_long_and_gives_back_what_is_left(self):
        begun, release = threading.Event(), threading.Event()
        self.addCleanup(release.set)
        self.target(lambda line: begun.set() or release.wait(20) and False)
        self.client(http_post(b"1"))
        self.until(begun.is_set)
        self.server.GRACE = 0.2
        self.server.drain()
        [row] = self.rows()
        self.assertEqual("processando", row["status"])
        self.assertGreater(row["lease_until"], buffer.utc(self.clock.now + 10))
        self.server.delivery.stop()
        [row] = self.rows()
        self.assertEqual(("pendente", 0), (row["status"], row["attempts"]))


class Broker:
    """A RabbitMQ of its own, on free ports, in a folder that goes away with it."""

    SERVER = "/usr/lib/rabbitmq/bin/rabbitmq-server"  # Debian's, past its wrapper
    CONF = "max_message_size = 1000000\n"

    def __init__(self):
        self.folder = pathlib.Path(tempfile.mkdtemp())
        port, dist, epmd = unused_port(), unused_port(), unused_port()
        self.tls_port, conf = unused_port(), [self.CONF]
        self.files = self_signed(self.folder)
        if self.files:
            conf += [
                f"listeners.ssl.1 = 127.0.0.1:{self.tls_port}",
                f"ssl_options.keyfile = {self.files[0]}",
                f"ssl_options.certfile = {self.files[1]}",
                f"ssl_options.cacertfile = {self.files[1]}",
            ]
        (self.folder / "rabbitmq.conf").write_text("\n".join([*conf, ""]))
        self.user = {"user": "rabbitmq", "group": "rabbitmq"} if not os.getuid() else {}
        if self.user:
            for path in (self.folder, *self.folder.iterdir()):
                shutil.chown(path, **self.user)
        facts = {
            "NODENAME": f"buffer{port}@localhost",
            "NODE_IP_ADDRESS": "127.0.0.1",
            "NODE_PORT": port,
            "DIST_PORT": dist,
            "CONFIG_FILE": self.folder / "rabbitmq.conf",
            "MNESIA_BASE": self.folder / "mnesia",
            "LOG_BASE": self.folder / "log",
            "LOGS": "-",
            "FEATURE_FLAGS_FILE": self.folder / "flags",
            "PID_FILE": self.folder / "pid",
        }
        self.env = {f"RABBITMQ_{name}": str(value) for name, value in facts.items()}
        self.env.update(os.environ, HOME=str(self.folder), ERL_EPMD_PORT=str(epmd))
        self.url = f"amqp://guest:guest@127.0.0.1:{port}/"
        self.pika = importlib.import_module("pika")
        self.start()

    def run(self, *command):
        options = {"stdout": subprocess.DEVNULL, "stderr": subprocess.STDOUT}
        return subprocess.Popen(
            command,
            env=self.env,
            cwd=self.folder,
            start_new_session=True,
            **self.user,
            **options,
        )

    def start(self):
        self.process = self.run(self.SERVER)
        end = time.monotonic() + 60
        while True:
            try:
                return self.channel().connection.close()
            except self.pika.exceptions.AMQPError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.2)

    def stop(self, number=signal.SIGTERM):
        os.killpg(self.process.pid, number)
        self.process.wait(60)

    def close(self):
        self.stop(signal.SIGKILL)
        self.run("epmd", "-kill").wait(20)
        shutil.rmtree(self.folder)

    def control(self, *words):
        assert self.run("/usr/lib/rabbitmq/bin/rabbitmqctl", *words).wait(60) == 0

    def channel(self):
        return self.pika.BlockingConnection(self.pika.URLParameters(self.url)).channel()


class BrokerCase(DeliveryCase):
    """With a real RabbitMQ and pika, where both are installed."""

    @classmethod
    def setUpClass(cls):
        library("pika")
        if not os.path.exists(Broker.SERVER):
            raise unittest.SkipTest("there is no RabbitMQ")
        cls.broker = Broker()
        cls.addClassCleanup(cls.broker.close)
        cls.channel = cls.broker.channel()

    def queue(self, name, **arguments):
        arguments = {key.replace("_", "-"): value for key, value in arguments.items()}
        self.channel.queue_declare(name, durable=True, arguments=arguments)
        return name

    def relay(self, query, **settings):
        self.open(FORWARD_URL=f"{self.broker.url}?{query}", **settings)
        self.target = self.delivery.targets[0]

    def flow(self):
        """Turns until nothing is on its way while there is a connection."""
        self.until(lambda: self.target.up)  # perhaps only after that turn's claim
        self.until(lambda: self.target.up and not self.target.flying)

    def until(self, condition):
        end = time.monotonic() + 30
        while True:
            self.turn()
            if condition():
                return
            self.assertLess(time.monotonic(), end)
            self.news.wait(0.05)
            self.news.clear()

    def got(self, name):
        """The messages in a queue, as (properties, body)."""
        found = []
        while True:
            method, properties, body = self.channel.basic_get(name, auto_ack=True)
            if method is None:
                return found
            found.append((method.routing_key, properties, body))


class RelayTest(BrokerCase):
    def test_a_message_is_confirmed_and_as_it_came(self):
        self.channel.exchange_declare("webhooks", "topic", durable=True)
        name = self.queue("all", x_queue_type="quorum")
        self.channel.queue_bind(name, "webhooks", "#")
        self.relay(
            "exchange=webhooks&routing_key={fonte}.{caminho}",
            SECRET_LOJA="s",
            SIGN_LOJA="X-T - $.id",
        )
        body, event = b'{"id":"evt_1","v":1.10}', "e" * 300
        self.send(
            body,
            "/webhook/loja/a/b?x=1",
            HTTP_X_T="s",
            CONTENT_TYPE="text/x",
            HTTP_X_EVENT="p",
        )
        self.send(b"\xff\0", "/webhook")
        self.send(b'{"id":"%s"}' % event.encode(), "/webhook/loja", HTTP_X_T="s")
        self.flow()
        self.assertEqual(["processado"] * 3, self.statuses())
        first, second, third = self.got(name)
        self.assertEqual(("loja.a.b", body), (first[0], first[2]))
        what = first[1]
        self.assertEqual(("loja:evt_1", "a/b"), (what.message_id, what.type))
        self.assertEqual((self.clock.now, 2), (what.timestamp, what.delivery_mode))
        self.assertEqual("text/x", what.content_type)
        self.assertEqual("p", what.headers["x-event"])
        self.assertEqual(1, what.headers["x-buffer-id"])
        self.assertEqual("x=1", what.headers["x-buffer-query"])
        self.assertNotIn("x-token", what.headers)
        self.assertEqual(("webhook", b"\xff\0"), (second[0], second[2]))
        self.assertEqual(f"{self.store.file_id}-2", second[1].message_id)
        self.assertEqual("loja", third[0])
        digest = hashlib.sha256(f"loja:{event}".encode()).hexdigest()
        self.assertEqual(f"sha256:{digest}", third[1].message_id)

    def test_many_are_on_their_way_at_once(self):
        name = self.queue("many", x_queue_type="quorum")
        self.relay(f"routing_key={name}")
        for number in range(1500):
            self.send(b"%d" % number)
        self.until(lambda: self.target.up)
        self.turn()
        self.assertLess(1, len(self.target.flying))
        self.flow()
        self.assertEqual({"processado"}, set(self.statuses()))
        self.assertEqual(
            [b"%d" % n for n in range(1500)], [m[2] for m in self.got(name)]
        )

    def test_what_no_queue_takes_ends_in_erro_with_its_reason(self):
        self.channel.exchange_declare("unbound", "topic", durable=True)
        self.relay("exchange=unbound&routing_key=nowhere", MAX_ATTEMPTS="2")
        self.send()
        self.flow()
        self.assertEqual("pendente", self.look()["status"])
        self.clock.now += 3700
        self.until(lambda: self.look()["status"] == "erro")
        self.assertEqual("não roteada: 312 NO_ROUTE", self.look()["motivo"])

    def test_what_the_broker_will_not_take_comes_back(self):
        name = self.queue("full", x_max_length=1, x_overflow="reject-publish")
        self.relay(f"routing_key={name}")
        self.send(b"1")
        self.flow()
        self.send(b"2")
        self.flow()
        item = self.look(2)
        self.assertEqual(
            ("pendente", "recusada pelo broker (nack)"),
            (item["status"], item["motivo"]),
        )

    def test_without_its_exchange_all_wait_and_keep_their_attempts(self):
        self.relay("exchange=later&routing_key=x")
        for _ in range(3):
            self.send()
        for _ in range(3):
            self.until(lambda: self.target.breaker.since is not None)
            self.steady.now += 31
        self.assertIn("no exchange 'later'", self.look()["motivo"])
        self.channel.exchange_declare("later", "fanout", durable=True)
        self.channel.queue_bind(self.queue("later"), "later")
        self.steady.now += 31
        self.until(lambda: self.statuses() == ["processado"] * 3)
        self.assertEqual([1, 1, 1], [row["attempts"] for row in self.rows()])

    def test_a_message_that_makes_the_broker_close_ends_alone(self):
        name = self.queue("small")
        self.relay(f"routing_key={name}", MAX_ATTEMPTS="2")
        self.send(b"1")
        self.send(bytes(1_000_001))
        self.send(b"3")

        def done():
            self.steady.now += 1
            self.clock.now += 10
            return self.statuses() == ["processado", "erro", "processado"]

        self.until(done)
        self.assertIn("PRECONDITION_FAILED", self.look(2)["motivo"])
        self.assertLessEqual({b"1", b"3"}, {m[2] for m in self.got(name)})

    def test_what_amqp_cannot_hold_ends_alone(self):
        name = self.queue("strange")
        self.relay(f"routing_key={name}", MAX_ATTEMPTS="1")
        for body in (b"1", b"2", b"3"):
            self.send(body)
        odd = "UPDATE fila SET created_at = '2026-01-31T12:00:00Z' WHERE id = 2"
        self.store._db.execute(odd)
        self.flow()
        self.assertEqual(["processado", "erro", "processado"], self.statuses())
        self.assertIn("não pôde ser enviada: ValueError", self.look(2)["motivo"])
        self.assertNotIn("12:00:00Z", self.logged())

    def test_headers_for_which_the_broker_hangs_up_end_alone(self):
        name = self.queue("frames")
        self.relay(f"frame_max=8192&routing_key={name}", MAX_ATTEMPTS="1")
        self.send(b"1")
        self.send(b"2", HTTP_X_LONG="x" * 9000)
        self.send(b"3")

        def done():
            self.steady.now += 1
            return self.statuses() == ["processado", "erro", "processado"]

        self.until(done)
        self.assertIn("FRAME_ERROR", self.look(2)["motivo"])

    def test_while_it_is_blocked_the_loop_rests_though_there_is_more(self):
        name = self.queue("more")
        self.relay(f"routing_key={name}")
        self.until(lambda: self.target.up)
        for _ in range(200):
            self.send()
        self.turn()
        self.assertEqual(self.steady.now, self.delivery.until)
        self.target.block()
        self.turn()
        self.assertEqual(math.inf, self.delivery.until)

    def test_while_the_broker_has_an_alarm_messages_wait(self):
        name = self.queue("blocked")
        self.relay(f"routing_key={name}")
        self.send(b"1")
        self.flow()
        self.broker.control("set_vm_memory_high_watermark", "absolute", "1")
        self.addCleanup(self.broker.control, "set_vm_memory_high_watermark", "0.4")
        self.send(b"2")
        self.until(lambda: self.target.state() == "bloqueado")
        self.send(b"3")
        self.turn()
        self.assertEqual([[2]], [parcel.ids for parcel in self.target.flying])
        before = self.look(2)["reservado_ate"]
        self.clock.now += 3600
        self.steady.now += 3600
        self.turn()
        self.assertGreater(self.look(2)["reservado_ate"], before)
        self.broker.control("set_vm_memory_high_watermark", "0.4")
        self.flow()
        self.assertEqual(["processado"] * 3, self.statuses())
        self.assertEqual([1, 1, 1], [row["attempts"] for row in self.rows()])

    def test_a_lost_connection_is_made_again(self):
        name = self.queue("again")
        self.relay(f"routing_key={name}")
        self.send(b"1")
        self.flow()
        self.broker.control("close_all_connections", "test")
        type(self).channel = self.broker.channel()
        self.until(lambda: self.target.breaker.since is not None)
        self.send(b"2")
        self.steady.now += 31
        self.until(lambda: self.statuses() == ["processado"] * 2)

    def test_a_broker_that_does_not_confirm_is_asked_anew(self):
        name = self.queue("frozen")
        self.relay(f"routing_key={name}")
        self.until(lambda: self.target.up)
        os.killpg(self.broker.process.pid, signal.SIGSTOP)
        try:
            self.send(b"1")
            self.until(lambda: self.target.unconfirmed)
            self.turn()
            self.steady.now += 299
            self.turn()
            self.steady.now += 1
            self.turn()
        finally:
            os.killpg(self.broker.process.pid, signal.SIGCONT)
        self.until(lambda: self.target.outcomes["conexao"])
        self.assertEqual("TimeoutError: no confirm in 300 s", self.look()["motivo"])
        self.steady.now += 31
        self.until(lambda: self.statuses() == ["processado"])
        self.assertEqual([1], [row["attempts"] for row in self.rows()])

    def test_amqps_verifies_the_certificate(self):
        if not self.broker.files:
            self.skipTest("openssl is not installed")
        name = self.queue("secure")
        url = (
            f"amqps://guest:guest@localhost:{self.broker.tls_port}/?routing_key={name}"
        )
        trusted = {"SSL_CERT_FILE": str(self.broker.files[1])}
        for environ, outcome in (({}, "down"), (trusted, "up")):
            with mock.patch.dict(os.environ, environ):
                self.open(FORWARD_URL=url)
                [self.target] = self.delivery.targets
                self.until(lambda: self.target.up or self.target.breaker.until > 0)
                self.assertEqual(outcome, "up" if self.target.up else "down")
        self.send(b"1")
        self.flow()
        self.assertEqual([b"1"], [body for *_, body in self.got(name)])

    def test_a_wrong_password_is_told(self):
        self.open(
            FORWARD_URL=self.broker.url.replace(":guest@", ":hidden@")
            + "?routing_key=x"
        )
        [self.target] = self.delivery.targets
        self.until(lambda: self.target.breaker.since is not None)
        self.steady.now += 31
        self.until(lambda: "is in trouble" in self.logged())
        self.assertIn("ACCESS_REFUSED", self.logged())
        self.assertNotIn("hidden", self.logged())

    def test_readme_its_topology_its_consumer_and_its_dead(self):
        readme = (HERE / "README.md").read_text()
        blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
        topology, consumer = [block for block in blocks if "import pika" in block]
        work = """
def work(body, properties):
    print(body.decode(), properties.message_id, flush=True)
    if body == b"bad":
        raise ValueError("cannot be worked on")
"""
        environ = {**os.environ, "AMQP_URL": self.broker.url}
        options = {"env": environ, "cwd": self.folder, "text": True}
        subprocess.run([sys.executable, "-c", topology], check=True, **options)
        self.relay("exchange=webhooks&routing_key={fonte}.{caminho}", DEDUPE="$.id")
        for body in (b'{"id":7}', b"bad", b'{"id":8}'):
            self.send(body, "/webhook/loja")
        self.flow()
        command = [sys.executable, "-uc", work + consumer]
        with subprocess.Popen(command, stdout=subprocess.PIPE, **options) as process:
            self.addCleanup(process.kill)
            worked = collections.Counter(
                line.strip() for line in itertools.islice(process.stdout, 12)
            )
            self.until(
                lambda: (
                    self.channel.queue_declare(
                        "webhooks.dead", passive=True
                    ).method.message_count
                )
            )
            process.kill()
        bad = f"{self.store.file_id}-2"
        self.assertEqual(5, worked[f"bad {bad}"])
        self.assertEqual((1, 1), (worked['{"id":7} :7'], worked['{"id":8} :8']))
        [(_, properties, body)] = self.got("webhooks.dead")
        self.assertEqual((bad, b"bad"), (properties.message_id, body))
        self.assertEqual("delivery_limit", properties.headers["x-first-death-reason"])
        self.assertEqual([], self.got("webhooks"))

    @long
    def test_heartbeats_are_served_while_idle(self):
        name = self.queue("idle")
        self.relay(f"heartbeat=1&routing_key={name}")
        self.send(b"1")
        self.flow()
        time.sleep(5)  # the broker's own clock; it hangs up after two beats
        self.turn()
        self.assertIsNone(self.target.breaker.since)
        self.assertTrue(self.target.up)


class MessagePropertiesTest(SourceCase):
    """What a consumer of the relay gets, without a broker."""

    settings = (
        *(("SECRET_A", "s"), ("SIGN_A", "X-T - $.id")),
        *(("SECRET_B", "s"), ("SIGN_B", "X-T - $.id")),
    )

    def properties(self):
        rows = self.store.pegar(500, 60, 1 << 30)
        return [buffer.message_properties(row, self.store.file_id) for row in rows]

    def test_messages_that_share_a_number_have_ids_of_their_own(self):
        """Rows of one file, events of two sources, and rows of a file that is new."""
        found = []
        for _ in range(2):
            for number in range(1, 6):
                self.send()
                for name in ("a", "b"):
                    body = b'{"id":%d}' % number
                    self.send(body, f"/webhook/{name}", HTTP_X_T="s")
            found.append([what["message_id"] for what in self.properties()])
            self.store.close()
            (self.folder / "b.sqlite").unlink()
            self.open()
        self.assertEqual([15, 15], [len(set(ids)) for ids in found])
        events = {f"{name}:{number}" for name in "ab" for number in range(1, 6)}
        self.assertEqual(events, set(found[0]) & set(found[1]))

    def test_it_carries_the_query_as_it_came(self):
        self.send(url=f"/webhook/pay?data.id=999&type=%E9&token={TOKEN}")
        self.send()
        headers = [what["headers"] for what in self.properties()]
        self.assertEqual("data.id=999&type=%E9", headers[0]["x-buffer-query"])
        self.assertEqual("", headers[1]["x-buffer-query"])

    def test_what_we_say_of_a_message_no_sender_can_say(self):
        names = ("ID", "FONTE", "QUERY", "TENTATIVA", "OTHER")
        self.send(**{f"HTTP_X_BUFFER_{name}": "forged" for name in names})
        [what] = self.properties()
        self.assertNotIn("forged", what["headers"].values())

    def test_the_path_is_without_escapes(self):
        raw = "/webhook/x%2Fy/%C3%A9/"
        self.send(PATH_INFO="/webhook/x/y/\xc3\xa9/", REQUEST_URI=raw)
        [row] = self.store.pegar(500, 60, 1 << 30)
        self.assertEqual("k.x.y.é", buffer.routing_key("k.{caminho}", row))
        self.assertEqual("x/y/é", buffer.message_properties(row, "f")["type"])


class RelayErrorsTest(unittest.TestCase):
    def test_an_error_that_may_hold_the_message_is_not_shown(self):
        relay = mock.Mock(pika=library("pika"))
        known = relay.pika.exceptions.ConnectionClosedByBroker(320, "CONNECTION_FORCED")
        self.assertIn("CONNECTION_FORCED", buffer.Relay.said(relay, known))
        for kind in (
            relay.pika.exceptions.ShortStringTooLong,
            relay.pika.exceptions.UnsupportedAMQPFieldException,
            ValueError,
        ):
            self.assertEqual(kind.__name__, buffer.Relay.said(relay, kind("hidden")))


class RelaySettingsTest(unittest.TestCase):
    def test_the_routing_key_is_named_and_can_be_read(self):
        library("pika")
        for query in (
            "",
            "exchange=x&routing_key={payload}",
            "routing_key=",
            "routing_key=x&heartbeat=z",
        ):
            with self.subTest(query), self.assertRaises(buffer.StartError) as caught:
                settings = buffer.Settings.read(
                    {"TOKEN": TOKEN, "FORWARD_URL": f"amqp://u:hidden@h/?{query}"}
                )
                buffer.Delivery(settings, mock.Mock())
            self.assertNotIn("hidden", str(caught.exception))


# Housekeeping


class HousekeepingTest(Case):
    def setUp(self):
        super().setUp()
        self.housekeeper = buffer.Housekeeper(self.configured, self.store)
        self.housekeeper.PAUSE = 0

    def test_retention_counts_from_settling(self):
        self.send(b"1")
        self.clock.now += 30 * 86400
        self.settle(1, "processado")
        self.clock.now += 7 * 86400
        self.housekeeper.tidy()
        self.assertEqual(1, len(self.rows()))
        self.clock.now += 1
        self.housekeeper.tidy()
        self.assertEqual([], self.rows())

    def test_what_is_not_processado_is_never_deleted(self):
        for _ in range(3):
            self.send()
        self.claim("?limite=1")
        self.settle(2, "erro")
        self.clock.now += 1000 * 86400
        self.housekeeper.tidy()
        self.assertEqual(3, len(self.rows()))

    def test_expired_leases_return_though_nobody_claims(self):
        self.send()
        self.claim()
        self.clock.now += 600
        self.housekeeper.tidy()
        self.assertEqual("pendente", self.rows()[0]["status"])

    def test_refusals_are_written_down_though_nothing_else_happens(self):
        self.call("POST", "/webhook", b"{}", token="wrong")
        self.housekeeper.tidy()
        [row] = self.rows("SELECT * FROM contadores WHERE name = 'recusadas'")
        self.assertEqual(("token", 1), (row["label"], row["n"]))

    def history(self, count, payload):
        with self.store.transaction():
            for _ in range(count):
                self.store.webhook(payload.encode())
            self.store._run(
                "UPDATE fila SET status = 'processado', settled_at = '2020-01-01'"
            )

    def test_space_goes_back_to_the_disk_and_nothing_readable_stays(self):
        self.history(1000, "a secret message " * 200)
        self.store.checkpoint()
        before = os.path.getsize(self.configured.db_path)
        self.housekeeper.tidy()
        self.assertLess(os.path.getsize(self.configured.db_path), before / 10)
        for file in self.folder.iterdir():
            self.assertNotIn(b"a secret message", file.read_bytes(), file)

    def test_it_deletes_in_small_bites(self):
        self.history(250, "{}")
        bites = []
        with mock.patch.object(self.store, "purge", wraps=self.store.purge) as purge:
            self.housekeeper.tidy()
            bites = [call.args[1] for call in purge.call_args_list]
        self.assertEqual([100, 100, 100, 100], bites)
        self.assertEqual([], self.rows())

    def test_one_bite_frees_many_pages(self):
        """Through execute() the pragma would free one."""
        self.history(100, "x" * 8000)
        self.store.purge(7, 100)
        [[before]] = self.store._run("PRAGMA freelist_count")
        self.store.shrink(100)
        [[after]] = self.store._run("PRAGMA freelist_count")
        self.assertEqual(100, before - after)

    def test_a_bite_is_small_in_bytes_too(self):
        """secure_delete writes over all of it while senders wait."""
        self.history(5, "x" * (3 << 20))
        self.assertEqual(1, self.store.purge(7, 100))

    def test_a_nudge_does_a_little_once_a_minute(self):
        self.history(1000, "{}")
        for now in (0, 1, 59):
            self.housekeeper.nudge(now)
            self.assertEqual(500, len(self.rows()))
        self.housekeeper.nudge(60)
        self.assertEqual([], self.rows())

    def test_trouble_is_logged_and_the_timer_lives_on(self):
        good, self.store._db = self.store._db, Faulty(self.store._db, "DELETE")
        self.housekeeper.tidy()
        self.assertIn("disk I/O error", self.logged())
        self.store._db = good
        self.history(1, "{}")
        self.housekeeper.tidy()
        self.assertEqual([], self.rows())

    def test_the_timer_lives_on_whatever_happens(self):
        self.housekeeper.EVERY = 0.001
        with mock.patch.object(
            self.housekeeper, "tidy", side_effect=ValueError
        ) as tidy:
            self.housekeeper.start()
            while tidy.call_count < 3:
                pass
        self.assertTrue(self.housekeeper.is_alive())
        self.housekeeper.stop()

    def test_the_timer_runs_and_stops(self):
        self.history(1, "{}")
        self.housekeeper.EVERY = 0.001
        self.housekeeper.start()
        while self.rows():
            pass
        self.housekeeper.stop()
        self.assertFalse(self.housekeeper.is_alive())


class DelayAndClockTest(QueueCase):
    def test_a_delay_moves_with_the_clock(self):
        self.send()
        self.claim()
        self.settle(1, "devolver?em=100")
        self.clock.now += 7200
        self.store.shift(7200)
        self.assertEqual([], self.claim())
        self.clock.now += 100
        self.assertEqual(1, len(self.claim()))


class ClockTest(Case):
    """Somebody sets the clock: leases run on as they were."""

    def test_a_steady_clock_does_not_jump(self):
        wall, monotonic = Clock(1000), Clock(5)
        steady = buffer.SteadyClock(wall, monotonic)
        wall.now, monotonic.now = 1010 + 3600, 15
        self.assertEqual((1010, 3600), (steady(), steady.step()))

    def test_leases_move_with_the_clock(self):
        wall, monotonic = Clock(), Clock(0)
        self.store.clock = steady = buffer.SteadyClock(wall, monotonic)
        server = mock.Mock(clock=steady, app=self.app, listeners=[])
        server.channels.return_value = []
        self.send()
        self.claim()
        for jump in (3600, -3600, -3600, 7200):
            wall.now += jump + 100
            monotonic.now += 100
            self.assertEqual([], self.claim())
            buffer.Server.each_second(server, 0)
            self.assertEqual(wall.now, steady())
            self.assertEqual([], self.claim())
        wall.now += 200
        monotonic.now += 200
        self.assertEqual(1, len(self.claim()))


# Alarms


class Target(http.server.ThreadingHTTPServer):
    """Where alarms go. `got` are (path, JSON); `does` is a status, or a function."""

    daemon_threads = True

    class RequestHandlerClass(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self.server.got.append((self.path, json.loads(body)))
            does = self.server.does
            if callable(does):
                return does(self)
            self.send_response(does)
            self.send_header("Location", "/elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    def __init__(self):
        super().__init__(("127.0.0.1", 0), self.RequestHandlerClass)
        self.got, self.does = [], 200
        self.url = f"http://127.0.0.1:{self.server_port}/hook/a-secret?chat_id=1"
        threading.Thread(target=self.serve_forever, args=[0.01], daemon=True).start()

    def __exit__(self, *_):
        self.shutdown()
        self.server_close()


def pick(mapping, names):
    return tuple(mapping[name] for name in names.split())


class AlarmCase(QueueCase):
    settings = (("ALERT_AGE", "900"), ("ALERT_SILENCE", "3600"), ("MIN_FREE", "1G"))

    def setUp(self):
        super().setUp()
        self.target = self.enter(Target())
        self.store.free = lambda: self.free
        self.free = 2 << 30
        self.start()

    def start(self):
        url = {"alert_url": self.target.url}
        self.configured = dataclasses.replace(self.configured, **url)
        self.monotonic = Clock(0)
        post = functools.partial(buffer.post, timeout=0.2)
        values = self.configured, self.store, self.app.pressure, self.monotonic
        self.watch = self.app.watch = buffer.Watch(*values)
        values = self.configured, self.watch, self.monotonic, post
        self.alarms = buffer.Alarms(*values)

    def after(self, seconds):
        """The alarms that are told when the clock has been moved, with looks between."""
        before, end = len(self.target.got), self.monotonic.now + seconds
        while True:
            self.app.tick(self.monotonic.now)
            self.watch.look(self.monotonic.now)
            self.alarms.look()
            step = min(10, end - self.monotonic.now)
            if not step:
                break
            self.monotonic.now += step
            self.clock.now += step
        return [alarm for _, alarm in self.target.got[before:]]

    def states(self, seconds):
        return [(alarm["kind"], alarm["state"]) for alarm in self.after(seconds)]

    def dead(self, count=1, reason=b"broken"):
        for _ in range(count):
            self.send()
            id_ = self.rows("SELECT max(id) FROM fila")[0][0]
            self.settle(id_, "erro", reason)


class AlarmsTest(AlarmCase):
    def test_in_good_order_nothing_is_told(self):
        self.send()
        self.claim()
        self.assertEqual([], self.states(500))

    def test_messages_that_land_in_erro(self):
        self.dead(3)
        self.dead(1, b"")
        [alarm] = self.after(0)
        self.assertEqual(("erro", "begins", 4), pick(alarm, "kind state messages"))
        self.assertEqual({"broken": 3, "no reason given": 1}, alarm["reasons"])
        self.assertEqual(socket.gethostname(), alarm["host"])
        self.assertRegex(
            alarm["text"],
            r"^buffer.py on \S+: messages landed in erro since the last alarm: 4"
            r" \(3 x 'broken', 1 x 'no reason given'\)$",
        )

    def test_erro_is_over_when_none_has_landed_for_five_minutes(self):
        self.dead()
        self.after(0)
        self.assertEqual([], self.after(200))
        self.dead(7, b"late")
        self.assertEqual([], self.after(290))
        [alarm] = self.after(20)
        self.assertEqual(("erro", "over", 7), pick(alarm, "kind state messages"))
        self.assertEqual({"late": 7}, alarm["reasons"])
        self.assertEqual([], self.after(1000))

    def test_used_up_attempts_are_deaths_too(self):
        self.store.most = 1
        for _ in range(3):
            self.send()
        self.claim()
        self.settle(1, "devolver", b"again")
        self.settle(2, "devolver")
        self.clock.now += 600
        self.store.lease_ended()
        [alarm] = self.after(0)
        reasons = {"again", "devolvida na última tentativa"}
        reasons.add("prazo esgotado na última tentativa")
        self.assertEqual(dict.fromkeys(reasons, 1), alarm["reasons"])

    def test_what_is_rolled_back_has_not_landed_there(self):
        self.store.most = 1
        self.send()
        self.claim()
        good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
        for _ in range(3):
            with self.assertRaises(sqlite3.Error):
                self.store.devolver([1], reason="again")
        self.store._db = good
        self.assertNotIn("used up", self.logged())
        with self.store.transaction():
            with contextlib.suppress(ValueError), self.store.transaction():
                self.store.devolver([1], reason="undone")
                raise ValueError
            self.store.devolver([1], reason="again")
        self.assertEqual({"again": 1}, self.after(0)[0]["reasons"])

    def test_reasons_are_cut_and_bounded(self):
        self.dead(1, b"x" * 2000)
        self.assertEqual(["x" * 100], list(self.after(0)[0]["reasons"]))
        with mock.patch.object(self.store, "REASONS", 3):
            for n in range(10):
                self.dead(1, b"%d" % n)
        self.assertEqual({"0", "1", "2", "other reasons"}, set(self.store.dead()))
        self.assertEqual(7, self.store.dead()["other reasons"])

    def test_the_oldest_due_message_is_too_old(self):
        self.send()
        self.assertEqual([], self.after(900))
        [alarm] = self.after(10)
        self.assertEqual(("age", "begins", 910), pick(alarm, "kind state seconds"))
        self.assertIn("due has waited 910 s, ALERT_AGE is 900 s", alarm["text"])
        self.after(300)
        self.claim()
        self.assertEqual([("age", "over")], self.states(0))

    def test_what_is_delayed_or_in_work_is_not_due(self):
        self.send()
        self.claim("?reserva=1500")
        self.assertEqual([], self.after(1200))
        self.settle(1, "devolver?em=1000")
        self.assertIsNone(self.store.oldest_due())
        self.assertEqual([], self.after(1000 + 900))
        self.assertEqual([("age", "begins")], self.states(10))

    def test_nothing_was_received(self):
        self.assertEqual([], self.after(3590))
        [alarm] = self.after(10)
        self.assertEqual(("silence", "begins", 3600), pick(alarm, "kind state seconds"))
        self.send()
        self.claim()
        self.store.delete(1)  # a message that is gone had come nevertheless
        self.assertEqual([("silence", "over")], self.states(300))

    def test_silence_counts_from_the_start(self):
        self.send()
        self.claim()
        self.settle(1, "processado")
        self.clock.now += 86400
        self.start()
        self.assertEqual([], self.after(3590))

    def test_the_disk_is_nearly_full(self):
        self.free = 512 << 20
        [alarm] = self.after(0)
        told = "disk", "begins", 512 << 20, 1 << 30
        self.assertEqual(told, pick(alarm, "kind state free limit"))
        self.assertIn("has 512 MiB free, MIN_FREE is 1024 MiB", alarm["text"])
        self.free = 2 << 30
        self.assertEqual([("disk", "over")], self.states(300))

    def test_the_queue_is_full(self):
        self.app.pressure.most = 2
        self.send()
        self.send()
        self.assertEqual([("queue", "begins")], self.states(0))
        self.claim()
        self.settle(1, "processado")
        self.assertEqual([("queue", "over")], self.states(300))

    def test_a_full_disk_does_not_hide_a_full_queue(self):
        self.app.pressure.most = 1
        self.send()
        self.assertEqual([("queue", "begins")], self.states(0))
        self.free = 0
        self.assertEqual([("disk", "begins")], self.states(400))
        self.free = 2 << 30
        self.assertEqual([("disk", "over")], self.states(400))
        self.assertEqual("MAX_PENDING", self.app.pressure.cause)

    def test_at_most_one_of_a_kind_in_five_minutes(self):
        for minute in range(59):
            self.free = (minute % 2) << 31
            self.after(60)
        kinds = collections.Counter(alarm["kind"] for _, alarm in self.target.got)
        self.assertLessEqual(kinds["disk"], 12)
        self.assertGreaterEqual(kinds["disk"], 10)

    def test_what_happened_meanwhile_is_summed_up_in_the_next(self):
        self.free = 0
        self.after(0)
        for _ in range(2):
            for self.free in (2 << 30, 0):
                self.assertEqual([], self.after(10))
        self.free = 2 << 30
        [alarm] = self.after(300)
        self.assertEqual(("over", 2), pick(alarm, "state begun"))
        self.assertIn("how often it began since the last alarm: 2", alarm["text"])

    def test_kinds_do_not_wait_for_each_other(self):
        self.dead()
        self.free = 0
        self.assertEqual([("disk", "begins"), ("erro", "begins")], self.states(0))

    def test_a_broken_file_does_not_hide_the_rest(self):
        self.store._db = Faulty(self.store._db, "SELECT")
        self.free = 0
        self.assertEqual([("disk", "begins")], self.states(30))
        self.assertEqual(
            1, self.logged().count("what is wrong is not known: Operational")
        )


class AlarmTargetTest(AlarmCase):
    """The target is slow, down or wrong."""

    def setUp(self):
        super().setUp()
        self.posted, self.send_alarm = [], self.alarms.send
        self.alarms.send = self.count

    def count(self, *values):
        self.posted.append(self.monotonic.now)
        self.send_alarm(*values)

    def hang(self, handler):
        """Says nothing."""
        handler.rfile.read(1)

    def drip(self, handler):
        """A byte now and then, so that no single one takes too long."""
        with contextlib.suppress(OSError):
            for byte in itertools.cycle(b"HTTP/1.1 500 no"):
                handler.wfile.write(bytes([byte]))
                select.select([], [], [], 0.01)

    def rubbish(self, handler):
        handler.wfile.write(b"SSH-2.0-x\r\n")

    def reset(self, handler):
        linger = struct.pack("ii", 1, 0)
        handler.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)

    def test_it_is_told_once_the_target_is_well(self):
        wrong = (500, 404, 302, 307, self.hang, self.drip, self.rubbish, self.reset)
        for does in wrong:
            with self.subTest(does=does):
                self.start()
                self.target.does = does
                self.dead()
                self.after(0)
                got = len(self.target.got)
                self.target.does = 204
                self.assertEqual([("erro", "begins")], self.states(10))
                self.assertEqual(got + 1, len(self.target.got))
        paths = {path for path, _ in self.target.got}
        self.assertEqual({"/hook/a-secret?chat_id=1"}, paths)  # no redirect followed

    def test_it_is_tried_again_less_and_less_often(self):
        with mock.patch.object(self.alarms, "settings") as settings:
            self.watch.settings = settings
            with socket.create_server(("127.0.0.1", 0)) as closed:
                port = closed.getsockname()[1]
            settings.alert_url = f"http://127.0.0.1:{port}"
            settings.alert_age = settings.alert_silence = 0
            self.dead()
            self.after(3600)
        waits = [b - a for a, b in itertools.pairwise(self.posted)]
        self.assertEqual([10, 20, 40, 80, 160, 320, 600, 600, 600, 600], waits)
        lines = [line for line in self.log.output if "is tried again" in line]
        self.assertIn("ConnectionRefusedError: Connection refused", lines[0])

    def test_what_was_over_before_it_could_be_told_is_told(self):
        self.target.does = 500
        self.free = 0
        self.after(10)
        self.free = 2 << 30
        self.after(100)
        self.target.does = 200
        [alarm] = self.after(600)
        self.assertEqual(("disk", "over", 1), pick(alarm, "kind state begun"))

    def test_the_url_is_a_secret(self):
        self.target.does = 404
        self.dead()
        self.after(0)
        self.assertIn("it answers 404", self.logged())
        self.assertNotIn("a-secret", self.logged() + repr(self.configured))
        for url in ("ftp://hidden", "http://u:hidden@x/", "https://", "http://x:99999"):
            with self.assertRaises(buffer.StartError) as caught:
                self.open(ALERT_URL=url)
            self.assertIn("ALERT_URL='***': it takes a URL", str(caught.exception))
        self.open(ALERT_URL="")
        self.assertIsNone(self.configured.alert_url)

    def test_certificates_are_verified(self):
        key, certificate = self.folder / "key", self.folder / "certificate"
        make = "openssl req -x509 -newkey rsa:2048 -nodes -subj /CN=localhost -keyout"
        run_or_skip(self, *make.split(), str(key), "-out", str(certificate))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key)
        self.target.socket = context.wrap_socket(self.target.socket, server_side=True)
        with self.assertRaises(ssl.SSLCertVerificationError):
            buffer.post(f"https://localhost:{self.target.server_port}/", "{}")
        self.assertEqual([], self.target.got)

    def test_the_thread_lives_on_whatever_happens_and_stops(self):
        self.alarms.EVERY = 0.001
        with mock.patch.object(self.alarms, "look", side_effect=KeyError) as look:
            self.alarms.start()
            while look.call_count < 3:
                pass
        self.alarms.stop()
        self.assertFalse(self.alarms.is_alive())


class AlarmServiceTest(unittest.TestCase):
    def test_senders_and_the_stop_do_not_wait_for_a_target_that_hangs(self):
        hangs = threading.Event()
        with Target() as target:
            target.does = lambda handler: hangs.wait(30)
            special = "import buffer; buffer.Alarms.EVERY = 0.01; buffer.main([])"
            with Service(ALERT_URL=target.url) as service:
                service.stop()
                service.command = [sys.executable, "-c", special]
                service.settings["PYTHONPATH"] = HERE
                service.start()
                service.call("POST", "/webhook", b"{}")
                service.call("POST", "/fila/1/erro", b"broken")
                while not target.got:
                    time.sleep(0.01)
                began = time.monotonic()
                for _ in range(20):
                    self.assertEqual(200, service.call("POST", "/webhook", b"{}")[0])
                self.assertEqual(0, service.stop())
                self.assertLess(time.monotonic() - began, 5)
            hangs.set()


class WatchTest(AlarmCase):
    """What is wrong is decided once; the page, /metrics and status say the same."""

    def kinds(self, seconds=0):
        """What the page says, after some time; the others must say it too."""
        self.after(seconds)
        found = [one["tipo"] for one in self.get("/painel/dados")["problemas"]]
        text = self.call("GET", "/metrics")[1]
        samples = re.findall(r'buffer_problems\{kind="(\w+)"\} 1', text)
        self.assertEqual(sorted(found), sorted(samples))
        table = buffer.status_table(self.store.report(), self.store.problems())
        self.assertEqual(len(found), table.count("wrong since"))
        return found

    def problem(self, kind):
        problems = self.get("/painel/dados")["problemas"]
        return next(one for one in problems if one["tipo"] == kind)

    def test_in_good_order_there_is_none(self):
        self.send()
        self.claim()
        self.assertEqual([], self.kinds(100))

    def test_what_lies_in_erro_is_a_problem_until_somebody_has_seen_to_it(self):
        self.dead(2)
        self.assertEqual(["erro"], self.kinds())
        self.assertEqual(["erro"], self.kinds(1000))  # its alarm is over by then
        self.assertEqual("over", self.target.got[-1][1]["state"])
        found = self.problem("erro")
        self.assertEqual((2, 1000), (found["numeros"]["lying"], found["desde"]))
        self.settle(1, "reenviar")
        self.settle(2, "processado")
        self.settle(1, "processado")
        self.assertEqual([], self.kinds(10))

    def test_nobody_claims(self):
        self.send()
        self.send()
        self.assertEqual([], self.kinds(300))
        self.assertEqual(["consumo"], self.kinds(10))
        self.assertEqual(310, self.problem("consumo")["desde"])
        self.claim("?limite=1")
        self.assertEqual(
            [], self.kinds(10)
        )  # though the other one has waited for longer
        self.assertEqual([], self.target.got)  # the age of the oldest is the alarm
        self.assertEqual(["age", "consumo"], self.kinds(950))

    def test_a_target_in_trouble(self):
        one = {"destino": "FORWARD_URL", "estado": "parado", "problema": True}
        one |= {"desde": 59, "ultimo_erro": "404 not active", "esperando": 7}
        one |= {"em_voo": 0, "tentativas": {}}
        self.app.delivery = self.watch.delivery = mock.Mock(report=lambda: [one])
        self.watch.delivery.targets = [mock.Mock(source=None)]
        self.assertEqual([], self.kinds())
        one["desde"] = 75
        self.assertEqual(["destino"], self.kinds(10))
        found = self.problem("destino")
        self.assertEqual((75, "FORWARD_URL"), (found["desde"], found["destino"]))
        self.assertIn("404 not active", self.target.got[0][1]["text"])
        one["problema"] = False
        self.assertEqual([], self.kinds(10))
        self.assertEqual([("destino", "over")], self.states(300))

    def test_a_target_of_which_less_is_known(self):
        one = {"destino": "FORWARD_URL", "estado": "fluindo", "desde": None}
        self.watch.delivery = mock.Mock(report=lambda: [one], targets=[])
        self.after(10)
        self.assertNotIn("what is wrong is not known", self.logged())

    def test_senders_are_refused(self):
        for _ in range(3):
            self.assertEqual([], self.kinds(10))
            self.call("POST", "/webhook", b"{}", token="wrong")
            self.call("GET", "/fila", token="wrong")  # no sender
        self.assertEqual(["recusas"], self.kinds(10))
        self.assertEqual({"token": 3}, self.problem("recusas")["numeros"]["reasons"])
        self.assertEqual([], self.target.got)  # any stranger could wake people
        self.assertEqual([], self.kinds(300))

    def test_storage_that_fails_is_told(self):
        good, self.store._db = (
            self.store._db,
            Faulty(self.store._db, "INSERT INTO fila"),
        )
        self.assertEqual(503, self.call("POST", "/webhook", b"{}")[0])
        self.store._db = good
        self.assertEqual(["recusas"], self.kinds(10))
        self.assertEqual([("recusas", "over")], self.states(300))

    def test_disk_and_queue_and_silence(self):
        self.app.pressure.most, self.free = 1, 0
        self.assertEqual(["disk"], self.kinds(10))
        self.free = 2 << 30
        self.assertEqual([], self.kinds(10))
        self.send()
        self.claim("?reserva=9999")
        self.assertEqual(["queue"], self.kinds(10))
        self.settle(1, "processado")
        self.assertEqual(["silence"], self.kinds(3600))

    def test_since_when_outlives_a_restart(self):
        self.dead()
        self.after(100)
        self.clock.now += 50
        self.start()
        self.after(0)
        self.assertEqual(150, self.problem("erro")["desde"])

    def test_it_writes_when_something_changes_and_once_a_minute(self):
        self.after(100)
        with mock.patch.object(self.store, "write_problems") as write:
            self.after(500)
            self.assertEqual(0, write.call_count)
            self.dead()
            self.after(600)
            self.assertLess(write.call_count, 13)
            self.assertGreater(write.call_count, 9)


# The page


class PageTest(QueueCase):
    def test_anybody_gets_the_page_and_it_holds_no_data(self):
        self.send(b'"a secret"', "/webhook/somewhere")
        status, page = self.call("GET", "/painel", token=None)
        self.assertEqual(200, status)
        self.assertEqual("text/html; charset=utf-8", self.answered["Content-Type"])
        self.assertNotRegex(page, f"a secret|somewhere|{TOKEN}")
        self.assertEqual((200, ""), self.call("HEAD", "/painel", token=None))

    def test_a_browser_runs_nothing_but_its_script_and_keeps_nothing(self):
        page = self.call("GET", "/painel")[1]
        policy = self.answered["Content-Security-Policy"]
        for tag in ("script", "style"):
            [text] = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
            digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
            self.assertIn(f"{tag}-src 'sha256-{digest}';", policy)
        for part in (
            "default-src 'none'",
            "connect-src 'self'",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ):
            self.assertIn(part, policy)
        self.assertNotIn("unsafe", policy)
        self.assertEqual("no-referrer", self.answered["Referrer-Policy"])

    def test_it_takes_no_text_for_markup_and_asks_no_other_host(self):
        page = self.call("GET", "/painel")[1]
        sinks = (
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval|Function\("
        )
        self.assertNotRegex(page, sinks)
        self.assertNotRegex(page, r"//\w|\bsrc=|\bstyle=|\bon\w+=\"|@import|url\(")
        self.assertNotRegex(
            page, r"""["'`]/(fila|painel)"""
        )  # a proxy may add a prefix
        self.assertNotIn("?token", page)

    def test_all_it_says_stands_in_both_languages(self):
        known = [line.split(" = ") for line in buffer.PAGE_WORDS.strip().splitlines()]
        self.assertTrue(all(len(line) == 3 and all(line) for line in known))
        keys = {key for key, *_ in known}
        self.assertEqual(len(known), len(keys))
        for _, *texts in known:  # what is put in stands in both
            holes = [sorted(re.findall(r"\{\w+\}", text)) for text in texts]
            self.assertEqual(*holes, texts)
        html = re.sub(r"(?s)<title>.*?</title>", "", buffer.PAGE_BODY)
        bare = {text.strip() for text in re.findall(">([^<]+)", html)} - {""}
        self.assertEqual({"buffer.py"}, bare)
        said = set(re.findall(r'data-(?:t|label)="([^"]+)"', html))
        said |= set(re.findall(r'\bt\("([^"]+)"', buffer.PAGE_SCRIPT))
        said |= {*buffer.STATUSES, "fluindo", "sondando", "parado", "bloqueado"}
        said |= {
            "limitado",
            "pausado",
            "devolver",
            "prazo",
            "reenviar",
            "hora",
            "dia",
            "semana",
        }
        said |= {f"problem {kind}" for kind in buffer.Watch.KINDS}
        for verb in ("reenviar", "processado", "erro", "apagar", "agora"):
            said |= {f"do {verb}", f"then {verb}", f"was {verb}"}
        self.assertGreater(len(said), 100)
        self.assertEqual(set(), said - keys)
        told = {*re.findall('"([a-z ]+)"', buffer.PAGE_SCRIPT)}
        told |= {"401", "404", "409", "429", "503"}
        told |= {key for key in keys if re.match("last |outcome |refused ", key)}
        self.send(b"x", "/webhook/path")
        self.settle(1, "erro", body=b"x")
        item = self.get("/fila/1").keys() - {"id", "payload", "headers", "status"}
        item -= {"historico"}
        self.assertEqual(set(), item - keys)  # shown by their names
        told |= {*item, "chave", "fonte", "evento", "reservado_ate", "disponivel_em"}
        self.assertEqual(set(), keys - said - told)

    def test_its_source_can_be_read(self):
        for text in (buffer.PAGE_STYLE, buffer.PAGE_BODY, buffer.PAGE_SCRIPT):
            self.assertLessEqual(max(map(len, text.splitlines())), 100)
        functions = re.findall(
            r"(?ms)^(?:async )?function (\w+).*?^}$", buffer.PAGE_SCRIPT
        )
        self.assertGreater(len(functions), 80)
        for found in re.finditer(
            r"(?ms)^(?:async )?function .*?^}$", buffer.PAGE_SCRIPT
        ):
            self.assertLessEqual(found[0].count("\n"), 25, found[0])
        self.assertEqual(1, buffer.PAGE_SCRIPT.count("fetch("))

    def test_its_numbers_are_for_consumers(self):
        self.open(WEBHOOK_TOKEN="one-that-may-only-send")
        for token in (None, "wrong", "one-that-may-only-send"):
            self.assertEqual(401, self.call("GET", "/painel/dados", token=token)[0])
        self.send()
        data = self.get("/painel/dados")
        counts = [{"fonte": None, "status": "pendente", "quantidade": 1}]
        found = [entry for entry in data["mensagens"] if entry["quantidade"]]
        self.assertEqual(counts, found)
        self.assertEqual((60, 4), (len(data["por_minuto"]), len(data["por_minuto"][0])))
        self.assertEqual((None, buffer.__version__), (data["entrega"], data["versao"]))
        self.assertLessEqual({"mais_antiga", "arquivo", "wal", "livre"}, data.keys())

    def test_a_day_and_a_week_are_kept_besides(self):
        now = self.clock.now // 3600 * 3600
        for hours, times in ((0, 2), (20, 3), (160, 1)):
            self.clock.now = now + 3600 * hours
            for _ in range(times):
                self.send()
        self.settle(1, "processado")
        self.settle(2, "erro")
        for name, count, step, received in (
            ("dia", 144, 600, 1),
            ("semana", 168, 3600, 6),
        ):
            found = self.get(f"/painel/dados?periodo={name}")["por_periodo"]
            self.assertEqual(count, len(found))
            self.assertEqual(step, found[1][0] - found[0][0])
            sums = [sum(row[n] for row in found) for n in (1, 2, 3)]
            self.assertEqual([received, 1, 1], sums)
        self.assertLess(len(self.rows("SELECT * FROM minutos")), 400)
        self.assertNotIn("por_periodo", self.get("/painel/dados"))

    def test_its_numbers_hold_the_state_of_delivery(self):
        state = [{"destino": "FORWARD_URL", "estado": "fluindo"}]
        self.app.delivery = mock.Mock(report=lambda: state)
        self.assertEqual(state, self.get("/painel/dados")["entrega"])

    def test_no_cache_keeps_what_it_asks_for(self):
        self.send()
        for url in (
            "/painel",
            "/painel/dados",
            "/fila",
            "/fila?busca=x",
            "/fila/1",
            "/fila/motivos",
            "/fila/quantas?status=erro",
        ):
            self.get(url) if url != "/painel" else self.call("GET", url)
            self.assertEqual("no-store", self.answered["Cache-Control"], url)
            self.assertEqual("nosniff", self.answered["X-Content-Type-Options"], url)


class BrowserTest(unittest.TestCase):
    """The page in Chromium, driven through selenium, where both are installed."""

    @classmethod
    def setUpClass(cls):
        for program in ("chromium", "chromedriver"):
            if not shutil.which(program):
                raise unittest.SkipTest(f"no {program} here")
        try:
            from selenium import webdriver
            from selenium.webdriver.chrome.service import Service as Driver
        except ImportError:
            raise unittest.SkipTest("no selenium here") from None
        options = webdriver.ChromeOptions()
        for word in ("headless=new", "no-sandbox", "disable-dev-shm-usage", "lang=pt"):
            options.add_argument(f"--{word}")
        logs = {"browser": "ALL", "performance": "ALL"}
        options.set_capability("goog:loggingPrefs", logs)
        driver = Driver(shutil.which("chromedriver"))
        cls.browser = webdriver.Chrome(options=options, service=driver)
        cls.addClassCleanup(cls.browser.quit)

    def setUp(self):
        self.service = Service()
        self.service.__enter__()
        self.addCleanup(self.service.__exit__)
        self.url = f"http://127.0.0.1:{self.service.port}/painel"
        self.speak("pt-BR")
        self.width(1280)
        self.refused = ()  # statuses that the test provokes, which Chromium logs
        self.browser.get("about:blank")  # the page of the test before asks no more
        self.browser.get_log("browser"), self.browser.get_log("performance")

    def tearDown(self):
        """No error in the console, no request to another host, in all of the tests."""
        for entry in self.browser.get_log("browser"):
            expected = any(
                f"status of {code}" in entry["message"] for code in self.refused
            )
            if entry["level"] in ("SEVERE", "WARNING") and not expected:
                self.fail(entry)
        for entry in self.browser.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                url = message["params"]["request"]["url"]
                if url.startswith(("data:image/png", f"blob:{self.url[:-7]}")):
                    continue  # its icon, what it has given to the browser
                self.assertTrue(url.startswith(self.url.removesuffix("painel")), url)
                self.assertNotIn(TOKEN, url)

    def speak(self, language):
        order, values = "Network.setUserAgentOverride", {"acceptLanguage": language}
        agent = self.browser.execute_script("return navigator.userAgent")
        self.browser.execute_cdp_cmd(order, {"userAgent": agent, **values})

    def width(self, width):
        facts = {
            "width": width,
            "height": 844,
            "deviceScaleFactor": 1,
            "mobile": width < 500,
        }
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", facts)

    def send(self, body, path="/webhook"):
        self.assertEqual(200, self.service.call("POST", path, body)[0])

    def fail_with(self, reason, *ids):
        for id_ in ids:
            path = f"/fila/{id_}/erro"
            self.assertEqual(200, self.service.call("POST", path, reason.encode())[0])

    def statuses(self):
        items = json.loads(self.service.call("GET", "/fila")[2])
        return {item["id"]: item["status"] for item in items}

    def find(self, selector):
        return self.browser.find_element("css selector", selector)

    def text(self, selector):
        """What is to be read there; nothing while it is not there."""
        script = "return document.querySelector(arguments[0])?.innerText ?? ''"
        return self.browser.execute_script(script, selector)

    def wait(self, what, text, seconds=10):
        """Until the text of a selector, or what a function returns, matches."""
        found, end = None, time.monotonic() + seconds
        while time.monotonic() < end:
            found = what() if callable(what) else self.text(what)
            if re.search(text, found):
                return
            time.sleep(0.05)
        self.fail(f"{what} has {found!r} and not {text!r}")

    def log_in(self, token=TOKEN):
        self.browser.get(self.url)
        self.browser.execute_script("sessionStorage.clear()")
        self.browser.get(self.url)
        self.find("#token").send_keys(token)
        self.find("#login button").click()

    def keys(self, *keys):
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.browser).send_keys(*keys).perform()

    def click(self, selector):
        self.find(selector).click()

    def look_again(self):
        """As when the tab was in the background; else five seconds pass."""
        script = "document.dispatchEvent(new Event('visibilitychange'))"
        self.browser.execute_script(script)

    def focused(self):
        script = (
            "let e = document.activeElement; return e.id || e.value || e.textContent"
        )
        return self.browser.execute_script(script)

    def tag(self):
        return self.browser.execute_script("return document.activeElement.tagName")

    def top(self, selector):
        """Where it begins on the screen."""
        script = (
            "return document.querySelector(arguments[0]).getBoundingClientRect().top"
        )
        return self.browser.execute_script(script, selector)

    def in_view(self, selector):
        script = """
            const box = document.querySelector(arguments[0]).getBoundingClientRect()
            return box.height > 0 && box.top >= 0 && box.bottom <= innerHeight"""
        return self.browser.execute_script(script, selector)

    def answer(self, path, javascript):
        """From now on what begins with this path is answered by an expression; `real()`
        is the answer of the service."""
        script = """
            const before = window.fetch
            window.asked ??= []
            window.fetch = (path, options) => {
              const real = () => before(path, options)
              const text = (status, body, kind = "text/plain") =>
                new Response(body, { status, headers: { "Content-Type": kind } })
              if (!`${path}`.startsWith(arguments[0])) return real()
              window.asked.push(path)
              return (async () => eval_)()
            }""".replace("eval_", javascript)
        self.browser.execute_script(script, path)

    def ids(self):
        script = (
            "return [...document.querySelectorAll('#rows a')].map(a => +a.textContent)"
        )
        return self.browser.execute_script(script)

    def test_a_wrong_token_then_the_right_one_then_out(self):
        self.refused = (401,)
        self.send(b"{}")
        self.log_in("wrong")
        self.wait("#refused", "O token não é aceito")
        self.assertFalse(self.find("#inside").is_displayed())
        self.find("#token").clear()
        self.find("#token").send_keys(f"{TOKEN}\n")
        self.wait("#rows", "pendente")
        self.assertEqual(self.url, self.browser.current_url)
        self.browser.refresh()  # the token is kept while the tab is open
        self.wait("#rows", "pendente")
        self.browser.execute_script("sessionStorage.setItem('token', 'old')")
        self.browser.refresh()
        self.wait("#refused", "O token não é aceito")
        self.find("#token").send_keys(f"{TOKEN}\n")
        self.wait("#rows", "pendente")
        self.click("#leave")
        self.wait("#login", "Token")
        kept = self.browser.execute_script(
            "return Object.values(sessionStorage).join('') + document.cookie"
        )
        self.assertEqual(("", "token"), (kept, self.focused()))
        again = (
            "return refresh().then(() => sessionStorage.refused)"  # asks for nothing
        )
        self.assertEqual("", self.browser.execute_script(again))

    def test_a_webhook_shows_up_by_itself(self):
        self.log_in()
        self.wait("#counts [value=pendente] b", "^0$")
        self.assertTrue(self.find("#none").is_displayed())
        self.send(b"{}", "/webhook/lojas")
        self.wait("#counts .pendente b", "^1$")
        self.wait("#rows", "lojas")
        self.assertIn("1 recebidas", self.find("svg").accessible_name)
        self.assertFalse(self.find("#first").is_displayed())

    def test_a_payload_is_text_whatever_it_is(self):
        evil = '<img src=x onerror="document.title=1"><script>document.title=2</script>'
        number = '{"n":12345678901234567890,"v":1.10,"v":[],"e":[{},"a\\"[b"]}'
        pretty = """{
  "n": 12345678901234567890,
  "v": 1.10,
  "v": [],
  "e": [
    {},
    "a\\"[b"
  ]
}"""
        for body in (
            evil.encode(),
            number.encode(),
            b"\xff\xfe <",
            json.dumps(evil).encode(),
        ):
            self.send(body, f"/webhook/{urllib.parse.quote(evil)}")
        self.fail_with(evil, 1)
        self.log_in()
        self.wait("#rows li:last-child", "<img src=x")
        for id_, expected in (
            (1, evil),
            (2, pretty),
            (3, "4 B, sem texto; os primeiros bytes:\nff fe 20 3c"),
            (4, json.dumps(evil)),
        ):
            self.click(f"#rows a[href='#{id_}']")
            self.wait("#one[open] #title", f"Mensagem {id_}:")
            shown = self.find("#payload").get_attribute("textContent")
            self.assertEqual(expected, shown)
            self.click("#close")
        self.click("#counts .erro")
        self.wait("#why", "<img src=x")
        self.assertRegex(self.browser.title, r"· buffer\.py$")
        self.assertEqual(
            [], self.browser.find_elements("css selector", "img, main script")
        )

    def test_conversations_and_delivery_are_said_in_words(self):
        talks = {"esperando": 1234, "mais_antiga": 300, "em_trabalho": 2}
        target = {"destino": "FORWARD_URL", "em_voo": 3, "tentativas": {"nack": 5}}
        target |= {"estado": "bloqueado", "desde": None}
        for language, words in (
            ("pt-BR", ("1.234 esperando, a mais antiga 5 min; 2 em trabalho",)),
            ("en-GB", ("1,234 waiting, the oldest 5 min; 2 in work",)),
        ):
            self.speak(language)
            self.log_in()
            self.wait("#counts .zero b", "0")
            self.assertFalse(self.find("#delivery").is_displayed())
            script = """
                const shown = await ask("painel/dados")
                show({...shown, conversas: arguments[0], entrega: [arguments[1]]})
                document.querySelector("#machine").open = true
                return document.querySelector("main").innerText"""
            facts = self.browser.execute_script(script, talks, target)
            for word in words:
                self.assertIn(word, facts)
            state = "bloqueado pelo broker" if language == "pt-BR" else "blocked by"
            nack = (
                "recusada pelo broker: 5" if language == "pt-BR" else "refused by the"
            )
            self.assertIn(state, facts)
            self.assertIn(nack, facts)

    def test_replay_and_erase_one(self):
        for _ in range(2):
            self.send(b"{}")
        self.fail_with("broken", 1, 2)
        self.log_in()
        for verb, answer, expected in (
            ("reenviar", "", {1: "erro", 2: "erro"}),
            ("reenviar", "yes", {1: "pendente", 2: "erro"}),
            ("apagar", "yes", {2: "erro"}),
        ):
            self.wait("#rows", "\\b1\\b")
            self.click("#rows a[href='#1']")
            self.wait("#one[open] #title", "Mensagem 1:")
            self.click(f"#verbs [value={verb}]")
            self.wait("#question", "1 mensagem")
            self.click("#yes" if answer else "#no")
            if answer:
                self.wait("#said span", r"1 mensagem \(1\)")
            else:
                self.click("#close")
            self.wait(lambda: str(self.statuses()), f"^{re.escape(str(expected))}$")
        self.wait("#counts .erro b", "^1$")

    def test_done_and_failed_with_a_reason(self):
        self.send(b"{}")
        self.log_in()
        for verb, expected in (("erro", "erro"), ("processado", "processado")):
            self.wait("#rows", "1")
            self.click("#rows a[href='#1']")
            self.wait("#one[open] #title", "Mensagem 1:")
            self.click(f"#verbs [value={verb}]")
            if verb == "erro":
                self.find("#why_not").send_keys("por fora")
            self.click("#yes")
            self.wait(lambda: self.statuses()[1], expected)
            self.wait("#rows", expected)
            if verb == "erro":
                self.assertIn("por fora", self.text("#rows"))

    def test_replay_all_that_failed_for_one_reason(self):
        for _ in range(5):
            self.send(b"{}")
        self.fail_with("sem crédito & <b>", 1, 2, 3)
        self.fail_with("other", 4)
        self.log_in()
        self.wait("#rows", "crédito")
        self.click("#rows a[href='#2']")
        self.wait("#one[open] #title", "Mensagem 2:")
        self.click("#verbs [value=all]")
        self.wait("#question", "3 mensagens")
        self.wait("#what", "sem crédito & <b>")
        self.fail_with("sem crédito & <b>", 5)  # after the person was told how many
        self.click("#yes")
        self.wait("#said span", "3 mensagens de volta na fila")
        expected = {**dict.fromkeys((1, 2, 3), "pendente"), 4: "erro", 5: "erro"}
        self.assertEqual(expected, self.statuses())

    def test_what_another_has_done_meanwhile_is_said_in_words(self):
        self.refused = (409, 404)
        self.send(b"{}")
        self.log_in()
        self.wait("#rows", "pendente")
        self.click("#rows a[href='#1']")
        self.wait("#one[open] #title", "pendente")
        self.service.call("POST", "/fila/pegar")
        self.click("#verbs [value=processado]")
        self.click("#yes")
        self.wait("#said span", "a mensagem mudou")
        self.wait("#title", "processando")
        self.service.call("DELETE", "/fila/1")
        self.click("#verbs [value=apagar]")
        self.wait("#what", "Um consumidor está com ela agora")
        self.click("#yes")
        self.wait("#said span", "não existe mais")

    def test_filter_search_and_pages(self):
        for number in range(60):
            self.send(b"{}", f"/webhook/n{number + 1}")
        self.fail_with("x", 5)
        self.log_in()
        for click, first, last in (
            (None, 60, 36),
            ("#older", 35, 11),
            ("#older", 10, 1),
            ("#newer", 35, 11),
            ("#newer", 60, 36),
        ):
            if click:
                self.click(click)
            self.wait("#rows li:first-child", f"n{first}\\b")
            self.wait("#rows li:last-child", f"n{last}\\b")
        self.assertFalse(self.find("#newer").is_enabled())
        self.click("#counts .erro")
        self.wait("#rows li:first-child", "n5\\b")
        self.find("#find").send_keys("#17\n")
        self.wait("#none", "Nenhuma")  # among those that have failed
        self.click("#chips button")
        self.wait("#rows li:first-child", "n17\\b")
        self.find("#find").send_keys("x\n")
        self.wait("#none", "Nenhuma mensagem")

    def test_the_keyboard_is_enough(self):
        from selenium.webdriver.common.keys import Keys

        self.send(b"{}")
        self.fail_with("x", 1)
        self.log_in()
        self.wait("#rows", "erro")
        self.assertEqual("verdict", self.focused())
        for _ in range(40):
            self.keys(Keys.TAB)
            if self.focused() == "1" and self.tag() == "A":
                break
        outline = "return getComputedStyle(document.activeElement).outlineStyle"
        self.assertNotEqual("none", self.browser.execute_script(outline))
        self.keys(Keys.ENTER)
        self.wait(self.focused, "title")
        self.keys(Keys.ESCAPE)
        self.wait(self.focused, "^1$")
        self.keys(Keys.ENTER)
        self.wait(self.focused, "title")
        self.keys(Keys.TAB, Keys.TAB)
        self.assertEqual("reenviar", self.focused())
        self.keys(Keys.ENTER)
        self.wait(self.focused, "^no$")
        self.keys(Keys.TAB, Keys.ENTER)
        self.wait("#rows", "pendente")
        self.keys("/")
        self.assertEqual("find", self.focused())

    def test_a_phone_and_english(self):
        self.send(b"{}", "/webhook/" + "long" * 99)
        self.fail_with("reason" * 99, 1)
        self.speak("en-GB")
        self.width(390)
        self.log_in()
        self.wait("#rows", "failed")
        self.click("#counts .erro")
        self.wait("#why", "reason")
        over = "return document.documentElement.scrollWidth"
        self.assertEqual(390, self.browser.execute_script(over))
        self.click("#rows a[href='#1']")
        self.wait("#one[open] #title", "Message 1: failed")
        inside = "const one = document.querySelector('#one')"
        inside += "; return one.scrollWidth - one.clientWidth"
        self.assertEqual(0, self.browser.execute_script(inside))
        language = self.browser.execute_script("return document.documentElement.lang")
        self.assertEqual("en-GB", language)
        self.assertNotRegex(self.text("body"), "[áãçéêíóõ]")

    def test_it_says_when_there_is_no_service_and_recovers(self):
        self.send(b"{}")
        self.log_in()
        self.wait("#rows", "pendente")
        offline = {"offline": True, "latency": 0, "downloadThroughput": -1}
        offline["uploadThroughput"] = -1
        self.browser.execute_cdp_cmd("Network.enable", {})
        self.browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        self.look_again()
        self.wait("#link span", "sem conexão")
        offline["offline"] = False
        self.browser.execute_cdp_cmd("Network.emulateNetworkConditions", offline)
        self.look_again()
        self.wait("#link span", "^$")
        self.browser.get_log("browser")

    def test_what_is_wrong_is_seen_first_on_a_phone(self):
        self.width(390)
        self.log_in()
        self.wait("#verdict", "Tudo em ordem")
        self.assertRegex(self.browser.title, r"^[^(]+ · buffer\.py$")
        well = self.find("#icon").get_property("href")
        self.send(b"{}")
        self.fail_with("HTTP 422", 1)
        self.look_again()
        self.wait("#problems", "1 mensagens falharam.*desde .*Mostrar")
        self.wait("#verdict", "^1 problema$")
        self.assertTrue(self.in_view("#state") and self.in_view("#problems button"))
        self.assertRegex(self.browser.title, r"^\(1\) ")
        self.assertNotEqual(well, self.find("#icon").get_property("href"))
        self.click("#problems button")
        self.wait("#rows", "HTTP 422")
        self.wait("#why", "HTTP 422")

    def test_a_target_in_trouble_with_what_is_known_of_it(self):
        """Against what GET /painel/dados says of a target."""
        self.width(390)
        self.log_in()
        self.wait("#verdict", "Tudo")
        target = {"destino": "FORWARD_URL", "endereco": "n8n:5678", "estado": "parado"}
        target |= {
            "desde": 1980,
            "problema": True,
            "em_voo": 0,
            "tentativas": {"4xx": 207},
        }
        target |= {"ultimo_sucesso": 2100, "ultimo_erro": "HTTP 404: inactive"}
        target |= {"ultimo_erro_ha": 12, "tentativas_5min": 22, "falhas_5min": 22}
        target |= {"esperando": 120, "mais_antiga": 1990, "proxima": 18}
        problem = {"tipo": "destino", "texto": "x", "desde": 1980, "numeros": {}}
        problem |= {"destino": "FORWARD_URL"}
        facts = json.dumps({"entrega": [target], "problemas": [problem]})
        self.answer(
            "painel/dados",
            f"text(200, JSON.stringify({{...await (await real()).json(), ...{facts}}}))",
        )
        self.answer("entrega/", """text(200, '{"status":"ok"}')""")
        self.look_again()
        said = "n8n:5678 não recebe mensagens: HTTP 404: inactive. 120 esperam,"
        self.wait("#problems", f"{said} próxima tentativa: 18 s.*33 min")
        for words in ("com problema, esperando, 33 min", "22 tentativas, 22 falhas"):
            self.assertIn(words, self.text("#targets"))
        self.assertIn("último sucesso há 35 min", self.text("#targets"))
        for button in ("#problems button", "#targets [value^=pausar]"):
            self.click(button)
            self.wait("#said span", "FORWARD_URL avisado")
            self.click("#said button")
        asked = self.browser.execute_script("return asked.filter(p => /^e/.test(p))")
        verbs = [f"entrega/{verb}?destino=FORWARD_URL" for verb in ("tentar", "pausar")]
        self.assertEqual(verbs, asked)

    def test_what_happened_is_said_in_view_until_it_is_dismissed(self):
        for _ in range(40):
            self.send(b"{}")
        self.fail_with("broken", *range(1, 31))
        self.width(390)
        self.log_in()
        self.wait("#counts .erro b", "30")
        self.click("#counts .erro")
        self.wait("#why", "30")
        self.answer("fila/reenviar", """text(503, "tente de novo mais tarde")""")
        self.browser.execute_script("scrollTo(0, 900)")
        self.click("#sets [value=reenviar]")
        self.wait("#question", "30 mensagens")
        self.click("#yes")
        self.wait("#said span", "Feitas: 0 de 30. Depois: o serviço está com problemas")
        self.assertTrue(self.in_view("#said"))
        self.look_again()
        time.sleep(0.5)
        self.assertTrue(self.in_view("#said"))
        self.click("#said button")
        self.assertFalse(self.find("#said").is_displayed())
        self.click("#rows a")
        self.wait("#one[open] #title", "Mensagem")
        self.answer("fila/30", """text(409, "mensagem já está em processado")""")
        self.click("#verbs [value=processado]")
        self.click("#yes")
        self.wait(
            "#one #said span", "a mensagem mudou"
        )  # above the dialog, not behind it
        self.assertTrue(self.in_view("#said"))

    def test_an_answer_that_never_comes_does_not_end_the_refreshing(self):
        self.log_in()
        self.wait("#counts .zero b", "0")
        self.browser.execute_script(
            "Object.assign(LIMITS, {patience: 300, every: 200})"
        )
        self.answer(
            "painel/dados",
            "asked.length > 3 ? real() : new Promise((_, no) => "
            "options.signal.addEventListener('abort', () => no(options.signal.reason)))",
        )
        self.wait(
            "#link span", "Números velhos, tentando de novo: sem resposta a tempo"
        )
        self.send(b"{}")
        self.wait("#counts .pendente b", "1")
        self.wait("#link span", "^$")

    @long
    def test_old_numbers_are_pale_and_say_of_when_they_are(self):
        self.log_in()
        self.wait("#asof", r"às \d\d:\d\d:\d\d")
        stale = "return document.body.classList.contains('stale')"
        self.assertFalse(self.browser.execute_script(stale))
        self.answer("painel/dados", "new Promise(() => {})")
        self.browser.execute_script("LIMITS.stale = 100")
        self.wait(lambda: str(self.browser.execute_script(stale)), "True")

    def test_waiting_shows_at_once_and_nothing_is_asked_twice(self):
        self.send(b"{}")
        self.fail_with("x", 1)
        self.log_in()
        self.wait("#rows", "erro")
        slow = "(await new Promise(done => setTimeout(done, 700)), real())"
        self.answer("fila", f"/=erro|mot/.test(path) ? {slow} : real()")
        self.click("#counts .erro")
        busy = "return document.body.classList.contains('busy')"
        self.assertTrue(self.browser.execute_script(busy))
        self.click("#counts .erro")
        self.click("#counts [value=processado]")  # reasons of what was asked before
        self.wait(lambda: str(self.browser.execute_script(busy)), "False")
        self.wait("#none", "Nenhuma")
        self.assertEqual("", self.text("#why"))
        asked = self.browser.execute_script(
            "return asked.filter(p => /status=erro/.test(p))"
        )
        self.assertEqual(1, len(asked), asked)

    @long
    def test_what_stands_in_front_is_told_in_words(self):
        self.log_in()
        self.wait("#counts .zero b", "0")
        page = "<html>nginx</html>"
        for answer, words in (
            (
                f"text(502, '{page}', 'text/html')",
                "algo na frente do buffer.py responde 502",
            ),
            (f"text(404, '{page}', 'text/html')", "responde 404"),
            (f"text(200, '{page}', 'text/html')", "quem responde não é o buffer.py"),
            ("""text(503, "x")""", r"o serviço está com problemas \(503\)"),
        ):
            self.answer("painel/dados", answer)
            self.look_again()
            self.wait("#link span", words)

    def test_nothing_moves_under_the_finger(self):
        for _ in range(40):
            self.send(b"{}")
        self.width(390)
        self.log_in()
        self.wait("#rows", "40")
        self.browser.execute_script(
            "document.querySelector('#rows li:nth-child(9)')"
            ".scrollIntoView({block: 'center'})"
        )
        before = self.top("#rows li:nth-child(9)")
        for _ in range(3):
            self.send(b"{}")
        self.fail_with("x", 1)  # a problem more, on top
        self.look_again()
        self.wait("#news", "3 novas")
        self.assertEqual("1 problema", self.text("#verdict"))
        self.assertAlmostEqual(before, self.top("#rows li:nth-child(9)"), delta=1)
        self.assertTrue(self.in_view("#news"))
        self.click("#news")
        self.wait(lambda: str(self.ids()[0]), "43")
        self.assertTrue(self.in_view("#rows li:first-child"))

    @long
    def test_a_customer_is_found_by_number_name_or_text(self):
        for n in range(60):
            body = {"jid": f"55119876500{n:02}@s.whatsapp.net", "nome": f"Zoé {n}"}
            self.send(json.dumps(body).encode(), "/webhook/loja/upsert")
        self.log_in()
        self.wait("#rows", "60")
        for text, expected in (
            ("+55 (11) 98765-0007", [8]),
            ("zoé 41", [42]),
            ("#2", [2, 53, 43, 33, *range(30, 20, -1), 13, 3]),
            ("nobody", []),
        ):
            self.find("#find").clear()
            self.find("#find").send_keys(f"{text}\n")
            if expected:
                self.wait(lambda: str(self.ids()[:1]), re.escape(str(expected[:1])))
                self.assertEqual(expected, self.ids())
            else:
                self.wait("#none", "Nenhuma")

    @long
    def test_a_search_goes_on_in_slices_and_pages(self):
        for n in range(40):
            self.send(b'"needle"')
        self.log_in()
        self.wait("#rows", "40")
        self.answer("fila?busca", "real()")
        self.answer(
            "fila?",
            "/busca=/.test(path) && !/ate=/.test(path) ? "
            """text(200, '{"mensagens":[],"ate":33}') : real()""",
        )
        self.find("#find").send_keys("needle\n")
        self.wait(lambda: str(self.ids()), r"^\[33, .*, 9\]$")
        self.click("#older")
        self.wait(lambda: str(self.ids()), r"^\[8, .*, 1\]$")
        self.click("#newer")
        self.wait(lambda: str(self.ids()), r"^\[33, .*, 9\]$")

    def test_a_reason_is_opened_then_all_of_it_replayed(self):
        for _ in range(9):
            self.send(b"{}")
        for id_ in range(1, 6):
            self.fail_with(f"pedido {7000 + id_} não existe", id_)
        for number, id_ in enumerate(range(6, 10)):
            self.fail_with("abcd"[number], id_)
        self.log_in()
        self.wait("#counts .erro b", "9")
        self.click("#counts .erro")
        self.wait("#why li:first-child", r"5\s+pedido 700\d não existe \(\+4\)")
        self.click("#why .text")
        self.wait(lambda: str(self.ids()), re.escape("[5, 4, 3, 2, 1]"))
        self.assertTrue(self.in_view("#rows li:first-child"))
        self.click("#sets [value=reenviar]")
        self.wait("#question", "5 mensagens")
        self.click("#yes")
        self.wait("#said span", "5 mensagens de volta na fila")
        self.assertEqual(4, list(self.statuses().values()).count("erro"))

    @long
    def test_reasons_are_five_rows_then_more(self):
        for id_ in range(1, 9):
            self.send(b"{}")
            self.fail_with("abcdefgh"[id_ - 1], id_)
        self.width(390)
        self.log_in()
        self.wait("#counts .erro b", "8")
        self.click("#counts .erro")
        self.wait("#morewhy", "mais 3")
        rows = "return document.querySelectorAll('#why li').length"
        self.assertEqual(5, self.browser.execute_script(rows))
        self.click("#morewhy")
        self.assertEqual(8, self.browser.execute_script(rows))

    @long
    def test_sets_of_a_source_and_rows_that_were_chosen(self):
        for id_, source in enumerate("aabbb", 1):
            self.send(b"{}", f"/webhook/{source}")
            self.fail_with("x", id_)
        self.log_in()
        self.wait("#counts .erro b", "5")
        self.click("#counts .erro")
        self.wait(lambda: str(self.ids()), re.escape("[5, 4, 3, 2, 1]"))
        self.click("#rows [value='2']")
        self.click("#rows [value='4']")
        self.wait("#sets", "2 escolhidas")
        self.assertNotIn("Entregar agora", self.text("#sets"))  # they have failed
        self.click("#sets [value=apagar]")
        self.wait("#question", "Apagar: 2 mensagens")
        self.click("#yes")
        self.wait("#said span", "2 mensagens apagadas")
        self.wait(lambda: str(self.ids()), re.escape("[5, 3, 1]"))
        self.click("#all")
        self.click("#sets [value=processado]")
        self.click("#yes")
        self.wait("#said span", "3 mensagens marcadas como processadas")
        self.assertEqual({"processado"}, set(self.statuses().values()))

    def test_delayed_ones_are_told_apart_and_come_now(self):
        for _ in range(3):
            self.send(b"{}")
        self.service.call("POST", "/fila/pegar?limite=2")
        for id_ in (1, 2):
            self.service.call("POST", f"/fila/{id_}/devolver?em=5000")
        self.log_in()
        self.wait("#others", "adiadas: 2")
        self.wait("#rows li:nth-child(2)", "pendente até")
        self.click("#others button:last-child")
        self.wait(lambda: str(self.ids()), re.escape("[2, 1]"))
        self.click("#sets [value=agora]")
        self.wait("#question", "Entregar agora: 2 mensagens")
        self.click("#yes")
        self.wait("#said span", "2 mensagens adiantadas")
        self.wait("#others", "^todas: 3$")

    def test_a_message_has_an_address_and_the_filter_outlives_a_reload(self):
        for n in range(3):
            self.send(b'{"n":%d}' % n)
        self.fail_with("x", 2)
        self.log_in()
        self.wait("#counts .erro b", "1")
        self.click("#counts .erro")
        self.wait(lambda: str(self.ids()), re.escape("[2]"))
        self.browser.refresh()
        self.wait(lambda: str(self.ids()), re.escape("[2]"))
        self.browser.get(f"{self.url}#3")
        self.browser.refresh()
        self.wait("#one[open] #title", "Mensagem 3: pendente")
        self.wait("#payload", '"n": 2')
        self.service.call("POST", "/fila/3/erro", b"why it failed")
        self.look_again()  # what is open is live
        self.wait("#title", "Mensagem 3: erro")
        self.wait("#one #reason", "why it failed")
        self.wait("#tries", r"· erro · why it failed")
        self.click("#close")
        self.wait(lambda: self.browser.current_url, "painel#?$")

    @long
    def test_copy_as_curl_and_download(self):
        body = b'{"a":"it\'s"}'
        self.send(body, "/webhook/loja/upsert")
        self.log_in()
        self.wait("#rows", "loja")
        folder = str(self.service.folder)
        values = {"behavior": "allow", "downloadPath": folder}
        self.browser.execute_cdp_cmd("Browser.setDownloadBehavior", values)
        grant = {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"]}
        self.browser.execute_cdp_cmd("Browser.grantPermissions", grant)
        self.click("#rows a")
        self.wait("#payload", "it's")
        read = "return navigator.clipboard.readText()"
        for button, word in (("#copy", body.decode()), ("#curl", "--data-binary")):
            self.click(button)
            self.wait("#said span", "Copiado")
            self.assertIn(word, self.browser.execute_script(read))
            self.click("#said button")
        told = self.browser.execute_script(read)
        self.assertIn("/webhook/loja/upsert'", told)
        self.assertNotIn(TOKEN, told)
        told = told.replace("$TOKEN", TOKEN)
        subprocess.run(["bash", "-c", told], check=True, capture_output=True)
        sent = json.loads(self.service.call("GET", "/fila/2")[2])
        self.assertEqual(
            ({"a": "it's"}, "loja/upsert"), (sent["payload"], sent["caminho"])
        )
        self.click("#download")
        file = pathlib.Path(folder, "mensagem-1")
        self.wait(lambda: file.read_bytes().decode() if file.exists() else "", "it's")
        self.assertEqual(body, file.read_bytes())

    @long
    def test_media_say_what_they_are(self):
        picture = "/9j/" + "A" * 300_000
        self.send(
            json.dumps({"b": picture, "c": "\u202ex"}, ensure_ascii=False).encode()
        )
        self.send(b"\xff" * 5_000_000)
        self.log_in()
        self.wait("#rows", "1")
        self.click("#rows a[href='#1']")
        self.wait("#payload", r"300.004 caracteres, JPEG, não mostrados")
        shown = self.find("#payload").get_attribute("textContent")
        self.assertLess(len(shown), 500)
        self.assertIn("\\u202ex", shown)  # it does not turn the line round
        self.click("#close")
        self.click("#rows a[href='#2']")
        self.wait("#payload", "(?s)sem texto.*ff ff.*baixe")

    @long
    def test_the_chart_says_its_values_and_lists_a_minute(self):
        for _ in range(3):
            self.send(b"{}")
        self.fail_with("x", 1)
        self.log_in()
        self.wait("#sums", "■ 3 recebidas — 0 processadas ■ 1 erros")
        self.browser.execute_script("touch(59)")
        self.wait("#sums", r"\d\d:\d\d · ■ 3 recebidas")
        self.click("#minute")
        self.wait("#chips", r"\d\d:\d\d")
        self.wait(lambda: str(self.ids()), re.escape("[3, 2, 1]"))
        self.browser.execute_script("touch(5)")
        from selenium.webdriver.common.keys import Keys

        self.find("#at").send_keys(Keys.ENTER)
        self.wait("#none", "Nenhuma")
        for name in ("dia", "semana"):
            self.click(f"#periods [value={name}]")
            self.wait("#periods [aria-pressed=true]", name.capitalize())
            self.wait("#sums", "■ 3 recebidas")

    @long
    def test_rates_and_when_the_queue_will_be_empty(self):
        self.log_in()
        self.wait("#counts .zero b", "0")
        minutes = [[0, 10, 20, 2]] * 60
        waiting = [{"fonte": None, "status": "pendente", "quantidade": 240}]
        for facts, words in (
            ({}, r"10/min entram, 22/min saem · vazia em 20 min · a mais .* há 7 min"),
            (
                {"por_minuto": [[0, 30, 3, 0]] * 60},
                r"30/min entram, 3/min saem · cresce 27",
            ),
        ):
            values = {"por_minuto": minutes, "mensagens": waiting, "nao_resolvida": 420}
            values = json.dumps({**values, **facts})
            script = f"show({{...await ask('painel/dados'), ...{values}}})"
            self.browser.execute_script(script)
            self.assertRegex(self.text("#flow"), words)

    def test_a_new_installation_shows_the_url_for_senders(self):
        self.log_in()
        self.wait("#first", "Dê esta URL aos seus remetentes")
        url = f"{self.url.removesuffix('painel')}webhook?token=SEU_TOKEN"
        self.assertEqual(url, self.text("#url"))
        command = self.text("#tryit").replace("SEU_TOKEN", TOKEN)
        subprocess.run(["bash", "-c", command], check=True, capture_output=True)
        self.look_again()
        self.wait("#rows", "1")
        self.assertFalse(self.find("#first").is_displayed())

    @long
    def test_the_token_is_kept_on_the_device_when_that_is_asked(self):
        self.browser.get(self.url)
        self.browser.execute_script("localStorage.clear(); sessionStorage.clear()")
        self.browser.get(self.url)
        self.click("#remember")
        self.find("#token").send_keys(f"{TOKEN}\n")
        self.wait("#counts .zero b", "0")
        self.browser.execute_script("sessionStorage.clear()")  # as in a new tab
        self.browser.refresh()
        self.wait("#counts .zero b", "0")
        self.click("#leave")
        self.wait("#login", "Token")
        self.assertFalse(self.browser.execute_script("return localStorage.length"))

    @long
    def test_it_fits_from_320_pixels_up_and_at_400_percent(self):
        for n in range(3):
            self.send(b"{}", f"/webhook/{'long' * 30}{n}")
        self.fail_with("reason" * 50, 1, 2)
        over = "return document.documentElement.scrollWidth - innerWidth"
        for width in (320, 390, 768, 1280, 1920):  # 1280 at 400 % are 320
            self.width(width)
            self.log_in()
            self.wait("#counts .erro b", "2")
            self.click("#counts .erro")
            self.wait("#why", "reason")
            self.assertLessEqual(self.browser.execute_script(over), 0, width)
            self.click("#rows a")
            self.wait("#one[open] #title", "Mensagem")
            self.assertLessEqual(self.browser.execute_script(over), 0, width)

    @long
    def test_axe_finds_nothing(self):
        """axe-core, where AXE_CORE names its axe.min.js (npm pack axe-core)."""
        path = os.environ.get("AXE_CORE")
        if not path:
            self.skipTest("AXE_CORE is not set")
        axe = pathlib.Path(path).read_text()
        check = """
            const all = await axe.run({ rules: arguments[0] })
            return all.violations.map(({id, nodes}) => [id, nodes.map(n => n.html)])"""
        for n in range(9):
            self.send(b"{}")
            self.fail_with(f"reason {'abcdefghi'[n]}", n + 1)
        for dark, width in ((False, 1280), (True, 390)):
            feature = {
                "name": "prefers-color-scheme",
                "value": "dark" if dark else "light",
            }
            self.browser.execute_cdp_cmd(
                "Emulation.setEmulatedMedia", {"features": [feature]}
            )
            self.width(width)
            # false in the dark: axe takes the canvas for white
            rules = {"color-contrast": {"enabled": not dark}}
            self.browser.get(self.url)
            self.browser.execute_script(axe)
            self.assertEqual([], self.browser.execute_script(check, rules), "login")
            self.log_in()
            self.wait("#counts .erro b", "9")
            self.browser.execute_script(axe)
            for state, step in (
                ("list", lambda: None),
                ("erro", lambda: self.click("#counts .erro")),
                ("chosen", lambda: self.click("#rows [type=checkbox]")),
                ("bar", lambda: self.browser.execute_script("say('said', 'x', 'bad')")),
                ("message", lambda: self.click("#rows a")),
                ("confirm", lambda: self.click("#verbs [value=apagar]")),
            ):
                step()
                time.sleep(0.5)
                self.assertEqual([], self.browser.execute_script(check, rules), state)
            self.browser.refresh()

    @long
    def test_many_messages_and_reasons(self):
        self.service.stop()
        fill(self.service.db, 200_000)
        with contextlib.closing(sqlite3.connect(self.service.db)) as db, db:
            db.execute(
                "UPDATE fila SET status = 'erro', settled_at = datetime('now'), reason ="
                " 'reason ' || char(97 + id % 26, 97 + id / 26 % 26, 97 + id / 676 % 5)"
                " WHERE id % 20 = 0"
            )
            db.execute("UPDATE fila SET payload = 'Dona Lurdes' WHERE id = 7")
        self.service.start()
        self.url = f"http://127.0.0.1:{self.service.port}/painel"
        self.width(390)
        self.log_in()
        self.wait("#counts .erro b", "10.000")
        began = time.monotonic()
        self.click("#counts .erro")
        self.wait("#morewhy", "mais")
        self.assertLess(time.monotonic() - began, 2)
        self.assertLess(
            self.browser.execute_script(
                "return document.querySelector('#rows').offsetTop"
            ),
            1500,
        )
        self.click("#chips button")
        self.find("#find").send_keys("dona lurdes\n")
        self.wait("#progress", "de #")
        self.wait(lambda: str(self.ids()), re.escape("[7]"), seconds=60)


# The server


class RoundTest(Loop):
    """One transaction for all requests of a round, and answers only after its commit."""

    def burst(self, count=5, **options):
        clients = [self.client(http_post(b"%d" % n, **options)) for n in range(count)]
        self.turn()  # accepts
        return clients

    def codes(self, clients):
        return [int(self.heard(client).split(b" ")[1]) for client in clients]

    def test_a_burst_costs_one_commit(self):
        statements = []
        clients = self.burst(20)
        self.store._db.set_trace_callback(statements.append)
        self.turn()
        self.store._db.set_trace_callback(None)
        self.assertEqual([200] * 20, self.codes(clients))
        self.assertEqual(1, statements.count("COMMIT"))
        self.assertEqual(20, len(self.rows()))

    def test_all_that_wait_are_accepted_in_one_round(self):
        self.burst(50)
        self.assertEqual(50, len(self.server.channels()))

    def test_no_answer_leaves_before_the_commit(self):
        clients, early = self.burst(), []

        def watch(statement):
            if statement == "COMMIT":
                early.extend(self.heard(client) for client in clients)

        self.store._db.set_trace_callback(watch)
        self.turn()
        self.assertEqual([b""] * 5, early)
        self.assertEqual([200] * 5, self.codes(clients))

    def test_when_the_commit_fails_all_of_the_round_is_503(self):
        clients = self.burst()
        good = self.store._db
        self.store._db = Faulty(good, "COMMIT", "database or disk is full")
        self.turn()
        self.store._db = good
        self.assertEqual([503] * 5, self.codes(clients))
        self.assertEqual([], self.rows())

    def test_when_sqlite_rolls_back_in_the_middle_all_of_the_round_is_503(self):
        clients = self.burst()
        good = self.store._db
        self.store._db = Faulty(good, "(b'2',", rolls_back=True)
        self.turn()
        self.store._db = good
        self.assertEqual([503] * 5, self.codes(clients))
        self.assertEqual([], self.rows())

    def test_whatever_depends_on_the_commit_is_503_when_it_fails(self):
        for _ in range(2):
            self.store.webhook(b"{}")
        self.store.erro([2])
        asked = [
            self.client(
                f"{line} HTTP/1.1\r\nHost: x\r\nX-Token: {TOKEN}\r\n\r\n".encode()
            )
            for line in (
                *("DELETE /fila/1", "POST /fila/1/processado", "POST /fila/2/devolver"),
                *("POST /fila/99/erro", "GET /fila", "GET /fila/99", "GET /health"),
                "POST /fila/pegar?espera=60",
            )
        ]
        self.turn()
        good, self.store._db = self.store._db, Faulty(self.store._db, "COMMIT")
        self.turn()
        self.store._db = good
        self.assertEqual([503] * len(asked), self.codes(asked))
        self.assertEqual({}, self.server.rounds.parked)
        self.assertEqual(["pendente", "erro"], [row["status"] for row in self.rows()])

    def test_a_refusal_stays_one_when_the_commit_fails(self):
        refused = self.client(http_post(token="wrong"))
        clients = self.burst(2)
        good = self.store._db
        self.store._db = Faulty(good, "COMMIT")
        self.turn()
        self.store._db = good
        self.assertEqual([401, 503, 503], self.codes([refused, *clients]))

    def test_a_request_that_fails_alone_spoils_no_neighbour(self):
        clients = self.burst()
        good = self.store._db
        self.store._db = Faulty(good, "(b'2',")
        self.turn()
        self.store._db = good
        self.assertEqual([200, 200, 503, 200, 200], self.codes(clients))
        self.assertEqual(["0", "1", "3", "4"], [row["payload"] for row in self.rows()])

    def test_pipelined_requests_are_answered_in_their_order(self):
        claim = http_post(b"", path="/fila/pegar")
        answer = self.ask(http_post(b"1") + claim + http_post(b"2") + claim)
        self.assertEqual(4, answer.count(b"HTTP/1.1 200 OK"))
        self.assertLess(answer.index(b'"payload":1'), answer.index(b'"payload":2'))

    def test_a_client_that_hung_up_is_given_nothing(self):
        self.store.webhook(b"{}")
        client = self.client(http_post(b"", path="/fila/pegar"))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        client.close()
        self.turn(3)
        self.assertEqual("pendente", self.rows()[0]["status"])


class HttpTest(Loop):
    settings = (("MAX_BODY", "1000"), ("REQUEST_TIMEOUT", "5"))

    def status(self, data):
        return int(self.ask(data).split(b" ")[1])

    def test_expect_without_a_body_is_answered_and_the_next_request_untouched(self):
        head = b"GET /health HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\n\r\n"
        client = self.client(head)
        self.turn(3)
        first = self.heard(client)
        self.assertTrue(first.startswith(b"HTTP/1.1 200 "), first)
        client.sendall(http_post(b"[1]"))
        self.turn(3)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 200 OK"))
        self.assertEqual(1, len(self.rows()))

    def test_expect_with_a_body(self):
        client = self.client(http_post(b"[1]", ["Expect: 100-continue"])[:-3])
        self.turn(3)
        self.assertEqual(b"HTTP/1.1 100 Continue\r\n\r\n", self.heard(client))
        client.sendall(b"[1]")
        self.turn(3)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 200 OK"))

    def test_expect_with_too_long_a_body_is_413_at_once(self):
        data = http_post(b"1" * 1001, ["Expect: 100-continue"])
        self.assertEqual(413, self.status(data[:-1001]))

    def test_a_body_of_just_the_limit(self):
        self.assertEqual(200, self.status(http_post(b"1" * 1000)))
        self.assertEqual(413, self.status(http_post(b"1" * 1001)))

    def chunked(self, *chunks):
        head = http_post(b"", ["Transfer-Encoding: chunked"])
        head = head.replace(b"Content-Length: 0\r\n", b"")
        parts = [b"%x\r\n%s\r\n" % (len(chunk), chunk) for chunk in chunks]
        return head + b"".join([*parts, b"0\r\n\r\n"])

    def test_a_chunked_body_of_just_the_limit(self):
        for chunks in ([b"1" * 1000], [b"1"] * 1000):
            self.assertEqual(200, self.status(self.chunked(*chunks)))
            self.assertEqual(413, self.status(self.chunked(*chunks, b"1")))
        self.assertEqual(2, len(self.rows()))

    def test_who_sends_too_much_still_sees_the_413(self):
        """Closing with input unread would reset the connection."""
        client = self.client(http_post(b"1" * 1_000_000)[:500_000])
        self.turn(3)
        client.sendall(b"1" * 500_000)
        self.turn(20)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 413 "))
        self.assertIsNone(self.heard(client))
        client.shutdown(socket.SHUT_WR)
        self.turn(2)
        self.assertEqual([], self.server.channels())

    def test_refusals_of_the_parser_are_one_line_of_text(self):
        answer = self.ask(b"POST /webhook HTTP/1.1\r\nBad Header: x\r\n\r\n")
        head, _, body = answer.partition(b"\r\n\r\n")
        self.assertIn(b"Content-Type: text/plain; charset=utf-8", head)
        self.assertIn(b"Connection: close", head)
        self.assertEqual("requisição inválida\n", body.decode())

    def check(self, seconds):
        """The look that a channel is given so long after it began what it does."""
        [channel] = self.server.channels()
        channel.check(channel.since + seconds, 5)

    def test_a_request_has_a_deadline_from_its_first_byte_to_its_last(self):
        client = self.client(http_post(b"[1]")[:-1])
        self.turn(2)
        self.check(4.9)
        self.turn(2)
        self.assertEqual(b"", self.heard(client))
        self.check(5)
        self.turn(2)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 408 "))
        self.assertEqual([], self.rows())

    def test_the_deadline_waits_for_requests_that_wait_for_us(self):
        client = self.client(http_post(b"1") + http_post(b"2") + http_post(b"3")[:-1])
        self.turn()
        self.server.map.turn(1)
        self.check(6)
        self.turn(4)
        self.check(6)
        self.turn(2)
        codes = re.findall(rb"HTTP/1.1 (...)", self.heard(client))
        self.assertEqual([b"200", b"200", b"408"], codes)
        self.assertEqual(["1", "2"], [row["payload"] for row in self.rows()])

    def test_raw_utf8_in_the_target_is_kept(self):
        data = http_post(path="/webhook/josé?nome=josé")
        self.assertEqual(200, self.status(data))
        [item] = self.claim()
        self.assertEqual(("josé", {"nome": "josé"}), (item["caminho"], item["query"]))

    def test_an_answer_to_head_has_no_body(self):
        answer = self.ask(b"HEAD /health HTTP/1.1\r\nHost: x\r\n\r\n")
        self.assertTrue(answer.startswith(b"HTTP/1.1 200 "), answer)
        self.assertTrue(answer.endswith(b"\r\n\r\n"), answer)

    def test_it_does_not_tell_what_it_is(self):
        self.assertNotIn(b"Server:", self.ask(http_post()))

    def test_chunks_are_refused_as_soon_as_they_are_too_many(self):
        head = self.chunked(b"1" * 1001).removesuffix(b"0\r\n\r\n")
        self.assertEqual(413, self.status(head))

    def test_who_closes_after_the_answer_is_told_so(self):
        answer = self.ask(http_post(headers=["Connection: close"]))
        self.assertIn(b"\r\nConnection: close\r\n", answer)

    def test_a_closing_answer_says_so_once(self):
        data = b"POST /webhook HTTP/1.0\r\nConnection: keep-alive\r\nBad\r\n\r\n"
        self.assertEqual(1, self.ask(data).count(b"Connection:"))

    def test_a_doubtful_transfer_coding_is_refused(self):
        for coding in ("", "chunked, chunked", "identity", "xchunked", "chunked\0"):
            head = http_post(b"", [f"Transfer-Encoding: {coding}"])
            head = head.replace(b"Content-Length: 0\r\n", b"")
            self.assertIn(
                self.status(head + b"2\r\n{}\r\n0\r\n\r\n"), (400, 501), coding
            )
        self.assertEqual([], self.rows())

    def test_a_disk_too_full_for_a_big_body_on_its_way_is_503(self):
        self.open(MAX_BODY="4M")
        with mock.patch("tempfile.TemporaryFile", side_effect=OSError("no space")):
            client = self.client(http_post(b"1" * 600_000))
            self.turn(15)
        answer = self.heard(client)
        self.assertTrue(answer.startswith(b"HTTP/1.1 503 "), answer)
        self.assertIn(b"Retry-After", answer)
        client = self.client(http_post(b"1" * 600_000))
        self.turn(15)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 200 "))

    def test_a_refusal_of_the_parser_is_logged_with_its_path(self):
        self.ask(http_post(b"1" * 1001))
        self.assertRegex(self.logged(), "413 .*'/webhook' from 127.0.0.1")

    def test_a_trickle_of_bytes_does_not_put_off_the_deadline(self):
        client = self.client(http_post(b"[1]")[:-3])
        self.turn(2)
        for _ in range(2):
            client.sendall(b"1")
            self.turn()
            self.check(4.9)
        self.check(5)
        self.turn(2)
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 408 "))

    def test_an_idle_connection_is_closed_after_a_while(self):
        client = self.client(http_post())
        self.turn(3)
        self.heard(client)
        self.check(119)
        self.assertEqual(b"", self.heard(client))
        self.check(120)
        self.assertIsNone(self.heard(client))

    def test_a_reply_over_16_mib_waits_for_its_reader_alone(self):
        self.open(MAX_BODY="20M", MAX_BATCH_BYTES="100M")
        for _ in range(2):
            self.store.webhook(b"1" * (16 << 20))
        reader = self.client(http_post(b"", path="/fila/pegar"))
        self.turn(3)
        self.assertEqual(200, self.status(http_post()))
        total = 0
        while total < 32 << 20:
            self.turn()
            total += len(self.heard(reader))
        self.assertEqual(200, self.status(http_post()))


class HeadTest(Loop):
    """What a head has to look like (RFC 9112), and that its bytes cost the same."""

    def status(self, *lines):
        return self.first(
            "".join(f"{line}\r\n" for line in (*lines, "")).encode("latin-1")
        )

    def test_one_host_is_needed_since_http_1_1(self):
        get = "GET /health HTTP/1."
        self.assertEqual(200, self.status(get + "1", "Host: x"))
        self.assertEqual(200, self.status(get + "1", "Host:"))
        self.assertEqual(200, self.status(get + "0"))
        for hosts in ([], ["Host: x", "Host: x"], ["Host: x", "HOST: y"]):
            self.assertEqual(400, self.status(get + "1", *hosts), hosts)
        self.assertEqual(400, self.status(get + "0", "Host: x", "Host: y"))

    def test_lines_that_end_in_lf_alone_are_400_at_once(self):
        head = f"GET /health HTTP/1.1\nHost: x\nX-Token: {TOKEN}\n\n".encode()
        for cut in (len(head), len(head) - 1, 25, 21):
            self.assertEqual(400, self.first(head[:cut]), cut)

    def test_so_is_a_tls_hello(self):
        hello = b"\x16\x03\x01\x02\0\x01\0\x01\xfc\x03\x03"
        self.assertEqual(400, self.first(hello))

    def test_a_head_may_come_byte_by_byte(self):
        client = self.client()
        for byte in http_post(b"[1]"):
            client.sendall(bytes([byte]))
            self.turn()
        self.assertTrue(self.heard(client).startswith(b"HTTP/1.1 200 "))

    def test_blank_lines_before_a_request_begin_none(self):
        client = self.client(b"\r\n\r\n")
        self.turn(2)
        [channel] = self.server.channels()
        self.assertIsNone(channel.request)
        client.sendall(b"\r\n" + http_post() + b"\r\n")
        self.turn(3)
        self.assertEqual(1, self.heard(client).count(b"HTTP/1.1"))

    def test_targets(self):
        good = (
            "/health|/health?x=1|//health|/health#x|/%68ealth|http://x/health"
            "|HTTP://x:80/health|https://[::1]:8080/health?x"
        )
        bad = (
            "|*|health|x:80|a://x/health|http:/health|http://[::1/health|http://x y/"
            "|http://a@b/health|http:///health|\t/health|/hea\tlth"
        )
        for target in good.split("|"):
            self.assertEqual(
                200, self.status(f"GET {target} HTTP/1.1", "Host: x"), target
            )
        for target in bad.split("|"):
            self.assertEqual(
                400, self.status(f"GET {target} HTTP/1.1", "Host: x"), target
            )

    def test_repeated_fields_are_one_list(self):
        self.ask(http_post(headers=["X-Two: a", "x-two: b,c", "X-One: d", "X_Two: e"]))
        headers = json.loads(self.rows()[0]["headers"])
        self.assertEqual(("a, b,c", "d"), (headers["x-two"], headers["x-one"]))

    def test_a_connection_says_whether_it_goes_on(self):
        for version, said, answered in (
            (1, "", None),
            (1, "keep-alive, Close", b"close"),
            (0, "", b"close"),
            (0, "Keep-Alive", b"keep-alive"),
            (0, "keep-alive, close", b"close"),
        ):
            head = (
                f"GET /health HTTP/1.{version}\r\nHost: x\r\nConnection: {said}\r\n\r\n"
            )
            found = re.search(rb"\r\nConnection: (.*)\r\n", self.ask(head.encode()))
            self.assertEqual(answered, found and found[1], (version, said))

    # Each kind of byte in each place where a stranger can put many of them.
    FILLS = (
        *"0aA \t,;:/?&=%.[]{}\"'\\@#_-+*\xe9",
        "%41",
        "a=b&",
        "a,",
        ", ",
        "a: b\r\n",
    )
    PLACES = (
        "GET {} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /{} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET a://{} x\r\n\r\n",
        "GET http://{}/ HTTP/1.1\r\nHost: x\r\n\r\n",
        "POST /webhook/{}?{} HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET /fila?token={} HTTP/1.1\r\nHost: x\r\n\r\n",
        "{} / HTTP/1.1\r\nHost: x\r\n\r\n",
        "GET / {}\r\nHost: x\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\n{}\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA:{}b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA: a{}b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: x\r\nA: b{}\r\n\r\n",
        *(
            f"GET / HTTP/1.1\r\nHost: x\r\n{name}: {{}}\r\n\r\n"
            for name in ("Transfer-Encoding", "Content-Encoding", "Content-Length")
        ),
        "GET / HTTP/1.1\r\nHost: x\r\nConnection: a{}b\r\n\r\n",
        "GET / HTTP/1.1\r\nHost: {}\r\n\r\n",
        "{}",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n{}",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n8;{}",
        "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\na: {}",
    )

    def took(self, place, fill, size):
        """CPU seconds of the reader, and of an App that refuses, for so many bytes."""
        many = fill * ((size - 300) // len(fill) // place.count("{}"))
        data = place.replace("{}", many).encode("latin-1")
        best = math.inf
        for _ in range(3):
            incoming = buffer.Incoming(self.app, "127.0.0.1")
            began = time.process_time()
            with contextlib.suppress(buffer.Refusal):
                incoming.received(data)
                if incoming.is_complete:
                    self.app.respond(incoming.environ)
            best = min(best, time.process_time() - began)
        return best

    def test_time_is_linear_in_bytes(self):
        """64 KiB may cost six times what 16 KiB do; a square would be sixteen."""
        for place, fill in itertools.product(self.PLACES, self.FILLS):
            least, most = (self.took(place, fill, n << 10) for n in (16, 64))
            if most > 0.004:  # below this the clock decides
                self.assertLess(most, 6 * least, (place, fill))
                self.assertLess(most, 0.05, (place, fill))


class StrangersTest(Loop):
    """Who has no credential costs nothing."""

    settings = (
        ("MAX_BODY", "1M"),
        ("MAX_UNVERIFIED", "1M"),
        ("SECRET_GITHUB", "s" * 16),
    )
    SIGNED = "POST /webhook/github HTTP/1.1\r\nHost: x\r\n"

    def begun(self, head, sent, length=900_000):
        return self.client(
            f"{head}Content-Length: {length}\r\n\r\n".encode() + b"x" * sent
        )

    def said(self, client):
        answer = self.heard(client)
        return answer and int(answer.split(b" ")[1])

    def test_what_may_not_come_is_refused_by_its_head(self):
        for line, token, status in (
            ("POST /nowhere", TOKEN, 404),
            ("DELETE /webhook", TOKEN, 405),
            ("POST /webhook", "wrong", 401),
            ("POST /fila/pegar", "wrong", 401),
        ):
            head = f"{line} HTTP/1.1\r\nHost: x\r\nX-Token: {token}\r\n"
            for more in (
                "Content-Length: 9\r\n\r\n",
                "Transfer-Encoding: chunked\r\n\r\n",
            ):
                self.assertEqual(status, self.first((head + more).encode()))

    def test_who_waits_for_100_gets_the_refusal_instead(self):
        head = http_post(b"12", ["Expect: 100-continue"], token="wrong")[:-2]
        self.assertTrue(self.ask(head).startswith(b"HTTP/1.1 401 "))

    def test_unknown_senders_share_a_bound_and_the_first_to_begin_gives_way(self):
        first = self.begun(self.SIGNED, 600_000)
        self.turn(15)
        self.assertEqual(b"", self.heard(first))
        second = self.begun(self.SIGNED, 600_000)
        self.turn(15)
        answer = self.heard(first)
        self.assertTrue(answer.startswith(b"HTTP/1.1 503 "), answer)
        self.assertIn(b"Retry-After", answer)
        self.assertEqual(b"", self.heard(second))
        self.assertLess(self.server.holding, 1 << 20)

    def test_so_do_heads_that_do_not_end(self):
        clients = [self.client(b"GET /" + b"x" * 60_000) for _ in range(30)]
        self.turn(6)
        gone = [
            c for c in clients if (self.heard(c) or b"").startswith(b"HTTP/1.1 503 ")
        ]
        self.assertIn(len(gone), range(10, 20))
        self.assertLess(self.server.holding, (1 << 20) + 65536)

    def test_known_senders_do_not_count(self):
        clients = [
            self.begun(
                f"POST /webhook HTTP/1.1\r\nHost: x\r\nX-Token: {TOKEN}\r\n", 800_000
            )
            for _ in range(3)
        ]
        self.turn(20)
        self.assertEqual(0, self.server.holding)
        for client in clients:
            client.sendall(b"x" * 100_000)
        self.turn(20)
        self.assertEqual([200] * 3, [self.said(client) for client in clients])

    def test_what_they_held_is_given_back(self):
        clients = [self.begun(self.SIGNED, 300_000, 310_000) for _ in range(3)]
        self.turn(15)
        self.assertEqual(900_000, self.server.holding)
        clients[0].close()
        clients[1].sendall(b"x" * 10_000)
        self.turn(20)
        self.assertEqual((401, 300_000), (self.said(clients[1]), self.server.holding))
        clients[2].close()
        self.turn(3)
        self.assertEqual((0, {}), (self.server.holding, self.server.held))

    def test_their_bodies_never_touch_the_disk(self):
        with mock.patch("tempfile.TemporaryFile", side_effect=OSError("no space")):
            client = self.begun(self.SIGNED, 900_000)
            self.turn(20)
        self.assertEqual(401, self.said(client))

    def test_a_request_is_taken_up_when_the_answer_before_it_has_left(self):
        client = self.client()
        self.turn()
        [channel] = self.server.channels()
        channel.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        client.sendall(b"GET /painel HTTP/1.1\r\nHost: x\r\n\r\n" * 300)
        self.turn(20)
        self.assertTrue(channel.out)
        self.assertLess(sum(map(len, channel.out)), 2 * len(buffer.PAGE.encode()))
        answers = b""
        while part := self.heard(client):
            answers += part
            self.turn(2)
        self.assertEqual(300, answers.count(b"HTTP/1.1 200 "))

    def crowd(self, limit=10):
        self.server.limit = len(self.server.map) + limit
        return self.server

    def test_at_the_limit_those_without_progress_go_first(self):
        """Half a head, blank lines, half a body: none of it is progress."""
        server = self.crowd(6)
        starts = (b"GET / HT", b"\r\n", http_post(b"12")[:-1], b"", b"\r\n\r\n")
        slow = [self.client(start) for start in starts]
        self.turn(2)
        busy = self.client(http_post())
        self.turn(3)
        self.assertEqual(200, self.said(busy))
        for client, start in zip(slow, starts):
            client.sendall(b"\r\n" if start[:1] in (b"", b"\r") else b"1"[: not start])
        self.turn(2)
        others = [self.client(http_post()) for _ in range(5)]
        self.turn(4)
        self.assertEqual([200] * 5, [self.said(client) for client in others])
        self.assertEqual([None] * 5, [self.heard(client) for client in slow])
        busy.sendall(http_post())
        self.turn(2)
        self.assertEqual(200, self.said(busy))
        self.assertLessEqual(len(server.map), server.limit)

    def test_the_log_and_the_numbers_say_so(self):
        self.crowd(3)
        for _ in range(9):
            self.client()
        self.turn(3)
        self.assertIn("at the limit of", self.logged())
        metrics = self.call("GET", "/metrics")[1]
        self.assertIn("buffer_connections 3\n", metrics)
        self.assertIn('buffer_refused_total{reason="connections"} 6\n', metrics)

    def test_without_descriptors_room_is_made_as_well(self):
        self.crowd()
        slow = [self.client(b"GET") for _ in range(3)]
        self.turn(2)
        [listener] = self.server.listeners
        with mock.patch.object(
            listener, "accept", side_effect=OSError(errno.EMFILE, "")
        ):
            self.client()
            self.turn()
        self.turn(2)
        self.assertEqual(1, [self.heard(client) for client in slow].count(None))
        self.assertEqual(200, self.first(http_post()))


class FairRoundsTest(Loop):
    """Senders come first."""

    def test_claims_of_a_round_have_a_budget_and_go_on_in_the_next(self):
        for n in range(6):
            self.store.webhook(b"%d" % n)
        self.server.rounds.BUDGET = 0
        claims = [
            self.client(http_post(b"", path="/fila/pegar?limite=1")) for _ in range(3)
        ]
        self.turn()
        sender = self.client(http_post())
        self.turn()
        self.server.map.turn(0.05)
        self.server.rounds.answer()
        done = [client for client in claims if self.heard(client)]
        self.assertIn(len(done), (1, 2))
        self.assertTrue(self.heard(sender).startswith(b"HTTP/1.1 200 "))
        self.turn(4)
        self.assertEqual(3, len(done) + sum(bool(self.heard(c)) for c in claims))

    def test_a_webhook_does_not_wait_for_what_came_before_it(self):
        order, respond = [], self.app.respond
        clients = [
            self.client(http_post(b"", path="/fila/pegar")),
            self.client(http_post(b"1" * 200_000)),
            self.client(http_post(b"2")),
        ]
        self.turn(1)

        def watched(environ):
            order.append((environ["PATH_INFO"], environ.get("CONTENT_LENGTH")))
            return respond(environ)

        with mock.patch.object(self.app, "respond", watched):
            for _ in range(5):
                self.server.map.turn(0.05)
            self.server.rounds.answer()
        self.assertEqual(("/webhook", "1"), order[0])
        self.assertEqual(3, len(order))
        self.turn(2)
        self.assertTrue(all(self.heard(client) for client in clients))

    def test_those_that_wait_share_the_budget(self):
        waiting = [
            self.client(http_post(b"", path="/fila/pegar?espera=60&limite=1"))
            for _ in range(3)
        ]
        self.turn(4)
        self.assertEqual(1, len(self.server.rounds.parked))
        self.server.rounds.BUDGET = 0
        self.ask(http_post())
        for n in range(3):
            self.store.webhook(b"%d" % n)
        self.ask(http_post())
        self.turn(6)
        self.assertTrue(all(self.heard(client) for client in waiting))


class ConnectionTroubleTest(Loop):
    def test_its_log_line_does_not_show_what_was_sent(self):
        client = self.client()
        self.turn()
        [channel] = self.server.channels()
        channel.received = mock.Mock(side_effect=ValueError("hidden"))
        client.sendall(b"x")
        self.turn()
        self.assertIsNone(self.heard(client))
        self.assertIn("a connection is closed: ValueError at", self.logged())
        self.assertNotIn("hidden", self.logged())


class StopTest(Loop):
    def test_answers_close_their_connection_and_silent_ones_are_closed(self):
        silent = self.client()
        busy = self.client(http_post()[:-1])
        self.turn(2)
        queued = self.client(http_post())
        busy.sendall(b"}")
        self.server.QUIET = 0.1
        self.server.drain()
        self.assertIsNone(self.heard(silent))
        for client in (busy, queued):
            answer = self.heard(client)
            self.assertTrue(answer.startswith(b"HTTP/1.1 200 OK"), answer)
            self.assertIn(b"Connection: close", answer)
            self.assertIsNone(self.heard(client))
        self.assertEqual(2, len(self.rows()))
        with self.assertRaises(ConnectionRefusedError):
            self.client()

    def test_it_waits_for_what_has_begun(self):
        busy = self.client(http_post(b"12")[:-1])
        self.turn(2)
        turned, round_ = [], self.server.round

        def slow(timeout):
            turned.append(timeout)
            if len(turned) == 20:  # a second later
                busy.sendall(b"2")
            round_(timeout)

        self.server.round = slow
        self.server.drain()
        self.assertTrue(self.heard(busy).startswith(b"HTTP/1.1 200"))

    def test_it_waits_only_so_long(self):
        self.client(http_post()[:-1])
        self.turn(2)
        self.server.GRACE = 0.2
        self.server.drain()
        self.assertEqual([], self.rows())


# Starting and stopping, with real processes


def all_settings():
    for cls in (buffer.Settings, buffer.SourceSettings):
        for _, name, facts in buffer.settings_of(cls):
            yield name, facts["default"]


def run(*arguments, python=sys.executable, **environ):
    """Runs buffer.py to its end."""
    kept = {k: v for k, v in os.environ.items() if k != "TOKEN"}
    return subprocess.run(
        [python, str(HERE / "buffer.py"), *arguments],
        env={**kept, "ADDR": "127.0.0.1:0", **{k: str(v) for k, v in environ.items()}},
        check=False,
        capture_output=True,
        text=True,
        timeout=30,
        cwd=environ.get("HOME"),
    )


class StartTest(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.db = self.folder / "b.sqlite"

    def refused(self, status, pattern, **environ):
        done = run(
            **{"HOME": self.folder, "DB_PATH": self.db, "TOKEN": TOKEN, **environ}
        )
        self.assertEqual(status, done.returncode, done.stderr)
        self.assertRegex(done.stderr, pattern)
        self.assertEqual(1, done.stderr.count("\n"), done.stderr)
        return done

    def test_without_a_token(self):
        self.refused(
            2, r"TOKEN is missing. Try: TOKEN=\S{43} python buffer.py", TOKEN=""
        )

    def test_with_a_bad_setting(self):
        self.refused(2, "MAX_BODY='x'", MAX_BODY="x")

    def test_with_a_file_that_is_no_database(self):
        self.db.write_text("not a database" * 100)
        self.refused(1, "DB_PATH=.*not a database")

    def test_with_an_address_that_cannot_be(self):
        self.refused(1, "cannot listen on ADDR", ADDR="a..b:80")
        self.db.write_text("precious")
        self.refused(
            1, "something else than a socket", ADDR=f"unix:{self.db}", DB_PATH="x"
        )
        self.assertEqual("precious", self.db.read_text())

    def test_with_a_port_in_use(self):
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            self.refused(1, f"ADDR.*{port}.*in use", ADDR=f"127.0.0.1:{port}")

    def test_without_waitress(self):
        code = "import sys, runpy; sys.modules['waitress'] = None; sys.argv = ['buffer.py']"
        code += f"; runpy.run_path({str(HERE / 'buffer.py')!r}, run_name='__main__')"
        done = subprocess.run(
            [sys.executable, "-c", code], check=False, capture_output=True, text=True
        )
        self.assertEqual(1, done.returncode)
        self.assertIn("pip install -U waitress", done.stderr)
        self.assertEqual(1, done.stderr.count("\n"), done.stderr)

    def test_with_a_python_that_is_too_old(self):
        head = "import sys, runpy; sys.version_info = (3, 9, 1, 'final', 0)"
        code = (
            f"{head}; runpy.run_path({str(HERE / 'buffer.py')!r}, run_name='__main__')"
        )
        commands = [[sys.executable, "-c", code]]
        for python in pathlib.Path.home().glob(".pyenv/versions/3.[6789].*/bin/python"):
            commands.append([str(python), str(HERE / "buffer.py")])  # and real ones
        for command in commands:
            done = subprocess.run(
                command, check=False, stderr=subprocess.PIPE, text=True
            )
            self.assertEqual(1, done.returncode)
            self.assertRegex(done.stderr, r"\Abuffer.py needs Python 3.10, .*\n\Z")

    def test_with_a_waitress_that_is_too_old(self):
        code = "import sys, runpy, waitress.server; del waitress.server.BaseWSGIServer"
        code += "; sys.argv = ['buffer.py']"
        code += f"; runpy.run_path({str(HERE / 'buffer.py')!r}, run_name='__main__')"
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        self.assertRegex(done.stderr, r"\Abuffer.py: waitress 2.1.2 or newer.*\n\Z")

    def test_sockets_of_another_process_or_none_are_not_taken(self):
        for pid, fds in (("1", "1"), ("{pid}", "0"), ("{pid}", "x")):
            launch = (
                "import os, sys; os.environ.update(LISTEN_FDS=sys.argv[1],"
                " LISTEN_PID=sys.argv[2].format(pid=os.getpid()));"
                "os.execv(sys.argv[3], sys.argv[3:])"
            )
            with Service(prefix=(sys.executable, "-c", launch, fds, pid)) as service:
                self.assertEqual(200, service.call("GET", "/health")[0])

    def test_help_shows_every_setting_with_its_default(self):
        text = run("--help").stdout
        for name, default in all_settings():
            self.assertIn(f"{name}, default {default or 'none'}\n", text)

    def test_version(self):
        self.assertEqual(buffer.__version__ + "\n", run("--version").stdout)

    def test_a_short_token_is_warned_about(self):
        with Service(TOKEN="short") as service:
            service.logged("WARNING.*shorter than 16 characters")

    def test_the_script_names_what_it_needs(self):
        """PEP 723: uv run buffer.py and pipx run buffer.py bring waitress along."""
        text = (HERE / "buffer.py").read_text()
        block = re.search(
            r"(?m)^# /// script$\s(?P<content>(^#(| .*)$\s)+)^# ///$", text
        )
        self.assertIn('requires-python = ">=3.10"', block["content"])
        self.assertIn('"waitress>=2.1.2"', block["content"])


class StatusTest(Case):
    """python buffer.py status: reads the file, and needs no token."""

    def status(self, path=None):
        return run("status", DB_PATH=path or self.configured.db_path)

    def test_while_the_service_runs_and_after(self):
        for n in range(3):
            self.send(b"%d" % n)
        self.claim("?limite=1")
        self.settle(1, "processado")
        for _ in range(2):
            done = self.status()
            self.assertEqual((0, ""), (done.returncode, done.stderr))
            self.assertRegex(done.stdout, r"source +pendente +processando +processado")
            self.assertRegex(done.stdout, r"(?m)^- +2 +0 +1 +0$")
            self.assertRegex(done.stdout, r"(?m)^settled processado +1$")
            self.assertRegex(done.stdout, r"(?m)^database +[0-9.]+ MiB$")
            self.store.close()

    def test_it_changes_nothing(self):
        self.send()
        self.store.close()
        before = pathlib.Path(self.configured.db_path).read_bytes()
        self.status()
        self.assertEqual(before, pathlib.Path(self.configured.db_path).read_bytes())

    def test_a_file_that_is_not_there_is_one_line_and_is_not_made(self):
        done = self.status(self.folder / "none" / "b.sqlite")
        self.assertEqual(
            (1, "", 1), (done.returncode, done.stdout, done.stderr.count("\n"))
        )
        self.assertIn("none/b.sqlite", done.stderr)
        self.assertFalse((self.folder / "none").exists())

    def test_a_file_without_counters_is_one_line(self):
        path = self.folder / "old.sqlite"
        with contextlib.closing(sqlite3.connect(path)) as db:
            db.executescript(GoProgramsFileTest.OLD)
        done = self.status(path)
        self.assertEqual(1, done.returncode)
        self.assertRegex(done.stderr, r"\Abuffer.py: .*no buffer.py that counts.*\n\Z")

    def test_who_reads_only_its_start_sees_no_error(self):
        reads, writes = os.pipe()
        os.close(reads)
        env = {**os.environ, "DB_PATH": self.configured.db_path}
        done = subprocess.run(
            [sys.executable, str(HERE / "buffer.py"), "status"],
            env=env,
            stdout=writes,
            stderr=subprocess.PIPE,
            check=False,
        )
        os.close(writes)
        self.assertEqual((0, b""), (done.returncode, done.stderr))

    def test_what_is_no_database_is_one_line(self):
        path = self.folder / "text"
        path.write_text("not a database" * 100)
        self.assertRegex(self.status(path).stderr, r"\Abuffer.py: .*not a database\n\Z")

    def test_the_commands_have_help(self):
        for command in ("status", "backup"):
            done = run(command, "--help")
            self.assertEqual(0, done.returncode)
            self.assertIn(f"buffer.py {command}", done.stdout)
            self.assertIn(command, run("--help").stdout)


class BackupTest(Case):
    """python buffer.py backup FILE"""

    def setUp(self):
        super().setUp()
        self.copy = self.folder / "copies" / "b.sqlite"
        self.copy.parent.mkdir()

    def backup(self, path=None, **environ):
        environ = {"DB_PATH": self.configured.db_path, **environ}
        return run("backup", str(path or self.copy), **environ)

    def assertNone(self, done, pattern):
        """It has failed in one line and left nothing behind."""
        self.assertEqual((1, ""), (done.returncode, done.stdout))
        self.assertRegex(done.stderr, rf"\Abuffer.py: .*{pattern}.*\n\Z")
        self.assertEqual([], os.listdir(self.copy.parent))

    def test_the_copy_is_one_file_with_what_was_in_the_wal(self):
        self.send(b"first")
        self.assertEqual(0, os.path.getsize(self.configured.db_path) // (1 << 20))
        done = self.backup()
        self.assertEqual((0, ""), (done.returncode, done.stderr))
        self.assertEqual(["b.sqlite"], os.listdir(self.copy.parent))
        self.assertEqual(0o600, stat.S_IMODE(self.copy.stat().st_mode))
        self.assertEqual(0, run("status", DB_PATH=self.copy).returncode)
        self.assertEqual(["b.sqlite"], os.listdir(self.copy.parent))
        self.open(DB_PATH=str(self.copy))
        self.assertEqual(["first"], [item["payload"] for item in self.claim()])

    def test_nothing_is_overwritten(self):
        self.copy.write_text("precious")
        done = self.backup()
        self.assertEqual(1, done.returncode)
        self.assertIn("is there already", done.stderr)
        self.assertEqual("precious", self.copy.read_text())
        self.assertEqual(["b.sqlite"], os.listdir(self.copy.parent))

    def test_nor_what_comes_while_it_copies(self):
        def another(_, remaining, total):
            self.copy.write_text("precious")

        arguments = mock.Mock(file=str(self.copy))
        with (
            mock.patch.dict(os.environ, DB_PATH=self.configured.db_path),
            mock.patch("buffer.show_progress", another),
            mock.patch("sys.stderr.isatty", lambda: True, create=True),
            self.assertRaisesRegex(buffer.StartError, "File exists"),
        ):
            buffer.make_backup(arguments)
        self.assertEqual("precious", self.copy.read_text())
        self.assertEqual(["b.sqlite"], os.listdir(self.copy.parent))

    def test_what_fails_leaves_nothing(self):
        self.assertNone(self.backup(DB_PATH=self.folder / "none"), "No such file")
        self.assertNone(self.backup(self.copy.parent / "x" / "y"), "No such file")
        text = self.folder / "text"
        text.write_text("not a database" * 100)
        self.assertNone(self.backup(DB_PATH=text), "not a database")

    def test_a_damaged_file_gives_no_copy(self):
        for _ in range(100):
            self.send(b"x" * 3000)
        self.store.close()
        with open(self.configured.db_path, "r+b") as file:
            file.seek(4096 * 20)
            file.write(b"\xff" * 4096 * 20)
        self.assertNone(self.backup(), "no backup: .*malformed")

    def test_nor_does_one_that_contradicts_itself(self):
        self.send()
        self.store._run("PRAGMA writable_schema = ON")
        self.store._run(
            "UPDATE sqlite_master SET sql = replace(sql, 'reason TEXT', 'reason TEXT NOT NULL')"
        )
        self.store.close()
        self.assertNone(self.backup(), "no backup: the copy is damaged: NULL value")

    def test_it_ends_though_every_step_meets_a_commit(self):
        with self.store.transaction():
            for _ in range(3000):
                self.store.webhook(b"x" * 4000)
        steps = []

        def write(_, remaining, total):
            steps.append(remaining)
            if len(steps) < 50:
                self.store.webhook(b"written meanwhile")

        self.copy.touch()
        source = buffer.ReadOnlyStore(self.configured.db_path)
        with contextlib.closing(source):
            source.backup(self.copy, write)
        self.assertGreater(len(steps), 2)
        self.assertEqual(sorted(set(steps), reverse=True), steps)  # never anew
        self.assertEqual([(3000,)], rows(self.copy, "SELECT count(*) FROM fila"))

    HELD = """
import signal, sys, time, buffer
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests may
for number in (signal.SIGTERM, signal.SIGHUP):  # have them ignored
    signal.signal(number, signal.SIG_DFL)
class Store(buffer.ReadOnlyStore):
    def backup(self, *values):
        super().backup(*values)
        print("copied", flush=True)
        time.sleep(60)
buffer.ReadOnlyStore = Store
sys.exit(buffer.main(["backup", sys.argv[1]]))"""

    def test_after_a_signal_nothing_is_left(self):
        self.send()
        env = {**os.environ, "DB_PATH": self.configured.db_path, "PYTHONPATH": HERE}
        command = [sys.executable, "-c", self.HELD, str(self.copy)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            with subprocess.Popen(command, env=env, **pipes) as process:
                self.assertEqual(b"copied\n", process.stdout.readline())
                self.assertEqual(1, len(os.listdir(self.copy.parent)))
                process.send_signal(number)
                self.assertEqual(b"", process.stderr.read())
            self.assertEqual(130, process.returncode)
            self.assertEqual([], os.listdir(self.copy.parent))


class PatientLogTest(unittest.TestCase):
    """A log that nobody reads stops nobody."""

    def setUp(self):
        self.reader, writer = os.pipe()
        self.addCleanup(os.close, self.reader)
        stream = open(writer, "w", encoding="utf-8")  # noqa: SIM115 - see the next line
        self.addCleanup(stream.close)
        self.handler = buffer.PatientLog(stream)

    def say(self, *lines):
        for line in lines:
            record = logging.makeLogRecord({"msg": line})
            self.handler.handle(record)

    def read(self):
        return os.read(self.reader, 1 << 20).decode()

    def test_lines_are_left_out_while_the_pipe_is_full_and_counted(self):
        numbers = [f"{n} {'é' * 500}" for n in range(1000)]
        timer = threading.Timer(20, os.close, [self.reader])
        timer.start()  # or a line that blocks would block the tests
        self.say(*numbers)
        timer.cancel()
        kept = self.read().count("\n")
        self.assertIn(kept, range(1, 999))
        self.say("after")
        self.assertEqual(
            f"{1000 - kept} lines were lost, nobody read\nafter\n", self.read()
        )

    def test_a_line_is_no_longer_than_a_pipe_takes_at_once(self):
        self.say("é" * 5000)
        self.assertEqual("é" * 2000 + "\n", self.read())

    def test_where_readiness_cannot_be_asked_it_writes(self):
        stream = io.StringIO()
        self.handler = buffer.PatientLog(stream)
        self.say("x")
        self.assertEqual("x\n", stream.getvalue())


class ServiceLogTest(unittest.TestCase):
    def test_a_scanner_does_not_fill_the_log(self):
        """10,000 wrong tokens on many paths and from many addresses."""
        with Service(TRUSTED_PROXY="127.0.0.1") as service:
            for number in range(100):
                requests = b"".join(
                    http_post(
                        token=f"wrong-{number}-{n}",
                        path=f"/{('webhook', 'fila/pegar', 'x')[n % 3]}/{n}?token={n}",
                        headers=[f"X-Forwarded-For: 10.0.{number}.{n}"],
                    )
                    for n in range(100)
                )
                with dial(service.port, requests) as link:
                    answers = b""
                    while answers.count(b"HTTP/1.1 4") < 100:
                        answers += link.recv(1 << 20)
            service.stop()
            lines = service.log.read_text().splitlines()
        self.assertLess(len(lines), 20)
        found = re.findall(r" (\w+ \S+): .*number (\d+)", "\n".join(lines))
        self.assertEqual(10_000, sum(int(number) for number in dict(found).values()))
        self.assertNotIn("wrong-", "\n".join(lines))

    def test_json_lines(self):
        with Service(LOG_FORMAT="json", TOKEN="short") as service:
            service.call("GET", "/nowhere")
            service.stop()
            lines = service.log.read_text().splitlines()
        levels = [json.loads(line)["level"] for line in lines]
        self.assertEqual(["WARNING", "INFO", "INFO", "WARNING", "INFO"], levels)

    def test_a_crash_says_where_but_not_with_what(self):
        for log_format in ("text", "json"):
            crash = "import buffer; buffer.notify = lambda _: 1 / {}['hidden']"
            command = [sys.executable, "-c", f"{crash}; buffer.main([])"]
            service = Service(LOG_FORMAT=log_format, PYTHONPATH=HERE)
            service.command = command
            with service:
                self.assertEqual(1, service.process.wait(30))
                last = service.log.read_text().splitlines()[-1]
            self.assertIn("KeyError at ", last)
            self.assertNotIn("hidden", last)

    def test_nor_does_that_of_a_thread(self):
        crash = "Thread(target=int, args=['hidden']).start()"
        code = "import buffer, threading; "
        code += f"buffer.notify = lambda _: threading.{crash}; buffer.main([])"
        service = Service(PYTHONPATH=HERE)
        service.command = [sys.executable, "-c", code]
        with service:
            service.logged("CRITICAL crashed: ValueError")
            service.stop()
            self.assertNotRegex(service.log.read_text(), "hidden|Traceback")


class ServiceTest(unittest.TestCase):
    def test_a_round_trip(self):
        with Service() as service:
            self.assertEqual(200, service.call("POST", "/webhook/x", b'{"a":1}')[0])
            [item] = json.loads(service.call("POST", "/fila/pegar")[2])
            self.assertEqual(({"a": 1}, "x"), (item["payload"], item["caminho"]))
            self.assertEqual(200, service.call("POST", "/fila/1/processado")[0])
            self.assertEqual(b"[]\n", service.call("POST", "/fila/pegar")[2])
            self.assertEqual(0, service.stop())
            self.assertEqual({"b.sqlite", "log"}, set(os.listdir(service.folder)))

    def test_messages_outlive_a_restart(self):
        with Service() as service:
            service.call("POST", "/webhook", b"[1]")
            service.stop(signal.SIGKILL)
            service.start()
            self.assertEqual(1, len(json.loads(service.call("POST", "/fila/pegar")[2])))

    def test_the_metrics_outlive_a_kill_and_see_another_process(self):
        with Service() as service:
            for n in range(5):
                service.call("POST", "/webhook", b"%d" % n)
            service.call("POST", "/fila/pegar?limite=2")
            service.call("POST", "/fila/1/processado")
            service.stop(signal.SIGKILL)
            table = run("status", DB_PATH=service.db).stdout
            self.assertRegex(table, r"(?m)^- +3 +1 +1 +0$")
            service.start()
            with contextlib.closing(sqlite3.connect(service.db)) as shell, shell:
                shell.execute("UPDATE fila SET status = 'erro' WHERE id = 5")
            text = service.call("GET", "/metrics")[2].decode()
            for line in (
                'buffer_messages{source="",status="erro"} 1',
                'buffer_messages{source="",status="pendente"} 2',
                'buffer_messages{source="",status="processando"} 1',
                'buffer_messages{source="",status="processado"} 1',
                'buffer_received_total{source=""} 5',
                "buffer_claimed_total 2",
            ):
                self.assertIn(f"{line}\n", text)

    def test_a_unix_socket(self):
        with tempfile.TemporaryDirectory() as folder:
            path = f"{folder}/buffer.sock"
            for _ in range(2):  # the second replaces the socket of a dead process
                with Service(ADDR=f"unix:{path}") as service:
                    self.assertEqual(0o660, stat.S_IMODE(os.stat(path).st_mode))
                    with socket.socket(socket.AF_UNIX) as client:
                        client.connect(path)
                        client.sendall(http_post())
                        self.assertIn(b"200 OK", client.recv(1000))
                    refused = run(ADDR=f"unix:{path}", TOKEN=TOKEN, DB_PATH=service.db)
                    self.assertIn("another process listens there", refused.stderr)
                    service.stop(signal.SIGKILL)

    def test_both_kinds_of_ip(self):
        with Service(ADDR=":0") as service:
            for host in ("127.0.0.1", "::1"):
                with contextlib.suppress(OSError):  # a machine without IPv6
                    socket.create_connection((host, service.port)).close()
            self.assertEqual(200, service.call("GET", "/health")[0])

    def test_it_tells_systemd(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        systemd = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.addCleanup(systemd.close)
        systemd.bind(f"{folder.name}/notify")
        systemd.settimeout(10)
        with Service(NOTIFY_SOCKET=f"{folder.name}/notify") as service:
            self.assertEqual(b"READY=1", systemd.recv(99))
            self.assertEqual(b"WATCHDOG=1", systemd.recv(99))
            service.process.send_signal(signal.SIGTERM)
            while (state := systemd.recv(99)) == b"WATCHDOG=1":
                pass
            self.assertEqual(b"STOPPING=1", state)

    def test_a_second_signal_ends_it_at_once(self):
        with Service() as service:
            client = socket.create_connection(("127.0.0.1", service.port))
            client.sendall(http_post()[:-1])
            service.process.send_signal(signal.SIGTERM)
            while True:  # until it no longer listens it may not have seen the first
                try:
                    socket.create_connection(("127.0.0.1", service.port)).close()
                except ConnectionResetError:
                    continue  # met in the moment of closing
                except ConnectionRefusedError:
                    break
            self.assertEqual(-signal.SIGTERM, service.stop())
            client.close()

    @unittest.skipUnless(SHARED.exists(), "no recorded traffic beside this folder")
    def test_the_transcript_of_the_go_program_holds(self):
        replay = [sys.executable, str(SHARED / "tools" / "replay_golden.py")]
        done = subprocess.run(
            [*replay, str(HERE / "buffer.py")], check=False, capture_output=True
        )
        self.assertIn(b", 0 differ", done.stdout)
        self.assertEqual(0, done.returncode, done.stdout.decode())


# Proofs on a real server under load


class Senders:
    """Threads that post bodies of their own; `acknowledged` lists those answered 200.

    A thread ends with the block, or with a request without an answer: see `broken`.
    """

    def __init__(self, port, threads=8, keep_alive=True, total=1 << 60):
        self.acknowledged, self.statuses, self.broken = [], [], []
        self.port, self.total, self.done = port, total, threading.Event()
        self.keep_alive, self.headers = keep_alive, {"X-Token": TOKEN}
        self.numbers, self.name = itertools.count(), secrets.token_hex(4)
        self.threads = [threading.Thread(target=self.run) for _ in range(threads)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.done.set()
        self.join()

    def join(self):
        for thread in self.threads:
            thread.join()

    def run(self):
        link = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        while not self.done.is_set() and (number := next(self.numbers)) < self.total:
            body = json.dumps([f"{self.name}-{number}", "x" * 700])
            try:
                link.request("POST", "/webhook", body, self.headers)
                reply = link.getresponse()
                reply.read()
            except (OSError, http.client.HTTPException) as error:
                self.broken.append(error)
                break
            if reply.status == 200:
                self.acknowledged.append(body)
            self.statuses.append(reply.status)
            if not self.keep_alive:
                link.close()  # the next request opens it again
        link.close()

    def until(self, count, seconds=30):
        """Waits until so many are acknowledged."""
        end = time.monotonic() + seconds
        while (found := len(self.acknowledged)) < count:
            if time.monotonic() > end:
                raise AssertionError(f"{found} of {count} taken, {self.broken[:2]}")
            time.sleep(0.005)


class Proof(unittest.TestCase):
    def enter(self, context):
        value = context.__enter__()
        self.addCleanup(context.__exit__, None, None, None)
        return value

    def folder(self):
        return pathlib.Path(self.enter(tempfile.TemporaryDirectory()))

    def assertKept(self, acknowledged, db):
        """Each body of the ledger is in the file, and nothing is there twice."""
        found = collections.Counter(payload for (payload,) in rows(db))
        lost = [body for body in acknowledged if body not in found]
        self.assertEqual(0, len(lost), f"{len(lost)} of {len(acknowledged)} are lost")
        twice = [body for body, count in found.items() if count > 1]
        self.assertEqual(0, len(twice), f"{len(twice)} are there twice")

    def assertTaken(self, senders):
        """Every request was answered, and with 200."""
        self.assertEqual(([], {200}), (senders.broken, set(senders.statuses)))

    def assertUnavailable(self, answer):
        status, headers, _ = answer
        self.assertEqual((503, "5"), (status, headers["Retry-After"]))


def rows(db, sql="SELECT payload FROM fila"):
    with contextlib.closing(sqlite3.connect(db)) as file:
        return file.execute(sql).fetchall()


def run_or_skip(test, *command):
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        test.skipTest(f"{command[0]}: {done.stderr.strip()}")


@contextlib.contextmanager
def mounted(test, *arguments):
    """A folder with a file system of its own, for root."""
    with tempfile.TemporaryDirectory() as folder:
        run_or_skip(test, "mount", *arguments, folder)
        try:
            yield pathlib.Path(folder)
        finally:
            subprocess.run(["umount", folder], check=True)


@contextlib.contextmanager
def failing_syncs(test, process, when):
    """Lets syncs of the process fail: all are "1+", every third is "2+3"."""
    if not shutil.which("strace"):
        test.skipTest("strace is not installed")
    inject = f"inject=fsync,fdatasync:error=EIO:when={when}"
    command = ["strace", "-f", "-o", os.devnull, "-e", inject, "-p", str(process.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as tracer:
        line = tracer.stderr.readline()
        if "attached" not in line:
            test.skipTest(line.strip())
        try:
            yield
        finally:
            tracer.send_signal(signal.SIGINT)


@contextlib.contextmanager
def frozen(process):
    """The process stands still, so that what is sent meanwhile comes in one round."""
    process.send_signal(signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


def raw(*headers, line="POST /webhook HTTP/1.1", body=None):
    """A request with a good token, as bytes; `body` brings its Content-Length."""
    if body is not None:
        headers = *headers, f"Content-Length: {len(body)}"
    head = "\r\n".join((line, "Host: x", f"X-Token: {TOKEN}", *headers, "", ""))
    return (head + (body or "")).encode("latin-1")


def chunked(body, size=1 << 20):
    cuts = [body[at : at + size] for at in range(0, len(body), size)]
    return "".join(f"{len(cut):x}\r\n{cut}\r\n" for cut in [*cuts, ""])


def dial(port, data=b""):
    """A connection on which this has been sent."""
    link = socket.create_connection(("127.0.0.1", port), timeout=20)
    link.sendall(data)
    return link


def answer(link):
    """(status, headers, body) of the next answer on a connection."""
    reply = http.client.HTTPResponse(link, method="POST")
    reply.begin()
    return reply.status, reply.headers, reply.read()


@long
class CrashTest(Proof):
    def test_kill_9_under_load_loses_nothing_and_doubles_nothing(self):
        chance, acknowledged = Random(9), []
        server = self.enter(Service())
        for _ in range(20):
            with Senders(server.port) as senders:
                senders.until(chance.randrange(1, 500))
                server.stop(signal.SIGKILL)
                senders.join()
            acknowledged += senders.acknowledged
            server.start()
            self.assertKept(acknowledged, server.db)
        self.assertEqual([("ok",)], rows(server.db, "PRAGMA integrity_check"))

    def power_cuts(self, synchronous):
        """Cuts the power ten times under load; the ledger holds what was answered before."""
        folder, acknowledged = self.folder(), []
        script, image = folder / "buffer.py", folder / "image"
        text = (HERE / "buffer.py").read_text()
        self.assertIn("synchronous = FULL", text)
        script.write_text(text.replace("synchronous = FULL", synchronous))
        image.touch()
        os.truncate(image, 64 << 20)
        run_or_skip(self, "mkfs.ext4", "-q", image)
        with mounted(self, "-o", "loop", image) as disk:
            Service(DB_PATH=disk / "b.sqlite").__enter__().__exit__()  # makes the table
        for _ in range(10):
            with mounted(self, "-o", "loop", image) as disk:
                server = Service(DB_PATH=disk / "b.sqlite")
                server.command[-1] = str(script)
                with server, Senders(server.port) as senders:
                    senders.until(300)
                    device = os.open(disk, os.O_RDONLY)
                    acknowledged += senders.acknowledged
                    # FS_IOC_SHUTDOWN, with the journal as it is on the disk
                    fcntl.ioctl(device, 0x8004587D, struct.pack("I", 2))
                    os.close(device)
                    server.stop(signal.SIGKILL)
            with mounted(self, "-o", "loop", image) as disk:
                self.assertKept(acknowledged, disk / "b.sqlite")

    def test_a_power_cut_loses_nothing(self):
        self.power_cuts("synchronous = FULL")

    def test_a_power_cut_would_show_commits_that_are_not_synced(self):
        with self.assertRaisesRegex(AssertionError, "are lost"):
            self.power_cuts("synchronous = NORMAL")


class Unreliable(Answers):
    """A target that answers in every way there is. Its ledger has a line for each
    request as it begins, and for each answer as it ends: (what, id, attempt)."""

    WAYS = (
        ("ok", 60),
        ("slow", 10),
        ("500 Internal Server Error", 6),
        ("404 Not Found", 6),
        ("429 Too Many Requests", 1),  # each stops all for a second
        ("301 Moved", 3),
        ("503 Unavailable", 1),
        ("reset", 3),
        ("broken", 3),
        ("garbage", 3),
        ("hang", 1),
    )

    def __init__(self, ledger):
        self.ledger, self.random = ledger, Random(3)
        super().__init__()

    def note(self, what, headers):
        with self.lock:
            self.ledger.write(
                f"{what.partition(' ')[0]} {headers['X-Buffer-Id']} "
                f"{headers['X-Buffer-Tentativa']}\n"
            )

    def act(self, answer, line, request):
        headers = request[2]
        [way] = self.random.choices(*zip(*self.WAYS))
        self.note("begin", headers)
        if way == "hang":  # buffer.py hangs up before it ends
            self.note(way, headers)
            time.sleep(1.5)
            return False
        try:
            return self.by_way(way, line)
        finally:
            self.note(way, headers)

    def by_way(self, way, line):
        start = b"HTTP/1.1 200 OK\r\n"
        if way == "slow":
            time.sleep(0.02)
        if way == "reset":
            return reset(line)
        if way == "broken":
            line.sendall(start + b"Content-Length: 9\r\n\r\nabc")
            return False
        if way == "garbage":
            line.sendall(start + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n")
            return False
        if way in ("ok", "slow"):
            line.sendall(self.OK)
        else:
            line.sendall(respond(way, b"no", "Retry-After: 1", "Location: /x"))
        return True


def target(ledger):
    """An Unreliable in a process of its own; it prints its URL and runs until killed."""
    with open(ledger, "w", buffering=1) as file:
        print(Unreliable(file).url, flush=True)
        signal.pause()


@long
class PushProofTest(Proof):
    """Delivery to an unreliable target by a buffer.py that is killed now and then."""

    def deliver(self, concurrency, number):
        folder = self.folder()
        ledger = folder / "ledger"
        process = self.enter(
            subprocess.Popen(
                own_command("target", ledger), stdout=subprocess.PIPE, text=True
            )
        )
        self.addCleanup(process.kill)
        self.ledger = ledger
        service = Service(
            folder,
            FORWARD_URL=process.stdout.readline().strip(),
            FORWARD_CONCURRENCY=concurrency,
            FORWARD_TIMEOUT=1,
            BACKOFF=1,
            MAX_ATTEMPTS=1000,
        )
        fill(service.db, number)
        for part in (0.25, 0.5, 0.75):
            with service:
                self.until(lambda goal=part * number: self.settled(service) >= goal)
                service.stop(signal.SIGKILL)
            self.until(lambda: not self.running())
            self.change(service.db, PushProofTest.LEASES_OVER)
        with service:
            self.until(
                lambda: (
                    self.change(service.db, self.DELAYS_OVER)
                    or self.settled(service) == number
                )
            )
        lines = self.lines()
        good = {id_ for what, id_, _ in lines if what in ("ok", "slow")}
        self.assertEqual(set(map(str, range(1, number + 1))), good)
        busy = itertools.accumulate(1 if w == "begin" else -1 for w, *_ in lines)
        self.assertLessEqual(max(busy), concurrency)
        return lines

    def lines(self):
        return [line.split() for line in self.ledger.read_text().splitlines()]

    def running(self):
        lines = self.lines()
        return 2 * sum(what == "begin" for what, *_ in lines) > len(lines)

    def settled(self, service):
        return count(service.db, "processado")

    def until(self, condition):
        end = time.monotonic() + 120
        while not condition():
            self.assertLess(time.monotonic(), end)
            time.sleep(0.02)

    LEASES_OVER = """
UPDATE fila
   SET lease_until = datetime(locked_at, '+1 seconds')
 WHERE status = 'processando'"""
    DELAYS_OVER = """
UPDATE fila
   SET available_at = '2000-01-01 00:00:00'
 WHERE available_at IS NOT NULL"""

    def change(self, db, sql):
        with contextlib.closing(sqlite3.connect(db)) as file, file:
            file.execute(sql)

    def test_one_at_a_time_in_order(self):
        lines = self.deliver(1, 400)
        first = [int(id_) for what, id_, n in lines if (what, n) == ("begin", "1")]
        self.assertEqual(sorted(first), first)
        self.assertLess(len(first), len(lines) / 2, "nothing was tried again")

    def test_eight_at_a_time(self):
        self.deliver(8, 1000)


@long
class RelayProofTest(Proof):
    def test_20000_messages_reach_the_queue_whoever_is_restarted(self):
        library("pika")
        if not os.path.exists(Broker.SERVER):
            self.skipTest("there is no RabbitMQ")
        number, folder = 20_000, self.folder()
        broker = Broker()
        self.addCleanup(broker.close)
        quorum = {"x-queue-type": "quorum"}
        broker.channel().queue_declare("proof", durable=True, arguments=quorum)
        service = Service(
            folder, FORWARD_URL=f"{broker.url}?routing_key=proof", FORWARD_TIMEOUT=5
        )
        fill(service.db, number)
        named = "UPDATE fila SET source = 'x', event_id = 'evt_' || id"
        self.change(service.db, named)
        service.start()
        self.addCleanup(service.stop)
        # gently first: RabbitMQ 3.10 can forget a queue that is seconds old in a crash
        for share, restart in (
            (0.2, lambda: (broker.stop(), broker.start())),
            (0.4, lambda: self.killed(service)),
            (0.6, lambda: (broker.stop(signal.SIGKILL), broker.start())),
        ):
            goal = share * number
            self.until(lambda goal=goal: count(service.db, "processado") >= goal)
            restart()
        self.until(lambda: count(service.db, "processado") == number)
        channel = broker.channel()
        found = collections.Counter()
        for method, properties, _ in channel.consume(
            "proof", auto_ack=True, inactivity_timeout=2
        ):
            if method is None:
                break
            found[properties.message_id] += 1
        self.assertEqual({f"x:evt_{n}" for n in range(1, number + 1)}, set(found))

    def killed(self, service):
        service.stop(signal.SIGKILL)
        self.change(service.db, PushProofTest.LEASES_OVER)
        service.start()

    until, change = PushProofTest.until, PushProofTest.change


class FullDiskTest(Proof):
    def setUp(self):
        disk = self.enter(mounted(self, "-t", "tmpfs", "-o", "size=6m", "tmpfs"))
        self.db, self.ballast = disk / "b.sqlite", disk / "ballast"
        self.ballast.write_bytes(bytes(2 << 20))
        self.server, self.acknowledged = self.enter(Service(DB_PATH=self.db)), []
        for _ in range(100):
            if (reply := self.send())[0] != 200:
                break
        self.assertUnavailable(reply)

    def send(self):
        body = secrets.token_hex(50_000)
        reply = self.server.call("POST", "/webhook", body)
        if reply[0] == 200:
            self.acknowledged.append(body)
        return reply

    def test_what_was_acknowledged_is_in_the_file(self):
        for _ in range(20):
            self.send()
        self.assertKept(self.acknowledged, self.db)

    def test_consumers_are_answered(self):
        for _ in range(20):
            self.assertIn(self.server.call("POST", "/fila/pegar")[0], (200, 503))
            self.assertIn(self.server.call("GET", "/health")[0], (200, 503))

    def test_it_is_one_line_in_the_log(self):
        for _ in range(50):
            self.send()
        self.assertEqual(1, self.server.log.read_text().count("storage trouble"))

    def test_service_resumes_when_there_is_space(self):
        self.ballast.unlink()
        self.assertEqual(200, self.send()[0])
        self.assertKept(self.acknowledged, self.db)


class NearlyFullDiskTest(Proof):
    def test_senders_wait_before_the_disk_is_full_and_consumers_empty_it(self):
        disk = self.enter(mounted(self, "-t", "tmpfs", "-o", "size=128m", "tmpfs"))
        ballast, body = disk / "ballast", secrets.token_hex(50_000)
        ballast.write_bytes(bytes(64 << 20))
        settings = {"DB_PATH": disk / "b.sqlite", "MIN_FREE": "32M"}
        server = self.enter(Service(**settings))
        for _ in range(1000):
            status, headers, _ = server.call("POST", "/webhook", body)
            if status != 200:
                break
        self.assertEqual((503, "30"), (status, headers["Retry-After"]))
        self.assertGreater(shutil.disk_usage(disk).free, 4 << 20)
        self.assertEqual(503, server.call("GET", "/health")[0])
        while items := json.loads(server.call("POST", "/fila/pegar")[2]):
            ids = json.dumps({"ids": [item["id"] for item in items]})
            self.assertEqual(200, server.call("POST", "/fila/processado", ids)[0])
        ballast.unlink()
        server.logged("served again")
        self.assertEqual(200, server.call("POST", "/webhook", body)[0])
        self.assertNotIn("storage trouble", server.log.read_text())


class BrokenDiskTest(Proof):
    def setUp(self):
        self.server = self.enter(Service())

    def assertResumes(self, *refused):
        """Those before were refused; the next is taken and alone in the file."""
        for reply in refused:
            self.assertUnavailable(reply)
        self.assertEqual(200, self.server.call("POST", "/webhook", "next")[0])
        self.assertEqual([("next",)], rows(self.server.db))

    def test_while_syncs_fail_it_is_503(self):
        with failing_syncs(self, self.server.process, "1+"):
            refused = [self.server.call("POST", "/webhook", "x") for _ in range(10)]
        self.assertResumes(*refused)

    def test_syncs_that_fail_now_and_then_lose_nothing(self):
        tracing = failing_syncs(self, self.server.process, "2+3")
        with tracing, Senders(self.server.port) as senders:
            senders.until(300)
        self.assertEqual({200, 503}, set(senders.statuses))
        self.assertKept(senders.acknowledged, self.server.db)
        self.server.stop(signal.SIGKILL)
        self.assertKept(senders.acknowledged, self.server.db)

    def test_while_the_file_is_read_only_it_is_503(self):
        """By chattr: a file system with open files cannot be mounted read-only."""
        files = [str(self.server.db), f"{self.server.db}-wal"]
        run_or_skip(self, "chattr", "+i", *files)
        try:
            refused = [self.server.call("POST", "/webhook", "x") for _ in range(3)]
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)
        self.assertResumes(*refused)

    def test_while_the_file_is_locked_the_whole_round_is_503(self):
        other = sqlite3.connect(self.server.db, isolation_level=None)
        other.execute("BEGIN EXCLUSIVE")
        with frozen(self.server.process):
            links = [dial(self.server.port, raw(body="x")) for _ in range(20)]
            links.append(dial(self.server.port, raw(line="POST /fila/pegar HTTP/1.1")))
        refused = [answer(self.enter(link)) for link in links]
        other.close()
        self.assertResumes(*refused)


class SigtermTest(Proof):
    def test_under_load_each_of_200_ends_with_an_answer_or_refused(self):
        server = self.enter(Service())
        with Senders(server.port, threads=200) as senders:
            senders.until(1000)
            began = time.monotonic()
            self.assertEqual(0, server.stop())
            self.assertLess(time.monotonic() - began, 5)
            senders.join()
        self.assertEqual({ConnectionRefusedError}, set(map(type, senders.broken)))
        self.assertEqual({200}, set(senders.statuses))
        self.assertKept(senders.acknowledged, server.db)

    def test_what_the_kernel_has_queued_is_answered(self):
        """Half of it has not arrived completely when the signal comes."""
        server, bodies = self.enter(Service()), [f"{n:03}" for n in range(200)]
        with frozen(server.process):
            links = [dial(server.port, raw(body=body)[:-1]) for body in bodies]
            for link, body in zip(links[::2], bodies[::2], strict=True):
                link.sendall(body[-1:].encode())
            server.process.terminate()
        for link, body in zip(links[1::2], bodies[1::2], strict=True):
            link.sendall(body[-1:].encode())
        for link in links:
            status, headers, _ = answer(self.enter(link))
            self.assertEqual((200, "close"), (status, headers["Connection"]))
        self.assertEqual(0, server.process.wait(5))
        self.assertKept(bodies, server.db)

    @long
    def test_a_request_that_never_ends_holds_it_up_for_ten_seconds(self):
        server = self.enter(Service())
        self.enter(dial(server.port, raw(body="never")[:-1]))
        server.call("GET", "/health")
        began = time.monotonic()
        self.assertEqual(0, server.stop())
        self.assertLess(time.monotonic() - began, 13)

    @long
    def test_ten_restarts_behind_a_held_socket_refuse_nobody(self):
        """As with systemd's LISTEN_FDS; each request comes on a new connection."""
        held = self.enter(socket.create_server(("127.0.0.1", 0), backlog=4096))
        launch = (
            "import os, sys; os.dup2(int(sys.argv[1]), 3);"
            "os.environ.update(LISTEN_FDS='1', LISTEN_PID=str(os.getpid()));"
            "os.execv(sys.argv[2], sys.argv[2:])"
        )
        fd = held.fileno()
        server = Service(prefix=(sys.executable, "-c", launch, str(fd)))
        server.start(pass_fds=[fd])
        self.addCleanup(server.__exit__)
        with Senders(held.getsockname()[1], keep_alive=False) as senders:
            for restart in range(1, 11):
                senders.until(100 * restart)
                self.assertEqual(0, server.stop())
                server.start(pass_fds=[fd])
        self.assertTaken(senders)
        self.assertKept(senders.acknowledged, server.db)


class CrowdTest(Proof):
    def test_900_slow_connections_are_in_nobodys_way(self):
        """100 others are served at once; who trickles gets 408 and leaves no row."""
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        if 0 <= hard < 4096:
            self.skipTest(f"only {hard} open files are allowed")
        buffer.descriptor_limit()
        server, done = self.enter(Service(REQUEST_TIMEOUT=5)), threading.Event()
        starts = [b"", b"POST /webhook HTTP/1.1\r\nX-Slow: ", raw("Content-Length: 99")]
        links = [self.enter(dial(server.port, starts[n % 3])) for n in range(900)]
        slow = [link for n, link in enumerate(links) if n % 3]

        def trickle():
            while not done.wait(1):
                for link in slow:
                    with contextlib.suppress(OSError):
                        link.send(b"x")

        thread = threading.Thread(target=trickle)
        thread.start()
        self.addCleanup(thread.join)
        self.addCleanup(done.set)
        with Senders(server.port, 100, total=100) as senders:
            senders.until(100, seconds=4)
        self.assertTaken(senders)
        self.assertEqual({408}, {answer(link)[0] for link in slow})
        self.assertEqual(100, len(rows(server.db)))

    def test_a_reader_that_does_not_read_holds_nobody_up(self):
        """24 MB and one more answer wait for it; webhooks flow on."""
        server = self.enter(Service(MAX_BATCH_BYTES="64M"))
        for _ in range(24):
            server.call("POST", "/webhook", "x" * 1_000_000)
        claim = raw(line="POST /fila/pegar HTTP/1.1")
        reader = self.enter(dial(server.port, claim + claim))
        reader.recv(1, socket.MSG_PEEK)
        with Senders(server.port, total=300) as senders:
            senders.until(300, seconds=10)
        self.assertTaken(senders)
        self.assertEqual(24, len(json.loads(answer(reader)[2])))


class SmallMachineTest(Proof):
    """512 MB of address space, the default settings, and the worst that they take."""

    SIZE = 32 << 20

    def worst(self):
        for part in (b"[[[[[]]]],", b'{"":0},', b'{"a":', b"0,", b"{},", b'"",'):
            yield part * (self.SIZE // len(part))
        for part in (b"[[[]]],", b"0,", b"{},"):
            yield b"[" + part * (self.SIZE // len(part) - 2) + b"0]"
        for rest in (b"7" * 5000 + b'"]', b'"' + b",[]" * 600 + b"]"):
            yield b'["' + b'a\\"' * ((self.SIZE - 9000) // 3) + rest
        for part in ("😀".encode(), b"\x01", b"\xff", b'"', b"a&"):
            yield part * (self.SIZE // len(part))

    @long
    def test_no_message_stops_the_others(self):
        if not shutil.which("prlimit"):
            self.skipTest("prlimit is not installed")
        server = self.enter(Service(prefix=("prlimit", f"--as={512 << 20}")))
        good, claimed = 0, []
        for body in self.worst():
            for each in (body, b'{"good":1}'):
                status = server.call("POST", "/webhook", each)[0]
                self.assertEqual(200, status, body[:10])
            good += 1
        packed = zlib.compress(b'{"a":' * 6_700_000, 9)
        headers = {"Content-Encoding": "deflate"}
        status = server.call("POST", "/webhook", packed, headers)[0]
        self.assertEqual(413, status)
        form = "?formato=n8n&limite=3"
        while items := json.loads(server.call("POST", f"/fila/pegar{form}")[2]):
            claimed += [item["id"] for item in items if item["body"] == {"good": 1}]
            for item in items:
                server.call("POST", f"/fila/{item['id']}/processado")
        self.assertEqual(good, len(claimed))
        status, _, text = server.call("GET", "/fila?status=erro")
        self.assertEqual(200, status)
        reasons = {item["motivo"] for item in json.loads(text)}
        self.assertLessEqual(reasons, {"não pode ser mostrada: MemoryError"})
        self.assertEqual(200, server.call("GET", "/health")[0])


class ContentionTest(Proof):
    def claim(self, port):
        """Eight threads take seven at a time until there is nothing; the ids."""
        ids, statuses = [], set()

        def consume():
            link = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
            for _ in range(300):
                link.request("POST", "/fila/pegar?limite=7", b"", {"X-Token": TOKEN})
                reply = link.getresponse()
                text = reply.read()
                link.close()
                statuses.add(reply.status)
                items = json.loads(text) if reply.status == 200 else []
                ids.extend(item["id"] for item in items)
                if not items:
                    break

        threads = [threading.Thread(target=consume) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual({200}, statuses)
        return ids

    def assertEachOnce(self, port):
        """2,000 messages are sent, and each is claimed once."""
        with Senders(port, keep_alive=False, total=2000) as senders:
            senders.join()
        self.assertTaken(senders)
        ids = self.claim(port)
        self.assertEqual((2000, 2000), (len(ids), len(set(ids))))

    def test_eight_claimers_get_each_message_once(self):
        self.assertEachOnce(self.enter(Service()).port)

    def test_four_processes_start_on_a_file_that_is_not_there_yet(self):
        """Another WSGI server; its first requests come all at once."""
        listener = self.enter(socket.create_server(("127.0.0.1", 0), backlog=512))
        port, fd, folder = listener.getsockname()[1], listener.fileno(), self.folder()
        if importlib.util.find_spec("gunicorn"):
            command = (
                f"{sys.executable} -m gunicorn -w 4 -b fd://{fd} buffer:application"
            )
        elif shutil.which("uwsgi"):
            command = (
                f"uwsgi --plugin python3 --http-socket fd://{fd} --processes 4 --master"
                " --die-on-term --lazy-apps --module buffer:application"
            )
        else:
            self.skipTest("neither gunicorn nor uwsgi is installed")
        paths = {"DB_PATH": str(folder / "b.sqlite"), "PYTHONPATH": str(HERE)}
        environ = {**os.environ, **paths, "TOKEN": TOKEN}
        output = self.enter((folder / "log").open("wb"))
        options = {"stdout": output, "stderr": output, "pass_fds": [fd]}
        process = subprocess.Popen(command.split(), env=environ, cwd=folder, **options)
        self.addCleanup(process.wait, 30)
        self.addCleanup(process.terminate)
        self.assertEachOnce(port)


class EveningTest(Proof):
    """200 people chat with a bot of four workers, one of which keeps dying, while the
    buffer is killed now and then. A second of theirs lasts as long as it must."""

    PEOPLE, SECONDS, SILENCE, LEASE = 200, 400, 8, 60
    WORKERS, KILLS = 4, 3

    def setUp(self):
        self.random = Random(7)
        folder = pathlib.Path(self.enter(tempfile.TemporaryDirectory()))
        self.clock = (folder / "clock").open("w+b", buffering=0)
        self.addCleanup(self.clock.close)
        self.service = special("with_a_clock", folder)
        self.service.settings["GROUP_KEY"] = "$.de"
        self.tick(0)
        self.enter(self.service)
        self.line = self.service.connect()
        self.addCleanup(lambda: self.line.close())
        self.bursts = {}  # (who, number): its messages, whether nothing came between
        self.open = collections.defaultdict(set)  # who: burst and message not settled
        self.leased = {}  # who: until when
        self.given = collections.defaultdict(list)  # who: what was handed out
        self.settled = collections.defaultdict(list)
        self.disturbed = set()  # bursts
        self.died = set()  # people whose worker died
        self.restarts = 0

    def tick(self, now):
        self.now = now
        os.pwrite(self.clock.fileno(), b"%012d" % (1_800_000_000 + now), 0)

    def ask(self, path, body=None):
        """An answer; None when the buffer was killed, which is back by then."""
        try:
            return json.loads(ask(self.line, path, body))
        except (http.client.HTTPException, OSError):
            self.line.close()
            self.service.process.wait(30)
            self.service.start()
            self.line = self.service.connect()
            self.restarts += 1
            return None

    def kill_soon(self):
        """In the middle of something."""
        kill, wait = self.service.process.kill, self.random.random() / 50
        timer = threading.Timer(wait, kill)
        timer.start()
        self.addCleanup(timer.join)

    def plan(self):
        """{second: [(who, burst, message)]}; between bursts is more than the silence."""
        plan = collections.defaultdict(list)
        for who in range(self.PEOPLE):
            at, burst = self.random.randrange(60), 0
            while at < self.SECONDS:
                size = self.random.randint(1, 10)
                for number in range(size):
                    plan[at + number].append((f"p{who}", burst, number))
                self.bursts[f"p{who}", burst] = size
                burst += 1
                at += size + self.random.randint(2 * self.SILENCE, 120)
        return plan

    def say(self, who, burst, number):
        if number == 0 and self.open[who]:
            self.disturbed.add((who, burst))
            self.disturbed.add((who, burst - 1))
        self.open[who].add((burst, number))
        body = json.dumps({"de": who, "burst": burst, "number": number})
        while self.ask("/webhook", body) is None:
            pass  # a sender tries again

    def claim(self):
        query = f"?agrupar={self.SILENCE}&limite=20&reserva={self.LEASE}"
        return self.ask(f"/fila/pegar{query}") or []

    def take(self, item):
        """Checks what is handed out; [(burst, message)]."""
        who, now = item["chave"], self.now
        self.assertLessEqual(self.leased.get(who, 0), now, f"{who} is in two leases")
        self.leased[who] = now + self.LEASE
        said = [message["payload"] for message in item["mensagens"]]
        self.assertEqual({who}, {value["de"] for value in said})
        said = [(value["burst"], value["number"]) for value in said]
        self.assertEqual(sorted(said), said, "not in the order of arrival")
        self.given[who].append(said)
        return said

    def settle(self, items):
        ids = [id_ for item in items for id_ in item["ids"]]
        while self.ask("/fila/processado", json.dumps({"ids": ids})) is None:
            pass
        for item in items:
            who = item["chave"]
            del self.leased[who]
            said = self.given[who][-1]
            self.settled[who] += said
            self.open[who].difference_update(said)

    @long
    def test_every_undisturbed_burst_is_one_item(self):
        plan = self.plan()
        kills = set(self.random.sample(range(30, self.SECONDS), self.KILLS))
        busy = {}  # worker: (until when, items); those of a dead one are None
        while self.now < self.SECONDS or any(self.open.values()):
            self.assertLess(self.now, 3 * self.SECONDS, "it does not come to an end")
            if self.now in kills:
                self.kill_soon()
            for words in plan[self.now]:
                self.say(*words)
            for worker in range(self.WORKERS):
                until, items = busy.pop(worker, (self.now, []))
                if until > self.now:
                    busy[worker] = until, items
                elif items:
                    self.settle(items)
                elif items is not None:
                    items = self.claim()
                    for item in items:
                        self.take(item)
                    dies = worker == 0 and self.random.random() < 0.1
                    self.died.update(item["chave"] for item in items if dies)
                    work = self.random.randint(1, 3)
                    busy[worker] = self.now + work, None if dies else items
            self.tick(self.now + 1)
        self.check()

    def check(self):
        self.assertEqual(self.KILLS, self.restarts)
        undisturbed = self.bursts.keys() - self.disturbed
        self.assertGreater(len(undisturbed), len(self.bursts) / 2)
        for (who, burst), size in self.bursts.items():
            whole = [(burst, number) for number in range(size)]
            settled = [said for said in self.settled[who] if said[0] == burst]
            self.assertEqual(whole, sorted(set(settled)), "something is lost")
            if (who, burst) in undisturbed:
                holding = [said for said in self.given[who] if set(said) & set(whole)]
                self.assertEqual(whole, sorted(set(holding[0])), (who, burst))
                self.assertTrue(len(holding) == 1 or who in self.died, (who, burst))
        for who, said in self.settled.items():
            self.assertEqual(sorted(said), said, who)


class BodySizeTest(Proof):
    LIMIT = 50_000

    def setUp(self):
        self.port = self.enter(Service(MAX_BODY=self.LIMIT)).port

    def status(self, data):
        return answer(self.enter(dial(self.port, data)))[0]

    def both(self, length, size=1 << 20):
        """The statuses for a body with Content-Length and in chunks."""
        body = "x" * length
        chunks = raw("Transfer-Encoding: chunked") + chunked(body, size).encode()
        return self.status(raw(body=body)), self.status(chunks)

    def test_the_limit_is_the_last_length_that_is_taken(self):
        self.assertEqual((200, 200), self.both(self.LIMIT))
        self.assertEqual((413, 413), self.both(self.LIMIT + 1))

    def test_frames_of_chunks_do_not_count(self):
        self.assertEqual((200, 200), self.both(self.LIMIT, size=1))
        self.assertEqual((413, 413), self.both(self.LIMIT + 1, size=1))

    def test_who_sends_everything_first_sees_the_413(self):
        self.assertEqual((413, 413), self.both(200 * self.LIMIT))

    def test_a_length_over_the_limit_is_413_before_the_body(self):
        self.assertEqual(413, self.status(raw("Content-Length: 50001")))

    def test_who_asks_before_sending_gets_413_and_not_100(self):
        head = raw("Expect: 100-continue", "Content-Length: 50001")
        link = self.enter(dial(self.port, head))
        self.assertRegex(link.recv(1000), rb"\AHTTP/1.\d 413 ")

    def test_asking_without_a_body_leaves_the_next_request_alone(self):
        link = self.enter(dial(self.port, raw("Expect: 100-continue")))
        self.assertEqual(400, answer(link)[0])
        link.sendall(raw(body="next"))
        self.assertEqual(200, answer(link)[0])


BODY, LENGTH, CODED = "smuggled", "Content-Length: 8", "Transfer-Encoding: chunked"
BAD_LINES = (
    "POST|/webhook|POST /webhook|POST  /webhook HTTP/1.1|POST /webhook  HTTP/1.1|\0\0"
    "|POST /webhook HTTP/1.1 x|POST /web hook HTTP/1.1|POST\t/webhook\tHTTP/1.1"
    "|post /webhook HTTP/1.1|Post /webhook HTTP/1.1|P ST /webhook HTTP/1.1"
    "|HTTP/1.1 200 OK|POST http://[::1/webhook HTTP/1.1|POST /webhook/\0 HTTP/1.1"
    "|POST /web\thook HTTP/1.1|POST /webhook/\x7f HTTP/1.1|\x16\x03\x01\x02\0\x01"
    "|POST /webhook\rHTTP/1.1|POST /webhook\nHTTP/1.1"
)
BAD_VERSIONS = (
    "HTTP/1.2|HTTP/2.0|HTTP/0.9|HTTP/11|HTTP/1.|HTTP/1.1.1|http/1.1|HTTP/1.1;|X"
)
BAD_HEADERS = (
    "no colon|: no name|X A: b|X-A : b|X-A\t: b|X\0A: b|X-A: b\0|X-A: b\rc|X-A: b\nc"
    "|X-\xe9: b|X-A: b\x0b|X-A: \x7f|X(A): b|X-A: b\r\n folded|X-A: b\r\n\tfolded"
    "|Content-Length : 8|Content-Length: 8|Content-Length: 9|Transfer-Encoding: chunked"
    "|Transfer-Encoding : chunked|Transfer-Encoding:|Transfer-Encoding:\r\n chunked"
)
BAD_LENGTHS = "+8|-8|-0|8 8|8,8|8, 8|0x8|8.0|8e0||\xb2|1_0|8;|eight|1\r\n 8|8\0"
BAD_CODINGS = (
    'gzip|gzip, chunked|chunked, gzip|chunked, chunked|identity|xchunked|"chunked"'
    "|chunked;q=1|chunked x|chunked\0|\x0bchunked|chunked\r\nTransfer-Encoding: chunked"
)
BAD_SIZES = "-8|+8|0x8| 8|8 |8\t|8\n|8;|8;a=\0|8;a\n|g|\xb2|8\r|7|9|1_0|8,8"


def refused_at_once():
    """Malformed requests; what follows them must not be taken for a request."""
    coded = chunked(BODY)
    for line in BAD_LINES.split("|"):
        yield raw(LENGTH, line=line), BODY
    for version in BAD_VERSIONS.split("|"):
        yield raw(LENGTH, line=f"POST /webhook {version}"), BODY
    for header in BAD_HEADERS.split("|"):
        yield raw(header, LENGTH), BODY
    for length in [*BAD_LENGTHS.split("|"), "9" * 5000]:
        yield raw(f"Content-Length: {length}"), BODY
    for coding in BAD_CODINGS.split("|"):
        yield raw(f"Transfer-Encoding: {coding}"), coded
    for size in [*BAD_SIZES.split("|"), "0" * 90_000]:
        yield raw(CODED), coded.replace("8", size, 1)
    yield raw(CODED), coded.replace("d\r\n", "d")
    yield raw(CODED, f"Content-Length: {len(coded)}"), coded
    yield raw(CODED, LENGTH, line="POST /webhook HTTP/1.0"), BODY
    yield raw("X-Long: " + "a" * 70_000, LENGTH), BODY
    yield raw(*["X-Many: a"] * 7_000, LENGTH), BODY
    yield raw(LENGTH, line=f"POST /webhook/{'a' * 70_000} HTTP/1.1"), BODY


def refused_in_time():
    """Malformed requests that never end."""
    yield raw("Content-Length: 9"), BODY
    yield raw(LENGTH).replace(b"\r\n", b"\n"), BODY
    yield raw(LENGTH).replace(b"\r\n", b"\r"), BODY
    for body in (f"8\n{BODY}\n0\n\n", f"8\r\n{BODY}\r\n", f"{'F' * 30}\r\n{BODY}"):
        yield raw(CODED), body
    yield b"", "\0" * 1000


class MalformedTest(Proof):
    @classmethod
    def setUpClass(cls):
        """All are sent in three pieces, cut by chance, beside honest requests."""
        chance, cls.answers, cls.server = (
            Random(2),
            {},
            Service(REQUEST_TIMEOUT=2),
        )
        cls.server.start()
        cls.addClassCleanup(cls.server.__exit__)
        follow = raw(body=BODY)
        cases = [h + b.encode("latin-1") + follow for h, b in refused_at_once()]
        cases += [head + body.encode() for head, body in refused_in_time()]
        cases += [chance.randbytes(300) + b"\r\n\r\n" + follow for _ in range(10)]
        chance.shuffle(cases)
        links = [dial(cls.server.port) for _ in cases]
        cuts = [[0, *sorted(chance.choices(range(len(c)), k=2)), len(c)] for c in cases]
        with Senders(cls.server.port, threads=4) as cls.honest:
            for turn in range(3):
                for case, link, cut in zip(cases, links, cuts, strict=True):
                    link.sendall(case[cut[turn] : cut[turn + 1]])
            for case, link in zip(cases, links, strict=True):
                cls.addClassCleanup(link.close)
                cls.answers[case] = answer(link)[0]

    def test_each_is_refused(self):
        good = {400, 408, 413, 431, 501}
        wrong = {case[:150]: s for case, s in self.answers.items() if s not in good}
        self.assertGreater(len(self.answers), 100)
        self.maxDiff = None
        self.assertEqual({}, wrong)

    def test_nothing_of_them_is_kept(self):
        found = rows(self.server.db, "SELECT * FROM fila WHERE payload NOT LIKE '[%'")
        self.assertEqual([], found)

    def test_no_honest_request_was_harmed(self):
        self.assertTaken(self.honest)
        self.assertKept(self.honest.acknowledged, self.server.db)

    def test_the_server_is_idle_while_their_connections_are_still_open(self):
        stat = pathlib.Path(f"/proc/{self.server.process.pid}/stat")
        if not stat.exists():
            self.skipTest("no /proc here")
        before = stat.read_text().split()[13:15]
        time.sleep(1)
        spent = sum(map(int, stat.read_text().split()[13:15])) - sum(map(int, before))
        self.assertLess(spent, 5)

    def test_the_log_has_one_line_for_each_kind(self):
        self.assertLess(len(self.server.log.read_text().splitlines()), 10)

    def test_a_target_with_two_slashes_is_a_path(self):
        self.assertEqual(404, self.server.call("POST", "//x", BODY)[0])

    def test_urgent_data_is_no_part_of_a_body(self):
        link = self.enter(dial(self.server.port, raw(body=BODY)[:-1]))
        link.send(b"!", socket.MSG_OOB)
        self.assertEqual(408, answer(link)[0])


# The papers


class PapersTest(unittest.TestCase):
    def setUp(self):
        self.readme = (HERE / "README.md").read_text()

    def stands_in_readme(self, pattern):
        self.assertTrue(re.search(pattern, self.readme), pattern)

    def test_every_setting_stands_in_readme_as_it_is(self):
        for name, default in all_settings():
            cell = f"`{default}`" if default else ""
            self.stands_in_readme(rf"\| `{name}` \| *{re.escape(cell)} *\| \S")

    def test_every_route_stands_in_readme(self):
        for path, method, *_ in buffer.ROUTES:
            if path != "/fila/{id}/{verdict}":  # the answer to a typing error
                asks = r"(\?[^`]*)?"  # its parameters
                self.stands_in_readme(rf"\| `{method} {re.escape(path)}{asks}` \|")

    def test_the_n8n_flows_can_be_pasted(self):
        blocks = re.findall(r"```json\n(\{.*?\n\})\n```", self.readme, re.DOTALL)
        flows = [f for f in map(json.loads, blocks) if "nodes" in f]
        self.assertEqual(2, len(flows))
        for flow in flows:
            names = {node["name"] for node in flow["nodes"]}
            for source, targets in flow["connections"].items():
                self.assertIn(source, names)
                for target in (t for lane in targets["main"] for t in lane):
                    self.assertIn(target["node"], names)

    def test_the_unit_is_clean_and_tight(self):
        if not shutil.which("systemd-analyze"):
            self.skipTest("no systemd-analyze here")
        unit = (HERE / "buffer.service").read_text()
        unit = re.sub("(?m)^ExecStart=.*", "ExecStart=/bin/true", unit)
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "buffer.service"
            path.write_text(unit)
            verify = ["systemd-analyze", "verify", "--man=no", str(path)]
            done = subprocess.run(verify, check=False, capture_output=True, text=True)
            self.assertEqual("", done.stderr)
            security = ["systemd-analyze", "security", "--offline=true", str(path)]
            done = subprocess.run(security, check=False, capture_output=True, text=True)
            score = re.search(
                r"exposure level for buffer.service: ([\d.]+)", done.stdout
            )
            self.assertLess(float(score[1]), 2.0)


# The benchmark

ROUNDS, SECONDS = 5, 2  # figures are medians of rounds; seconds that one load lasts
CLAIMS, LIMIT = 4, 50  # claims in a round, messages in a claim
SAMPLE = '{"event":"messages.upsert","instance":"loja","data":{"conversation":"'
SAMPLE = (SAMPLE + "tudo bem? " * 80)[:797] + '"}}'


def bench(names=()):
    """Prints the table, or the rows whose names contain one of `names`."""
    began = time.monotonic()
    print(machine(), flush=True)
    for name, measure in MEASURES.items():
        if not names or any(part in name for part in names):
            for what, figures, *target in measure():
                goal, met = target or ("", None)
                verdict = {True: "ok", False: "MISSED", None: ""}[met]
                line = f"{name:15}  {what:20}  {figures:52}  {goal:23} {verdict}"
                print(line.rstrip(), flush=True)
    print(f"medians of {ROUNDS} rounds, {time.monotonic() - began:.0f} s in all")


def machine():
    """What the figures depend on, in one line."""
    with tempfile.TemporaryFile(buffering=0) as file:
        syncs = [timed(sync, file)[0] for _ in range(100)]
    facts = (
        f"{os.cpu_count()} cores",
        f"Python {platform.python_version()}",
        f"waitress {importlib.metadata.version('waitress')}",
        f"SQLite {sqlite3.sqlite_version}",
        f"{tempfile.gettempdir()} syncs in {statistics.median(syncs) * 1000:.2f} ms",
        f"load by {load_tool() or 'the built-in client'}",
    )
    return ", ".join(facts)


def sync(file):
    file.write(bytes(4096))
    os.fsync(file.fileno())


def timed(function, *values):
    """(seconds, what it returned)"""
    began = time.perf_counter()
    result = function(*values)
    return time.perf_counter() - began, result


# Subprocesses of the benchmark: this file, with the name of one of these functions


def own_command(entry, *values):
    here = str(pathlib.Path(__file__).resolve())
    return [sys.executable, here, entry, *map(str, values)]


def special(entry, folder=None):
    service = Service(folder)
    service.command = own_command(entry)
    return service


class Constant:
    """waitress's task dispatcher, without threads: a round's requests after the round."""

    def __init__(self):
        self.waiting = []

    def add_task(self, channel):
        self.waiting.append(channel)

    def answer(self):
        waiting, self.waiting = self.waiting, []
        for channel in waiting:
            channel.service()


def constant(environ, start_response):
    reply = buffer.App.OK
    start_response(reply.status, list(reply.headers))
    return [reply.body]


def ceiling():
    """waitress itself, answering a constant: its parser, its channels, its loop. Threads
    would make it slower."""
    settings = buffer.Settings.read(os.environ)
    buffer.start_log(settings)
    sockets, [listener] = {}, buffer.listen(settings.addr)
    rounds = Constant()
    options = {"connection_limit": 2000, "recv_bytes": 65536, "ident": None}
    waitress.create_server(
        constant, map=sockets, _dispatcher=rounds, sockets=[listener], **options
    )
    buffer.log.info("the ceiling listens on port %d,", listener.getsockname()[1])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        timeout = 0 if rounds.waiting else 1
        waitress.wasyncore.loop(timeout, use_poll=True, map=sockets, count=1)
        rounds.answer()


def purging():
    """buffer.py, with a housekeeper that works while its folder has a file `purge`."""

    class Housekeeper(buffer.Housekeeper):
        EVERY = 0.05

        def tidy(self, bites=math.inf):
            if os.path.exists("purge"):
                super().tidy(bites)

    buffer.Housekeeper = Housekeeper
    sys.exit(buffer.main([]))


def with_a_clock():
    """buffer.py, with a clock that stands in the file `clock`."""

    class Clock:
        file, step = os.open("clock", os.O_RDONLY), staticmethod(lambda: 0)

        def __call__(self):
            return int(os.pread(self.file, 12, 0))

    buffer.SteadyClock = Clock
    sys.exit(buffer.main([]))


def client(port, connections, seconds, each):
    """The built-in load generator. Prints the values of a Load as JSON.

    All connections open at once; each sends `each` requests or until the time is up. A
    first latency includes connecting.
    """
    took, failed, began = [], 0, time.perf_counter()
    until = began + float(seconds)
    with selectors.DefaultSelector() as selector:
        for _ in range(int(connections)):
            talk = conversation(int(port), took, until, float(each))
            selector.register(*next(talk), data=talk)
        while selector.get_map():
            for key, _ in selector.select():
                try:
                    sock, event = next(key.data)
                    if event != key.events:
                        selector.modify(sock, event, key.data)
                except StopIteration as end:
                    selector.unregister(key.fileobj)
                    failed += end.value
    rate = (len(took)) / (time.perf_counter() - began)
    cuts = statistics.quantiles([s * 1000 for s in took or [0]] * 2, n=100)
    print(json.dumps([rate, cuts[49], cuts[98], failed]))


def conversation(port, took, until, each):
    """One connection. Yields (socket, what to wait for); returns how many failed."""
    request = http_post(SAMPLE.encode(), ["Content-Type: application/json"])
    answer = re.compile(rb"(?is)HTTP/1.1 (\d+).*content-length: (\d+).*?\r\n\r\n(.*)")
    failed = sent = 0
    began = time.perf_counter()
    with socket.socket() as sock, contextlib.suppress(ConnectionError):
        sock.setblocking(False)
        sock.connect_ex(("127.0.0.1", port))
        yield sock, selectors.EVENT_WRITE
        while sent < each and began < until:
            sock.sendall(request)
            data, found = b"", None
            while not found or len(found[3]) < int(found[2]):
                yield sock, selectors.EVENT_READ
                part = sock.recv(65536)
                if not part:
                    raise ConnectionResetError
                data += part
                found = answer.match(data)
            now = time.perf_counter()
            if found[1] == b"200":
                took.append(now - began)
            else:
                failed += 1
            sent, began = sent + 1, now
        return failed
    return failed + (1 if each == math.inf else each - sent)


# Load


class Load(collections.namedtuple("Load", "rate p50 p99 failed")):
    """Answers 200 per second, two latencies in ms, and how many were no 200."""

    def __str__(self):
        return (
            f"{self.rate:6,.0f}/s  p50 {self.p50:6.2f} ms  p99 {self.p99:6.2f} ms  "
            f"{self.failed:.0f} failed"
        )

    @classmethod
    def median(cls, loads):
        """Of each figure; but of failures the sum."""
        middle = cls(*map(statistics.median, zip(*loads)))
        return middle._replace(failed=sum(load.failed for load in loads))


def load_tool():
    return next(filter(shutil.which, ("wrk", "hey")), None)


def load(service, connections):
    """A Load of keep-alive connections, each busy all the time."""
    tools = {"wrk": load_by_wrk, "hey": load_by_hey, None: load_by_client}
    return tools[load_tool()](service.port, connections)


def signed_load(service, source):
    """A Load of 64 connections that sign as Meta and GitHub do, by wrk; GitHub's have an
    id of their own each."""
    signature = "sha256=" + mac("secret", SAMPLE).hexdigest()
    script = WRK.replace("/webhook", f"/webhook/{source}")
    script += f'wrk.headers["X-Hub-Signature-256"] = "{signature}"\n'
    script += 'wrk.headers["X-Token"] = nil\n'
    if source == "github":
        script += f"""
local number = 0
function request()
  number = number + 1
  wrk.headers["X-GitHub-Delivery"] = "{time.time_ns()}-" .. number
  return wrk.format()
end
"""
    return load_by_wrk(service.port, 64, script)


WRK = f"""
wrk.method, wrk.path, wrk.body = "POST", "/webhook", [[{SAMPLE}]]
wrk.headers["X-Token"], wrk.headers["Content-Type"] = "{TOKEN}", "application/json"
function done(summary, latency)
  local bad = summary.errors  -- those of status are among the requests
  print(1e6 * (summary.requests - bad.status) / summary.duration,
    latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    bad.status + bad.connect + bad.read + bad.write + bad.timeout)
end
"""


def load_by_wrk(port, connections, text=WRK):
    with tempfile.NamedTemporaryFile("w", suffix=".lua") as script:
        script.write(text)
        script.flush()
        how = ["-t1", f"-c{connections}", f"-d{SECONDS}s", "-s", script.name]
        command = ["wrk", *how, f"http://127.0.0.1:{port}"]
        output = subprocess.check_output(command, text=True)
    return Load(*map(float, output.splitlines()[-1].split()))


def load_by_hey(port, connections):
    how = f"-z {SECONDS}s -c {connections} -m POST -T application/json -H".split()
    what = [f"X-Token: {TOKEN}", "-d", SAMPLE, f"http://127.0.0.1:{port}/webhook"]
    output = subprocess.check_output(["hey", *how, *what], text=True)

    def number(pattern):
        return sum(map(float, re.findall(pattern, output)))  # 0 where there is none

    good = number(r"\[200\]\s+(\d+) responses")
    failed = number(r"\[\d+\]\s+(\d+) responses") - good + number(r"\[(\d+)\]\s+Post")
    seconds = number(r"Total:\s+([\d.]+) secs")
    p50, p99 = (1000 * number(rf"{n}% in ([\d.]+) secs") for n in (50, 99))
    return Load(good / seconds, p50, p99, failed)


def load_by_client(port, connections, seconds=SECONDS, each=math.inf):
    command = own_command("client", port, connections, seconds, each)
    return Load(*json.loads(subprocess.check_output(command, timeout=120)))


# What is measured: rows of (what, figures), or with (target, whether it is met)


def keep_alive(connections):
    top, taken = [], []
    with Service() as service, special("ceiling") as constant:
        for _ in range(ROUNDS):
            top.append(load(constant, connections))
            taken.append(load(service, connections))
        stored = count(service.db, "pendente")
    share = [100 * this.rate / best.rate for this, best in zip(taken, top)]
    share = statistics.median(share)
    answered = sum(some.rate for some in taken) * SECONDS
    assert stored >= 0.98 * answered, f"{answered} answers but {stored} messages"
    taken = Load.median(taken)
    swift = ("p99 < 100 ms", taken.p99 < 100) if connections == 256 else ()
    ample = ("at least 75 %", share >= 75) if connections > 1 else ()
    yield "durable accepts", str(taken), *swift
    yield "ceiling", str(Load.median(top))
    yield "accepts of ceiling", f"{share:6.1f} %", *ample


def burst():
    with Service() as service:
        loads = [load_by_client(service.port, 500, 60, 10) for _ in range(ROUNDS)]
    taken = Load.median(loads)
    met = taken.p99 < 400 and not taken.failed
    yield "5,000 on 500 new", str(taken), "p99 < 400 ms, 0 failed", met


def memory():
    with Service() as service:
        for when in ("idle", "idle after a load"):
            status = pathlib.Path(f"/proc/{service.process.pid}/status").read_text()
            size = int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) / 1024
            yield when, f"{size:6.1f} MB", "< 60 MB", size < 60
            load(service, 256)


def claims():
    """Claims with 1,000 to 1,000,000 messages waiting, and each message settled."""
    spent = {size: ([], []) for size in (1_000, 100_000, 1_000_000)}
    with contextlib.ExitStack() as stack:
        lines = {}
        for size in spent:
            service = Service()
            fill(service.db, size + ROUNDS * CLAIMS * LIMIT)
            lines[size] = stack.enter_context(service).connect()
        for size in list(spent) * ROUNDS:
            for _ in range(CLAIMS):
                claim_and_settle(lines[size], *spent[size])
    for size, times in spent.items():
        claim, settle = spent[size] = [*map(statistics.median, times)]
        yield f"claim of {size:,}", f"{LIMIT / claim:6,.0f}/s  {claim * 1e3:.2f} ms"
        yield f"settle of {size:,}", f"{1 / settle:6,.0f}/s  {settle * 1e3:.2f} ms"
    ratio = spent[1_000_000][0] / spent[1_000][0]
    yield "claim, most / least", f"{ratio:6.2f}", "at most 2", ratio <= 2


def claim_and_settle(line, claim, settle):
    def ask(path):
        line.request("POST", path, headers={"X-Token": TOKEN})
        answer = line.getresponse()
        assert answer.status == 200, answer.status
        return json.loads(answer.read())

    seconds, items = timed(ask, f"/fila/pegar?limite={LIMIT}")
    assert len(items) == LIMIT, len(items)
    claim.append(seconds)
    settle.extend(timed(ask, f"/fila/{item['id']}/processado")[0] for item in items)


def purge():
    """Webhooks with and without a purge of 500,000 messages behind them.

    It ends with the service, after a round; the next goes on with what is left.
    """
    calm, busy, deleted = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        fill(pathlib.Path(folder, "b.sqlite"), 500_000, settled=True)
        for _ in range(ROUNDS):
            with special("purging", folder) as service:
                calm.append(load(service, 64))
                before = count(service.db, "processado")
                pathlib.Path(folder, "purge").touch()
                busy.append(load(service, 64))
                left = count(service.db, "processado")
                pathlib.Path(folder, "purge").unlink()
            assert 0 < left < before, "the purge did not go on all the time"
            deleted.append((before - left) / SECONDS)
    ratio = statistics.median(b.p99 / c.p99 for b, c in zip(busy, calm))
    yield "quiet, 64", str(Load.median(calm))
    yield "purging, 64", str(Load.median(busy))
    yield "deleted meanwhile", f"{statistics.median(deleted):6,.0f}/s"
    yield "p99, purging / quiet", f"{ratio:6.2f}", "at most 3", ratio <= 3


def signatures():
    """Signed webhooks beside unsigned ones."""
    if load_tool() != "wrk":
        yield "not measured", "it takes wrk"
        return
    loads = {"unsigned": [], "signed": [], "signed, with an id": []}
    with Service(SECRET_META="secret", SECRET_GITHUB="secret") as service:
        for _ in range(ROUNDS):
            loads["unsigned"].append(load(service, 64))
            loads["signed"].append(signed_load(service, "meta"))
            loads["signed, with an id"].append(signed_load(service, "github"))
    for name, taken in loads.items():
        yield name, str(Load.median(taken))
    plain = loads.pop("unsigned")
    for name, taken in loads.items():
        pairs = zip(taken, plain, strict=True)
        share = 100 * statistics.median(some.rate / other.rate for some, other in pairs)
        goal = ("at least 85 %", share >= 85) if name == "signed" else ()
        yield f"{name} / not", f"{share:6.1f} %", *goal


def waiters():
    """Webhooks beside 500 consumers that wait for a source from which nothing comes."""
    alone, beside = [], []
    with Service() as service:
        path = "/fila/pegar?espera=60&fonte=nobody"
        for _ in range(ROUNDS):
            alone.append(load(service, 64))
            with contextlib.ExitStack() as stack:
                for _ in range(500):
                    stack.enter_context(dial(service.port, http_post(b"", path=path)))
                beside.append(load(service, 64))
    pairs = zip(beside, alone, strict=True)
    share = 100 * statistics.median(some.rate / other.rate for some, other in pairs)
    yield "without waiters", str(Load.median(alone))
    yield "500 waiters", str(Load.median(beside))
    yield "with / without", f"{share:6.1f} %"


def delivery():
    """Webhooks beside delivery to a quick target, and how quick delivery is."""
    rates, loads = {}, {}
    with special("ceiling") as target, contextlib.ExitStack() as stack:
        url = f"http://127.0.0.1:{target.port}/webhook"
        ways = {f"push, {n} at once": (url, n) for n in (1, 16)}
        if importlib.util.find_spec("pika") and os.path.exists(Broker.SERVER):
            broker = Broker()
            stack.callback(broker.close)
            with broker.channel() as channel:
                quorum = {"x-queue-type": "quorum"}
                channel.queue_declare("bench", durable=True, arguments=quorum)
            ways["relay"] = f"{broker.url}?routing_key=bench", 1
        for _ in range(ROUNDS):
            for way, (where, workers) in ways.items():
                how = {"FORWARD_URL": where, "FORWARD_CONCURRENCY": workers}
                number = 20_000 if way == "relay" else 2_000
                rates.setdefault(way, []).append(delivered(how, number))
                with Service() as alone, Service(**how) as service:
                    pair = load(alone, 64), load(service, 64)
                loads.setdefault(way, []).append(pair)
            if "relay" in ways:
                rates.setdefault("one confirm at a time", []).append(confirmed(broker))
    for way, found in rates.items():
        yield way, f"{statistics.median(found):6,.0f}/s delivered"
    if "relay" in ways:
        pairs = zip(rates["relay"], rates["one confirm at a time"], strict=True)
        ratio = statistics.median(many / one for many, one in pairs)
        yield "relay / one", f"{ratio:6.2f}", "at least 3", ratio >= 3
    for way, pairs in loads.items():
        share = 100 * statistics.median(busy.rate / calm.rate for calm, busy in pairs)
        yield f"64, {way}", str(Load.median([busy for _, busy in pairs]))
        yield "with / without", f"{share:6.1f} %"


def delivered(settings, number):
    """Messages per second out of a file with so many."""
    with tempfile.TemporaryDirectory() as folder:
        fill(pathlib.Path(folder, "b.sqlite"), number)
        with Service(folder, **settings) as service:
            began = time.perf_counter()
            while count(service.db, "processado") < number:
                time.sleep(0.01)
            return number / (time.perf_counter() - began)


def confirmed(broker, number=500):
    """Messages per second when each waits for its confirm, as pika does by itself."""
    channel = broker.channel()
    channel.confirm_delivery()
    what = broker.pika.BasicProperties(delivery_mode=2)
    began = time.perf_counter()
    for _ in range(number):
        channel.basic_publish("", "bench", SAMPLE.encode(), what, mandatory=True)
    seconds = time.perf_counter() - began
    channel.connection.close()
    return number / seconds


def latency():
    """From the sender's 200 to the target's first byte, with nothing else to do."""
    took = []
    target = Answers()
    with Service(FORWARD_URL=target.url) as service:
        line = service.connect()
        for number in range(200):
            line.request("POST", "/webhook", b"x", {"X-Token": TOKEN})
            line.getresponse().read()
            answered = time.perf_counter()
            while len(target.requests) <= number:
                time.sleep(0.0002)
            took.append(time.perf_counter() - answered)
    p50 = 1000 * statistics.median(took)
    yield "200 to the target", f"p50 {p50:6.2f} ms", "p50 < 20 ms", p50 < 20


def calls():
    """Each call of a consumer on files of 1,000 and 1,000,000 messages in all states."""
    spent = {}
    with contextlib.ExitStack() as stack:
        lines = {}
        for size in (1_000, 1_000_000):
            service = Service(MAX_ATTEMPTS=1000)
            fill(service.db, 2 * size, mixed=True)
            lines[size] = stack.enter_context(service).connect()
        for _ in range(ROUNDS * 4):
            for size, line in lines.items():
                for name, seconds in consumer_calls(line):
                    spent.setdefault(name, {}).setdefault(size, []).append(seconds)
        for _ in range(ROUNDS):
            took = timed(settle_like_n8n, service, lines[size])[0]
            spent.setdefault("50 at once", {}).setdefault(size, []).append(took)
    for name, sizes in spent.items():
        medians = [1000 * statistics.median(times) for times in sizes.values()]
        figures = "  ".join(f"{median:6.2f} ms" for median in medians)
        ratio = medians[-1] / medians[0]
        goal = ("at most 2", ratio <= 2) if len(medians) > 1 else ()
        yield name, f"{figures}  ratio {ratio:.2f}", *goal


def consumer_calls(line):
    """Makes each call once; yields its name and the seconds it took."""

    def ask(method, path, value=None):
        body = json.dumps(value) if value else None
        line.request(method, path, body, {"X-Token": TOKEN})
        answer = line.getresponse()
        text = answer.read()
        assert answer.status < 300, (path, answer.status, text)
        return json.loads(text) if text else None

    def measured(name, *call):
        seconds, answer = timed(ask, *call)
        found.append((name, seconds))
        return answer

    found = []
    ids = [item["id"] for item in measured("claim 50", "POST", "/fila/pegar")]
    measured("settle one", "POST", f"/fila/{ids[0]}/processado")
    measured("extend one", "POST", f"/fila/{ids[1]}/estender")
    measured("return one", "POST", f"/fila/{ids[2]}/devolver?em=9999")
    measured("fail one", "POST", f"/fila/{ids[3]}/erro")
    measured("replay one", "POST", f"/fila/{ids[3]}/reenviar")
    measured("settle 46", "POST", "/fila/processado", {"ids": ids[4:]})
    measured("claim, max=10", "POST", "/fila/pegar?max=10")
    measured("list dead", "GET", "/fila?status=erro")
    measured("list waiting", "GET", "/fila?status=pendente")
    measured("look at one", "GET", f"/fila/{ids[0]}")
    measured("erase one", "DELETE", f"/fila/{ids[0]}")
    return found


def settle_like_n8n(service, line):
    """50 verdicts at once, each on a connection of its own."""
    line.request("POST", "/fila/pegar", headers={"X-Token": TOKEN})
    items = json.loads(line.getresponse().read())
    with ThreadPoolExecutor(50) as pool:
        path = "/fila/{}/processado"
        answers = [
            pool.submit(service.call, "POST", path.format(item["id"])) for item in items
        ]
    assert {answer.result()[0] for answer in answers} == {200}


def seen():
    """GET /metrics and the page with 5,000,000 messages in all states, and senders
    beside each, asked for every second."""
    service = Service(METRICS_TOKEN="m")
    yield "filled", f"{timed(fill, service.db, 5_000_000, False, True)[0]:6.1f} s"
    page = ("/painel", "/painel/dados", "/fila?ordem=desc&limite=26")
    with service:
        for name, paths, most in ("metrics", ["/metrics"], 50), ("page", page, 300):
            yield from asked(service, name, paths, most)


def asked(service, name, paths, most):
    """How long `paths` take one after the other, alone and under load; what it costs."""
    alone, beside, calm, busy = [], [], [], []

    def ask(times):
        seconds, answers = timed(lambda: [service.call("GET", path) for path in paths])
        assert {status for status, *_ in answers} == {200}, answers
        times.append(1000 * seconds)

    def ask_each_second():
        while not over.wait(1):
            ask(busy)

    for _ in range(20):
        ask(calm)
    for _ in range(ROUNDS):
        alone.append(load(service, 64))
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(ask_each_second)
            beside.append(load(service, 64))
            over.set()
            asking.result()
    for when, times in ("alone", calm), ("under load", busy):
        figures = f"{statistics.median(times):6.1f} ms  worst {max(times):6.1f} ms"
        yield f"{name} {when}", figures, f"all < {most} ms", max(times) < most
    ratio = statistics.median(b.p99 / a.p99 for b, a in zip(beside, alone))
    yield "webhooks, 64", str(Load.median(alone))
    yield f"{name} each second", str(Load.median(beside))
    yield "p99, asked / not", f"{ratio:6.2f}", "at most 2", ratio <= 2


def fill(path, number, settled=False, mixed=False):
    """Makes a file with so many messages of 30 days ago, all alike."""
    store = buffer.Store(str(path), clock=lambda: time.time() - 30 * 86400)
    headers = '{"host":"127.0.0.1:8080","content-type":"application/json"}'
    store.webhook(SAMPLE.encode(), method="POST", headers=headers)
    if settled:
        store.processado([1])
    store.close()
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = OFF")  # twice as fast; COMMIT syncs
        columns = [name for _, name, *_ in db.execute("PRAGMA table_info(fila)")]
        names = ", ".join(columns[1:])  # without id
        row = db.execute(f"SELECT {names} FROM fila").fetchone()
        insert = f"INSERT INTO fila ({names}) VALUES ({', '.join('?' * len(row))})"
        db.executemany(insert, itertools.repeat(row, number - 1))
        if mixed:  # half are waiting, the others leased, delayed, done and dead
            later = "datetime('now', '+1 day')"
            for part, change in enumerate(
                (
                    f"status = 'processando', lease_until = {later}",
                    f"available_at = {later}",
                    "status = 'processado', settled_at = datetime('now')",
                    "status = 'erro', settled_at = datetime('now')",
                )
            ):
                db.execute(f"UPDATE fila SET {change} WHERE id % 8 = {part}")


def converse(path):
    """Gives a file of fill() conversations of ten messages each: of 100 people who write
    at once, every other one in this very moment."""
    with contextlib.closing(sqlite3.connect(path)) as db, db:
        db.execute("PRAGMA journal_mode = OFF")
        db.execute(
            "UPDATE fila SET group_key = '5511' || (id / 1000 * 100 + id % 100),"
            " created_at = iif(id % 2, created_at, datetime('now'))"
        )
    with contextlib.closing(buffer.Store(str(path), grouped=True)) as store:
        while store.gather(20000):
            pass


def keyed():
    """Webhooks of 10,000 people, with GROUP_KEY and without."""
    if load_tool() != "wrk":
        yield "not measured", "it takes wrk"
        return
    path, key = "$.data.key.remoteJid", '"key":{"remoteJid":"5511]] .. n .. [["}'
    body = SAMPLE.replace('"conversation"', f'{key},"conversation"')
    script = (
        WRK.replace(SAMPLE, "")
        + f"""
function request()
  local n = math.random(10000, 19999)
  return wrk.format(nil, nil, nil, [[{body}]])
end
"""
    )
    loads = [], []
    with Service() as without, Service(GROUP_KEY=path) as grouped:
        for _ in range(ROUNDS):
            for service, taken in zip((without, grouped), loads):
                taken.append(load_by_wrk(service.port, 64, script))
        sql = "SELECT count(DISTINCT group_key) FROM fila"
        with contextlib.closing(sqlite3.connect(grouped.db)) as db:
            assert db.execute(sql).fetchone()[0] > 2000
    yield "without a key", str(Load.median(loads[0]))
    yield "with GROUP_KEY", str(Load.median(loads[1]))
    share = 100 * statistics.median(g.rate / w.rate for w, g in zip(*loads))
    yield "with / without", f"{share:6.1f} %", "at least 95 %", share >= 95


def conversations():
    """Claims of 50 conversations beside plain claims of as many, and of as many messages.

    500 messages cost more than three times 50 however they are claimed: of each the row
    is written, the payload read, checked and sent.
    """
    few, many, single, grouped = [], [], [], []
    plain = few, "limite=50", 50, 50
    ten_each = grouped, "limite=50&agrupar=86400", 50, 500
    turns = (  # plain claims are left what is not silent
        *(ten_each, plain, ten_each, (many, "limite=500", 500, 500)) * (ROUNDS * 2),
        *(plain, (single, "limite=50&serie=1", 50, 50)) * (ROUNDS * 2),
    )
    service = Service(GROUP_KEY="X-Key")
    fill(service.db, 1_000_000)
    converse(service.db)
    with service, contextlib.closing(service.connect()) as line:
        for times, query, number, messages in turns:
            seconds, text = timed(ask, line, f"/fila/pegar?{query}")
            times.append(seconds)
            found = json.loads(text)
            ids = [id_ for item in found for id_ in item.get("ids") or [item["id"]]]
            assert (len(found), len(ids)) == (number, messages), (len(found), len(ids))
            ask(line, "/fila/processado", json.dumps({"ids": ids}))
    few, many, single, grouped = (
        1000 * statistics.median(times) for times in (few, many, single, grouped)
    )
    yield "50 messages", f"{few:6.2f} ms"
    yield "500 messages", f"{many:6.2f} ms, {many / few:.1f} times as much"
    yield "50 with serie=1", f"{single:6.2f} ms"
    yield "50 conversations", f"{grouped:6.2f} ms, of ten messages each"
    for what, ratio, reading in (
        ("serie=1", single / few, "50 messages, of as many conversations / 50"),
        ("per message", grouped / many, "500 messages, of 50 conversations / 500"),
        ("per conversation", grouped / few, "50 conversations, of 500 messages / 50"),
    ):
        yield what, f"{ratio:6.2f}  {reading}", "at most 3", ratio <= 3


def ask(line, path, body=None):
    """The answer to a POST, which must be good."""
    line.request("POST", path, body, {"X-Token": TOKEN})
    answer = line.getresponse()
    text = answer.read()
    assert answer.status == 200, (path, answer.status, text)
    return text


def count(path, status):
    with contextlib.closing(sqlite3.connect(path)) as db:
        sql = "SELECT count(*) FROM fila WHERE status = ?"
        return db.execute(sql, [status]).fetchone()[0]


MEASURES = {
    "1 connection": functools.partial(keep_alive, 1),
    "64 connections": functools.partial(keep_alive, 64),
    "256 connections": functools.partial(keep_alive, 256),
    "burst": burst,
    "memory": memory,
    "claim, settle": claims,
    "purge": purge,
    "signatures": signatures,
    "waiters": waiters,
    "delivery": delivery,
    "latency": latency,
    "calls": calls,
    "metrics, page": seen,
    "keyed": keyed,
    "conversations": conversations,
}


# Running them


class Result(unittest.TextTestResult):
    """testsRun counts skipped tests in some Pythons and not in others."""

    passed = 0

    def addSuccess(self, test):
        super().addSuccess(test)
        self.passed += 1


def chosen(suite, words):
    """The tests of a suite whose names hold one of the words."""
    for test in suite:
        if isinstance(test, unittest.TestSuite):
            yield from chosen(test, words)
        elif not words or any(word.lower() in test.id().lower() for word in words):
            yield test


# Subprocesses of the tests and of the benchmark run this file with one of these words.
ENTRIES = {f.__name__: f for f in (ceiling, purging, with_a_clock, client, target)}


def main():
    if sys.argv[1:2] == ["bench"]:
        return bench(sys.argv[2:])
    if sys.argv[1:2] and sys.argv[1] in ENTRIES:
        return ENTRIES[sys.argv[1]](*sys.argv[2:])
    words = [word for word in sys.argv[1:] if not word.startswith("-")]
    buffer.descriptor_limit()
    warnings.filterwarnings(
        "error", category=DeprecationWarning, module="buffer"
    )  # what a newer Python refuses
    loaded = unittest.defaultTestLoader.loadTestsFromModule(sys.modules[__name__])
    tests = unittest.TestSuite(chosen(loaded, words))
    runner = unittest.TextTestRunner(verbosity=2, resultclass=Result, warnings=False)
    result = runner.run(tests)
    for test, reason in result.skipped:
        print(f"skipped {test}: {reason}")
    failed = len(result.failures) + len(result.errors)
    print(f"{result.passed} passed, {failed} failed, {len(result.skipped)} skipped")
    return not result.wasSuccessful()


if __name__ == "__main__":
    sys.exit(main())
